# mypy: ignore-errors
"""New keys and values into a cache, contiguous or in pages: rotated, quantised and scattered in one launch."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import head_scale, quantised
from fused_rope_attn.generation.keys import load_raw, rows_at
from fused_rope_attn.generation.pages import assert_in_pool, page_entries, rows_in_pages, sequence_pages
from fused_rope_attn.generation.shares import in_elements
from fused_rope_attn.kernels.lengths import existing_keys, packed_tile, rows_of_sequence
from fused_rope_attn.kernels.rotation import (
    head_rotation,
    load_angles,
    load_pairs,
    norm_and_rotate,
    pair_norm_weights,
    store_pairs,
    with_norm,
)
from fused_rope_attn.kernels.tiles import Origin, RowFormat, head_rows, load_tile, store_tile


@triton.jit
def slots_of_head(cache_ptr, strides, head, batch, first, limit, pages, page_stride, entries, positions, row_format):
    """``Rows`` of a cache for ``limit`` new tokens of one head, of which the first goes to row ``first`` (int64)."""
    if pages is None:
        rows = head_rows(cache_ptr, strides, Origin(batch=batch, head=head, row=0), limit, row_format)
        return rows_at(rows, first, limit)
    else:
        page_0 = Origin(batch=tl.full((), 0, tl.int64), head=head, row=0)
        rows = head_rows(cache_ptr, strides, page_0, limit, row_format)
        return rows_in_pages(rows, page_stride, pages, entries, positions, first + limit)


@triton.jit(do_not_specialize=["N", "S", "HKV", "num_sequences", "num_pages", "position_limit", "tiles"])
def write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, table_ptr, seqlens_ptr, lens_ptr, cu_ptr,
                 k_scale_ptr, v_scale_ptr, k_norm_ptr, sums_ptr, k_strides, v_strides, k_cache_strides,
                 v_cache_strides, cos_strides, sin_strides, table_strides, k_scale_stride, v_scale_stride, norm_eps,
                 norm_offset, N, S, HKV, num_sequences, num_pages, position_limit, tiles, D: tl.constexpr,
                 R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
                 INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr, STRIDE_UNIT: tl.constexpr,
                 PAGE_SIZE: tl.constexpr, IS_FLOAT8: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """BLOCK_T tokens of HEADS key heads. Grid: (head blocks * tiles * B,), packed sequences have one B.

    k and v (B, HKV, N, D), of which tokens from lens (B,) on do not exist; with cu_seqlens, packed sequences along N.
    Token i of sequence b goes to row seqlens[b] + i of the cache, where that is below S. What a call has not is None:
    table, seqlens (0), lens (N), cu, the scales, the weights k_norm (D,) of a norm of k, and sums (B,)
    int32, which gets seqlens + N. The caches and their arguments are those of ``decode_kernel``.
    """
    k_cache_strides = in_elements(k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache_strides = in_elements(v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    head_blocks = tl.cdiv(HKV, HEADS)
    pid = tl.program_id(0)
    first_head = pid % head_blocks * HEADS
    tile = pid // head_blocks % tiles
    if cu_ptr is None:
        sequence = pid // head_blocks // tiles
        batch = tl.cast(sequence, tl.int64)
        first_row = 0
        num_new = existing_keys(lens_ptr, sequence, N)
    else:
        sequence, first_row, num_new, tile = packed_tile(tile, cu_ptr, None, num_sequences, N, 0, BLOCK_T)
        num_new = rows_of_sequence(sequence, num_sequences, num_new)
        sequence = tl.minimum(sequence, num_sequences - 1)
        batch = tl.full((), 0, tl.int64)
    start = tile * BLOCK_T
    cached = 0
    if seqlens_ptr is not None:
        cached = existing_keys(seqlens_ptr, sequence, S)
        if sums_ptr is not None:
            if tile + first_head == 0:
                tl.store(sums_ptr + sequence, cached + N)
    # Tokens of this tile, and those of them that find a row.
    limit = tl.minimum(num_new, S - cached) - start
    if limit <= 0:
        return
    sequence64 = tl.cast(sequence, tl.int64)
    offs = tl.arange(0, BLOCK_T)
    position = cached + start
    positions = position + offs
    first64 = tl.cast(position, tl.int64)
    pages = None
    entries = None
    k_page_stride = None
    v_page_stride = None
    if table_ptr is not None:
        k_page_stride = k_cache_strides[0]
        v_page_stride = v_cache_strides[0]
        pages = sequence_pages(table_ptr, table_strides, sequence64, num_pages, k_page_stride, v_page_stride, PAGE_SIZE)
        entries = page_entries(pages, positions, position + limit)
        assert_in_pool(entries, pages)
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, sequence64, position_limit, R, INTERLEAVED)
    rotation = with_norm(rotation, k_norm_ptr, norm_eps, norm_offset, D)
    if CACHE_IS_ROTATED:
        cos, sin = load_angles(rotation, positions, BLOCK_D, CHECK_POSITIONS=True)
        weights = None
        if k_norm_ptr is not None:
            weights = pair_norm_weights(rotation.norm, R, INTERLEAVED, BLOCK_D)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        origin = Origin(batch=batch, head=head64, row=first_row + start)
        k_rows = head_rows(k_ptr, k_strides, origin, limit, row_format)
        v_rows = head_rows(v_ptr, v_strides, origin, limit, row_format)
        k_slots = slots_of_head(
            k_cache_ptr, k_cache_strides, head64, sequence64, first64, limit, pages, k_page_stride, entries,
            positions, row_format,
        )  # fmt: skip
        v_slots = slots_of_head(
            v_cache_ptr, v_cache_strides, head64, sequence64, first64, limit, pages, v_page_stride, entries,
            positions, row_format,
        )  # fmt: skip
        v = load_tile(v_rows, offs, CHECK_ROWS=True)
        if IS_FLOAT8:
            v = quantised(v, head_scale(v_scale_ptr, v_scale_stride, head64))
        if CACHE_IS_ROTATED:
            first, second = load_pairs(k_rows, offs, rotation, CHECK_ROWS=True)
            first, second = norm_and_rotate(first, second, cos, sin, 1.0, rotation, weights)
            if IS_FLOAT8:
                k_scale = head_scale(k_scale_ptr, k_scale_stride, head64)
                first, second = quantised(first, k_scale), quantised(second, k_scale)
            store_pairs(k_slots, first, second, offs, rotation)
        else:
            k = load_raw(k_rows, offs, rotation)
            if IS_FLOAT8:
                k = quantised(k, head_scale(k_scale_ptr, k_scale_stride, head64))
            store_tile(k_slots, k, offs)
        store_tile(v_slots, v, offs)
