"""What a block of the generation step does with keys: cached and new ones folded into the running softmax, a tile at a
time, and the new ones appended to the cache."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import load_rotated_quantised, quantised
from fused_rope_attn.generation.pages import Pages, assert_in_pool, page_entries, rows_in_pages
from fused_rope_attn.kernels.masks import Mask, visible
from fused_rope_attn.kernels.products import ScoreScale, score_product
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, load_rotated, load_rotated_columns
from fused_rope_attn.kernels.softmax import online_softmax
from fused_rope_attn.kernels.tiles import Rows, load_tile, rows_from, store_tile


@record
class Queries:
    """The query rows of one block as products take them."""

    q: tl.tensor  # (BLOCK_M, BLOCK_D), rotated
    positions: tl.tensor  # (BLOCK_M,); at a negative position a query sees nothing
    left: tl.tensor | None  # how many keys before and behind its own position a query sees
    right: tl.tensor | None
    IS_CAUSAL: tl.constexpr
    scale: ScoreScale


@record
class KeyRows:
    """Keys and values of one key head of one sequence, and the tables that rotate the keys; None: they are rotated.

    In pages, ``k`` and ``v`` are the head's rows in page 0 of the pool.
    """

    k: Rows
    v: Rows
    rotation: Rotation | None
    pages: Pages | None


@record
class NewKeys:
    """New tokens of one key head of one sequence, which are quantised by ``k_scale`` and ``v_scale`` where
    IS_FLOAT8 says that the cache is."""

    k: Rows
    v: Rows
    rotation: Rotation
    k_scale: tl.tensor
    v_scale: tl.tensor
    IS_FLOAT8: tl.constexpr


@record
class RunningSums:
    """The running softmax over the keys so far, in base 2: acc (BLOCK_M, BLOCK_D), the others (BLOCK_M,), float32."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor


@triton.jit
def load_new(rows, offs, rotation, position_offset, sign, CACHE_IS_ROTATED: tl.constexpr, DTYPE: tl.constexpr = None):
    """Rows of q or of new keys, rotated and times ``sign``: their columns in the order that cached keys come in.

    Cached keys that are rotated already are used in the order of memory, raw ones come out in pair order. DTYPE as in
    ``load_rotated``.
    """
    if CACHE_IS_ROTATED:
        return load_rotated_columns(rows, offs, rotation, position_offset, sign, DTYPE)
    else:
        return load_rotated(rows, offs, rotation, position_offset, sign, DTYPE=DTYPE)


@triton.jit
def attend_tile(sums, queries, k, v, positions_k, num_keys, first_key):
    """Fold one tile of keys and values into the running sums; keys exist in [first_key, num_keys), first_key or None
    for no such bound."""
    mask = Mask(
        num_keys=num_keys, first_key=first_key, left=queries.left, right=queries.right, IS_CAUSAL=queries.IS_CAUSAL,
        READS_LENGTHS=True,
    )  # fmt: skip
    scores = score_product(queries.q, k, queries.scale)
    sees = visible(mask, queries.positions[:, None], positions_k[None, :])
    scores = tl.where(sees, scores, float("-inf"))
    p, correction, row_max, row_sum = online_softmax(
        scores, sums.row_max, sums.row_sum, queries.scale.qk_scale, HAS_EMPTY_ROWS=True
    )
    acc = tl.dot(p.to(v.dtype), v, sums.acc * correction[:, None], input_precision=queries.scale.PRECISION)
    return RunningSums(acc=acc, row_max=row_max, row_sum=row_sum)


@triton.jit
def attend_cached(sums, queries, cache, first, last, offs_n):
    """Fold the cached keys [first, last) into the running sums, a tile at a time; offs_n: 0 to BLOCK_N."""
    dtype: tl.constexpr = queries.q.dtype
    if cache.pages is not None:
        entries = page_entries(cache.pages, first + offs_n, last)
        highest = entries
    for start_n in range(first, last, offs_n.shape[0]):
        if cache.pages is None:
            k_rows = rows_from(cache.k, start_n)
        else:
            # The next tile's, so that no load of keys waits for them.
            following = page_entries(cache.pages, start_n + offs_n.shape[0] + offs_n, last)
            k_rows = rows_in_pages(cache.k, cache.pages.k_stride, cache.pages, entries, start_n + offs_n, last)
        if cache.rotation is None:
            k = load_tile(k_rows, offs_n, CHECK_ROWS=True).to(dtype)
        else:
            k = load_rotated(k_rows, offs_n, cache.rotation, start_n, DTYPE=dtype)
        if cache.pages is None:
            v_rows = rows_from(cache.v, start_n)
        else:
            v_rows = rows_in_pages(cache.v, cache.pages.v_stride, cache.pages, entries, start_n + offs_n, last)
            highest = tl.maximum(highest, following)
            entries = following
        v = load_tile(v_rows, offs_n, CHECK_ROWS=True).to(dtype)
        sums = attend_tile(sums, queries, k, v, start_n + offs_n, cache.k.num_rows, None)
    if cache.pages is not None:
        assert_in_pool(highest, cache.pages)
    return sums


