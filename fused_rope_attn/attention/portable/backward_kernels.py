# mypy: ignore-errors
"""The kernels of the portable backward pass, without atomics: dK/dV by tiles of keys and dQ by tiles of queries, in two
launches after a pre-process, or in one launch that needs none.

They begin with the lines that the forward kernel begins with, because only the kernel itself can bundle its flat
parameters into records. The work of their programs is in ``backward_roles``.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.backward_roles import (
    BackwardInputs,
    QueryGradients,
    RoleRotations,
    write_dkdv,
    write_dq,
)
from fused_rope_attn.attention.portable.parts import NopeViews
from fused_rope_attn.kernels.intervals import IntervalArguments
from fused_rope_attn.kernels.lengths import count_tiles
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.rotation import RotaryTables, store_unrotated
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.sequences import (
    MaskArguments,
    scheduled_keys,
    scheduled_queries,
    sequence_of_keys,
    sequence_rotation,
)
from fused_rope_attn.kernels.tiles import (
    RowFormat,
    TensorView,
    head_rows,
    heads_from,
    load_heads,
    rows_from,
    sequence_heads,
)

# Parameters of all kernels that differ from call to call.
_SIZES = "NQ NK HQ HKV GROUP_SIZE num_sequences window interval_strides".split()


@triton.jit(do_not_specialize=[*_SIZES, "num_heads", "heads_per_section"])
def dkdv_kernel(q_ptr, q_nope_ptr, k_ptr, k_nope_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr,
                k_norm_ptr, dk_ptr, dk_nope_ptr, dv_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, query_starts_ptr,
                query_ends_ptr, q_strides, q_nope_strides, k_strides, k_nope_strides, v_strides, do_strides, dk_strides,
                dk_nope_strides, dv_strides, cos_strides, sin_strides, qk_scale, q_sign, nope_sign, cap_scale, norm_eps,
                norm_offset, window, interval_strides, num_heads, HKV, GROUP_SIZE, NQ, NK, num_sequences,
                heads_per_section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, DN: tl.constexpr, BLOCK_DN: tl.constexpr, DV: tl.constexpr,
                BLOCK_DV: tl.constexpr, INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr,
                FROM_START: tl.constexpr, TOKEN_TABLES: tl.constexpr, ROTATE_INLINE: tl.constexpr,
                PRECISION: tl.constexpr, USE_TMA: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). stats (2, B, HQ, NQ) float32: lse and delta, from
    ``preprocess_kernel``. Without ROTATE_INLINE q and k are stored normed and rotated, in pair order, and q_sign is in
    q; with it q_norm and k_norm (D,) are the weights of their norms, or None. query_starts and query_ends: as
    ``IntervalArguments`` has them. With q_nope and k_nope there are HKV * GROUP_SIZE heads of k_nope and v, as
    ``write_dkdv`` says; the stride of k's heads is 0.
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    intervals = None
    if interval_strides is not None:
        intervals = IntervalArguments(query_starts_ptr, query_ends_ptr, None, interval_strides)
    masks = MaskArguments(
        starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, num_sequences, window_of(window), READS_LENGTHS, FROM_START,
        TOKEN_TABLES, intervals,
    )  # fmt: skip
    tile = scheduled_keys(tl.program_id(0), NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N)
    if cu_k_ptr is not None or FROM_START:
        if tile.index * BLOCK_N >= tile.num_rows:
            return
    q, k = TensorView(q_ptr, q_strides), TensorView(k_ptr, k_strides)
    v, do = TensorView(v_ptr, v_strides), TensorView(do_ptr, do_strides)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS, ALIGNED=True)
    value_format = RowFormat(DV, BLOCK_DV, USE_INT64_OFFSETS, ALIGNED=True)
    nope = None
    if q_nope_ptr is not None:
        nope_format = RowFormat(DN, BLOCK_DN, USE_INT64_OFFSETS, ALIGNED=True)
        q_nope, k_nope = TensorView(q_nope_ptr, q_nope_strides), TensorView(k_nope_ptr, k_nope_strides)
        dk_nope = TensorView(dk_nope_ptr, dk_nope_strides)
        nope = NopeViews(q_nope, k_nope, dq=None, dk=dk_nope, sign=nope_sign, format=nope_format)
    scale = ScoreScale(qk_scale, cap_scale, PRECISION)
    size, HQ = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ, HKV * GROUP_SIZE
    inputs = BackwardInputs(
        q,
        k,
        v,
        do,
        None,
        None,
        stats_ptr,
        size,
        HQ,
        GROUP_SIZE,
        NQ,
        NK,
        row_format,
        value_format,
        nope,
        scale,
        USE_TMA,
        ALL_TMA=False,
    )
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
    k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    rotations = RoleRotations(tables, q_norm, k_norm, q_sign, ROTATE_INLINE)
    dk, dv = TensorView(dk_ptr, dk_strides), TensorView(dv_ptr, dv_strides)
    write_dkdv(tile, inputs, masks, rotations, dk, dv, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=[*_SIZES, "num_heads", "heads_per_section"])
def dq_kernel(q_ptr, q_nope_ptr, k_ptr, k_nope_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
              dq_ptr, dq_nope_ptr, dsinks_ptr, sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, query_starts_ptr,
              query_ends_ptr, blocks_ptr, q_strides, q_nope_strides, k_strides, k_nope_strides, v_strides, do_strides,
              dq_strides, dq_nope_strides, cos_strides, sin_strides, qk_scale, q_sign, nope_sign, softmax_scale,
              cap_scale, norm_eps, norm_offset, window, interval_strides, num_heads, HQ, GROUP_SIZE, NQ, NK,
              num_sequences, heads_per_section, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DN: tl.constexpr, BLOCK_DN: tl.constexpr, DV: tl.constexpr,
              BLOCK_DV: tl.constexpr, INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr,
              TOKEN_TABLES: tl.constexpr, ROTATE_INLINE: tl.constexpr,
              PRECISION: tl.constexpr, USE_TMA: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient (dsinks, (tiles, B * HQ) float32).

    Grid: (``count_tiles`` of the queries * B * HQ). stats, ROTATE_INLINE, the norms and intervals as in
    ``dkdv_kernel``; blocks: of ``interval_blocks_kernel``. With PDL it starts while dkdv_kernel drains: it reads only
    the pre-process's results, for which dkdv_kernel has waited.
    """
    intervals = None
    if interval_strides is not None:
        intervals = IntervalArguments(query_starts_ptr, query_ends_ptr, blocks_ptr, interval_strides)
    masks = MaskArguments(
        starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, num_sequences, window_of(window), READS_LENGTHS, FROM_START,
        TOKEN_TABLES, intervals,
    )  # fmt: skip
    tile = scheduled_queries(tl.program_id(0), NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    if cu_q_ptr is not None:
        if tile.index * BLOCK_M >= tile.num_rows:
            return
    q, k = TensorView(q_ptr, q_strides), TensorView(k_ptr, k_strides)
    v, do = TensorView(v_ptr, v_strides), TensorView(do_ptr, do_strides)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS, ALIGNED=True)
    value_format = RowFormat(DV, BLOCK_DV, USE_INT64_OFFSETS, ALIGNED=True)
    nope = None
    if q_nope_ptr is not None:
        nope_format = RowFormat(DN, BLOCK_DN, USE_INT64_OFFSETS, ALIGNED=True)
        q_nope, k_nope = TensorView(q_nope_ptr, q_nope_strides), TensorView(k_nope_ptr, k_nope_strides)
        dq_nope = TensorView(dq_nope_ptr, dq_nope_strides)
        nope = NopeViews(q_nope, k_nope, dq=dq_nope, dk=None, sign=nope_sign, format=nope_format)
    scale = ScoreScale(qk_scale, cap_scale, PRECISION)
    size = tl.cast(num_heads, tl.int64) * NQ
    inputs = BackwardInputs(
        q,
        k,
        v,
        do,
        None,
        None,
        stats_ptr,
        size,
        HQ,
        GROUP_SIZE,
        NQ,
        NK,
        row_format,
        value_format,
        nope,
        scale,
        USE_TMA,
        ALL_TMA=False,
    )
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
    k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    rotations = RoleRotations(tables, q_norm, k_norm, q_sign, ROTATE_INLINE)
    outputs = QueryGradients(TensorView(dq_ptr, dq_strides), softmax_scale, dsinks_ptr, sinks_ptr, num_heads)
    write_dq(tile, inputs, masks, rotations, outputs, BLOCK_M, BLOCK_N, PDL)


