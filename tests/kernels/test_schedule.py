"""The order in which the programs of a launch with overlapping sections take tiles."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.schedule import overlapped_tile
from tests.support.marks import interpreted

pytestmark = interpreted


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


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 6, 7])
@pytest.mark.parametrize(("num_heads", "section"), [(1, 1), (3, 8), (4, 1), (8, 4), (7, 3), (8, 3), (5, 4)])
@pytest.mark.parametrize("most_overlapping", [0, 1, 2, 66])
def test_each_tile_runs_once_and_those_of_a_head_start_in_order(num_tiles, num_heads, section, most_overlapping):
    found = tiles_of(num_tiles, num_heads, section, most_overlapping)
    assert sorted(found) == [[tile, head] for tile in range(num_tiles) for head in range(num_heads)]
    for head in range(num_heads):
        assert [tile for tile, of in found if of == head] == list(range(num_tiles))


@pytest.mark.parametrize(
    ("num_tiles", "most_overlapping", "order"),
    [
        # (tile, head): the last half of a section alternates with the first half of the next; no more than asked.
        (4, 66, "00 10  20 01 30 11  21 02 31 12  22 32"),
        (5, 1, "00  10 20 30  40 01  11 21 31  41 02  12 22 32  42"),
    ],
)
def test_sections_overlap(num_tiles, most_overlapping, order):
    assert tiles_of(num_tiles, 3, 1, most_overlapping) == [[int(x) for x in pair] for pair in order.split()]
