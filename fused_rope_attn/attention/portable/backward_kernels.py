# mypy: ignore-errors
"""The kernels of the portable backward pass, without atomics: dK/dV by tiles of keys and dQ by tiles of queries, behind
a pre-process in two launches, or both in one launch that needs nothing before it.

They begin with the lines that the forward kernel begins with: only the kernel itself can bundle its flat parameters
into records. ``backward_roles`` has what their programs do.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.backward_roles import Angles, Operands, write_dkdv, write_dq
from fused_rope_attn.kernels.lengths import count_tiles
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.sequences import MaskArguments, scheduled_keys, scheduled_queries
from fused_rope_attn.kernels.tiles import RowFormat


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "heads_per_section",
                               "num_sequences", "left", "right"])  # fmt: skip
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, dk_ptr, dv_ptr,
                starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides,
                dv_strides, cos_strides, sin_strides, qk_scale, q_sign, cap_scale, norm_eps, norm_offset, left, right,
                num_heads, HKV, GROUP_SIZE, NQ, NK, num_sequences, heads_per_section,
                D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr,
                ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
                USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). stats (2, B, HQ, NQ) float32: lse and delta, as ``preprocess_kernel``
    leaves them. Without ROTATE_INLINE q and k lie normed and rotated in memory, in pair order, and q_sign is in q; with
    it q_norm and k_norm (D,) are the weights of their norms, or None.
    """
    wait_for_previous_launch(PDL)
    let_next_launch_start(PDL)
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        left=left, right=right, READS_LENGTHS=READS_LENGTHS,
    )  # fmt: skip
    tile = scheduled_keys(tl.program_id(0), NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N)
    if cu_k_ptr is not None:
        if tile.index * BLOCK_N >= tile.num_rows:
            return
    operands = Operands(
        q=q_ptr, k=k_ptr, v=v_ptr, do=do_ptr, o=None, q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
        do_strides=do_strides, o_strides=None, statistics_ptr=stats_ptr,
        num_statistics=tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ, HQ=HKV * GROUP_SIZE, GROUP_SIZE=GROUP_SIZE,
        NQ=NQ, NK=NK, format=RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS, ALIGNED=True),
        scale=ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION), USE_TMA=USE_TMA,
        ALL_TMA=False,
    )  # fmt: skip
    angles = Angles(
        cos_ptr=cos_ptr, sin_ptr=sin_ptr, cos_strides=cos_strides, sin_strides=sin_strides, q_norm_ptr=q_norm_ptr,
        k_norm_ptr=k_norm_ptr, norm_eps=norm_eps, norm_offset=norm_offset, q_sign=q_sign, R=R, INTERLEAVED=INTERLEAVED,
        ROTATE_INLINE=ROTATE_INLINE,
    )  # fmt: skip
    write_dkdv(tile, operands, masks, angles, dk_ptr, dv_ptr, dk_strides, dv_strides, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "heads_per_section",
                               "num_sequences", "left", "right"])  # fmt: skip
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, dq_ptr, dsinks_ptr,
              sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, q_strides, k_strides, v_strides, do_strides,
              dq_strides, cos_strides, sin_strides, qk_scale, q_sign, softmax_scale, cap_scale, norm_eps, norm_offset,
              left, right, num_heads, HQ, GROUP_SIZE, NQ, NK, num_sequences, heads_per_section,
              D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr,
              ROTATE_INLINE: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
              USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient (dsinks, (tiles, B * HQ) float32).

    Grid: (``count_tiles`` of the queries * B * HQ). stats, ROTATE_INLINE and the norms as in ``dkdv_kernel``. With
    PDL it starts while dkdv_kernel drains: it reads only what the pre-process wrote, which dkdv_kernel waited for.
    """
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        left=left, right=right, READS_LENGTHS=READS_LENGTHS,
    )  # fmt: skip
    tile = scheduled_queries(tl.program_id(0), NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    if cu_q_ptr is not None:
        if tile.index * BLOCK_M >= tile.num_rows:
            return
    operands = Operands(
        q=q_ptr, k=k_ptr, v=v_ptr, do=do_ptr, o=None, q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
        do_strides=do_strides, o_strides=None, statistics_ptr=stats_ptr,
        num_statistics=tl.cast(num_heads, tl.int64) * NQ, HQ=HQ, GROUP_SIZE=GROUP_SIZE, NQ=NQ, NK=NK,
        format=RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS, ALIGNED=True),
        scale=ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION), USE_TMA=USE_TMA,
        ALL_TMA=False,
    )  # fmt: skip
    angles = Angles(
        cos_ptr=cos_ptr, sin_ptr=sin_ptr, cos_strides=cos_strides, sin_strides=sin_strides, q_norm_ptr=q_norm_ptr,
        k_norm_ptr=k_norm_ptr, norm_eps=norm_eps, norm_offset=norm_offset, q_sign=q_sign, R=R, INTERLEAVED=INTERLEAVED,
        ROTATE_INLINE=ROTATE_INLINE,
    )  # fmt: skip
    write_dq(
        tile, operands, masks, angles, dq_ptr, dq_strides, softmax_scale, dsinks_ptr, sinks_ptr, num_heads, BLOCK_M,
        BLOCK_N, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_batches", "num_sequences", "left", "right"])
def one_launch_kernel(q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, lse_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, dq_ptr,
                      dk_ptr, dv_ptr, dsinks_ptr, sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, q_strides,
                      k_strides, v_strides, do_strides, o_strides, dq_strides, dk_strides, dv_strides, cos_strides,
                      sin_strides, qk_scale, q_sign, softmax_scale, cap_scale, norm_eps, norm_offset, left, right,
                      num_batches, HQ, HKV, GROUP_SIZE, NQ, NK, num_sequences, D: tl.constexpr, R: tl.constexpr,
                      DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr, DQ_BLOCK_M: tl.constexpr,
                      DQ_BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                      READS_LENGTHS: tl.constexpr, ROTATE_INLINE: tl.constexpr,
                      PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
                      USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """The whole backward pass: first programs of ``dkdv_kernel``, which take longer, then those of ``dq_kernel``.

    Both make lse and delta of what forward returned, o (B, HQ, NQ, D) and lse (B, HQ, NQ) float32, for the rows that
    they read. Grid: the sum of both kernels'. The rest as there, with num_batches = B.
    """
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        left=left, right=right, READS_LENGTHS=READS_LENGTHS,
    )  # fmt: skip
    operands = Operands(
        q=q_ptr, k=k_ptr, v=v_ptr, do=do_ptr, o=o_ptr, q_strides=q_strides, k_strides=k_strides, v_strides=v_strides,
        do_strides=do_strides, o_strides=o_strides, statistics_ptr=lse_ptr, num_statistics=None, HQ=HQ,
        GROUP_SIZE=GROUP_SIZE, NQ=NQ, NK=NK,
        format=RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS, ALIGNED=True),
        scale=ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION), USE_TMA=USE_TMA,
        ALL_TMA=USE_TMA,
    )  # fmt: skip
    angles = Angles(
        cos_ptr=cos_ptr, sin_ptr=sin_ptr, cos_strides=cos_strides, sin_strides=sin_strides, q_norm_ptr=q_norm_ptr,
        k_norm_ptr=k_norm_ptr, norm_eps=norm_eps, norm_offset=norm_offset, q_sign=q_sign, R=R, INTERLEAVED=INTERLEAVED,
        ROTATE_INLINE=ROTATE_INLINE,
    )  # fmt: skip
    pid = tl.program_id(0)
    key_heads, query_heads = num_batches * HKV, num_batches * HQ
    key_programs = count_tiles(NK, num_sequences, DKDV_BLOCK_N) * key_heads
    # All heads are one section each: what such calls read fits in the L2.
    if pid < key_programs:
        tile = scheduled_keys(pid, NK, NQ, HKV, key_heads, key_heads, masks, DKDV_BLOCK_N)
        if cu_k_ptr is not None:
            if tile.index * DKDV_BLOCK_N >= tile.num_rows:
                return
        write_dkdv(
            tile, operands, masks, angles, dk_ptr, dv_ptr, dk_strides, dv_strides, DKDV_BLOCK_M, DKDV_BLOCK_N
        )  # fmt: skip
    else:
        tile = scheduled_queries(pid - key_programs, NQ, NK, HQ, query_heads, query_heads, masks, DQ_BLOCK_M)
        if cu_q_ptr is not None:
            if tile.index * DQ_BLOCK_M >= tile.num_rows:
                return
        write_dq(
            tile, operands, masks, angles, dq_ptr, dq_strides, softmax_scale, dsinks_ptr, sinks_ptr, query_heads,
            DQ_BLOCK_M, DQ_BLOCK_N, PDL=False,
        )  # fmt: skip
