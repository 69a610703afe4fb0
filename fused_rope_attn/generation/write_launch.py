"""The launch that puts new keys and values into a cache."""

from __future__ import annotations

import torch

from fused_rope_attn.attention.arguments import shared_arguments
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation.launch import cache_arguments, pointers
from fused_rope_attn.generation.problem import Written, cache_of
from fused_rope_attn.generation.write_kernel import write_kernel
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long


class WriteCall:
    """The launch of one signature."""

    def __init__(self, problem: Problem, tensors: tuple):
        given = Written(*tensors)
        small = 16 if device.is_interpreted() else 32
        block_t, heads = small, min(4, problem.heads_kv)
        tiles = tile_count(problem.len_q, problem.sequences, block_t)
        strides = [x.stride() for x in (given.k, given.v, given.k_cache, given.v_cache)]
        self.launch = Launch(
            write_kernel,
            -(-problem.heads_kv // heads) * tiles * given.k.shape[0],
            {"num_warps": 4, **({} if given.block_table is None else {"debug": True})},
            shared_arguments(problem, given.cos, given.sin) | cache_arguments(given),
            k_strides=strides[0],
            v_strides=strides[1],
            N=problem.len_q,
            S=problem.len_k,
            tiles=tiles,
            BLOCK_T=block_t,
            BLOCK_D=block_d(problem.head_dim),
            HEADS=heads,
            CACHE_IS_ROTATED=cache_of(problem).is_rotated,
            IS_FLOAT8=cache_of(problem).is_float8,
            USE_INT64_OFFSETS=is_long(*strides),
        )

    def __call__(self, tensors: tuple, k_norm: torch.Tensor | None = None, sums: torch.Tensor | None = None) -> None:
        """k_norm (D,): the weights of a norm of k, if the problem has one; sums as ``write_kernel`` writes them."""
        given = pointers(Written(*tensors), k_norm_ptr=k_norm, sums_ptr=sums)
        self.launch(device.current_stream(tensors[0].device), given)
