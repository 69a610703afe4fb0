# mypy: ignore-errors
"""dQ of multi-head latent attention on sm_90: a kernel with the tiles and the order of the forward.

A block takes tiles of 128 query rows of a head, and two warpgroups of 64 rows each go through the key blocks that they
see: dQ = scale * dS K, with dS = P * (dO V^T - delta) and P = exp2(scores - lse). 192 columns of dQ are 96 registers a
thread, and dS is an operand in the registers in which it was computed, so that the warpgroups exchange nothing and no
sum depends on the order of blocks. The product with K is delayed by one block, as that with V in the forward.
"""

from fused_rope_attn.attention.hopper.channels import (
    Channel,
    allocate_barriers,
    channel_of,
    load_existing_rows,
    load_rows,
    rope_part,
    tiles_of,
)
from fused_rope_attn.attention.hopper.columns import issue_over_columns, issue_row_scores, part_zeros, rows_in
from fused_rope_attn.attention.hopper.forward_tiles import (
    Schedule,
    announce_tile,
    announcements,
    first_work,
    next_tile,
    next_work,
    query_position,
)
from fused_rope_attn.attention.hopper.masks import PositionMask, Visit
from fused_rope_attn.attention.hopper.ptxas import opaque
from fused_rope_attn.attention.hopper.shapes import (
    CONSUMERS,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
)
from fused_rope_attn.attention.hopper.softmax import pack_weights, unpack_weights
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import (
    PairLayouts,
    RotaryTables,
    head_rotation,
    load_angles,
    rotate,
    store_pairs,
    unpack_pairs,
)
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.tiles import Origin, RowFormat, TensorView, head_rows, store_tile
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, warpgroup_mma, warpgroup_mma_wait

_NUMBERS = "num_heads heads_per_section HQ GROUP_SIZE NQ NK pitch stats_size tiles_per_head window".split()


@record
class QueryGradientLoads:
    """The tensors that the loading warp reads, as ``latent_dq_kernel`` takes them, and its mbarrier."""

    q: gl.tensor
    q_rope: gl.tensor
    k: gl.tensor
    k_rope: gl.tensor
    v: gl.tensor
    do: gl.tensor
    arrival: gl.tensor | None  # of ``load_existing_rows``; None: keys end where the tensor does
    PDL: gl.constexpr


@record
class QueryGradients:
    """The gradients of queries, not yet rotated back, and what they follow from.

    stats: as for ``latent_dq_kernel``, float32, base-2 lse of rows of pitch a head, and delta ``size`` further on.
    """

    dq: TensorView  # (B, HQ, NQ, R)
    dq_nope: TensorView  # (B, HQ, NQ, D)
    tables: RotaryTables
    stats_ptr: gl.tensor
    pitch: gl.tensor
    size: gl.tensor
    qk_scale: gl.tensor
    softmax_scale: gl.tensor
    format: RowFormat  # of dq_nope
    rope_format: RowFormat


@jit
def load_block(loads, desc, rope_desc, head_rope, work, row, channel, step, arrivals):
    """Load the block of K or V from ``row`` on as soon as its slot is empty, with zeros for keys that do not exist.

    rope_desc, head_rope: of the rotated columns, or None. Returns ``arrivals``, see ``load_existing_rows``.
    """
    cursor = channel.at(step)
    channel.wait_empty(cursor)
    tile, full = channel.tile(cursor), channel.full_barrier(cursor)
    rope = rope_part(rope_desc, head_rope, channel, cursor)
    batch, head = work.tile.batch, work.head_kv
    if loads.arrival is None:
        load_rows(desc, batch, head, row, tile, full, None, rope)
    else:
        first, last = work.tile.first_key, work.tile.num_keys
        if work.first_k is not None:
            first += work.first_k
            last += work.first_k
        arrivals = load_existing_rows(
            desc, batch, head, row, tile, full, first, last, loads.arrival, arrivals, None, rope
        )
    return arrivals


