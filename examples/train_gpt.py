"""Train a small hand-written GPT twice, with separate steps and with fused attention: losses, tokens per second.

    python examples/train_gpt.py                       # on a GPU
    python examples/train_gpt.py --compile             # the same under torch.compile
    python examples/train_gpt.py --steps 20 --small    # on a CPU

The model is in the style of nanochat and needs no framework: rotation with the opposite sign, norms without weights
after the rotation, squared ReLU. Only one function differs between both trainings. docs/guides/hand-written.md explains
it. The text is this repository's own notes on its experiments, byte by byte.
"""

import argparse
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--text", type=Path, default=ROOT / "docs" / "experiments", help="a file, or a folder of .md files")
parser.add_argument("--steps", type=int, default=50, help="of training, for each way")
parser.add_argument("--small", action="store_true", help="a model and batches that a CPU can train")
parser.add_argument("--compile", action="store_true", help="the model by torch.compile")
args = parser.parse_args()

# After the arguments, so that --help needs none of them.
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from fused_rope_attn import rope_attention, rope_tables  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
layers, width, heads, kv_heads, rows, length = (2, 64, 4, 2, 4, 128) if args.small else (12, 768, 6, 2, 8, 4096)


# %% attention in both ways
def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # (N, 1, D/2)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


def separate_attention(q, k, v, cos, sin):  # (B, N, H, D), tables (N, D/2)
    q, k = (F.rms_norm(rotate(x, cos, sin), x.shape[-1:]) for x in (q, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def fused_attention(q, k, v, cos, sin):  # (B, N, H, D), tables (N, D/2)
    ones = torch.ones(q.shape[-1], device=q.device)
    norms = {"q_norm": ones, "k_norm": ones, "norm_eps": torch.finfo(torch.float32).eps}
    return rope_attention(q, k, v, cos, -sin, causal=True, layout="bshd", **norms)


# %% the model
def norm(x):
    return F.rms_norm(x, x.shape[-1:])


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.head_dim = attend, width // heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.to_v = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (to(x).unflatten(-1, (-1, self.head_dim)) for to in (self.to_q, self.to_k, self.to_v))
        return self.project(self.attend(q, k, v, cos, sin).flatten(-2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.project(F.relu(self.widen(x)).square())


class GPT(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.ModuleList((Attention(attend), MLP())) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        cos, sin = rope_tables(length, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            std = 0.0 if "project" in name else 1.0 if "embedding" in name else width**-0.5
            nn.init.normal_(parameter, std=std)

    def forward(self, ids, targets):
        x = norm(self.embedding(ids))
        for attention, mlp in self.blocks:
            x = x + attention(norm(x), self.cos, self.sin)
            x = x + mlp(norm(x))
        return F.cross_entropy(self.head(norm(x)).float().flatten(0, 1), targets.flatten())


# %% training, the same for both
files = sorted(args.text.glob("*.md")) if args.text.is_dir() else [args.text]
text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def batches():
    """Yield the same random pieces of the text in every training: inputs and targets, (rows, length) each."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
        ids = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        yield ids[:, :-1], ids[:, 1:]


def train(attend):
    """Return the losses of all steps, and tokens per second after the first fifth, in which kernels are compiled."""
    torch.manual_seed(0)
    model = GPT(attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses, warm = [], args.steps // 5
    step_of = torch.compile(model) if args.compile else model
    for step, (ids, targets) in enumerate(batches()):
        if step == warm:
            torch.cuda.synchronize() if device == "cuda" else None
            begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = step_of(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).cpu()
    return losses, (args.steps - warm) * rows * length / (time.perf_counter() - begin)


plain_losses, plain_speed = train(separate_attention)
losses, speed = train(fused_attention)
for name, (first, *_, last), rate in (
    ("separate_attention", plain_losses, plain_speed),
    ("fused_attention", losses, speed),
):
    print(f"{name:18} {rate:10.0f} tokens/s, first loss {first:.4f}, last {last:.4f}")
apart = (losses - plain_losses).abs().max()
print(f"{speed / plain_speed:.2f} times as fast; the losses differ by {apart:.1e} at most")
