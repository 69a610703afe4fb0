"""The order of the axes in what a caller passes. Inside, tensors of tokens are (B, H, N, D), and so are all shapes."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

Layout = Literal["bhsd", "bshd"]
# "bshd" is what flash-attn takes. Packed tokens, (T, H, D), are "thd": a word of messages, no choice of a caller.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def in_layout(axes: Any, layout: str) -> tuple[Any, ...]:
    """(B, H, N, D), sizes or names, in the order of the layout."""
    batch, heads, length, columns = axes
    if layout == "thd":
        return length, heads, columns
    return (batch, length, heads, columns) if layout == "bshd" else (batch, heads, length, columns)


def form_of(heads: str, length: str, layout: str) -> str:
    """The shape that messages ask for, as in "(B, NQ, HQ, D)"."""
    return f"({', '.join(in_layout(('B', heads, length, 'D'), layout))})"


def from_heads_first(o: torch.Tensor, layout: str, *, contiguous: bool = False) -> torch.Tensor:
    """A result (B, H, N, D) in the caller's layout, a view.

    contiguous: of what is not a view of (B, N, H, D) memory, which the reference gives, a copy is made.
    """
    if layout == "bhsd":
        return o
    o = o.transpose(1, 2)
    if contiguous:
        o = o.contiguous()
    return o.squeeze(0) if layout == "thd" else o