@jit
def load_tile_queries(loads, tile, tile_step, queries, dos):
    """Load a tile's rows of Q and dO, for each warpgroup as soon as it has released its last ones."""
    for warpgroup in gl.static_range(CONSUMERS):
        row = tile.start_m + warpgroup * ROWS
        own, own_do = queries.of_warpgroup(warpgroup), dos.of_warpgroup(warpgroup)
        cursor = own.at(tile_step)
        own.wait_empty(cursor)
        rope = rope_part(loads.q_rope, tile.head, own, cursor)
        load_rows(loads.q, tile.batch, tile.head, row, own.tile(cursor), own.full_barrier(cursor), None, rope)
        own_do.wait_empty(cursor)
        load_rows(loads.do, tile.batch, tile.head, row, own_do.tile(cursor), own_do.full_barrier(cursor))


@jit
def load_for_dq(loads, schedule, tiles, queries, dos, keys, values):
    """Announce tiles, and load their queries and the key and value blocks that they visit; one warp's work.

    The order is that of ``forward_producers.load``. The launch before, of dk and dv, lets this one start when the
    pre-process has finished. So this one fills multiprocessors that have no more key blocks, and ends after that one.
    """
    work = first_work(schedule)
    announce_tile(tiles, 0, work.tile)
    tile_step = 0
    key_step = 0
    arrivals = 0
    while work.tile.num_blocks > 0:
        tile = work.tile
        row = work.key_row(0, schedule.BLOCK_N)
        arrivals = load_block(loads, loads.k, loads.k_rope, 0, work, row, keys, key_step, arrivals)
        load_tile_queries(loads, tile, tile_step, queries, dos)
        tile_step += 1
        following = next_work(schedule, work)
        announce_tile(tiles, tile_step, following.tile)
        for visit in range(tile.num_blocks):
            row = work.key_row(visit, schedule.BLOCK_N)
            if visit > 0:
                arrivals = load_block(loads, loads.k, loads.k_rope, 0, work, row, keys, key_step, arrivals)
            arrivals = load_block(loads, loads.v, None, None, work, row, values, key_step, arrivals)
            key_step += 1
        work = following
    wait_for_previous_launch(loads.PDL)


@jit
def issue_scores_and_dp(q, do, keys, values, step, nothing):
    """Begin the scores and dP of key block ``step`` as soon as it has arrived: (scores, dP), two groups and one."""
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    at_keys, at_values = keys.at(step), values.at(step)
    keys.wait_full(at_keys)
    s_token = issue_row_scores(q, rows_in(keys, at_keys, 0, BLOCK_N), nothing, 0)
    values.wait_full(at_values)
    dp_token = issue_over_columns(do, rows_in(values, at_values, 0, BLOCK_N).columns, nothing, 0)
    return s_token, dp_token


