# mypy: ignore-errors
"""Keys and values of a block of the generation step: where a cache holds them, and how tiles of them are folded into
the running softmax.

If a page holds whole tiles, a tile of rows has one entry of the block table, and its rows are as evenly spaced as those
of a contiguous cache. If a tile holds whole pages, it may begin with a page and look each of them up once. Otherwise a
tile looks up the page of each of its rows: neighbouring rows mostly share one, and the second to sixteenth lookup is in
the L1. The loop loads the next tile's entries one iteration early, so that no load of keys waits for a load of entries.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation import float8 as eight_bits
from fused_rope_attn.kernels import masks, softmax
from fused_rope_attn.kernels.norm import load_norm_weights, pair_inverse_rms
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import Rotation, load_angles, load_pairs, load_rotated, pack_pairs, rotate
from fused_rope_attn.kernels.tiles import Rows, load_tile, row_pointers, rows_from, store_tile
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


@record
class StepQueries:
    """The query rows of one block, ready for products."""

    q: tl.tensor  # (BLOCK_M, BLOCK_D), rotated; for float8 caches ``Halves`` of it
    q_scale: tl.tensor | None  # for float8 caches (BLOCK_M, 1), a factor of the scores
    positions: tl.tensor  # (BLOCK_M,); at a negative position a query sees nothing
    window: masks.Window
    scale: softmax.ScoreScale


@record
class KeyRows:
    """Keys and values of one key head of one sequence, and the rotation of the keys; None: they are rotated already.

    In pages, ``k`` and ``v`` are the head's rows in page 0 of the pool, and their ``first_row`` and ``num_rows`` count
    from the first position on.
    """

    k: Rows
    v: Rows
    rotation: Rotation | None
    pages: SequencePages | None
    float8: eight_bits.Float8 | None


@record
class NewKeys:
    """New tokens of one key head of one sequence."""

    k: Rows
    v: Rows
    rotation: Rotation
    first_key: tl.tensor | None  # position of the first one that exists; None: all of them do


@record
class RunningSums:
    """The running softmax over the keys so far, in base 2: acc (BLOCK_M, BLOCK_D), the others (BLOCK_M,), float32.

    For float8 caches acc are ``Halves`` in the scale of the values, until ``whole_sums``.
    """

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


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


@triton.jit
def load_rotated_columns(rows, offs, rotation, position_offset, sign=1.0, DTYPE: tl.constexpr = None):
    """Load as ``load_rotated`` does, in the order of memory instead of pair order; rows from ``num_rows`` on are zero.

    Each column loads both members of its pair. It is for a few rows that meet keys in the order of memory.
    """
    R: tl.constexpr = rotation.R
    norm = rotation.norm
    if norm is not None:
        # Loaded as pairs too, because their squares are summed in that order; and loaded first, because Triton gives
        # the product of a row and its factor the layout of the later load, and the sum's layout has whole rows in each
        # thread.
        pairs1, pairs2 = load_pairs(rows, offs, rotation)
        sign = pair_inverse_rms(pairs1, pairs2, norm) * sign
    columns = tl.arange(0, rows.format.BLOCK_D)
    if rotation.INTERLEAVED:
        is_second = columns % 2 == 1
        pairs = columns // 2
        columns1, columns2 = 2 * pairs, 2 * pairs + 1
    else:
        is_second = columns >= R // 2
        pairs = tl.where(is_second, columns - R // 2, columns)
        columns1, columns2 = pairs, pairs + R // 2
    is_rotated = columns < R
    columns1, columns2 = tl.where(is_rotated, columns1, columns), tl.where(is_rotated, columns2, columns)
    pairs = tl.where(is_rotated, pairs, R // 2)  # a pair past the last one: angle 0
    mask = (offs[:, None] < rows.num_rows) & (columns[None, :] < rows.format.D)
    first = tl.load(row_pointers(rows, offs, columns1), mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row_pointers(rows, offs, columns2), mask=mask, other=0.0).to(tl.float32)
    cos, sin = load_angles(rotation, offs + position_offset, rows.format.BLOCK_D, pairs=pairs)
    if norm is not None:
        D: tl.constexpr = rows.format.D
        first *= load_norm_weights(norm, columns1, columns1 < D)[None, :]
        second *= load_norm_weights(norm, columns2, columns2 < D)[None, :]
    # A pair's second member, rotated, is the first one of a rotation with sin and -cos in place of cos and sin.
    is_second = is_second[None, :]
    cos, sin = tl.where(is_second, sin, cos), tl.where(is_second, -cos, sin)
    x, _ = rotate(first, second, cos, sin, CONJUGATE=False)
    return (x * sign).to(rows.ptr.dtype.element_ty if DTYPE is None else DTYPE)


@triton.jit
def load_new(rows, offs, rotation, position_offset, sign, CACHE_IS_ROTATED: tl.constexpr, DTYPE: tl.constexpr = None):
    """Load rows of q or of new keys, normed, rotated, times ``sign``, with columns in the order of cached keys.

    That is the order of memory if the cache is rotated, else pair order. DTYPE as in ``load_rotated``.
    """
    if CACHE_IS_ROTATED:
        return load_rotated_columns(rows, offs, rotation, position_offset, sign, DTYPE)
    else:
        return load_rotated(rows, offs, rotation, position_offset, sign, DTYPE=DTYPE)


@triton.jit
def add_values(acc, p, v, correction, PRECISION: tl.constexpr):
    """Return acc under the new maximum plus the values with their weights p."""
    return tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)


@triton.jit
def attend_tile(sums, queries, k, v, positions_k, num_keys, first_key):
    """Fold one tile of keys and values into the running sums; keys exist in [first_key, num_keys), first_key or None
    for no such bound. positions_k None: every query sees every key of the tile. Of float8 caches the tiles are
    ``Halves``."""
    if queries.q_scale is None:
        scores = softmax.score_product(queries.q, k, queries.scale)
    else:
        scores = eight_bits.score_halves(queries.q, queries.q_scale, k, queries.scale)
    if positions_k is not None:
        mask = masks.Mask(num_keys, first_key, queries.window, READS_LENGTHS=True)
        sees = masks.visible(mask, queries.positions[:, None], positions_k[None, :])
        scores = tl.where(sees, scores, float("-inf"))
    p, correction, row_max, row_sum = softmax.online_softmax(
        scores, sums.row_max, sums.row_sum, queries.scale.qk_scale, HAS_EMPTY_ROWS=True
    )
    if queries.q_scale is None:
        acc = add_values(sums.acc, p, v, correction, queries.scale.PRECISION)
    else:
        even = add_values(sums.acc.even, p, v.even, correction, queries.scale.PRECISION)
        acc = eight_bits.Halves(even, add_values(sums.acc.odd, p, v.odd, correction, queries.scale.PRECISION))
    return RunningSums(acc=acc, row_max=row_max, row_sum=row_sum)


@triton.jit
def load_cached_keys(cache, rows, offs_n, start_n, CHECK_ROWS: tl.constexpr):
    """Load a tile of cached keys for products; ``rows`` are counted from position ``start_n``."""
    if cache.rotation is None:
        return load_cached(cache, rows, offs_n, CHECK_ROWS)
    else:
        if cache.float8 is None:
            return load_rotated(rows, offs_n, cache.rotation, start_n)
        else:
            return eight_bits.load_rotated_halves(rows, offs_n, cache.rotation, start_n, cache.float8, QUANTISE=False)


@triton.jit
def load_cached(cache, rows, offs_n, CHECK_ROWS: tl.constexpr):
    """Load a tile of a cache's rows for products, without a rotation."""
    if cache.float8 is None:
        return load_tile(rows, offs_n, CHECK_ROWS)
    else:
        return eight_bits.load_halves(rows, offs_n, cache.float8, CHECK_ROWS)


