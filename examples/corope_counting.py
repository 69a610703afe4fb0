"""Co-RoPE against RoPE where distance should be counted in content: recall the n-th marked token before the end.

    python examples/corope_counting.py          a few minutes on a CPU; writes examples/corope_counting.png, where
                                                matplotlib is installed

A sequence is random letters, some of which are marked, and ends in a query "n". The answer is the n-th marked letter
from the end: a head that measures distance in marked letters finds it at distance n, however many unmarked ones lie
between, while positions alone say nothing about it. The same two-layer model is trained with both attentions, same
seeds, same batches; the plot shows every run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_rope_attn import rope_attention, rope_tables
from fused_rope_attn.experimental import corope_attention

LETTERS, MOST = 8, 4  # letters to choose from; n is 1 to MOST
HEADS, HEADS_KV, WIDTH = 4, 2, 64
COLORS = {"RoPE": "tab:gray", "Co-RoPE": "tab:blue"}


def batch(size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (size, length) and answers (size,). Token: letter, + LETTERS if marked; then the queries 1 .. MOST."""
    letters = torch.randint(0, LETTERS, (size, length), generator=generator)
    rate = 0.2 + 0.4 * torch.rand(size, 1, generator=generator)  # another density in every sequence
    marked = torch.rand(size, length, generator=generator) < rate
    marked[:, :MOST] = True  # there is always an n-th one
    marked[:, -1] = False
    n = torch.randint(1, MOST + 1, (size,), generator=generator)
    from_end = marked.flip(1).cumsum(1).flip(1)
    where = ((from_end == n[:, None]) & marked).int().argmax(1)
    answers = letters.gather(1, where[:, None])[:, 0]
    tokens = letters + LETTERS * marked
    tokens[:, -1] = 2 * LETTERS + n - 1
    return tokens, answers


class Attention(nn.Module):
    """Grouped-query attention with one of the two rotations."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * HEADS_KV // HEADS, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q = self.q(x).view(size, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(size, length, 2 * HEADS_KV, -1).transpose(1, 2).chunk(2, 1)
        if self.kind == "Co-RoPE":
            o = corope_attention(q, k, v, base=100.0)
        else:
            cos, sin = rope_tables(length, q.shape[-1], base=100.0, device=x.device)
            o = rope_attention(q, k, v, cos, sin, causal=True)
        return self.out(o.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """Two pre-norm layers; the answer is read at the last token."""

    def __init__(self, kind: str):
        super().__init__()
        self.embed = nn.Embedding(2 * LETTERS + MOST, WIDTH)
        self.attention = nn.ModuleList(Attention(kind) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.read = nn.Linear(WIDTH, LETTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention, mlp in zip(self.norm, self.attention, self.mlp):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.read(self.norm[-1](x[:, -1]))


def train(kind: str, seed: int, options: argparse.Namespace) -> tuple[list[int], list[float], dict[int, float]]:
    """(steps, accuracy on fresh sequences at those steps, final accuracy by sequence length)."""
    torch.manual_seed(seed)
    model = Model(kind).to(options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=options.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 + seed)

    @torch.no_grad()
    def accuracy(length: int) -> float:
        tokens, answers = batch(512, length, torch.Generator().manual_seed(7))
        parts = [model(part.to(options.device)).argmax(-1).cpu() for part in tokens.split(128)]
        return float((torch.cat(parts) == answers).float().mean())

    steps, curve, start = [], [], time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens, answers = batch(options.batch, options.length, generator)
        loss = F.cross_entropy(model(tokens.to(options.device)), answers.to(options.device))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % max(1, options.steps // 10) == 0:
            steps.append(step)
            curve.append(accuracy(options.length))
    lengths = {length: accuracy(length) for length in (options.length, 2 * options.length, 4 * options.length)}
    print(f"{kind:8} seed {seed}: {lengths} in {time.perf_counter() - start:.0f} s", flush=True)
    return steps, curve, lengths


def plot(runs: list[tuple[str, int, tuple]], options: argparse.Namespace) -> None:
    """Write the figure of all runs: (kind, seed, what ``train`` returned)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for kind, seed, (steps, curve, lengths) in runs:
        label = kind if seed == 0 else None
        left.plot(steps, curve, color=COLORS[kind], label=label)
        right.plot(list(lengths), list(lengths.values()), "o-", color=COLORS[kind], label=label)
        right.set(xticks=list(lengths))
    for axis in (left, right):
        axis.axhline(1 / LETTERS, color="black", linewidth=0.7, linestyle=":")
        axis.set_ylim(0, 1)
    left.set(title=f"while training, {options.length} tokens", xlabel="step", ylabel="accuracy")
    right.set(title="trained model, other lengths", xlabel="tokens")
    right.legend()
    figure.suptitle(f"The n-th marked letter from the end: 2 layers, {options.seeds} seeds, dotted: chance")
    figure.savefig(options.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of training, for each model")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=24, help="tokens of a training sequence")
    parser.add_argument("--seeds", type=int, default=2, help="models of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_suffix(".png"), help="where it is written")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small: more threads would wait for one another

    runs = [(kind, seed, train(kind, seed, options)) for kind in COLORS for seed in range(options.seeds)]
    try:
        plot(runs, options)
        print(f"plot written to {options.plot}")
    except ModuleNotFoundError as missing:
        print(f"no plot was written, since {missing.name} is not installed")


if __name__ == "__main__":
    main()