@jit
def issue_dq(ds, keys, step, dq, dq_rope):
    """Add dS of key block ``step``, packed words, times its keys to dq and dq_rope: both in flight, two groups."""
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    k = rows_in(keys, keys.at(step), 0, BLOCK_N)
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
    origin = Origin(batch=tile.batch.to(gl.int64), head=tile.head.to(gl.int64), row=start_m)
    num_rows = tile.query_end - start_m
    rows = head_rows(out.dq_nope, origin, num_rows, out.format)
    store_tile(rows, dq * out.softmax_scale, gl.arange(0, ROWS, gl.SliceLayout(1, OWN)), OWN)
    first, second = unpack_pairs(dq_rope * out.softmax_scale)
    PAIRS: gl.constexpr = first.type.layout
    offs = gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS))
    rotation = head_rotation(out.tables, tile.batch.to(gl.int64), tile.num_keys)
    # Otherwise the addresses of the angles of all pairs are kept for the next tile, on the stack.
    pairs = gl.arange(0, out.rope_format.BLOCK_D // 2, gl.SliceLayout(0, PAIRS)) + opaque(0)
    cos, sin = load_angles(rotation, offs + position, out.rope_format.BLOCK_D, PAIRS, pairs)
    first, second = rotate(first, second, cos, sin, CONJUGATE=True)
    rope_rows = head_rows(out.dq, origin, num_rows, out.rope_format)
    store_pairs(rope_rows, first, second, offs, rotation, PairLayouts(PAIRS, dq_rope.type.layout))


@jit
def accumulate_dq(WARPGROUP: gl.constexpr, tiles, queries, dos, keys, values, out, mask):
    """Make dQ of rows [ROWS * WARPGROUP, ROWS * WARPGROUP + ROWS) of every tile.

    ``tile_step`` counts the tiles, ``key_step`` the key blocks of all tiles.
    """
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    DTYPE: gl.constexpr = keys.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    queries, dos = queries.of_warpgroup(WARPGROUP), dos.of_warpgroup(WARPGROUP)
    tile_step = 0
    key_step = 0
    tile = next_tile(tiles, tile_step)
    while tile.num_blocks > 0:
        start_m = tile.start_m + WARPGROUP * ROWS
        position = query_position(tile, start_m)
        stats = out.stats_ptr + tile.bh.to(gl.int64) * out.pitch + tile.rotated_row + WARPGROUP * ROWS
        exists = rows < tile.query_end - start_m
        lse = gl.load(stats + rows, mask=exists, other=float("inf"))
        delta = gl.load(stats + out.size + rows, mask=exists, other=0.0)
        at_tile = queries.at(tile_step)
        queries.wait_full(at_tile)
        dos.wait_full(at_tile)
        q = rows_in(queries, at_tile, 0, ROWS)
        do = rows_in(dos, at_tile, 0, ROWS).columns
        dq = part_zeros(ROWS, keys.buffer.shape[4])
        dq_rope = part_zeros(ROWS, keys.rope.shape[4])
        first = gl.to_tensor(0)
        if WARPGROUP == 0 and mask.window.right is not None:
            # The last keys of a tile may be hidden from its first half.
            last_block = tile.last_block
            hidden = last_block * BLOCK_N > position + ROWS - 1 + mask.window.right
            if hidden & (tile.num_blocks > 1):
                keys.wait_full(keys.at(key_step))
                keys.release_by_threads(keys.at(key_step))
                values.wait_full(values.at(key_step))
                values.release_by_threads(values.at(key_step))
                first += 1
        key_step += first
        s_token, dp_token = issue_scores_and_dp(q, do, keys, values, key_step, no_s)
        s = warpgroup_mma_wait(1, deps=[s_token])
        s = mask.hide(s, position + rows, columns, Visit(first, None), tile)
        p = gl.exp2(s * out.qk_scale - lse[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        values.release_by_threads(values.at(key_step))
        ds = pack_weights(p * (dp - delta[:, None]), DTYPE)
        for visit in range(first + 1, tile.num_blocks):
            key_step += 1
            s_token, dp_token = issue_scores_and_dp(q, do, keys, values, key_step, no_s)
            dq, dq_rope = issue_dq(ds, keys, key_step - 1, dq, dq_rope)
            s = warpgroup_mma_wait(3, deps=[s_token])
            s = mask.hide(s, position + rows, columns, Visit(visit, None), tile)
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
        tile = next_tile(tiles, tile_step)
        dq, dq_rope = warpgroup_mma_wait(0, deps=[dq, dq_rope])
        keys.release_by_threads(keys.at(key_step))
        key_step += 1
        store_dq(dq, dq_rope, out, finished, start_m, position)


@jit(do_not_specialize=_NUMBERS)
def latent_dq_kernel(q_desc, q_rope_desc, k_desc, k_rope_desc, v_desc, do_desc, stats_ptr, dq_ptr, dq_nope_ptr, cos_ptr,
                     sin_ptr, counter_ptr, starts_ptr, lens_ptr, dq_strides, dq_nope_strides, cos_strides, sin_strides,
                     qk_scale, softmax_scale, window, num_heads, heads_per_section, HQ, GROUP_SIZE, NQ, NK,
                     pitch, stats_size, tiles_per_head, D: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr,
                     K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, INTERLEAVED: gl.constexpr,
                     READS_LENGTHS: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr, IS_PACKED: gl.constexpr,
                     PDL: gl.constexpr):  # fmt: skip
    """Write dq (B, HQ, NQ, R) and dq_nope (B, HQ, NQ, D). Grid: one block per multiprocessor, or one per tile if fewer.

    q_desc, do_desc (B, HQ, NQ, D) and q_rope_desc (B, HQ, NQ, R) in blocks of ROWS rows; k_desc, v_desc (B, HQ, NK, D)
    and k_rope_desc (B, 1, NK, R) in blocks of BLOCK_N; rotated columns in pair order. stats: the pre-process's, (2 * B
    * HQ * pitch,) float32. counter_ptr, tiles_per_head, heads_per_section, and the masks: as for ``forward_kernel``.
    """
    HAS_STARTS: gl.constexpr = starts_ptr is not None
    HAS_BOUNDS: gl.constexpr = IS_PACKED or HAS_STARTS or lens_ptr is not None or window[0] is not None
    # Numbers that a tile's announcement contains are None here, because Triton 3.6 fails on unused arguments of warps.
    tiles = announcements(HAS_BOUNDS, IS_PACKED, CONSUMERS, NQ=None if IS_PACKED else NQ, NK=None if HAS_BOUNDS else NK)
    # Each warpgroup has a channel of one stage for its rows of Q, and one for those of dO.
    full, empty = allocate_barriers(CONSUMERS), allocate_barriers(CONSUMERS)
    queries = Channel(tiles_of(q_desc, CONSUMERS), full, empty, STAGES=1, rope=tiles_of(q_rope_desc, CONSUMERS))
    full, empty = allocate_barriers(CONSUMERS), allocate_barriers(CONSUMERS)
    dos = Channel(tiles_of(do_desc, CONSUMERS), full, empty, STAGES=1)
    queries.init(FILLS=1, RELEASES=1)
    dos.init(FILLS=1, RELEASES=1)
    keys = channel_of(tiles_of(k_desc, K_STAGES), K_STAGES, tiles_of(k_rope_desc, K_STAGES))
    values = channel_of(tiles_of(v_desc, V_STAGES), V_STAGES)
    keys.init(FILLS=1, RELEASES=CONSUMERS * WARPGROUP_THREADS)
    values.init(FILLS=1, RELEASES=CONSUMERS * WARPGROUP_THREADS)
    arrival = None
    if HAS_BOUNDS:
        arrival = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrival, count=1)

    window = window_of(window)
    mask = PositionMask(window, READS_LENGTHS, HAS_STARTS)
    schedule = Schedule(
        counter_ptr,
        starts_ptr,
        lens_ptr,
        None,
        window,
        num_heads,
        heads_per_section,
        tiles_per_head,
        HQ=None if IS_PACKED else HQ,
        GROUP_SIZE=GROUP_SIZE,
        NQ=None if IS_PACKED else NQ,
        NK=None if IS_PACKED else NK,
        BLOCK_N=BLOCK_N,
        BLOCK_M=CONSUMERS * ROWS,
        IS_PACKED=IS_PACKED,
        READS_LENGTHS=READS_LENGTHS,
        FROM_START=False,
        QUERIES_IN_TILES=IS_PACKED,
    )
    loads = QueryGradientLoads(q_desc, q_rope_desc, k_desc, k_rope_desc, v_desc, do_desc, arrival, PDL)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    dq, dq_nope = TensorView(dq_ptr, dq_strides), TensorView(dq_nope_ptr, dq_nope_strides)
    row_format, rope_format = RowFormat(D, D, USE_INT64_OFFSETS), RowFormat(R, R, USE_INT64_OFFSETS)
    out = QueryGradients(
        dq, dq_nope, tables, stats_ptr, pitch, stats_size, qk_scale, softmax_scale, row_format, rope_format
    )
    gl.warp_specialize(
        [
            (accumulate_dq, (0, tiles, queries, dos, keys, values, out, mask)),
            (accumulate_dq, (1, tiles, queries, dos, keys, values, out, mask)),
            (load_for_dq, (loads, schedule, tiles, queries, dos, keys, values)),
        ],
        [WARPGROUP_WARPS, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )
