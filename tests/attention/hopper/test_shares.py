"""The shares into which the sm_90 backward divides the work of calls with intervals: all of it, once, in good order."""

import pytest
import torch

from fused_rope_attn.attention.hopper.backward_block import SHARE_WORDS
from fused_rope_attn.attention.hopper.channels import BACKWARD_BLOCK_M, CONSUMERS
from fused_rope_attn.attention.hopper.intervals import backward_rows_kernel
from fused_rope_attn.kernels.masks import NO_ROW
from tests.support.marks import interpreted

pytestmark = interpreted
UNTOUCHED = -9
WORDS = SHARE_WORDS.value


def bounds_of(batch, num_blocks, root_blocks):
    """Return the first row of blocks of keys and the row after their last, random; the first blocks see all rows."""
    first = torch.randint(0, 3000, (batch, num_blocks), dtype=torch.int32)
    end = first + torch.randint(0, 700, first.shape, dtype=torch.int32)
    hidden = torch.rand(first.shape) < 0.2
    first[hidden], end[hidden] = NO_ROW.value, 0
    first[0, :root_blocks], end[0, :root_blocks] = 0, 20000
    return first, end


@pytest.mark.parametrize(("section", "least"), [(1, 8), (2, 1), (3, 8), (4, 2)])
@pytest.mark.parametrize(
    ("batch", "num_blocks", "halves", "heads", "multiprocessors", "root_blocks"),
    [
        (3, 34, 2, 2, 132, 1),
        (2, 60, 2, 8, 5, 0),  # even
        (1, 60, 2, 8, 12, 1),  # the first tile is long, but not divided
        (1, 2, 2, 1, 132, 2),
        (1, 140, 1, 3, 60, 5),
        (1, 6, 2, 200, 132, 1),  # more heads than multiprocessors
    ],
)
def test_shares(batch, num_blocks, halves, heads, multiprocessors, root_blocks, section, least):
    torch.manual_seed(num_blocks)
    first, end = bounds_of(batch, num_blocks, root_blocks)
    blocks = torch.cat((first, end, torch.full((batch, 4 * num_blocks), UNTOUCHED, dtype=torch.int32)), 1)
    tiles, section = num_blocks // halves, min(section, heads)
    num_tiles, num_slots = batch * tiles, 2 * multiprocessors // heads * heads
    num_shares = num_tiles * heads + num_slots
    table = torch.full((num_shares * WORDS,), UNTOUCHED, dtype=torch.int32)
    counters = torch.full((num_slots, CONSUMERS.value), UNTOUCHED, dtype=torch.int32)
    backward_rows_kernel[(num_tiles,)](
        None, None, table, counters, blocks, None, None, heads, None, blocks.stride(0), num_blocks, num_tiles,
        num_shares, least, section, heads / multiprocessors, BLOCK=1, HALVES=halves,
    )  # fmt: skip

    first, end = first.view(-1, halves).amin(1), end.view(-1, halves).amax(1)
    visits = (end + BACKWARD_BLOCK_M.value - 1) // BACKWARD_BLOCK_M.value - first // BACKWARD_BLOCK_M.value
    visits = visits.clamp(min=0).tolist()
    mean = sum(visits) * heads / multiprocessors
    # The work of a share: the mean, or down to half of it if tiles are divided and it has 4 least shares.
    limit = mean * 1.0001
    if max(visits) > 1.25 * limit:
        limit = max(limit / 2, min(limit, 4 * least))
    limit = max(limit, least)
    shares = table.view(num_shares, WORDS).tolist()
    dealt = [share for share in shares if share[3]]
    assert shares[len(dealt) :] == [[0] * WORDS] * (num_shares - len(dealt))

    counts = {head // heads * tiles + tile: count for tile, head, _, count, _ in dealt}
    assert len(counts) == num_tiles
    for tile, count in counts.items():
        assert (count > 1) == (4 * visits[tile] > 5 * limit)
        assert count == 1 or 8 * visits[tile] <= 9.001 * count * limit
    lengths = {tile: visits[tile] // count for tile, count in counts.items()}
    is_uneven = 4 * max(visits) > 5 * limit
    expected = [(tile, head, i) for tile, count in counts.items() for head in range(heads) for i in range(count)]
    # Sections of heads, in an uneven one the longest shares first.
    expected.sort(key=lambda x: (x[1] // section, -lengths[x[0]] if is_uneven else 0, x[0], x[2], x[1]))
    assert [(head // heads * tiles + tile, head % heads, number) for tile, head, number, _, _ in dealt] == expected

    # The slots of tiles follow one another: each tile has one slot less than shares.
    places = {(tile, head, count - 1, first) for tile, head, _, count, first in dealt if count > 1}
    assert len(places) == len({place[:2] for place in places})
    used = 0
    for _, _, count, first in sorted(places, key=lambda place: place[-1]):
        assert first == used
        used += count
    assert used <= num_slots
    assert (counters[:used] == 0).all() and (counters[used:] == UNTOUCHED).all()