@triton.jit(do_not_specialize="NQ NK num_heads num_batches num_sequences window".split())
def sum_heads_kernel(parts_ptr, dk_ptr, cos_ptr, sin_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, parts_strides,
                     dk_strides, cos_strides, sin_strides, window, num_heads, num_batches, NQ, NK, num_sequences,
                     D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                     INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr,
                     USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """Sum the gradient of the key head that all query heads share, and un-rotate it.

    parts (B, num_heads, NK, D) float32, in pair order, from ``dkdv_kernel``; dk (B, 1, NK, D). Grid: (``count_tiles``
    of the keys * B). Heads are added in a fixed order.
    """
    # 64 elements a thread, so that enough loads are in flight: a call has few programs.
    HEADS: tl.constexpr = 8192 // (BLOCK_N * BLOCK_D)
    masks = MaskArguments(
        starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, num_sequences, window_of(window), READS_LENGTHS, FROM_START,
        TOKEN_TABLES=False, intervals=None,
    )  # fmt: skip
    tile = scheduled_keys(tl.program_id(0), NK, NQ, 1, num_batches, num_batches, masks, BLOCK_N)
    if cu_k_ptr is not None:
        if tile.index * BLOCK_N >= tile.num_rows:
            return
    start_n = tile.index * BLOCK_N
    sequence = sequence_of_keys(tile, NQ, NK, masks)
    rotation = sequence_rotation(RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED), sequence)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    offs = tl.arange(0, BLOCK_N)
    heads = sequence_heads(
        TensorView(parts_ptr, parts_strides), tile.origin.batch, tile.origin.row, tile.num_rows, row_format
    )
    heads = heads_from(heads, start_n)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first_head in range(0, num_heads, HEADS):
        total += tl.sum(load_heads(heads, first_head, num_heads, offs, HEADS), axis=0)
    dk_rows = head_rows(TensorView(dk_ptr, dk_strides), tile.origin, tile.num_rows, row_format)
    store_unrotated(rows_from(dk_rows, start_n), total, offs, rotation, start_n)


