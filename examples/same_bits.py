"""Sample by the paged generation step in mixed batches, and recompute the log-probabilities in one training pass.

    python examples/same_bits.py            seconds on a GPU; about a minute on a CPU, where nothing is promised

A small Llama with random weights samples tokens for prompts of several lengths. Each step takes a random part of the
sequences, as a server does. A training pass then packs all sequences and computes the log-probability of every sampled
token again. Reinforcement learning takes the ratio of both for the ratio of two policies, so that it should be 1.

With ``batch_invariant=True`` attention has the same bits in both. The matrix products and norms around it are not in
this package's hands: here they run in float32 on blocks of a fixed number of rows, so that PyTorch takes the same
kernels whatever the batch is.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, silu

from fused_rope_attn import rope_attention_varlen, rope_attention_with_kvcache, rope_tables

LAYERS, HEADS, HEADS_KV, HEAD_DIM, VOCABULARY, PAGE, ROWS = 2, 8, 2, 64, 512, 16, 64
WIDTH = HEADS * HEAD_DIM


class Llama:
    """Weights, and everything but attention. Tokens are (T,), hidden states (T, WIDTH) in float32."""

    def __init__(self, device: str):
        torch.manual_seed(0)
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32
        shapes = {"qkv": (HEADS + 2 * HEADS_KV) * HEAD_DIM, "o": WIDTH, "gate": 2 * WIDTH, "up": 2 * WIDTH}
        self.layers = [
            {name: self._weight(WIDTH, columns) for name, columns in shapes.items()}
            | {"down": self._weight(2 * WIDTH, WIDTH)}
            for _ in range(LAYERS)
        ]
        self.embedding = self._weight(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.unembedding = 4 * self._weight(WIDTH, VOCABULARY)

    def _weight(self, rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) / rows**0.5).to(self.device)

    def run(self, tokens: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the log-probabilities (T, VOCABULARY) of the tokens that follow ``tokens`` (T,).

        attend: ``attend(layer, q, k, v)`` with q (T, HEADS, HEAD_DIM), k and v (T, HEADS_KV, HEAD_DIM) gives o like q.
        """
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = in_blocks(normed_product, x, layer["qkv"])
            q, k, v = qkv.to(self.dtype).unflatten(1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), dim=1)
            x = x + in_blocks(torch.matmul, attend(number, q, k, v).flatten(1).float(), layer["o"])
            x = x + in_blocks(mlp, x, layer["gate"], layer["up"], layer["down"])
        return in_blocks(normed_product, x, self.unembedding).log_softmax(-1)


def normed_product(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (WIDTH,)) @ weight


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x = rms_norm(x, (WIDTH,))
    return (silu(x @ gate) * (x @ up)) @ down


def in_blocks(function: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Apply ``function`` to ROWS rows of x (T, C) at a time; zeros fill the last block."""
    blocks = pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
    return torch.cat([function(block, *weights) for block in blocks])[: len(x)]


def sample(
    model: Llama, prompts: list[list[int]], count: int, options: dict
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample ``count`` tokens for each prompt: return the sequences, and the log-probabilities of the new tokens."""
    generator, draw = torch.Generator().manual_seed(1), random.Random(1)
    longest = max(map(len, prompts)) + count
    tables = rope_tables(longest + PAGE, HEAD_DIM, device=model.device)
    pages = -(-longest // PAGE)
    shape = (LAYERS, 2, len(prompts) * pages, HEADS_KV, PAGE, HEAD_DIM)
    caches = torch.zeros(shape, dtype=model.dtype, device=model.device)
    block_table = torch.randperm(len(prompts) * pages, generator=generator).int().view(len(prompts), pages)
    block_table = block_table.to(model.device)
    sequences, logs = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    done = [0] * len(prompts)  # tokens in the cache

    def step(chosen: list[int], tokens: list[list[int]]) -> Tensor:
        """Put as many tokens of each chosen sequence into its pages; log-probabilities after the last ones."""
        lens = torch.tensor([done[i] for i in chosen], dtype=torch.int32, device=model.device)
        table = block_table[chosen]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (len(chosen), -1)).transpose(1, 2) for x in (q, k, v))
            o = rope_attention_with_kvcache(
                q, *caches[layer], *tables, k, v, cache_seqlens=lens, block_table=table, **options
            )
            return o.transpose(1, 2).flatten(0, 1)

        flat = torch.tensor(tokens, device=model.device).flatten()
        return model.run(flat, attend).unflatten(0, (len(chosen), -1))[:, -1]

    following = []
    for i, prompt in enumerate(prompts):
        following.append(step([i], [prompt])[0])
        done[i] = len(prompt)
    while any(len(new) < count for new in logs):
        waiting = [i for i, new in enumerate(logs) if len(new) < count]
        chosen = draw.sample(waiting, draw.randrange(1, len(waiting) + 1))
        for i in chosen:
            token = int(torch.multinomial(following[i].exp().cpu(), 1, generator=generator))
            logs[i].append(float(following[i][token]))
            sequences[i].append(token)
        found = step(chosen, [sequences[i][-1:] for i in chosen])
        for i, log_probabilities in zip(chosen, found):
            following[i] = log_probabilities
            done[i] += 1
    return sequences, logs


def recompute(model: Llama, sequences: list[list[int]], options: dict) -> list[Tensor]:
    """Return the log-probabilities of all tokens of each sequence but the first, from one pass over all of them."""
    lengths = [len(sequence) for sequence in sequences]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=model.device)
    tables, longest = rope_tables(max(lengths), HEAD_DIM, device=model.device), max(lengths)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rope_attention_varlen(q, k, v, *tables, cu_seqlens, cu_seqlens, longest, longest, True, **options)

    tokens = torch.tensor(sum(sequences, []), device=model.device)
    parts = zip(model.run(tokens, attend).split(lengths), tokens.split(lengths))
    return [found[:-1].gather(1, part[1:, None]).flatten() for found, part in parts]


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    parser.add_argument("--prompts", default="5,17,64,130,300", help="the lengths of the prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    model, draw = Llama(args.device), random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in map(int, args.prompts.split(","))]
    for name, options in (("without the option", {}), ("batch_invariant=True", {"batch_invariant": True})):
        sequences, logs = sample(model, prompts, args.tokens, options)
        again = recompute(model, sequences, options)
        apart = torch.cat([(torch.tensor(a) - b[-len(a) :].cpu()).abs() for a, b in zip(logs, again)])
        print(
            f"{name}: {int((apart > 0).sum())} of {len(apart)} log-probabilities differ, by {apart.max():.1e} at most"
        )
    if args.device == "cpu":
        print("on a CPU the reference runs, which makes no promise")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
