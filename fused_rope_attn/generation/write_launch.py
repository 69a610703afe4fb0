"""The launch that puts new keys and values into a cache."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation.launch import cache_arguments
from fused_rope_attn.generation.problem import Written, cache_of
from fused_rope_attn.generation.write_kernel import write_kernel
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long, table_strides


class WriteCall:
    """The launch of one signature."""

    def __init__(self, problem: Problem, tensors: tuple):
        given = Written(*tensors)
        small = 16 if device.is_interpreted() else 32
        block_t, heads = small, min(4, problem.heads_kv)
        tiles = tile_count(problem.len_q, problem.sequences, block_t)
        cos_strides, sin_strides = table_strides(given.cos, given.sin, problem.rotary_dim, problem.interleaved)
        strides = [x.stride() for x in (given.k, given.v, given.k_cache, given.v_cache)]
        self.launch = Launch(
            write_kernel,
            -(-problem.heads_kv // heads) * tiles * given.k.shape[0],
            {"num_warps": 4, **({} if given.block_table is None else {"debug": True})},
            cache_arguments(given),
            k_strides=strides[0],
            v_strides=strides[1],
            cos_strides=cos_strides,
            sin_strides=sin_strides,
            norm_eps=None if problem.norm_eps is None else float(problem.norm_eps),
            norm_offset=None if problem.norm_offset is None else float(problem.norm_offset),
            N=problem.len_q,
            S=problem.len_k,
            HKV=problem.heads_kv,
            num_sequences=problem.sequences,
            position_limit=given.cos.shape[-2],
            tiles=tiles,
            D=problem.head_dim,
            R=problem.rotary_dim,
            BLOCK_T=block_t,
            BLOCK_D=block_d(problem.head_dim),
            HEADS=heads,
            INTERLEAVED=problem.interleaved,
            CACHE_IS_ROTATED=cache_of(problem).is_rotated,
            IS_FLOAT8=cache_of(problem).is_float8,
            USE_INT64_OFFSETS=is_long(*strides),
        )

    def __call__(self, tensors: Any, k_norm: torch.Tensor | None = None, sums: torch.Tensor | None = None) -> None:
        """k_norm (D,): the weights of a norm of k, if the problem has one; sums as ``write_kernel`` writes them."""
        k, v, k_cache, v_cache, cos, sin, block_table, cache_seqlens, new_lens, cu_seqlens, k_scale, v_scale = tensors
        self.launch(
            device.current_stream(k.device), k_ptr=k, v_ptr=v, k_cache_ptr=k_cache, v_cache_ptr=v_cache, cos_ptr=cos,
            sin_ptr=sin, table_ptr=block_table, seqlens_ptr=cache_seqlens, lens_ptr=new_lens, cu_ptr=cu_seqlens,
            k_scale_ptr=k_scale, v_scale_ptr=v_scale, k_norm_ptr=k_norm, sums_ptr=sums,
        )  # fmt: skip
