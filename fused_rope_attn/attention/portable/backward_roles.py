# mypy: ignore-errors
"""The two roles of a program of the portable backward pass: dK and dV of a tile of keys, and dQ of a tile of queries.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per tile. Where q and k were normed before they were rotated, these
are the gradients of the normed ones; ``norm_gradient_kernel`` does the rest.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.keys import keys_of_head
from fused_rope_attn.kernels.masks import Mask, first_query, key_range, query_range, visible
from fused_rope_attn.kernels.products import ScoreScale, add_product, score_gradient, score_product
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, head_rotation, load_rotated_tile, store_unrotated, with_norm
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.sequences import sequence_of_keys, sequence_of_queries
from fused_rope_attn.kernels.softmax import LN2, lse_in_base_2, output_delta, sink_gradient
from fused_rope_attn.kernels.tiles import (
    HeadTiles,
    Origin,
    RowFormat,
    head_rows,
    head_tiles,
    load_head_tile,
    load_where,
    rows_from,
    store_tile,
)


@record
class Operands:
    """What both roles read: q, do, o (B, HQ, NQ, D), k and v (B, HKV, NK, D), each with its element strides.

    They are pointers; with USE_TMA, those that a role goes through tile by tile are descriptors: q and do for dK and
    dV, k and v for dQ. With ALL_TMA all of them are, whose tiles have as many rows in both roles.
    """

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    do: tl.tensor
    o: tl.tensor | None  # None: the statistics hold delta
    q_strides: tl.tuple
    k_strides: tl.tuple
    v_strides: tl.tuple
    do_strides: tl.tuple
    o_strides: tl.tuple | None
    statistics_ptr: tl.tensor  # float32: with o lse (B, HQ, NQ), else ``preprocess_kernel``'s stats (2, B, HQ, NQ)
    num_statistics: tl.tensor  # B * HQ * NQ, int64
    HQ: tl.tensor
    GROUP_SIZE: tl.tensor
    NQ: tl.tensor
    NK: tl.tensor
    format: RowFormat
    scale: ScoreScale
    USE_TMA: tl.constexpr
    ALL_TMA: tl.constexpr


@record
class Angles:
    """The rotation and the norms of a call. With ROTATE_INLINE a role applies them to the q and k that it reads, else
    q and k lie normed and rotated in memory, in pair order, and q_sign is in q."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    cos_strides: tl.tuple
    sin_strides: tl.tuple
    q_norm_ptr: tl.tensor | None  # (D,), the weights
    k_norm_ptr: tl.tensor | None
    norm_eps: tl.tensor | None
    norm_offset: tl.tensor | None
    q_sign: tl.tensor
    R: tl.constexpr
    INTERLEAVED: tl.constexpr
    ROTATE_INLINE: tl.constexpr


@record
class RowStatistics:
    """lse and delta of the rows of one head: both read from memory, or made of lse and o."""

    lse_ptr: tl.tensor  # to the first row's; float32, in base 2, +inf where a row saw nothing, or with ``o`` as it came
    delta_ptr: tl.tensor | None  # to the first row's; float32
    o: HeadTiles | None
    READS_LENGTHS: tl.constexpr


@record
class Queries:
    """Queries of one head of a sequence and what belongs to them, read BLOCK_M at a time.

    Rows before the first one that sees a key may hold anything; where there may be such, it is the tiles' first_row.
    """

    q: HeadTiles
    do: HeadTiles
    statistics: RowStatistics
    rotation: Rotation | None  # of the queries, which are then multiplied by ``sign``; None where they lie rotated
    sign: tl.tensor
    q_offset: tl.tensor  # position of the first row
    mask: Mask
    BLOCK_M: tl.constexpr


@triton.jit
def query_tiles(operands, origin, num_rows, first_row, READS_LENGTHS: tl.constexpr, USE_TMA: tl.constexpr):
    """``HeadTiles`` of the num_rows queries of a head that begin at ``origin``, and of their dO."""
    q = head_tiles(operands.q, operands.q_strides, origin, num_rows, operands.format, READS_LENGTHS, USE_TMA, first_row)
    do = head_tiles(
        operands.do, operands.do_strides, origin, num_rows, operands.format, READS_LENGTHS, USE_TMA, first_row
    )  # fmt: skip
    return q, do


