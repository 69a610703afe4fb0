# mypy: disable-error-code="attr-defined, arg-type"
"""Arguments that several kernels take, and shapes and strides that the backends share."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels import masks, norm, rotation, sequences, softmax, tiles
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.runtime.layouts import output_strides, table_strides

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
    if cos is None:
        return rotation.RotaryTables.host(None, None, None, None, R=0, INTERLEAVED=True)
    strides = table_strides(cos, sin, problem.rotary_dim, problem.interleaved)
    return rotation.RotaryTables.host(cos, sin, *strides, problem.rotary_dim, problem.interleaved)


def table_rows(tensors: Any) -> int | None:
    """Return the rows of the tables; None without tables."""
    return None if tensors.cos is None else tensors.cos.shape[-2]


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
        of_intervals = masks.Intervals.host(starts, ends, blocks, strides)
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
    sign = None if problem.is_plain and not inline else scale_and_sign(problem.softmax_scale)[1]
    return rotation.CallRotation.host(tables_of(problem, tensors), *norms, sign, inline)


def view_of_keys(problem: Problem, k: torch.Tensor) -> Any:
    """Return the ``TensorView`` of k. In multi-head latent attention every head reads its one head."""
    batch, head, row, column = k.stride()
    return view(k, (batch, head if problem.nope_dim is None else 0, row, column))


def rows_of(tensors: Tensors) -> list[Any]:
    """Return the rows of queries, keys and values that a call has."""
    given = (tensors.q, tensors.k, tensors.v, tensors.q_nope, tensors.k_nope)
    return [x for x in given if x is not None]


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
