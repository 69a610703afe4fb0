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
from fused_rope_attn.kernels import masks, rotation, softmax, tiles
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.runtime.device import is_interpreted


@record
class BlockTable:
    """A block table (B, pages) int32, or the row of one sequence, and the pool's pages."""

    ptr: tl.tensor
    strides: tl.tuple
    PAGE_SIZE: tl.constexpr  # rows of a page
    BY_PAGE: tl.constexpr = False  # each tile of cached keys is within one page, or begins and ends with pages
    num_pages: tl.tensor = None  # of the pool; the kernel adds it


@record
class StepQueries:
    """The query rows of one block, ready for products."""

    q: tl.tensor  # (BLOCK_M, BLOCK_D), rotated; for float8 caches ``Halves`` of it
    q_scale: tl.tensor | None  # for float8 caches (BLOCK_M, 1), a factor of the scores
    positions: tl.tensor  # (BLOCK_M,)
    window: masks.Window
    scale: softmax.ScoreScale
    READS_LENGTHS: tl.constexpr  # as in ``masks.Mask``


@record
class KeyRows:
    """Keys and values of one key head of one sequence, and the rotation of the keys; None: they are rotated already.

    In pages, ``k`` and ``v`` are the head's rows in page 0 of the pool, and their ``first_row`` and ``num_rows`` count
    from the first position on; k_stride and v_stride are the elements from one page to the next.
    """

    k: tiles.Rows
    v: tiles.Rows
    rotation: rotation.Rotation | None
    pages: BlockTable | None  # its row of this sequence
    k_stride: tl.tensor
    v_stride: tl.tensor
    float8: eight_bits.Float8


@record
class NewKeys:
    """New tokens of one key head of one sequence."""

    k: tiles.Rows
    v: tiles.Rows
    rotation: rotation.Rotation
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
def sequence_pages(table, sequence, BY_PAGE: tl.constexpr = False):
    """Return the row of one sequence (int64) of a ``BlockTable``."""
    return replace(table, ptr=table.ptr + sequence * table.strides[0], BY_PAGE=BY_PAGE)