@triton.jit
def statistics_of_head(operands, origin, num_queries, first_row, READS_LENGTHS: tl.constexpr):
    """``RowStatistics`` of the ``num_queries`` rows of one head that begin at ``origin``."""
    lse_ptr = operands.statistics_ptr + (origin.batch * operands.HQ + origin.head) * operands.NQ + origin.row
    if operands.o is None:
        delta_ptr = lse_ptr + operands.num_statistics
        return RowStatistics(lse_ptr=lse_ptr, delta_ptr=delta_ptr, o=None, READS_LENGTHS=READS_LENGTHS)
    else:
        o = head_tiles(
            operands.o, operands.o_strides, origin, num_queries, operands.format, READS_LENGTHS, operands.ALL_TMA,
            first_row,
        )  # fmt: skip
        return RowStatistics(lse_ptr=lse_ptr, delta_ptr=None, o=o, READS_LENGTHS=READS_LENGTHS)


@triton.jit
def load_lse(statistics, start, offs, exists):
    """lse of the rows ``start + offs`` in base 2, +inf where a row does not exist; exists None: all of them do."""
    lse = load_where(statistics.lse_ptr + start + offs, exists, float("inf"))
    if statistics.o is not None:
        lse = lse_in_base_2(lse)
    return lse


@triton.jit
def load_delta(statistics, do, lse, start, offs, exists, CHECK_ROWS: tl.constexpr):
    """delta of the rows ``start + offs``, 0 where a row does not exist; do and lse are those of the same rows."""
    if statistics.o is None:
        return load_where(statistics.delta_ptr + start + offs, exists, 0.0)
    else:
        o = load_head_tile(statistics.o, start, offs, CHECK_ROWS)
        return output_delta(o, do, lse, statistics.READS_LENGTHS)


@triton.jit
def rotation_of(angles, sequence):
    """``Rotation`` of the rows of one ``Sequence``, without norms."""
    return head_rotation(
        angles.cos_ptr, angles.sin_ptr, angles.cos_strides, angles.sin_strides, sequence.batch, sequence.num_keys,
        angles.R, angles.INTERLEAVED,
    )  # fmt: skip


@triton.jit
def normed(rotation, norm_ptr, angles, format):
    """``rotation`` with the norm of these weights before it; norm_ptr None: without."""
    return with_norm(rotation, norm_ptr, angles.norm_eps, angles.norm_offset, format.D)


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
        exists = None
        if APPLY_MASK:
            exists = offs < queries.q.rows.num_rows - start_m
        q = load_rotated_tile(
            queries.q, queries.rotation, start_m, offs, queries.q_offset, queries.sign, CHECK_ROWS=APPLY_MASK
        )
        lse = load_lse(queries.statistics, start_m, offs, exists)
        scores_t = score_product(k, q, scale)
        p_t = tl.math.exp2(scores_t * scale.qk_scale - lse[None, :])
        if APPLY_MASK:
            mask = queries.mask
            if mask.READS_LENGTHS or mask.left is not None or mask.right is not None:
                positions_q = (start_m + queries.q_offset + offs)[None, :]
                p_t = tl.where(visible(mask, positions_q, positions_k[:, None]), p_t, 0.0)
        do = load_head_tile(queries.do, start_m, offs, CHECK_ROWS=APPLY_MASK)
        dv = add_product(p_t.to(do.dtype), do, dv, scale.PRECISION)
        delta = load_delta(queries.statistics, do, lse, start_m, offs, exists, CHECK_ROWS=APPLY_MASK)
        dp_t = tl.dot(v, tl.trans(do), input_precision=scale.PRECISION)
        ds_t = score_gradient(p_t, dp_t, delta[None, :], scores_t, scale)
        dk = add_product(ds_t.to(q.dtype), q, dk, scale.PRECISION)
    return dk, dv


