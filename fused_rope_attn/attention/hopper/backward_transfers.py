# mypy: ignore-errors
"""The warps of the sm_90 backward that do not multiply: one loads, and one or more add dQ to its accumulator.

Up to head dim 128 one warp adds dQ, in the order in which blocks are done. In a fixed order three warps take turns,
and with wider heads two warps tell those that multiply when to add it.

*The fixed order* is that of the key blocks, from a sequence's first one on. Each query block of each head has a word.
The program of a key block waits until the word says that the last key block before it that sees these queries has added
to them. Then it adds, and raises the word. Programs wait only for those with a smaller number, which the hardware has
started before. All programs of a head go from the last query block to the first one. They follow one another at a
distance of one addition, and under a causal mask the longest program is both the first in the order and the first to
start.
"""

from fused_rope_attn.attention.hopper import backward_block, channels, masks
from fused_rope_attn.kernels import schedule
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.runtime.triton_compat import TensorDescriptor, gl, jit, tma_reduce_add, tma_store, tma_store_wait


@record
class Descriptors:
    """The tensors that the TMA loads: q, do (B, HQ, NQ, D), k, v (B, HKV, NK, D); stats as for ``load``.

    q_rope (B, HQ, NQ, R) and k_rope (B, 1, NK, R): the rotated columns of latent attention, which loads q and its rows
    without padding, as dO; else None.
    """

    q: TensorDescriptor
    k: TensorDescriptor
    v: TensorDescriptor
    do: TensorDescriptor
    stats: TensorDescriptor
    q_rope: TensorDescriptor | None = None
    k_rope: TensorDescriptor | None = None


@record
class LaunchOrder:
    """The overlap of a launch with others."""

    PDL: gl.constexpr
    IS_LATE: gl.constexpr  # the loading warp lets the next launch start, once the pre-process has finished


@record
class Destinations:
    """The channels that the loading warp fills.

    arrival: the loading warp's own mbarrier, at which it waits for a tile before it zeroes rows of it; None if it never
    does.
    """

    k: channels.Channel
    v: channels.Channel
    q: channels.Channel
    do: channels.Channel
    lse: gl.shared_memory_descriptor  # (stages of q, BLOCK_M) float32, base 2
    delta: gl.shared_memory_descriptor  # (stages of do, BLOCK_M) float32
    arrival: gl.shared_memory_descriptor | None


@record
class ExistingRows:
    """Rows of the tensors that exist: queries from first_query on, keys [first_key, end_key). None: all.

    With packed sequences q and its statistics are padded, and dO is not: a row of dO is stored do_shift rows after that
    of q, and rows of dO from do_end on do not exist.

    With intervals a row has a bit in the words at hidden_ptr, from the block's first key on, if no query sees the key,
    and at blind_ptr, from the first query on, if the query sees no key.
    """

    first_query: gl.tensor | None
    first_key: gl.tensor | None
    end_key: gl.tensor | None
    do_shift: gl.tensor | None
    do_end: gl.tensor | None
    hidden_ptr: gl.tensor | None
    blind_ptr: gl.tensor | None