@triton.jit
def page_entries(pages, positions, end):
    """Load the entry of the block table for a row, or each of a vector of rows, before ``end``; 0 for others.

    Unsigned, so that an entry is in the pool if it is less than the pool's number of pages. Without pages all are 0.
    """
    if pages is None:
        return tl.zeros(positions.shape, tl.uint32)
    else:
        entries = pages.ptr + positions // pages.PAGE_SIZE * pages.strides[1]
        return tl.load(entries, mask=positions < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def tile_entries(pages, start, offs, end):
    """Load ``page_entries`` of the tile ``start + offs``: with BY_PAGE a tuple, one of each page, else one of each
    row."""
    if pages is not None and pages.BY_PAGE:
        entries = ()
        for page in tl.static_range(max(1, offs.shape[0] // pages.PAGE_SIZE)):
            entries = entries + (page_entries(pages, start + page * pages.PAGE_SIZE, end),)
        return entries
    else:
        return page_entries(pages, offs + start, end)


@triton.jit
def cached_tile(rows, page_stride, pages, entries, start, offs, end):
    """Return the ``Rows`` of the tile ``start + offs``, counted from ``start``, with ``entries`` of ``tile_entries``.

    rows: the head's, in pages those of page 0; [first_row, end) exist. Until the assertion stops the call, the last
    page of the pool is read in place of one outside.
    """
    if pages is None:
        return tiles.rows_from(rows, start)
    elif pages.BY_PAGE:
        last_page = (pages.num_pages - 1).to(tl.uint32)
        entry = tl.minimum(entries[0], last_page)
        # The page of each of a thread's rows is a compile-time value, so that the selection costs nothing.
        for page in tl.static_range(1, len(entries)):
            entry = tl.where(offs // pages.PAGE_SIZE == page, tl.minimum(entries[page], last_page), entry)
        ptr = rows.ptr + entry.to(tl.int64) * page_stride
        stride_row = rows.stride_row
        if offs.shape[0] > pages.PAGE_SIZE:
            ptr = (ptr + offset_in_page(rows, pages, offs))[:, None]
            stride_row = 0
        else:
            ptr += tl.cast(start % pages.PAGE_SIZE, tl.int64) * stride_row
        first_row = rows.first_row
        if first_row is not None:
            first_row -= start
        return replace(rows, ptr=ptr, stride_row=stride_row, num_rows=end - start, first_row=first_row)
    else:
        return rows_at(rows, page_stride, pages, entries, start + offs, end)


@triton.jit
def offset_in_page(rows, pages, positions):
    """Return the distance of rows of a cache from the first rows of their pages."""
    in_page = positions % pages.PAGE_SIZE
    if rows.format.USE_INT64_OFFSETS:
        in_page = in_page.to(tl.int64)
    return in_page * rows.stride_row


@triton.jit
def rows_at(rows, page_stride, pages, entries, positions, end):
    """Return the ``Rows`` of a cache at ``positions``, with their ``tile_entries``; those before ``end`` exist.

    rows: the head's, in pages those of page 0. The result is not evenly spaced: each row has a pointer, and a
    ``num_rows`` of its own, 0 if the row does not exist or its page is outside the pool.
    """
    exists = positions < end
    if pages is None:
        pointers = rows.ptr + positions.to(tl.int64) * rows.stride_row
    else:
        exists = exists & (entries < pages.num_pages.to(tl.uint32))
        page = tl.minimum(entries, (pages.num_pages - 1).to(tl.uint32)).to(tl.int64)
        pointers = rows.ptr + page * page_stride + offset_in_page(rows, pages, positions)
    num_rows = tl.where(exists, positions.shape[0], 0)[:, None]
    return replace(rows, ptr=pointers[:, None], stride_row=0, num_rows=num_rows, first_row=None)


if is_interpreted():

    def assert_in_pool(entries, pages):
        """Assert that all of ``entries`` are in the pool. The interpreter skips Triton's own assertions."""
        if pages is not None and int(entries.handle.data.max()) >= int(pages.num_pages.handle.data.item()):
            raise AssertionError("block_table must hold pages of the pool for every row that exists")

else:

    @triton.jit
    def assert_in_pool(entries, pages):
        """Assert that all of ``entries`` are in the pool, if there are pages. Launches with ``debug`` keep this."""
        if pages is not None:
            tl.device_assert(
                tl.max(entries, 0) < pages.num_pages.to(tl.uint32),
                "block_table must hold pages of the pool for every row that exists",
            )


@triton.jit
def assert_pages(table, sequence, keys, part, parts):
    """Assert that the pages of the keys that a sequence (int64) sees are in the pool: part ``part`` of ``parts``.

    keys: ``CachedKeys``. The kernels that read the pages do not look at what they find, which would take their time.
    """
    if table is not None:
        pages = sequence_pages(table, sequence)
        PAGES: tl.constexpr = 512
        highest = tl.zeros((PAGES,), tl.uint32)
        end = tl.cdiv(keys.num_keys, pages.PAGE_SIZE)
        for start in range(keys.first_key // pages.PAGE_SIZE + part * PAGES, end, parts * PAGES):
            page = start + tl.arange(0, PAGES)
            entries = tl.load(pages.ptr + page * pages.strides[1], mask=page < end, other=0)
            highest = tl.maximum(highest, entries.to(tl.uint32, bitcast=True))
        assert_in_pool(highest, pages)


@triton.jit
def in_memory_order(x, pairing, D: tl.constexpr):
    """Return a tile (rows, BLOCK_D) that is in pair order with its D columns in the order of memory."""
    R: tl.constexpr = pairing.R
    if pairing.INTERLEAVED:
        return x
    elif R == D and D == x.shape[1]:
        pairs = tl.reshape(x, (x.shape[0], D // 2, 2))
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), x.shape)
    else:
        column = tl.arange(0, x.shape[1])
        # First members that are rotated, second ones, first members that are not, second ones.
        place = tl.where(column < (R + D) // 2, 2 * (column - R // 2), 2 * (column - D // 2) + 1)
        place = tl.where(column < R, 2 * (column - R // 2) + 1, place)
        place = tl.where(column < R // 2, 2 * column, tl.where(column < D, place, column))
        return tl.gather(x, tl.broadcast_to(place[None, :], x.shape), 1)


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
        mask = masks.Mask(num_keys, first_key, queries.window, queries.READS_LENGTHS)
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
def load_cached(rows, offs, of_keys, start, float8, CHECK_ROWS: tl.constexpr):
    """Load a tile of rows of a cache for products, counted from position ``start``. of_keys: ``Rotation`` or None."""
    if of_keys is None and float8.DTYPE is None:
        return tiles.load_tile(rows, offs, CHECK_ROWS)
    elif of_keys is None:
        return eight_bits.load_halves(rows, offs, float8, CHECK_ROWS)
    elif float8.DTYPE is None:
        return rotation.load_rotated(rows, offs, of_keys, start)
    else:  # Joined and split again, 16 columns would be wrong: Triton 3.6 lays them out for 32.
        first, second = rotation.load_rotated_pairs(rows, offs, of_keys, start)
        return eight_bits.Halves(first.to(float8.DTYPE), second.to(float8.DTYPE))


@triton.jit
def attend_tiles(sums, queries, cache, entries, first, end, last, offs_n, SEEN_BY_ALL: tl.constexpr):
    """Fold the tiles of [first, end) into the running sums; return the sums and the next tile's ``tile_entries``.

    SEEN_BY_ALL: every query sees every key of these tiles, which are whole. The walk goes on to ``last``.
    """
    for start_n in range(first, end, offs_n.shape[0]):
        # Look up the next tile, so that its loads of keys do not wait for entries.
        following = tile_entries(cache.pages, start_n + offs_n.shape[0], offs_n, last)
        k_rows = cached_tile(cache.k, cache.k_stride, cache.pages, entries, start_n, offs_n, last)
        k = load_cached(k_rows, offs_n, cache.rotation, start_n, cache.float8, CHECK_ROWS=not SEEN_BY_ALL)
        v_rows = cached_tile(cache.v, cache.v_stride, cache.pages, entries, start_n, offs_n, last)
        v = load_cached(v_rows, offs_n, None, start_n, cache.float8, CHECK_ROWS=not SEEN_BY_ALL)
        if SEEN_BY_ALL:
            sums = attend_tile(sums, queries, k, v, None, None, None)
        else:
            sums = attend_tile(sums, queries, k, v, start_n + offs_n, cache.k.num_rows, cache.k.first_row)
        entries = following
    return sums, entries


@triton.jit
def attend_cached(sums, queries, cache, first, seen_by_all, last, offs_n):
    """Fold the cached keys [first, last) into the running sums, a tile at a time; offs_n: 0 to BLOCK_N.

    seen_by_all: every query sees the keys before this one; None: tiles that need no mask get no loop of their own.
    """
    entries = tile_entries(cache.pages, first, offs_n, last)
    if seen_by_all is not None:
        BLOCK_N: tl.constexpr = offs_n.shape[0]
        middle = first + tl.maximum(0, tl.minimum(seen_by_all, last) - first) // BLOCK_N * BLOCK_N
        sums, entries = attend_tiles(sums, queries, cache, entries, first, middle, last, offs_n, SEEN_BY_ALL=True)
        first = middle
    sums, entries = attend_tiles(sums, queries, cache, entries, first, last, last, offs_n, SEEN_BY_ALL=False)
    return sums


@triton.jit
def load_new_keys(new, rows, offs, position, float8, CACHE_IS_ROTATED: tl.constexpr):
    """Load new keys: (for products, for the cache). ``rows`` are counted from ``position``.

    With a float8 cache a query sees its new keys as the cache stores them.
    """
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    of_keys = new.rotation
    weights = None
    if of_keys.norm is not None:
        weights = rotation.pair_norm_weights(of_keys.norm, of_keys, BLOCK_D)
    first, second = rotation.load_pairs(rows, offs, of_keys)
    angles = rotation.load_angles(of_keys, offs + position, BLOCK_D)
    of_cache = angles if CACHE_IS_ROTATED else rotation.Angles(cos=None, sin=None)
    first, second = rotation.norm_and_rotate(first, second, of_cache, 1.0, of_keys, weights)
    DTYPE: tl.constexpr = rows.ptr.dtype.element_ty if float8.DTYPE is None else tl.float32
    kept = in_memory_order(rotation.pack_pairs(first, second).to(DTYPE), of_keys, rows.format.D)
    if float8.DTYPE is None:
        if CACHE_IS_ROTATED:
            return kept, kept
        else:
            return rotation.load_rotated(rows, offs, of_keys, position), kept
    else:
        if CACHE_IS_ROTATED:
            first, second = rotation.unpack_pairs(kept)
        # Rounded apart from the tile for the cache: the assembler of Triton 3.6 lost one of two uses of that one.
        first = eight_bits.as_stored(first, float8, float8.k_scale).to(tl.float32)
        second = eight_bits.as_stored(second, float8, float8.k_scale).to(tl.float32)
        if not CACHE_IS_ROTATED:
            first, second = rotation.rotate(first, second, angles.cos, angles.sin, CONJUGATE=False)
        halves = eight_bits.Halves(first.to(float8.DTYPE), second.to(float8.DTYPE))
        return halves, eight_bits.as_stored(kept, float8, float8.k_scale)


@triton.jit
def attend_new(sums, queries, cache, new, num_seen, writes_cache, BLOCK_NEW: tl.constexpr):
    """Fold the first ``num_seen`` new keys into the running sums, and append them if ``writes_cache``."""
    pages, float8, num_cached = cache.pages, cache.float8, cache.k.num_rows
    end = num_cached + new.k.num_rows
    offs = tl.arange(0, BLOCK_NEW)
    for start in tl.range(0, num_seen, BLOCK_NEW, num_stages=1):
        position = num_cached + start
        positions = position + offs
        k_rows = tiles.rows_from(new.k, start)
        k, k_kept = load_new_keys(new, k_rows, offs, position, float8, CACHE_IS_ROTATED=cache.rotation is None)
        v = tiles.load_tile(tiles.rows_from(new.v, start), offs, CHECK_ROWS=True)
        v_kept = eight_bits.as_stored(v, float8, float8.v_scale)
        if writes_cache:
            entries = page_entries(pages, positions, end)
            tiles.store_tile(rows_at(cache.k, cache.k_stride, pages, entries, positions, end), k_kept, offs)
            tiles.store_tile(rows_at(cache.v, cache.v_stride, pages, entries, positions, end), v_kept, offs)
            assert_in_pool(entries, pages)
        if float8.DTYPE is not None:
            v = eight_bits.split_columns(v_kept, float8.DTYPE)
        sums = attend_tile(sums, queries, k, v, positions, end, new.first_key)
    return sums


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, float8):
    """Return the ``RunningSums`` before the first key."""
    if float8.DTYPE is None:
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_D // 2), tl.float32)
        acc = eight_bits.Halves(even=zeros, odd=zeros)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return RunningSums(acc, row_max, row_sum=tl.zeros((BLOCK_M,), tl.float32))


@triton.jit
def whole_sums(sums, float8):
    """Return the running sums with acc (BLOCK_M, BLOCK_D) in the scale of the output."""
    if float8.DTYPE is None:
        return sums
    else:
        return replace(sums, acc=rotation.pack_pairs(sums.acc.even, sums.acc.odd) * float8.v_scale)
