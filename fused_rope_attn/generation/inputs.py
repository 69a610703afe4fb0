# mypy: ignore-errors
"""The inputs of the generation step's kernels: rows of queries, of the cache and of new tokens, and shares of tiles.

The work of one sequence is cut into blocks: BLOCK_M query rows of one key head, with as many tiles of BLOCK_N cached
keys as the sequence has. The key tiles of all blocks, sequence by sequence, are dealt to the programs in equal shares
(stream-K, Osama et al. 2023). Every program reads the lengths of all sequences on the device, so that a long sequence
among short ones is spread over as many programs as it needs. If several programs share a block, they write their
partial sums to a workspace.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation import keys as running
from fused_rope_attn.generation.float8 import Float8, head_scale, scaled_queries
from fused_rope_attn.kernels import masks, rotation, sequences, softmax, tiles
from fused_rope_attn.kernels.records import record, replace


@record
class Caches:
    """The number of keys of every sequence in its cache, and their tiles. The kernel adds those with a default None."""

    seqlens_ptr: tl.tensor  # (B,) int32: keys before this call
    starts_ptr: tl.tensor | None  # (B,) int32: keys before this one do not exist
    B: tl.tensor = None
    NQ: tl.tensor = None  # queries of each sequence, and new keys
    S: tl.tensor = None  # rows of the cache
    left: tl.tensor | None = None  # number of keys before its own position that a query sees
    HAS_NEW_KEYS: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_B: tl.constexpr = 1  # sequences that are read together
    # Tiles begin at multiples of so many keys, if they are within a page or begin with one; else 1.
    ALIGNMENT: tl.constexpr = 1
    ONE_PASS: tl.constexpr = True  # there are no more than BLOCK_B sequences: no loop over them
    # The new tokens are in the cache, and tiles are counted from kv_starts, or from 0, by BLOCK_N.
    IN_ORDER: tl.constexpr = False


@record
class CachedKeys:
    """The keys in the cache before this call, or IN_ORDER after it, of a sequence or of each of a vector of them."""

    num_keys: tl.tensor
    q_offset: tl.tensor  # position of the first query
    first_key: tl.tensor  # the first one that a query sees
    first_tile: tl.tensor  # the first row of the first tile, at the first key or before it


@record
class CacheInputs:
    """The caches of a step, (B, HKV, S, D) or pools of pages (num_pages, HKV, PAGE_SIZE, D).

    IS_ALIGNED: rows begin at multiples of 16 bytes, and columns are adjacent. FLOAT8_DTYPE: of products with caches of
    float8_e4m3fn, in units of the scales; None for other caches.
    """

    k: tiles.TensorView
    v: tiles.TensorView
    table: running.BlockTable | None  # of pools
    k_scales: tiles.TensorView | None  # as ``head_scale`` takes them
    v_scales: tiles.TensorView | None
    IS_ROTATED: tl.constexpr
    FLOAT8_DTYPE: tl.constexpr
    IS_ALIGNED: tl.constexpr
    format: tiles.RowFormat


@record
class StepInputs:
    """The inputs of a step; None: the call does not have them. ``complete_step`` adds those with a default.

    q (B, HQ, NQ, D), new k and v (B, HKV, NQ, D); the norms of q and of the new k are in ``rotations``.
    """

    q: tiles.TensorView
    k: tiles.TensorView | None
    v: tiles.TensorView | None
    cache: CacheInputs
    lengths: Caches
    rotations: rotation.CallRotation
    scale: softmax.ScoreScale
    format: tiles.RowFormat
    position_limit: tl.tensor = None  # rows of the tables
    window: masks.Window = None


@triton.jit
def complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right):
    """Return the ``StepInputs`` of the host with the numbers for which kernels are not compiled again."""
    caches, cache = replace(inputs.lengths, B=B, NQ=NQ, S=S, left=window_left), complete_cache(inputs.cache, num_pages)
    window = masks.window_of((window_left, window_right))
    return replace(inputs, lengths=caches, cache=cache, position_limit=position_limit, window=window)


@triton.jit
def complete_cache(cache, num_pages):
    """Return ``CacheInputs`` of the host with the number of pages of the pools."""
    if cache.table is not None:
        cache = replace(cache, table=replace(cache.table, num_pages=num_pages))
    return cache


@record
class QueryRows:
    """Up to BLOCK_M query rows of one sequence, each with a query head and a token of its own."""

    batch: tl.tensor  # int64
    heads: tl.tensor  # (BLOCK_M,) int64
    tokens: tl.tensor  # (BLOCK_M,)
    offs_m: tl.tensor  # (BLOCK_M,), 0 to BLOCK_M
    num_rows: tl.tensor  # rows from this one on do not exist


@record
class StepOutputs:
    """The outputs o (B, HQ, NQ, D) and lse (B, HQ, NQ) float32, and the sinks (HQ,) or None."""

    o: tiles.TensorView
    lse_ptr: tl.tensor
    sinks_ptr: tl.tensor | None


@triton.jit
def query_rows(batch, head_kv, start, num_rows, GROUP_SIZE, BLOCK_M: tl.constexpr):
    """Return the ``QueryRows`` of a key head (int64) from row ``start`` on: row m belongs to token m // GROUP_SIZE."""
    offs_m = tl.arange(0, BLOCK_M)
    tokens = (start + offs_m) // GROUP_SIZE
    heads = head_kv * GROUP_SIZE + (start + offs_m) % GROUP_SIZE
    return QueryRows(batch, heads, tokens, offs_m, num_rows)


