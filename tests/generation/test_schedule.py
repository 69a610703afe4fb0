"""The generation step's programs share the work: tiles of keys, blocks of query rows, configurations."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.attention.configs import ARCHS
from fused_rope_attn.attention.planning import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fused_rope_attn.generation import configs, planning
from fused_rope_attn.generation.inputs import Caches, sequence_of, tiles_before
from fused_rope_attn.generation.launch import row_block
from tests.support.marks import interpreted


@triton.jit
def schedule_kernel(
    lens_ptr, total_ptr, found_ptr, B, NQ, S, left, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, ONE_PASS: tl.constexpr
):
    """The total of tiles, and for each tile its sequence and the tiles before that, by both functions."""
    caches = Caches(
        lens_ptr, None, B, NQ, S, left, HAS_NEW_KEYS=True, BLOCK_N=BLOCK_N, BLOCK_B=BLOCK_B, ONE_PASS=ONE_PASS
    )
    total, _ = tiles_before(caches, 0)
    tl.store(total_ptr, total)
    for tile in range(total):
        batch, before = sequence_of(caches, tile)
        _total, again = tiles_before(caches, batch)
        tl.store(found_ptr + 3 * tile, batch)
        tl.store(found_ptr + 3 * tile + 1, before)
        tl.store(found_ptr + 3 * tile + 2, again)


@interpreted
@pytest.mark.parametrize("left", [None, 5])
@pytest.mark.parametrize("count", [1, 3, 4, 11])
def test_every_tile_finds_its_sequence(count, left):
    """More sequences than one step looks at, empty ones, and a window."""
    lens = torch.tensor([0, 9, 33, 8, 16, 0, 0, 17, 1, 40, 99], dtype=torch.int32)[:count]
    total, found = torch.zeros(1, dtype=torch.int32), torch.full((100, 3), -1, dtype=torch.int32)
    schedule_kernel[(1,)](lens, total, found, count, 1, 40, left, BLOCK_N=8, BLOCK_B=4, ONE_PASS=count <= 4)
    keys = lens.clamp(max=40) if left is None else lens.clamp(max=min(left, 40))
    tiles = ((keys + 7) // 8).clamp(min=1)
    assert int(total) == int(tiles.sum())
    expected = torch.repeat_interleave(torch.arange(count), tiles)
    before = tiles.cumsum(0) - tiles
    assert torch.equal(found[: int(total), 0].long(), expected)
    assert torch.equal(found[: int(total), 1].long(), before[expected])
    assert torch.equal(found[: int(total), 2].long(), before[expected])


def test_blocks_of_query_rows():
    assert [row_block(rows) for rows in (1, 16, 17, 33, 64, 65, 1000)] == [16, 16, 32, 64, 64, 64, 64]


def test_configurations_for_every_call():
    for arch in (*ARCHS, "interpreter"):
        for head_dim in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
            for element_size in (2, 4):
                for rotated, page_size, small in itertools.product((True, False), (None, 16, 64), (True, False)):
                    config = configs.decode(arch, element_size, head_dim, rotated, page_size, small)
                    assert config.pdl == (arch in ("sm_90", "sm_100", "sm_120"))


def test_few_queries():
    """A single token, or no more rows of queries that share their keys than a program holds; none are a few."""
    assert planning.reads_cache_once(2, 32) and planning.reads_cache_once(2, 3) and planning.reads_cache_once(0, 128)
    assert planning.reads_cache_once(1, 128) and planning.reads_cache_once(16, 4) and planning.reads_cache_once(64, 1)
    assert not planning.reads_cache_once(17, 4) and not planning.reads_cache_once(2, 33)