@triton.jit
def write_dkdv(tile, operands, masks, angles, dk_ptr, dv_ptr, dk_strides, dv_strides, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """dk and dv (B, HKV, NK, D) of a ``Tile`` of BLOCK_N keys, summed in float32 over its query heads."""
    READS_LENGTHS: tl.constexpr = masks.READS_LENGTHS
    USE_TMA: tl.constexpr = operands.USE_TMA
    row_format, scale = operands.format, operands.scale
    start_n = tile.index * BLOCK_N
    sequence = sequence_of_keys(tile, operands.NQ, masks)
    mask = sequence.mask
    rotation = rotation_of(angles, sequence)
    k_rotation = normed(rotation, angles.k_norm_ptr, angles, row_format) if angles.ROTATE_INLINE else None
    q_rotation = normed(rotation, angles.q_norm_ptr, angles, row_format) if angles.ROTATE_INLINE else None
    k_tiles = head_tiles(
        operands.k, operands.k_strides, tile.origin, sequence.num_keys, row_format, READS_LENGTHS, operands.ALL_TMA
    )
    v_tiles = head_tiles(
        operands.v, operands.v_strides, tile.origin, sequence.num_keys, row_format, READS_LENGTHS, operands.ALL_TMA
    )
    offs = tl.arange(0, BLOCK_N)
    k = load_rotated_tile(k_tiles, k_rotation, start_n, offs, 0)
    v = load_head_tile(v_tiles, start_n, offs, CHECK_ROWS=True)
    positions_k = start_n + offs

    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    first, full_first, full_last, last = query_range(
        mask, start_n, sequence.q_offset, sequence.num_queries, BLOCK_M, BLOCK_N
    )
    BLOCK_D: tl.constexpr = row_format.BLOCK_D
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(operands.GROUP_SIZE):
        head_q = tile.origin.head * operands.GROUP_SIZE + member
        origin = Origin(batch=sequence.batch, head=head_q, row=sequence.first_q)
        q_tiles, do_tiles = query_tiles(operands, origin, sequence.num_queries, first_row, READS_LENGTHS, USE_TMA)
        queries = Queries(
            q=q_tiles,
            do=do_tiles,
            statistics=statistics_of_head(operands, origin, sequence.num_queries, first_row, READS_LENGTHS),
            rotation=q_rotation,
            sign=angles.q_sign,
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
    softmax_scale = scale.qk_scale * LN2
    if scale.cap_scale is not None:
        softmax_scale *= scale.cap_scale
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


@triton.jit
def write_dq(tile, operands, masks, angles, dq_ptr, dq_strides, softmax_scale, dsinks_ptr, sinks_ptr, num_heads,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dq (B, HQ, NQ, D) of a ``Tile`` of BLOCK_M query rows, and their part of the sink's gradient: dsinks (tiles,
    num_heads) float32, or None as ``sinks_ptr`` (HQ,). num_heads = B * HQ.

    With PDL it waits for the launch before this one before it stores.
    """
    READS_LENGTHS: tl.constexpr = masks.READS_LENGTHS
    row_format, scale = operands.format, operands.scale
    start_m = tile.index * BLOCK_M
    sequence = sequence_of_queries(tile, operands.NK, masks)
    mask = sequence.mask
    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    rotation = rotation_of(angles, sequence)
    k_rotation = normed(rotation, angles.k_norm_ptr, angles, row_format) if angles.ROTATE_INLINE else None
    q_rotation = normed(rotation, angles.q_norm_ptr, angles, row_format) if angles.ROTATE_INLINE else None
    keys = keys_of_head(
        sequence, tile.origin.head // operands.GROUP_SIZE, operands.k, operands.v, operands.k_strides,
        operands.v_strides, k_rotation, row_format, BLOCK_N, operands.USE_TMA,
    )  # fmt: skip
    q_tiles, do_tiles = query_tiles(
        operands, tile.origin, tile.num_rows, first_row, READS_LENGTHS, operands.ALL_TMA
    )  # fmt: skip

    offs = tl.arange(0, BLOCK_M)
    position_m = start_m + sequence.q_offset
    positions_q = position_m + offs
    q = load_rotated_tile(q_tiles, q_rotation, start_m, offs, sequence.q_offset, angles.q_sign)
    do = load_head_tile(do_tiles, start_m, offs, CHECK_ROWS=True)
    statistics = statistics_of_head(operands, tile.origin, tile.num_rows, first_row, READS_LENGTHS)
    exists = offs < tile.num_rows - start_m
    lse = load_lse(statistics, start_m, offs, exists)
    delta = load_delta(statistics, do, lse, start_m, offs, exists, CHECK_ROWS=True)

    first, full_first, full_last, last = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, row_format.BLOCK_D), tl.float32)
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
