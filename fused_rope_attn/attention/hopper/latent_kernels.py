# mypy: ignore-errors
"""Device code of the sm_90 backward of multi-head latent attention: dk and dv, then a kernel for dq.

*dk and dv*: two warpgroups of ``backward_kernel`` own 64 keys each. They take turns at the tensor cores, twice in each
block: one issues dP and dV, or dK and the next scores, while the other computes P or dS.

*dq*: ``latent_dq_kernel`` has the tiles and the order of the forward. Two warpgroups of 64 query rows each go through
the key blocks that they see: dQ = scale * dS K, with dS = P * (dO V^T - delta) and P = exp2(scores - lse). The product
with K is delayed by one block, as that with V in the forward.
"""

import triton.language as tl

from fused_rope_attn.attention.hopper import (
    backward_block,
    backward_epilogue,
    channels,
    columns,
    forward_producers,
    forward_tiles,
    masks,
)
from fused_rope_attn.attention.hopper.softmax import pack_weights, unpack_weights, weigh
from fused_rope_attn.kernels import ptxas, rotation as rotary, softmax, tiles
from fused_rope_attn.kernels.masks import Window
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, warpgroup_mma, warpgroup_mma_wait


@jit
def add_buffers(buffers):
    """Return the ``Buffers`` for ``accumulate_latent``."""
    TILE: gl.constexpr = [channels.KEYS, channels.BACKWARD_BLOCK_M]
    DTYPE: gl.constexpr = buffers.q.buffer.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, DTYPE)
    return replace(buffers, p=gl.allocate_shared_memory(DTYPE, [channels.CONSUMERS] + TILE, LAYOUT))


@jit
def own_rows(channel, WARPGROUP: gl.constexpr):
    """Return a warpgroup's ``ScoreRows`` of K or V, at an ``opaque`` address, see ``backward_block.whole_tile``."""
    cursor = channels.Cursor(slot=ptxas.opaque(0), step=None, parity=None)
    return columns.rows_in(channel, cursor, channels.KEYS, START=WARPGROUP * channels.KEYS)


@jit
def issue_scores(buffers, cursor, nothing, WARPGROUP: gl.constexpr):
    """Begin the scores of the warpgroup's keys and a query block as soon as that has arrived."""
    buffers.q.wait_full(cursor)
    q = columns.rows_in(buffers.q, cursor)
    return columns.issue_row_scores(own_rows(buffers.k, WARPGROUP), q, nothing, 0)


