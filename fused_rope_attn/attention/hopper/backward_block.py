# mypy: ignore-errors
"""Records and functions that the warps of an sm_90 backward block share: its range, its share and channels.

Several programs may share a tile of keys, each with a ``Share`` of its query heads (large groups, see
``backward.parts_of_group``) or of its query blocks (calls with intervals, see ``intervals.deal_shares``). They add up
dK and dV in pairs, as in a tournament, through slots of memory, and the program of the last share writes the gradients.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.hopper import channels
from fused_rope_attn.attention.hopper import columns as column_parts
from fused_rope_attn.kernels import masks, ptxas, rotation, tiles
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.runtime.triton_compat import gl, jit

# Numbers of a share, in the order of ``Share``.
SHARE_WORDS = tl.constexpr(5)


@triton.constexpr_function
def slot_words(columns):
    """Return the words of a slot: dk and dv (KEYS, columns) float32 of each warpgroup.

    columns: those that a warpgroup has, with padding. A slot also has a counter for each warpgroup, int32, to which
    each warp adds 1 after it has stored its sums.
    """
    return channels.CONSUMERS.value * 2 * channels.KEYS.value * columns


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
    return first // channels.BACKWARD_BLOCK_M, (end + channels.BACKWARD_BLOCK_M - 1) // channels.BACKWARD_BLOCK_M


@jit
def load_share(ptr):
    """Load the ``Share`` at ptr."""
    return Share(gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3), gl.load(ptr + 4))


@record
class Member:
    """The number of a warpgroup that multiplies, or of a warp that adds dQ, among those with the same work."""

    INDEX: gl.constexpr


@record
class KeyBlock:
    """The keys that a block, or one of its warpgroups, owns: of a key head of a batch entry, from row start_n on."""

    batch: gl.tensor
    head: gl.tensor
    start_n: gl.tensor | None


@record
class QueryBlocks:
    """The query blocks that see a key block, in each head of the group: ``count`` of them from number ``first`` on.

    num_masked: without a window on the left, the first num_masked blocks need a mask and the others do not. With one,
    each block's position says whether it needs a mask, and all do if num_masked is at least ``count``. It is None if
    every key that the mask lets through exists.

    IN_ORDER: blocks are visited from the last to the first, each in all heads of the group before the next one.
    Otherwise the heads are visited one after another, each from its first block to its last.
    """

    first: gl.tensor
    num_masked: gl.tensor | None
    count: gl.tensor
    IN_ORDER: gl.constexpr = False


@record
class Sizes:
    """Heads and rows: HQ query heads, NQ queries, NK keys; the program has num_heads query heads from first_head on.

    first_head: None in programs without a ``Share``, see ``first_query_head``. pitch: rows of a head in the row
    statistics and in the accumulator of dQ, a multiple of BLOCK_M.
    """

    HQ: gl.tensor | None
    first_head: gl.tensor | None
    num_heads: gl.tensor | None
    NQ: gl.tensor | None
    pitch: gl.tensor | None
    NK: gl.tensor | None


@jit
def first_query_head(keys, sizes):
    """Return the first query head of the program: without a ``Share`` the first of its key head's group."""
    # Without a share each warp computes it. While the program computed it once and passed it to its warps, ptxas put
    # other instructions into another order, and the backward of (4, 8/8, 1024, 64) without a mask took 6 % more time.
    # Two H200, 3.9.0, 2026-11-27 and 28.
    if sizes.first_head is None:
        return keys.head * sizes.num_heads
    else:
        return sizes.first_head


@record
class KeyGradients:
    """The gradients dk and dv (B, HKV, NK, D), and the tables by which dk is rotated back.

    dk_parts (B, HKV, NK, R) float32: each head's part of the rotated gradient of the one head of latent attention, else
    None. TOKEN_TABLES: row t of the tables belongs to packed key t.

    Where several programs add up dk and dv of the same keys there are slots (slots, ``slot_words``) float32, and
    counters (slots, CONSUMERS) int32, zero before the first block. share: the program's ``Share`` if groups are
    divided. share_ptr: to it, or from the host to that of program 0, if the device has dealt it (``deal_shares``).
    """

    dk: tiles.TensorView
    dv: tiles.TensorView
    tables: rotation.RotaryTables
    format: tiles.RowFormat
    TOKEN_TABLES: tl.constexpr
    dk_parts: tiles.TensorView | None = None
    share_ptr: gl.tensor | None = None
    slots_ptr: gl.tensor | None = None
    counters_ptr: gl.tensor | None = None
    share: Share | None = None


