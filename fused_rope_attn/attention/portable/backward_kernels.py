"""Portable attention backward: one pre-process, then dK/dV by key blocks and dQ by query blocks; no atomics.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per block.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import existing_keys, partner_rows, scheduled_rows
from fused_rope_attn.kernels.masks import Mask, first_query, key_range, query_range, sequence_mask, visible
from fused_rope_attn.kernels.products import ScoreScale, add_product, score_gradient, score_product
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, head_rotation, load_rotated_tile, store_unrotated
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import LN2, sink_gradient
from fused_rope_attn.kernels.tiles import (
    HeadTiles,
    Origin,
    RowFormat,
    head_rows,
    head_tiles,
    load_head_tile,
    load_tile,
    rows_from,
    store_tile,
)


@record
class Queries:
    """The queries of one head that a block of keys goes through, BLOCK_M at a time, and what belongs to them.

    Rows before the first one that sees a key, which the tiles' ``first_row`` is where there may be such, may hold
    anything.
    """

    q: HeadTiles
    do: HeadTiles
    lse_ptr: tl.tensor  # to the first row's; float32, in base 2, +inf where a row saw nothing
    delta_ptr: tl.tensor  # to the first row's; float32
    offset: tl.tensor  # position of the first row
    sign: tl.tensor  # what q is multiplied by where it is rotated here
    BLOCK_M: tl.constexpr


@record
class Keys:
    """The keys and values that a block of queries goes through, BLOCK_N at a time."""

    k: HeadTiles
    v: HeadTiles
    BLOCK_N: tl.constexpr


@record
class Call:
    """What the parts of a sequence have in common."""

    rotation: Rotation | None  # of queries and keys; None where they lie rotated in memory
    mask: Mask
    scale: ScoreScale


@triton.jit
def dkdv_range(dk, dv, k, v, positions_k, queries, call, first, count, jump_after, jump_to,
               APPLY_MASK: tl.constexpr):  # fmt: skip
    """Add ``count`` query blocks to dk and dv, (BLOCK_N, BLOCK_D) float32: from block ``first`` on.

    APPLY_MASK: some of the pairs may be hidden, and some of the queries may not exist; and ``jump_after`` blocks are
    followed by those from block ``jump_to`` on. Keys that do not exist need no mask here: they only reach rows of dk
    and dv that are never stored, or stored as zero.
    """
    scale = call.scale
    BLOCK_M: tl.constexpr = queries.BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        if APPLY_MASK:
            start_m = tl.where(i < jump_after, start_m, (jump_to - jump_after) * BLOCK_M + i * BLOCK_M)
        exists = offs < queries.q.rows.num_rows - start_m
        q = load_rotated_tile(
            queries.q, call.rotation, start_m, offs, queries.offset, queries.sign, CHECK_ROWS=APPLY_MASK
        )
        if APPLY_MASK:
            lse = tl.load(queries.lse_ptr + start_m + offs, mask=exists, other=float("inf"))
        else:
            lse = tl.load(queries.lse_ptr + start_m + offs)
        scores_t = score_product(k, q, scale)
        p_t = tl.math.exp2(scores_t * scale.qk_scale - lse[None, :])
        if APPLY_MASK:
            mask = call.mask
            if mask.IS_CAUSAL or mask.READS_LENGTHS or mask.left is not None or mask.right is not None:
                positions_q = (start_m + queries.offset + offs)[None, :]
                p_t = tl.where(visible(mask, positions_q, positions_k[:, None]), p_t, 0.0)
        do = load_head_tile(queries.do, start_m, offs, CHECK_ROWS=APPLY_MASK)
        dv = add_product(p_t.to(do.dtype), do, dv, scale.PRECISION)
        if APPLY_MASK:
            delta = tl.load(queries.delta_ptr + start_m + offs, mask=exists, other=0.0)
        else:
            delta = tl.load(queries.delta_ptr + start_m + offs)
        dp_t = tl.dot(v, tl.trans(do), input_precision=scale.PRECISION)
        ds_t = score_gradient(p_t, dp_t, delta[None, :], scores_t, scale)
        dk = add_product(ds_t.to(q.dtype), q, dk, scale.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section", "num_sequences", "left",
                               "right"])  # fmt: skip
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dk_ptr, dv_ptr, starts_ptr, lens_ptr,
                cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, cos_strides,
                sin_strides, qk_scale, q_sign, cap_scale, left, right, num_heads, HKV, GROUP_SIZE, NQ, NK,
                num_sequences, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
                READS_LENGTHS: tl.constexpr, ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr,
                USE_TMA: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). stats (2, B, HQ, NQ) float32: lse and delta, as ``preprocess_kernel``
    leaves them. Without ROTATE_INLINE q and k lie rotated in memory, in pair order, and q_sign is in q.
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    tile = scheduled_rows(
        NK, HKV, num_heads, section, cu_k_ptr, num_sequences, BLOCK_N, LAST_TILE_FIRST=False
    )  # fmt: skip
    if cu_k_ptr is not None:
        if tile.start >= tile.num_rows:
            return
    first_q, len_q = partner_rows(tile, cu_q_ptr, num_sequences, NQ)
    len_k = existing_keys(lens_ptr, tile.origin.batch, tile.num_rows)
    q_offset = len_k - len_q
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    rotation = head_rotation(
        cos_ptr, sin_ptr, cos_strides, sin_strides, tile.origin.batch, len_k, R, INTERLEAVED
    )  # fmt: skip
    mask = sequence_mask(starts_ptr, tile.origin.batch, q_offset, len_k, left, right, IS_CAUSAL, READS_LENGTHS)
    call = Call(
        rotation=rotation if ROTATE_INLINE else None,
        mask=mask,
        scale=ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION),
    )
    start_n = tile.start
    offs = tl.arange(0, BLOCK_N)
    positions_k = start_n + offs
    k_tiles = head_tiles(k_ptr, k_strides, tile.origin, len_k, row_format, READS_LENGTHS, USE_TMA=False)
    v_rows = head_rows(v_ptr, v_strides, tile.origin, len_k, row_format)
    k = load_rotated_tile(k_tiles, call.rotation, start_n, offs, 0)
    v = load_tile(rows_from(v_rows, start_n), offs, CHECK_ROWS=True)

    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, q_offset)
    first, full_first, full_last, last = query_range(mask, start_n, q_offset, len_q, BLOCK_M, BLOCK_N)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP_SIZE):
        head_q = tile.origin.head * GROUP_SIZE + member
        origin_q = Origin(batch=tile.origin.batch, head=head_q, row=first_q)
        lse_ptr = stats_ptr + (tile.origin.batch * HKV * GROUP_SIZE + head_q) * NQ + first_q
        queries = Queries(
            q=head_tiles(q_ptr, q_strides, origin_q, len_q, row_format, READS_LENGTHS, USE_TMA, first_row),
            do=head_tiles(do_ptr, do_strides, origin_q, len_q, row_format, READS_LENGTHS, USE_TMA, first_row),
            lse_ptr=lse_ptr,
            delta_ptr=lse_ptr + tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ,
            offset=q_offset,
            sign=q_sign,
            BLOCK_M=BLOCK_M,
        )
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, queries, call, first, full_first - first + last - full_last,
            jump_after=full_first - first, jump_to=full_last, APPLY_MASK=True,
        )  # fmt: skip
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, queries, call, full_first, full_last - full_first, jump_after=0, jump_to=0,
            APPLY_MASK=False,
        )  # fmt: skip
    # Rows of dk and dv are written whether or not their keys exist.
    if READS_LENGTHS or mask.first_key is not None:
        exists = positions_k < len_k
        if mask.first_key is not None:
            exists = exists & (positions_k >= mask.first_key)
        dk = tl.where(exists[:, None], dk, 0.0)
        dv = tl.where(exists[:, None], dv, 0.0)
    softmax_scale = qk_scale * LN2
    if cap_scale is not None:
        softmax_scale *= cap_scale
    dv_rows = head_rows(dv_ptr, dv_strides, tile.origin, tile.num_rows, row_format)
    store_tile(rows_from(dv_rows, start_n), dv, offs)
    dk_rows = head_rows(dk_ptr, dk_strides, tile.origin, tile.num_rows, row_format)
    store_unrotated(rows_from(dk_rows, start_n), dk * softmax_scale, offs, rotation, start_n)


@triton.jit
def dq_range(dq, q, do, lse, delta, positions_q, keys, call, first, last, APPLY_MASK: tl.constexpr):
    """Add keys [first, last) to dq (BLOCK_M, BLOCK_D) float32; ``first`` is a multiple of BLOCK_N.

    lse (base 2) and delta (BLOCK_M,) float32. APPLY_MASK: some of the pairs may be hidden, some keys may not exist.
    """
    scale = call.scale
    offs = tl.arange(0, keys.BLOCK_N)
    for start_n in range(first, last, keys.BLOCK_N):
        k = load_rotated_tile(keys.k, call.rotation, start_n, offs, 0, CHECK_ROWS=APPLY_MASK)
        v = load_head_tile(keys.v, start_n, offs, CHECK_ROWS=APPLY_MASK)
        scores = score_product(q, k, scale)
        p = tl.math.exp2(scores * scale.qk_scale - lse[:, None])
        if APPLY_MASK:
            p = tl.where(visible(call.mask, positions_q[:, None], (start_n + offs)[None, :]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=scale.PRECISION)
        ds = score_gradient(p, dp, delta[:, None], scores, scale)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=scale.PRECISION)
    return dq


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section", "num_sequences", "left",
                               "right"])  # fmt: skip
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, dq_ptr, dsinks_ptr, sinks_ptr, starts_ptr,
              lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides, cos_strides,
              sin_strides, qk_scale, q_sign, softmax_scale, cap_scale, left, right, num_heads, HQ, GROUP_SIZE, NQ, NK,
              num_sequences, section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, READS_LENGTHS: tl.constexpr,
              ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
              USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient (dsinks, (tiles, B * HQ) float32).

    Grid: (``count_tiles`` of the queries * B * HQ). stats and ROTATE_INLINE as in ``dkdv_kernel``. With PDL it starts
    while dkdv_kernel drains: it reads only what the pre-process wrote, which dkdv_kernel waited for.
    """
    tile = scheduled_rows(
        NQ, HQ, num_heads, section, cu_q_ptr, num_sequences, BLOCK_M, LAST_TILE_FIRST=IS_CAUSAL
    )  # fmt: skip
    if cu_q_ptr is not None:
        if tile.start >= tile.num_rows:
            return
    first_k, len_k = partner_rows(tile, cu_k_ptr, num_sequences, NK)
    len_k = existing_keys(lens_ptr, tile.origin.batch, len_k)
    origin_k = Origin(batch=tile.origin.batch, head=tile.origin.head // GROUP_SIZE, row=first_k)
    q_offset = len_k - tile.num_rows
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    rotation = head_rotation(
        cos_ptr, sin_ptr, cos_strides, sin_strides, tile.origin.batch, len_k, R, INTERLEAVED
    )  # fmt: skip
    mask = sequence_mask(starts_ptr, tile.origin.batch, q_offset, len_k, left, right, IS_CAUSAL, READS_LENGTHS)
    call = Call(
        rotation=rotation if ROTATE_INLINE else None,
        mask=mask,
        scale=ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION),
    )
    keys = Keys(
        k=head_tiles(k_ptr, k_strides, origin_k, len_k, row_format, READS_LENGTHS, USE_TMA, mask.first_key),
        v=head_tiles(v_ptr, v_strides, origin_k, len_k, row_format, READS_LENGTHS, USE_TMA, mask.first_key),
        BLOCK_N=BLOCK_N,
    )
    start_m = tile.start
    offs = tl.arange(0, BLOCK_M)
    positions_q = start_m + q_offset + offs
    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, q_offset)
    q_tiles = head_tiles(
        q_ptr, q_strides, tile.origin, tile.num_rows, row_format, READS_LENGTHS, USE_TMA=False, first_row=first_row
    )
    do_rows = head_rows(do_ptr, do_strides, tile.origin, tile.num_rows, row_format, first_row)
    q = load_rotated_tile(q_tiles, call.rotation, start_m, offs, q_offset, q_sign)
    do = load_tile(rows_from(do_rows, start_m), offs, CHECK_ROWS=True)
    exists = offs < tile.num_rows - start_m
    lse_rows = stats_ptr + tl.cast(tile.batch_head, tl.int64) * NQ + tile.origin.row + start_m
    lse = tl.load(lse_rows + offs, mask=exists, other=float("inf"))
    delta = tl.load(lse_rows + tl.cast(num_heads, tl.int64) * NQ + offs, mask=exists, other=0.0)

    first, full_first, full_last, last = key_range(mask, start_m, q_offset, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if mask.first_key is not None:
        dq = dq_range(
            dq, q, do, lse, delta, positions_q, keys, call, first, tl.minimum(full_first, last), APPLY_MASK=True
        )  # fmt: skip
    dq = dq_range(dq, q, do, lse, delta, positions_q, keys, call, full_first, full_last, APPLY_MASK=False)
    dq = dq_range(dq, q, do, lse, delta, positions_q, keys, call, full_last, last, APPLY_MASK=True)
    # Not for data: the launch after this one must find dk and dv finished too.
    wait_for_previous_launch(PDL)
    if sinks_ptr is not None:
        part = sink_gradient(tl.load(sinks_ptr + tile.origin.head), lse, delta)
        tl.store(dsinks_ptr + (tile.number * num_heads + tile.batch_head), part)
    dq_rows = head_rows(dq_ptr, dq_strides, tile.origin, tile.num_rows, row_format)
    store_unrotated(rows_from(dq_rows, start_m), dq * softmax_scale, offs, rotation, start_m + q_offset)