@jit
def fold_queries(WARPGROUP: gl.constexpr, dk, dk_rope, dv, buffers, keys, queries, sizes, mask, scale):
    """Fold the query blocks, at least one, into dk, dk_rope and dv, each (KEYS, columns) float32; return the three."""
    q_blocks, do_blocks = buffers.q, buffers.do
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels.BACKWARD_BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    P_ROPE: gl.constexpr = gl.DotOperandLayout(0, dk_rope.type.layout, 2)
    no_s = gl.zeros([channels.KEYS, channels.BACKWARD_BLOCK_M], gl.float32, S)
    key_rows = gl.arange(0, channels.KEYS, gl.SliceLayout(1, S))
    query_columns = gl.arange(0, channels.BACKWARD_BLOCK_M, gl.SliceLayout(0, S))
    q_cursor = q_blocks.start_at(gl.to_tensor(0))
    s_token = issue_scores(buffers, q_cursor, no_s, WARPGROUP)
    if WARPGROUP == channels.CONSUMERS - 1:
        channels.hand_over_tensor_cores(WARPGROUP, channels.CONSUMERS)
    for step in range(queries.count):
        do_cursor = do_blocks.at(step)
        s = warpgroup_mma_wait(0, deps=[s_token])
        lse = buffers.lse.index(q_cursor.slot).load(gl.SliceLayout(0, S))
        start_m = (queries.first + step) * channels.BACKWARD_BLOCK_M
        diagonal = start_m + mask.num_keys - sizes.NQ - keys.start_n - WARPGROUP * channels.KEYS
        is_masked = masks.needs_mask(mask, diagonal, step, queries)
        p, _ = weigh(
            s, lse, is_masked, key_rows, query_columns, diagonal, mask, scale, DTYPE, queries.num_masked is not None
        )
        p16 = p.to(DTYPE)
        p_tile = buffers.p.index(WARPGROUP)
        p_tile.store(p16)
        do_blocks.wait_full(do_cursor)
        channels.wait_for_tensor_cores(WARPGROUP)
        dp_token = backward_block.issue_product(own_rows(buffers.v, WARPGROUP).columns, do_blocks, do_cursor, no_s)
        do = columns.rows_in(do_blocks, do_cursor).columns
        dv = warpgroup_mma(gl.convert_layout(p16, P), do, dv, is_async=True)
        channels.hand_over_tensor_cores(WARPGROUP, channels.CONSUMERS)
        dv, dp = warpgroup_mma_wait(0, deps=[dv, dp_token])
        delta = buffers.delta.index(do_cursor.slot).load(gl.SliceLayout(0, S))
        # P as dV takes it: 16 registers less than in float32.
        ds = (p_tile.load(S).to(gl.float32) * (dp - delta[None, :])).to(DTYPE)
        q = columns.rows_in(q_blocks, q_cursor)
        channels.wait_for_tensor_cores(WARPGROUP)
        dk = warpgroup_mma(gl.convert_layout(ds, P), q.columns, dk, is_async=True)
        dk_rope = warpgroup_mma(gl.convert_layout(ds, P_ROPE), q.rope, dk_rope, is_async=True)
        do_blocks.release_by_threads(do_cursor)
        next_q = q_blocks.after(q_cursor)
        s_token = issue_scores(buffers, next_q, no_s, WARPGROUP)
        channels.hand_over_tensor_cores(WARPGROUP, channels.CONSUMERS)
        # Only scores are in flight at the end of an iteration, see ``backward_accumulate.fold_by_keys``.
        dk, dk_rope = warpgroup_mma_wait(2, deps=[dk, dk_rope])
        q_blocks.release_by_threads(q_cursor)
        q_cursor = next_q
    warpgroup_mma_wait(0, deps=[s_token])
    if WARPGROUP == 0:
        # The last warpgroup hands the tensor cores over once more.
        channels.wait_for_tensor_cores(WARPGROUP)
    return dk, dk_rope, dv


@jit
def store_latent_gradients(dk, dk_rope, dv, buffers, keys, NK, mask, scale, gradients, WARPGROUP: gl.constexpr):
    """Write dv, and dk and dk_rope scaled, of the KEYS keys from keys.start_n on; keys that do not exist get zeros.

    dv and dk pass through the memory of the warpgroup's rows of V and K, which no other warps read.
    """
    k_scale = scale.qk_scale * softmax.LN2
    dk, dk_rope = dk * k_scale, dk_rope * k_scale
    if mask.first_key is not None:
        dk = backward_epilogue.drop_keys(dk, keys.start_n, mask)
        dv = backward_epilogue.drop_keys(dv, keys.start_n, mask)
        dk_rope = backward_epilogue.drop_keys(dk_rope, keys.start_n, mask)
    origin = tiles.Origin(batch=keys.batch.to(gl.int64), head=keys.head.to(gl.int64), row=keys.start_n)
    num_rows = NK - keys.start_n
    dv_rows = tiles.head_rows(gradients.dv, origin, num_rows, gradients.format)
    dk_rows = tiles.head_rows(gradients.dk, origin, num_rows, gradients.format)
    dv, dk = columns.ColumnParts(dv, None), columns.ColumnParts(dk, None)
    backward_epilogue.store_dv(dv_rows, dv, own_rows(buffers.v, WARPGROUP).columns)
    backward_epilogue.store_dv(dk_rows, dk, own_rows(buffers.k, WARPGROUP).columns)
    R: gl.constexpr = dk_rope.shape[1]
    rope_format = tiles.RowFormat(R, R, gradients.format.USE_INT64_OFFSETS)
    backward_epilogue.store_sums(tiles.head_rows(gradients.dk_parts, origin, num_rows, rope_format), dk_rope)


