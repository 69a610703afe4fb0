"""The tensors of one generation step; the rest of the call is attention's ``Problem``."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from fused_rope_attn.attention.problem import (
    DESCRIBED,
    Cache,
    OperatorArguments,
    Problem,
    Tensors,
    describe,
    problem_of,
)
from fused_rope_attn.runtime.options import StepOptions


class StepTensors(NamedTuple):
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
    """Return the ``Cache`` of a generation step's ``Problem``."""
    return cast(Cache, problem.cache)


def step_of(tensors: StepTensors, options: Any, rotary_dim: int, cache_is_rotated: bool) -> Problem:
    """Return the ``Problem`` of a step, of checked ``Options`` and the rotary dim that the check has found."""
    seen, cache = _as_attention(tensors, cache_is_rotated)
    return _with_capacity(problem_of(seen, options, rotary_dim, 0, cache), cache, tensors)


def describe_step(tensors: StepTensors, *, cache_is_rotated: bool, **options: Any) -> Problem:
    """Return the ``Problem`` of a step; ``options`` as ``attention.problem.describe`` takes them."""
    seen, cache = _as_attention(tensors, cache_is_rotated)
    return _with_capacity(describe(seen, cache=cache, **options), cache, tensors)


def _as_attention(tensors: StepTensors, cache_is_rotated: bool) -> tuple[Tensors, Cache]:
    """Return a step's tensors as those of attention to the whole cache, and the ``Cache`` of its ``Problem``."""
    q, k_cache, v_cache, cos, sin, k, _, cache_seqlens, kv_starts, sinks, block_table, _, _, q_norm, k_norm = tensors
    page_size = None if block_table is None else k_cache.shape[2]
    cache = Cache(cache_is_rotated, k is not None, page_size, k_cache.dtype is torch.float8_e4m3fn)
    seen = Tensors(q, k_cache, v_cache, cos, sin, sinks, kv_starts, cache_seqlens, None, None, q_norm, k_norm)
    return seen, cache


def _with_capacity(problem: Problem, cache: Cache, tensors: StepTensors) -> Problem:
    """Return the problem with the capacity of a sequence's pages for its number of keys."""
    if cache.page_size is None:
        return problem
    return problem._replace(len_k=tensors.block_table.shape[1] * cache.page_size)


_WRITTEN = ("k_cache", "v_cache")
# The arguments of the operators. ``StepOptions`` names a step's options, among tensors.
STEP = OperatorArguments(
    StepTensors,
    ("rotary_dim", *(name for name in DESCRIBED if name in StepOptions.__annotations__), "cache_is_rotated"),
    describe_step,
    _WRITTEN,
)


class Written(NamedTuple):
    """k and v ``(B, HKV, N, D)``, packed ones with B = 1; caches, tables and scales as in ``StepTensors``; new_lens
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


def describe_write(
    tensors: Written, *, cache_is_rotated: bool, rotary_dim: int, interleaved: bool, backend: str = "auto"
) -> Problem:
    """Return the ``Problem`` of a write of checked new tokens: a step with the new keys as queries."""
    k, v, k_cache, v_cache, cos, sin, block_table, cache_seqlens, _, cu_seqlens, _, _ = tensors
    problem = describe_step(
        StepTensors(k, k_cache, v_cache, cos, sin, k, v, cache_seqlens, block_table=block_table),
        cache_is_rotated=cache_is_rotated,
        causal=True,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        backend=backend,
    )
    return problem if cu_seqlens is None else problem._replace(sequences=cu_seqlens.shape[0] - 1)


WRITE = OperatorArguments(Written, ("rotary_dim", "interleaved", "cache_is_rotated"), describe_write, _WRITTEN)
