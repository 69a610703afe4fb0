"""Every refusal of `rope_attention_with_kvcache` and `write_kvcache`, before anything is written or launched."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.attention.problem import check_options
from fused_rope_attn.generation.problem import StepTensors, Written
from fused_rope_attn.runtime.axes import form_of, in_layout
from fused_rope_attn.runtime.checks import (
    INPUT_DTYPES,
    are_ordinary,
    check_bool,
    check_bounds,
    check_ends,
    check_kinds,
    check_queries_and_keys,
    check_tables,
    check_tensor,
    named,
    refuse_device,
    refuse_dtype,
    refuse_heads,
    refuse_non_bool,
    refuse_rank,
    refuse_shapes,
    shown,
)
from fused_rope_attn.runtime.differentiation import refuse_tangents
from fused_rope_attn.runtime.registration import is_plain

FLOAT8 = torch.float8_e4m3fn
MIN_PAGE_SIZE = 16


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
    check_apart(k_cache, v_cache, paged=block_table is not None)
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


def check_new_kind_of_cache(tensors: StepTensors, layout: str) -> int:
    """Check q against caches that are in pages, in float8_e4m3fn, or both; return the rows that a sequence can have.

    Tensors of tokens and caches are (B, H, N, D) here, pools (num_pages, HKV, page_size, D); messages show them in the
    caller's `layout`.
    """
    q, k_cache, v_cache, block_table = tensors.q, tensors.k_cache, tensors.v_cache, tensors.block_table
    dtype, device = q.dtype, q.device
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, but is {named(dtype)}")
    _check_caches("q", q, k_cache=k_cache, v_cache=v_cache, cos=tensors.cos, sin=tensors.sin)
    if q.ndim != 4:
        refuse_rank(layout, "NQ", q=q)
    check_pool_shape(k_cache, v_cache, layout, paged=block_table is not None)
    head_dim, heads_kv, rows = q.shape[3], k_cache.shape[1], k_cache.shape[2]
    batch = q.shape[0] if block_table is None else k_cache.shape[0]
    if (k_cache.shape[0], k_cache.shape[3]) != (batch, head_dim) or heads_kv < 1 or q.shape[1] % heads_kv:
        refuse_shapes(torch.Size((batch, *q.shape[1:])), k_cache.shape, v_cache.shape, "_cache", layout)
    if q.shape[1] < 1 or head_dim < 2 or head_dim % 2:
        refuse_heads(q.shape, layout)
    check_cache_scales(k_cache, tensors.k_scale, tensors.v_scale)
    if block_table is None:
        return rows
    check_block_table(block_table, device, q.shape[0])
    return block_table.shape[1] * rows


def _check_caches(first: str, x: Tensor, *, k_cache: Tensor, v_cache: Tensor, **others: Tensor) -> None:
    """Check the caches' dtypes against that of x, whose name is `first`, and that all tensors are on x's device."""
    if k_cache.dtype not in (x.dtype, FLOAT8):
        expected = f"{first}'s dtype {named(x.dtype)} or float8_e4m3fn"
        raise TypeError(f"k_cache must have {expected}, but is {named(k_cache.dtype)}")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache must have k_cache's dtype {named(k_cache.dtype)}, but is {named(v_cache.dtype)}")
    for name, y in {"k_cache": k_cache, "v_cache": v_cache, **others}.items():
        if y.device != x.device:
            refuse_device(x.device, first, **{name: y})


def check_pool_shape(k_cache: Tensor, v_cache: Tensor, layout: str, *, paged: bool) -> None:
    """Check the shapes of both caches against each other, and those of a pool's pages."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.ndim != 4:
            form = form_of("HKV", "page_size" if paged else "S_max", layout)
            if paged:
                form = form.replace("(B,", "(num_pages,")
            raise ValueError(f"{name} must have shape {form}, but has {x.ndim} dimensions: {shown(x.shape)}")
    if v_cache.shape != k_cache.shape:
        k_shape, v_shape = (shown(in_layout(x.shape, layout)) for x in (k_cache, v_cache))
        raise ValueError(f"v_cache must have k_cache's shape {k_shape}, but has {v_shape}")
    if paged and k_cache.shape[0] < 1:
        raise ValueError("k_cache must have at least one page, but has 0")
    if paged and k_cache.shape[2] < MIN_PAGE_SIZE:
        raise ValueError(f"k_cache must have pages of at least {MIN_PAGE_SIZE} rows, but has {k_cache.shape[2]}")


