# mypy: ignore-errors
"""Rows of a tensor in memory, and tiles of them: how kernels load and store.

A tile has BLOCK rows and BLOCK_D columns, powers of two. A kernel locates a head's rows by ``head_rows`` and passes the
record to the functions that load or store. Strides count elements.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from fused_rope_attn.kernels.records import record, replace


@record
class TensorView:
    """A (B, H, N, D) tensor: its pointer, or its descriptor if the TMA reads it, and its strides."""

    ptr: tl.tensor | tl.tensor_descriptor
    strides: tl.tuple


def view(x, strides=None):
    """Return the ``TensorView`` of a tensor (B, H, N, D) for a launch; None for None. strides: None means its own."""
    return None if x is None else TensorView.host(x, strides or x.stride())


@record
class Origin:
    """The first row of one head of one sequence in a (B, H, N, D) tensor."""

    batch: tl.tensor  # int64
    head: tl.tensor  # int64
    row: tl.tensor  # the first row of a packed sequence, otherwise 0


@record
class RowFormat:
    """Properties that all rows of a call have in common."""

    D: tl.constexpr  # columns in memory
    BLOCK_D: tl.constexpr  # columns of a tile, a power of two
    USE_INT64_OFFSETS: tl.constexpr  # whether an offset within one tile can pass 2**31 elements
    ALIGNED: tl.constexpr = False  # whether every row begins at a multiple of 16 bytes


@record
class Rows:
    """Rows in memory, counted from the one that ``ptr`` points to; [first_row, num_rows) of them exist."""

    ptr: tl.tensor
    stride_row: tl.tensor
    stride_column: tl.tensor
    num_rows: tl.tensor
    first_row: tl.tensor | None  # None: 0
    format: RowFormat


@triton.jit
def row_stride(stride, ptr, ALIGNED: tl.constexpr):
    """Return an element stride; with ALIGNED in a form that shows the compiler that it is a multiple of 16 bytes.

    Triton itself notices multiples of 16 elements only. It loads rows at other strides element by element, for example
    those of 24 columns, which are 48 bytes apart.
    """
    if ALIGNED:
        UNIT: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
        stride = stride // UNIT * UNIT
    return stride


@triton.jit
def rows_at(ptr, strides, num_rows, format):
    """Return the num_rows ``Rows`` from ``ptr`` on in a tensor with these (batch, head, row, column) strides."""
    return Rows(ptr, strides[2], strides[3], num_rows, first_row=None, format=format)


@triton.jit
def head_rows(view, origin, num_rows, format, first_row=None):
    """Return the ``Rows`` of one head of one sequence of a ``TensorView``."""
    ptr, strides = view.ptr, view.strides
    stride_row = row_stride(strides[2], ptr, format.ALIGNED)
    ptr += origin.batch * row_stride(strides[0], ptr, format.ALIGNED)
    ptr += origin.head * row_stride(strides[1], ptr, format.ALIGNED)
    ptr += tl.cast(origin.row, tl.int64) * stride_row
    return Rows(ptr, stride_row, strides[3], num_rows, first_row, format)


@triton.jit
def rows_from(rows, start):
    """Return the same ``Rows``, counted from row ``start`` on."""
    first_row = rows.first_row
    if first_row is not None:
        first_row -= start
    ptr = rows.ptr + tl.cast(start, tl.int64) * rows.stride_row
    return replace(rows, ptr=ptr, num_rows=rows.num_rows - start, first_row=first_row)


@triton.jit
def columns_from(rows, FIRST_COLUMN: tl.constexpr):
    """Return the same ``Rows`` without the columns before FIRST_COLUMN; tiles keep their width."""
    row_format = replace(rows.format, D=rows.format.D - FIRST_COLUMN)
    return replace(rows, ptr=rows.ptr + FIRST_COLUMN * rows.stride_column, format=row_format)


@triton.jit
def tile_range(N: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return 0 .. N along one axis of a tile. LAYOUT is the tile's in Gluon kernels, which name layouts; else None."""
    if LAYOUT is None:
        return tl.arange(0, N)
    else:
        return gl.arange(0, N, gl.SliceLayout(1 - AXIS, LAYOUT))


@triton.jit
def tile_pointers(base, offs_row, offs_column, stride_row, stride_column, USE_INT64_OFFSETS: tl.constexpr):
    """Return pointers (len(offs_row), len(offs_column)) to these rows and columns."""
    if USE_INT64_OFFSETS:
        offs_row = offs_row.to(tl.int64)
        offs_column = offs_column.to(tl.int64)
    return base + offs_row[:, None] * stride_row + offs_column[None, :] * stride_column


@triton.jit
def row_pointers(rows, offs, columns):
    """Return ``tile_pointers`` to ``columns`` of the rows ``offs`` of ``Rows``."""
    return tile_pointers(rows.ptr, offs, columns, rows.stride_row, rows.stride_column, rows.format.USE_INT64_OFFSETS)


@triton.jit
def row_mask(rows, offs, start=0):
    """Return whether each of the rows ``start + offs`` exists, (len(offs), 1)."""
    mask = offs[:, None] < rows.num_rows - start
    if rows.first_row is not None:
        mask = mask & (offs[:, None] >= rows.first_row - start)
    return mask


@triton.jit
def load_where(pointers, mask, other):
    """Load, with ``other`` where mask is false; mask None: everything is read."""
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=other)


@triton.jit
def load_tile(rows, offs, CHECK_ROWS: tl.constexpr, LAYOUT: tl.constexpr = None):
    """Load a tile (len(offs), BLOCK_D) in the memory's dtype; columns past D are zero.

    CHECK_ROWS: rows that do not exist are zero; without it all of ``offs`` must exist.
    """
    columns = tile_range(rows.format.BLOCK_D, 1, LAYOUT)
    pointers = row_pointers(rows, offs, columns)
    mask = None
    if CHECK_ROWS:
        mask = row_mask(rows, offs)
    if rows.format.D != rows.format.BLOCK_D:
        exists = columns[None, :] < rows.format.D
        if CHECK_ROWS:
            exists = mask & exists
        mask = exists
    return load_where(pointers, mask, 0.0)


@triton.jit
def store_tile(rows, tile, offs, LAYOUT: tl.constexpr = None):
    """Write a tile (len(offs), BLOCK_D), rounded to the memory's dtype, to those of its rows below ``num_rows``."""
    columns = tile_range(rows.format.BLOCK_D, 1, LAYOUT)
    pointers = row_pointers(rows, offs, columns)
    mask = (offs[:, None] < rows.num_rows) & (columns[None, :] < rows.format.D)
    tl.store(pointers, tile.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_rows(rows, first, limit, NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr = None):
    """Bring rows [first, first + NUM_ROWS) that are below ``limit`` into the L2, without waiting (NVIDIA's GPUs only).

    Columns should be contiguous. LAYOUT: of (NUM_ROWS, lines of 128 bytes), which Gluon kernels name.
    """
    ITEM: tl.constexpr = rows.ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = max(1, rows.format.BLOCK_D * ITEM // 128)
    # Rows past the last one prefetch the last one again.
    offs = tl.minimum(first + tile_range(NUM_ROWS, 0, LAYOUT), tl.maximum(limit - 1, 0))
    columns = tile_range(LINES, 1, LAYOUT) * (128 // ITEM)
    pointers = row_pointers(rows, offs, columns)
    words = pointers.to(tl.int64, bitcast=True)
    PREFETCH: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(PREFETCH, "=r,l", [words], tl.int32, is_pure=False, pack=1)
