# mypy: ignore-errors
"""Caches in pages: the rows of a sequence in a pool of pages, by its row of the block table.

If a page holds whole tiles, a tile of rows has one entry of the block table, and its rows are as evenly spaced as those
of a contiguous cache. If a tile holds whole pages, it may begin with a page and look each of them up once. Otherwise a
tile looks up the page of each of its rows: neighbouring rows mostly share one, and the second to sixteenth lookup is in
the L1. The loop loads the next tile's entries one iteration early, so that no load of keys waits for a load of entries.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.tiles import rows_from
from fused_rope_attn.runtime.device import is_interpreted


@record
class BlockTable:
    """A block table (B, pages) int32 and its strides, and the pool's pages: their rows, and their number, which the
    kernel adds."""

    ptr: tl.tensor
    strides: tl.tuple
    PAGE_SIZE: tl.constexpr
    num_pages: tl.tensor = None


@record
class SequencePages:
    """The pages of one sequence, and the distance between pages of the pools."""

    entries_ptr: tl.tensor  # int32, the sequence's row of the block table
    entry_stride: tl.tensor
    num_pages: tl.tensor  # of the pool
    k_stride: tl.tensor  # elements from one page to the next, int64
    v_stride: tl.tensor
    SIZE: tl.constexpr  # rows of a page
    BY_PAGE: tl.constexpr  # each tile of cached keys is within one page, or begins and ends with pages


@record
class Lookup:
    """The state of a walk over a sequence's tiles: the next tile's entries (``tile_entries``), and the highest one
    before."""

    entries: tl.tensor | tl.tuple
    highest: tl.tensor


@triton.jit
def sequence_pages(table, sequence, k_stride, v_stride, BY_PAGE: tl.constexpr = False):
    """Return the ``SequencePages`` of one sequence (int64); k_stride and v_stride: of the pools' first axes."""
    entries_ptr = table.ptr + sequence * table.strides[0]
    return SequencePages(
        entries_ptr, table.strides[1], table.num_pages, k_stride, v_stride, SIZE=table.PAGE_SIZE, BY_PAGE=BY_PAGE
    )


@triton.jit
def page_entries(pages, positions, end):
    """Load the entry of the block table for a row, or each of a vector of rows, before ``end``; 0 for others.

    Unsigned, so that an entry is in the pool if it is less than the pool's number of pages.
    """
    entries = pages.entries_ptr + positions // pages.SIZE * pages.entry_stride
    return tl.load(entries, mask=positions < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def tile_entries(pages, start, offs, end):
    """Load ``page_entries`` of the tile ``start + offs``: with BY_PAGE a tuple, one of each page, else one of each
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
    """Return the highest entry of a walk's tiles, the next one included."""
    if pages.BY_PAGE:
        highest = lookup.highest
        for page in tl.static_range(len(lookup.entries)):
            highest = tl.maximum(highest, lookup.entries[page])
        return highest
    else:
        return tl.maximum(lookup.highest, lookup.entries)


@triton.jit
def first_lookup(pages, start, offs, end):
    """Return the ``Lookup`` before the tile ``start + offs``; for a contiguous cache, without pages, a dummy."""
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
def tile_in_pages(rows, page_stride, pages, entries, start, offs, end, ALL_EXIST: tl.constexpr):
    """Return the ``Rows`` of the tile ``start + offs``, counted from ``start``, with ``entries`` of ``tile_entries``.

    rows: the head's in page 0; [first_row, end) exist. ALL_EXIST: all rows of the tile do. Until the assertion stops
    the call, a page outside the pool counts as missing. If all rows exist, or if the tile holds several pages, the last
    page of the pool is read instead.
    """
    last_page = (pages.num_pages - 1).to(tl.uint32)
    if pages.BY_PAGE and offs.shape[0] > pages.SIZE:
        first_row = rows.first_row
        if first_row is not None:
            first_row -= start
        pointers = pointers_by_page(rows, page_stride, pages, entries, offs)[:, None]
        return replace(rows, ptr=pointers, stride_row=0, num_rows=end - start, first_row=first_row)
    elif pages.BY_PAGE:
        entries = entries[0]
        if ALL_EXIST:
            entries = tl.minimum(entries, last_page)
        in_pool = entries < pages.num_pages.to(tl.uint32)
        page = start // pages.SIZE * pages.SIZE
        first_row = rows.first_row
        if first_row is not None:
            first_row -= page
        ptr, num_rows = rows.ptr + entries.to(tl.int64) * page_stride, tl.where(in_pool, end - page, 0)
        return rows_from(replace(rows, ptr=ptr, num_rows=num_rows, first_row=first_row), start - page)
    else:
        if ALL_EXIST:
            entries = tl.minimum(entries, last_page)
        return rows_in_pages(rows, page_stride, pages, entries, start + offs, end)


@triton.jit
def pointers_by_page(rows, page_stride, pages, entries, offs):
    """Return pointers to the rows ``offs`` of a tile of the pages ``entries``, a tuple; rows: the head's in page 0."""
    last_page = (pages.num_pages - 1).to(tl.uint32)
    in_page = offs % pages.SIZE
    if rows.format.USE_INT64_OFFSETS:
        in_page = in_page.to(tl.int64)
    # The page of each of a thread's rows is a compile-time value, so that the selection costs nothing.
    entry = tl.minimum(entries[0], last_page) + tl.zeros(offs.shape, tl.uint32)
    for page in tl.static_range(1, len(entries)):
        entry = tl.where(offs // pages.SIZE == page, tl.minimum(entries[page], last_page), entry)
    return rows.ptr + entry.to(tl.int64) * page_stride + in_page * rows.stride_row


@triton.jit
def rows_in_pages(rows, page_stride, pages, entries, positions, end):
    """Return the ``Rows`` at ``positions``, with their ``page_entries``; those before ``end`` exist.

    rows: the head's in page 0. The result is not evenly spaced: each row has a pointer, and a ``num_rows`` of its own,
    0 if the row does not exist or its page is outside the pool.
    """
    exists = (positions < end) & (entries < pages.num_pages.to(tl.uint32))
    in_page = positions % pages.SIZE
    if rows.format.USE_INT64_OFFSETS:
        in_page = in_page.to(tl.int64)
    pointers = rows.ptr + entries.to(tl.int64) * page_stride + in_page * rows.stride_row
    num_rows = tl.where(exists, positions.shape[0], 0)[:, None]
    return replace(rows, ptr=pointers[:, None], stride_row=0, num_rows=num_rows, first_row=None)


if is_interpreted():

    def assert_in_pool(entries, pages):
        """Assert that ``entries``, one or several, are in the pool. The interpreter skips Triton's own assertions."""
        highest = int(entries.handle.data.max())
        if highest >= int(pages.num_pages.handle.data.item()):
            raise AssertionError("block_table must hold pages of the pool for every row that exists")

else:

    @triton.jit
    def assert_in_pool(entries, pages):
        """Assert that all of ``entries``, or the one, are in the pool; only launches with ``debug`` on keep this."""
        highest = entries
        if len(entries.shape) > 0:
            highest = tl.max(entries, 0)
        tl.device_assert(
            highest < pages.num_pages.to(tl.uint32), "block_table must hold pages of the pool for every row that exists"
        )
