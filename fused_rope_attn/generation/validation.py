"""Every refusal of `rope_attention_with_kvcache`, raised before anything is written, launched or allocated."""

from torch import Tensor

from fused_rope_attn.generation.cache_validation import (
    FLOAT8,
    check_new_kind_of_cache,
    check_written,
    refuse_gradients,
)
from fused_rope_attn.runtime.axes import form_of, in_layout
from fused_rope_attn.runtime.checks import (
    NO_NORMS,
    Norms,
    are_ordinary,
    check_bounds,
    check_kinds,
    check_norms,
    check_queries_and_keys,
    check_scales,
    check_sinks,
    check_tables,
    check_window,
    refuse_non_bool,
    shown,
)


def check_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    cache_seqlens: Tensor,
    cache_is_rotated: bool,
    causal: bool,
    softmax_scale: float | None,
    rotary_dim: int | None,
    interleaved: bool,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    kv_starts: Tensor | None,
    return_lse: bool,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norms: Norms = NO_NORMS,
    layout: str = "bhsd",
) -> int:
    """Check the arguments of `rope_attention_with_kvcache` as its caller gave them, and return the rotary dim R.

    layout: the order of the axes that the caller has, for messages; tensors of tokens come as (B, H, N, D) in any case.
    What `cache_seqlens` holds stays on the device. Raises TypeError or ValueError.
    """
    append = k is not None or v is not None
    if append and (k is None or v is None):
        given, lacking = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{lacking} must be given where {given} is: both are appended, or neither")
    if not (are_ordinary(q, k_cache, v_cache, cos, sin, cache_seqlens) and (not append or are_ordinary(k, v))):
        new = {"k": k, "v": v} if append else {}
        check_kinds(q=q, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin, cache_seqlens=cache_seqlens, **new)
    if not (
        isinstance(cache_is_rotated, bool)
        and isinstance(causal, bool)
        and isinstance(interleaved, bool)
        and isinstance(return_lse, bool)
    ):
        refuse_non_bool(
            cache_is_rotated=cache_is_rotated, causal=causal, interleaved=interleaved, return_lse=return_lse
        )
    of_rows = "k_cache"
    if block_table is None and k_cache.dtype is not FLOAT8 and k_scale is None and v_scale is None:
        check_queries_and_keys(q, k_cache, v_cache, cos, sin, suffix="_cache", length="S_max", layout=layout)
        capacity = k_cache.shape[2]
    else:
        capacity = check_new_kind_of_cache(
            q, k_cache, v_cache, cos, sin, block_table, k_scale, v_scale, layout
        )  # fmt: skip
        of_rows = of_rows if block_table is None else "block_table"
    dtype, device = q.dtype, q.device
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv = k_cache.shape[1]
    if k is not None and v is not None:
        check_written(k, v, dtype, k_cache, v_cache, layout)
        _check_new_tokens(k, v, (batch, heads_kv, len_q, head_dim), capacity, of_rows, layout)
    check_bounds("cache_seqlens", cache_seqlens, device, batch)
    rotary_dim = check_tables(cos, sin, dtype, batch, capacity, head_dim, rotary_dim, "q", of_rows)
    check_scales(softmax_scale, softcap)
    if window is not None:
        check_window(window)
    if sinks is not None:
        check_sinks(sinks, dtype, device, heads_q)
    if kv_starts is not None:
        check_bounds("kv_starts", kv_starts, device, batch)
    check_norms(norms, dtype, device, head_dim)
    refuse_gradients(
        "rope_attention_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, q_norm=norms.q_norm, k_norm=norms.k_norm,
    )  # fmt: skip
    return rotary_dim


def _check_new_tokens(
    k: Tensor, v: Tensor, shape: tuple[int, ...], capacity: int, of_rows: str, layout: str
) -> None:  # fmt: skip
    """`shape` (B, HKV, NQ, D) is what k and v must have to be appended; messages show it in the caller's `layout`.

    `of_rows` names the argument that gives a sequence its `capacity` rows.
    """
    if k.shape != shape or v.shape != shape:
        name, x = ("k", k) if k.shape != shape else ("v", v)
        got = in_layout(x.shape, layout) if x.ndim == 4 else x.shape
        expected = f"{form_of('HKV', 'NQ', layout)} = {shown(in_layout(shape, layout))}"
        raise ValueError(f"{name} must have shape {expected}, but has {shown(got)}")
    if shape[2] > capacity:
        raise ValueError(f"k must have at most {of_rows}'s S_max = {capacity} positions, but has {shape[2]}")
