"""Layouts of tensors: the order of axes in a caller's, and strides and alignment as launches need them.

Inside the package all tensors are (B, H, N, D).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

from fused_rope_attn.runtime import checks

Layout = Literal["bhsd", "bshd"]
# flash-attn takes "bshd". Packed tokens, (T, H, D), are "thd": callers of attention cannot choose it.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
RotationLayout = Literal["bhsd", "bshd", "sbhd", "thd"]
# For each axis of a layout its place in (B, H, N, D).
AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 1, 3)}
# Rows and columns of the largest tile; a stride beyond 2**31 / this needs 64-bit offsets inside a tile.
_LARGEST_TILE = 256


def check_layout(layout: Any, layouts: tuple[str, ...] = LAYOUTS) -> None:
    if layout not in layouts:
        checks.refuse_choice("layout", layout, layouts)


def heads_first(tensors: Any, layout: str, names: Iterable[str]) -> Any:
    """Return a record with views (B, H, N, D) of these of its tensors; None stays None.

    Packed tokens are one batch entry.
    """
    if layout == "bhsd":
        return tensors
    given = {name: x for name in names if (x := getattr(tensors, name)) is not None}
    is_packed = layout == "thd"
    views = {n: x.transpose(0, 1).unsqueeze(0) if is_packed else x.transpose(1, 2) for n, x in given.items()}
    return tensors._replace(**views)


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


def block_d(head_dim: int) -> int:
    """Return the smallest power of two that holds the head dimension, at least 16 (the tensor cores' smallest K)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def table_strides(
    cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, interleaved: bool
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (batch, row, column) strides that read both tables as (1|B, S, R/2) whatever their width.

    A full-width table has each angle twice. The strides select its first R/2 columns, or if interleaved every second
    one. This makes no view.
    """

    def read(table: torch.Tensor) -> tuple[int, int, int]:
        strides = table.stride()
        column = strides[-1] * 2 if interleaved and table.shape[-1] == rotary_dim else strides[-1]
        return (strides[0] if len(strides) == 3 and table.shape[0] > 1 else 0, strides[-2], column)

    return read(cos), read(sin)


def is_long(*strides: tuple[int, ...]) -> bool:
    """Return whether an offset between two elements of one tile can pass 2**31 for any of these strides."""
    return any((row + column) * _LARGEST_TILE >= 2**31 for _, _, row, column in strides)


def like_input(x: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    """Return an uninitialised tensor like x, stored as (B, N, H, D) if x is, else as (B, H, N, D).

    columns: D of the result, if it is not x's.
    """
    shape = x.shape if columns is None else (*x.shape[:3], columns)
    return torch.empty_strided(shape, output_strides(x, columns), dtype=x.dtype, device=x.device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the strides of a contiguous tensor of a shape (B, H, N, D)."""
    _, heads, length, head_dim = shape
    return (heads * length * head_dim, length * head_dim, head_dim, 1)


def output_strides(x: torch.Tensor, columns: int | None = None) -> tuple[int, int, int, int]:
    """Return the strides of ``like_input(x, columns)``."""
    batch, heads, length, head_dim = x.shape if columns is None else (*x.shape[:3], columns)
    if heads > 1 and x.stride(1) < x.stride(2):
        return (length * heads * head_dim, head_dim, heads * head_dim, 1)
    return contiguous_strides((batch, heads, length, head_dim))


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy in the same memory order if the tensor memory accelerator cannot address it.

    Kernels read q, k, v and their gradients in such layouts only, because they would have to load the elements of any
    other one by one.
    """
    return x if x.numel() == 0 or has_descriptor(x) else like_input(x).copy_(x)


def has_descriptor(x: torch.Tensor) -> bool:
    """Return whether the tensor memory accelerator can address x: 16-byte aligned rows with adjacent columns."""
    *outer, column = x.stride()
    if column != 1 or x.data_ptr() % 16 or x.numel() == 0:
        return False
    return all(size == 1 or (s > 0 and s * x.element_size() % 16 == 0) for size, s in zip(x.shape, outer))