@jit
def accumulate_latent(WARPGROUP: gl.constexpr, buffers, gradients, keys, queries, sizes, mask, scale):
    """Compute dk, dk_rope and dv of keys [KEYS * WARPGROUP, KEYS * WARPGROUP + KEYS) of the block.

    mask.first_key None: all keys exist, or a window hides those that do not.
    """
    dv = columns.part_zeros(channels.KEYS, buffers.v.buffer.shape[4])
    dk = columns.part_zeros(channels.KEYS, buffers.k.buffer.shape[4])
    dk_rope = columns.part_zeros(channels.KEYS, buffers.k.rope.shape[4])
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    if queries.count > 0:
        dk, dk_rope, dv = fold_queries(WARPGROUP, dk, dk_rope, dv, buffers, keys, queries, sizes, mask, scale)
    own = backward_block.KeyBlock(batch=keys.batch, head=keys.head, start_n=keys.start_n + WARPGROUP * channels.KEYS)
    store_latent_gradients(dk, dk_rope, dv, buffers, own, sizes.NK, mask, scale, gradients, WARPGROUP)


_NUMBERS = "num_tiles NQ NK pitch stats_size tiles_per_head heads_per_section window_left window_right".split()


@record
class QueryGradients:
    """The gradients of queries, not yet rotated back, and what they follow from.

    stats: the pre-process's, (2 * B * HQ * pitch,) float32: base-2 lse of rows of pitch a head, and delta ``size``
    further on.
    """

    dq: tiles.TensorView  # (B, HQ, NQ, R)
    dq_nope: tiles.TensorView  # (B, HQ, NQ, D)
    tables: rotary.RotaryTables
    stats_ptr: gl.tensor
    qk_scale: gl.tensor
    softmax_scale: gl.tensor
    format: tiles.RowFormat  # of dq_nope
    rope_format: tiles.RowFormat
    pitch: gl.tensor | None = None  # the kernel sets these two
    size: gl.tensor | None = None


@jit
def load_for_dq(loader, schedule, announced, PDL: gl.constexpr):
    """Load as the forward does, and dO; one warp's work.

    The launch before, of dk and dv, lets this one start when the pre-process has finished. So this one fills
    multiprocessors that have no more key blocks, and ends after that one.
    """
    forward_producers.load(loader, schedule, announced)
    wait_for_previous_launch(PDL)


@jit
def issue_scores_and_dp(q, do, keys, values, step, nothing):
    """Begin the scores and dP of key block ``step`` as soon as it has arrived: (scores, dP), two groups and one."""
    at_keys, at_values = keys.at(step), values.at(step)
    keys.wait_full(at_keys)
    s_token = columns.issue_row_scores(q, columns.rows_in(keys, at_keys), nothing, 0)
    values.wait_full(at_values)
    dp_token = columns.issue_over_columns(do, columns.rows_in(values, at_values).columns, nothing, 0)
    return s_token, dp_token


@jit
def issue_dq(ds, keys, step, dq, dq_rope):
    """Add dS of key block ``step``, packed words, times its keys to dq and dq_rope: both in flight, two groups."""
    k = columns.rows_in(keys, keys.at(step))
    operand = unpack_weights(ds, k.columns.dtype, gl.DotOperandLayout(0, dq.type.layout, 2))
    of_rope = gl.convert_layout(operand, gl.DotOperandLayout(0, dq_rope.type.layout, 2), assert_trivial=True)
    dq = warpgroup_mma(operand, k.columns, dq, is_async=True)
    dq_rope = warpgroup_mma(of_rope, k.rope, dq_rope, is_async=True)
    return dq, dq_rope


