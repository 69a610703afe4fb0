# mypy: ignore-errors
"""The inputs of both kernels of a generation step: the rows of a block's queries, of the cache and of new tokens."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import Float8, HeadScales, head_scale, scaled, scaled_queries
from fused_rope_attn.generation.keys import KeyRows, NewKeys, StepQueries, load_new
from fused_rope_attn.generation.pages import BlockTable, sequence_pages
from fused_rope_attn.kernels.masks import Window
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation
from fused_rope_attn.kernels.softmax import LOG2E, finish_softmax
from fused_rope_attn.kernels.tiles import Origin, RowFormat, Rows, TensorView, head_rows, store_tile

# The parameters of both kernels that Triton must not specialise on.
STEP_NUMBERS = "window programs B HKV GROUP_SIZE NQ S num_pages position_limit".split()


@record
class CacheInputs:
    """The caches of a step, (B, HKV, S, D) or pools of pages.

    ALIGNMENT: tiles begin at multiples of so many keys. IS_ALIGNED: rows begin at multiples of 16 bytes, and columns
    are adjacent.
    """

    k: TensorView
    v: TensorView
    table: BlockTable  # its pointer is None without pages
    k_scales: HeadScales
    v_scales: HeadScales
    IS_ROTATED: tl.constexpr
    ALIGNMENT: tl.constexpr
    FLOAT8_DTYPE: tl.constexpr
    IS_ALIGNED: tl.constexpr


@record
class StepInputs:
    """The inputs of a step; None: the call does not have them."""

    q: TensorView
    k: TensorView  # new tokens; its pointer is None without any
    v: TensorView
    cache: CacheInputs
    tables: RotaryTables
    position_limit: tl.tensor
    q_norm: Norm | None
    k_norm: Norm | None
    scale: ScoreScale
    q_sign: tl.tensor
    starts_ptr: tl.tensor | None
    window: Window
    NQ: tl.tensor
    S: tl.tensor
    format: RowFormat


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

    o: TensorView
    lse_ptr: tl.tensor
    sinks_ptr: tl.tensor | None
    HQ: tl.tensor
    NQ: tl.tensor
    format: RowFormat


@triton.jit
def rows_of_queries(view, rows, format):
    """Return the ``Rows`` of a ``TensorView`` at ``QueryRows``, each with a pointer: they are not evenly spaced."""
    strides = view.strides
    pointers = view.ptr + rows.batch * strides[0] + rows.heads * strides[1] + rows.tokens.to(tl.int64) * strides[2]
    return Rows(pointers[:, None], 0, strides[3], rows.num_rows, first_row=None, format=format)


@triton.jit
def store_rows(outputs, rows, sums):
    """Write o and lse of ``QueryRows``, those that exist."""
    sink = None
    if outputs.sinks_ptr is not None:
        sink = tl.load(outputs.sinks_ptr + rows.heads, mask=rows.offs_m < rows.num_rows, other=0.0)
        sink = sink.to(tl.float32) * LOG2E
    o, lse = finish_softmax(sums.acc, sums.row_max, sums.row_sum, sink)
    o_rows = rows_of_queries(outputs.o, rows, outputs.format)
    store_tile(o_rows, o, rows.offs_m)
    exists = rows.offs_m < rows.num_rows
    lse_rows = outputs.lse_ptr + (rows.batch * outputs.HQ + rows.heads) * outputs.NQ + rows.tokens
    tl.store(lse_rows, lse, mask=exists)


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
    positions = tl.where(positions < inputs.S, positions, -1)
    q_rows = rows_of_queries(inputs.q, rows, inputs.format)
    rotation = head_rotation(inputs.tables, rows.batch, inputs.position_limit, inputs.q_norm)
    offset, sign, scale = positions - rows.offs_m, inputs.q_sign, inputs.scale
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
        rotation = head_rotation(inputs.tables, batch, keys.num_keys)
    origin = Origin(batch=batch, head=head_kv, row=0)
    pages = None
    if cache.table.ptr is not None:
        origin = Origin(batch=tl.full((), 0, tl.int64), head=head_kv, row=0)
        BY_PAGE: tl.constexpr = cache.ALIGNMENT > 1
        pages = sequence_pages(cache.table, batch, cache.k.strides[0], cache.v.strides[0], BY_PAGE)
    k = head_rows(cache.k, origin, keys.num_keys, inputs.format, first_row)
    v = head_rows(cache.v, origin, keys.num_keys, inputs.format, first_row)
    return KeyRows(k, v, rotation, pages, float8)


@triton.jit
def new_keys_of_head(inputs, keys, batch, head_kv):
    """Return the ``NewKeys`` of one key head of one sequence (both int64) for which the cache has rows."""
    origin = Origin(batch=batch, head=head_kv, row=0)
    num_new = tl.minimum(inputs.NQ, inputs.S - keys.num_keys)
    rotation = head_rotation(inputs.tables, batch, inputs.position_limit, inputs.k_norm)
    k = head_rows(inputs.k, origin, num_new, inputs.format)
    return NewKeys(k, head_rows(inputs.v, origin, num_new, inputs.format), rotation)