@triton.jit
def rows_of_queries(view, rows, format):
    """Return the ``Rows`` of a ``TensorView`` at ``QueryRows``, each with a pointer: they are not evenly spaced."""
    strides = view.strides
    pointers = view.ptr + rows.batch * strides[0] + rows.heads * strides[1] + rows.tokens.to(tl.int64) * strides[2]
    return tiles.Rows(pointers[:, None], 0, strides[3], rows.num_rows, first_row=None, format=format)


@triton.jit
def store_rows(outputs, rows, sums, HQ, NQ, format):
    """Write o and lse of ``QueryRows``, those that exist."""
    exists = rows.offs_m < rows.num_rows
    sink = None
    if outputs.sinks_ptr is not None:
        sink = tl.load(outputs.sinks_ptr + rows.heads, mask=exists, other=0.0).to(tl.float32) * softmax.LOG2E
    o, lse = softmax.finish_softmax(sums.acc, sums.row_max, sums.row_sum, sink)
    tiles.store_tile(rows_of_queries(outputs.o, rows, format), o, rows.offs_m)
    tl.store(outputs.lse_ptr + (rows.batch * HQ + rows.heads) * NQ + rows.tokens, lse, mask=exists)


@triton.jit
def float8_of(cache, head_kv):
    """Return the ``Float8`` of one key head of ``CacheInputs``."""
    k_scale, v_scale = head_scale(cache.k_scales, head_kv), head_scale(cache.v_scales, head_kv)
    return Float8(k_scale, v_scale, DTYPE=cache.FLOAT8_DTYPE, IS_ALIGNED=cache.IS_ALIGNED)


@triton.jit
def query_positions(keys, tokens, S, NOWHERE: tl.constexpr = -1):
    """Return the positions of queries of a sequence with these ``CachedKeys``.

    A query with a token past the end of the cache, which has S rows, sees nothing, and is at position NOWHERE.
    """
    positions = keys.q_offset + tokens
    return tl.where(positions < S, positions, NOWHERE)


@triton.jit
def load_step_queries(inputs, rows, keys, float8):
    """Load ``StepQueries`` of ``QueryRows``: normed, rotated, ready for products, IN_ORDER in pair order."""
    rotations, scale = inputs.rotations, inputs.scale
    READS_LENGTHS: tl.constexpr = 2 if rotations.tables.cos_ptr is None else 1
    NOWHERE: tl.constexpr = masks.NO_POSITION if READS_LENGTHS == 2 else -1
    positions = query_positions(keys, rows.tokens, inputs.lengths.S, NOWHERE)
    q_rows = rows_of_queries(inputs.q, rows, inputs.format)
    of_queries = rotation.head_rotation(rotations.tables, rows.batch, inputs.position_limit, rotations.q_norm)
    DTYPE: tl.constexpr = None if float8.DTYPE is None else tl.float32
    q = rotation.load_rotated(q_rows, rows.offs_m, of_queries, positions - rows.offs_m, rotations.q_sign, DTYPE=DTYPE)
    if inputs.cache.IS_ROTATED and not inputs.lengths.IN_ORDER:
        q = running.in_memory_order(q, of_queries, inputs.format.D)
    if float8.DTYPE is None:
        return running.StepQueries(q, None, positions, inputs.window, scale, READS_LENGTHS)
    else:
        q, q_scale = scaled_queries(q, float8.DTYPE)
        scale = softmax.scaled(scale, float8.k_scale)
        return running.StepQueries(q, q_scale, positions, inputs.window, scale, READS_LENGTHS)


@triton.jit
def cache_of_head(inputs, keys, batch, head_kv, first_row=None):
    """Return the ``KeyRows`` of one key head of one sequence (both int64); rows before ``first_row`` do not exist."""
    cache = inputs.cache
    of_keys = None
    if not cache.IS_ROTATED:
        of_keys = rotation.head_rotation(inputs.rotations.tables, batch, keys.num_keys)
    pages = None
    if cache.table is not None:
        BY_PAGE: tl.constexpr = inputs.lengths.ALIGNMENT > 1
        pages = running.sequence_pages(cache.table, batch, BY_PAGE)
    k, k_stride = rows_of_cache(cache.k, cache, batch, head_kv, keys.num_keys, first_row)
    v, v_stride = rows_of_cache(cache.v, cache, batch, head_kv, keys.num_keys, first_row)
    return running.KeyRows(k, v, of_keys, pages, k_stride, v_stride, float8_of(cache, head_kv))


