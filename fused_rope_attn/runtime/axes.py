"""The order of the axes in a caller's tensors. Inside the package all of them are (B, H, N, D)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

Layout = Literal["bhsd", "bshd"]
# flash-attn takes "bshd". Packed tokens, (T, H, D), are "thd": messages use the word, but callers cannot choose it.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def in_layout(axes: Any, layout: str) -> tuple[Any, ...]:
    """Return four sizes or names, given as (B, H, N, D), in the order of the layout."""
    batch, heads, length, columns = axes
    if layout == "thd":
        return length, heads, columns
    return (batch, length, heads, columns) if layout == "bshd" else (batch, heads, length, columns)


def form_of(heads: str, length: str, layout: str) -> str:
    """Return a shape for messages, for example "(B, NQ, HQ, D)"."""
    return f"({', '.join(in_layout(('B', heads, length, 'D'), layout))})"


def from_heads_first(o: torch.Tensor, layout: str, *, contiguous: bool = False) -> torch.Tensor:
    """Return a result (B, H, N, D) as a view in the caller's layout.

    contiguous: copy a result that is not stored as (B, N, H, D). Results of the reference are not.
    """
    if layout == "bhsd":
        return o
    o = o.transpose(1, 2)
    if contiguous:
        o = o.contiguous()
    return o.squeeze(0) if layout == "thd" else o
