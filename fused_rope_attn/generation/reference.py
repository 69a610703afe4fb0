"""The generation step in eager PyTorch: the semantics that its kernel is held to, and the fallback on any device."""

from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.attention.reference import hide, masked_attention, norm_rotate, table_rows, visible_pairs
from fused_rope_attn.rotation.reference import norm, normalise_tables, rotate
from fused_rope_attn.runtime.registration import is_plain

FLOAT8 = torch.float8_e4m3fn


def quantise(x: Tensor, scale: Tensor | None) -> Tensor:
    """x (B, HKV, N, D) / scale in float8_e4m3fn, saturating; scale of one element or (HKV,), None is 1."""
    wide = x if x.dtype == torch.float64 else x.float()
    if scale is not None:
        wide = wide / scale.to(wide.dtype).reshape(-1, 1, 1)
    most = torch.finfo(FLOAT8).max
    return torch.where(wide.isnan(), wide, wide.clamp(-most, most)).to(FLOAT8)


def dequantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """float8 x (B, HKV, N, D) times its scale, rounded once to dtype."""
    wide = x.double() if dtype == torch.float64 else x.float()
    return (wide if scale is None else wide * scale.to(wide.dtype).reshape(-1, 1, 1)).to(dtype)


def stored(x: Tensor) -> Tensor:
    """Return a view of a cache that PyTorch can index: of its bytes if it is float8."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x


def needed_pages(block_table: Tensor, needed: Tensor, num_pages: int, page_size: int) -> Tensor:
    """Entries (B, pages) int64 of the pages in which a row is ``needed`` (B, pages * page_size); others are 0.

    One of them outside the pool raises ValueError, on a GPU PyTorch's device-side assertion.
    """
    of_page = needed.unflatten(1, (-1, page_size)).any(-1)
    entries = torch.where(of_page, block_table.long(), 0)
    if entries.device.type == "cpu" and is_plain(entries):
        outside = entries[(entries < 0) | (entries >= num_pages)]
        if outside.numel():
            raise ValueError(
                f"block_table must hold pages of the pool, 0 to {num_pages - 1}, for every row that exists, but holds "
                f"{outside[0].item()}"
            )
    return torch.arange(num_pages, device=entries.device).index_select(0, entries.flatten()).view_as(entries)


def gather_pages(pool: Tensor, entries: Tensor) -> Tensor:
    """Gather the sequences (B, HKV, pages * page_size, D) with these ``entries`` (B, pages) from the pool."""
    found = stored(pool).index_select(0, entries.flatten()).unflatten(0, entries.shape)
    return found.transpose(1, 2).flatten(2, 3).view(pool.dtype)


def own_pages(cache: Tensor) -> Tensor:
    """Return the entries (B, 1) of a contiguous cache (B, HKV, S, D), which is a pool with one page a sequence."""
    return torch.arange(cache.shape[0], device=cache.device).unsqueeze(1)


def write_pages(pool: Tensor, x: Tensor, position: Tensor, entries: Tensor) -> None:
    """Write x (B, HKV, N, D) into rows ``position`` (B, N) of each sequence, in its pages ``entries`` (B, pages) of a
    pool (num_pages, HKV, page_size, D); none where the position is negative."""
    page_size, num_rows = pool.shape[2], pool.shape[0] * pool.shape[2]
    if num_rows == 0 or entries.shape[1] == 0:
        return
    fits = position >= 0
    row = position.masked_fill(~fits, 0)
    slot = entries.gather(1, row // page_size) * page_size + row % page_size
    # Tokens that are not written go to an additional row after the pool.
    slot = slot.masked_fill(~fits, num_rows).flatten()
    rows = stored(pool).transpose(1, 2).flatten(0, 1)
    rows = torch.cat((rows, torch.zeros_like(rows[:1])))
    rows[slot] = stored(x).transpose(1, 2).flatten(0, 1)
    stored(pool).copy_(rows[:-1].unflatten(0, (-1, page_size)).transpose(1, 2))


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
        k = norm_rotate(wide, k_norm, *table_rows(*tables, position), **options)
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
    row = torch.arange(capacity, device=q.device)[None]
    visible = visible_pairs(position, row, causal, window=window, kv_starts=kv_starts, kv_lens=length.squeeze(1))
    absent = ~visible.any(-2)
    q_rot = norm_rotate(hide(q, ~visible.any(-1)), q_norm, *table_rows(cos, sin, position), **options)
    entries = own_pages(k_cache)
    if block_table is not None:
        needed = ~absent
        if k is not None:  # written, whether or not a query sees it
            needed = needed | ((row >= cached) & (row < length))
        entries = needed_pages(block_table, needed, num_pages, page_size)
    if k is not None and v is not None:
        scales, options["cache_is_rotated"] = (k_scale, v_scale), cache_is_rotated
        append((k, v), (k_cache, v_cache), (cos, sin), position, entries, scales, k_norm=k_norm, **options)
    keys, values = (x if block_table is None else gather_pages(x, entries) for x in (k_cache, v_cache))
    if k_cache.dtype == FLOAT8:
        keys, values = (dequantise(x, scale, q.dtype) for x, scale in ((keys, k_scale), (values, v_scale)))
    keys, values = hide(keys, absent), hide(values, absent)
    if not cache_is_rotated:
        keys = rotate(keys, cos[:, None, :capacity], sin[:, None, :capacity], interleaved=interleaved)
    o, lse = masked_attention(q_rot, keys, values, visible, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
    return o, lse
