# mypy: ignore-errors
"""The warps of the sm_90 backward that add dQ in a fixed order: that of the key blocks, from a sequence's first one on.

Each query block of each head has a word. The program of a key block waits until the word says that
the last key block before it that sees these queries has added to them. Then it adds, and raises the word. Programs wait
only for those with a smaller number, which the hardware has started before.

All programs of a head go from the last query block to the first one. They follow one another at a distance of one
addition, and under a causal mask the longest program is both the first in the order and the first to start.
"""

from fused_rope_attn.attention.hopper.backward_block import first_query_head
from fused_rope_attn.attention.hopper.backward_transfers import (
    announce,
    drop_block,
    fence_proxies,
    send_block,
)
from fused_rope_attn.attention.hopper.masks import KeyIntervals
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import CONSUMERS
from fused_rope_attn.attention.hopper.shares import visited_blocks
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import wait_for_previous_launch, wait_until
from fused_rope_attn.runtime.triton_compat import gl, jit

# Warps that add dQ by turns up to head dim 128. An addition takes up to 3 µs from its wait to its announcement, and a
# step 1 µs at head dim 64. A fourth warp would take registers from those that multiply.
ADDERS = gl.constexpr(3)


@record
class Progress:
    """A program's place in the order in which key blocks add to dQ.

    words_ptr (B * HQ * pitch / BLOCK_M,) int32: for each query block 0, or the number of the last key block in its dQ,
    plus 1. In each head the program stores the first num_begun of the query blocks that it visits, and adds to others
    after the previous key block has.
    """

    words_ptr: gl.tensor
    key_head: gl.tensor  # among those of all batch entries
    tile: gl.tensor  # the number of the key block in its sequence
    num_begun: gl.tensor
    intervals: KeyIntervals | None  # if the call has intervals


@jit
def previous_tile(intervals, tile, block, HALVES: gl.constexpr):
    """Return the number of the last key block before ``tile`` that visits query block ``block``, plus 1; 0: none does.

    A key block is HALVES * KEYS keys. intervals: ``KeyIntervals``.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    found = 0
    end = tile
    while (found == 0) & (end > 0):
        tiles = end - 1 - gl.arange(0, 32, LANES)
        own = gl.maximum(tiles, 0) * HALVES
        first, last = visited_blocks(intervals.blocks_ptr, intervals.num_blocks, own, HALVES)
        visits = (tiles >= 0) & (first <= block) & (block < last)
        found = gl.max(gl.where(visits, tiles + 1, 0), 0)
        end -= 32
    return found


@jit
def words_of_group(progress, queries, sizes):
    """Return the pointer to the word of the first query block of the group's first head, and the words of a head."""
    pitch = sizes.pitch // BLOCK_M
    first = progress.key_head * sizes.num_heads * pitch + queries.first
    return progress.words_ptr + first, pitch


@jit
def reduce_in_order(ADDER: gl.constexpr, dq_desc, dq, progress, keys, queries, sizes, PDL: gl.constexpr):
    """Add every ADDERSth dQ block in the order of ``QueryBlocks.IN_ORDER``, the ADDERth first; one warp's work.

    The rest is as in ``reduce``. Several warps, because one addition takes longer to complete than a step.
    """
    total = sizes.num_heads * queries.count
    # dQ is delayed by one step; discard the first, empty block. The next one is the first warp's.
    if ADDER == ADDERS - 1:
        if total > 0:
            drop_block(dq, 0)
    wait_for_previous_launch(PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    head_q = first_query_head(keys, sizes)
    num_begun = sizes.num_heads * progress.num_begun
    # Two loops as in ``reduce``.
    for i in range(ADDER, num_begun, ADDERS):
        group_head = i % sizes.num_heads
        block = queries.count - 1 - i // sizes.num_heads
        send_block(dq_desc, dq, keys.batch, head_q + group_head, queries.first + block, i + 1, ADD=False)
        announce(words + group_head * pitch + block, progress.tile + 1, RAISE=True)
    first_added = num_begun + (ADDER + (ADDERS - 1) * num_begun) % ADDERS
    for i in range(first_added, total, ADDERS):
        group_head = i % sizes.num_heads
        block = queries.count - 1 - i // sizes.num_heads
        word = words + group_head * pitch + block
        if progress.intervals is None:
            wait_until(word, progress.tile)
        else:
            wait_until(word, previous_tile(progress.intervals, progress.tile, queries.first + block, CONSUMERS))
        fence_proxies()
        send_block(dq_desc, dq, keys.batch, head_q + group_head, queries.first + block, i + 1, ADD=True)
        announce(word, progress.tile + 1, RAISE=True)


@jit
def permit_additions(permits, progress, queries, sizes, PDL: gl.constexpr):
    """Let the multiplying warpgroups add each block's dQ after the key blocks before it have; one warp's work.

    permits: the channel that this warp fills, see ``BuffersByColumns``.
    """
    wait_for_previous_launch(PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    step = 0
    for i in range(queries.count):
        block = queries.count - 1 - i
        awaited = gl.where(i < progress.num_begun, 0, progress.tile)
        if progress.intervals is not None:
            awaited = previous_tile(progress.intervals, progress.tile, queries.first + block, 1)
        for group_head in range(sizes.num_heads):
            wait_until(words + group_head * pitch + block, awaited)
            permits.wait_empty(permits.at(step))
            permits.fill(permits.at(step))
            step += 1


@jit
def announce_additions(permits, additions, progress, queries, sizes, PDL: gl.constexpr):
    """Announce each block's dQ as soon as both warpgroups have added it, to the next key block; one warp's work."""
    wait_for_previous_launch(PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    step = 0
    for i in range(queries.count):
        block = queries.count - 1 - i
        for group_head in range(sizes.num_heads):
            additions.wait_full(additions.at(step))
            announce(words + group_head * pitch + block, progress.tile + 1, RAISE=True)
            permits.release(permits.at(step))
            step += 1
