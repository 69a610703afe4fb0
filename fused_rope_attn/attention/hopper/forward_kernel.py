# mypy: ignore-errors
"""sm_90 attention forward: persistent and warp-specialised. The pre-pass rotates K, warps of this kernel rotate Q.

One block per multiprocessor runs three kinds of warps, which meet only at barriers in shared memory:

- ``load`` (forward_producers.py), one warp: takes tiles from a counter and announces them to the other warps
  (forward_tiles.py), and keeps the channels of K and V blocks full through the TMA;
- ``rotate_queries`` or ``rotate_rope`` (forward_producers.py), four warps: rotate the query rows of the *next* tile
  into shared memory;
- ``attend``, two or three warpgroups of 64 query rows each: products and softmax (FlashAttention-3, Shah et al. 2024).
  The product with the values is delayed by one block, and a tile's first scores are issued before the tile before it
  ends, so that the tensor cores work through the ends of the tiles.

If registers do not suffice for warps that rotate, as for head dims above 128, the pre-pass rotates Q too.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.hopper import channels, columns, forward_producers, forward_tiles, masks, softmax
from fused_rope_attn.attention.hopper.channels import ROWS
from fused_rope_attn.kernels import ptxas, sequences, softmax as row_softmax, tiles
from fused_rope_attn.kernels.masks import Window
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.runtime import triton_compat as compat
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier


@record
class Weighing:
    """The step from scores to weights: scale, sinks and its place among the products."""

    scale: row_softmax.ScoreScale
    sinks_ptr: gl.tensor | None  # (HQ,)
    PIN_SUMS: gl.constexpr  # see ``ptxas.pin``
    VALUES: gl.constexpr  # when a block's product with the values is awaited, see ``attend``


@record
class ForwardOutput:
    """The tensors o and lse, and the shared memory that o passes through."""

    view: tiles.TensorView | None  # o in packed calls: the last rows of a sequence are stored without the TMA
    lse_ptr: gl.tensor  # (B, HQ, NQ) float32, natural logarithm
    highest_ptr: gl.tensor | None  # (B, HQ, NQ) float32, the largest logit of each row
    desc: gl.tensor = None  # of o (B, HQ, NQ, D), in blocks of ROWS rows and the columns of one store
    smem: gl.shared_memory_descriptor = None  # (CONSUMERS, 1, 1, ROWS, columns of one store)
    format: tiles.RowFormat = None


@record
class ForwardSizes:
    """The sizes of a launch at which its code is compiled."""

    D: gl.constexpr  # columns of a head that are not split off by latent attention
    STAGES: gl.constexpr  # of the channels of K and V
    CONSUMERS: gl.constexpr  # warpgroups that attend
    ATTEND_REGISTERS: gl.constexpr  # of a thread
    ROTATE_REGISTERS: gl.constexpr
    QUERIES_IN_TILES: gl.constexpr  # packed queries in q_rot are stored as in ``Saving.TILES``
    USE_INT64_OFFSETS: gl.constexpr
    PDL: gl.constexpr  # programmatic dependent launch
    QUERY_SLOTS: gl.constexpr = 1  # of each warpgroup, where the loading warp loads queries
    EARLY: gl.constexpr = False  # q, k and v are there before the launch before
    LOOKUP: gl.constexpr = "last"  # when the loading warp looks the next tile up: after its "queries", or before
    KEEPS_QUERIES: gl.constexpr = False  # in registers
    IS_STATIC: gl.constexpr = False
    OPAQUE: gl.constexpr = False


_NUMBERS = "NQ NK GROUP_SIZE num_tiles heads_per_section tiles_per_head window_left window_right position_limit".split()


@jit(do_not_specialize=_NUMBERS)
def forward_kernel(q_rot_desc, q_nope_desc, k_rot_desc, k_nope_desc, v_desc, o_desc, query_source, tile_source,
                   weighing, output, NQ, NK, GROUP_SIZE, num_tiles, heads_per_section, tiles_per_head, window_left,
                   window_right, position_limit, sizes):  # fmt: skip
    """Compute o and lse of a (B, HQ, NQ, D) call. Grid: one block per multiprocessor, or one per tile if fewer.

    Arguments that a call does not use are None and cost nothing. Descriptors: k_rot (B, HKV, NK, D) and v, in blocks of
    BLOCK_N rows: keys rotated, in pair order, and values. q_rot, in blocks of ROWS rows: rotated queries. If there is a
    ``QuerySource`` they are rotated here and saved in q_rot for the backward pass, or not saved if it is None. Else
    they are loaded from there. o_desc as in ``ForwardOutput``.

    Multi-head latent attention: q_nope and k_nope hold the columns that are not rotated, and q_rot (B, HQ, NQ, R) and
    k_rot (B, 1, NK, R) those that are. Their scores are added to those of the first columns.

    num_tiles: of all heads. Packed sequences, B = 1: the table after the counter says which of the ``tiles_per_head``
    tiles of a head hold queries; None in other calls.

    heads_per_section as for ``scheduled_tile``; window as in ``kernels.masks.Window``. position_limit: queries from
    this position on are not rotated; None: no query is past the last key.
    """
    query_source, tile_source, weighing = unpack((query_source, tile_source, weighing))
    output, sizes = unpack((output, sizes))
    window = Window(window_left, window_right, HIDES_PAIRS=window_left is not None or window_right is not None)
    IS_PACKED: gl.constexpr = tiles_per_head is not None
    HAS_INTERVALS: gl.constexpr = tile_source.visits_ptr is not None
    HAS_STARTS: gl.constexpr = tile_source.starts_ptr is not None
    # If a tile's keys may begin after key 0 or end before NK, it is announced with its bounds.
    HAS_BOUNDS: gl.constexpr = IS_PACKED or HAS_STARTS or tile_source.lens_ptr is not None or window_left is not None
    ROTATES_QUERIES: gl.constexpr = query_source is not None
    IS_LATENT: gl.constexpr = k_nope_desc is not None
    CONSUMERS: gl.constexpr = sizes.CONSUMERS
    STAGES: gl.constexpr = sizes.STAGES
    BLOCK_D: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[2]
    DTYPE: gl.constexpr = k_rot_desc.dtype

    # The warps that fill the queries' slots: ``load`` if the pre-pass has rotated the queries, else ``rotate_queries``.
    # In latent attention ``load`` fills the columns that are not rotated, and ``rotate_rope`` or ``load`` the others.
    LOADS_QUERIES: gl.constexpr = IS_LATENT or not ROTATES_QUERIES
    q_desc = q_nope_desc if IS_LATENT else (q_rot_desc if LOADS_QUERIES else None)
    k_desc = k_nope_desc if IS_LATENT else k_rot_desc
    q_rope_desc = q_rot_desc if IS_LATENT and not ROTATES_QUERIES else None
    k_rope_desc = k_rot_desc if IS_LATENT else None

    # Shared memory and channels. ``rotate_queries`` has two slots, each with the queries of all warpgroups; otherwise
    # each warpgroup has a channel of one stage.
    Q_STAGES: gl.constexpr = sizes.QUERY_SLOTS if LOADS_QUERIES else 2
    TILES: gl.constexpr = 1 if LOADS_QUERIES else CONSUMERS
    if LOADS_QUERIES:
        q_smem = channels.tiles_of(q_desc, CONSUMERS * Q_STAGES)
    else:
        Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], DTYPE)
        q_smem = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, BLOCK_D], Q_LAYOUT)
    o_smem = channels.tiles_of(o_desc, CONSUMERS)
    k_smem = channels.tiles_of(k_desc, STAGES)
    v_smem = channels.tiles_of(v_desc, STAGES)
    q_rope, k_rope = None, None
    if IS_LATENT:
        k_rope = channels.tiles_of(k_rope_desc, STAGES)
        if ROTATES_QUERIES:
            R: gl.constexpr = query_source.tables.R
            ROPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, R], DTYPE)
            q_rope = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, R], ROPE_LAYOUT)
        else:
            q_rope = channels.tiles_of(q_rope_desc, CONSUMERS)
    TILE_READERS: gl.constexpr = CONSUMERS + 1 if ROTATES_QUERIES else CONSUMERS
    # With intervals only the warps that rotate queries read NK.
    own_nk = NK if ROTATES_QUERIES or not HAS_INTERVALS else None
    announced = forward_tiles.announcements(HAS_BOUNDS, IS_PACKED, TILE_READERS, NQ, own_nk)
    queries = replace(channels.channel_of(q_smem, CONSUMERS * Q_STAGES if LOADS_QUERIES else CONSUMERS, q_rope), STAGES=Q_STAGES, TILES=TILES)
    # In latent attention the loading warp and ``rotate_rope`` fill a slot.
    queries.init(FILLS=2 if ROTATES_QUERIES and IS_LATENT else 1, RELEASES=TILES)
    keys = channels.channel_of(k_smem, STAGES, k_rope)
    values = channels.channel_of(v_smem, STAGES)
    keys.init(FILLS=1, RELEASES=CONSUMERS * channels.WARPGROUP_THREADS)
    values.init(FILLS=1, RELEASES=CONSUMERS * channels.WARPGROUP_THREADS)
    arrival = None
    if HAS_BOUNDS or HAS_INTERVALS:
        arrival = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrival, count=1)

    # The records that the warps take.
    if HAS_INTERVALS:
        words = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        num_keys = (NK + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        mask = masks.IntervalMask(tile_source.key_rows_ptr, num_keys, words)
    else:
        HAS_OWN_STARTS: gl.constexpr = HAS_STARTS and not tile_source.FROM_START
        mask = masks.PositionMask(window, tile_source.READS_LENGTHS, HAS_OWN_STARTS, tile_source.IS_ALIGNED)
    schedule = forward_tiles.Schedule(
        tile_source,
        window,
        num_tiles=num_tiles,
        num_heads=o_desc.shape[0] * o_desc.shape[1],
        heads_per_section=heads_per_section,
        tiles_per_head=tiles_per_head,
        HQ=None if IS_PACKED else o_desc.shape[1],
        GROUP_SIZE=GROUP_SIZE,
        NQ=None if IS_PACKED else NQ,
        NK=None if IS_PACKED else NK,
        BLOCK_N=BLOCK_N,
        BLOCK_M=CONSUMERS * ROWS,
        QUERIES_IN_TILES=sizes.QUERIES_IN_TILES,
        IS_STATIC=sizes.IS_STATIC,
    )
    row_format = tiles.RowFormat(sizes.D, BLOCK_D, sizes.USE_INT64_OFFSETS)
    output = replace(output, desc=o_desc, smem=o_smem, format=row_format)
    if ROTATES_QUERIES:
        starts_ptr = tile_source.starts_ptr if tile_source.FROM_START else None
        query_source = replace(query_source, position_limit=position_limit, starts_ptr=starts_ptr)
        query_source = replace(query_source, saved_desc=q_rot_desc)
    # ``rotate_queries`` leaves the first tile's queries to the warps that attend.
    first_source = None if LOADS_QUERIES else query_source
    loaded, intervals = queries if LOADS_QUERIES else None, mask if HAS_INTERVALS else None
    loader = forward_producers.Loader(
        q_desc, k_desc, v_desc, q_rope_desc, k_rope_desc, loaded, keys, values, arrival, intervals, sizes.PDL,
        EARLY=sizes.EARLY, LOOKUP=sizes.LOOKUP,
    )

    ROTATE: gl.constexpr = forward_producers.rotate_rope if IS_LATENT else forward_producers.rotate_queries
    # The list of tasks. Triton runs the first one in the warps that have run this function so far.
    own = Attention(0, CONSUMERS, announced, queries, keys, values, mask, weighing, first_source, output, NQ, sizes.KEEPS_QUERIES, sizes.OPAQUE)
    gl.warp_specialize(
        [(attend, (own,)), (attend, (replace(own, INDEX=1),))]
        + ([(attend, (replace(own, INDEX=2),))] if CONSUMERS == 3 else [])
        + ([(ROTATE, (announced, queries, query_source))] if ROTATES_QUERIES else [])
        + [(forward_producers.load, (loader, schedule, announced))],
        [channels.WARPGROUP_WARPS] * (TILE_READERS - 1) + [1],
        [sizes.ATTEND_REGISTERS] * (CONSUMERS - 1)
        + ([sizes.ROTATE_REGISTERS] if ROTATES_QUERIES else [])
        + [channels.LOAD_REGISTERS],
    )


@record
class Attention:
    """A warpgroup that attends, number INDEX of COUNT. All other fields are the same for each of them."""

    INDEX: gl.constexpr
    COUNT: gl.constexpr
    announced: forward_tiles.Announcements
    queries: channels.Channel
    keys: channels.Channel
    values: channels.Channel
    mask: masks.PositionMask | masks.IntervalMask
    weighing: Weighing
    query_source: forward_producers.QuerySource | None  # if they rotate the queries of the block's first tile
    output: ForwardOutput
    NQ: gl.tensor
    KEEPS_QUERIES: gl.constexpr = False
    OPAQUE: gl.constexpr = False


@jit
def attend(attention):
    """Attend with a warpgroup's rows of every tile, [ROWS * INDEX, ROWS * INDEX + ROWS).

    ``tile_step`` counts the tiles, ``key_step`` the key blocks of all tiles. One loop serves the blocks that need a
    mask and those that do not: with two loops ptxas set up the address of q in the first one alone, and jumped past it
    if that loop had no iterations.

    The first block of an aligned tile is on the diagonal, and the first warpgroup sees half of it: FIRST_COUNT keys.
    The other keys get weights of zero. Their product with the values costs time, but little energy.

    A block's product with the values runs concurrently with the scores and the maxima of the next block. VALUES says
    when it is awaited. "before weights" of that block leaves registers free, and the weights may be packed between
    exponentials; "after weights" hides more of the product. "before scores" overlaps it with nothing, so that weights
    and scores are never alive together.
    """
    INDEX: gl.constexpr = attention.INDEX
    announced, keys, values = attention.announced, attention.keys, attention.values
    mask, weighing, output = attention.mask, attention.weighing, attention.output
    queries = attention.queries.of_warpgroup(INDEX)
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    BLOCK_D: gl.constexpr = keys.buffer.shape[4]
    DTYPE: gl.constexpr = keys.buffer.dtype
    FIRST_COUNT: gl.constexpr = BLOCK_N // 2 if mask.IS_ALIGNED and INDEX == 0 else BLOCK_N
    SEEN: gl.constexpr = INDEX * ROWS  # keys of an aligned tile's first block that all rows see
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_COUNT, 16])
    RIGHT: gl.constexpr = columns.right_columns(output.format.D, BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    rows = gl.arange(0, ROWS, ROW)
    key_columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    # The same in the layout of a tile's first scores.
    first_rows = gl.arange(0, ROWS, gl.SliceLayout(1, FIRST))
    first_columns = gl.arange(0, FIRST_COUNT, gl.SliceLayout(0, FIRST))
    nothing = gl.zeros([ROWS, FIRST_COUNT], gl.float32, FIRST)

    tile_step = 0
    key_step = 0
    tile = forward_tiles.next_tile(announced, tile_step)
    start_m = tile.start_m + INDEX * ROWS
    row_numbers = mask.row_number(tile, start_m) + first_rows
    # A block of a packed call may have no tile, because only the device knows how many hold queries.
    exists = output.view is None or tile.num_blocks > 0
    at_queries = queries.at(tile_step)
    at_keys = keys.at(key_step)
    if attention.query_source is None:
        queries.wait_full(at_queries, exists)
    else:
        forward_producers.rotate_first_queries(attention.query_source, tile, queries, start_m)
    keys.wait_full(at_keys, exists)
    k = columns.rows_in(keys, at_keys, FIRST_COUNT)
    q = queries_in(attention, queries, at_queries, exists)
    first_visit = mask.visit(at_keys, 0, exists)
    tile = first_visit.counted(tile)
    first = issue_scores(attention, q, k, nothing, RIGHT)
    first = compat.warpgroup_mma_wait(0, deps=[first])
    keys.release_by_threads(at_keys, exists)
    compat.barrier()  # see ``multiply``
    first = softmax.cap_scores(first, weighing.scale, DTYPE)
    first = mask.hide(first, row_numbers, first_columns, first_visit, tile, SEEN)
    first, state = softmax.weigh_first(first, weighing.scale.qk_scale, ROW)
    p = softmax.whole_weights(softmax.pack_weights(first, DTYPE), S)
    if INDEX == attention.COUNT - 1:
        channels.hand_over_tensor_cores(attention.INDEX, attention.COUNT)
    if attention.query_source is not None and attention.query_source.saved_desc is not None:
        # Until the TMA has read the first queries, before their slot is released.
        compat.tma_store_wait(0)
    while tile.num_blocks > 0:
        acc = columns.zero_parts(ROWS, BLOCK_D, RIGHT)
        correction = gl.full([ROWS], 1.0, gl.float32, ROW)
        running = state
        if output.highest_ptr is not None:
            running = replace(state, highest=state.maximum)  # that of one block does not lag
        at_queries = queries.at(tile_step)
        if not attention.KEEPS_QUERIES:
            q = columns.rows_in(queries, at_queries)
        for step in range(1, tile.num_blocks):
            key_step += 1
            s, acc, visit = multiply(attention, q, acc, p, correction, key_step, step, True, BLOCK_N)
            if queries.STAGES == 1 and not attention.KEEPS_QUERIES and step + 1 == tile.num_blocks:
                # Early, so that the next tile's queries arrive while this one's last softmax is computed.
                queries.release(at_queries)
            s = mask.hide(s, row_numbers, key_columns, visit, tile)
            running, subtrahend, correction = softmax.follow_maximum(s, running, weighing.scale.qk_scale)
            if weighing.VALUES == "before weights":
                acc = columns.wait_for_parts(acc, PENDING=0)
                values.release_by_threads(values.at(key_step - 1))
            p, running = softmax.weigh_scores(s, subtrahend, correction, running, weighing.scale.qk_scale)
            if weighing.PIN_SUMS:
                ptxas.pin(running.sums)
            if weighing.VALUES == "after weights":
                acc = columns.wait_for_parts(acc, PENDING=0)
                values.release_by_threads(values.at(key_step - 1))
            p = softmax.pack_weights(p, DTYPE)
        if output.highest_ptr is not None:
            # Before the next tile's first scores, where registers are scarcest.
            store_statistic(attention, output.highest_ptr, running.highest * row_softmax.LN2, tile, rows)
        if not attention.KEEPS_QUERIES:
            queries.release(at_queries, queries.STAGES > 1 or tile.num_blocks == 1)

        # The next tile's first scores run concurrently with this tile's last product with the values. After the last
        # tile they are computed from stale buffers and discarded.
        tile_step += 1
        key_step += 1
        finished = tile
        tile = forward_tiles.next_tile(announced, tile_step)
        exists = tile.num_blocks > 0
        row_numbers = mask.row_number(tile, tile.start_m + INDEX * ROWS) + first_rows
        at_queries = queries.at(tile_step)
        queries.wait_full(at_queries, exists)
        q = queries_in(attention, queries, at_queries, exists)
        first, acc, first_visit = multiply(attention, q, acc, p, correction, key_step, 0, exists, FIRST_COUNT)
        tile = first_visit.counted(tile)
        first = mask.hide(first, row_numbers, first_columns, first_visit, tile, SEEN)
        first, state = softmax.weigh_first(first, weighing.scale.qk_scale, ROW)

        seen, factor = finish_rows(attention, finished, rows, running)
        compat.tma_store_wait(0)
        if weighing.PIN_SUMS:
            ptxas.pin(state.sums)
        if weighing.VALUES != "before scores":
            acc = columns.wait_for_parts(acc, PENDING=0)
            values.release_by_threads(values.at(key_step - 1))
        o = softmax.finish_output(acc, seen, factor, DTYPE)
        write_output(output, o, finished, INDEX)
        p = softmax.whole_weights(softmax.pack_weights(first, DTYPE), S)
    if INDEX == 0:
        # The last warpgroup hands the tensor cores over once more.
        channels.wait_for_tensor_cores(attention.INDEX)
    compat.tma_store_wait(0)


@jit
def queries_in(attention, queries, at_queries, exists):
    """Return the queries of a full slot: ``ScoreRows``, or with KEEPS_QUERIES words, and release the slot."""
    if attention.KEEPS_QUERIES:
        BLOCK_N: gl.constexpr = attention.keys.buffer.shape[3]
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        q = columns.rows_in(queries, at_queries).columns.load(gl.DotOperandLayout(0, S, 2))
        queries.release(at_queries, exists)
        return softmax.keep_queries(q)
    else:
        return columns.rows_in(queries, at_queries)


@jit
def slot_of(attention, channel, step):
    cursor = channel.at(step)
    if attention.OPAQUE and channel.STAGES == 1:
        cursor = replace(cursor, slot=ptxas.opaque(channel.FIRST))
    return cursor


@jit
def issue_scores(attention, q, k, nothing, RIGHT: gl.constexpr):
    if attention.KEEPS_QUERIES:
        S: gl.constexpr = nothing.type.layout
        BLOCK_N: gl.constexpr = attention.keys.buffer.shape[3]
        WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        a = softmax.unpack_weights(q, attention.keys.buffer.dtype, gl.DotOperandLayout(0, WHOLE, 2))
        a = gl.convert_layout(a, gl.DotOperandLayout(0, S, 2), assert_trivial=True)
        return compat.warpgroup_mma(a, k.columns.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        return columns.issue_row_scores(q, k, nothing, RIGHT)


@jit
def multiply(attention, q, acc, p, correction, key_step, step, exists, COUNT: gl.constexpr):
    """Multiply the queries with key block ``key_step``, and weights p with the values of the block before it.

    q: ``ScoreRows``; p: packed weights; correction (ROWS,): a factor for acc, ``ColumnParts`` of
    (ROWS, BLOCK_D), before the product is added. Returns the scores (ROWS, COUNT) float32 of the block's first COUNT
    keys, capped if the call has a cap, and acc, which is still in flight unless VALUES is "before scores", and the
    ``Visit`` of the block, which is the tile's number ``step``. Unless it ``exists``, the scores are meaningless.
    """
    keys, values, weighing = attention.keys, attention.values, attention.weighing
    BLOCK_D: gl.constexpr = keys.buffer.shape[4]
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    RIGHT: gl.constexpr = 0 if acc.right is None else acc.right.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    nothing = gl.zeros([ROWS, COUNT], gl.float32, S)
    at_values = slot_of(attention, values, key_step - 1)
    weights = softmax.unpack_weights(p, keys.buffer.dtype, gl.DotOperandLayout(0, acc.left.type.layout, 2))
    if weighing.VALUES == "before scores":
        acc = softmax.rescale_output(acc, correction)
        values.wait_full(at_values)
        v = values.tile(at_values).reshape((BLOCK_N, BLOCK_D))
        channels.wait_for_tensor_cores(attention.INDEX)
        acc = columns.issue_by_columns(weights, v, acc)
        at_keys = slot_of(attention, keys, key_step)
        keys.wait_full(at_keys, exists)
        visit = attention.mask.visit(at_keys, step, exists)
        k = columns.rows_in(keys, at_keys, COUNT)
        acc = columns.wait_for_parts(acc, PENDING=0)
        values.release_by_threads(at_values)
        if attention.OPAQUE:
            own = attention.queries.of_warpgroup(attention.INDEX)
            q = columns.rows_in(own, channels.Cursor(slot=ptxas.opaque(own.FIRST), step=None, parity=None))
        s = issue_scores(attention, q, k, nothing, RIGHT)
        channels.hand_over_tensor_cores(attention.INDEX, attention.COUNT)
        s = compat.warpgroup_mma_wait(0, deps=[s])
    else:
        at_keys = slot_of(attention, keys, key_step)
        keys.wait_full(at_keys, exists)
        visit = attention.mask.visit(at_keys, step, exists)
        k = columns.rows_in(keys, at_keys, COUNT)
        channels.wait_for_tensor_cores(attention.INDEX)
        if attention.OPAQUE:
            own = attention.queries.of_warpgroup(attention.INDEX)
            q = columns.rows_in(own, channels.Cursor(slot=ptxas.opaque(own.FIRST), step=None, parity=None))
        s = issue_scores(attention, q, k, nothing, RIGHT)
        acc = softmax.rescale_output(acc, correction)
        # Triton's analysis of shared memory inserts one barrier an iteration. Without this one it would be before the
        # wait for keys, when this warpgroup has no product in flight.
        compat.barrier()
        values.wait_full(at_values)
        v = values.tile(at_values).reshape((BLOCK_N, BLOCK_D))
        acc = columns.issue_by_columns(weights, v, acc)
        channels.hand_over_tensor_cores(attention.INDEX, attention.COUNT)
        # The groups of the values may stay in flight.
        s = compat.warpgroup_mma_wait(2 if RIGHT else 1, deps=[s])
    keys.release_by_threads(at_keys, exists)
    return softmax.cap_scores(s, weighing.scale, keys.buffer.dtype), acc, visit


@jit
def store_statistic(attention, ptr, x, tile, rows):
    """Store x (ROWS,) of a warpgroup's rows of a tile, those that exist, in a (B, HQ, NQ) tensor; rows: 0 .. ROWS."""
    offs_m = tile.start_m + attention.INDEX * ROWS + rows
    gl.store(ptr + tile.bh.to(gl.int64) * attention.NQ + offs_m, x, mask=offs_m < tile.query_end)


