"""Launcher of the generation step."""

import itertools

import torch

from fused_rope_attn.generation.configs import DECODE_ROWS
from fused_rope_attn.generation.kernel import combine_kernel, decode_kernel
from fused_rope_attn.kernels.arguments import dot_precision, scale_and_sign
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides, table_strides


def row_block(rows: int) -> int:
    """BLOCK_M for a head's query rows: what the tensor cores need at least, and what the registers hold at most."""
    return min(DECODE_ROWS, max(16, 1 << (rows - 1).bit_length()))


def common_unit(x: torch.Tensor) -> int:
    """Elements of 16 bytes where every row of x begins at a multiple of 16 bytes, else 1."""
    unit = 16 // x.element_size()
    return unit if x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:3]) else 1


def in_units(x: torch.Tensor, unit: int) -> tuple[int, int, int, int]:
    """The strides that ``in_elements`` takes."""
    batch, head, row, column = x.stride()
    return batch // unit, head // unit, row // unit, column


class DecodeCall:
    """The launches of one signature; ``k`` and ``v`` None: nothing is appended."""

    def __init__(self, q, k_cache, v_cache, cos, sin, k, v, options, config):
        causal, softmax_scale, rotary_dim, interleaved, rotated, left, right, softcap, precision = options
        append = k is not None
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, capacity = k_cache.shape[1], k_cache.shape[2]
        group_size = heads_q // heads_kv
        group_rows = len_q * group_size
        block_m, block_n, pad_d = row_block(group_rows), config.block_n, block_d(head_dim)
        many_rows = block_m == DECODE_ROWS  # their sums leave fewer registers for scores
        if many_rows:
            block_n = min(block_n, 64)
        heads = batch * heads_kv * -(-group_rows // block_m)
        # No more programs than there can be shares.
        most = heads * max(1, -(-capacity // block_n))
        programs = min(config.programs_per_sm * device.num_sms(q.device), -(-most // config.least_tiles))
        self.o_strides = output_strides(q)
        self.workspace = programs * 2 * block_m * (head_dim + 2)
        qk_scale, q_sign, cap_scale = scale_and_sign(softmax_scale, softcap)
        cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
        unit = min(common_unit(k_cache), common_unit(v_cache))
        new_strides = (k.stride(), v.stride()) if append else (None, None)
        long = is_long(q.stride(), k_cache.stride(), v_cache.stride(), self.o_strides, *new_strides[: 2 * append])
        block_b = 32 if batch <= 32 else 256
        common = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        shared = {"BLOCK_D": pad_d, "BLOCK_B": block_b, "LEAST": config.least_tiles}
        self.launch = Launch(
            decode_kernel,
            programs,
            (
                q.stride(), in_units(k_cache, unit), in_units(v_cache, unit), cos_strides, sin_strides, *new_strides,
                self.o_strides, qk_scale, q_sign, cap_scale, left, right, programs, batch, heads_kv, group_size, len_q,
                capacity, cos.shape[-2],
            ),
            {
                "D": head_dim,
                "R": rotary_dim,
                **common,
                "BLOCK_NEW": 16,
                **shared,
                "INTERLEAVED": interleaved,
                "IS_CAUSAL": causal,
                "ROTATED": rotated,
                "APPEND": append,
                "PRECISION": precision,
                "UNIT": unit,
                "LONG": long,
                "PDL": config.pdl,
            },
            # So many rows of sums take the registers of twice as many threads.
            {
                **config.launch_options,
                "num_warps": max(8, config.num_warps) if many_rows else config.num_warps,
            },
        )  # fmt: skip
        self.combine = Launch(
            combine_kernel,
            batch * heads_kv * group_rows,
            (self.o_strides, left, programs, batch, heads_kv, group_size, len_q, capacity),
            {
                "D": head_dim,
                **common,
                "BLOCK_PARTS": config.combine_parts,
                **shared,
                "APPEND": append,
                "LONG": is_long(self.o_strides),
                "PDL": config.pdl,
            },
            {"num_warps": 4, "launch_pdl": True} if config.pdl else {"num_warps": 4},
        )

    def __call__(self, q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks):
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        parts = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        stream = device.current_stream(q.device)
        self.launch(stream, q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks, o, lse, parts)
        self.combine(stream, cache_seqlens, kv_starts, sinks, parts, o, lse)
        return o, lse


def _prepare(q, k_cache, v_cache, cos, sin, *rest) -> DecodeCall:
    *optional, has, options, config = rest
    k, v = optional[:2] if has[0] else (None, None)
    return DecodeCall(q, k_cache, v_cache, cos, sin, k, v, options, config)


_prepared = PreparedCalls(_prepare)


def attention_with_kvcache(q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, *, causal, softmax_scale, rotary_dim,
                           interleaved, rotated, left, right, softcap, config, kv_starts=None,
                           sinks=None):  # fmt: skip
    """Append k and v to the caches at ``cache_seqlens``, and attend.

    q ``(B, HQ, NQ, D)``, caches ``(B, HKV, S, D)``, k and v ``(B, HKV, NQ, D)`` or None, any strides; cos and sin
    ``([1|B,] rows, R/2 | R)``; cache_seqlens and kv_starts ``(B,)`` int32 and sinks ``(HQ,)``, contiguous; left and
    right as ``launch.Masks`` has them; ``config`` a ``configs.DecodeConfig``. Returns o (shape of q, its memory order)
    and lse ``(B, HQ, NQ)`` float32, natural log. Needs at least one query.
    """
    options = (causal, softmax_scale, rotary_dim, interleaved, rotated, left, right, softcap, dot_precision(q.dtype))
    optional = (k, v, kv_starts, sinks)
    has = [x is not None for x in optional]
    tensors = (q, k_cache, v_cache, cos, sin, *itertools.compress(optional, has), cache_seqlens)
    call = _prepared(tensors, (tuple(has), options), config)
    return call(q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks)
