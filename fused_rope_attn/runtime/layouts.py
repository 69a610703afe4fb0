"""How tensors lie in memory, as launches depend on it: strides, alignment, what the TMA can address."""

from __future__ import annotations

import torch

# Rows and columns of the largest tile; a stride beyond 2**31 / this needs 64-bit offsets inside a tile.
_LARGEST_TILE = 256


def block_d(head_dim: int) -> int:
    """Smallest power of two that holds the head dimension, at least 16 (the tensor cores' smallest K)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def table_strides(
    cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, interleaved: bool
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(batch, row, column) strides of both tables, read as (1|B, S, R/2) whatever their width.

    A full-width table carries each angle twice: in the half layout its first R/2 columns are taken, interleaved every
    second one. No view is made.
    """
    return _one_table(cos, rotary_dim, interleaved), _one_table(sin, rotary_dim, interleaved)


def _one_table(table: torch.Tensor, rotary_dim: int, interleaved: bool) -> tuple[int, int, int]:
    strides = table.stride()
    column = strides[-1] * 2 if interleaved and table.shape[-1] == rotary_dim else strides[-1]
    return (strides[0] if len(strides) == 3 and table.shape[0] > 1 else 0, strides[-2], column)


def is_long(*strides: tuple[int, ...]) -> bool:
    """True when an offset between two elements of one tile of any tensor with these strides can pass 2**31."""
    return any((row + column) * _LARGEST_TILE >= 2**31 for _, _, row, column in strides)


def like_input(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised tensor with x's shape whose memory order is (B, N, H, D) where x's is, else (B, H, N, D)."""
    return torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Strides of a contiguous tensor of a shape (B, H, N, D)."""
    _, heads, length, head_dim = shape
    return (heads * length * head_dim, length * head_dim, head_dim, 1)


def layout_of_rows(shape: tuple[int, ...]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(shape, strides) of one number for each row of a tensor of shape (B, H, N, D), contiguous."""
    batch, heads, length, _ = shape
    # Sizes of 0 count as 1, as PyTorch has it.
    return (batch, heads, length), (max(1, heads) * max(1, length), max(1, length), 1)


def output_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of ``like_input(x)``."""
    _, heads, length, head_dim = x.shape
    if heads > 1 and x.stride(1) < x.stride(2):
        return (length * heads * head_dim, head_dim, heads * head_dim, 1)
    return contiguous_strides(x.shape)


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy in the same memory order if the tensor memory accelerator cannot address it.

    Kernels only ever read q, k, v and their gradients so: no kernel has a variant for other layouts, whose elements
    would have to be loaded one by one.
    """
    return x if x.numel() == 0 or has_descriptor(x) else like_input(x).copy_(x)


def has_descriptor(x: torch.Tensor) -> bool:
    """True when the tensor memory accelerator can address x: 16-byte aligned rows with adjacent columns."""
    batch, head, row, column = x.stride()
    per_16_bytes = 16 // x.element_size()
    if column != 1 or x.data_ptr() % 16 or x.numel() == 0:
        return False
    if (batch | head | row) % per_16_bytes == 0 and batch > 0 and head > 0 and row > 0:
        return True
    return all(size == 1 or (s > 0 and s % per_16_bytes == 0) for size, s in zip(x.shape, (batch, head, row)))
