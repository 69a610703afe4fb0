# mypy: disable-error-code="attr-defined, arg-type"
"""Arguments that several kernels take, and shapes and strides that the backends share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels import intervals, norm, rotation, sequences, softmax, tiles
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.runtime.layouts import block_d, output_strides, table_strides

view = tiles.view
PADDED_TILE_ROWS = sequences.PADDED_TILE_ROWS.value


def scale_and_sign(softmax_scale: float, softcap: float = 0.0) -> tuple[float, float, float | None]:
    """Return (qk_scale > 0 for base-2 softmax, sign to multiply q by, cap_scale): kernels never see a scale <= 0.

    With a softcap the scores are ``qk_scale * tanh(cap_scale * q k)``; without one ``qk_scale * q k``, cap_scale None.
    """
    scale, sign = (1.0, 0.0) if softmax_scale == 0.0 else (abs(softmax_scale), math.copysign(1.0, softmax_scale))
    if softcap:
        return softcap * softmax.LOG2E.value, sign, scale / softcap
    return scale * softmax.LOG2E.value, sign, None


def tables_of(problem: Problem, tensors: Tensors) -> Any:
    """Return the ``RotaryTables`` of a call."""
    cos, sin = tensors.cos, tensors.sin
    strides = table_strides(cos, sin, problem.rotary_dim, problem.interleaved)
    return rotation.RotaryTables.host(cos, sin, *strides, problem.rotary_dim, problem.interleaved)


def norm_of(problem: Problem, weight: torch.Tensor | None) -> Any:
    """Return the ``Norm`` with this weight; None for None."""
    if weight is None:
        return None
    return norm.Norm.host(weight, float(problem.norm_eps), float(problem.norm_offset), problem.head_dim)


def scale_of(problem: Problem) -> Any:
    """Return the ``ScoreScale`` of a call."""
    qk_scale, _, cap_scale = scale_and_sign(problem.softmax_scale, problem.softcap)
    return softmax.ScoreScale.host(qk_scale, cap_scale, problem.precision)


def numbers_of(problem: Problem) -> dict[str, Any]:
    """Return the numbers of a call for which kernels are not compiled again, by the kernels' names."""
    return {
        "HQ": problem.heads_q,
        "HKV": problem.heads_kv,
        "GROUP_SIZE": problem.group_size,
        "NQ": problem.len_q,
        "NK": problem.len_k,
        "num_sequences": problem.sequences,
        "window_left": problem.window_left,
        # A compile-time 0, so that causal calls pay neither for an addition nor for a parameter.
        "window_right": tl.constexpr(0) if problem.window_right == 0 else problem.window_right,
    }


def masks_of(problem: Problem, tensors: Tensors, blocks: torch.Tensor | None = None) -> Any:
    """Return the ``MaskArguments`` of a call without its numbers. blocks: of ``interval_blocks_kernel``."""
    of_intervals = None
    if problem.has_intervals:
        starts, ends = tensors.query_starts, tensors.query_ends
        strides = tuple(0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (starts, ends))
        of_intervals = intervals.Intervals.host(starts, ends, blocks, strides)
    return sequences.MaskArguments.host(
        starts_ptr=tensors.kv_starts,
        lens_ptr=tensors.kv_lens,
        cu_q_ptr=tensors.cu_seqlens_q,
        cu_k_ptr=tensors.cu_seqlens_k,
        num_sequences=None,
        window=None,
        READS_LENGTHS=problem.reads_lengths,
        FROM_START=problem.batch_invariant and problem.has_kv_starts,
        TOKEN_TABLES=problem.token_tables,
        intervals=of_intervals,
    )


def rotation_of(problem: Problem, tensors: Tensors, inline: bool) -> Any:
    """Return the ``CallRotation`` of a call. inline: kernels rotate the keys that they read."""
    norms = norm_of(problem, tensors.q_norm), norm_of(problem, tensors.k_norm)
    sign = scale_and_sign(problem.softmax_scale)[1]
    return rotation.CallRotation.host(tables_of(problem, tensors), *norms, sign, inline)


def nope_sign_of(problem: Problem) -> float | None:
    """Return the factor of the caller's q_nope. None for 1, which most calls have: they do not multiply."""
    sign = scale_and_sign(problem.softmax_scale)[1]
    return None if sign == 1.0 else sign


