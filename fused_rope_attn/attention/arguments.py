"""What launches of attention and of the generation step have in common.

That is arguments by their parameters' names, and shapes and strides on which the backends agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.arguments import scale_and_sign, tile_count
from fused_rope_attn.runtime.layouts import output_strides, table_strides

# Query rows that the sm_90 backward takes at a time: packed sequences have whole tiles of them in its buffers.
PADDED_TILE_ROWS = 64


def shared_arguments(problem: Problem, cos: Any, sin: Any) -> dict[str, Any]:
    """Sizes, scales, masks and the rotation of a call, for ``Launch``'s ``shared``.

    What a call does not use is None (``cap_scale`` to ``right``, ``num_sequences``), and leaves the kernel.
    """
    qk_scale, q_sign, cap_scale = scale_and_sign(problem.softmax_scale, problem.softcap)
    cos_strides, sin_strides = table_strides(cos, sin, problem.rotary_dim, problem.interleaved)
    return {
        "cos_strides": cos_strides,
        "sin_strides": sin_strides,
        "position_limit": cos.shape[-2],
        "softmax_scale": problem.softmax_scale,
        "qk_scale": qk_scale,
        "q_sign": q_sign,
        "cap_scale": cap_scale,
        "norm_eps": None if problem.norm_eps is None else float(problem.norm_eps),
        "norm_offset": None if problem.norm_offset is None else float(problem.norm_offset),
        # A 0 on the right is known to the compiler, so that causal calls pay neither for adding it nor for a parameter.
        "window": (problem.window_left, tl.constexpr(0) if problem.window_right == 0 else problem.window_right),
        "HQ": problem.heads_q,
        "HKV": problem.heads_kv,
        "GROUP_SIZE": problem.group_size,
        "NQ": problem.len_q,
        "NK": problem.len_k,
        "num_sequences": problem.sequences,
        "D": problem.head_dim,
        "R": problem.rotary_dim,
        "INTERLEAVED": problem.interleaved,
        "READS_LENGTHS": problem.reads_lengths,
        "PRECISION": problem.precision,
    }


def padded_rows(len_q: int, sequences: int | None) -> int:
    """Rows for each head in buffers of the backward's tiles: NQ up to whole tiles.

    Packed sequences begin at ``kernels.lengths.padded_row`` each and have whole tiles to themselves.
    """
    return tile_count(len_q, sequences, PADDED_TILE_ROWS) * PADDED_TILE_ROWS


def rotated_shape(problem: Problem, *, in_tiles: bool = True) -> tuple[int, int, int, int]:
    """Shape of the rotated queries that a backward pass reads: like q, or with in_tiles packed ones in ``padded_rows``,
    as the sm_90 kernels read them."""
    rows = padded_rows(problem.len_q, problem.sequences) if in_tiles and problem.is_packed else problem.len_q
    return (problem.batch, problem.heads_q, rows, problem.head_dim)


def key_gradient_dtype(problem: Problem) -> torch.dtype:
    """dtype of dk and dv: the inputs', or float32 where they are parts of sums."""
    return torch.float32 if problem.sums_keys else problem.dtype


def gradient_strides(given: Tensors, o: torch.Tensor, is_rotated: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Strides of dq, dk and dv: the memory order of q, k and v.

    is_rotated: q and k are contiguous copies. o lies as q did, and in practice v as k did.
    """
    q, k = (o, given.v) if is_rotated else (given.q, given.k)
    return output_strides(q), output_strides(k), output_strides(given.v)


def result_strides(outputs: Sequence[Any], own: Sequence[tuple[int, int, int, int]]) -> tuple[Any, ...]:
    """Return strides of results: those of the output buffers that the caller gives, else their own."""
    return tuple(strides if out is None else tuple(out.stride()) for out, strides in zip(outputs, own))
