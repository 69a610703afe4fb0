# mypy: ignore-errors
"""The keys of a block of the generation step: cached and new ones are folded into the running softmax tile by tile, and
the new ones are appended to the cache."""

import triton
import triton.language as tl

from fused_rope_attn.generation import float8 as eight_bits
from fused_rope_attn.generation import pages as paging
from fused_rope_attn.kernels.masks import Mask, Window, visible
from fused_rope_attn.kernels.norm import load_norm_weights, pair_inverse_rms
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import Rotation, load_pairs, load_rotated, load_rotated_columns, pack_pairs
from fused_rope_attn.kernels.softmax import ScoreScale, online_softmax, score_product
from fused_rope_attn.kernels.tiles import Rows, load_tile, rows_from, store_tile


@record
class StepQueries:
    """The query rows of one block, ready for products."""

    q: tl.tensor  # (BLOCK_M, BLOCK_D), rotated; for float8 caches ``Halves`` of it
    q_scale: tl.tensor | None  # for float8 caches (BLOCK_M, 1), a factor of the scores
    positions: tl.tensor  # (BLOCK_M,); at a negative position a query sees nothing
    window: Window
    scale: ScoreScale


@record
class KeyRows:
    """Keys and values of one key head of one sequence, and the rotation of the keys; None: they are rotated already.

    In pages, ``k`` and ``v`` are the head's rows in page 0 of the pool, and their ``first_row`` and ``num_rows`` count
    from the first position on.
    """

    k: Rows
    v: Rows
    rotation: Rotation | None
    pages: paging.SequencePages | None
    float8: eight_bits.Float8 | None


@record
class NewKeys:
    """New tokens of one key head of one sequence."""

    k: Rows
    v: Rows
    rotation: Rotation


@record
class RunningSums:
    """The running softmax over the keys so far, in base 2: acc (BLOCK_M, BLOCK_D), the others (BLOCK_M,), float32.

    For float8 caches acc are ``Halves`` in the scale of the values, until ``whole_sums``.
    """

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


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
        scores = score_product(queries.q, k, queries.scale)
    else:
        scores = eight_bits.score_halves(queries.q, queries.q_scale, k, queries.scale)
    if positions_k is not None:
        mask = Mask(num_keys, first_key, queries.window, READS_LENGTHS=True)
        sees = visible(mask, queries.positions[:, None], positions_k[None, :])
        scores = tl.where(sees, scores, float("-inf"))
    p, correction, row_max, row_sum = online_softmax(
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
        return paging.tile_in_pages(rows, page_stride, cache.pages, lookup.entries, start_n, offs_n, last, ALL_EXIST)


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
            lookup = paging.Lookup(
                paging.tile_entries(cache.pages, start_n + offs_n.shape[0], offs_n, last),
                paging.highest_entry(lookup, cache.pages),
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
    lookup = paging.first_lookup(cache.pages, first, offs_n, last)
    if seen_by_all is not None:
        BLOCK_N: tl.constexpr = offs_n.shape[0]
        middle = first + tl.maximum(0, tl.minimum(seen_by_all, last) - first) // BLOCK_N * BLOCK_N
        sums, lookup = attend_tiles(sums, queries, cache, lookup, first, middle, last, offs_n, SEEN_BY_ALL=True)
        first = middle
    sums, lookup = attend_tiles(sums, queries, cache, lookup, first, last, last, offs_n, SEEN_BY_ALL=False)
    if cache.pages is not None:
        paging.assert_in_pool(lookup.highest, cache.pages)
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
def attend_new(sums, queries, cache, new, num_seen, first_key, writes_cache, BLOCK_NEW: tl.constexpr):
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
                entries = paging.page_entries(pages, slots, end)
                k_slots = paging.rows_in_pages(cache.k, pages.k_stride, pages, entries, slots, end)
                v_slots = paging.rows_in_pages(cache.v, pages.v_stride, pages, entries, slots, end)
                paging.assert_in_pool(entries, pages)
            store_tile(k_slots, k_kept, offs_new)
            store_tile(v_slots, v_kept, offs_new)
        sums = attend_tile(sums, queries, k, v, position + offs_new, num_cached + num_new, first_key)
    return sums


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, IS_FLOAT8: tl.constexpr):
    """Return the ``RunningSums`` before the first key."""
    if IS_FLOAT8:
        zeros = tl.zeros((BLOCK_M, BLOCK_D // 2), tl.float32)
        acc = eight_bits.Halves(even=zeros, odd=zeros)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return RunningSums(acc, row_max, row_sum=tl.zeros((BLOCK_M,), tl.float32))


@triton.jit
def whole_sums(sums, float8):
    """Return the running sums with acc (BLOCK_M, BLOCK_D) in the scale of the output."""
    if float8 is None:
        return sums
    else:
        return replace(sums, acc=pack_pairs(sums.acc.even, sums.acc.odd) * float8.v_scale)
