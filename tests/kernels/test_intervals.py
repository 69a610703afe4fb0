"""The blocks that kernels visit under intervals of query rows, compared with every pair by itself."""

import random

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.attention.intervals import BLOCKS, interval_blocks_kernel
from fused_rope_attn.attention.portable.backward_kernels import narrowed_queries
from fused_rope_attn.attention.portable.parts import next_run
from fused_rope_attn.kernels import masks
from fused_rope_attn.kernels.masks import Intervals, row_interval, sequence_intervals
from fused_rope_attn.kernels.sequences import MaskArguments
from tests.support.intervals import Drawn, drawn
from tests.support.marks import interpreted

pytestmark = interpreted


@triton.jit
def write_visits(
    out_ptr, of_keys_ptr, starts_ptr, ends_ptr, blocks_ptr, kv_starts_ptr, window, NQ, NK, COUNT, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add for each block of queries the kinds of the COUNT blocks of keys to out (blocks, COUNT): 0 is skipped, 1
    mixed, 2 whole. Write for each block of keys ``narrowed_queries`` to of_keys (COUNT, 4). All of batch entry 1."""
    intervals = sequence_intervals(Intervals(starts_ptr, ends_ptr, blocks_ptr, (NK, NK)), 1, 0, NQ, NK, NK - NQ)
    mask = masks.sequence_mask(kv_starts_ptr, 1, NK - NQ, NK, masks.window_of(window), True, intervals)
    for tile in range(tl.cdiv(NQ, BLOCK_M)):
        first, full_first, full_last, last = masks.key_range(mask, tile * BLOCK_M, NK - NQ, BLOCK_M, BLOCK_N)
        block, last_block = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
        while block < last_block:
            begin, middle, block = next_run(
                mask, block, last_block, full_first // BLOCK_N, full_last // BLOCK_N, tile * BLOCK_M, BLOCK_M, BLOCK_N
            )
            for i in range(begin, block):
                at = out_ptr + tile * COUNT + i
                tl.store(at, tl.load(at) + tl.where(i < middle, 1, 2))
    for tile in range(tl.cdiv(NK, BLOCK_N)):
        bounds = masks.query_range(mask, tile * BLOCK_N, NK - NQ, NQ, BLOCK_M, BLOCK_N)
        bounds = narrowed_queries(bounds, row_interval(mask, tile * BLOCK_N + tl.arange(0, BLOCK_N)), NK - NQ, BLOCK_M)
        for j in tl.static_range(4):
            tl.store(of_keys_ptr + tile * 4 + j, bounds[j])


def visits(case, blocks):
    """Return the bounds of blocks, and what ``write_visits`` writes, as lists, of the second of two batch entries: the
    first would show an offset that is missing."""
    block_m, block_n = blocks
    count = -(-case.num_keys // block_n)
    bounds = torch.full((2, 4, count), -1, dtype=torch.int32)
    write_bounds(bounds, case.starts, case.ends, case.num_rows, block_n)
    kinds, of_keys = torch.zeros((-(-case.num_rows // block_m), count)), torch.zeros((count, 4), dtype=torch.int32)
    left, right = case.window
    window = left, tl.constexpr(0) if right == 0 else right
    sizes = case.num_rows, case.num_keys, count
    intervals = case.starts, case.ends, bounds, case.kv_starts
    write_visits[(1,)](kinds, of_keys, *intervals, window, *sizes, *blocks)
    return bounds[1].T.tolist(), kinds.tolist(), of_keys.tolist()


def write_bounds(bounds, first, end, num_rows, block_n):
    batch, num_keys = first.shape
    intervals = Intervals.host(first, end, bounds, (num_keys, num_keys))
    given = MaskArguments.host(None, None, None, None, None, None, True, FROM_START=False, intervals=intervals)
    programs = batch * -(-bounds.shape[2] // BLOCKS.value)
    interval_blocks_kernel[(programs,)](given, num_rows, num_keys, block_n)


@pytest.mark.parametrize("blocks", [(4, 8), (8, 4), (16, 2)], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_the_blocks_that_tiles_visit(seed, blocks):
    block_m, block_n = blocks
    case = drawn(seed, 40, reads_lengths=False)
    bounds, kinds, of_keys = visits(case, blocks)
    expected, count = case.visible()[0][1], len(bounds)
    for i in range(-(-case.num_rows // block_m)):
        rows = expected[i * block_m : (i + 1) * block_m]
        for j in range(count):
            block, kind = rows[:, j * block_n : (j + 1) * block_n], kinds[i][j]
            assert kind > 0 or not block.any()
            assert kind < 2 or (block.all() and block.shape[1] == block_n)
            if kind == 1:  # the bounds do not say that it could be skipped
                low, high = i * block_m, min((i + 1) * block_m, case.num_rows)
                some, last, every, every_end = bounds[j]
                assert some < high and last > low
                keys = range(j * block_n, min((j + 1) * block_n, case.num_keys))
                shown = [case.starts[1, k] <= low and case.ends[1, k] >= high for k in keys]
                assert (every <= low and every_end >= high) == all(shown)
    for j in range(count):
        keys = expected[:, j * block_n : (j + 1) * block_n]
        keys = keys[:, keys.any(0)]  # hidden keys are zeros
        low, full_low, full_high, high = of_keys[j]
        assert 0 <= low <= full_low <= full_high and high <= -(-case.num_rows // block_m)
        for i in range(-(-case.num_rows // block_m)):
            tile = keys[i * block_m : (i + 1) * block_m]
            assert low <= i < high or not tile.any()
            assert not full_low <= i < full_high or (tile.all() and tile.shape[0] == block_m)
        seen = [i for i in range(-(-case.num_rows // block_m)) if keys[i * block_m : (i + 1) * block_m].any()]
        if seen and case.window == (None, None):
            assert (low, high) == (seen[0], seen[-1] + 1)
        assert seen or low == high or case.num_keys < case.num_rows or case.kv_starts is not None


def test_bounds_of_blocks():
    """One value for each of the four bounds: of blocks of 4 keys, with a hidden key, with none, past the last key."""
    first = torch.tensor([[3, 5, 4, 4, 9, 9, 9, 9, 1, 2, 7, 1, 0, 2]], dtype=torch.int32)
    end = torch.tensor([[8, 6, 9, 8, 9, 3, 0, 9, 5, 2, 10, 20, 4, 6]], dtype=torch.int32)
    bounds = torch.zeros((1, 4, 4), dtype=torch.int32)
    write_bounds(bounds, first, end, 10, 4)
    none = masks.NO_ROW.value
    assert bounds[0].T.tolist() == [[3, 9, 5, 6], [none, 0, none, 0], [1, 10, none, 2], [0, 6, 2, 4]]


def test_runs_longer_than_a_chunk():
    kind = [random.Random(block // 70).choice([0, 1, 2]) for block in range(300)]
    first = torch.tensor([[{0: 9, 1: j % 2, 2: 0}[kind[j // 4]] for j in range(1200)]] * 2, dtype=torch.int32)
    case = Drawn(16, 1200, (None, None), None, None, False, first, torch.full_like(first, 16))
    _, kinds, _ = visits(case, (8, 4))
    assert kinds[0] == kind