@jit
def store_dq(dq, dq_rope, out, tile, start_m, position):
    """Scale dq and dq_rope (ROWS, columns) of the rows from start_m on, rotate the latter back, and write both.

    position: of row start_m.
    """
    OWN: gl.constexpr = dq.type.layout
    origin = tiles.Origin(batch=tile.batch.to(gl.int64), head=tile.head.to(gl.int64), row=start_m)
    num_rows = tile.query_end - start_m
    rows = tiles.head_rows(out.dq_nope, origin, num_rows, out.format)
    tiles.store_tile(rows, dq * out.softmax_scale, gl.arange(0, channels.ROWS, gl.SliceLayout(1, OWN)), OWN)
    first, second = rotary.unpack_pairs(dq_rope * out.softmax_scale)
    PAIRS: gl.constexpr = first.type.layout
    offs = gl.arange(0, channels.ROWS, gl.SliceLayout(1, PAIRS))
    rotation = rotary.head_rotation(out.tables, tile.batch.to(gl.int64), tile.num_keys)
    # Otherwise the addresses of the angles of all pairs are kept for the next tile, on the stack.
    pairs = gl.arange(0, out.rope_format.BLOCK_D // 2, gl.SliceLayout(0, PAIRS)) + ptxas.opaque(0)
    angles = rotary.load_angles(rotation, offs + position, out.rope_format.BLOCK_D, PAIRS, pairs)
    first, second = rotary.rotate_back(first, second, angles)
    rope_rows = tiles.head_rows(out.dq, origin, num_rows, out.rope_format)
    rotary.store_pairs(rope_rows, first, second, offs, rotation, rotary.PairLayouts(PAIRS, dq_rope.type.layout))


@jit
def accumulate_dq(WARPGROUP: gl.constexpr, announced, queries, dos, keys, values, out, mask):
    """Make dQ of rows [ROWS * WARPGROUP, ROWS * WARPGROUP + ROWS) of every tile.

    ``tile_step`` counts the tiles, ``key_step`` the key blocks of all tiles.
    """
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    DTYPE: gl.constexpr = keys.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows = gl.arange(0, channels.ROWS, gl.SliceLayout(1, S))
    key_columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    no_s = gl.zeros([channels.ROWS, BLOCK_N], gl.float32, S)
    queries, dos = queries.of_warpgroup(WARPGROUP), dos.of_warpgroup(WARPGROUP)
    tile_step = 0
    key_step = 0
    tile = forward_tiles.next_tile(announced, tile_step)
    while tile.num_blocks > 0:
        start_m = tile.start_m + WARPGROUP * channels.ROWS
        position = tile.position(start_m)
        stats = out.stats_ptr + tile.bh.to(gl.int64) * out.pitch + tile.rotated_row + WARPGROUP * channels.ROWS
        exists = rows < tile.query_end - start_m
        lse = gl.load(stats + rows, mask=exists, other=float("inf"))
        delta = gl.load(stats + out.size + rows, mask=exists, other=0.0)
        at_tile = queries.at(tile_step)
        queries.wait_full(at_tile)
        dos.wait_full(at_tile)
        q = columns.rows_in(queries, at_tile)
        do = columns.rows_in(dos, at_tile).columns
        dq = columns.part_zeros(channels.ROWS, keys.buffer.shape[4])
        dq_rope = columns.part_zeros(channels.ROWS, keys.rope.shape[4])
        first = gl.to_tensor(0)
        if WARPGROUP == 0 and mask.window.right is not None:
            # The last keys of a tile may be hidden from its first half.
            last_block = tile.last_key_block()
            hidden = last_block * BLOCK_N > position + channels.ROWS - 1 + mask.window.right
            if hidden & (tile.num_blocks > 1):
                keys.wait_full(keys.at(key_step))
                keys.release_by_threads(keys.at(key_step))
                values.wait_full(values.at(key_step))
                values.release_by_threads(values.at(key_step))
                first += 1
        key_step += first
        s_token, dp_token = issue_scores_and_dp(q, do, keys, values, key_step, no_s)
        s = warpgroup_mma_wait(1, deps=[s_token])
        s = mask.hide(s, position + rows, key_columns, masks.Visit(first, None), tile)
        p = gl.exp2(s * out.qk_scale - lse[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        values.release_by_threads(values.at(key_step))
        ds = pack_weights(p * (dp - delta[:, None]), DTYPE)
        for visit in range(first + 1, tile.num_blocks):
            key_step += 1
            s_token, dp_token = issue_scores_and_dp(q, do, keys, values, key_step, no_s)
            dq, dq_rope = issue_dq(ds, keys, key_step - 1, dq, dq_rope)
            s = warpgroup_mma_wait(3, deps=[s_token])
            s = mask.hide(s, position + rows, key_columns, masks.Visit(visit, None), tile)
            p = gl.exp2(s * out.qk_scale - lse[:, None])
            dp = warpgroup_mma_wait(2, deps=[dp_token])
            values.release_by_threads(values.at(key_step))
            ds = p * (dp - delta[:, None])
            dq, dq_rope = warpgroup_mma_wait(0, deps=[dq, dq_rope])
            keys.release_by_threads(keys.at(key_step - 1))
            ds = pack_weights(ds, DTYPE)
        queries.release(at_tile)
        dos.release(at_tile)
        dq, dq_rope = issue_dq(ds, keys, key_step, dq, dq_rope)
        finished = tile
        tile_step += 1
        tile = forward_tiles.next_tile(announced, tile_step)
        dq, dq_rope = warpgroup_mma_wait(0, deps=[dq, dq_rope])
        keys.release_by_threads(keys.at(key_step))
        key_step += 1
        store_dq(dq, dq_rope, out, finished, start_m, position)


@jit(do_not_specialize=_NUMBERS)
def latent_dq_kernel(q_desc, q_rope_desc, k_desc, k_rope_desc, v_desc, do_desc, tile_source, gradients, num_tiles, NQ,
                     NK, pitch, stats_size, tiles_per_head, heads_per_section, window_left, window_right,
                     K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write dq (B, HQ, NQ, R) and dq_nope (B, HQ, NQ, D). Grid: one block per multiprocessor, or one per tile if fewer.

    q_desc, do_desc (B, HQ, NQ, D) and q_rope_desc (B, HQ, NQ, R) in blocks of ROWS rows; k_desc, v_desc (B, HQ, NK, D)
    and k_rope_desc (B, 1, NK, R) in blocks of BLOCK_N; rotated columns in pair order. gradients: ``QueryGradients``;
    sizes: ``QueryGradientSizes``. tile_source, num_tiles, tiles_per_head, heads_per_section, and the window: as for
    ``forward_kernel``.
    """
    tile_source, gradients = unpack((tile_source, gradients))
    IS_PACKED: gl.constexpr = tiles_per_head is not None
    HAS_STARTS: gl.constexpr = tile_source.starts_ptr is not None
    HAS_BOUNDS: gl.constexpr = IS_PACKED or HAS_STARTS or tile_source.lens_ptr is not None or window_left is not None
    HQ = do_desc.shape[1]
    announced = forward_tiles.announcements(HAS_BOUNDS, IS_PACKED, channels.CONSUMERS, NQ, NK)
    # Each warpgroup has a channel of one stage for its rows of Q, and one for those of dO.
    COUNT: gl.constexpr = channels.CONSUMERS
    q_rope = channels.tiles_of(q_rope_desc, COUNT)
    queries = replace(channels.channel_of(channels.tiles_of(q_desc, COUNT), COUNT, q_rope), STAGES=1)
    dos = replace(channels.channel_of(channels.tiles_of(do_desc, COUNT), COUNT), STAGES=1)
    queries.init(FILLS=1, RELEASES=1)
    dos.init(FILLS=1, RELEASES=1)
    keys = channels.channel_of(channels.tiles_of(k_desc, K_STAGES), K_STAGES, channels.tiles_of(k_rope_desc, K_STAGES))
    values = channels.channel_of(channels.tiles_of(v_desc, V_STAGES), V_STAGES)
    keys.init(FILLS=1, RELEASES=COUNT * channels.WARPGROUP_THREADS)
    values.init(FILLS=1, RELEASES=COUNT * channels.WARPGROUP_THREADS)
    arrival = None
    if HAS_BOUNDS:
        arrival = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrival, count=1)

    window = Window(window_left, window_right, HIDES_PAIRS=window_left is not None or window_right is not None)
    mask = masks.PositionMask(window, tile_source.READS_LENGTHS, HAS_STARTS, IS_ALIGNED=False)
    schedule = forward_tiles.Schedule(
        tile_source,
        window,
        num_tiles,
        do_desc.shape[0] * do_desc.shape[1],
        heads_per_section,
        tiles_per_head,
        HQ=None if IS_PACKED else HQ,
        GROUP_SIZE=1,
        NQ=None if IS_PACKED else NQ,
        NK=None if IS_PACKED else NK,
        BLOCK_N=k_desc.block_type.shape[2],
        BLOCK_M=channels.CONSUMERS * channels.ROWS,
        QUERIES_IN_TILES=IS_PACKED,
    )
    loader = forward_producers.Loader(
        q_desc, k_desc, v_desc, q_rope_desc, k_rope_desc, queries, keys, values, arrival, None, False, do_desc, dos
    )
    out = replace(gradients, pitch=pitch, size=stats_size)
    gl.warp_specialize(
        [
            (accumulate_dq, (0, announced, queries, dos, keys, values, out, mask)),
            (accumulate_dq, (1, announced, queries, dos, keys, values, out, mask)),
            (load_for_dq, (loader, schedule, announced, PDL)),
        ],
        [channels.WARPGROUP_WARPS, 1],
        [channels.MULTIPLY_REGISTERS, channels.LOAD_REGISTERS],
    )
