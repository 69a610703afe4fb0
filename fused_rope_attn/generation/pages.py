"""Caches in pages: where the rows of a sequence lie in a pool of pages, by its row of the block table.

A tile of rows looks up the page of each of its rows: neighbouring rows mostly share one, and the second to sixteenth
lookup is in the L1. A row costs a lookup and a multiplication more than in a contiguous cache, and the loop looks up
the next tile's pages before it needs them, so that no load of keys waits for a load of entries.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.tiles import Rows
from fused_rope_attn.runtime.device import is_interpreted


@record
class Pages:
    """Which pages of a pool belong to one sequence, and how far they are from each other."""

    entries_ptr: tl.tensor  # int32, the sequence's row of the block table
    entry_stride: tl.tensor
    num_pages: tl.tensor  # of the pool
    k_stride: tl.tensor  # elements from one page to the next, int64
    v_stride: tl.tensor
    SIZE: tl.constexpr  # rows of a page


@triton.jit
def sequence_pages(table_ptr, table_strides, sequence, num_pages, k_stride, v_stride, SIZE: tl.constexpr):
    """``Pages`` of one sequence (int64), by its row of the block table (B, pages) int32.

    k_stride and v_stride are those of the pools' first axes.
    """
    return Pages(
        entries_ptr=table_ptr + sequence * table_strides[0], entry_stride=table_strides[1], num_pages=num_pages,
        k_stride=k_stride, v_stride=v_stride, SIZE=SIZE,
    )  # fmt: skip


@triton.jit
def page_entries(pages, positions, end):
    """Entry of the block table for each of the rows ``positions`` before ``end``; 0 for others, which reads nothing.

    Unsigned, so that an entry is in the pool where it is less than the pool's number of pages.
    """
    entries = pages.entries_ptr + positions // pages.SIZE * pages.entry_stride
    return tl.load(entries, mask=positions < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def rows_in_pages(rows, page_stride, pages, entries, positions, end):
    """``Rows`` at ``positions``, of which those before ``end`` exist, with ``entries`` as ``page_entries`` gives them.

    rows: those of the head in page 0. They are not evenly spaced: each brings its pointer, and its own ``num_rows``,
    which is 0 where it does not exist or its page is outside the pool.
    """
    exists = (positions < end) & (entries < pages.num_pages.to(tl.uint32))
    in_page = positions % pages.SIZE
    if rows.format.USE_INT64_OFFSETS:
        in_page = in_page.to(tl.int64)
    pointers = rows.ptr + entries.to(tl.int64) * page_stride + in_page * rows.stride_row
    return Rows(
        ptr=pointers[:, None], stride_row=0, stride_column=rows.stride_column,
        num_rows=tl.where(exists, positions.shape[0], 0)[:, None], first_row=None, format=rows.format,
    )  # fmt: skip


if is_interpreted():

    def assert_in_pool(entries, pages):
        """All of ``entries`` are pages of the pool. The interpreter skips Triton's own assertions."""
        highest = int(tl.max(entries, 0).handle.data.item())
        if highest >= int(pages.num_pages.handle.data.item()):
            raise AssertionError("block_table must hold pages of the pool for every row that exists")

else:

    @triton.jit
    def assert_in_pool(entries, pages):
        """All of ``entries`` are pages of the pool; the launch has ``debug`` on, which keeps assertions in."""
        highest = tl.max(entries, 0)
        tl.device_assert(
            highest < pages.num_pages.to(tl.uint32), "block_table must hold pages of the pool for every row that exists"
        )
