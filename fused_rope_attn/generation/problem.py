"""The tensors of one generation step; the rest of the call is attention's ``Problem``."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from fused_rope_attn.attention.problem import Cache, Problem, describe
from fused_rope_attn.attention.problem import Tensors as AttentionTensors


class Tensors(NamedTuple):
    """q ``(B, HQ, NQ, D)``; caches ``(B, HKV, S_max, D)``, or with a block_table ``(B, pages)`` int32 pools
    ``(num_pages, HKV, page_size, D)``; new k and v ``(B, HKV, NQ, D)`` or None, any strides.

    cos and sin ``([1|B,] S, R/2 | R)``; cache_seqlens and kv_starts ``(B,)`` int32; sinks ``(HQ,)``; k_scale and
    v_scale of one element or ``(HKV,)``, float32; q_norm and k_norm ``(D,)``, the weights of the norms. What only the
    device reads (cache_seqlens, kv_starts, sinks, the norms) is contiguous.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    cos: Any
    sin: Any
    k: Any
    v: Any
    cache_seqlens: Any
    kv_starts: Any = None
    sinks: Any = None
    block_table: Any = None
    k_scale: Any = None
    v_scale: Any = None
    q_norm: Any = None
    k_norm: Any = None


def cache_of(problem: Problem) -> Cache:
    """What the ``Problem`` of a generation step has and attention's has not."""
    return cast(Cache, problem.cache)


def describe_step(tensors: Tensors, *, cache_is_rotated: bool, **options) -> Problem:
    """The ``Problem`` of a checked generation step; ``options`` as ``attention.problem.describe`` takes them."""
    q, k_cache, v_cache, cos, sin, k, _, cache_seqlens, kv_starts, sinks, block_table = tensors[:11]
    seen = AttentionTensors(q, k_cache, v_cache, cos, sin, sinks, kv_starts, cache_seqlens)
    page_size = None if block_table is None else k_cache.shape[2]
    is_float8 = k_cache.dtype is torch.float8_e4m3fn
    problem = describe(seen, cache=Cache(cache_is_rotated, k is not None, page_size, is_float8), **options)
    return problem if page_size is None else problem._replace(len_k=block_table.shape[1] * page_size)


# The operator's arguments in the order of ``flatten``. window_left, window_right: -1 for unbounded.
SCHEMA = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cos, Tensor sin, Tensor? k, Tensor? v, "
    "Tensor cache_seqlens, Tensor? kv_starts, Tensor? sinks, Tensor? block_table, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? q_norm, Tensor? k_norm, bool cache_is_rotated, bool causal, float softmax_scale, int rotary_dim, "
    "bool interleaved, SymInt window_left, SymInt window_right, float softcap, float? norm_eps, float? norm_offset"
)


def flatten(problem: Problem, tensors: Tensors) -> tuple:
    """The operator's arguments, as ``SCHEMA`` names them."""
    left, right = (-1, -1) if problem.window is None else problem.window
    return (
        *tensors, cache_of(problem).is_rotated, problem.causal, problem.softmax_scale, problem.rotary_dim,
        problem.interleaved, left, right, problem.softcap, problem.norm_eps, problem.norm_offset,
    )  # fmt: skip


def rebuild(
    q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks, block_table, k_scale, v_scale, q_norm, k_norm,
    cache_is_rotated, causal, softmax_scale, rotary_dim, interleaved, window_left, window_right, softcap, norm_eps,
    norm_offset,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """Inverse of ``flatten``."""
    tensors = Tensors(
        q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks, block_table, k_scale, v_scale, q_norm,
        k_norm,
    )  # fmt: skip
    problem = describe_step(
        tensors, cache_is_rotated=cache_is_rotated, causal=causal, softmax_scale=softmax_scale, rotary_dim=rotary_dim,
        interleaved=interleaved, window=(window_left, window_right), softcap=softcap,
        norm_eps=norm_eps, norm_offset=norm_offset,
    )  # fmt: skip
    return problem, tensors


class Written(NamedTuple):
    """k and v ``(B, HKV, N, D)``, packed ones with B = 1; caches and what belongs to them as in ``Tensors``; new_lens
    ``(B,)`` and cu_seqlens ``(sequences + 1,)`` int32 or None, contiguous."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    cos: Any
    sin: Any
    block_table: Any = None
    cache_seqlens: Any = None
    new_lens: Any = None
    cu_seqlens: Any = None
    k_scale: Any = None
    v_scale: Any = None


# The arguments of the operator ``write_kvcache``: the fields of ``Written``, and what ``describe_write`` takes.
WRITE_SCHEMA = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cos, Tensor sin, Tensor? block_table, "
    "Tensor? cache_seqlens, Tensor? new_lens, Tensor? cu_seqlens, Tensor? k_scale, Tensor? v_scale, "
    "bool cache_is_rotated, int rotary_dim, bool interleaved"
)


def describe_write(
    tensors: Written, *, cache_is_rotated: bool, rotary_dim: int, interleaved: bool, backend: str = "auto"
) -> Problem:
    """The ``Problem`` of checked new tokens on their way into a cache: a step whose queries are the new keys."""
    k, v, k_cache, v_cache, cos, sin, block_table, cache_seqlens, _, cu_seqlens, _, _ = tensors
    problem = describe_step(
        Tensors(k, k_cache, v_cache, cos, sin, k, v, cache_seqlens, block_table=block_table),
        cache_is_rotated=cache_is_rotated, causal=True, softmax_scale=1.0, rotary_dim=rotary_dim,
        interleaved=interleaved, backend=backend,
    )  # fmt: skip
    return problem if cu_seqlens is None else problem._replace(sequences=cu_seqlens.shape[0] - 1)
