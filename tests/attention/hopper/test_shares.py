"""The shares into which the sm_90 backward divides the work of calls with intervals: all of it, once, longest first."""

import pytest
import torch

from fused_rope_attn.attention.hopper.interval_kernels import backward_rows_kernel
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, CONSUMERS
from fused_rope_attn.attention.hopper.shares import LEAST_SHARE, SHARE_WORDS, slot_words
from fused_rope_attn.kernels.intervals import NO_ROW
from tests.support.marks import interpreted

pytestmark = interpreted
UNTOUCHED = -9


def bounds_of(batch, num_blocks, roots):
    """Return the first row of blocks of keys and the row after their last, random; ``roots`` blocks see all rows."""
    first = torch.randint(0, 3000, (batch, num_blocks), dtype=torch.int32)
    end = first + torch.randint(0, 700, first.shape, dtype=torch.int32)
    hidden = torch.rand(first.shape) < 0.2
    first[hidden], end[hidden] = NO_ROW.value, 0
    first[0, :roots], end[0, :roots] = 0, 20000
    return first, end


@pytest.mark.parametrize(
    ("batch", "num_blocks", "halves", "heads", "multiprocessors", "roots"),
    [
        (1, 80, 2, 8, 132, 3),
        (3, 34, 2, 2, 132, 1),
        (2, 300, 2, 8, 13, 0),
        (1, 2, 2, 1, 132, 2),
        (2, 150, 1, 1, 78, 5),
        (1, 6, 2, 200, 132, 1),  # more heads than multiprocessors
    ],
)
def test_shares(batch, num_blocks, halves, heads, multiprocessors, roots):
    torch.manual_seed(num_blocks)
    first, end = bounds_of(batch, num_blocks, roots)
    blocks = torch.cat((first, end, torch.full((batch, 4 * num_blocks), UNTOUCHED, dtype=torch.int32)), 1)
    num_tiles = batch * num_blocks // halves
    num_shares = num_tiles + multiprocessors // heads
    num_slots, slot = min(num_tiles, 4 * multiprocessors // (5 * heads)) * heads, slot_words(1)
    written = torch.full((num_shares * SHARE_WORDS.value + num_slots * slot,), UNTOUCHED, dtype=torch.int32)
    backward_rows_kernel[(num_tiles,)](
        None, None, written, blocks, None, None, heads, None, blocks.stride(0), num_blocks, num_tiles, num_shares,
        heads / multiprocessors, BLOCK=1, HALVES=halves, COLUMNS=1,
    )  # fmt: skip

    first, end = first.view(-1, halves).amin(1), end.view(-1, halves).amax(1)
    visits = (end + BACKWARD_BLOCK_M.value - 1) // BACKWARD_BLOCK_M.value - first // BACKWARD_BLOCK_M.value
    visits = visits.clamp(min=0).tolist()
    limit = max(LEAST_SHARE.value, int(sum(visits) * heads / multiprocessors * 1.0001) + 1)
    table, slots = written[: num_shares * SHARE_WORDS.value], written[num_shares * SHARE_WORDS.value :]
    shares = table.view(num_shares, SHARE_WORDS.value).tolist()
    dealt = [share for share in shares if share[2]]
    assert shares[len(dealt) :] == [[0] * SHARE_WORDS.value] * (num_shares - len(dealt))
    counts = {tile: count for tile, _, count, _ in dealt}
    lengths = [visits[tile] // count for tile, _, count, _ in dealt]
    assert lengths == sorted(lengths, reverse=True) and 4 * lengths[0] <= 5 * limit
    places = {}
    for tile in range(num_tiles):
        numbers, of_tile = zip(*[(at, share) for at, share in enumerate(dealt) if share[0] == tile], strict=True)
        assert [share[1] for share in of_tile] == list(range(counts[tile])) == [at - numbers[0] for at in numbers]
        assert {share[2] for share in of_tile} == {counts[tile]}
        assert (counts[tile] > 1) == (4 * visits[tile] > 5 * limit)
        if counts[tile] > 1:
            from_start = {at * SHARE_WORDS.value + share[3] for at, share in zip(numbers, of_tile, strict=True)}
            assert len(from_start) == 1
            places[tile] = from_start.pop() - table.numel()
    assert sorted(places.values()) == [i * heads * slot for i in range(len(places))]
    assert len(places) * heads <= num_slots and bool(places) == bool(roots and heads < multiprocessors)
    counters, sums = slots.view(num_slots, slot).tensor_split((CONSUMERS.value,), 1)
    assert (counters[: len(places) * heads] == 0).all() and (sums == UNTOUCHED).all()
