# mypy: ignore-errors
"""Caches in pages: where the rows of a sequence lie in a pool of pages, by its row of the block table.

Where a page holds whole tiles, a tile of rows has one entry of the block table, and its rows are as evenly spaced as
those of a contiguous cache. Where a tile holds whole pages, it may begin with a page and look each of them up once.
Elsewhere a tile looks up the page of each of its rows: neighbouring rows mostly share one, and the second to sixteenth
lookup is in the L1. The loop looks up the next tile's pages before it needs them, and looks at them when it does, so
that no load of keys waits for a load of entries.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.tiles import Rows, rows_from
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
    BY_PAGE: tl.constexpr  # each tile of cached keys lies within one page, or begins and ends with pages


@record
class Lookup:
    """Where a walk over the tiles of a sequence is: the entries of its next tile (``tile_entries``), and the highest of
    those of the tiles before."""

    entries: tl.tensor | tl.tuple
    highest: tl.tensor


@triton.jit
def sequence_pages(table_ptr, table_strides, sequence, num_pages, k_stride, v_stride, SIZE: tl.constexpr,
                   BY_PAGE: tl.constexpr = False):  # fmt: skip
    """``Pages`` of one sequence (int64), by its row of the block table (B, pages) int32.

    k_stride and v_stride are those of the pools' first axes.
    """
    return Pages(
        entries_ptr=table_ptr + sequence * table_strides[0], entry_stride=table_strides[1], num_pages=num_pages,
        k_stride=k_stride, v_stride=v_stride, SIZE=SIZE, BY_PAGE=BY_PAGE,
    )  # fmt: skip


@triton.jit
def page_entries(pages, positions, end):
    """Entry of the block table for a row, or each of a vector of rows, before ``end``; 0 for others, which reads
    nothing.

    Unsigned, so that an entry is in the pool where it is less than the pool's number of pages.
    """
    entries = pages.entries_ptr + positions // pages.SIZE * pages.entry_stride
    return tl.load(entries, mask=positions < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def tile_entries(pages, start, offs, end):
    """``page_entries`` of the tile ``start + offs``: a tuple of those of its pages where BY_PAGE, else one of each
    row."""
    if pages.BY_PAGE:
        entries = ()
        for page in tl.static_range(max(1, offs.shape[0] // pages.SIZE)):
            entries = entries + (page_entries(pages, start + page * pages.SIZE, end),)
        return entries
    else:
        return page_entries(pages, start + offs, end)


@triton.jit
def highest_entry(lookup, pages):
    """The highest entry of a walk's tiles with the next one."""
    if pages.BY_PAGE:
        highest = lookup.highest
        for page in tl.static_range(len(lookup.entries)):
            highest = tl.maximum(highest, lookup.entries[page])
        return highest
    else:
        return tl.maximum(lookup.highest, lookup.entries)


@triton.jit
def first_lookup(pages, start, offs, end):
    """``Lookup`` before the tile ``start + offs``; of a contiguous cache, without pages, one that says nothing."""
    if pages is None:
        entries = tl.full((), 0, tl.uint32)
        highest = entries
    else:
        entries = tile_entries(pages, start, offs, end)
        if pages.BY_PAGE:
            highest = tl.full((), 0, tl.uint32)
        else:
            highest = tl.zeros(entries.shape, tl.uint32)
    return Lookup(entries=entries, highest=highest)


@triton.jit
def next_lookup(lookup, pages, start, offs, end):
    """``Lookup`` before the tile ``start + offs``, after the one that ``lookup`` is before."""
    return Lookup(entries=tile_entries(pages, start, offs, end), highest=highest_entry(lookup, pages))


@triton.jit
def tile_in_pages(rows, page_stride, pages, entries, start, offs, end, ALL_EXIST: tl.constexpr):
    """``Rows`` of the tile ``start + offs``, counted from ``start``, with ``entries`` of ``tile_entries``.

    rows: those of the head in page 0, of which [first_row, end) exist. ALL_EXIST: so do all of the tile's. A page
    outside the pool is not read, or as its last one where all rows exist or a tile holds several pages, until the
    assertion stops the call.
    """
    last_page = (pages.num_pages - 1).to(tl.uint32)
    if pages.BY_PAGE and offs.shape[0] > pages.SIZE:
        first_row = rows.first_row
        if first_row is not None:
            first_row -= start
        return Rows(
            ptr=pointers_by_page(rows, page_stride, pages, entries, offs)[:, None], stride_row=0,
            stride_column=rows.stride_column, num_rows=end - start, first_row=first_row, format=rows.format,
        )  # fmt: skip
    elif pages.BY_PAGE:
        entries = entries[0]
        if ALL_EXIST:
            entries = tl.minimum(entries, last_page)
        in_pool = entries < pages.num_pages.to(tl.uint32)
        page = start // pages.SIZE * pages.SIZE
        first_row = rows.first_row
        if first_row is not None:
            first_row -= page
        rows_of_page = Rows(
            ptr=rows.ptr + entries.to(tl.int64) * page_stride, stride_row=rows.stride_row,
            stride_column=rows.stride_column, num_rows=tl.where(in_pool, end - page, 0), first_row=first_row,
            format=rows.format,
        )  # fmt: skip
        return rows_from(rows_of_page, start - page)
    else:
        if ALL_EXIST:
            entries = tl.minimum(entries, last_page)
        return rows_in_pages(rows, page_stride, pages, entries, start + offs, end)


@triton.jit
def pointers_by_page(rows, page_stride, pages, entries, offs):
    """Pointers to the rows ``offs`` of a tile that holds the pages ``entries``, a tuple; rows: those in page 0."""
    last_page = (pages.num_pages - 1).to(tl.uint32)
    in_page = offs % pages.SIZE
    if rows.format.USE_INT64_OFFSETS:
        in_page = in_page.to(tl.int64)
    # Which page a thread's rows are in is known when this is compiled: the selection costs nothing.
    entry = tl.minimum(entries[0], last_page) + tl.zeros(offs.shape, tl.uint32)
    for page in tl.static_range(1, len(entries)):
        entry = tl.where(offs // pages.SIZE == page, tl.minimum(entries[page], last_page), entry)
    return rows.ptr + entry.to(tl.int64) * page_stride + in_page * rows.stride_row


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
        """All of ``entries``, or the one, are pages of the pool. The interpreter skips Triton's own assertions."""
        highest = int(entries.handle.data.max())
        if highest >= int(pages.num_pages.handle.data.item()):
            raise AssertionError("block_table must hold pages of the pool for every row that exists")

else:

    @triton.jit
    def assert_in_pool(entries, pages):
        """All of ``entries``, or the one, are pages of the pool; the launch has ``debug`` on, which keeps this."""
        highest = entries
        if len(entries.shape) > 0:
            highest = tl.max(entries, 0)
        tl.device_assert(
            highest < pages.num_pages.to(tl.uint32), "block_table must hold pages of the pool for every row that exists"
        )
