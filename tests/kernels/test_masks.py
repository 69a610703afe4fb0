"""The blocks that kernels visit under a mask, compared with every pair by itself. Random calls see the pairs."""

import random
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import first_query, key_range, query_range, sequence_mask, window_of
from tests.support.marks import interpreted

# NumPy divides truth values without an error, and with the result of `and` where it does not warn.
pytestmark = [interpreted, pytest.mark.filterwarnings("error:divide by zero")]


class Bounds(NamedTuple):
    """One sequence: its numbers of queries and keys, and the keys that a query sees."""

    num_queries: int
    num_keys: int
    causal: bool = False
    left: int | None = None
    right: int | None = None
    start: int | None = None  # as in kv_starts: before the first key, or past the last one
    reads_lengths: int = 0  # as in ``masks.Mask``; also where no tensor says which keys exist

    @property
    def first_key(self):
        """Keys before this one do not exist for any query."""
        of_window = 0 if self.left is None else self.num_keys - self.num_queries - self.left
        return min(self.num_keys, max(0, self.start or 0, of_window))

    def pairs(self):
        """Return whether each query would see each key if all existed, and whether it does, for 64 of both."""
        position, keys = torch.arange(64)[:, None] + self.num_keys - self.num_queries, torch.arange(64)
        left, right = (1000 if side is None else side for side in (self.left, self.right))
        would = (keys >= position - left) & (keys <= position + (0 if self.causal else right))
        would &= (position >= 0) | (self.reads_lengths != 1)
        return would, would & (keys >= self.first_key) & (keys < self.num_keys)


@triton.jit
def write_ranges(
    out_ptr, starts_ptr, q_offset, num_keys, window, NQ, READS_LENGTHS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """Write the bounds of each block's visits, (BLOCKS, 4) float32, because that shows a bound that is no integer, and
    the first query row that sees a key."""
    mask = sequence_mask(starts_ptr, 1, q_offset, num_keys, window_of(window), READS_LENGTHS)
    tl.store(out_ptr + 4 * BLOCKS, first_query(mask, q_offset))
    for i in tl.static_range(BLOCKS):
        if OF_QUERIES:
            bounds = query_range(mask, i * BLOCK_N, q_offset, NQ, BLOCK_M, BLOCK_N)
        else:
            bounds = key_range(mask, i * BLOCK_M, q_offset, BLOCK_M, BLOCK_N)
        for j in tl.static_range(4):
            tl.store(out_ptr + 4 * i + j, bounds[j])


def ranges(bounds, blocks, count, *, of_queries):
    starts = None if bounds.start is None else torch.tensor([1 << 20, bounds.start], dtype=torch.int32)
    window = bounds.left, tl.constexpr(0) if bounds.causal else bounds.right
    q_offset = bounds.num_keys - bounds.num_queries
    given = starts, q_offset, bounds.num_keys, window, bounds.num_queries, bounds.reads_lengths
    out = torch.full((4 * count + 1,), -1.0)
    write_ranges[(1,)](out, *given, *blocks, BLOCKS=count, OF_QUERIES=of_queries)
    return [*out[:-1].view(count, 4).tolist(), out[-1].item()]


def drawn(count, seed):
    """Masks of all kinds: every bound is there or not, and the fewest keys that any may leave are none."""
    draw = random.Random(seed)
    for _ in range(count):
        reads_lengths, causal = draw.choice([0, 0, 1, 1, 2]), draw.random() < 0.5
        num_keys = draw.randint(0 if reads_lengths else 1, 37)
        num_queries = draw.randint(1, 37) if reads_lengths or causal else draw.randint(1, num_keys)
        left, right = draw.choice([None, None, 0, 2, 5, 9, 18]), draw.choice([None, 0, 1, 4, 11, 14])
        start = draw.choice([None, None, -3, 0, 3, 7, 10, 30])
        bounds = left, None if causal else right, start if reads_lengths else None
        yield Bounds(num_queries, num_keys, causal, *bounds, reads_lengths)


# In the last two a block begins one position before the keys.
MASKS = (*drawn(80, 0), Bounds(21, 16, reads_lengths=1), Bounds(21, 16, right=14, reads_lengths=1))
each_mask = pytest.mark.parametrize("bounds", MASKS, ids=str)
both_sizes = pytest.mark.parametrize("blocks", [(4, 8), (8, 4)], ids=str)


@both_sizes
@each_mask
def test_the_keys_that_a_block_of_queries_visits(bounds, blocks):
    """All that any of its rows sees and no block more; and without a mask, every block that all of them see."""
    block_m, block_n = blocks
    count = -(-bounds.num_queries // block_m)
    would, sees = bounds.pairs()
    *found, first_row = ranges(bounds, blocks, count, of_queries=False)
    rows_that_see = sees[: bounds.num_queries].any(1).nonzero().flatten().tolist()
    assert first_row == rows_that_see[0] if rows_that_see else first_row >= bounds.num_queries
    for i, (first, full_first, full_last, last) in enumerate(found):
        rows = slice(i * block_m, (i + 1) * block_m)
        seen, by_all = sees[rows].any(0).nonzero().flatten().tolist(), sees[rows].all(0)
        assert first % block_n == full_first % block_n == full_last % block_n == 0
        assert first <= full_first <= full_last and 0 <= last <= bounds.num_keys
        if seen:
            assert (first, last) == (seen[0] // block_n * block_n, seen[-1] + 1)
        elif not would[rows].any():
            assert first >= last  # every row is before all keys, or past those of its window
        whole = [key for key in range(0, bounds.num_keys, block_n) if by_all[key : key + block_n].all()]
        assert list(range(int(full_first), int(full_last), block_n)) == whole


@both_sizes
@each_mask
def test_the_blocks_of_queries_that_a_block_of_keys_visits(bounds, blocks):
    """All that would see any of its keys and no more; and without a mask, the whole ones that would see each of them.
    Keys that do not exist are zeros where some in their block do, and blocks in which none does visit nothing."""
    block_m, block_n = blocks
    count = -(-bounds.num_keys // block_n) + (bounds.reads_lengths > 0)  # a tensor may have more keys than exist
    would, _ = bounds.pairs()
    *found, _ = ranges(bounds, blocks, count, of_queries=True)
    of = [slice(row, min(row + block_m, bounds.num_queries)) for row in range(0, bounds.num_queries, block_m)]
    for i, (first, full_first, full_last, last) in enumerate(found):
        keys = slice(i * block_n, (i + 1) * block_n)
        assert 0 <= first <= full_first <= full_last and last <= len(of) and not any(x % 1 for x in found[i])
        if keys.stop <= bounds.first_key or keys.start >= bounds.num_keys:
            assert first == full_first == full_last == last
            continue
        seen = [j for j, rows in enumerate(of) if would[rows, keys].any()]
        if seen:
            assert (first, last) == (seen[0], seen[-1] + 1)
        whole = [j for j, rows in enumerate(of) if would[rows, keys].all() and rows.stop - rows.start == block_m]
        assert list(range(int(full_first), int(full_last))) == whole