@triton.jit(do_not_specialize=[*_SIZES, "num_batches"])
def one_launch_kernel(q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, lse_ptr, dlse_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
                      dq_ptr, dk_ptr, dv_ptr, dsinks_ptr, sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr,
                      query_starts_ptr, query_ends_ptr, blocks_ptr, q_strides, k_strides, v_strides, do_strides,
                      o_strides, dq_strides, dk_strides, dv_strides, cos_strides, sin_strides, qk_scale, q_sign,
                      softmax_scale, cap_scale, norm_eps, norm_offset, window, interval_strides, num_batches, HQ, HKV,
                      GROUP_SIZE, NQ, NK, num_sequences, D: tl.constexpr, R: tl.constexpr, DKDV_BLOCK_M: tl.constexpr,
                      DKDV_BLOCK_N: tl.constexpr, DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr,
                      BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr,
                      FROM_START: tl.constexpr, TOKEN_TABLES: tl.constexpr, ROTATE_INLINE: tl.constexpr,
                      PRECISION: tl.constexpr, USE_TMA: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """The whole backward pass: first programs of ``dkdv_kernel``, which take longer, then those of ``dq_kernel``.

    Both compute lse and delta of the rows that they read from forward's o (B, HQ, NQ, D) and lse (B, HQ, NQ) float32,
    and dlse like lse or None.
    Grid: the sum of both kernels'. The rest as there, with num_batches = B.
    """
    intervals = None
    if interval_strides is not None:
        intervals = IntervalArguments(query_starts_ptr, query_ends_ptr, blocks_ptr, interval_strides)
    masks = MaskArguments(
        starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, num_sequences, window_of(window), READS_LENGTHS, FROM_START,
        TOKEN_TABLES, intervals,
    )  # fmt: skip
    q, k = TensorView(q_ptr, q_strides), TensorView(k_ptr, k_strides)
    v, do = TensorView(v_ptr, v_strides), TensorView(do_ptr, do_strides)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS, ALIGNED=True)
    scale = ScoreScale(qk_scale, cap_scale, PRECISION)
    o = TensorView(o_ptr, o_strides)
    inputs = BackwardInputs(
        q,
        k,
        v,
        do,
        o,
        dlse_ptr,
        lse_ptr,
        None,
        HQ,
        GROUP_SIZE,
        NQ,
        NK,
        row_format,
        row_format,
        None,
        scale,
        USE_TMA,
        ALL_TMA=USE_TMA,
    )
    dq, dk, dv = TensorView(dq_ptr, dq_strides), TensorView(dk_ptr, dk_strides), TensorView(dv_ptr, dv_strides)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
    k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    rotations = RoleRotations(tables, q_norm, k_norm, q_sign, ROTATE_INLINE)
    pid = tl.program_id(0)
    key_heads, query_heads = num_batches * HKV, num_batches * HQ
    key_programs = count_tiles(NK, num_sequences, DKDV_BLOCK_N) * key_heads
    # All heads are one section: the inputs of such calls fit in the L2.
    if pid < key_programs:
        tile = scheduled_keys(pid, NK, NQ, HKV, key_heads, key_heads, masks, DKDV_BLOCK_N)
        if cu_k_ptr is not None or FROM_START:
            if tile.index * DKDV_BLOCK_N >= tile.num_rows:
                return
        write_dkdv(tile, inputs, masks, rotations, dk, dv, DKDV_BLOCK_M, DKDV_BLOCK_N)
    else:
        tile = scheduled_queries(pid - key_programs, NQ, NK, HQ, query_heads, query_heads, masks, DQ_BLOCK_M)
        if cu_q_ptr is not None:
            if tile.index * DQ_BLOCK_M >= tile.num_rows:
                return
        outputs = QueryGradients(dq, softmax_scale, dsinks_ptr, sinks_ptr, query_heads)
        write_dq(tile, inputs, masks, rotations, outputs, DQ_BLOCK_M, DQ_BLOCK_N, PDL=False)
