# mypy: ignore-errors
"""Shares of the sm_90 backward: the work of a program where several programs have the same tile of keys.

A tile's programs add up dK and dV in pairs, as in a tournament, through slots of memory, and the program of the last
share writes the gradients. Large groups of query heads are divided among ``group_parts`` programs, see
``backward.parts_of_group``. In calls with intervals the device divides the query blocks of tiles, and deals them to
programs.

Intervals make tiles uneven. For example all rows see the root of a tree, so that its few tiles would take longer than
everything else together. A tile that has clearly more query blocks than a multiprocessor has on average is therefore
divided into shares, each the work of one program. The longest shares start first.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, CONSUMERS, KEYS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit

# Numbers of a share, in the order of ``Share``.
SHARE_WORDS = tl.constexpr(5)
# Query blocks, each of one query head, that are worth a share of their own. Shares of four times as many, or more, have
# half of a multiprocessor's mean work, so that they even out; shorter ones cost more than that saves.
LEAST_STEPS = 8
# Tiles that ``deal_shares`` reads at once.
LANES = tl.constexpr(128)


def least_share(group_size: int) -> int:
    """Return the query blocks, each of group_size query heads, that are worth a share of their own."""
    return max(1, LEAST_STEPS // group_size)


@triton.constexpr_function
def slot_words(columns):
    """Return the words of a slot: dk and dv (KEYS, columns) float32 of each warpgroup.

    columns: those that a warpgroup has, with padding. A slot also has a counter for each warpgroup, int32, to which
    each warp adds 1 after it has stored its sums.
    """
    return CONSUMERS.value * 2 * KEYS.value * columns


@record
class Share:
    """The work of a program: query blocks of a tile of keys, or query heads.

    A tile's query blocks, or the query heads of its group, are divided evenly into ``count`` shares, all but the last
    with a slot. count 0: no work.
    """

    tile: tl.tensor
    head: tl.tensor  # the number of the key head among those of all batch entries
    number: tl.tensor
    count: tl.tensor
    slot: tl.tensor  # of a divided tile: the slot of its share 0; the others follow


@triton.jit
def visited_blocks(blocks_ptr, num_blocks, block, HALVES: tl.constexpr):
    """Return (first, end) of the query blocks with a row that sees any key of HALVES blocks of KEYS, from ``block`` on.

    If no row does ``end`` is at most ``first``. blocks_ptr, num_blocks: as ``key_rows_kernel`` writes them.
    """
    bounds = blocks_ptr + block
    first, end = tl.load(bounds), tl.load(bounds + num_blocks)
    for i in tl.static_range(1, HALVES):
        first = tl.minimum(first, tl.load(bounds + i))
        end = tl.maximum(end, tl.load(bounds + num_blocks + i))
    return first // BACKWARD_BLOCK_M, (end + BACKWARD_BLOCK_M - 1) // BACKWARD_BLOCK_M


@triton.jit
def count_visits(blocks_ptr, batch_stride, num_blocks, tile, num_tiles, HALVES: tl.constexpr):
    """Return how many query blocks each of some tiles visits; 0 from tile num_tiles on."""
    tiles = num_blocks // HALVES
    existing = tl.minimum(tile, num_tiles - 1)
    blocks_ptr += (existing // tiles).to(tl.int64) * batch_stride
    first, end = visited_blocks(blocks_ptr, num_blocks, existing % tiles * HALVES, HALVES)
    return tl.where(tile < num_tiles, tl.maximum(end - first, 0), 0)


@triton.jit
def count_shares(visits, limit):
    """Return the number of shares of tiles with ``visits`` query blocks; limit float32.

    A tile of up to 5 / 4 of ``limit`` stays whole, and the shares of others have at most 9 / 8 of it, rounded up.
    """
    return tl.maximum(tl.ceil(visits / limit - 0.25).to(tl.int32), 1)


@triton.jit
def work_of_share(mean, longest, least_share):
    """Return the query blocks of a share, float32, if multiprocessors have ``mean`` and the longest tile ``longest``.

    A little more than ``mean / 2`` or more, because the number of shares and slots has a limit. If the longest tile is
    not divided by shares of the mean, none is.
    """
    mean *= 1.0001
    half = tl.maximum(mean / 2, tl.minimum(mean, 4 * least_share))
    return tl.maximum(tl.where(longest > 1.25 * mean, half, mean), least_share)


@triton.jit
def deal_shares(
    own, shares_ptr, counters_ptr, blocks_ptr, batch_stride, num_blocks, num_tiles, num_shares, least_share, num_heads,
    heads_per_section, heads_per_multiprocessor, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the shares of tile ``own`` of num_tiles tiles of HALVES blocks of KEYS keys, for all num_heads key heads.

    shares (num_shares, SHARE_WORDS) int32: the ``Share`` of each program; there may be more of them than work.
    counters (slots, CONSUMERS) int32: those of used slots are cleared. least_share: query blocks.
    blocks (B, batch_stride) int32, num_blocks: as ``key_rows_kernel`` writes them.

    Heads are dealt in sections of heads_per_section, because the L2 holds one section's queries. If tiles are divided,
    the longest shares of each section are first. Other tiles keep their order, because neighbours have the same
    queries.

    Every program reads the bounds of all tiles, so that none waits for another.
    """
    lane = tl.arange(0, LANES)
    total = 0.0
    longest = 0
    for start in range(0, num_tiles, LANES):
        visits = count_visits(blocks_ptr, batch_stride, num_blocks, start + lane, num_tiles, HALVES)
        total += tl.sum(visits.to(tl.float32))
        longest = tl.maximum(longest, tl.max(visits))
    limit = work_of_share(total * heads_per_multiprocessor, longest, least_share)
    is_uneven = count_shares(longest, limit) > 1

    own_visits = count_visits(blocks_ptr, batch_stride, num_blocks, own, num_tiles, HALVES)
    count = count_shares(own_visits, limit)
    length = own_visits // count
    position = 0
    num_slots = 0
    num_dealt = 0
    for start in range(0, num_tiles, LANES):
        tile = start + lane
        its_visits = count_visits(blocks_ptr, batch_stride, num_blocks, tile, num_tiles, HALVES)
        its_count = tl.where(tile < num_tiles, count_shares(its_visits, limit), 0)
        its_length = its_visits // tl.maximum(its_count, 1)
        starts_first = tl.where(is_uneven & (its_length != length), its_length > length, tile < own)
        position += tl.sum(tl.where(starts_first, its_count, 0))
        num_slots += tl.sum(tl.where(tile < own, tl.maximum(its_count, 1) - 1, 0))
        num_dealt += tl.sum(its_count)
    tiles = num_blocks // HALVES
    end = num_shares * SHARE_WORDS
    slots_of_head = count - 1
    first_slot = num_slots * num_heads
    for start in range(0, count * num_heads, LANES):
        number = (start + lane) // num_heads
        head = (start + lane) % num_heads
        first_head = head // heads_per_section * heads_per_section
        heads = tl.minimum(heads_per_section, num_heads - first_head)
        at = (first_head * num_dealt + (position + number) * heads + head - first_head) * SHARE_WORDS
        exists = number < count
        tl.store(shares_ptr + at, tl.zeros_like(lane) + own % tiles, mask=exists)
        tl.store(shares_ptr + at + 1, own // tiles * num_heads + head, mask=exists)
        tl.store(shares_ptr + at + 2, number, mask=exists)
        tl.store(shares_ptr + at + 3, tl.zeros_like(lane) + count, mask=exists)
        tl.store(shares_ptr + at + 4, first_slot + head * slots_of_head, mask=exists)
    own_counters = slots_of_head * num_heads * CONSUMERS
    for start in range(0, own_counters, LANES):
        counters = counters_ptr + first_slot * CONSUMERS + start + lane
        tl.store(counters, tl.zeros_like(lane), mask=start + lane < own_counters)
    if own == 0:
        for start in range(num_dealt * num_heads * SHARE_WORDS, end, LANES):
            tl.store(shares_ptr + start + lane, 0, mask=start + lane < end)


@jit
def load_share(ptr):
    """Load the ``Share`` at ptr."""
    return Share(gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3), gl.load(ptr + 4))
