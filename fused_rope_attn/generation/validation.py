"""Every refusal of `rope_attention_with_kvcache`, raised before anything is written, launched or allocated."""

import torch
from torch import Tensor

from fused_rope_attn.runtime.axes import form_of, in_layout
from fused_rope_attn.runtime.checks import (
    are_ordinary,
    check_bounds,
    check_kinds,
    check_queries_and_keys,
    check_scales,
    check_sinks,
    check_tables,
    check_window,
    refuse_device,
    refuse_dtype,
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
    check_queries_and_keys(q, k_cache, v_cache, cos, sin, suffix="_cache", length="S_max", layout=layout)
    dtype, device = q.dtype, q.device
    batch, heads_q, len_q, head_dim = q.shape
    _, heads_kv, capacity, _ = k_cache.shape
    if k is not None and v is not None:
        _check_new_tokens(k, v, k_cache, v_cache, (batch, heads_kv, len_q, head_dim), layout)
    check_bounds("cache_seqlens", cache_seqlens, device, batch)
    rotary_dim = check_tables(cos, sin, dtype, batch, capacity, head_dim, rotary_dim, "q", "k_cache")
    check_scales(softmax_scale, softcap)
    if window is not None:
        check_window(window)
    if sinks is not None:
        check_sinks(sinks, dtype, device, heads_q)
    if kv_starts is not None:
        check_bounds("kv_starts", kv_starts, device, batch)
    if torch.is_grad_enabled():
        inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "sinks": sinks}
        for name, x in inputs.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} must not require a gradient: the generation step has none; call it under torch.no_grad() "
                    f"or pass {name}.detach()"
                )
    return rotary_dim


def _check_new_tokens(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, shape: tuple[int, ...], layout: str
) -> None:
    """`shape` (B, HKV, NQ, D) is what k and v must have to be appended; messages show it in the caller's `layout`."""
    if k.dtype != k_cache.dtype or v.dtype != k_cache.dtype:
        refuse_dtype(k_cache.dtype, k=k, v=v)
    if k.device != k_cache.device or v.device != k_cache.device:
        refuse_device(k_cache.device, k=k, v=v)
    if k.shape != shape or v.shape != shape:
        name, x = ("k", k) if k.shape != shape else ("v", v)
        got = in_layout(x.shape, layout) if x.ndim == 4 else x.shape
        expected = f"{form_of('HKV', 'NQ', layout)} = {shown(in_layout(shape, layout))}"
        raise ValueError(f"{name} must have shape {expected}, but has {shown(got)}")
    if shape[2] > k_cache.shape[2]:
        raise ValueError(f"k must have at most k_cache's S_max = {k_cache.shape[2]} positions, but has {shape[2]}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        strides = cache.stride() if cache.numel() else ()
        if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, cache.shape)):
            raise ValueError(
                f"{name} must not be expanded, since it is written: several elements share memory, strides "
                f"{in_layout(strides, layout)}"
            )
