"""The order of the axes in a caller's tensors. Inside the package all of them are (B, H, N, D)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from fused_rope_attn.runtime import checks

Layout = Literal["bhsd", "bshd"]
# flash-attn takes "bshd". Packed tokens, (T, H, D), are "thd": callers of attention cannot choose it.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
RotationLayout = Literal["bhsd", "bshd", "sbhd", "thd"]
# For each axis of a layout its place in (B, H, N, D).
AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 1, 3)}


def in_layout(axes: Any, layout: str) -> tuple[Any, ...]:
    """Return four sizes or names, given as (B, H, N, D), in the order of the layout."""
    return tuple(axes[i] for i in AXES[layout])


def heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor in the caller's layout as a view (B, H, N, D). Packed tokens are one batch entry."""
    if layout == "bhsd":
        return x
    return x.transpose(0, 1).unsqueeze(0) if layout == "thd" else x.transpose(1, 2)


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


def check_layout(layout: Any, layouts: tuple[str, ...] = LAYOUTS) -> None:
    if layout not in layouts:
        checks.refuse_choice("layout", layout, layouts)