@jit
def finish_rows(attention, tile, rows, state):
    """Write lse of a warpgroup's rows (ROWS,): 0 .. ROWS; returns (seen, factor) for ``finish_output``.

    factor (ROWS,): the output is acc times this; a row that is not ``seen`` has seen no key, and its output is 0.
    """
    ROW: gl.constexpr = state.maximum.type.layout
    row_sum = gl.convert_layout(gl.sum(state.sums, 1), ROW)  # of the four threads of a quad
    sink = None
    if attention.weighing.sinks_ptr is not None:
        sink = gl.load(attention.weighing.sinks_ptr + tile.head).to(gl.float32) * row_softmax.LOG2E
    seen, row_max, divisor, weight = row_softmax.finish_sums(state.maximum, row_sum, sink)
    lse = row_softmax.log_sum_exp(seen, row_max, divisor)
    store_statistic(attention, attention.output.lse_ptr, lse, tile, rows)
    return seen, gl.where(seen, weight / divisor, 0.0)


@jit
def write_output(output, o, tile, INDEX: gl.constexpr):
    """Write o, 16-bit ``ColumnParts`` of (ROWS, BLOCK_D), to the warpgroup's rows of a tile, those that exist.

    The caller has waited for the TMA to read the warpgroup's last output. It may still be reading this one when the
    function returns.
    """
    COLUMNS: gl.constexpr = output.smem.shape[4]  # of one store
    row = tile.start_m + INDEX * ROWS
    o_tile = output.smem.index(INDEX)
    if output.format.BLOCK_D > COLUMNS:
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        # Each thread keeps its values.
        halves = gl.split(o.left.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)))
        for i in gl.static_range(2):
            if i > 0:
                compat.tma_store_wait(0)
            o_tile.reshape((ROWS, COLUMNS)).store(gl.convert_layout(halves[i], HALF, assert_trivial=True))
            write_columns(output, o_tile, tile, row, COLUMN=i * COLUMNS)
    else:
        # The TMA does not store the columns after two parts, because the tensor lacks them.
        columns.store_parts(o_tile.reshape((ROWS, COLUMNS)), o, columns.LEFT)
        write_columns(output, o_tile, tile, row, COLUMN=0)


