# mypy: ignore-errors
"""What both kernels of a generation step read: the rows of a block's queries, of the cache and of the new tokens."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import Float8, head_scale, scaled, scaled_queries
from fused_rope_attn.generation.keys import KeyRows, NewKeys, Queries, load_new
from fused_rope_attn.generation.pages import sequence_pages
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import head_rotation, with_norm
from fused_rope_attn.kernels.softmax import LOG2E, finish_softmax
from fused_rope_attn.kernels.tiles import Origin, RowFormat, Rows, head_rows, store_tile


@record
class Inputs:
    """The inputs of a step as ``decode_kernel`` takes them, strides in elements; what a call has not is None."""

    q_ptr: tl.tensor
    q_strides: tl.tuple
    k_cache_ptr: tl.tensor
    v_cache_ptr: tl.tensor
    k_cache_strides: tl.tuple
    v_cache_strides: tl.tuple
    k_ptr: tl.tensor | None
    v_ptr: tl.tensor | None
    k_strides: tl.tuple | None
    v_strides: tl.tuple | None
    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    cos_strides: tl.tuple
    sin_strides: tl.tuple
    position_limit: tl.tensor
    starts_ptr: tl.tensor | None
    table_ptr: tl.tensor | None
    table_strides: tl.tuple | None
    num_pages: tl.tensor | None
    k_scale_ptr: tl.tensor | None
    v_scale_ptr: tl.tensor | None
    k_scale_stride: tl.tensor | None
    v_scale_stride: tl.tensor | None
    q_norm_ptr: tl.tensor | None
    k_norm_ptr: tl.tensor | None
    norm_eps: tl.tensor | None
    norm_offset: tl.tensor | None
    qk_scale: tl.tensor
    q_sign: tl.tensor
    cap_scale: tl.tensor | None
    left: tl.tensor | None
    right: tl.tensor | None
    NQ: tl.tensor
    S: tl.tensor
    format: RowFormat
    R: tl.constexpr
    INTERLEAVED: tl.constexpr
    CACHE_IS_ROTATED: tl.constexpr
    PRECISION: tl.constexpr
    PAGE_SIZE: tl.constexpr
    ALIGNMENT: tl.constexpr
    FLOAT8_DTYPE: tl.constexpr
    IS_ALIGNED: tl.constexpr


@record
class QueryRows:
    """Up to BLOCK_M query rows of one sequence, each with a query head and a token of its own."""

    batch: tl.tensor  # int64
    heads: tl.tensor  # (BLOCK_M,) int64
    tokens: tl.tensor  # (BLOCK_M,)
    offs_m: tl.tensor  # (BLOCK_M,), 0 to BLOCK_M
    num_rows: tl.tensor  # rows from this one on do not exist


@record
class Outputs:
    """What ``store_rows`` writes and reads: o (B, HQ, NQ, D), lse (B, HQ, NQ) float32, sinks (HQ,) or None."""

    o_ptr: tl.tensor
    o_strides: tl.tuple
    lse_ptr: tl.tensor
    sinks_ptr: tl.tensor | None
    HQ: tl.tensor
    NQ: tl.tensor
    format: RowFormat


@triton.jit
def rows_of_queries(ptr, strides, rows, format):
    """``Rows`` of a (B, HQ, NQ, D) tensor at ``QueryRows``: they are not evenly spaced, each brings its pointer."""
    pointers = ptr + rows.batch * strides[0] + rows.heads * strides[1] + rows.tokens.to(tl.int64) * strides[2]
    return Rows(
        ptr=pointers[:, None], stride_row=0, stride_column=strides[3], num_rows=rows.num_rows, first_row=None,
        format=format,
    )  # fmt: skip


@triton.jit
def store_rows(outputs, rows, sums):
    """Write o and lse of ``QueryRows``, those that exist."""
    sink = None
    if outputs.sinks_ptr is not None:
        sink = tl.load(outputs.sinks_ptr + rows.heads, mask=rows.offs_m < rows.num_rows, other=0.0)
        sink = sink.to(tl.float32) * LOG2E
    o, lse = finish_softmax(sums.acc, sums.row_max, sums.row_sum, sink)
    o_rows = rows_of_queries(outputs.o_ptr, outputs.o_strides, rows, outputs.format)
    store_tile(o_rows, o, rows.offs_m)
    exists = rows.offs_m < rows.num_rows
    lse_rows = outputs.lse_ptr + (rows.batch * outputs.HQ + rows.heads) * outputs.NQ + rows.tokens
    tl.store(lse_rows, lse, mask=exists)


@triton.jit
def rotation_of(inputs, batch, num_positions):
    """``Rotation`` of one sequence (int64), without a norm."""
    return head_rotation(
        inputs.cos_ptr, inputs.sin_ptr, inputs.cos_strides, inputs.sin_strides, batch, num_positions, inputs.R,
        inputs.INTERLEAVED,
    )  # fmt: skip


@triton.jit
def float8_of(inputs, head_kv):
    """``Float8`` of one key head."""
    return Float8(
        k_scale=head_scale(inputs.k_scale_ptr, inputs.k_scale_stride, head_kv),
        v_scale=head_scale(inputs.v_scale_ptr, inputs.v_scale_stride, head_kv),
        DTYPE=inputs.FLOAT8_DTYPE,
        IS_ALIGNED=inputs.IS_ALIGNED,
    )


@triton.jit
def load_queries(inputs, rows, keys, float8):
    """``Queries`` of ``QueryRows``: normed, rotated, in the units of products. keys: ``CachedKeys`` of the sequence."""
    # A query whose token finds no room in the cache sees nothing, like one before position 0.
    positions = keys.q_offset + rows.tokens
    positions = tl.where(positions < inputs.S, positions, -1)
    q_rows = rows_of_queries(inputs.q_ptr, inputs.q_strides, rows, inputs.format)
    rotation = rotation_of(inputs, rows.batch, inputs.position_limit)
    rotation = with_norm(rotation, inputs.q_norm_ptr, inputs.norm_eps, inputs.norm_offset, inputs.format.D)
    offset = positions - rows.offs_m
    if float8 is None:
        return Queries(
            q=load_new(q_rows, rows.offs_m, rotation, offset, inputs.q_sign, inputs.CACHE_IS_ROTATED),
            q_scale=None, positions=positions, left=inputs.left, right=inputs.right,
            scale=ScoreScale(qk_scale=inputs.qk_scale, cap_scale=inputs.cap_scale, PRECISION=inputs.PRECISION),
        )  # fmt: skip
    else:
        wide = load_new(q_rows, rows.offs_m, rotation, offset, inputs.q_sign, inputs.CACHE_IS_ROTATED, DTYPE=tl.float32)
        q, q_scale = scaled_queries(wide, inputs.FLOAT8_DTYPE)
        return Queries(
            q=q, q_scale=q_scale, positions=positions, left=inputs.left, right=inputs.right,
            scale=scaled(inputs.qk_scale, inputs.cap_scale, float8.k_scale, inputs.PRECISION),
        )  # fmt: skip


@triton.jit
def cache_of_head(inputs, keys, batch, head_kv, first_row, float8):
    """``KeyRows`` of one key head of one sequence (both int64); rows before ``first_row`` do not exist, or None."""
    rotation = None
    if not inputs.CACHE_IS_ROTATED:
        rotation = rotation_of(inputs, batch, keys.num_keys)
    origin = Origin(batch=batch, head=head_kv, row=0)
    pages = None
    if inputs.table_ptr is not None:
        origin = Origin(batch=tl.full((), 0, tl.int64), head=head_kv, row=0)
        pages = sequence_pages(
            inputs.table_ptr, inputs.table_strides, batch, inputs.num_pages, inputs.k_cache_strides[0],
            inputs.v_cache_strides[0], inputs.PAGE_SIZE, BY_PAGE=inputs.ALIGNMENT > 1,
        )  # fmt: skip
    return KeyRows(
        k=head_rows(inputs.k_cache_ptr, inputs.k_cache_strides, origin, keys.num_keys, inputs.format, first_row),
        v=head_rows(inputs.v_cache_ptr, inputs.v_cache_strides, origin, keys.num_keys, inputs.format, first_row),
        rotation=rotation,
        pages=pages,
        float8=float8,
    )


@triton.jit
def new_keys_of_head(inputs, keys, batch, head_kv):
    """``NewKeys`` of one key head of one sequence (both int64), as many as the cache has room for."""
    origin = Origin(batch=batch, head=head_kv, row=0)
    num_new = tl.minimum(inputs.NQ, inputs.S - keys.num_keys)
    rotation = rotation_of(inputs, batch, inputs.position_limit)
    return NewKeys(
        k=head_rows(inputs.k_ptr, inputs.k_strides, origin, num_new, inputs.format),
        v=head_rows(inputs.v_ptr, inputs.v_strides, origin, num_new, inputs.format),
        rotation=with_norm(rotation, inputs.k_norm_ptr, inputs.norm_eps, inputs.norm_offset, inputs.format.D),
    )
