"""Launcher of the sm_90 forward pass."""

import torch

from fused_rope_attn.attention.hopper.forward_kernel import forward_kernel
from fused_rope_attn.attention.hopper.shapes import FORWARD_BLOCK_M, ROWS
from fused_rope_attn.attention.masks import NO_MASKS, NO_TENSORS
from fused_rope_attn.attention.prepass import RotateKeys, RotateQueries
from fused_rope_attn.kernels.arguments import heads_per_section, scale_and_sign, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls, Source
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides, table_strides
from fused_rope_attn.runtime.triton_compat import (
    gl,
)


class ForwardCall:
    """The launches of one forward signature."""

    def __init__(self, q, k, v, cos, sin, causal, softmax_scale, rotary_dim, interleaved, masks, config):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        pad_d = max(64, block_d(head_dim))
        wide = pad_d > 128
        self.empty = batch * len_q == 0
        self.o_strides = output_strides(q)
        if self.empty:
            return
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16
        block_n = config.block_n
        qk_scale, q_sign, cap_scale = scale_and_sign(softmax_scale, masks.softcap)
        rotation = (cos, sin, rotary_dim, interleaved, config)
        self.rotate_queries = RotateQueries(q, len_k, *rotation, q_sign, masks) if wide else None
        self.rotate_keys = RotateKeys(
            k, *rotation, counter=True, masks=masks, tiles=(len_q, FORWARD_BLOCK_M.value), follows=wide
        )
        k_like = k.new_empty(k.shape)
        o_like = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        key_layout = gl.NVMMASharedLayout.get_default_for([1, 1, block_n, pad_d], element)
        # Columns of O that leave together.
        columns = pad_d // 2 if wide else pad_d
        o_layout = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS.value, columns], element)
        self.k_source = Source(k_like, block_n, pad_d, True, key_layout)
        self.v_source = Source(v, block_n, pad_d, True, key_layout)
        self.o_source = Source(o_like, ROWS.value, columns, True, o_layout)
        if wide:
            q_layout = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS.value, pad_d], element)
            self.q_source = Source(q.new_empty(q.shape), ROWS.value, pad_d, True, q_layout)
        cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
        num_heads, group_size = batch * heads_q, heads_q // heads_kv
        self.packed = masks.packed
        slots = tile_count(len_q, masks.num_sequences, FORWARD_BLOCK_M.value)
        num_tiles = slots * num_heads
        kv_bytes = 2 * masks.longest(len_k) * head_dim * k.element_size()
        section = heads_per_section(num_heads, group_size, kv_bytes, config.section_bytes)
        self.launch = Launch(
            forward_kernel,
            min(num_tiles, device.num_sms(q.device)),
            (
                q.stride(), self.o_strides if masks.packed else None, cos_strides, sin_strides, qk_scale, q_sign,
                cap_scale, masks.left, masks.right, num_tiles, num_heads, section, heads_q, group_size, len_q, len_k,
                slots if masks.packed else None,
            ),
            {
                "D": head_dim,
                "R": rotary_dim,
                "BLOCK_N": block_n,
                "BLOCK_D": pad_d,
                "STAGES": config.stages,
                "INTERLEAVED": interleaved,
                "IS_CAUSAL": causal,
                "READS_LENGTHS": masks.bounded,
                "USE_INT64_OFFSETS": is_long(q.stride(), self.o_strides),
                "PDL": config.pdl,
                "ATTEND_REGISTERS": config.attend_registers,
                "ROTATE_REGISTERS": config.rotate_registers,
                "LOAD_REGISTERS": 24,
                # With few blocks to a tile the registers that it takes cost more than it gives, and packed calls have
                # none to spare: 168 bytes of stack with it.
                "PIN_SUMS": config.pin and masks.left is None and not masks.packed,
                "Q_LAYOUT": gl.NVMMASharedLayout.get_default_for([ROWS.value, pad_d], element),
            },
            {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {})},
        )  # fmt: skip

    def __call__(self, q, k, v, cos, sin, mask_tensors=NO_TENSORS):
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if self.empty:
            return o, lse
        stream = device.current_stream(q.device)
        counter = torch.empty(self.rotate_keys.counter_size, dtype=torch.int32, device=q.device)
        q_desc = None
        if self.rotate_queries is not None:
            q_desc, q = self.q_source(self.rotate_queries(stream, q, cos, sin, mask_tensors)), None
        k = self.rotate_keys(stream, k, cos, sin, counter, mask_tensors)
        self.launch(
            stream, q, q_desc, self.k_source(k), self.v_source(v), self.o_source(o), o if self.packed else None, cos,
            sin, lse, counter, *mask_tensors[:3],
        )  # fmt: skip
        return o, lse


_prepared = PreparedCalls(ForwardCall)


def attention_forward(q, k, v, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config, masks=NO_MASKS,
                      mask_tensors=NO_TENSORS):  # fmt: skip
    """As the portable ``attention_forward``; ``config`` a ``configs.HopperForwardConfig``."""
    options = (causal, softmax_scale, rotary_dim, interleaved, masks)
    return _prepared((q, k, v, cos, sin), options, config)(q, k, v, cos, sin, mask_tensors)