@jit
def rows_from(view, row):
    """Return the ``TensorView`` that begins with a row."""
    return replace(view, ptr=view.ptr + row.to(gl.int64) * view.strides[2])


@jit
def gradients_from(gradients, row):
    """Return the ``KeyGradients`` of a packed sequence, whose first key is ``row``."""
    tables, dk_parts = gradients.tables, gradients.dk_parts
    if gradients.TOKEN_TABLES:
        tables = rotation.tables_from(tables, row)
    if dk_parts is not None:
        dk_parts = rows_from(dk_parts, row)
    dk, dv = rows_from(gradients.dk, row), rows_from(gradients.dv, row)
    return replace(gradients, dk=dk, dv=dv, dk_parts=dk_parts, tables=tables)


@jit
def whole_tile(channel):
    """Return the block's K or V as a tile (rows, columns); with more than 64 columns, at an ``opaque`` address.

    Otherwise the loop holds the descriptors of its products, up to 16 of 64 bits each, in registers. They spill, or in
    the kernel for wide heads make every product synchronous (C7512). With 64 columns they fit, and making them again in
    each step would cost 30 of 500 instructions.
    """
    COLUMNS: gl.constexpr = channel.buffer.shape[4]
    slot = 0 if COLUMNS == 64 else ptxas.opaque(0)
    return channel.buffer.index(slot).reshape((channel.buffer.shape[3], COLUMNS))


@record
class Buffers:
    """Shared memory of the warpgroups that multiply, and of the warps around them; None if a loop does not use it.

    k, v (1, 1, 1, keys, BLOCK_D), q, do: slots of (1, 1, BLOCK_M, BLOCK_D), all 16-bit. lse, delta (stages of q, or of
    do, BLOCK_M) float32, base 2, which fill with them.

    By keys: ds has slots of (BLOCK_M, BLOCK_N) 16-bit, full when both warpgroups have written their keys, empty when
    the products of both have read it; the slot of step s holds dS of step s - 1, and zeros in step 0. dq: a channel for
    each warpgroup, with tiles (1, 1, BLOCK_M, BLOCK_D / CONSUMERS) float32 and a slot for each warp that adds them.

    By columns: p holds P of a block, (KEYS, BLOCK_M) 16-bit; the first warpgroup fills it and the second releases it.
    ds_factor, filled with it: ``softmax.derivative_factor`` if that is not P. ds: (KEYS, BLOCK_M) 16-bit, which the
    second warpgroup fills. permits, additions: channels without tiles, or None if dQ is added in any order.
    ``permit_additions`` fills the first when both warpgroups may add a step's dQ, both fill the second when they have,
    and ``announce_additions`` empties the first then.

    Latent attention: k and q hold rotated columns too (``Channel.rope``). p: (CONSUMERS, KEYS, BLOCK_M) 16-bit, no
    channel, because each warpgroup has its own.
    """

    k: channels.Channel
    v: channels.Channel
    q: channels.Channel
    do: channels.Channel
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: channels.Channel | None = None
    dq: channels.Channel | None = None
    p: channels.Channel | gl.shared_memory_descriptor | None = None
    ds_factor: gl.shared_memory_descriptor | None = None
    permits: channels.Channel | None = None
    additions: channels.Channel | None = None


@jit
def allocate_query_channel(desc, rope_desc, stats_desc, STAGES: gl.constexpr):
    """Allocate a ``Channel`` for blocks of Q or dO and a float32 for each row, (STAGES, BLOCK_M), and return both.

    The loading warp fills a slot and its row of them together, and both warpgroups release it.
    """
    buffer = channels.tiles_of(desc, STAGES)
    rope = None
    if rope_desc is not None:
        rope = channels.tiles_of(rope_desc, STAGES)
    channel = channels.channel_of(buffer, STAGES, rope)
    return channel, gl.allocate_shared_memory(gl.float32, [STAGES, desc.block_type.shape[2]], stats_desc.layout)


