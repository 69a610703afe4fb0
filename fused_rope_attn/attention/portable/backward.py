"""Launcher of the portable backward pass."""

import torch
import triton

from fused_rope_attn.attention.masks import NO_MASKS, NO_TENSORS
from fused_rope_attn.attention.portable.backward_kernels import dkdv_kernel, dq_kernel
from fused_rope_attn.attention.preprocess_kernel import preprocess_kernel
from fused_rope_attn.kernels.arguments import dot_precision, heads_per_section, scale_and_sign, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls, Source, ordered
from fused_rope_attn.runtime.layouts import block_d, has_descriptor, is_long, output_strides, table_strides


class BackwardCall:
    """The launches of one backward signature: pre-process, dkdv, dq; each None where it has nothing to do."""

    def __init__(
        self, do, q, k, v, o, cos, sin, causal, softmax_scale, rotary_dim, interleaved, precision, masks, config
    ):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        self.inline = inline = config.strategy == "inline"
        pad_d = block_d(head_dim)
        self.preprocess = self.dkdv = self.dq = self.dsinks_shape = None
        group_size = heads_q // heads_kv
        self.strides = dq_strides, dk_strides, dv_strides = output_strides(q), output_strides(k), output_strides(v)
        q_rot, k_rot = self._rotated(q, k)
        qk_scale, q_sign, cap_scale = scale_and_sign(softmax_scale, masks.softcap)
        sequences = masks.num_sequences
        tables = table_strides(cos, sin, rotary_dim, interleaved)
        tma = config.tma and not inline and all(map(has_descriptor, (q_rot, k_rot, v, do)))
        shared = {
            "D": head_dim,
            "R": rotary_dim,
            "BLOCK_D": pad_d,
            "INTERLEAVED": interleaved,
            "READS_LENGTHS": masks.bounded,
            "USE_INT64_OFFSETS": is_long(*(x.stride() for x in (q, k, v, o, do)), *self.strides),
        }
        chunk, block = config.rotate_heads, config.rotate_rows
        programs = tile_count(len_q, sequences, block) * triton.cdiv(heads_q, chunk) * batch
        if not inline:
            programs += tile_count(len_k, sequences, block) * triton.cdiv(heads_kv, chunk) * batch
        # dq_kernel may only skip its wait when dkdv_kernel, which does wait, runs between it and the pre-process.
        shared["PDL"] = pdl = config.pdl and programs > 0 and batch * len_k > 0
        launch_options = {"launch_pdl": True} if pdl else {}
        if programs:
            self.preprocess = Launch(
                preprocess_kernel,
                programs,
                (
                    o.stride(), do.stride(), q.stride(), q_rot.stride(), k.stride(), k_rot.stride(), *tables, q_sign,
                    batch, heads_q, heads_kv, len_q, len_q, len_k, sequences, cos.shape[-2],
                ),
                ordered(
                    preprocess_kernel, shared, HEADS=chunk, BLOCK_N=block, ROTATE=not inline, PROGRESS_ROWS=0, PAD_TO=0,
                ),
                {"num_warps": 4},
            )  # fmt: skip
        shared.update(IS_CAUSAL=causal, ROTATE_INLINE=inline, PRECISION=precision, USE_TMA=tma)
        head_bytes = 2 * head_dim * q.element_size()
        if batch * len_k:
            tile, heads = config.dkdv, batch * heads_kv
            self.q_source, self.do_source = (Source(x, tile.block_m, pad_d, tma) for x in (q_rot, do))
            section = heads_per_section(heads, 1, head_bytes * group_size * masks.longest(len_q), config.section_bytes)
            self.dkdv = Launch(
                dkdv_kernel,
                tile_count(len_k, sequences, tile.block_n) * heads,
                (
                    q_rot.stride(), k_rot.stride(), v.stride(), do.stride(), dk_strides, dv_strides, *tables,
                    qk_scale, q_sign, cap_scale, masks.left, masks.right, heads, heads_kv, group_size, len_q, len_k,
                    sequences, section,
                ),
                ordered(dkdv_kernel, shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n),
                {**tile.launch_options, **launch_options},
            )  # fmt: skip
        if batch * len_q:
            tile, heads = config.dq, batch * heads_q
            self.k_source, self.v_source = (Source(x, tile.block_n, pad_d, tma) for x in (k_rot, v))
            section = heads_per_section(heads, group_size, head_bytes * masks.longest(len_k), config.section_bytes)
            tiles = tile_count(len_q, sequences, tile.block_m)
            if masks.tensors[0] is not None:
                self.dsinks_shape = (tiles * batch, heads_q)
            self.dq = Launch(
                dq_kernel,
                tiles * heads,
                (
                    q_rot.stride(), k_rot.stride(), v.stride(), do.stride(), dq_strides, *tables, qk_scale, q_sign,
                    softmax_scale, cap_scale, masks.left, masks.right, heads, heads_q, group_size, len_q, len_k,
                    sequences, section,
                ),
                ordered(dq_kernel, shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n),
                {**tile.launch_options, **launch_options},
            )  # fmt: skip

    def _rotated(self, q, k):
        """Room for the rotated q and k; q and k themselves where they are rotated inline."""
        if self.inline:
            return q, k
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def __call__(self, do, q, k, v, o, lse, cos, sin, mask_tensors=NO_TENSORS):
        dq, dk, dv = (
            torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
            for x, strides in zip((q, k, v), self.strides)
        )
        stats = torch.empty((2, *q.shape[:3]), dtype=torch.float32, device=q.device)
        q_rot, k_rot = self._rotated(q, k)
        stream = device.current_stream(q.device)
        sinks, starts, *lens_and_cu = mask_tensors
        if self.preprocess is not None:
            self.preprocess(stream, o, do, lse, stats, None, None, q, q_rot, k, k_rot, cos, sin, *lens_and_cu)
        if self.dkdv is not None:
            self.dkdv(
                stream, self.q_source(q_rot), k_rot, v, self.do_source(do), stats, cos, sin, dk, dv, starts,
                *lens_and_cu,
            )  # fmt: skip
        # Tiles behind the end of a packed sequence write nothing.
        parts = None if self.dsinks_shape is None else q.new_zeros(self.dsinks_shape, dtype=torch.float32)
        if self.dq is not None:
            self.dq(
                stream, q_rot, self.k_source(k_rot), self.v_source(v), do, stats, cos, sin, dq, parts, sinks, starts,
                *lens_and_cu,
            )  # fmt: skip
        if sinks is None:
            return dq, dk, dv
        return dq, dk, dv, torch.zeros_like(sinks) if parts is None else parts.sum(0).to(sinks.dtype)


_prepared = PreparedCalls(BackwardCall)


def attention_backward(do, q, k, v, o, lse, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config,
                       masks=NO_MASKS, mask_tensors=NO_TENSORS):  # fmt: skip
    """Run the backward pass; arguments as in ``attention_forward``, ``config`` a ``configs.BackwardConfig``.

    do and o ``(B, HQ, NQ, D)``, lse ``(B, HQ, NQ)`` float32. Returns dq, dk, dv like q, k, v, and with sinks theirs.
    Bitwise deterministic: every output element is summed by one program in a fixed order.
    """
    options = (causal, softmax_scale, rotary_dim, interleaved, dot_precision(q.dtype), masks)
    return _prepared((do, q, k, v, o, cos, sin), options, config)(do, q, k, v, o, lse, cos, sin, mask_tensors)
