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
class Operand:
    """A tensor (B, H, N, columns), and the channel into which the loading warp loads tiles of its rows.

    Only the rows from ``first`` to ``end`` exist (None: all, or the TMA writes the zeros). With intervals a row has a
    bit in the words at words_ptr if it sees no key, or no query sees it. With packed sequences Q and its statistics are
    padded, and dO is not: a row of dO is stored ``shift`` rows after that of the statistics.
    """

    desc: TensorDescriptor
    channel: channels.Channel
    arrival: gl.shared_memory_descriptor | None  # an mbarrier at which to wait for a tile before zeroing rows of it
    stats_desc: TensorDescriptor | None = None  # lse of the rows of Q, delta of those of dO
    stats: gl.shared_memory_descriptor | None = None  # where they are loaded, (STAGES, BLOCK_M) float32
    rope_desc: TensorDescriptor | None = None  # the rotated columns of latent attention
    first: gl.tensor | None = None
    end: gl.tensor | None = None
    words_ptr: gl.tensor | None = None
    shift: gl.tensor | None = None


@jit
def load_block(operand, batch, head, row, step, arrivals, stats_row=None):
    """Load block ``step`` of an ``Operand``, the rows from ``row`` on, as soon as its slot is empty.

    Rows that do not exist are zero; arrivals and the result are those of ``channels.load_existing_rows``. stats_row:
    the place of the rows' statistics, which are loaded too.
    """
    desc, channel, arrival, rope_desc = operand.desc, operand.channel, operand.arrival, operand.rope_desc
    first, words_ptr = operand.first, operand.words_ptr
    BLOCK: gl.constexpr = desc.block_type.shape[2]
    at = channel.at(step)
    if words_ptr is not None:
        words_ptr += row // 32
        bits = gl.load(words_ptr)
        for i in gl.static_range(1, BLOCK // 32):
            bits |= gl.load(words_ptr + i)
    if channel.empty is not None:
        channel.wait_empty(at)
    stats = None
    if stats_row is not None:
        stats = channels.RowStatistics(operand.stats_desc, stats_row, operand.stats.index(at.slot))
    if operand.shift is not None:
        row += operand.shift
        first += operand.shift
    rope_head = 0 if operand.stats is None else head
    if words_ptr is None and first is None:
        channels.load_rows(desc, batch, head, row, channel, at, None, stats, rope_desc, rope_head)
        return arrivals
    else:
        if words_ptr is not None:
            existing = channels.ExistingRows(arrival, None, None, words_ptr, bits != 0)
        else:
            existing = channels.ExistingRows(arrival, first, row + BLOCK if operand.end is None else operand.end)
        return channels.load_existing_rows(
            desc, batch, head, row, channel, at, existing, arrivals, stats, rope_desc, rope_head
        )


@jit
def load(q, do, k, v, keys, queries, sizes, stats_size, PDL: gl.constexpr):
    """Load K and V once, and every query block with its statistics; one warp's work.

    q, do, k, v: ``Operand``s. keys and queries count rows and blocks of the tensors as the TMA addresses them. delta is
    stored stats_size numbers after lse. PDL: launches overlap.
    """
    batch = keys.batch
    arrivals = 0
    arrivals = load_block(v, batch, keys.head, keys.start_n, 0, arrivals)
    # The pre-process writes everything but V. All other warps wait for a tile of this one.
    schedule.wait_for_previous_launch(PDL)
    if k.rope_desc is not None:
        # Not earlier: the next launch of latent attention relies on all that the pre-process has written.
        schedule.let_next_launch_start(PDL)
    arrivals = load_block(k, batch, keys.head, keys.start_n, 0, arrivals)
    head_q = backward_block.first_query_head(keys, sizes)
    num_outer, num_inner = sizes.num_heads, queries.count
    if queries.IN_ORDER:
        num_outer, num_inner = num_inner, num_outer
    step = 0
    for outer in range(num_outer):
        for inner in range(num_inner):
            group_head, i = outer, inner
            if queries.IN_ORDER:
                group_head, i = inner, queries.count - 1 - outer
            head, row = head_q + group_head, (queries.first + i) * channels.BACKWARD_BLOCK_M
            stats_row = (batch * sizes.HQ + head) * sizes.pitch + row
            arrivals = load_block(q, batch, head, row, step, arrivals, stats_row)
            arrivals = load_block(do, batch, head, row, step, arrivals, stats_row + stats_size)
            step += 1
    # The warps that multiply compute scores and dP of a block after the last one, and discard them: load zeros.
    if step > 0:
        last_q = replace(q, first=None, words_ptr=None, shift=None)
        last_do = replace(do, first=None, words_ptr=None, shift=None)
        load_block(last_q, batch, head_q, sizes.pitch, step, arrivals)
        load_block(last_do, batch, head_q, sizes.pitch, step, arrivals)


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

    dq_desc None: discard it. dq: the channels of both warpgroups, which have half of the columns each.
    """
    COLUMNS: gl.constexpr = dq.buffer.shape[4]
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.wait_full(own.at(step))
        if dq_desc is not None:
            coordinates = [batch, head_q, block * channels.BACKWARD_BLOCK_M, part * COLUMNS]
            if ADD:
                tma_reduce_add(dq_desc, coordinates, own.tile(own.at(step)))
            else:
                tma_store(dq_desc, coordinates, own.tile(own.at(step)))
    if dq_desc is not None:
        tma_store_wait(0)
    for part in gl.static_range(channels.CONSUMERS):
        own = dq.of_warpgroup(part)
        own.release(own.at(step))


@jit
def reduce(dq_desc, dq, keys, queries, sizes):
    """Add every dQ block to the accumulator (B, HQ, pitch, columns) through the TMA; one warp's work."""
    # dQ is delayed by one step; discard the first, empty block.
    if queries.count > 0:
        send_block(None, dq, 0, 0, 0, 0, ADD=False)
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


# Warps that add dQ by turns up to head dim 128. An addition takes up to 3 µs, and a step 1 µs at head dim 64. A fourth
# warp would take registers from those that multiply.
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
    ADDER: gl.constexpr = 0  # this warp's number among those of ``reduce_in_order``


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
def reduce_in_order(progress, dq_desc, dq, keys, queries, sizes):
    """Add every ADDERSth dQ block as ``reduce`` does, in the order of ``QueryBlocks.IN_ORDER``; one warp's work."""
    ADDER: gl.constexpr = progress.ADDER
    total = sizes.num_heads * queries.count
    # dQ is delayed by one step; discard the first, empty block. The next one is the first warp's.
    if ADDER == ADDERS - 1:
        if total > 0:
            send_block(None, dq, 0, 0, 0, 0, ADD=False)
    schedule.wait_for_previous_launch(progress.PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    head_q = backward_block.first_query_head(keys, sizes)
    num_begun = sizes.num_heads * progress.num_begun
    # Two loops as in ``reduce``.
    for i in range(ADDER, num_begun, ADDERS):
        group_head, block = i % sizes.num_heads, queries.count - 1 - i // sizes.num_heads
        send_block(dq_desc, dq, keys.batch, head_q + group_head, queries.first + block, i + 1, ADD=False)
        announce(words + group_head * pitch + block, progress.tile + 1, RAISE=True)
    first_added = num_begun + (ADDER + (ADDERS - 1) * num_begun) % ADDERS
    for i in range(first_added, total, ADDERS):
        group_head, block = i % sizes.num_heads, queries.count - 1 - i // sizes.num_heads
        word = words + group_head * pitch + block
        awaited = progress.tile
        if progress.intervals is not None:
            awaited = previous_tile(progress.intervals, progress.tile, queries.first + block, channels.CONSUMERS)
        schedule.wait_until(word, awaited)
        # Order this thread's accesses to memory before its next operations of the TMA.
        gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        send_block(dq_desc, dq, keys.batch, head_q + group_head, queries.first + block, i + 1, ADD=True)
        announce(word, progress.tile + 1, RAISE=True)


@jit
def order_additions(progress, permits, queries, sizes, additions=None):
    """Let the multiplying warpgroups add each block's dQ after the key blocks before it have; one warp's work.

    With ``additions`` announce each block's dQ instead, as soon as both warpgroups have added it, to the next key
    block: another warp's work. permits, additions: see ``Buffers``.
    """
    schedule.wait_for_previous_launch(progress.PDL)
    words, pitch = words_of_group(progress, queries, sizes)
    step = 0
    for i in range(queries.count):
        block = queries.count - 1 - i
        if additions is None:
            awaited = gl.where(i < progress.num_begun, 0, progress.tile)
            if progress.intervals is not None:
                awaited = previous_tile(progress.intervals, progress.tile, queries.first + block, 1)
        for group_head in range(sizes.num_heads):
            word = words + group_head * pitch + block
            if additions is None:
                schedule.wait_until(word, awaited)
                permits.wait_empty(permits.at(step))
                permits.fill(permits.at(step))
            else:
                additions.wait_full(additions.at(step))
                announce(word, progress.tile + 1, RAISE=True)
                permits.release(permits.at(step))
            step += 1
