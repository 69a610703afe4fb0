"""Rows of keys and visits of tiles that the sm_90 kernels read of intervals, compared with every pair by itself, and
the shares into which the backward divides its work: all of it, once, in good order."""

import pytest
import torch
import triton.language as tl

from fused_rope_attn.attention.hopper import intervals
from fused_rope_attn.attention.hopper.backward_block import SHARE_WORDS
from fused_rope_attn.attention.hopper.channels import BACKWARD_BLOCK_M, CONSUMERS
from fused_rope_attn.attention.hopper.intervals import BLOCKS, backward_rows_kernel, key_rows_kernel, visits_kernel
from fused_rope_attn.kernels.masks import NO_ROW, Intervals
from fused_rope_attn.kernels.sequences import MaskArguments
from tests.support.intervals import drawn
from tests.support.marks import interpreted

pytestmark = interpreted
BLOCK_N = 32


@pytest.mark.parametrize(("block_m", "tiles_of_program", "blocks_at_once"), [(64, 8, 32), (48, 2, 2)])
@pytest.mark.parametrize("seed", range(20))
def test_rows_and_visits(seed, block_m, tiles_of_program, blocks_at_once, monkeypatch):
    monkeypatch.setattr(intervals, "TILES", tl.constexpr(tiles_of_program))
    monkeypatch.setattr(intervals, "VISIT_BLOCKS", tl.constexpr(blocks_at_once))
    case = num_rows, num_keys, window, kv_starts, kv_lens, from_start, starts, ends = drawn(seed, 150)
    blocks, tiles, words = -(-num_keys // BLOCK_N), -(-num_rows // block_m), BLOCK_N // 32
    key_rows = torch.full((2, 2, blocks * BLOCK_N), -9, dtype=torch.int32)
    bounds = torch.full((2, (4 + words) * blocks), -9, dtype=torch.int32)
    rows_again, hidden_again = torch.full_like(key_rows, -9), torch.full((2, words * blocks), -9, dtype=torch.int32)
    visits = torch.full((2, tiles, 1 + blocks), -9, dtype=torch.int32)
    right = tl.constexpr(0) if window[1] == 0 else window[1]
    of_keys = Intervals.host(starts, ends, None, (num_keys, num_keys))
    masks = MaskArguments.host(
        kv_starts, kv_lens, None, None, None, None, READS_LENGTHS=True, FROM_START=from_start, intervals=of_keys
    )
    key_rows_kernel[(2 * -(-blocks // BLOCKS.value),)](
        key_rows, bounds, masks, num_rows, num_keys, blocks, window[0], right, BLOCK_N
    )
    visits_kernel[(2 * -(-tiles // tiles_of_program),)](
        visits, rows_again, hidden_again, masks, num_rows, num_keys, blocks, window[0], right, block_m, BLOCK_N, False
    )
    assert torch.equal(rows_again, key_rows) and torch.equal(hidden_again, bounds[:, 4 * blocks :])
    expected, first_keys = case.visible()
    for b, (sees, first_key) in enumerate(zip(expected, first_keys)):
        sees = torch.nn.functional.pad(sees[:, first_key:], (0, blocks * BLOCK_N - num_keys + first_key))
        row = torch.arange(num_rows)[:, None]
        assert torch.equal((row >= key_rows[b, 0]) & (row < key_rows[b, 1]), sees)
        exists = torch.arange(blocks * BLOCK_N) + first_key < num_keys
        hidden = [(int(bounds[b, 4 * blocks + j // 32]) >> (j % 32)) & 1 for j in range(blocks * BLOCK_N)]
        assert torch.equal(torch.tensor(hidden).bool(), exists & ~sees.any(0))
        of_blocks = sees.view(num_rows, blocks, BLOCK_N)
        for j in range(blocks):
            some, every = of_blocks[:, j].any(1).nonzero(), of_blocks[:, j].all(1).nonzero()
            low, high, all_low, all_high = bounds[b, : 4 * blocks].view(4, blocks)[:, j].tolist()
            of_keys = key_rows[b, :, j * BLOCK_N : (j + 1) * BLOCK_N]
            assert (all_low, all_high) == (int(of_keys[0].max()), int(of_keys[1].min()))
            assert (low, high) == ((int(some[0]), int(some[-1]) + 1) if len(some) else (NO_ROW.value, 0))
            assert max(0, all_high - all_low) == len(every) and (not len(every) or all_low == int(every[0]))
        for i in range(tiles):
            tile = of_blocks[i * block_m : (i + 1) * block_m]
            seen = [j for j in range(blocks) if tile[:, j].any()]
            count, listed = int(visits[b, i, 0]), visits[b, i, 1:].tolist()
            if not seen:
                assert (count, listed[0]) == (1, 7)
                continue
            # A block is listed if its rows from the first to the last that see any key meet the tile.
            visited = [word >> 3 for word in listed[:count]]
            assert visited == sorted(set(visited), reverse=True) and set(seen) <= set(visited)
            for j, word in zip(visited, listed):
                of_keys = slice(j * BLOCK_N, (j + 1) * BLOCK_N)
                assert (word & 1 != 0) == bool((key_rows[b, 0, of_keys] > i * block_m).any())
                assert (word & 2 != 0) == bool((key_rows[b, 1, of_keys] < min(num_rows, (i + 1) * block_m)).any())
                assert (word & 3 != 0) == (not tile[:, j].all())
                assert (word & 4 != 0) == any(hidden[of_keys])


UNTOUCHED = -9
WORDS = SHARE_WORDS.value


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
    # The first row of blocks of keys and the row after their last, random; the first blocks see all rows.
    first = torch.randint(0, 3000, (batch, num_blocks), dtype=torch.int32)
    end = first + torch.randint(0, 700, first.shape, dtype=torch.int32)
    hidden = torch.rand(first.shape) < 0.2
    first[hidden], end[hidden] = NO_ROW.value, 0
    first[0, :root_blocks], end[0, :root_blocks] = 0, 20000
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