@triton.jit
def cached_tile(cache, rows, page_stride, lookup, start_n, offs_n, last, ALL_EXIST: tl.constexpr):
    """Return the ``Rows`` of the tile ``start_n + offs_n`` of a cache's keys or values, counted from ``start_n``."""
    if cache.pages is None:
        return rows_from(rows, start_n)
    else:
        return tile_in_pages(rows, page_stride, cache.pages, lookup.entries, start_n, offs_n, last, ALL_EXIST)


@triton.jit
def attend_tiles(sums, queries, cache, lookup, first, end, last, offs_n, SEEN_BY_ALL: tl.constexpr):
    """Fold the tiles of [first, end) into the running sums; return the sums and the ``Lookup`` before the next tile.

    SEEN_BY_ALL: every query sees every key of these tiles, which are whole. The walk goes on to ``last``.
    """
    k_stride, v_stride = None, None
    if cache.pages is not None:
        k_stride, v_stride = cache.pages.k_stride, cache.pages.v_stride
    for start_n in range(first, end, offs_n.shape[0]):
        here = lookup
        if cache.pages is not None:
            # Look up the next tile, so that its loads of keys do not wait for entries.
            lookup = Lookup(
                tile_entries(cache.pages, start_n + offs_n.shape[0], offs_n, last),
                highest_entry(lookup, cache.pages),
            )
        k_rows = cached_tile(cache, cache.k, k_stride, here, start_n, offs_n, last, SEEN_BY_ALL)
        k = load_cached_keys(cache, k_rows, offs_n, start_n, CHECK_ROWS=not SEEN_BY_ALL)
        v_rows = cached_tile(cache, cache.v, v_stride, here, start_n, offs_n, last, SEEN_BY_ALL)
        v = load_cached(cache, v_rows, offs_n, CHECK_ROWS=not SEEN_BY_ALL)
        if SEEN_BY_ALL:
            sums = attend_tile(sums, queries, k, v, None, None, None)
        else:
            sums = attend_tile(sums, queries, k, v, start_n + offs_n, cache.k.num_rows, cache.k.first_row)
    return sums, lookup