def shared_arguments(problem: Problem, cos: Any, sin: Any) -> dict[str, Any]:
    """Return the sizes, scales, masks and rotation of a call, for ``Launch``'s ``shared``.

    Options that a call does not use are None (``cap_scale``, the norms, the window's ends, ``num_sequences``), so that
    the compiler removes their code.
    """
    qk_scale, q_sign, cap_scale = scale_and_sign(problem.softmax_scale, problem.softcap)
    cos_strides, sin_strides = table_strides(cos, sin, problem.rotary_dim, problem.interleaved)
    return numbers_of(problem) | {
        "cos_strides": cos_strides,
        "sin_strides": sin_strides,
        "position_limit": cos.shape[-2],
        "softmax_scale": problem.softmax_scale,
        "qk_scale": qk_scale,
        "q_sign": q_sign,
        # Most scales are positive: their calls read q_nope without a multiplication.
        "nope_sign": None if q_sign == 1.0 or problem.nope_dim is None else q_sign,
        "cap_scale": cap_scale,
        "norm_eps": None if problem.norm_eps is None else float(problem.norm_eps),
        "norm_offset": None if problem.norm_offset is None else float(problem.norm_offset),
        # A compile-time 0, so that causal calls pay neither for an addition nor for a parameter.
        "window": (problem.window_left, tl.constexpr(0) if problem.window_right == 0 else problem.window_right),
        "D": problem.head_dim,
        "DN": problem.nope_dim,
        "BLOCK_DN": None if problem.nope_dim is None else block_d(problem.nope_dim),
        "DV": problem.value_dim,
        "BLOCK_DV": block_d(problem.value_dim),
        "R": problem.rotary_dim,
        "INTERLEAVED": problem.interleaved,
        "READS_LENGTHS": problem.reads_lengths,
        "TOKEN_TABLES": problem.token_tables,
        "FROM_START": problem.batch_invariant and problem.has_kv_starts,
        "PRECISION": problem.precision,
    }


def interval_strides(tensors: Tensors) -> tuple[int, int] | None:
    """Return the strides of query_starts and query_ends between batch entries; 0: one row for all. None without."""
    given = tensors.query_starts, tensors.query_ends
    if given == (None, None):
        return None
    first, end = (0 if x is None or x.shape[0] == 1 else x.stride(0) for x in given)
    return first, end


def shared_tensors(tensors: Tensors, **own: Any) -> dict[str, Any]:
    """Return the tensors that most kernels read, by the kernels' names, and ``own``, for the ``shared`` of launches."""
    return {
        "cos_ptr": tensors.cos,
        "sin_ptr": tensors.sin,
        "sinks_ptr": tensors.sinks,
        "starts_ptr": tensors.kv_starts,
        "lens_ptr": tensors.kv_lens,
        "cu_q_ptr": tensors.cu_seqlens_q,
        "cu_k_ptr": tensors.cu_seqlens_k,
        "query_starts_ptr": tensors.query_starts,
        "query_ends_ptr": tensors.query_ends,
        "q_norm_ptr": tensors.q_norm,
        "k_norm_ptr": tensors.k_norm,
        "dlse_ptr": tensors.dlse,
        "q_nope_ptr": tensors.q_nope,
        "k_nope_ptr": tensors.k_nope,
        **own,
    }


def rows_of(tensors: Tensors) -> list[Any]:
    """Return the rows of queries, keys and values that a call has."""
    given = (tensors.q, tensors.k, tensors.v, tensors.q_nope, tensors.k_nope)
    return [x for x in given if x is not None]


def nope_strides(tensors: Tensors) -> dict[str, Any]:
    """Return the strides of q_nope and k_nope by the kernels' names, None if the call has neither."""
    given = {"q_nope_strides": tensors.q_nope, "k_nope_strides": tensors.k_nope}
    return {name: None if x is None else x.stride() for name, x in given.items()}


def of_shared_head(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the strides of k (B, 1, NK, R) with which every head reads its one head."""
    return (strides[0], 0, strides[2], strides[3])


def padded_rows(len_q: int, sequences: int | None) -> int:
    """Return the rows of each head in the backward's workspaces: NQ rounded up to whole tiles.

    Each packed sequence begins at ``kernels.sequences.padded_row`` and has its own whole tiles.
    """
    return tile_count(len_q, sequences, PADDED_TILE_ROWS) * PADDED_TILE_ROWS


def rotated_shape(problem: Problem, *, in_tiles: bool = True) -> tuple[int, int, int, int]:
    """Return the shape of the rotated queries that a backward pass reads, which is q's.

    in_tiles: packed queries have ``padded_rows``, as the sm_90 kernels read them.
    """
    rows = padded_rows(problem.len_q, problem.sequences) if in_tiles and problem.is_packed else problem.len_q
    return (problem.batch, problem.heads_q, rows, problem.head_dim)


def key_gradient_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of dk and dv: the inputs', or float32 if they are summed over several calls."""
    return torch.float32 if problem.sums_keys else problem.dtype


def gradient_strides(given: Tensors, o: torch.Tensor, is_rotated: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Return the strides of dq, dk and dv, which have the memory order of q, k and v.

    is_rotated: q and k are contiguous copies, so take the order of o, which is q's, and of v, which in practice is k's.
    """
    q, k = (o, given.v) if is_rotated else (given.q, given.k)
    return output_strides(q), output_strides(k), output_strides(given.v)


def result_strides(outputs: Sequence[Any], own: Sequence[tuple[int, int, int, int]]) -> tuple[Any, ...]:
    """Return strides of results: of the caller's output buffer if there is one, else ``own``."""
    return tuple(strides if out is None else tuple(out.stride()) for out, strides in zip(outputs, own))
