"""Caches in pages and in float8, for checks: pools made of contiguous caches, and which of their rows are whose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_rope_attn import testing
from fused_rope_attn.generation.cache_reference import stored

# An entry outside every pool, for pages that nobody needs.
NOWHERE = 10**9 + 7


def in_pages(
    caches: Sequence[Tensor], page_size: int, needed: Tensor, generator: torch.Generator,
    lay: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """(pools, block_table) of contiguous caches (B, HKV, pages * page_size, D), the pages in a random order.

    Three pages belong to nobody and hold NaN. Entries that are not ``needed`` (B, pages) are outside the pool. ``lay``
    gives a pool its place in memory.
    """
    batch, pages = needed.shape
    order = torch.randperm(batch * pages + 3, generator=generator, device=needed.device)
    table = order[: batch * pages].view(batch, pages)
    pools = []
    for cache in caches:
        own = stored(cache).unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1)
        shape = (order.numel(), *own.shape[1:])
        pool = torch.full(shape, math.nan, device=own.device).to(cache.dtype)
        stored(pool)[table.flatten()] = own
        pools.append(lay(pool))
    return pools, torch.where(needed, table, NOWHERE).int()


def rows_in_pool(rows: Tensor, block_table: Tensor, pool: Tensor) -> Tensor:
    """Which rows (num_pages, page_size) of a pool are ``rows`` (B, S_max) of its sequences."""
    found = torch.zeros(pool.shape[0], pool.shape[2], dtype=torch.bool, device=pool.device)
    of_pages = rows.unflatten(1, (block_table.shape[1], -1))
    for entries, page_rows in zip(block_table.long(), of_pages):
        there = (entries >= 0) & (entries < pool.shape[0])
        found[entries[there]] |= page_rows[there]
    return found


def like(x: Tensor, other: Tensor) -> Tensor:
    """x with the strides of ``other``, which may leave gaps."""
    out = torch.empty_strided(other.shape, other.stride(), dtype=x.dtype, device=x.device)
    stored(out).copy_(stored(x))
    return out


def same_float8(name: str, x: Tensor, y: Tensor) -> testing.Comparison:
    """Equal but for one number in a thousand, which another float32 rounding moves to its neighbour."""
    wide, other = x.float(), y.float()
    off = torch.where(wide.isnan() & other.isnan(), 0.0, (wide - other).abs())
    moved = int((off != 0).sum())
    ok = bool((off <= 0.13 * other.abs() + 2e-3).all()) and moved <= 1 + 1e-3 * off.numel()
    detail = "" if ok else f"{moved} of {off.numel()} numbers differ"
    return testing.Comparison(name, 0.0, float(moved), 0.0, 0.0, ok, detail)
