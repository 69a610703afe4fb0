"""Sizes and values that every family draws: heads, lengths, rotary dims, masks, tables."""

from __future__ import annotations

import random

from verification.random.common import Machine, chance, pick

# Beyond these a float64 reference takes seconds, or Triton's interpreter does.
MOST_SCORES = 40_000_000  # of all heads together, on a GPU
MOST_TILES = 14  # programs times the tiles that each goes through, in the interpreter
TILE = 32


def draw_head_dim(rng: random.Random, machine: Machine) -> int:
    """Draw a head dimension, mostly one of models; a few percent are served by the reference only."""
    small = {16: 30, 32: 22, 24: 10, 64: 8, 80: 3, 96: 3, 40: 3, 128: 3, 256: 1, 8: 1, 20: 1, 264: 0.5, 2: 0.5}
    # Kernels branch on the power of two that holds the columns, and on columns that only pad it.
    large = {16: 7, 24: 5, 32: 8, 40: 4, 64: 14, 72: 4, 80: 6, 96: 9, 120: 3, 128: 18, 160: 4, 192: 5, 256: 9, 8: 0.7,
             36: 0.7, 264: 0.4}  # fmt: skip
    return pick(rng, large if machine.has_gpu else small)


def draw_rotary_dim(rng: random.Random, head_dim: int) -> int:
    if chance(rng, 0.65) or head_dim == 2:
        return head_dim
    return pick(rng, {head_dim // 4 * 2 or 2: 2, 2 * rng.randint(1, head_dim // 2): 2, 2: 0.5})


def draw_length(rng: random.Random, machine: Machine, most: int) -> int:
    """A length from 1 to about ``most``, short ones as likely as long ones, next to a tile's border now and then."""
    length = pick(rng, {1: 1, rng.randint(2, 16): 3, rng.randint(17, 48): 5, rng.randint(min(33, most), most): 6})
    if chance(rng, 0.15):
        length = rng.choice([32, 64, 128, 256, 512]) + rng.choice([-1, 0, 1])
    return max(1, min(length, most))


def draw_group(rng: random.Random, machine: Machine, probability: float) -> int:
    """Query heads of one key head: more than one with this probability."""
    if not chance(rng, probability):
        return 1
    return pick(rng, {2: 4, 3: 2, 4: 4, 5: 1, 7: 1, 8: 2, 16: 0.5} if machine.has_gpu else {2: 5, 3: 2, 4: 1, 5: 0.5})


def draw_heads(rng: random.Random, machine: Machine, group: int) -> tuple[int, int, int]:
    """(B, HQ, HKV)."""
    if machine.has_gpu:
        batch, heads_kv = pick(rng, {1: 6, 2: 5, 3: 2, 4: 1, 0: 0.15}), pick(rng, {1: 4, 2: 5, 3: 2, 4: 2, 8: 2})
    else:
        batch, heads_kv = pick(rng, {1: 10, 2: 5, 3: 1, 0: 0.2}), pick(rng, {1: 6, 2: 3, 3: 1})
    return batch, heads_kv * group, heads_kv


def is_affordable(machine: Machine, heads: int, len_q: int, len_k: int) -> bool:
    """Whether ``heads`` = B * HQ heads of these lengths take a reasonable time."""
    if machine.has_gpu:
        return heads * len_q * len_k <= MOST_SCORES
    return heads * -(-len_q // TILE) * -(-len_k // TILE) <= MOST_TILES


def draw_scale(rng: random.Random, head_dim: int) -> float | None:
    usual = head_dim**-0.5
    one = 0.5 if head_dim <= 64 else 0.0  # an int; where heads are wide, only the largest score would count
    return pick(rng, {None: 12, usual: 2, 0.0: 1, -usual: 1, -3 * usual: 0.5, 2.5 * usual: 1, 1: one})


def draw_window(rng: random.Random, kind: str, length: int) -> tuple[int, int] | None:
    """kind: "none", "left", "right", "both" or "zero"; -1 stands for unbounded."""

    def size() -> int:
        return pick(rng, {0: 1, 1: 1, rng.randint(0, max(1, length)): 6, rng.randint(0, 20): 3, 2**31 - 1: 0.3})

    if kind == "none":
        return rng.choice([None, None, None, (-1, -1)])
    return {"left": (size(), -1), "right": (-1, size()), "both": (size(), size()), "zero": (0, 0)}[kind]


def draw_window_kind(rng: random.Random) -> str:
    return pick(rng, {"none": 12, "left": 4, "right": 1.5, "both": 2, "zero": 0.7})


def draw_bounds(rng: random.Random, batch: int, length: int, *, upper: bool) -> tuple[int, ...]:
    """``kv_lens`` (``upper``) or ``kv_starts`` of each batch entry; some lie outside the keys."""
    whole = length if upper else 0
    some = rng.randint(length // 2, length) if upper else rng.randint(0, length // 2)
    weights = {whole: 3.0, rng.randint(0, length): 3.0, some: 6.0, 0: 0.4, length: 0.4, length + 3: 0.3, -2: 0.3}
    return tuple(pick(rng, weights | {rng.randint(0, length): 2.0}) for _ in range(batch))