@jit
def any_bit(words_ptr, ROWS: gl.constexpr):
    """Return whether any of ROWS rows has a bit in the words at words_ptr."""
    bits = gl.load(words_ptr)
    for i in gl.static_range(1, ROWS // 32):
        bits |= gl.load(words_ptr + i)
    return bits != 0


@jit
def load_rows_or_zeros(
    desc, batch, head, row, tile, full, first_row, end_row, arrival, arrivals, stats=None, rope=None
):
    """Load a tile with zeros for rows outside [first_row, end_row); returns ``arrivals``, see ``load_existing_rows``.

    first_row None: all rows of the tile exist, or the TMA writes zeros itself. end_row None: its last rows exist.
    """
    if first_row is None:
        channels.load_rows(desc, batch, head, row, tile, full, stats, rope)
    else:
        if end_row is None:
            end_row = row + tile.shape[2]
        arrivals = channels.load_existing_rows(
            desc, batch, head, row, tile, full, first_row, end_row, arrival, arrivals, stats, rope
        )
    return arrivals


@jit
def load_keys(desc, channel, keys, existing, arrival, arrivals, rope_desc=None):
    """Load the rows of K or V that a ``KeyBlock`` has; returns ``arrivals`` as ``load_existing_rows`` does."""
    at, first, end = channel.at(0), existing.first_key, existing.end_key
    tile, full = channel.tile(at), channel.full_barrier(at)
    batch, head, row = keys.batch, keys.head, keys.start_n
    if existing.hidden_ptr is None:
        rope = channels.rope_part(rope_desc, 0, channel, at)
        return load_rows_or_zeros(desc, batch, head, row, tile, full, first, end, arrival, arrivals, None, rope)
    else:
        is_hidden = any_bit(existing.hidden_ptr, tile.shape[2])
        return channels.load_seen_rows(
            desc, batch, head, row, tile, full, existing.hidden_ptr, is_hidden, arrival, arrivals
        )


@jit
def load_block(
    desc,
    batch,
    head,
    start_m,
    channel,
    step,
    arrival,
    arrivals,
    first_row=None,
    end_row=None,
    stats=None,
    rope_desc=None,
    blind_ptr=None,
):
    """Load query block ``step`` of a channel, the rows from start_m on, as soon as its slot is empty.

    Load the ``RowStatistics`` of its rows too, lse with Q, delta with dO: ``stats.smem`` is (STAGES, BLOCK_M). The rest
    is as for ``load_rows_or_zeros``, including the result. blind_ptr: as in ``ExistingRows``.
    """
    at = channel.at(step)
    if blind_ptr is not None:
        blind_ptr += start_m // 32
        is_blind = any_bit(blind_ptr, channel.buffer.shape[3])
    channel.wait_empty(at)
    if stats is not None:
        stats = replace(stats, smem=stats.smem.index(at.slot))
    tile, full = channel.tile(at), channel.full_barrier(at)
    if blind_ptr is None:
        rope = channels.rope_part(rope_desc, head, channel, at)
        return load_rows_or_zeros(
            desc, batch, head, start_m, tile, full, first_row, end_row, arrival, arrivals, stats, rope
        )
    else:
        return channels.load_seen_rows(
            desc, batch, head, start_m, tile, full, blind_ptr, is_blind, arrival, arrivals, stats
        )


@record
class QueryLoads:
    """The records of ``load`` that do not vary with a block; ``first`` is the number of the first query block."""

    descriptors: Descriptors
    destinations: Destinations
    existing: ExistingRows
    sizes: backward_block.Sizes
    stats_size: gl.tensor
    batch: gl.tensor
    first: gl.tensor


@jit
def load_queries(loads, head_q, count, arrivals, IN_ORDER: gl.constexpr):
    """Load ``count`` query blocks of each of the group's heads, with their statistics; return (steps, arrivals).

    head_q: the group's first head. IN_ORDER: as in ``QueryBlocks``.
    """
    descriptors, destinations, existing, sizes = loads.descriptors, loads.destinations, loads.existing, loads.sizes
    arrival, batch = destinations.arrival, loads.batch
    first_query, blind = existing.first_query, existing.blind_ptr
    if IN_ORDER:
        num_outer, num_inner = count, sizes.num_heads
    else:
        num_outer, num_inner = sizes.num_heads, count
    step = 0
    for outer in range(num_outer):
        for inner in range(num_inner):
            group_head, i = outer, inner
            if IN_ORDER:
                group_head, i = inner, count - 1 - outer
            start_m = (loads.first + i) * destinations.q.buffer.shape[3]
            stats_row = (batch * sizes.HQ + head_q + group_head) * sizes.pitch + start_m
            stats = channels.RowStatistics(descriptors.stats, stats_row, destinations.lse)
            head, channel = head_q + group_head, destinations.q
            q, rope = descriptors.q, descriptors.q_rope
            if rope is None or existing.do_shift is None:
                arrivals = load_block(
                    q, batch, head, start_m, channel, step, arrival, arrivals, first_query, None, stats, rope, blind
                )
            else:
                row, first, end = start_m + existing.do_shift, first_query + existing.do_shift, existing.do_end
                arrivals = load_block(q, batch, head, row, channel, step, arrival, arrivals, first, end, stats, rope)
            stats = channels.RowStatistics(descriptors.stats, stats_row + loads.stats_size, destinations.delta)
            first_do = first_query
            if existing.do_shift is not None:
                start_m += existing.do_shift
                first_do += existing.do_shift
            do, channel, end_do = descriptors.do, destinations.do, existing.do_end
            arrivals = load_block(
                do, batch, head, start_m, channel, step, arrival, arrivals, first_do, end_do, stats, None, blind
            )
            step += 1
    return step, arrivals


@jit
def load(descriptors, destinations, keys, queries, existing, sizes, stats_size, launch):
    """Load K and V once, and every query block with its statistics; one warp's work. Rows that do not exist are zero.

    keys and queries count rows and blocks of the tensors as the TMA addresses them. The statistics are
    (2 * stats_size,) float32: the base-2 lse of every row of (B, HQ, pitch), then their delta. launch: ``LaunchOrder``.
    """
    batch = keys.batch
    arrival = destinations.arrival
    arrivals = 0
    arrivals = load_keys(descriptors.v, destinations.v, keys, existing, arrival, arrivals)
    # The pre-process writes everything but V. All other warps wait for a tile of this one.
    schedule.wait_for_previous_launch(launch.PDL)
    if launch.IS_LATE:
        # Not earlier: the next launch relies on all that the pre-process has written.
        schedule.let_next_launch_start(launch.PDL)
    arrivals = load_keys(descriptors.k, destinations.k, keys, existing, arrival, arrivals, descriptors.k_rope)
    head_q = backward_block.first_query_head(keys, sizes)
    loads = QueryLoads(descriptors, destinations, existing, sizes, stats_size, batch, queries.first)
    step, arrivals = load_queries(loads, head_q, queries.count, arrivals, queries.IN_ORDER)
    # The warps that multiply compute scores and dP of a block after the last one, and discard them: load zeros.
    if step > 0:
        q, rope = destinations.q, descriptors.q_rope
        load_block(descriptors.q, batch, head_q, sizes.pitch, q, step, arrival, arrivals, rope_desc=rope)
        load_block(descriptors.do, batch, head_q, sizes.pitch, destinations.do, step, arrival, arrivals)


@jit
def announce(pointer, number=1, RAISE: gl.constexpr = False):
    """Add ``number`` to the word at ``pointer`` once this warp's stores and additions through the TMA are complete.

    RAISE: raise the word to ``number`` instead.
    """
    REDUCTION: gl.constexpr = "max" if RAISE else "add"
    gl.inline_asm_elementwise(
        "{ .reg .pred one; cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; "
        f"elect.sync _|one, 0xffffffff; @one red.release.gpu.global.{REDUCTION}.u32 [$1], $2; mov.u32 $0, 0; }}",
        "=r,l,r",
        [pointer.to(gl.uint64, bitcast=True), gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def send_block(dq_desc, dq, batch, head_q, block, step, ADD: gl.constexpr):
    """Store a block of dQ, or ADD it to the accumulator, as soon as it has arrived, and release its memory.

    dq: the channels of both warpgroups, one for each part of the columns; step: blocks sent before.
    """
    channels.BACKWARD_BLOCK_M: gl.constexpr = dq.buffer.shape[3]
    COLUMNS: gl.constexpr = dq.buffer.shape[4]
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.wait_full(own.at(step))
        coordinates = [batch, head_q, block * channels.BACKWARD_BLOCK_M, part * COLUMNS]
        if ADD:
            tma_reduce_add(dq_desc, coordinates, own.tile(own.at(step)))
        else:
            tma_store(dq_desc, coordinates, own.tile(own.at(step)))
    tma_store_wait(0)
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.release(own.at(step))


@jit
def drop_block(dq, step):
    """Release a block of dQ as soon as it has arrived, as ``send_block`` does, and discard it."""
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.wait_full(own.at(step))
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.release(own.at(step))


@jit
def reduce(dq_desc, dq, keys, queries, sizes):
    """Add every dQ block to the accumulator (B, HQ, pitch, columns) through the TMA; one warp's work."""
    # dQ is delayed by one step; discard the first, empty block.
    if queries.count > 0:
        drop_block(dq, 0)
    step = 1
    for group_head in range(sizes.num_heads):
        head_q = backward_block.first_query_head(keys, sizes) + group_head
        for i in range(queries.count):
            send_block(dq_desc, dq, keys.batch, head_q, queries.first + i, step, ADD=True)
            step += 1


@jit
def stage_rows(x):
    """Permute dQ's rows to their order in shared memory and in the accumulator: (hi, b, a) -> (hi, a, b), 4 a and 2 b.

    The eight rows that a tensor-core register tile spreads over a warp then cause no bank conflict under the 128-byte
    swizzle: lanes 0 .. 15 write rows 0, 2, 4, 6. ``postprocess_kernel.staged_rows`` is the same permutation.
    """
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape((rows // 8, 2, 4, columns)).permute((0, 2, 1, 3)).reshape((rows, columns))


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
    intervals: masks.KeyIntervals | None  # if the call has intervals
    PDL: gl.constexpr


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
        first, last = backward_block.visited_blocks(intervals.blocks_ptr, intervals.num_blocks, own, HALVES)
        visits = (tiles >= 0) & (first <= block) & (block < last)
        found = gl.max(gl.where(visits, tiles + 1, 0), 0)
        end -= 32
    return found


@jit
def words_of_group(progress, queries, sizes):
    """Return the pointer to the word of the first query block of the group's first head, and the words of a head."""
    pitch = sizes.pitch // channels.BACKWARD_BLOCK_M
    first = progress.key_head * sizes.num_heads * pitch + queries.first
    return progress.words_ptr + first, pitch


@jit
def reduce_in_order(adder, dq_desc, dq, progress, keys, queries, sizes):
    """Add every ADDERSth dQ block in the order of ``QueryBlocks.IN_ORDER``, the ADDERth first; one warp's work.

    The rest is as in ``reduce``. Several warps, because one addition takes longer to complete than a step.
    """
    ADDER: gl.constexpr = adder.INDEX
    total = sizes.num_heads * queries.count
    # dQ is delayed by one step; discard the first, empty block. The next one is the first warp's.
    if ADDER == ADDERS - 1:
        if total > 0:
            drop_block(dq, 0)
    schedule.wait_for_previous_launch(progress.PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    head_q = backward_block.first_query_head(keys, sizes)
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
            schedule.wait_until(word, progress.tile)
        else:
            schedule.wait_until(
                word, previous_tile(progress.intervals, progress.tile, queries.first + block, channels.CONSUMERS)
            )
        # Order this thread's accesses to memory before its next operations of the TMA.
        gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        send_block(dq_desc, dq, keys.batch, head_q + group_head, queries.first + block, i + 1, ADD=True)
        announce(word, progress.tile + 1, RAISE=True)


@jit
def permit_additions(permits, progress, queries, sizes):
    """Let the multiplying warpgroups add each block's dQ after the key blocks before it have; one warp's work.

    permits: the channel that this warp fills, see ``BuffersByColumns``.
    """
    schedule.wait_for_previous_launch(progress.PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    step = 0
    for i in range(queries.count):
        block = queries.count - 1 - i
        awaited = gl.where(i < progress.num_begun, 0, progress.tile)
        if progress.intervals is not None:
            awaited = previous_tile(progress.intervals, progress.tile, queries.first + block, 1)
        for group_head in range(sizes.num_heads):
            schedule.wait_until(words + group_head * pitch + block, awaited)
            permits.wait_empty(permits.at(step))
            permits.fill(permits.at(step))
            step += 1


@jit
def announce_additions(additions, permits, progress, queries, sizes):
    """Announce each block's dQ as soon as both warpgroups have added it, to the next key block; one warp's work."""
    schedule.wait_for_previous_launch(progress.PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    step = 0
    for i in range(queries.count):
        block = queries.count - 1 - i
        for group_head in range(sizes.num_heads):
            additions.wait_full(additions.at(step))
            announce(words + group_head * pitch + block, progress.tile + 1, RAISE=True)
            permits.release(permits.at(step))
            step += 1
