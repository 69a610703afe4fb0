# mypy: ignore-errors
"""The inputs of both kernels of a generation step: the rows of a block's queries, of the cache and of new tokens."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import Float8, HeadScales, head_scale, scaled, scaled_queries
from fused_rope_attn.generation.keys import KeyRows, NewKeys, StepQueries, load_new
from fused_rope_attn.generation.pages import BlockTable, sequence_pages
from fused_rope_attn.generation.shares import Caches
from fused_rope_attn.kernels import masks, tiles
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import CallRotation, head_rotation
from fused_rope_attn.kernels.softmax import LOG2E, ScoreScale, finish_softmax


@record
class CacheInputs:
    """The caches of a step, (B, HKV, S, D) or pools of pages (num_pages, HKV, PAGE_SIZE, D).

    IS_ALIGNED: rows begin at multiples of 16 bytes, and columns are adjacent. FLOAT8_DTYPE: of products with caches of
    float8_e4m3fn, in units of the scales; None for other caches.
    """

    k: tiles.TensorView
    v: tiles.TensorView
    table: BlockTable | None  # of pools
    k_scales: HeadScales
    v_scales: HeadScales
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
    rotations: CallRotation
    scale: ScoreScale
    format: tiles.RowFormat
    position_limit: tl.tensor = None  # rows of the tables
    window: masks.Window = None


@triton.jit
def complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right):
    """Return the ``StepInputs`` of the host with the numbers for which kernels are not compiled again."""
    lengths, cache = replace(inputs.lengths, B=B, NQ=NQ, S=S, left=window_left), complete_cache(inputs.cache, num_pages)
    window = masks.window_of((window_left, window_right))
    return replace(inputs, lengths=lengths, cache=cache, position_limit=position_limit, window=window)


@triton.jit
def complete_cache(cache, num_pages):
    """Return ``CacheInputs`` of the host with the number of pages of the pools."""
    if cache.table is not None:
        cache = replace(cache, table=replace(cache.table, num_pages=num_pages))
    return cache


@triton.jit
def pages_of(cache, sequence, BY_PAGE: tl.constexpr = False):
    """Return the ``SequencePages`` of one sequence (int64) of ``CacheInputs`` with a block table."""
    k_stride = tiles.row_stride(cache.k.strides[0], cache.k.ptr, cache.format.ALIGNED)
    v_stride = tiles.row_stride(cache.v.strides[0], cache.v.ptr, cache.format.ALIGNED)
    return sequence_pages(cache.table, sequence, k_stride, v_stride, BY_PAGE)


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
        sink = tl.load(outputs.sinks_ptr + rows.heads, mask=exists, other=0.0).to(tl.float32) * LOG2E
    o, lse = finish_softmax(sums.acc, sums.row_max, sums.row_sum, sink)
    tiles.store_tile(rows_of_queries(outputs.o, rows, format), o, rows.offs_m)
    tl.store(outputs.lse_ptr + (rows.batch * HQ + rows.heads) * NQ + rows.tokens, lse, mask=exists)


@triton.jit
def float8_of(cache, head_kv):
    """Return the ``Float8`` of one key head of ``CacheInputs``."""
    k_scale, v_scale = head_scale(cache.k_scales, head_kv), head_scale(cache.v_scales, head_kv)
    return Float8(k_scale, v_scale, DTYPE=cache.FLOAT8_DTYPE, IS_ALIGNED=cache.IS_ALIGNED)


@triton.jit
def load_queries(inputs, rows, keys, float8):
    """Load ``StepQueries`` of ``QueryRows``: normed, rotated, ready for products. keys: ``CachedKeys``."""
    # A query with a token past the end of the cache sees nothing, like one before position 0.
    positions = keys.q_offset + rows.tokens
    positions = tl.where(positions < inputs.lengths.S, positions, -1)
    q_rows = rows_of_queries(inputs.q, rows, inputs.format)
    rotations, scale = inputs.rotations, inputs.scale
    rotation = head_rotation(rotations.tables, rows.batch, inputs.position_limit, rotations.q_norm)
    offset, sign = positions - rows.offs_m, rotations.q_sign
    IS_ROTATED: tl.constexpr = inputs.cache.IS_ROTATED
    if float8 is None:
        q = load_new(q_rows, rows.offs_m, rotation, offset, sign, IS_ROTATED)
        return StepQueries(q, None, positions, inputs.window, scale)
    else:
        wide = load_new(q_rows, rows.offs_m, rotation, offset, sign, IS_ROTATED, DTYPE=tl.float32)
        q, q_scale = scaled_queries(wide, inputs.cache.FLOAT8_DTYPE)
        return StepQueries(q, q_scale, positions, inputs.window, scaled(scale, float8.k_scale))


@triton.jit
def cache_of_head(inputs, keys, batch, head_kv, first_row, float8):
    """Return the ``KeyRows`` of one key head of one sequence (both int64); rows before ``first_row`` do not exist."""
    cache = inputs.cache
    rotation = None
    if not cache.IS_ROTATED:
        rotation = head_rotation(inputs.rotations.tables, batch, keys.num_keys)
    origin = tiles.Origin(batch=batch, head=head_kv, row=0)
    pages = None
    if cache.table is not None:
        origin = tiles.Origin(batch=tl.full((), 0, tl.int64), head=head_kv, row=0)
        BY_PAGE: tl.constexpr = inputs.lengths.ALIGNMENT > 1
        pages = pages_of(cache, batch, BY_PAGE)
    k = tiles.head_rows(cache.k, origin, keys.num_keys, cache.format, first_row)
    v = tiles.head_rows(cache.v, origin, keys.num_keys, cache.format, first_row)
    return KeyRows(k, v, rotation, pages, float8)


@triton.jit
def new_keys_of_head(inputs, keys, batch, head_kv):
    """Return the ``NewKeys`` of one key head of one sequence (both int64) for which the cache has rows."""
    origin = tiles.Origin(batch=batch, head=head_kv, row=0)
    num_new = tl.minimum(inputs.lengths.NQ, inputs.lengths.S - keys.num_keys)
    rotation = head_rotation(inputs.rotations.tables, batch, inputs.position_limit, inputs.rotations.k_norm)
    k = tiles.head_rows(inputs.k, origin, num_new, inputs.format)
    return NewKeys(k, tiles.head_rows(inputs.v, origin, num_new, inputs.format), rotation)