@triton.jit
def rows_of_cache(view, cache, batch, head, num_rows, first_row=None):
    """Return the ``Rows`` of one head (int64) of keys or values of ``CacheInputs``, in pages those of page 0, and the
    elements from one page to the next."""
    if cache.table is not None:
        batch = tl.full((), 0, tl.int64)
    rows = tiles.head_rows(view, tiles.Origin(batch=batch, head=head, row=0), num_rows, cache.format, first_row)
    return rows, tiles.row_stride(view.strides[0], view.ptr, cache.format.ALIGNED)


@triton.jit
def new_keys_of_head(inputs, keys, batch, head_kv):
    """Return the ``NewKeys`` of one key head of one sequence (both int64) for which the cache has rows."""
    origin = tiles.Origin(batch=batch, head=head_kv, row=0)
    num_new = tl.minimum(inputs.lengths.NQ, inputs.lengths.S - keys.num_keys)
    of_keys = rotation.head_rotation(inputs.rotations.tables, batch, inputs.position_limit, inputs.rotations.k_norm)
    first_key = None
    if inputs.lengths.starts_ptr is not None:
        first_key = tl.load(inputs.lengths.starts_ptr + batch)
    k = tiles.head_rows(inputs.k, origin, num_new, inputs.format)
    return running.NewKeys(k, tiles.head_rows(inputs.v, origin, num_new, inputs.format), of_keys, first_key)


@triton.jit
def cached_keys(caches, sequence):
    """Return the ``CachedKeys`` of a sequence, or of each of a vector of sequences.

    New tokens follow the cached ones; without new ones the queries are aligned with the last keys.
    """
    num_keys = sequences.existing_keys(caches.seqlens_ptr, sequence, caches.S)
    q_offset = num_keys
    if not caches.HAS_NEW_KEYS:
        q_offset = num_keys - caches.NQ
    elif caches.IN_ORDER:
        num_keys = tl.minimum(caches.S, num_keys + caches.NQ)
    first = masks.first_key(caches.starts_ptr, sequence, q_offset, num_keys, caches.left)
    first_tile = first
    if caches.IN_ORDER:
        start = masks.first_key(caches.starts_ptr, sequence, q_offset, num_keys, None)
        first_tile = start + (first - start) // caches.BLOCK_N * caches.BLOCK_N
    elif caches.ALIGNMENT > 1:
        # Without a visible key there must be no tile, because its page would be looked up.
        first_tile = tl.where(first < num_keys, first // caches.ALIGNMENT * caches.ALIGNMENT, num_keys)
    return CachedKeys(num_keys=num_keys, q_offset=q_offset, first_key=first, first_tile=first_tile)


@triton.jit
def count_key_tiles(keys, BLOCK_N: tl.constexpr):
    """Return the number of tiles of cached keys that a block reads, at least 1, so that every block is in a share."""
    return tl.maximum(1, tl.cdiv(keys.num_keys - keys.first_tile, BLOCK_N))


@triton.jit
def key_tiles_of(caches, sequences):
    """Return ``count_key_tiles`` of each of a vector of sequences, 0 for those past B."""
    keys = cached_keys(caches, tl.minimum(sequences, caches.B - 1))
    return tl.where(sequences < caches.B, count_key_tiles(keys, caches.BLOCK_N), 0)


@triton.jit
def tiles_before(caches, sequence):
    """Count the key tiles of one block of every sequence: (of all sequences, of those before ``sequence``)."""
    total = 0
    before = 0
    for start in range(0, 1 if caches.ONE_PASS else caches.B, caches.BLOCK_B):
        sequences = start + tl.arange(0, caches.BLOCK_B)
        tiles = key_tiles_of(caches, sequences)
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(sequences < sequence, tiles, 0), 0)
    return total, before


@triton.jit
def sequence_of(caches, tile):
    """Return (sequence, key tiles before it) of a tile among those of one block of every sequence."""
    sequence = 0
    before = 0
    passed = 0
    for start in range(0, 1 if caches.ONE_PASS else caches.B, caches.BLOCK_B):
        tiles = key_tiles_of(caches, start + tl.arange(0, caches.BLOCK_B))
        is_past = (passed + tl.cumsum(tiles, 0) <= tile) & (tiles > 0)
        sequence += tl.sum(is_past.to(tl.int32), 0)
        before += tl.sum(tl.where(is_past, tiles, 0), 0)
        passed += tl.sum(tiles, 0)
    return sequence, before


@triton.jit
def share_of(total, num_programs):
    """Return the number of key tiles of each program: equal shares of at least one."""
    return tl.maximum(1, tl.cdiv(total, num_programs))


@triton.jit
def part_pointers(ptr, part, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """Return pointers to a numbered part of the workspace, float32: to its sums (BLOCK_M, D), and to its BLOCK_M
    maxima, which its BLOCK_M sums of weights follow.

    A program has parts of at most two shared blocks: part ``2 * program`` of one that began before its share, and the
    next part of one that begins in it and goes on. Parts of blocks that one program has alone follow all of these.
    """
    sums = ptr + tl.cast(part, tl.int64) * (BLOCK_M * (D + 2))
    return sums, sums + BLOCK_M * D
