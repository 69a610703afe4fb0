"""The order in which the programs of a launch with overlapping sections take tiles."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.schedule import overlapped_tile
from tests.support.marks import interpreted


@triton.jit
def write_tiles(out_ptr, num_tiles, num_heads, heads_per_section, most_overlapping):
    """Write (tile, head) of each program."""
    pid = tl.program_id(0)
    tile, head = overlapped_tile(pid, num_tiles, num_heads, heads_per_section, most_overlapping)
    tl.store(out_ptr + 2 * pid, tile)
    tl.store(out_ptr + 2 * pid + 1, head)


def tiles_of(num_tiles, num_heads, section, most_overlapping):
    out = torch.full((num_tiles * num_heads, 2), -1, dtype=torch.int32)
    write_tiles[(num_tiles * num_heads,)](out, num_tiles, num_heads, section, most_overlapping)
    return out.tolist()


@interpreted
@pytest.mark.parametrize("num_tiles", [1, 2, 3, 6, 7])
@pytest.mark.parametrize(("num_heads", "section"), [(1, 1), (5, 5), (3, 8), (4, 1), (8, 4), (7, 3), (8, 3), (5, 4)])
@pytest.mark.parametrize("most_overlapping", [0, 1, 2, 66])
def test_each_tile_runs_once_and_those_of_a_head_start_in_order(num_tiles, num_heads, section, most_overlapping):
    found = tiles_of(num_tiles, num_heads, section, most_overlapping)
    assert sorted(found) == [[tile, head] for tile in range(num_tiles) for head in range(num_heads)]
    for head in range(num_heads):
        assert [tile for tile, of in found if of == head] == list(range(num_tiles))


@interpreted
def test_the_last_half_of_a_section_alternates_with_the_first_half_of_the_next():
    assert tiles_of(4, 3, 1, 66) == [
        *([0, 0], [1, 0]),
        *([2, 0], [0, 1], [3, 0], [1, 1]),
        *([2, 1], [0, 2], [3, 1], [1, 2]),
        *([2, 2], [3, 2]),
    ]


@interpreted
def test_no_more_tiles_alternate_than_asked():
    assert tiles_of(5, 3, 1, 1) == [
        [0, 0],
        *([1, 0], [2, 0], [3, 0]),
        *([4, 0], [0, 1]),
        *([1, 1], [2, 1], [3, 1]),
        *([4, 1], [0, 2]),
        *([1, 2], [2, 2], [3, 2]),
        [4, 2],
    ]
