"""Layouts of tensors in memory: strides, alignment, shared elements and pages in every form that a call may have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_rope_attn.generation.reference import stored

# Layouts in which several elements share memory: no such tensor can be written, or hold NaN in some rows only.
SHARED = ("one batch", "one head", "one token", "one number")
NOWHERE = 10**9 + 7  # an entry outside every pool, for pages that no call needs


def lay(x: Tensor, layout: str) -> Tensor:
    """Return the values of x (B, H, N, D) in memory as ``layout`` says; (B, H, N, D) again.

    NaN fills the memory between the elements. In the layouts of ``SHARED`` the values are those of x's first batch
    entry, head, token or element.
    """
    b, h, n, d = x.shape
    store = stored(x)

    def gaps(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, device=x.device).to(x.dtype)

    # Written where they are, between gaps; the others are copies.
    gapped = {
        "odd": lambda: gaps(b, n, h + 5, d + 3)[:, :, 2 : h + 2, 1 : d + 1],  # unaligned rows, and no stride is even
        "offset": lambda: gaps(b * n * h * d + 1)[1:].view(b, n, h, d),  # even strides, at an address that is not
        "wide": lambda: gaps(b, n, h, 2 * d)[..., :d],
        "fused": lambda: gaps(b, n, 3 * h, d)[:, :, h : 2 * h],  # a third of a projection's output
        # The last heads of 130, so that offsets within 128K rows of D 128 take more than 31 bits.
        "far": lambda: gaps(b, n, 130, d)[:, :, 130 - h :],
        "skipped": lambda: gaps(b, 2 * n, h, d)[:, ::2],
    }
    if layout in gapped:
        view = gapped[layout]().transpose(1, 2)
        stored(view).copy_(store)
        return view
    views = {
        "bhnd": lambda: store.contiguous(),
        "bnhd": lambda: store.transpose(1, 2).contiguous().transpose(1, 2),
        "nbhd": lambda: store.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "columns": lambda: store.mT.contiguous().mT,  # the columns of a row are not adjacent
        "one batch": lambda: store[:1].contiguous().expand_as(store),
        "one head": lambda: store[:, :1].contiguous().expand_as(store),
        "one token": lambda: store[:, :, :1].contiguous().expand_as(store),
        "one number": lambda: store.reshape(-1)[:1].expand_as(store) if store.numel() else store,
    }
    return views[layout]().view(x.dtype)


def lay_table(x: Tensor, layout: str) -> Tensor:
    """Return the values of a table (..., S, W) in memory that is "plain", or as ``lay`` has it.

    NaN follows the last row of a plain table (S, W).
    """
    more = 4 - x.ndim
    if layout == "plain":
        return x.contiguous() if x.ndim == 3 else torch.cat((x, x.new_full((64, x.shape[1]), math.nan)))[: len(x)]
    return lay(x[(None,) * more], layout)[(0,) * more]


def in_pages(
    caches: Sequence[Tensor], page_size: int, needed: Tensor, generator: torch.Generator
) -> tuple[list[Tensor], Tensor]:
    """Return (pools, block_table) of contiguous caches (B, HKV, pages * page_size, D), the pages in a random order.

    Three pages belong to no sequence and hold NaN. Entries that are not ``needed`` (B, pages) are outside the pool.
    """
    batch, pages = needed.shape
    order = torch.randperm(batch * pages + 3, generator=generator, device=needed.device)
    table = order[: batch * pages].view(batch, pages)
    pools = []
    for cache in caches:
        own = stored(cache).unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1)
        pool = torch.full((order.numel(), *own.shape[1:]), math.nan, device=own.device).to(cache.dtype)
        stored(pool)[table.flatten()] = own
        pools.append(pool)
    return pools, torch.where(needed, table, NOWHERE).int()


def rows_in_pool(rows: Tensor, block_table: Tensor, pool: Tensor) -> Tensor:
    """Return which rows (num_pages, page_size) of a pool are ``rows`` (B, S_max) of its sequences."""
    found = torch.zeros(pool.shape[0], pool.shape[2], dtype=torch.bool, device=pool.device)
    of_pages = rows.unflatten(1, (block_table.shape[1], -1))
    for entries, page_rows in zip(block_table.long(), of_pages):
        there = (entries >= 0) & (entries < pool.shape[0])
        found[entries[there]] |= page_rows[there]
    return found