@triton.jit
def attend_cached(sums, queries, cache, first, seen_by_all, last, offs_n):
    """Fold the cached keys [first, last) into the running sums, a tile at a time; offs_n: 0 to BLOCK_N.

    seen_by_all: every query sees the keys before this one; None: tiles that need no mask get no loop of their own.
    """
    lookup = first_lookup(cache.pages, first, offs_n, last)
    if seen_by_all is not None:
        BLOCK_N: tl.constexpr = offs_n.shape[0]
        middle = first + tl.maximum(0, tl.minimum(seen_by_all, last) - first) // BLOCK_N * BLOCK_N
        sums, lookup = attend_tiles(sums, queries, cache, lookup, first, middle, last, offs_n, SEEN_BY_ALL=True)
        first = middle
    sums, lookup = attend_tiles(sums, queries, cache, lookup, first, last, last, offs_n, SEEN_BY_ALL=False)
    if cache.pages is not None:
        assert_in_pool(lookup.highest, cache.pages)
    return sums


@triton.jit
def from_row(rows, start, num_rows):
    """Return the ``num_rows`` rows from row ``start`` (int64) on; in a cache they may be past the last key."""
    return replace(rows, ptr=rows.ptr + start * rows.stride_row, num_rows=num_rows, first_row=None)


@triton.jit
def load_raw(rows, offs, rotation):
    """Load new keys for a cache of raw keys: normed if ``rotation`` has a norm, and not rotated."""
    norm = rotation.norm
    if norm is None:
        return load_tile(rows, offs, CHECK_ROWS=True)
    else:
        columns = tl.arange(0, rows.format.BLOCK_D)
        first, second = load_pairs(rows, offs, rotation)  # first, as in ``load_rotated_columns``
        x = load_tile(rows, offs, CHECK_ROWS=True)
        weight = load_norm_weights(norm, columns, columns < norm.D)[None, :]
        return x.to(tl.float32) * weight * pair_inverse_rms(first, second, norm)


