"""How tensors lie in memory: every way that strides, alignment and shared elements can be."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from verification.random.common import pick

# Layouts in which several elements share memory: no such tensor can be written, or hold NaN in some rows only.
SHARED = ("one batch", "one head", "one token", "one number")
_WEIGHTS = {
    "bnhd": 10, "bhnd": 5, "nbhd": 2, "columns": 2, "odd": 3, "offset": 3, "wide": 2, "fused": 3, "skipped": 2,
    "one batch": 1, "one head": 1, "one token": 0.5,
}  # fmt: skip
_OF_GRADIENTS = {**_WEIGHTS, "one number": 3}


def draw_layout(rng: random.Random, *, gradient: bool = False, shared: bool = True) -> str:
    """A name that ``lay`` knows. ``gradient``: of dO, which ``out.sum()`` expands from one number; ``shared``: whether
    elements may share memory."""
    weights = _OF_GRADIENTS if gradient else _WEIGHTS
    return pick(rng, {name: weight for name, weight in weights.items() if shared or name not in SHARED})


def lay(x: Tensor, layout: str) -> Tensor:
    """The values of x (B, H, N, D) in memory as ``layout`` says; (B, H, N, D) again.

    What lies between the elements is NaN. In the layouts of ``SHARED`` the values are those of x's first batch entry,
    head, token or element.
    """
    b, h, n, d = x.shape

    def room(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)

    if layout == "bhnd":
        return x.contiguous()
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "nbhd":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "columns":  # the columns of a row are not adjacent
        return x.mT.contiguous().mT
    if layout == "one batch":
        return x[:1].contiguous().expand_as(x)
    if layout == "one head":
        return x[:, :1].contiguous().expand_as(x)
    if layout == "one token":
        return x[:, :, :1].contiguous().expand_as(x)
    if layout == "one number":
        return x.reshape(-1)[:1].expand_as(x) if x.numel() else x
    if layout == "odd":  # one element in, so that no row is aligned, and no stride is even
        view = room(b, n, h + 5, d + 3)[:, :, 2 : h + 2, 1 : d + 1].transpose(1, 2)
    elif layout == "offset":  # even strides, at an address that is not
        view = room(b * n * h * d + 1)[1:].view(b, n, h, d).transpose(1, 2)
    elif layout == "wide":
        view = room(b, n, h, 2 * d)[..., :d].transpose(1, 2)
    elif layout == "fused":  # a third of what one projection makes
        view = room(b, n, 3 * h, d)[:, :, h : 2 * h].transpose(1, 2)
    elif layout == "skipped":
        view = room(b, 2 * n, h, d)[:, ::2].transpose(1, 2)
    else:
        raise ValueError(f"layout must be one that draw_layout gives, but is {layout!r}")
    return view.copy_(x)


def lay_table(x: Tensor, layout: str) -> Tensor:
    """The values of a table (..., S, W) in memory: "plain", "columns" (not adjacent), or "odd" (a part of a wider one,
    unaligned)."""
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "odd":
        room = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype, device=x.device)
        return room[..., 1:-2].copy_(x)
    return x.contiguous()
