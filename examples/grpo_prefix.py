"""Train on answers that share a prompt: one tree in one row, against a row for each answer.

    python examples/grpo_prefix.py                     seconds, on a CPU too; --plot mask.png draws the tree's mask

GRPO samples several answers to a prompt and weights the log-probability of each by its advantage. With a row for each
answer every layer computes the prompt once for each of them. ``masks.prefix_tree`` computes it once: all answers follow
the prompt in one row, every token sees the prompt and its own answer, and positions continue from the prompt. Loss and
gradients are the same. A small Llama with random weights shows this, with tokens per second and the memory of both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from fused_rope_attn import masks, rope_attention, rope_tables

HEADS, HEADS_KV, HEAD_DIM, VOCABULARY = 8, 2, 64, 512
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """Attention and a gated MLP on hidden states (B, N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], mask: dict[str, Any]) -> Tensor:
        qkv = self.qkv(rms_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((HEADS, HEADS_KV, HEADS_KV), dim=2)
        x = x + self.o(rope_attention(q, k, v, *tables, layout="bshd", **mask).flatten(2))
        gate, up = self.up(rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.unembedding = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, tables: tuple[Tensor, Tensor], mask: dict[str, Any]) -> Tensor:
        """Return the log-probabilities (B, N, VOCABULARY) of the tokens that follow each of ``tokens`` (B, N)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, tables, mask)
        return self.unembedding(rms_norm(x, (WIDTH,))).float().log_softmax(-1)


def loss_of_rows(model: Llama, prompt: Tensor, answers: list[Tensor], advantages: Tensor) -> Tensor:
    """Return the loss from a row for each answer, (answers, prompt + longest answer), padded on the right."""
    longest = max(map(len, answers))
    rows = torch.stack([torch.cat((prompt, x, x.new_zeros(longest - len(x)))) for x in answers])
    tables = rope_tables(rows.shape[1], HEAD_DIM, device=rows.device)
    found = model(rows, tables, {"causal": True})[:, len(prompt) - 1 : -1]
    logs = found.gather(2, rows[:, len(prompt) :, None])[..., 0]
    sums = torch.stack([row[: len(x)].sum() for row, x in zip(logs, answers)])
    return -(advantages * sums).sum() / sum(map(len, answers))


def loss_of_tree(model: Llama, prompt: Tensor, answers: list[Tensor], advantages: Tensor) -> Tensor:
    """Return the loss from one row, the prompt and then all answers."""
    lengths = [len(x) for x in (prompt, *answers)]
    starts, ends, positions = masks.prefix_tree([-1] + [0] * len(answers), lengths, device=prompt.device)
    tables = tuple(x[positions] for x in rope_tables(int(positions.max()) + 1, HEAD_DIM, device=prompt.device))
    tokens = torch.cat((prompt, *answers))
    found = model(tokens[None], tables, {"query_starts": starts, "query_ends": ends})[0]
    # The row before a token predicts it; the prompt's last row predicts the first token of every answer.
    before = torch.arange(len(prompt), len(tokens), device=prompt.device) - 1
    firsts = torch.tensor(lengths[:-1], device=prompt.device).cumsum(0) - len(prompt)
    before[firsts] = len(prompt) - 1
    logs = found[before].gather(1, tokens[len(prompt) :, None])[:, 0]
    weights = advantages.repeat_interleave(torch.tensor(lengths[1:], device=prompt.device))
    return -(weights * logs).sum() / len(logs)


def measure(function: Any, model: Llama, repeats: int, *arguments: Any) -> tuple[Tensor, list[Tensor], float, int]:
    """Return the loss, the gradients, the seconds of a training step, and the peak of its memory in bytes (CUDA)."""
    cuda = arguments[0].is_cuda
    times = []
    for _ in range(repeats):
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = function(model, *arguments)
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return loss.detach(), [x.grad.clone() for x in model.parameters()], sorted(times)[repeats // 2], peak


def plot(path: str, prompt: Tensor, answers: list[Tensor]) -> None:
    """Draw which rows see which keys of the tree."""
    import matplotlib.pyplot as plt

    starts, ends, _ = masks.prefix_tree([-1] + [0] * len(answers), [len(x) for x in (prompt, *answers)])
    row = torch.arange(starts.shape[1])[:, None]
    plt.imshow(((row >= starts) & (row < ends)).tolist(), cmap="Greens")
    plt.xlabel("key")
    plt.ylabel("query row")
    plt.savefig(path)


def main(argv: list[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096 if on_gpu else 96, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=1024 if on_gpu else 32, help="tokens of the longest answer")
    parser.add_argument("--answers", type=int, default=8, help="answers to the prompt")
    parser.add_argument("--layers", type=int, default=4 if on_gpu else 2, help="layers of the model")
    parser.add_argument("--repeats", type=int, default=5, help="steps of which the median time is printed")
    parser.add_argument("--plot", help="draw the mask of the tree into this file (needs matplotlib)")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Llama(args.layers).to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    prompt = torch.randint(VOCABULARY, (args.prompt,), device=args.device)
    lengths = [max(1, args.answer - i * args.answer // 16) for i in range(args.answers)]
    answers = [torch.randint(VOCABULARY, (length,), device=args.device) for length in lengths]
    advantages = torch.linspace(-1, 1, args.answers, device=args.device)
    found = {}
    for name, function in (("rows", loss_of_rows), ("tree", loss_of_tree)):
        found[name] = measure(function, model, args.repeats, prompt, answers, advantages)
        loss, _, seconds, peak = found[name]
        memory = f", {peak / 2**30:.2f} GiB" if peak else ""
        print(f"{name}: loss {loss:.6f}, {sum(lengths) / seconds:,.0f} answer tokens/s{memory}")
    (loss, grads, slow, _), (tree_loss, tree_grads, fast, _) = found.values()
    apart = max(((x - y).norm() / x.norm()).item() for x, y in zip(grads, tree_grads))
    print(f"losses differ by {(loss - tree_loss).abs():.1e}, gradients by {apart:.1e} of their norm")
    print(f"the tree takes {fast / slow:.2f} of the rows' time")
    if args.plot:
        plot(args.plot, prompt, answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
