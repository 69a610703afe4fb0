"""Host-side arithmetic that every launcher shares. Hot path: attribute reads and integers only."""

from __future__ import annotations

import math

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = math.log2(math.e)
# Rows and columns of the largest tile; a stride beyond 2**31 / this needs 64-bit offsets inside a tile.
_LARGEST_TILE = 256


def block_d(head_dim: int) -> int:
    """Smallest power of two that holds the head dimension, at least 16 (the tensor cores' smallest K)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def table_strides(cos, sin, rotary_dim: int, interleaved: bool):
    """(batch, row, column) strides of both tables, read as (1|B, S, R/2) whatever their width.

    A full-width table carries each angle twice: in the half layout its first R/2 columns are taken, interleaved every
    second one. No view is made.
    """
    return _one_table(cos, rotary_dim, interleaved), _one_table(sin, rotary_dim, interleaved)


def _one_table(table, rotary_dim, interleaved):
    strides = table.stride()
    column = strides[-1] * 2 if interleaved and table.shape[-1] == rotary_dim else strides[-1]
    return (strides[0] if len(strides) == 3 and table.shape[0] > 1 else 0, strides[-2], column)


def is_long(*tensors) -> bool:
    """True when an offset between two elements of one tile of any of the tensors can pass 2**31."""
    return any((t.stride(2) + t.stride(3)) * _LARGEST_TILE >= 2**31 for t in tensors)


def scale_and_sign(softmax_scale: float) -> tuple[float, float]:
    """(qk_scale > 0 for base-2 softmax, sign to multiply q by): kernels never see a negative or zero scale."""
    if softmax_scale == 0.0:
        return LOG2E, 0.0
    return abs(softmax_scale) * LOG2E, math.copysign(1.0, softmax_scale)


def dot_precision(dtype: torch.dtype) -> str:
    """Input precision of tl.dot: true float32 unless the user allowed tf32 for matrix products."""
    return "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def like_input(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised tensor with x's shape whose memory order is (B, N, H, D) where x's is, else (B, H, N, D)."""
    batch, heads, length, head_dim = x.shape
    if heads > 1 and x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim))


def heads_per_section(num_heads: int, group_size: int, bytes_per_kv_head: int, section_bytes: int) -> int:
    """How many query heads run together so that their K and V stay in ``section_bytes`` of L2; 0 bytes means one."""
    if section_bytes == 0:
        return 1
    return min(num_heads, max(1, section_bytes // max(1, bytes_per_kv_head)) * group_size)


def has_descriptor(x: torch.Tensor) -> bool:
    """True when the tensor memory accelerator can address x: 16-byte aligned rows with adjacent columns."""
    per_16_bytes = 16 // x.element_size()
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and x.numel() > 0
        and all(size == 1 or (s > 0 and s % per_16_bytes == 0) for size, s in zip(x.shape[:3], x.stride()[:3]))
    )


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Tensor descriptor of a (B, H, N, D) tensor; reads past N or D give zeros. A stride of a size-1 axis is arbitrary."""
    shape = list(x.shape)
    strides = [s if size > 1 else x.shape[3] for size, s in zip(shape, x.stride())]
    strides[3] = 1
    return TensorDescriptor(x, shape, strides, block)
