"""Launcher of the portable forward pass."""

import torch

from fused_rope_attn.attention.masks import NO_MASKS, NO_TENSORS
from fused_rope_attn.attention.portable.forward_kernel import forward_kernel
from fused_rope_attn.attention.prepass import RotateKeys
from fused_rope_attn.kernels.arguments import dot_precision, heads_per_section, scale_and_sign, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls, Source
from fused_rope_attn.runtime.layouts import block_d, has_descriptor, is_long, output_strides, table_strides


class ForwardCall:
    """The launches of one forward signature."""

    def __init__(self, q, k, v, cos, sin, causal, softmax_scale, rotary_dim, interleaved, precision, masks, config):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        pad_d = block_d(head_dim)
        self.empty = batch * len_q == 0
        self.rotate_keys = None
        k_like = k
        if config.strategy == "prepass" and batch * len_k > 0:
            self.rotate_keys = RotateKeys(k, cos, sin, rotary_dim, interleaved, config, masks=masks)
            k_like = k.new_empty(k.shape)
        inline = self.rotate_keys is None
        tma = config.tma and not inline and has_descriptor(v) and has_descriptor(k_like)
        # Without a kernel before it that belongs to this call there is nothing to overlap with.
        pdl = config.pdl and not inline
        self.o_strides = output_strides(q)
        tile = config.tile
        self.k_source = Source(k_like, tile.block_n, pad_d, tma)
        self.v_source = Source(v, tile.block_n, pad_d, tma)
        qk_scale, q_sign, cap_scale = scale_and_sign(softmax_scale, masks.softcap)
        cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
        num_heads, group_size = batch * heads_q, heads_q // heads_kv
        kv_bytes = 2 * masks.longest(len_k) * head_dim * k.element_size()
        section = heads_per_section(num_heads, group_size, kv_bytes, config.section_bytes)
        self.launch = Launch(
            forward_kernel,
            tile_count(len_q, masks.num_sequences, tile.block_m) * num_heads,
            (
                q.stride(), k_like.stride(), v.stride(), self.o_strides, cos_strides, sin_strides, qk_scale, q_sign,
                cap_scale, masks.left, masks.right, num_heads, heads_q, group_size, len_q, len_k, masks.num_sequences,
                section,
            ),
            {
                "D": head_dim,
                "R": rotary_dim,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_D": pad_d,
                "INTERLEAVED": interleaved,
                "IS_CAUSAL": causal,
                "READS_LENGTHS": masks.bounded,
                "ROTATE_INLINE": inline,
                "PRECISION": precision,
                "USE_TMA": tma,
                "USE_INT64_OFFSETS": is_long(q.stride(), k.stride(), v.stride(), self.o_strides),
                "PREFETCH_ROWS": 0 if tma or not pdl else config.prefetch_rows,
                "PDL": pdl,
            },
            {**tile.launch_options, "launch_pdl": True} if pdl else tile.launch_options,
        )  # fmt: skip

    def __call__(self, q, k, v, cos, sin, mask_tensors=NO_TENSORS):
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if self.empty:
            return o, lse
        stream = device.current_stream(q.device)
        if self.rotate_keys is not None:
            k = self.rotate_keys(stream, k, cos, sin, None, mask_tensors)
        self.launch(stream, q, self.k_source(k), self.v_source(v), cos, sin, o, lse, *mask_tensors)
        return o, lse


_prepared = PreparedCalls(ForwardCall)


def attention_forward(q, k, v, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config, masks=NO_MASKS,
                      mask_tensors=NO_TENSORS):  # fmt: skip
    """Run the forward pass.

    q ``(B, HQ, NQ, D)``, k and v ``(B, HKV, NK, D)``, any strides; cos and sin ``([1|B,] S, R/2 | R)``; ``config`` a
    ``configs.ForwardConfig``; ``masks`` and their tensors as ``launch.describe_masks`` gives them. Returns o (shape of
    q, its memory order) and lse ``(B, HQ, NQ)`` float32, natural log. Packed sequences lie along NQ and NK, with B = 1.
    """
    options = (causal, softmax_scale, rotary_dim, interleaved, dot_precision(q.dtype), masks)
    return _prepared((q, k, v, cos, sin), options, config)(q, k, v, cos, sin, mask_tensors)
