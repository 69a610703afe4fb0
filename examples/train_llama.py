"""Train a small Llama twice, as transformers has it and patched: equal loss curves, tokens per second, a text.

    python examples/train_llama.py                            # on a GPU, about a minute; writes train_llama.png
    python examples/train_llama.py --steps 20 --small         # on a CPU

The text is this repository's own notes on its experiments, byte by byte. Needs the extra `hf`, which is
transformers, and matplotlib for the plot: `pip install '.[hf]' matplotlib` in a checkout.
"""

import argparse
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--text", type=Path, default=ROOT / "docs" / "experiments", help="a file, or a folder of .md files")
parser.add_argument("--steps", type=int, default=300, help="of training, for each model")
parser.add_argument("--small", action="store_true", help="a model and batches that a CPU can train")
parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"), help="the plot")
args = parser.parse_args()

# Behind the arguments, so that --help needs none of them.
import torch  # noqa: E402
import transformers  # noqa: E402

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
layers, width, heads, rows, length = (2, 64, 4, 4, 128) if args.small else (8, 512, 8, 16, 2048)

# %% the text: one token a byte
files = sorted(args.text.glob("*.md")) if args.text.is_dir() else [args.text]
text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def batches(steps):
    """The same random pieces of the text for both models: (rows, length) token ids."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (rows,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts]).to(device)


# %% the model; patching it is one line
def make():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(device)


def train(model):
    """Losses of all steps, and tokens per second after the first tenth of them (kernels compile in the first)."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, args.steps, pct_start=0.2)
    losses, warm = [], args.steps // 10
    for step, ids in enumerate(batches(args.steps)):
        if step == warm:
            torch.accelerator.synchronize() if device == "cuda" else None
            begin = time.perf_counter()
        with torch.autocast(device, dtype, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack([loss.cpu() for loss in losses])
    return losses, (args.steps - warm) * rows * length / (time.perf_counter() - begin)


plain_losses, plain_speed = train(make())
patched = patch_model(make())
losses, speed = train(patched)
apart = (losses - plain_losses).abs()
print(f"sdpa        {plain_speed:10.0f} tokens/s, last loss {plain_losses[-1]:.4f}")
print(f"patch_model {speed:10.0f} tokens/s, last loss {losses[-1]:.4f}, {speed / plain_speed:.2f} times as fast")
print(f"the losses are {apart.mean():.1e} apart in the mean, {apart.max():.1e} at most")

# %% a text, by the patched model and by the same weights unpatched
prompt = torch.tensor([list(b"## 2026-11-21: ")]).to(device)
for change in (patch_model, unpatch_model):
    model = change(patched).eval().to(dtype)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 200, "pad_token_id": 0}
    out = model.generate(prompt, do_sample=False, **options)
    print(f"\n{change.__name__}: {bytes(out[0].tolist()).decode(errors='replace')}")


# %% both curves
def plot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 1), layout="constrained")
    left.plot(plain_losses, color="0.6", linewidth=4, label="sdpa")
    left.plot(losses, color="tab:blue", linewidth=1, label="patch_model")
    left.set(xlabel="step", ylabel="loss, nats a byte", title=f"Llama, {layers} layers of {width}, {length} tokens")
    left.legend()
    bars = right.bar(["sdpa", "patch_model"], [plain_speed / 1e3, speed / 1e3], color=["0.6", "tab:blue"])
    right.bar_label(bars, fmt="%.0f")
    right.set(title="1000 tokens/s", ylim=(0, 1.15 * max(plain_speed, speed) / 1e3))
    figure.savefig(args.out, dpi=120)


try:
    plot()
    print(f"wrote {args.out}")
except ModuleNotFoundError as missing:
    print(f"no plot was written, since {missing.name} is not installed")
