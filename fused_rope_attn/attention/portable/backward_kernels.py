"""Portable attention backward: one pre-process, then dK/dV by key blocks and dQ by query blocks; no atomics.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per block. Where q and k were normed before they were rotated, these
are the gradients of the normed ones; ``norm_gradient_kernel`` does the rest.

Both kernels begin with the lines that the forward kernel begins with: only the kernel itself can bundle its flat
parameters into records.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.keys import keys_of_head
from fused_rope_attn.kernels.masks import Mask, first_query, key_range, query_range, visible
from fused_rope_attn.kernels.products import ScoreScale, add_product, score_gradient, score_product
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, head_rotation, load_rotated_tile, store_unrotated, with_norm
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.sequences import (
    MaskArguments,
    scheduled_keys,
    scheduled_queries,
    sequence_of_keys,
    sequence_of_queries,
)
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
    """Queries of one head of a sequence and what belongs to them, read BLOCK_M at a time.

    Rows before the first one that sees a key may hold anything; where there may be such, it is the tiles' first_row.
    """

    q: HeadTiles
    do: HeadTiles
    lse_ptr: tl.tensor  # to the first row's; float32, in base 2, +inf where a row saw nothing
    delta_ptr: tl.tensor  # to the first row's; float32
    rotation: Rotation | None  # of the queries, which are then multiplied by ``sign``; None where they lie rotated
    sign: tl.tensor
    q_offset: tl.tensor  # position of the first row
    mask: Mask
    BLOCK_M: tl.constexpr


@triton.jit
def dkdv_range(dk, dv, k, v, positions_k, queries, scale, first, count, jump_after, jump_to,
               APPLY_MASK: tl.constexpr):  # fmt: skip
    """Add ``count`` query blocks to dk and dv, (BLOCK_N, BLOCK_D) float32, which are returned.

    k (rotated) and v (BLOCK_N, BLOCK_D) and their positions_k (BLOCK_N,) are those of the program. The query blocks are
    ``jump_after`` blocks from number ``first`` on, and then those from number ``jump_to`` on.

    APPLY_MASK: some of the pairs may be hidden, and some of the queries may not exist. Without it there is no jump.
    Keys that do not exist need no mask here: they only reach rows of dk and dv that are not stored, or stored as zero.
    """
    BLOCK_M: tl.constexpr = queries.BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        if APPLY_MASK:
            start_m = tl.where(i < jump_after, start_m, (jump_to - jump_after) * BLOCK_M + i * BLOCK_M)
        exists = offs < queries.q.rows.num_rows - start_m
        q = load_rotated_tile(
            queries.q, queries.rotation, start_m, offs, queries.q_offset, queries.sign, CHECK_ROWS=APPLY_MASK
        )
        if APPLY_MASK:
            lse = tl.load(queries.lse_ptr + start_m + offs, mask=exists, other=float("inf"))
        else:
            lse = tl.load(queries.lse_ptr + start_m + offs)
        scores_t = score_product(k, q, scale)
        p_t = tl.math.exp2(scores_t * scale.qk_scale - lse[None, :])
        if APPLY_MASK:
            mask = queries.mask
            if mask.IS_CAUSAL or mask.READS_LENGTHS or mask.left is not None or mask.right is not None:
                positions_q = (start_m + queries.q_offset + offs)[None, :]
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


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "heads_per_section",
                               "num_sequences", "left", "right"])  # fmt: skip
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, dk_ptr, dv_ptr,
                starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides,
                dv_strides, cos_strides, sin_strides, qk_scale, q_sign, cap_scale, norm_eps, norm_offset, left, right,
                num_heads, HKV, GROUP_SIZE, NQ, NK, num_sequences, heads_per_section,
                D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
                READS_LENGTHS: tl.constexpr, ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr,
                USE_TMA: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). stats (2, B, HQ, NQ) float32: lse and delta, as ``preprocess_kernel``
    leaves them. Without ROTATE_INLINE q and k lie normed and rotated in memory, in pair order, and q_sign is in q; with
    it q_norm and k_norm (D,) are the weights of their norms, or None.
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        left=left, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=READS_LENGTHS,
    )  # fmt: skip
    tile = scheduled_keys(NK, HKV, num_heads, heads_per_section, masks, BLOCK_N)
    start_n = tile.index * BLOCK_N
    if cu_k_ptr is not None:
        if start_n >= tile.num_rows:
            return
    stats_size = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ
    sequence = sequence_of_keys(tile, NQ, masks)
    mask = sequence.mask
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    scale = ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION)
    rotation = head_rotation(
        cos_ptr, sin_ptr, cos_strides, sin_strides, sequence.batch, sequence.num_keys, R, INTERLEAVED
    )
    k_rotation = with_norm(rotation, k_norm_ptr, norm_eps, norm_offset, D) if ROTATE_INLINE else None
    q_rotation = with_norm(rotation, q_norm_ptr, norm_eps, norm_offset, D) if ROTATE_INLINE else None
    k_tiles = head_tiles(
        k_ptr, k_strides, tile.origin, sequence.num_keys, row_format, READS_LENGTHS, USE_TMA=False
    )  # fmt: skip
    v_rows = head_rows(v_ptr, v_strides, tile.origin, sequence.num_keys, row_format)
    offs = tl.arange(0, BLOCK_N)
    k = load_rotated_tile(k_tiles, k_rotation, start_n, offs, 0)
    v = load_tile(rows_from(v_rows, start_n), offs, CHECK_ROWS=True)
    positions_k = start_n + offs

    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    first, full_first, full_last, last = query_range(
        mask, start_n, sequence.q_offset, sequence.num_queries, BLOCK_M, BLOCK_N
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP_SIZE):
        head_q = tile.origin.head * GROUP_SIZE + member
        origin = Origin(batch=sequence.batch, head=head_q, row=sequence.first_q)
        lse_rows = stats_ptr + (sequence.batch * HKV * GROUP_SIZE + head_q) * NQ + sequence.first_q
        queries = Queries(
            q=head_tiles(q_ptr, q_strides, origin, sequence.num_queries, row_format, READS_LENGTHS, USE_TMA, first_row),
            do=head_tiles(
                do_ptr, do_strides, origin, sequence.num_queries, row_format, READS_LENGTHS, USE_TMA, first_row
            ),
            lse_ptr=lse_rows,
            delta_ptr=lse_rows + stats_size,
            rotation=q_rotation,
            sign=q_sign,
            q_offset=sequence.q_offset,
            mask=mask,
            BLOCK_M=BLOCK_M,
        )
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, queries, scale, first, full_first - first + last - full_last,
            jump_after=full_first - first, jump_to=full_last, APPLY_MASK=True,
        )  # fmt: skip
        dk, dv = dkdv_range(
            dk, dv, k, v, positions_k, queries, scale, full_first, full_last - full_first, jump_after=0, jump_to=0,
            APPLY_MASK=False,
        )  # fmt: skip
    # Rows of dk and dv are written whether or not their keys exist.
    if READS_LENGTHS or mask.first_key is not None:
        exists = positions_k < sequence.num_keys
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
def dq_range(dq, q, do, lse, delta, positions_q, keys, scale, first, last, APPLY_MASK: tl.constexpr):
    """Add keys [first, last) to dq (BLOCK_M, BLOCK_D) float32, which is returned; ``first`` is a multiple of BLOCK_N.

    q (rotated) and do (BLOCK_M, BLOCK_D), lse (base 2) and delta (BLOCK_M,) float32 and positions_q (BLOCK_M,) are
    those of the program. APPLY_MASK: some of the pairs may be hidden, and some of the keys may not exist.
    """
    offs = tl.arange(0, keys.BLOCK_N)
    for start_n in range(first, last, keys.BLOCK_N):
        k = load_rotated_tile(keys.k, keys.rotation, start_n, offs, 0, CHECK_ROWS=APPLY_MASK)
        v = load_head_tile(keys.v, start_n, offs, CHECK_ROWS=APPLY_MASK)
        scores = score_product(q, k, scale)
        p = tl.math.exp2(scores * scale.qk_scale - lse[:, None])
        if APPLY_MASK:
            p = tl.where(visible(keys.mask, positions_q[:, None], (start_n + offs)[None, :]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=scale.PRECISION)
        ds = score_gradient(p, dp, delta[:, None], scores, scale)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=scale.PRECISION)
    return dq


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "heads_per_section",
                               "num_sequences", "left", "right"])  # fmt: skip
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, dq_ptr, dsinks_ptr,
              sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides,
              dq_strides, cos_strides, sin_strides, qk_scale, q_sign, softmax_scale, cap_scale, norm_eps, norm_offset,
              left, right, num_heads, HQ, GROUP_SIZE, NQ, NK, num_sequences, heads_per_section,
              D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, READS_LENGTHS: tl.constexpr,
              ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
              USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient (dsinks, (tiles, B * HQ) float32).

    Grid: (``count_tiles`` of the queries * B * HQ). stats, ROTATE_INLINE and the norms as in ``dkdv_kernel``. With
    PDL it starts while dkdv_kernel drains: it reads only what the pre-process wrote, which dkdv_kernel waited for.
    """
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        left=left, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=READS_LENGTHS,
    )  # fmt: skip
    tile = scheduled_queries(NQ, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    start_m = tile.index * BLOCK_M
    if cu_q_ptr is not None:
        if start_m >= tile.num_rows:
            return
    sequence = sequence_of_queries(tile, NK, masks)
    mask = sequence.mask
    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    scale = ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION)
    rotation = head_rotation(
        cos_ptr, sin_ptr, cos_strides, sin_strides, sequence.batch, sequence.num_keys, R, INTERLEAVED
    )
    k_rotation = with_norm(rotation, k_norm_ptr, norm_eps, norm_offset, D) if ROTATE_INLINE else None
    q_rotation = with_norm(rotation, q_norm_ptr, norm_eps, norm_offset, D) if ROTATE_INLINE else None
    keys = keys_of_head(
        sequence, tile.origin.head // GROUP_SIZE, k_ptr, v_ptr, k_strides, v_strides, k_rotation, row_format, BLOCK_N,
        USE_TMA,
    )  # fmt: skip
    q_tiles = head_tiles(
        q_ptr, q_strides, tile.origin, tile.num_rows, row_format, READS_LENGTHS, USE_TMA=False, first_row=first_row
    )
    do_rows = rows_from(head_rows(do_ptr, do_strides, tile.origin, tile.num_rows, row_format, first_row), start_m)

    offs = tl.arange(0, BLOCK_M)
    position_m = start_m + sequence.q_offset
    positions_q = position_m + offs
    q = load_rotated_tile(q_tiles, q_rotation, start_m, offs, sequence.q_offset, q_sign)
    do = load_tile(do_rows, offs, CHECK_ROWS=True)
    lse_rows = stats_ptr + tl.cast(tile.batch_head, tl.int64) * NQ + tile.origin.row
    exists = offs < tile.num_rows - start_m
    lse = tl.load(lse_rows + start_m + offs, mask=exists, other=float("inf"))
    delta_rows = lse_rows + start_m + tl.cast(num_heads, tl.int64) * NQ
    delta = tl.load(delta_rows + offs, mask=exists, other=0.0)

    first, full_first, full_last, last = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if mask.first_key is not None:
        dq = dq_range(
            dq, q, do, lse, delta, positions_q, keys, scale, first, tl.minimum(full_first, last), APPLY_MASK=True
        )  # fmt: skip
    dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, full_first, full_last, APPLY_MASK=False)
    dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, full_last, last, APPLY_MASK=True)
    # Not for data: the launch after this one must find dk and dv finished too.
    wait_for_previous_launch(PDL)
    if sinks_ptr is not None:
        part = sink_gradient(tl.load(sinks_ptr + tile.origin.head), lse, delta)
        tl.store(dsinks_ptr + (tile.number * num_heads + tile.batch_head), part)
    dq_rows = head_rows(dq_ptr, dq_strides, tile.origin, tile.num_rows, row_format)
    store_unrotated(rows_from(dq_rows, start_m), dq * softmax_scale, offs, rotation, position_m)