@triton.jit
def rows_at(rows, start, num_rows):
    """The ``num_rows`` rows from row ``start`` (int64) on; in a cache they may lie behind the last key."""
    return Rows(
        ptr=rows.ptr + start * rows.stride_row, stride_row=rows.stride_row, stride_column=rows.stride_column,
        num_rows=num_rows, first_row=None, format=rows.format,
    )  # fmt: skip


@triton.jit
def load_new_keys(new, start, limit, offs, position, CACHE_IS_ROTATED: tl.constexpr, DTYPE: tl.constexpr):
    """The ``limit`` new keys from number ``start`` (int64) on: (as products take them, as the cache keeps them).

    What a query sees of a float8 cache's new keys is what the cache keeps of them.
    """
    rows = rows_at(new.k, start, limit)
    if new.IS_FLOAT8:
        if CACHE_IS_ROTATED:
            k = load_new(rows, offs, new.rotation, position, 1.0, CACHE_IS_ROTATED=True, DTYPE=tl.float32)
            k_kept = quantised(k, new.k_scale)
            return k_kept.to(DTYPE), k_kept
        else:
            k_kept = quantised(load_tile(rows, offs, CHECK_ROWS=True), new.k_scale)
            return load_rotated_quantised(rows, offs, new.rotation, position, new.k_scale, DTYPE), k_kept
    else:
        k = load_new(rows, offs, new.rotation, position, 1.0, CACHE_IS_ROTATED=CACHE_IS_ROTATED)
        k_kept = k
        if not CACHE_IS_ROTATED:
            k_kept = load_tile(rows, offs, CHECK_ROWS=True)
        return k, k_kept


@triton.jit
def attend_new(sums, queries, cache, new, first_key, writes_cache, BLOCK_NEW: tl.constexpr):
    """Fold the new keys into the running sums, and append them to the cache where ``writes_cache``."""
    num_cached = cache.k.num_rows
    num_new = new.k.num_rows
    for start_n in tl.range(0, num_new, BLOCK_NEW, num_stages=1):
        offs_new = tl.arange(0, BLOCK_NEW)
        start64 = tl.cast(start_n, tl.int64)
        position = num_cached + start_n
        slot64 = tl.cast(position, tl.int64)
        limit = num_new - start_n
        k, k_kept = load_new_keys(
            new, start64, limit, offs_new, position, CACHE_IS_ROTATED=cache.rotation is None, DTYPE=queries.q.dtype
        )
        v = load_tile(rows_at(new.v, start64, limit), offs_new, CHECK_ROWS=True)
        v_kept = v
        if new.IS_FLOAT8:
            v_kept = quantised(v, new.v_scale)
            v = v_kept.to(queries.q.dtype)
        if writes_cache:
            if cache.pages is None:
                k_slots = rows_at(cache.k, slot64, limit)
                v_slots = rows_at(cache.v, slot64, limit)
            else:
                pages, slots, end = cache.pages, position + offs_new, num_cached + num_new
                entries = page_entries(pages, slots, end)
                k_slots = rows_in_pages(cache.k, pages.k_stride, pages, entries, slots, end)
                v_slots = rows_in_pages(cache.v, pages.v_stride, pages, entries, slots, end)
                assert_in_pool(entries, pages)
            store_tile(k_slots, k_kept, offs_new)
            store_tile(v_slots, v_kept, offs_new)
        sums = attend_tile(sums, queries, k, v, position + offs_new, num_cached + num_new, first_key)
    return sums


@triton.jit
def in_units_of(sums, v_scale):
    """The running sums of values that are ``v_scale`` times what was read."""
    return RunningSums(acc=sums.acc * v_scale, row_max=sums.row_max, row_sum=sums.row_sum)
