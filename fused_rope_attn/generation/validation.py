"""Every refusal of `rope_attention_with_kvcache`, raised before anything is written, launched or allocated."""

from typing import Any

from torch import Tensor

from fused_rope_attn.attention.problem import check_options
from fused_rope_attn.generation.cache_validation import (
    FLOAT8,
    check_new_kind_of_cache,
    check_written,
    refuse_gradients,
)
from fused_rope_attn.generation.problem import StepTensors
from fused_rope_attn.runtime.axes import form_of, in_layout
from fused_rope_attn.runtime.checks import (
    are_ordinary,
    check_bool,
    check_bounds,
    check_kinds,
    check_queries_and_keys,
    check_tables,
    shown,
)


def check_kvcache(tensors: StepTensors, options: Any, cache_is_rotated: bool, layout: str = "bhsd") -> int:
    """Check a call of `rope_attention_with_kvcache` as its caller gave it, and return the rotary dim R.

    tensors, options: `StepTensors`, with tokens as (B, H, N, D), and attention's `Options`. layout: the caller's order
    of the axes, for messages. `cache_seqlens` is not read. Raises TypeError or ValueError.
    """
    q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, _, sinks, block_table, k_scale, v_scale, q_norm, k_norm = (
        tensors
    )
    append = k is not None or v is not None
    if append and (k is None or v is None):
        given, lacking = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{lacking} must be given where {given} is: both are appended, or neither")
    if not (are_ordinary(q, k_cache, v_cache, cos, sin, cache_seqlens) and (not append or are_ordinary(k, v))):
        new = {"k": k, "v": v} if append else {}
        check_kinds(q=q, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin, cache_seqlens=cache_seqlens, **new)
    check_bool("cache_is_rotated", cache_is_rotated)
    of_rows = "k_cache"
    if block_table is None and k_cache.dtype is not FLOAT8 and k_scale is None and v_scale is None:
        check_queries_and_keys(q, k_cache, v_cache, cos, sin, suffix="_cache", length="S_max", layout=layout)
        capacity = k_cache.shape[2]
    else:
        capacity = check_new_kind_of_cache(tensors, layout)
        of_rows = of_rows if block_table is None else "block_table"
    batch, _, len_q, head_dim = q.shape
    heads_kv = k_cache.shape[1]
    if k is not None and v is not None:
        check_written(k, v, q.dtype, k_cache, v_cache, layout)
        _check_new_tokens(k, v, (batch, heads_kv, len_q, head_dim), capacity, of_rows, layout)
    check_bounds("cache_seqlens", cache_seqlens, q.device, batch)
    rotary_dim = check_tables(cos, sin, q.dtype, batch, capacity, head_dim, options.rotary_dim, "q", of_rows)
    check_options(tensors, options)
    every = tensors._asdict()
    refused = ("q", "k_cache", "v_cache", "k", "v", "sinks", "k_scale", "v_scale", "q_norm", "k_norm")
    refuse_gradients("rope_attention_with_kvcache", **{name: every[name] for name in refused})
    return rotary_dim


def _check_new_tokens(k: Tensor, v: Tensor, shape: tuple[int, ...], capacity: int, of_rows: str, layout: str) -> None:
    """Check that k and v have the `shape` (B, HKV, NQ, D); messages show it in the caller's `layout`.

    `of_rows` names the argument that gives a sequence its `capacity` rows.
    """
    if k.shape != shape or v.shape != shape:
        name, x = ("k", k) if k.shape != shape else ("v", v)
        got = in_layout(x.shape, layout) if x.ndim == 4 else x.shape
        expected = f"{form_of('HKV', 'NQ', layout)} = {shown(in_layout(shape, layout))}"
        raise ValueError(f"{name} must have shape {expected}, but has {shown(got)}")
    if shape[2] > capacity:
        raise ValueError(f"k must have at most {of_rows}'s S_max = {capacity} positions, but has {shape[2]}")
