"""Portable attention backward: one pre-process, then dK/dV by key blocks and dQ by query blocks; no atomics.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per block.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile
from fused_rope_attn.kernels.masks import first_key, first_query, key_range, query_range, visible
from fused_rope_attn.kernels.primitives import (
    LN2,
    add_product,
    head_source,
    head_tables,
    let_next_launch_start,
    load_head_tile,
    load_rotated,
    load_tile,
    scheduled_tile,
    sink_gradient,
    store_tile,
    store_unrotated,
    tanh,
    wait_for_previous_launch,
)


@triton.jit
def dkdv_range(dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
               place, first, count, jump_after, jump_to, alive, q_offset, NQ, NK, start, left, right, qk_scale,
               cap_scale, q_sign, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
               INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, INLINE: tl.constexpr,
               MASKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Add ``count`` query blocks to dk and dv: from block ``first`` on, with one jump to block ``jump_to``.

    Query rows before ``alive`` (None: 0) see nothing and may hold anything. Keys that do not exist need no mask here:
    they only reach rows of dk and dv that are never stored, or stored as zero.
    """
    rows = tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        if MASKED:
            start_m = tl.where(i < jump_after, start_m, (jump_to - jump_after) * BLOCK_M + i * BLOCK_M)
        rows_left = NQ - start_m
        if INLINE:
            first_row = None
            if alive is not None:
                first_row = alive - start_m
            q = load_rotated(
                q_source + tl.cast(start_m, tl.int64) * q_strides[2], rows, rows_left, q_strides, tables,
                start_m + q_offset, NK, q_sign, D, R, BLOCK_D, INTERLEAVED, MASKED, LONG, None, None, first_row,
            )  # fmt: skip
        else:
            q = load_head_tile(
                q_source, place, start_m, rows, NQ, q_strides[2], q_strides[3], D, BLOCK_M, BLOCK_D, TMA,
                MASKED, LONG, False, alive,
            )  # fmt: skip
        if MASKED:
            lse = tl.load(lse_base + start_m + rows, mask=rows < rows_left, other=float("inf"))
        else:
            lse = tl.load(lse_base + start_m + rows)
        scores_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if cap_scale is not None:
            scores_t = tanh(scores_t * cap_scale, q.dtype == tl.float32)
        p_t = tl.math.exp2(scores_t * qk_scale - lse[None, :])
        if MASKED:
            if IS_CAUSAL or BOUNDED or left is not None or right is not None:
                positions_q = (start_m + q_offset + rows)[None, :]
                exists = visible(positions_q, positions_k[:, None], NK, IS_CAUSAL, start, left, right, BOUNDED)
                p_t = tl.where(exists, p_t, 0.0)
        do = load_head_tile(
            do_source, place, start_m, rows, NQ, do_strides[2], do_strides[3], D, BLOCK_M, BLOCK_D, TMA, MASKED,
            LONG, False, alive,
        )  # fmt: skip
        dv = add_product(p_t.to(do.dtype), do, dv, PRECISION)
        if MASKED:
            delta = tl.load(delta_base + start_m + rows, mask=rows < rows_left, other=0.0)
        else:
            delta = tl.load(delta_base + start_m + rows)
        dp_t = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        if cap_scale is not None:
            ds_t *= 1.0 - scores_t * scores_t
        dk = add_product(ds_t.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section", "num_sequences", "left",
                               "right"])  # fmt: skip
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dk_ptr, dv_ptr, starts_ptr, lens_ptr,
                cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, cos_strides,
                sin_strides, qk_scale, q_sign, cap_scale, left, right, num_heads, HKV, GROUP_SIZE, NQ, NK,
                num_sequences, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
                INLINE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV).
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    tiles = count_tiles(NK, num_sequences, BLOCK_N)
    tile, bh = scheduled_tile(tl.program_id(0), tiles, num_heads, section, LAST_FIRST=False)
    batch = (bh // HKV).to(tl.int64)
    head = (bh % HKV).to(tl.int64)
    stats_size = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ
    stats_pitch = NQ
    # Rows of dk and dv are written whether or not their keys exist.
    written = NK
    first_q = 0
    first_k = 0
    if lens_ptr is not None:
        NK = existing_keys(lens_ptr, batch, NK)
    if cu_k_ptr is not None:
        sequence, first_k, NK, tile = packed_tile(tile, cu_k_ptr, num_sequences, NK, BLOCK_N)
        if tile * BLOCK_N >= NK:
            return
        written = NK
        first_q, NQ = packed_partner(cu_q_ptr, sequence, num_sequences, NQ)
    place_k = (batch, head, first_k)
    start_n = tile * BLOCK_N
    keys_left = NK - start_n
    rows = tl.arange(0, BLOCK_N)
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    k_rows = head_source(k_ptr, place_k, k_strides, False) + tl.cast(start_n, tl.int64) * k_strides[2]
    v_rows = head_source(v_ptr, place_k, v_strides, False) + tl.cast(start_n, tl.int64) * v_strides[2]
    if INLINE:
        k = load_rotated(
            k_rows, rows, keys_left, k_strides, tables, start_n, NK, 1.0, D, R, BLOCK_D, INTERLEAVED, True, LONG,
        )  # fmt: skip
    else:
        k = load_tile(k_rows, rows, keys_left, k_strides[2], k_strides[3], D, BLOCK_D, True, LONG)
    v = load_tile(v_rows, rows, keys_left, v_strides[2], v_strides[3], D, BLOCK_D, True, LONG)

    q_offset = NK - NQ
    start = None
    if starts_ptr is not None or left is not None:
        start = first_key(starts_ptr, batch, q_offset, NK, left)
    alive = None
    if BOUNDED:
        alive = first_query(q_offset, start, right, IS_CAUSAL)
    first, full_first, full_last, last = query_range(
        start_n, q_offset, NQ, NK, start, left, right, IS_CAUSAL, BOUNDED, BLOCK_M, BLOCK_N
    )

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    positions_k = start_n + rows
    for member in range(GROUP_SIZE):
        head_q = head * GROUP_SIZE + member
        place = (batch, head_q, first_q)
        q_source = head_source(q_ptr, place, q_strides, TMA)
        do_source = head_source(do_ptr, place, do_strides, TMA)
        lse_base = stats_ptr + (batch * HKV * GROUP_SIZE + head_q) * stats_pitch + first_q
        delta_base = lse_base + stats_size
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
            place, first, full_first - first + last - full_last, full_first - first, full_last, alive, q_offset,
            NQ, NK, start, left, right, qk_scale, cap_scale, q_sign, D, R, BLOCK_M, BLOCK_D, INTERLEAVED, IS_CAUSAL,
            BOUNDED, INLINE, True, PRECISION, TMA, LONG,
        )  # fmt: skip
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, q_source, do_source, lse_base, delta_base, q_strides, do_strides, tables,
            place, full_first, full_last - full_first, 0, 0, alive, q_offset, NQ, NK, start, left, right,
            qk_scale, cap_scale, q_sign, D, R, BLOCK_M, BLOCK_D, INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, False,
            PRECISION, TMA, LONG,
        )  # fmt: skip
    if BOUNDED or start is not None:
        exists = positions_k < NK
        if start is not None:
            exists = exists & (positions_k >= start)
        dk = tl.where(exists[:, None], dk, 0.0)
        dv = tl.where(exists[:, None], dv, 0.0)
    k_scale = qk_scale * LN2
    if cap_scale is not None:
        k_scale *= cap_scale
    dv_rows = head_source(dv_ptr, place_k, dv_strides, False) + tl.cast(start_n, tl.int64) * dv_strides[2]
    store_tile(dv_rows, dv, rows, written - start_n, dv_strides[2], dv_strides[3], D, BLOCK_D, LONG)
    dk_rows = head_source(dk_ptr, place_k, dk_strides, False) + tl.cast(start_n, tl.int64) * dk_strides[2]
    store_unrotated(
        dk_rows, dk * k_scale, rows, written - start_n, dk_strides, tables, start_n, NK, D, R, BLOCK_D, INTERLEAVED,
        LONG,
    )  # fmt: skip


