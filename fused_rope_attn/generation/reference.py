"""The generation step in eager PyTorch: the semantics that its kernel is held to, and the fallback on any device.

Functions take the records of a checked call: its ``Problem``, and its ``StepTensors`` or ``Written``.
"""

from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.attention.reference import NOWHERE, hide, masked_attention, norm_rotate, table_rows, visible_pairs
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


def needed_pages(tensors: Any, needed: Tensor) -> Tensor:
    """Return the entries (B, pages) int64 of the pages in which a row is ``needed`` (B, S_max); others are 0.

    One of them outside the pool raises ValueError, on a GPU PyTorch's device-side assertion. A contiguous cache is a
    pool with one page a sequence.
    """
    num_pages, _, page_size, _ = tensors.k_cache.shape
    pages = torch.arange(num_pages, device=needed.device)
    if tensors.block_table is None:
        return pages.unsqueeze(1)
    of_page = needed.unflatten(1, (-1, page_size)).any(-1)
    entries = torch.where(of_page, tensors.block_table.long(), 0)
    if entries.device.type == "cpu" and is_plain(entries):
        outside = entries[(entries < 0) | (entries >= num_pages)]
        if outside.numel():
            raise ValueError(
                f"block_table must hold pages of the pool, 0 to {num_pages - 1}, for every row that exists, but holds "
                f"{outside[0].item()}"
            )
    return pages.index_select(0, entries.flatten()).view_as(entries)


def gather_pages(pool: Tensor, entries: Tensor) -> Tensor:
    """Gather the sequences (B, HKV, pages * page_size, D) with these ``entries`` (B, pages) from the pool."""
    found = stored(pool).index_select(0, entries.flatten()).unflatten(0, entries.shape)
    return found.transpose(1, 2).flatten(2, 3).view(pool.dtype)


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


def cached_rows(problem: Any, tensors: Any) -> Tensor:
    """Return how many rows of each sequence are in the caches before the call, (1|B, 1) int64."""
    if tensors.cache_seqlens is None:
        return torch.zeros(1, 1, dtype=torch.int64, device=problem.device)
    return tensors.cache_seqlens.long().clamp(0, problem.len_k).unsqueeze(1)


def write_kvcache(problem: Any, tensors: Any) -> None:
    """Run `fused_rope_attn.write_kvcache`."""
    k, v, capacity = tensors.k, tensors.v, problem.len_k
    token = torch.arange(problem.len_q, device=k.device)
    if tensors.cu_seqlens is None:
        index = token.expand(k.shape[0], -1)
        exists = index < (problem.len_q if tensors.new_lens is None else tensors.new_lens.unsqueeze(1))
    else:  # every sequence takes all tokens, and writes its own
        ends = tensors.cu_seqlens.long().unsqueeze(1)
        index = token - ends[:-1]
        exists = (index >= 0) & (token < ends[1:])
        k, v = (x.expand(index.shape[0], -1, -1, -1) for x in (k, v))
    cached = cached_rows(problem, tensors)
    position = torch.where(exists & (cached + index < capacity), cached + index, -1)
    row = torch.arange(capacity, device=k.device)
    needed = (row >= cached) & (row < cached + (position >= 0).sum(1, keepdim=True))
    tables = normalise_tables(tensors.cos, tensors.sin, problem.rotary_dim, problem.interleaved)
    append(problem, tensors._replace(k=k, v=v), tables, position, needed_pages(tensors, needed))


def append(problem: Any, tensors: Any, tables: tuple[Any, Any], position: Tensor, entries: Tensor) -> None:
    """Write the new k and v (B, HKV, N, D) into rows `position` (B, N) of the caches; negative ones are left out.

    tables: of `normalise_tables`. entries (B, pages): of `needed_pages`.
    """
    k, v, weight = tensors.k, tensors.v, getattr(tensors, "k_norm", None)
    is_float8 = tensors.k_cache.dtype == FLOAT8
    k = k.float() if is_float8 and k.dtype != torch.float64 else k  # rounded once, to float8
    if problem.cache_is_rotated:
        k = norm_rotate(k, weight, *table_rows(*tables, position), **options_of(problem))
    elif weight is not None:
        k = norm(k, weight, problem.norm_eps, problem.norm_offset).to(k.dtype)
    written = (tensors.k_cache, k, tensors.k_scale), (tensors.v_cache, v, tensors.v_scale)
    for cache, x, scale in written:
        write_pages(cache, quantise(x, scale) if is_float8 else x, position, entries)


def options_of(problem: Any) -> dict[str, Any]:
    """Return the options of `norm_rotate`."""
    return {name: getattr(problem, name) for name in ("interleaved", "norm_eps", "norm_offset")}


def attention_with_kvcache(problem: Any, tensors: Any) -> tuple[Tensor, Tensor]:
    """Run `fused_rope_attn.rope_attention_with_kvcache`, and return o and lse.

    Write the new tokens, k rotated if the cache is, and attend like `attention` with `kv_lens` after them. A token
    without a row in the cache is not written, and its query is dead. Queries see new tokens as the cache stores them.
    """
    q, k_cache, v_cache, len_q, capacity = tensors.q, tensors.k_cache, tensors.v_cache, problem.len_q, problem.len_k
    tables = normalise_tables(tensors.cos, tensors.sin, problem.rotary_dim, problem.interleaved)
    cached = cached_rows(problem, tensors)
    new = 0 if tensors.k is None else len_q
    position = cached + new - len_q + torch.arange(len_q, device=q.device)
    position = torch.where(position < capacity, position, NOWHERE)
    length = (cached + new).clamp(max=capacity)
    row = torch.arange(capacity, device=q.device)[None]
    masks: dict[str, Any] = {"window": problem.window, "kv_starts": tensors.kv_starts, "kv_lens": length.squeeze(1)}
    visible = visible_pairs(position, row, problem.causal, **masks, has_tables=problem.rotary_dim > 0)
    absent = ~visible.any(-2)
    rows_of_q = table_rows(*tables, position)
    q_rot = norm_rotate(hide(q, ~visible.any(-1)), tensors.q_norm, *rows_of_q, **options_of(problem))
    # New rows are written, whether or not a query sees them.
    entries = needed_pages(tensors, ~absent | ((row >= cached) & (row < length)))
    if tensors.k is not None:
        append(problem, tensors, tables, position, entries)
    keys, values = (x if tensors.block_table is None else gather_pages(x, entries) for x in (k_cache, v_cache))
    if k_cache.dtype == FLOAT8:
        keys, values = dequantise(keys, tensors.k_scale, q.dtype), dequantise(values, tensors.v_scale, q.dtype)
    keys, values = hide(keys, absent), hide(values, absent)
    if not problem.cache_is_rotated:
        cos, sin = tables
        keys = rotate(keys, cos[:, None, :capacity], sin[:, None, :capacity], interleaved=problem.interleaved)
    scores: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
    o, lse = masked_attention(q_rot, keys, values, visible, **scores, sinks=tensors.sinks)
    return o, lse
