"""Refusals of what a cache can be: in pages, in float8, with scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.runtime.axes import form_of, in_layout
from fused_rope_attn.runtime.checks import (
    INPUT_DTYPES,
    check_kinds,
    named,
    refuse_device,
    refuse_dtype,
    refuse_heads,
    refuse_rank,
    refuse_shapes,
    shown,
)

FLOAT8 = torch.float8_e4m3fn
MIN_PAGE_SIZE = 16


def check_new_kind_of_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    block_table: Any,
    k_scale: Any,
    v_scale: Any,
    layout: str,
) -> int:
    """Check q against caches that are in pages, in float8_e4m3fn, or both; return how many rows a sequence can have.

    Tensors of tokens and caches are (B, H, N, D) here, pools (num_pages, HKV, page_size, D), whatever `layout` the
    caller has, in which messages show them.
    """
    dtype, device = q.dtype, q.device
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, but is {named(dtype)}")
    if k_cache.dtype not in (dtype, FLOAT8):
        raise TypeError(f"k_cache must have q's dtype {named(dtype)} or float8_e4m3fn, but is {named(k_cache.dtype)}")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache must have k_cache's dtype {named(k_cache.dtype)}, but is {named(v_cache.dtype)}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("cos", cos), ("sin", sin)):
        if x.device != device:
            refuse_device(device, **{name: x})
    if q.ndim != 4:
        refuse_rank(layout, "NQ", q=q)
    check_pool_shape(k_cache, v_cache, layout, paged=block_table is not None)
    head_dim, heads_kv, rows = q.shape[3], k_cache.shape[1], k_cache.shape[2]
    batch = q.shape[0] if block_table is None else k_cache.shape[0]
    if (k_cache.shape[0], k_cache.shape[3]) != (batch, head_dim) or heads_kv < 1 or q.shape[1] % heads_kv:
        refuse_shapes(torch.Size((batch, *q.shape[1:])), k_cache.shape, v_cache.shape, "_cache", layout)
    if q.shape[1] < 1 or head_dim < 2 or head_dim % 2:
        refuse_heads(q.shape, layout)
    check_cache_scales(k_cache, k_scale, v_scale)
    if block_table is None:
        return rows
    check_block_table(block_table, device, q.shape[0])
    return block_table.shape[1] * rows


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


def check_block_table(block_table: Any, device: torch.device, batch: int) -> None:
    check_kinds(block_table=block_table)
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, but is {named(block_table.dtype)}")
    if block_table.device != device:
        refuse_device(device, block_table=block_table)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must have shape (B, pages) with B = {batch}, but has {shown(block_table.shape)}")


def check_cache_scales(k_cache: Tensor, k_scale: Any, v_scale: Any) -> None:
    """Check that scales belong to a float8_e4m3fn cache, and that there is one, or one for each key head."""
    heads_kv = k_cache.shape[1]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        check_kinds(**{name: scale})
        if k_cache.dtype != FLOAT8:
            raise ValueError(
                f"{name} must be None unless the caches are float8_e4m3fn; they are {named(k_cache.dtype)}"
            )
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, but is {named(scale.dtype)}")
        if scale.device != k_cache.device:
            refuse_device(k_cache.device, **{name: scale})
        if scale.numel() != 1 and tuple(scale.shape) != (heads_kv,):
            raise ValueError(
                f"{name} must have one element or shape (HKV,) = ({heads_kv},), but has {shown(scale.shape)}"
            )


def check_written(k: Tensor, v: Tensor, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, layout: str) -> None:
    """Check what is written against q's dtype and the caches' device, and that the caches can be written."""
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
