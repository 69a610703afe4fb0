"""The number of tiles of a launch, and the order in which its programs take them."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.schedule import count_tiles, overlapped_tile, tile_count
from fused_rope_attn.kernels.sequences import MaskArguments, scheduled_keys, scheduled_queries
from tests.support.marks import interpreted

# NumPy divides truth values without an error, and with the result of `and` where it does not warn.
pytestmark = [interpreted, pytest.mark.filterwarnings("error:divide by zero")]
BLOCK = 8


@triton.jit
def write_count(out_ptr, N, num_sequences, BLOCK: tl.constexpr):
    tl.store(out_ptr, count_tiles(N, num_sequences, BLOCK))


@pytest.mark.parametrize(
    ("sequences", "rows", "tiles"),
    # Packed rows need one more for each sequence, and one for the rows after the last.
    [(None, (0, 1, 8, 9, 27), [0, 1, 1, 2, 4]), (3, (0, 7, 8, 27), [4, 4, 5, 7]), (2, (20,), [5])],
)
def test_counts_of_tiles(sequences, rows, tiles):
    out = torch.full((len(rows),), -1.0)  # which shows a count that is no whole number
    for i, n in enumerate(rows):
        write_count[(1,)](out[i:], n, sequences, BLOCK)
    assert out.tolist() == [tile_count(n, sequences, BLOCK) for n in rows] == tiles


@triton.jit
def write_order(
    out_ptr, cu_ptr, num_sequences, window, NQ, NK, HEADS, num_heads, section, OF_QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    masks = MaskArguments(
        starts_ptr=None, lens_ptr=None, cu_q_ptr=cu_ptr, cu_k_ptr=cu_ptr, num_sequences=num_sequences,
        window=window_of(window), READS_LENGTHS=cu_ptr is not None, FROM_START=False,
    )  # fmt: skip
    pid = tl.program_id(0)
    if OF_QUERIES:
        tile = scheduled_queries(pid, NQ, NK, HEADS, num_heads, section, masks, BLOCK)
    else:
        tile = scheduled_keys(pid, NK, NQ, HEADS, num_heads, section, masks, BLOCK)
    tl.store(out_ptr + 2 * pid, tile.number)
    tl.store(out_ptr + 2 * pid + 1, tile.batch_head)


@pytest.mark.parametrize("of_queries", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "ends"), [(2, None), (1, [0, 9, 9, 20])], ids=["batch", "packed"])
def test_the_longest_tiles_of_a_section_of_heads_start_first(batch, ends, causal, of_queries):
    """Those are the last queries under a causal mask, and the first keys."""
    heads, section, num_sequences = 3 * batch, 2, None if ends is None else len(ends) - 1
    tiles = tile_count(20, num_sequences, BLOCK)
    out = torch.full((tiles * heads, 2), -1, dtype=torch.int32)
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    window = None, tl.constexpr(0) if causal else None
    write_order[(tiles * heads,)](out, ends, num_sequences, window, 20, 20, 3, heads, section, of_queries, BLOCK)
    numbers = range(tiles - 1, -1, -1) if of_queries and causal else range(tiles)
    sections = [range(i, min(i + section, heads)) for i in range(0, heads, section)]
    assert out.tolist() == [[number, head] for section in sections for number in numbers for head in section]


@triton.jit
def write_tiles(out_ptr, num_tiles, num_heads, heads_per_section, most_overlapping):
    pid = tl.program_id(0)
    tile, head = overlapped_tile(pid, num_tiles, num_heads, heads_per_section, most_overlapping)
    tl.store(out_ptr + 2 * pid, tile)
    tl.store(out_ptr + 2 * pid + 1, head)


def overlapped(num_tiles, num_heads, section, most_overlapping):
    out = torch.full((num_tiles * num_heads, 2), -1, dtype=torch.int32)
    write_tiles[(num_tiles * num_heads,)](out, num_tiles, num_heads, section, most_overlapping)
    return out.tolist()


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 6, 7])
@pytest.mark.parametrize(("num_heads", "section"), [(1, 1), (3, 8), (4, 1), (8, 4), (7, 3), (8, 3), (5, 4)])
@pytest.mark.parametrize("most_overlapping", [0, 1, 2, 66])
def test_each_tile_runs_once_and_those_of_a_head_start_in_order(num_tiles, num_heads, section, most_overlapping):
    found = overlapped(num_tiles, num_heads, section, most_overlapping)
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
    assert overlapped(num_tiles, 3, 1, most_overlapping) == [[int(x) for x in pair] for pair in order.split()]