@triton.jit
def load_new_keys(new, rows, offs, position, float8, CACHE_IS_ROTATED: tl.constexpr):
    """Load new keys: (for products, for the cache). ``rows`` are counted from ``position``.

    With a float8 cache a query sees its new keys as the cache stores them.
    """
    if float8 is None:
        k = load_new(rows, offs, new.rotation, position, 1.0, CACHE_IS_ROTATED)
        k_kept = k
        if not CACHE_IS_ROTATED:
            k_kept = load_raw(rows, offs, new.rotation)
        return k, k_kept
    else:
        if CACHE_IS_ROTATED:
            k = load_new(rows, offs, new.rotation, position, 1.0, CACHE_IS_ROTATED, DTYPE=tl.float32)
            k_kept = eight_bits.quantised(k, float8.k_scale)
            return eight_bits.split_columns(k_kept.to(float8.DTYPE), float8.DTYPE), k_kept
        else:
            k_kept = eight_bits.quantised(load_raw(rows, offs, new.rotation), float8.k_scale)
            return eight_bits.load_rotated_halves(rows, offs, new.rotation, position, float8, QUANTISE=True), k_kept


@triton.jit
def attend_new(sums, queries, cache, new, num_seen, writes_cache, BLOCK_NEW: tl.constexpr):
    """Fold the first ``num_seen`` new keys into the running sums, and append them if ``writes_cache``."""
    num_cached = cache.k.num_rows
    num_new = new.k.num_rows
    for start_n in tl.range(0, num_seen, BLOCK_NEW, num_stages=1):
        offs_new = tl.arange(0, BLOCK_NEW)
        start64 = tl.cast(start_n, tl.int64)
        position = num_cached + start_n
        slot64 = tl.cast(position, tl.int64)
        limit = num_new - start_n
        k_rows = from_row(new.k, start64, limit)
        k, k_kept = load_new_keys(
            new, k_rows, offs_new, position, cache.float8, CACHE_IS_ROTATED=cache.rotation is None
        )
        v = load_tile(from_row(new.v, start64, limit), offs_new, CHECK_ROWS=True)
        v_kept = v
        if cache.float8 is not None:
            v_kept = eight_bits.quantised(v, cache.float8.v_scale)
            v = eight_bits.split_columns(v_kept.to(cache.float8.DTYPE), cache.float8.DTYPE)
        if writes_cache:
            if cache.pages is None:
                k_slots = from_row(cache.k, slot64, limit)
                v_slots = from_row(cache.v, slot64, limit)
            else:
                pages, slots, end = cache.pages, position + offs_new, num_cached + num_new
                entries = page_entries(pages, slots, end)
                k_slots = rows_in_pages(cache.k, pages.k_stride, pages, entries, slots, end)
                v_slots = rows_in_pages(cache.v, pages.v_stride, pages, entries, slots, end)
                assert_in_pool(entries, pages)
            store_tile(k_slots, k_kept, offs_new)
            store_tile(v_slots, v_kept, offs_new)
        sums = attend_tile(sums, queries, k, v, position + offs_new, num_cached + num_new, new.first_key)
    return sums


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, float8):
    """Return the ``RunningSums`` before the first key."""
    if float8 is None:
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_D // 2), tl.float32)
        acc = eight_bits.Halves(even=zeros, odd=zeros)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return RunningSums(acc, row_max, row_sum=tl.zeros((BLOCK_M,), tl.float32))


@triton.jit
def whole_sums(sums, float8):
    """Return the running sums with acc (BLOCK_M, BLOCK_D) in the scale of the output."""
    if float8 is None:
        return sums
    else:
        return replace(sums, acc=pack_pairs(sums.acc.even, sums.acc.odd) * float8.v_scale)
