"""The generation step in eager PyTorch: the semantics that its kernel is held to, and the fallback on any device."""

from typing import Any, cast

import torch
from torch import Tensor

from fused_rope_attn.attention.reference import absent_keys, attend, norm_rotate, query_rows, visible_keys
from fused_rope_attn.generation.cache_reference import (
    FLOAT8,
    dequantise,
    gather_pages,
    needed_pages,
    own_pages,
    quantise,
    write_pages,
)
from fused_rope_attn.rotation.reference import norm, normalise_tables, rotate


def write_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    new_lens: Tensor | None,
    cu_seqlens: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cache_is_rotated: bool,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    """Arguments as in `fused_rope_attn.write_kvcache`, validated; k and v (B, HKV, N, D), packed ones with B = 1."""
    num_pages, _, page_size, _ = k_cache.shape
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    token = torch.arange(k.shape[2], device=k.device)
    if cu_seqlens is None:
        batch, index = k.shape[0], token.expand(k.shape[0], -1)
        exists = index < (k.shape[2] if new_lens is None else new_lens.unsqueeze(1))
    else:  # every sequence takes all tokens, and writes its own
        batch = cu_seqlens.shape[0] - 1
        ends = cu_seqlens.long().unsqueeze(1)
        index = token - ends[:-1]
        exists = (index >= 0) & (token < ends[1:])
        k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    cached = torch.zeros(batch, dtype=torch.int32, device=k.device) if cache_seqlens is None else cache_seqlens
    cached = cached.long().clamp(0, capacity).unsqueeze(1)
    position = torch.where(exists & (cached + index < capacity), cached + index, -1)
    cos, sin = normalise_tables(cos, sin, rotary_dim, interleaved)
    entries = own_pages(k_cache)
    if block_table is not None:
        row = torch.arange(capacity, device=k.device)
        needed = (row >= cached) & (row <= position.amax(1, keepdim=True)) if k.shape[2] else row < 0 * cached
        entries = needed_pages(block_table, needed, num_pages, page_size)
    caches, tables, scales = (k_cache, v_cache), (cos, sin), (k_scale, v_scale)
    flags: dict[str, Any] = {"cache_is_rotated": cache_is_rotated, "interleaved": interleaved}
    append((k, v), caches, tables, position, entries, scales, **flags)


def append(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    position: Tensor,
    entries: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    *,
    cache_is_rotated: bool,
    interleaved: bool,
    k_norm: Tensor | None = None,
    norm_eps: float | None = None,
    norm_offset: float | None = None,
) -> None:
    """Write new k and v (B, HKV, N, D) into rows `position` (B, N) of the caches; a negative position is left out.

    With a `k_norm`, k is normed before. `entries` (B, pages): of the block table, or `own_pages`. The tables are
    `normalise_tables`'.
    """
    k, v = new
    is_float8 = caches[0].dtype == FLOAT8
    wide = k.float() if is_float8 and k.dtype != torch.float64 else k  # rounded once, to float8
    if cache_is_rotated:
        options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": norm_eps, "norm_offset": norm_offset}
        k = norm_rotate(wide, k_norm, *query_rows(*tables, position), **options)
    elif k_norm is None or norm_eps is None or norm_offset is None:
        k = wide
    else:
        k = norm(wide, k_norm, norm_eps, norm_offset).to(wide.dtype)
    for cache, x, scale in zip(caches, (k, v), scales):
        write_pages(cache, quantise(x, scale) if is_float8 else x, position, entries)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor,
    *,
    cache_is_rotated: bool,
    causal: bool,
    softmax_scale: float,
    rotary_dim: int,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float | None = None,
    norm_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The generation step in eager PyTorch: arguments as in `fused_rope_attn.rope_attention_with_kvcache`, validated.

    Writes `k` and `v` (B, HKV, NQ, D) into the caches (B, HKV, S, D) at rows `cache_seqlens + i`, k rotated if the
    cache is, and attends like `attention` with `kv_lens` after the new tokens. A token without a row in the cache is
    not written, and its query is dead. `kv_starts` (B,): keys before it do not exist.

    With `block_table` (B, pages) the caches are pools (num_pages, HKV, page_size, D). Caches in float8_e4m3fn hold keys
    and values divided by `k_scale` and `v_scale`, and queries see new tokens as they are written there too. With norms
    the queries and the new keys are normed; caches hold keys that are.
    """
    num_pages, _, page_size, _ = k_cache.shape
    len_q, capacity = q.shape[2], page_size if block_table is None else block_table.shape[1] * page_size
    cos, sin = normalise_tables(cos, sin, rotary_dim, interleaved)
    cached = cache_seqlens.long().clamp(0, capacity).unsqueeze(1)
    index = torch.arange(len_q, device=q.device)
    position = cached + index if k is not None else cached - len_q + index
    position = torch.where(position < capacity, position, -1)
    length = cached if k is None else (cached + len_q).clamp(max=capacity)
    options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": norm_eps, "norm_offset": norm_offset}
    q_rot = norm_rotate(q, q_norm, *query_rows(cos, sin, position), **options)
    slots = position
    position, low, high = visible_keys(position, length, causal, window=window, kv_starts=kv_starts)
    # There are lengths, hence keys to ask about.
    absent = cast(
        Tensor, absent_keys(capacity, position, window=window, kv_starts=kv_starts, kv_lens=length.squeeze(1))
    )
    entries = own_pages(k_cache)
    if block_table is not None:
        # A sequence without a query in the cache reads nothing.
        needed, row = ~absent & (position >= 0).any(1, keepdim=True), torch.arange(capacity, device=q.device)
        if k is not None:  # written, whether or not a query sees it
            needed = needed | ((row >= cached) & (row < length))
        entries = needed_pages(block_table, needed, num_pages, page_size)
    if k is not None and v is not None:
        scales, options["cache_is_rotated"] = (k_scale, v_scale), cache_is_rotated
        append((k, v), (k_cache, v_cache), (cos, sin), slots, entries, scales, k_norm=k_norm, **options)
    keys, values = (x if block_table is None else gather_pages(x, entries) for x in (k_cache, v_cache))
    if k_cache.dtype == FLOAT8:
        keys, values = (dequantise(x, scale, q.dtype) for x, scale in ((keys, k_scale), (values, v_scale)))
    keys, values = (x.masked_fill(absent[:, None, :, None], 0) for x in (keys, values))
    if not cache_is_rotated:
        keys = rotate(keys, cos[:, None, :capacity], sin[:, None, :capacity], interleaved=interleaved)
    return attend(q_rot, keys, values, low, high, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