@jit
def allocate_buffers(
    q_desc, do_desc, k_desc, v_desc, stats_desc, q_rope_desc, k_rope_desc, Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
):  # fmt: skip
    """Allocate the ``Buffers`` that all loops have, and initialise their barriers. The descriptors are the kernel's."""
    q, lse = allocate_query_channel(q_desc, q_rope_desc, stats_desc, Q_STAGES)
    do, delta = allocate_query_channel(do_desc, None, stats_desc, DO_STAGES)
    k_rope = None
    if k_rope_desc is not None:
        k_rope = channels.tiles_of(k_rope_desc, 1)
    k = channels.written_once(channels.tiles_of(k_desc, 1), k_rope)
    v = channels.written_once(channels.tiles_of(v_desc, 1))
    k.init(FILLS=1, RELEASES=0)
    v.init(FILLS=1, RELEASES=0)
    q.init(FILLS=1, RELEASES=channels.CONSUMERS * channels.WARPGROUP_THREADS)
    do.init(FILLS=1, RELEASES=channels.CONSUMERS * channels.WARPGROUP_THREADS)
    return Buffers(k, v, q, do, lse, delta)


@jit
def query_blocks(mask, start_n, NQ, num_rows, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (QueryBlocks, first visible row) of the key block [start_n, start_n + BLOCK_N), of num_rows query rows.

    All query blocks need a mask if the key block is partial, because a key that does not exist has score 0, and p =
    exp2(0 - lse) may be infinite. Query rows before the first visible one see nothing; the number is meaningful only if
    the device reads lengths. NQ: the queries; num_rows includes padding.
    """
    q_offset = mask.num_keys - NQ
    first, num_masked, _, last = masks.query_range(mask, start_n, q_offset, num_rows, BLOCK_M, BLOCK_N)
    is_partial = start_n + BLOCK_N > mask.num_keys
    first_row = first
    if mask.first_key is not None:
        is_partial = is_partial | (start_n < mask.first_key)
    if mask.READS_LENGTHS:
        # The key block may begin before the first key, and include queries that see nothing.
        first_row = masks.first_query(mask, q_offset)
        first = gl.minimum(last, gl.maximum(first, first_row // BLOCK_M))
    num_masked = gl.where(is_partial, last, num_masked) - first
    return QueryBlocks(first, num_masked, count=last - first), first_row


@jit
def interval_queries(intervals, start_n, share, HALVES: gl.constexpr):
    """Return the ``QueryBlocks`` from the first to the last row that sees any of HALVES * KEYS keys, start_n the first.

    intervals: ``KeyIntervals``. share: the ``Share`` to which the count is limited; None: all blocks. Every key that
    the mask lets through exists.
    """
    first, end = visited_blocks(intervals.blocks_ptr, intervals.num_blocks, start_n // channels.KEYS, HALVES)
    count = gl.maximum(0, end - first)
    if share is not None:
        count = gl.where(share.count > 0, count, 0)
    begin = 0
    if share is not None:
        shares = gl.maximum(share.count, 1)
        begin = count * share.number // shares
        count = count * (share.number + 1) // shares - begin
    return QueryBlocks(first + begin, num_masked=None, count=count)


@jit
def issue_product(a, channel, cursor, nothing, RIGHT: gl.constexpr = 0):
    """Begin the product of a (keys, columns) and a transposed block, as soon as that has arrived.

    channel, cursor: the place of the block of Q or dO. nothing (keys, 64) float32: zeros in the layout of the result.
    RIGHT: ``right_columns``.
    """
    block = channel.tile(cursor).reshape((channel.buffer.shape[3], a.shape[1]))
    channel.wait_full(cursor)
    return column_parts.issue_over_columns(a, block, nothing, RIGHT)
