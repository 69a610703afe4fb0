"""Launcher of the sm_90 backward pass."""

import torch
import triton

from fused_rope_attn.attention.hopper import backward_wide_kernel as wide_kernel
from fused_rope_attn.attention.hopper.backward_kernel import backward_kernel
from fused_rope_attn.attention.hopper.dq import postprocess_kernel
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_N as BLOCK_N
from fused_rope_attn.attention.hopper.shapes import CONSUMERS
from fused_rope_attn.attention.masks import NO_MASKS, NO_TENSORS
from fused_rope_attn.attention.preprocess_kernel import preprocess_kernel
from fused_rope_attn.kernels.arguments import heads_per_section, scale_and_sign, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls, Source, ordered
from fused_rope_attn.runtime.layouts import block_d, has_descriptor, is_long, output_strides, table_strides
from fused_rope_attn.runtime.triton_compat import (
    TensorDescriptor,
    gl,
)


class BlockSource(Source):
    """A descriptor whose block is not [1, 1, rows, columns]."""

    __slots__ = ()

    def __init__(self, x: torch.Tensor, block: list[int], layout):
        self.kind = TensorDescriptor
        self.fields = {**vars(TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)), "base": None}


class BackwardCall:
    """The launches of one backward signature: pre-process, main kernel, post-process."""

    def __init__(self, do, q, k, v, o, cos, sin, causal, softmax_scale, rotary_dim, interleaved, masks, config):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        group_size = heads_q // heads_kv
        pad_d = max(64, block_d(head_dim))
        kernel, block_n, self.wide = backward_kernel, BLOCK_N.value, pad_d > 128
        if self.wide:
            kernel, block_n = wide_kernel.backward_wide_kernel, wide_kernel.BLOCK_N.value
            if masks.packed:
                raise NotImplementedError("packed sequences of more than 128 columns are the portable kernels'")
        self.strides = dq_strides, dk_strides, dv_strides = output_strides(q), output_strides(k), output_strides(v)
        sequences = masks.num_sequences
        pitch = tile_count(len_q, sequences, BLOCK_M.value) * BLOCK_M.value
        self.dsinks_shape = None
        self.empty = batch * heads_q * len_q * len_k == 0
        if self.empty:
            return
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16
        qk_scale, q_sign, cap_scale = scale_and_sign(softmax_scale, masks.softcap)
        tables = table_strides(cos, sin, rotary_dim, interleaved)
        # A copy of dO for the rare gradient that the TMA cannot address.
        self.copy_do = not has_descriptor(do)
        do_like = torch.empty(do.shape, dtype=do.dtype, device=do.device) if self.copy_do else do
        self.q_rot_shape = (batch, heads_q, pitch if masks.packed else len_q, head_dim)
        q_rot, k_rot = q.new_empty(self.q_rot_shape), k.new_empty(k.shape)
        self.stats_size = 2 * batch * heads_q * pitch
        self.accumulator_shape = (batch, heads_q, pitch, pad_d)
        # Narrow windows: the pre-process has nothing to clear, and the post-process begins while the last heads are at
        # work. With wide ones both are little of the whole, and the long key blocks should come first.
        self.progress_size = None
        two_sided = masks.left is not None and (causal or masks.right is not None)
        if two_sided and not masks.bounded and not self.wide and 4 * (masks.left + (masks.right or 0)) <= len_k:
            self.progress_size = batch * heads_kv + batch * heads_q * pitch // BLOCK_M.value
        shared = {
            "D": head_dim,
            "R": rotary_dim,
            "BLOCK_D": pad_d,
            "INTERLEAVED": interleaved,
            "LONG": is_long(*(x.stride() for x in (q, k, v, o, do)), *self.strides),
            "PDL": config.pdl,
        }
        pdl = {"launch_pdl": True} if config.pdl else {}
        chunk, block = config.rotate_heads, config.rotate_rows
        self.preprocess = Launch(
            preprocess_kernel,
            batch
            * (
                triton.cdiv(pitch, block) * triton.cdiv(heads_q, chunk)
                + tile_count(len_k, sequences, block) * triton.cdiv(heads_kv, chunk)
            ),
            (
                o.stride(), do_like.stride(), q.stride(), q_rot.stride(), k.stride(), k_rot.stride(), *tables, q_sign,
                batch, heads_q, heads_kv, len_q, pitch, len_k, sequences, cos.shape[-2],
            ),
            ordered(
                preprocess_kernel, shared, HEADS=chunk, BLOCK_N=block, READS_LENGTHS=masks.bounded, ROTATE=True,
                PROGRESS_ROWS=BLOCK_M.value, PAD_TO=BLOCK_M.value if masks.packed else 0,
                USE_INT64_OFFSETS=shared["LONG"],
            ),
            {"num_warps": 4},
        )  # fmt: skip
        self._describe(q_rot, k_rot, v, do_like, element, block_n)
        heads = batch * heads_kv
        query_bytes = (2 * head_dim * q.element_size() + 4 * pad_d) * group_size * masks.longest(len_q)
        self.main = Launch(
            kernel,
            tile_count(len_k, sequences, block_n) * heads,
            (
                dk_strides, dv_strides, *tables, qk_scale, cap_scale, masks.left, masks.right, heads, heads_q,
                heads_kv, group_size, len_q, pitch, len_k, sequences, self.stats_size // 2,
                heads_per_section(heads, 1, query_bytes, config.section_bytes),
            ),
            ordered(
                kernel,
                shared,
                Q_STAGES=config.q_stages,
                DO_STAGES=config.do_stages,
                IS_CAUSAL=causal,
                BOUNDED=masks.bounded,
                TRIMMED=masks.left is not None and len_k - len_q > masks.left,
                CONSUMER_REGISTERS=config.consumer_registers,
                DS_LAYOUT=gl.NVMMASharedLayout.get_default_for([block_n, BLOCK_M.value], element),
            ),
            {"num_warps": 4, **pdl},
        )  # fmt: skip
        chunk, block = config.post_heads, config.post_rows
        if masks.tensors[0] is not None:
            self.dsinks_shape = (batch * tile_count(len_q, sequences, block), heads_q)
        self.postprocess = Launch(
            postprocess_kernel,
            batch * tile_count(len_q, sequences, block) * triton.cdiv(heads_q, chunk),
            (
                dq_strides,
                *tables,
                softmax_scale,
                heads_q,
                heads_kv,
                group_size,
                len_q,
                pitch,
                len_k,
                sequences,
                self.stats_size // 2,
                triton.cdiv(len_k, block_n),
            ),
            ordered(postprocess_kernel, shared, HEADS=chunk, BLOCK_N=block, TILED=self.wide),
            {"num_warps": 4, **pdl},
        )

    def _describe(self, q_rot, k_rot, v, do, element, block_n):
        """Descriptors of the main kernel; those of buffers from stand-ins of their shape."""
        layout = gl.NVMMASharedLayout.get_default_for
        pad_d = self.accumulator_shape[3]
        rows, part = BLOCK_M.value, [1, 1, BLOCK_M.value, pad_d // CONSUMERS.value]
        query, key = (layout([1, 1, n, pad_d], element) for n in (rows, block_n))
        self.q_source, self.do_source = (Source(x, rows, pad_d, True, query) for x in (q_rot, do))
        self.k_source, self.v_source = (Source(x, block_n, pad_d, True, key) for x in (k_rot, v))
        stats = torch.empty(self.stats_size, dtype=torch.float32, device=v.device)
        self.stats_source = BlockSource(stats, [rows], gl.NVMMASharedLayout(0, 32, rank=1))
        accumulator = torch.empty(self.accumulator_shape, dtype=torch.float32, device=v.device)
        if self.wide:
            self.dq_source = Source(accumulator, rows, pad_d, False)
        else:
            self.dq_source = BlockSource(accumulator, part, layout(part, gl.float32))

    def __call__(self, do, q, k, v, o, lse, cos, sin, mask_tensors=NO_TENSORS):
        dq, dk, dv = (
            torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
            for x, strides in zip((q, k, v), self.strides)
        )
        sinks, starts, lens, cu_q, cu_k = mask_tensors
        if self.empty:
            gradients = dq.zero_(), dk.zero_(), dv.zero_()
            return gradients if sinks is None else (*gradients, torch.zeros_like(sinks))
        if self.copy_do:
            do = torch.empty(do.shape, dtype=do.dtype, device=do.device).copy_(do)
        stats = torch.empty(self.stats_size, dtype=torch.float32, device=q.device)
        accumulator = torch.empty(self.accumulator_shape, dtype=torch.float32, device=q.device)
        cleared, progress = accumulator, None
        if self.progress_size is not None:
            cleared, progress = None, torch.empty(self.progress_size, dtype=torch.int32, device=q.device)
        q_rot, k_rot = q.new_empty(self.q_rot_shape), k.new_empty(k.shape)
        stream = device.current_stream(q.device)
        self.preprocess(
            stream, o, do, lse, stats, cleared, progress, q, q_rot, k, k_rot, cos, sin, lens, cu_q, cu_k
        )  # fmt: skip
        self.main(
            stream, self.q_source(q_rot), self.k_source(k_rot), self.v_source(v), self.do_source(do),
            self.stats_source(stats), self.dq_source(accumulator), progress, cos, sin, dk, dv, starts, lens, cu_q,
            cu_k,
        )  # fmt: skip
        if sinks is None:
            self.postprocess(stream, accumulator, progress, cos, sin, dq, None, None, None, lens, cu_q, cu_k)
            return dq, dk, dv
        parts = q.new_empty(self.dsinks_shape, dtype=torch.float32)
        self.postprocess(stream, accumulator, progress, cos, sin, dq, stats, sinks, parts, lens, cu_q, cu_k)
        return dq, dk, dv, parts.sum(0).to(sinks.dtype)


_prepared = PreparedCalls(BackwardCall)


def attention_backward(do, q, k, v, o, lse, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config,
                       masks=NO_MASKS, mask_tensors=NO_TENSORS):  # fmt: skip
    """As the portable ``attention_backward``; ``config`` a ``configs.HopperBackwardConfig``.

    Not deterministic.
    """
    options = (causal, softmax_scale, rotary_dim, interleaved, masks)
    return _prepared((do, q, k, v, o, cos, sin), options, config)(do, q, k, v, o, lse, cos, sin, mask_tensors)
