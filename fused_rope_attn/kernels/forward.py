"""Portable attention forward: Q rotated once per block, K rotated in the loop (inline) or read rotated (prepass)."""

import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.launch import (
    block_d,
    descriptor,
    dot_precision,
    has_descriptor,
    heads_per_section,
    is_long,
    like_input,
    scale_and_sign,
    table_strides,
)
from fused_rope_attn.kernels.primitives import (
    LN2,
    head_source,
    load_head_tile,
    load_rotated,
    online_softmax,
    scheduled_tile,
    store_tile,
    visible,
    wait_for_previous_launch,
)
from fused_rope_attn.kernels.rotary import rotate_keys


@triton.jit
def attend_range(acc, row_max, row_sum, q, positions_q, k_source, v_source, cos_base, sin_base, k_strides, v_strides,
                 cos_strides, sin_strides, batch, head, first, last, NK, qk_scale, D: tl.constexpr, R: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr,
                 INLINE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                 LONG: tl.constexpr):  # fmt: skip
    """Fold keys [first, last) into the running softmax and output; ``first`` is a multiple of BLOCK_N."""
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in range(first, last, BLOCK_N):
        if INLINE:
            k = load_rotated(
                k_source + tl.cast(start_n, tl.int64) * k_strides[2], offs_n, NK - start_n, k_strides, cos_base, sin_base, cos_strides, sin_strides, start_n, NK, 1.0,
                D, R, BLOCK_D, INTERLEAVED, MASKED, LONG,
            )  # fmt: skip
        else:
            k = load_head_tile(
                k_source, batch, head, start_n, offs_n, NK, k_strides[2], k_strides[3], D, BLOCK_N, BLOCK_D, TMA,
                MASKED, LONG,
            )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            exists = visible(positions_q[:, None], (start_n + offs_n)[None, :], NK, IS_CAUSAL)
            scores = tl.where(exists, scores, float("-inf"))
        p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, qk_scale, MASKED)
        v = load_head_tile(
            v_source, batch, head, start_n, offs_n, NK, v_strides[2], v_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
            LONG,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section"])
def forward_kernel(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, o_ptr, lse_ptr, q_strides, k_strides, v_strides, o_strides,
                   cos_strides, sin_strides, qk_scale, q_sign, num_heads, HQ, GROUP_SIZE, NQ, NK, section,
                   D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, INLINE: tl.constexpr,
                   PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One block of BLOCK_M query rows of one head. Grid: (query blocks * B * HQ)."""
    tile, bh = scheduled_tile(tl.cdiv(NQ, BLOCK_M), num_heads, section, LAST_FIRST=IS_CAUSAL)
    batch = (bh // HQ).to(tl.int64)
    head = (bh % HQ).to(tl.int64)
    q_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
    head_kv = head // GROUP_SIZE
    k_source = head_source(k_ptr, batch, head_kv, k_strides, TMA)
    v_source = head_source(v_ptr, batch, head_kv, v_strides, TMA)
    o_base = o_ptr + batch * o_strides[0] + head * o_strides[1]
    cos_base = cos_ptr + batch * cos_strides[0]
    sin_base = sin_ptr + batch * sin_strides[0]

    start_m = tile * BLOCK_M
    q_offset = NK - NQ
    rows = tl.arange(0, BLOCK_M)
    positions_q = start_m + q_offset + rows
    q_rows = q_base + tl.cast(start_m, tl.int64) * q_strides[2]
    q = load_rotated(
        q_rows, rows, NQ - start_m, q_strides, cos_base, sin_base, cos_strides, sin_strides, start_m + q_offset, NK,
        q_sign, D, R, BLOCK_D, INTERLEAVED, True, LONG,
    )  # fmt: skip

    # Keys [0, full) are visible to every row of the block, [full, last) to some.
    last = NK
    full = NK
    if IS_CAUSAL:
        last = tl.minimum(NK, tl.maximum(0, start_m + BLOCK_M + q_offset))
        full = tl.minimum(NK, tl.maximum(0, start_m + q_offset + 1))
    full = full // BLOCK_N * BLOCK_N

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    wait_for_previous_launch(PDL)
    acc, row_max, row_sum = attend_range(
        acc, row_max, row_sum, q, positions_q, k_source, v_source, cos_base, sin_base, k_strides, v_strides,
        cos_strides, sin_strides, batch, head_kv, 0, full, NK, qk_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED,
        IS_CAUSAL, INLINE, False, PRECISION, TMA, LONG,
    )  # fmt: skip
    acc, row_max, row_sum = attend_range(
        acc, row_max, row_sum, q, positions_q, k_source, v_source, cos_base, sin_base, k_strides, v_strides,
        cos_strides, sin_strides, batch, head_kv, full, last, NK, qk_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED,
        IS_CAUSAL, INLINE, True, PRECISION, TMA, LONG,
    )  # fmt: skip

    # Only a row that saw no key sums to zero; NaN counts as seen and stays NaN.
    seen = row_sum != 0.0
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    lse = tl.where(seen, (row_max + tl.math.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    tl.store(lse_ptr + tl.cast(bh, tl.int64) * NQ + start_m + rows, lse, mask=rows < NQ - start_m)
    o_rows = o_base + tl.cast(start_m, tl.int64) * o_strides[2]
    store_tile(o_rows, acc, rows, NQ - start_m, o_strides[2], o_strides[3], D, BLOCK_D, LONG)


def attention_forward(q, k, v, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config):
    """Launch the forward pass.

    q ``(B, HQ, NQ, D)``, k and v ``(B, HKV, NK, D)``, any strides; cos and sin ``([1|B,] S, R/2 | R)``; ``config`` a
    ``configs.ForwardConfig``. Returns o (shape of q, its memory order) and lse ``(B, HQ, NQ)`` float32, natural log.
    """
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_k = k.shape[1], k.shape[2]
    o = like_input(q)
    lse = torch.empty((batch, heads_q, len_q), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    inline = config.strategy == "inline"
    if not inline:
        k = rotate_keys(k, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved, config=config)
    tile = config.tile
    qk_scale, q_sign = scale_and_sign(softmax_scale)
    cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
    num_heads = batch * heads_q
    group_size = heads_q // heads_kv
    section = heads_per_section(num_heads, group_size, 2 * len_k * head_dim * k.element_size(), config.section_bytes)
    k_source, v_source = k, v
    tma = config.tma and not inline and has_descriptor(k) and has_descriptor(v)
    if tma:
        block = [1, 1, tile.block_n, block_d(head_dim)]
        k_source, v_source = descriptor(k, block), descriptor(v, block)
    # Without a kernel before it that belongs to this call there is nothing to overlap with.
    pdl = config.pdl and not inline
    forward_kernel[(triton.cdiv(len_q, tile.block_m) * num_heads,)](
        q, k_source, v_source, cos, sin, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), cos_strides, sin_strides, qk_scale,
        q_sign, num_heads, heads_q, group_size, len_q, len_k, section,
        D=head_dim, R=rotary_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d(head_dim),
        INTERLEAVED=interleaved, IS_CAUSAL=causal, INLINE=inline, PRECISION=dot_precision(q.dtype),
        TMA=tma, LONG=is_long(q, k, v, o), PDL=pdl, **tile.launch_options, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return o, lse