@jit
def write_columns(output, o_tile, tile, row, COLUMN: gl.constexpr):
    """Store o_tile (1, 1, ROWS, columns) in rows [row, row + ROWS) and columns from COLUMN on.

    The TMA stops at the tensor's end, but not at a packed sequence's, so that the last rows of a sequence are stored
    from registers.
    """
    compat.fence_async_shared()
    if output.view is None or row + ROWS <= tile.query_end:
        compat.tma_store(output.desc, [tile.batch, tile.head, row, COLUMN], o_tile)
    elif row < tile.query_end:
        BLOCK_D: gl.constexpr = o_tile.shape[3]
        WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
        o = o_tile.reshape((ROWS, BLOCK_D)).load(WHOLE)
        row_format = replace(output.format, BLOCK_D=BLOCK_D)
        origin = tiles.Origin(batch=0, head=tile.head.to(gl.int64), row=row)
        rows = tiles.columns_from(tiles.head_rows(output.view, origin, tile.query_end - row, row_format), COLUMN)
        tiles.store_tile(rows, o, gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE)), WHOLE)


@triton.jit(do_not_specialize=["H", "NQ"])
def max_logit_kernel(highest_ptr, max_logit_ptr, cu_q_ptr, H, NQ, BLOCK: tl.constexpr):
    """Take the maximum over the rows of one batch entry, or packed sequence, and head; a program for each.

    highest: (B, H, NQ) float32, or (H, NQ) of packed rows with cu_q (sequences + 1,) int32, else None. max_logit:
    (B | sequences, H) float32, -inf where there are no rows.
    """
    entry = tl.program_id(0)
    first = entry.to(tl.int64) * NQ
    length = NQ
    if cu_q_ptr is not None:
        sequence = entry // H
        begin, length = sequences.packed_rows(cu_q_ptr, sequence, sequence + 1, NQ)
        first = (entry % H).to(tl.int64) * NQ + begin
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        rows = tl.load(highest_ptr + first + offs, mask=offs < length, other=float("-inf"))
        highest = tl.maximum(highest, rows)
    tl.store(max_logit_ptr + entry, tl.max(highest, 0))
