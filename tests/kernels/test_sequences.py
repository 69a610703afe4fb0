"""The sequence of each tile of packed sequences. Only the device knows where they end."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.kernels.sequences import packed_tile
from tests.support.dtypes import int32
from tests.support.marks import interpreted

# NumPy divides truth values without an error, and with the result of `and` where it does not warn.
pytestmark = [interpreted, pytest.mark.filterwarnings("error:divide by zero")]
BLOCK = 8


@triton.jit
def write_tiles(out_ptr, cu_ptr, partner_ptr, num_sequences, N, partner_N, first, BLOCK: tl.constexpr):
    tile = first + tl.program_id(0)
    found = packed_tile(tile, cu_ptr, partner_ptr, num_sequences, N, partner_N, BLOCK)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * tl.program_id(0) + i, found[i])


def tiles_of(ends, total, first=0, last=None, partner=None):
    """(sequence, its first row, its rows, tile within it) of the tiles [first, last), of all by default. The partner
    has 20 rows."""
    count = (tile_count(total, len(ends) - 1, BLOCK) if last is None else last) - first
    out = torch.full((count, 4), -1, dtype=torch.int32)
    partner = None if partner is None else int32(partner)
    write_tiles[(count,)](out, int32([*ends]), partner, len(ends) - 1, total, 20, first, BLOCK)
    return out.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_tiles_hold_every_row_once(seed):
    """Also the rows that belong to no sequence, as those of one more."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 7, 8, 9, draw.randint(0, 30)]) for _ in range(draw.randint(0, 9))]
    ends, total, held = [0, *itertools.accumulate(lengths)], sum(lengths) + draw.choice([0, 0, 11]), []
    for tile, (sequence, first_row, rows, index) in enumerate(tiles_of(ends, total)):
        begin, end = ends[sequence], ([*ends, total])[sequence + 1]
        # A sequence's tiles begin at a number that its own entry gives.
        assert (first_row, rows) == (begin, end - begin) and index == tile - (begin // BLOCK + sequence) >= 0
        held += range(min(begin + index * BLOCK, end), min(begin + (index + 1) * BLOCK, end))
    assert held == list(range(total))


def test_more_sequences_than_are_looked_at_at_once():
    """1024 at a time: the tiles at the ends of each thousand, with many empty sequences."""
    ends = [0, *itertools.accumulate((s % 5) * (s % 3) for s in range(2100))]
    for sequence in (0, 1, 1021, 1022, 1023, 1024, 1025, 1026, 2046, 2047, 2048, 2049, 2099, 2100):
        tile = ends[sequence] // BLOCK + sequence
        ((found, first_row, _, index),) = tiles_of(ends, ends[-1], tile, tile + 1)
        assert (found, first_row, index) == (sequence, ends[sequence], 0)
    for count in (1023, 1024, 1025):  # the rows after all sequences
        tile = count // BLOCK + count
        assert tiles_of(range(count + 1), count + 9, tile, tile + 1) == [[count, count, 9, 0]]


# Ends out of bounds, lengths, a first end that is not 0, ends that fall, one past the last row, one of many.
WRONG = [[-3, 4, 30, 6], [9, 2, 25, -1, 20], [12, 8], [1, 20], [0, 9, 8, 20], [0, 20, 21], [0, -1, 20],
         [*range(15), 13, *range(14, 19)]]  # fmt: skip


@pytest.mark.parametrize("of", ["own", "partner"])
@pytest.mark.parametrize("ends", WRONG, ids=str)
def test_wrong_ends_leave_all_rows_without_a_sequence(ends, of):
    """Each row is then written once, as one that sees nothing."""
    good = [min(i, 20) for i in range(len(ends))]
    tiles = tiles_of(ends, 20) if of == "own" else tiles_of(good, 20, partner=ends)
    assert tiles == [[len(ends) - 1, 0, 20, i] for i in range(len(tiles))]
    assert len(tiles) * BLOCK >= 20


@pytest.mark.parametrize("place", [0, 1, 1022, 1023, 1024, 2047, 2048, 2098])
def test_one_wrong_end_of_thousands(place):
    ends = [i // 110 for i in range(2100)]
    ends[place + 1 if place else 0] = ends[place + 1] + 1 if place == 0 else ends[place] - 1
    assert tiles_of(ends, 20, 3, 4) == [[2099, 0, 20, 3]]