def check_apart(k_cache: Tensor, v_cache: Tensor, paged: bool = False) -> None:
    """Check that caches of one shape and dtype have no element in common. They may be views of one allocation.

    Pages with one number must be apart. Pages with other numbers need not be, because only the device knows which are
    in use: transformers stores the values of a page one page after its keys, and uses every second number.
    """
    found = "is k_cache"
    if k_cache is not v_cache:
        # A tracer would make conditions of addresses and sizes.
        if torch.compiler.is_compiling() or not torch._C._is_alias_of(k_cache, v_cache):  # type: ignore[attr-defined]
            return
        distance = v_cache.storage_offset() - k_cache.storage_offset()
        layouts = k_cache.stride(), v_cache.stride()
        sizes = (1, *k_cache.shape[1:]) if paged else k_cache.shape
        if not is_plain(k_cache, v_cache) or not share_elements(sizes, *layouts, distance):
            return
        found = f"begins {distance} elements after it in one allocation, with strides {layouts[1]} and {layouts[0]}"
    raise ValueError(f"v_cache must not overlap k_cache in memory, but {found}")


@functools.lru_cache(maxsize=1024)  # a pool that holds both caches is checked at every step
def share_elements(
    sizes: tuple[int, ...], strides: tuple[int, ...], other_strides: tuple[int, ...], distance: int
) -> bool:
    """Return whether two tensors of these sizes have an element in common, if the other begins ``distance`` later.

    They have one if ``sum(i * stride) - sum(j * other_stride) == distance`` for some indices i and j. Terms of one
    stride are added up, and the largest strides are tried first: since strides are nearly always nested, no more than
    three multiples of each leave a distance that the smaller ones can reach. A distance that their divisor does not
    divide needs no search, for example that of even and odd columns.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for first, signs in ((strides, (0, 1)), (other_strides, (-1, 0))):
        for size, stride in zip(sizes, first):
            if stride:
                low, high = ranges.get(stride, (0, 0))
                ranges[stride] = low + signs[0] * (size - 1), high + signs[1] * (size - 1)
    terms = sorted((stride, *bounds) for stride, bounds in ranges.items() if bounds != (0, 0))

    def reaches(distance: int, count: int) -> bool:
        """Return whether the ``count`` smallest terms can add up to a distance."""
        if count == 0:
            return distance == 0
        if distance % math.gcd(*(term[0] for term in terms[:count])):
            return False
        stride, low, high = terms[count - 1]
        least, most = (sum(term[0] * term[end] for term in terms[: count - 1]) for end in (1, 2))
        low, high = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
        return any(reaches(distance - stride * x, count - 1) for x in range(low, high + 1))

    return 0 not in sizes and reaches(distance, len(terms))


def check_block_table(block_table: Any, device: torch.device, batch: int) -> None:
    check_tensor(
        "block_table", block_table, (torch.int32,), device, f"shape (B, pages) with B = {batch}", (batch, None)
    )


def check_cache_scales(k_cache: Tensor, k_scale: Any, v_scale: Any) -> None:
    """Check that scales belong to a float8_e4m3fn cache, and that there is one, or one for each key head."""
    heads_kv = k_cache.shape[1]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != FLOAT8:
            raise ValueError(
                f"{name} must be None unless the caches are float8_e4m3fn; they are {named(k_cache.dtype)}"
            )
        check_kinds(**{name: scale})
        shape = scale.shape if scale.numel() == 1 else (heads_kv,)
        check_tensor(name, scale, (torch.float32,), k_cache.device, "one element or shape (HKV,)", shape)


def check_written(k: Tensor, v: Tensor, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, layout: str) -> None:
    """Check new k and v against q's dtype and the caches' device, and that the caches can be written."""
    if k.dtype != dtype or v.dtype != dtype:
        refuse_dtype(dtype, k=k, v=v)
    if k.device != k_cache.device or v.device != k_cache.device:
        refuse_device(k_cache.device, k=k, v=v)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        strides = cache.stride() if cache.numel() else ()
        if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, cache.shape)):
            raise ValueError(
                f"{name} must not be expanded, since it is written: several elements share memory, strides "
                f"{in_layout(strides, layout)}"
            )


def check_write(tensors: Written, *, cache_is_rotated: Any, rotary_dim: Any, interleaved: Any, layout: str) -> int:
    """Check the arguments of `write_kvcache` and return the rotary dim R.

    Packed k and v are (T, HKV, D), all other tensors of tokens (B, H, N, D); messages show the caller's `layout`.
    """
    k, v, k_cache, v_cache, cos, sin, block_table, cache_seqlens, new_lens, cu_seqlens, k_scale, v_scale = tensors
    check_kinds(k=k, v=v, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin)
    for name, flag in (("cache_is_rotated", cache_is_rotated), ("interleaved", interleaved)):
        if not isinstance(flag, bool):
            refuse_non_bool(**{name: flag})
    dtype, device = k.dtype, k.device
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"k must be float16, bfloat16 or float32, but is {named(dtype)}")
    if v.dtype != dtype:
        raise TypeError(f"v must have k's dtype {named(dtype)}, but is {named(v.dtype)}")
    packed = cu_seqlens is not None
    if packed and new_lens is not None:
        raise ValueError("new_lens must be None where cu_seqlens is given, which says how long each sequence is")
    form = "(T, HKV, D)" if packed else form_of("HKV", "N", layout)
    if k.ndim != (3 if packed else 4):
        raise ValueError(f"k must have shape {form}, but has {k.ndim} dimensions: {shown(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {shown(k.shape)}, but has {shown(v.shape)}")
    _check_caches("k", k, k_cache=k_cache, v_cache=v_cache, v=v, cos=cos, sin=sin)
    check_pool_shape(k_cache, v_cache, layout, paged=block_table is not None)
    heads, head_dim = k.shape[1], k.shape[-1]
    if (k_cache.shape[1], k_cache.shape[3]) != (heads, head_dim):
        sizes = f"k's {heads} heads of {head_dim} columns"
        raise ValueError(f"k_cache must have {sizes}, but has {k_cache.shape[1]} of {k_cache.shape[3]}")
    if heads < 1 or head_dim < 2 or head_dim % 2:
        raise ValueError(f"k must have at least one head and an even head dim of at least 2, but has {shown(k.shape)}")
    if packed:
        check_tensor("cu_seqlens", cu_seqlens, (torch.int32,), device, "shape (B + 1,)", (None,), "k")
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens must have shape (B + 1,) with B >= 1, but has {shown(cu_seqlens.shape)}")
        check_ends("cu_seqlens", cu_seqlens, k.shape[0], "k")
    batch = cu_seqlens.shape[0] - 1 if packed else k.shape[0]
    rows, of_rows = k_cache.shape[2], "k_cache"
    if block_table is not None:
        check_block_table(block_table, device, batch)
        rows, of_rows = rows * block_table.shape[1], "block_table"
    elif k_cache.shape[0] != batch:
        raise ValueError(f"k_cache must have one entry for each of {batch} sequences, but has {k_cache.shape[0]}")
    for name, bounds in (("cache_seqlens", cache_seqlens), ("new_lens", new_lens)):
        if bounds is not None:
            check_bounds(name, bounds, device, batch)
    check_cache_scales(k_cache, k_scale, v_scale)
    check_apart(k_cache, v_cache, paged=block_table is not None)
    check_written(k, v, dtype, k_cache, v_cache, layout)
    rotary_dim = check_tables(cos, sin, dtype, batch, rows, head_dim, rotary_dim, "k", of_rows)
    refuse_gradients("write_kvcache", k=k, v=v, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale)
    return rotary_dim


def refuse_gradients(function: str, /, **arguments: Tensor | None) -> None:
    """Refuse tensors that require a gradient while gradients are enabled, and in the name of `function` tangents."""
    refuse_tangents(function, arguments.values())
    if not torch.is_grad_enabled():
        return
    for name, x in arguments.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient: the generation step has none; call it under torch.no_grad() "
                f"or pass {name}.detach()"
            )