@triton.jit
def dq_range(dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, place, first,
             last, NK, start, left, right, qk_scale, cap_scale, D: tl.constexpr, R: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
             BOUNDED: tl.constexpr, INLINE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
             TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Add keys [first, last) to dq; ``first`` is a multiple of BLOCK_N."""
    rows = tl.arange(0, BLOCK_N)
    for start_n in range(first, last, BLOCK_N):
        if INLINE:
            first_row = None
            if start is not None:
                first_row = start - start_n
            k = load_rotated(
                k_source + tl.cast(start_n, tl.int64) * k_strides[2], rows, NK - start_n, k_strides, tables,
                start_n, NK, 1.0, D, R, BLOCK_D, INTERLEAVED, MASKED, LONG, None, None, first_row,
            )  # fmt: skip
        else:
            k = load_head_tile(
                k_source, place, start_n, rows, NK, k_strides[2], k_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
                LONG, BOUNDED, start,
            )  # fmt: skip
        v = load_head_tile(
            v_source, place, start_n, rows, NK, v_strides[2], v_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
            LONG, BOUNDED, start,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if cap_scale is not None:
            scores = tanh(scores * cap_scale, q.dtype == tl.float32)
        p = tl.math.exp2(scores * qk_scale - lse[:, None])
        if MASKED:
            positions_k = (start_n + rows)[None, :]
            exists = visible(positions_q[:, None], positions_k, NK, IS_CAUSAL, start, left, right, BOUNDED)
            p = tl.where(exists, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if cap_scale is not None:
            ds *= 1.0 - scores * scores
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section", "num_sequences", "left",
                               "right"])  # fmt: skip
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dq_ptr, dsinks_ptr, sinks_ptr, starts_ptr,
              lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides, cos_strides,
              sin_strides, qk_scale, q_sign, softmax_scale, cap_scale, left, right, num_heads, HQ, GROUP_SIZE, NQ, NK,
              num_sequences, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
              INLINE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient (dsinks, (tiles, B * HQ) float32).

    Grid: (``count_tiles`` of the queries * B * HQ). With PDL it starts while dkdv_kernel drains: it reads only what the
    pre-process wrote, which dkdv_kernel waited for.
    """
    tiles = count_tiles(NQ, num_sequences, BLOCK_M)
    tile, bh = scheduled_tile(tl.program_id(0), tiles, num_heads, section, LAST_FIRST=IS_CAUSAL)
    batch = (bh // HQ).to(tl.int64)
    head = (bh % HQ).to(tl.int64)
    lse_base = stats_ptr + tl.cast(bh, tl.int64) * NQ
    stats_size = tl.cast(num_heads, tl.int64) * NQ
    if sinks_ptr is not None:
        dsinks_ptr += tile * num_heads + bh
    first_q = 0
    first_k = 0
    if lens_ptr is not None:
        NK = existing_keys(lens_ptr, batch, NK)
    if cu_q_ptr is not None:
        sequence, first_q, NQ, tile = packed_tile(tile, cu_q_ptr, num_sequences, NQ, BLOCK_M)
        if tile * BLOCK_M >= NQ:
            return
        first_k, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        lse_base += first_q
    place_q = (batch, head, first_q)
    place_k = (batch, head // GROUP_SIZE, first_k)
    k_source = head_source(k_ptr, place_k, k_strides, TMA)
    v_source = head_source(v_ptr, place_k, v_strides, TMA)
    q_base = head_source(q_ptr, place_q, q_strides, False)
    do_base = head_source(do_ptr, place_q, do_strides, False)
    start_m = tile * BLOCK_M
    rows_left = NQ - start_m
    q_offset = NK - NQ
    rows = tl.arange(0, BLOCK_M)
    positions_q = start_m + q_offset + rows
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    start = None
    if starts_ptr is not None or left is not None:
        start = first_key(starts_ptr, batch, q_offset, NK, left)
    first_row = None
    if BOUNDED:
        first_row = first_query(q_offset, start, right, IS_CAUSAL) - start_m
    q_rows = q_base + tl.cast(start_m, tl.int64) * q_strides[2]
    do_rows = do_base + tl.cast(start_m, tl.int64) * do_strides[2]
    if INLINE:
        q = load_rotated(
            q_rows, rows, rows_left, q_strides, tables, start_m + q_offset, NK, q_sign, D, R, BLOCK_D, INTERLEAVED,
            True, LONG, None, None, first_row,
        )  # fmt: skip
    else:
        q = load_tile(
            q_rows, rows, rows_left, q_strides[2], q_strides[3], D, BLOCK_D, True, LONG, None, first_row
        )  # fmt: skip
    do = load_tile(do_rows, rows, rows_left, do_strides[2], do_strides[3], D, BLOCK_D, True, LONG, None, first_row)
    stats_base = lse_base + start_m
    lse = tl.load(stats_base + rows, mask=rows < rows_left, other=float("inf"))
    delta = tl.load(stats_base + stats_size + rows, mask=rows < rows_left, other=0.0)

    first, full_first, full_last, last = key_range(
        start_m, q_offset, NK, start, left, right, IS_CAUSAL, BOUNDED, BLOCK_M, BLOCK_N
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if start is not None:
        dq = dq_range(
            dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, place_k, first,
            tl.minimum(full_first, last), NK, start, left, right, qk_scale, cap_scale, D, R, BLOCK_N, BLOCK_D,
            INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, True, PRECISION, TMA, LONG,
        )  # fmt: skip
    dq = dq_range(
        dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, place_k,
        full_first, full_last, NK, start, left, right, qk_scale, cap_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED,
        IS_CAUSAL, BOUNDED, INLINE, False, PRECISION, TMA, LONG,
    )  # fmt: skip
    dq = dq_range(
        dq, q, do, lse, delta, positions_q, k_source, v_source, k_strides, v_strides, tables, place_k,
        full_last, last, NK, start, left, right, qk_scale, cap_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL,
        BOUNDED, INLINE, True, PRECISION, TMA, LONG,
    )  # fmt: skip
    # Not for data: the launch after this one must find dk and dv finished too.
    wait_for_previous_launch(PDL)
    if sinks_ptr is not None:
        tl.store(dsinks_ptr, sink_gradient(tl.load(sinks_ptr + head), lse, delta))
    dq_rows = head_source(dq_ptr, place_q, dq_strides, False) + tl.cast(start_m, tl.int64) * dq_strides[2]
    store_unrotated(
        dq_rows, dq * softmax_scale, rows, rows_left, dq_strides, tables, start_m + q_offset, NK, D, R, BLOCK_D,
        INTERLEAVED, LONG,
    )  # fmt: skip
