"""Caches in eager PyTorch: rows written and read, contiguous or in pages, in q's dtype or in float8_e4m3fn."""

from __future__ import annotations

import torch
from torch import Tensor

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
