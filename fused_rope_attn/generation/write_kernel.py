# mypy: ignore-errors
"""New keys and values into a cache, contiguous or in pages: rotated, quantised and scattered in one launch."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import HeadScales, head_scale, quantised
from fused_rope_attn.generation.keys import from_row, load_raw
from fused_rope_attn.generation.pages import (
    BlockTable,
    SequencePages,
    assert_in_pool,
    page_entries,
    rows_in_pages,
    sequence_pages,
)
from fused_rope_attn.generation.shares import cache_view
from fused_rope_attn.kernels.lengths import existing_keys, packed_tile, rows_of_sequence
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import (
    RotaryTables,
    head_rotation,
    load_angles,
    load_pairs,
    norm_and_rotate,
    pair_norm_weights,
    store_pairs,
)
from fused_rope_attn.kernels.schedule import let_next_launch_start
from fused_rope_attn.kernels.tiles import Origin, RowFormat, TensorView, head_rows, load_tile, store_tile


@record
class Slots:
    """``limit`` rows of a cache from row ``first`` (int64) of one sequence (int64) on.

    pages, entries: of the rows at ``positions`` (``page_entries``) if the cache is in pages, else None.
    """

    sequence: tl.tensor
    first: tl.tensor
    limit: tl.tensor
    positions: tl.tensor
    pages: SequencePages | None
    entries: tl.tensor | None
    format: RowFormat


@triton.jit
def slots_of_head(cache, head, slots):
    """Return the ``Rows`` of ``Slots`` in one head (int64) of a cache, a ``TensorView``."""
    if slots.pages is None:
        rows = head_rows(cache, Origin(batch=slots.sequence, head=head, row=0), slots.limit, slots.format)
        return from_row(rows, slots.first, slots.limit)
    else:
        page_0 = Origin(batch=tl.full((), 0, tl.int64), head=head, row=0)
        rows = head_rows(cache, page_0, slots.limit, slots.format)
        end = slots.first + slots.limit
        return rows_in_pages(rows, cache.strides[0], slots.pages, slots.entries, slots.positions, end)


@triton.jit(do_not_specialize=["N", "S", "HKV", "num_sequences", "num_pages", "position_limit", "tiles"])
def write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, block_table_ptr, cache_seqlens_ptr, new_lens_ptr,
    cu_seqlens_ptr, k_scale_ptr, v_scale_ptr, k_norm_ptr, sums_ptr, k_strides, v_strides, k_cache_strides,
    v_cache_strides, cos_strides, sin_strides, table_strides, k_scale_stride, v_scale_stride, norm_eps, norm_offset, N,
    S, HKV, num_sequences, num_pages, position_limit, tiles, D: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_FLOAT8: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T tokens of HEADS key heads. Grid: (head blocks * tiles * B,), packed sequences have one B.

    k and v (B, HKV, N, D); tokens from lens (B,) on do not exist; with cu_seqlens, packed sequences along N. Token i of
    sequence b is written to row seqlens[b] + i of the cache, if that is below S. Arguments that a call does not have
    are None: table, seqlens (0), lens (N), cu, the scales, the weights k_norm (D,) of a norm of k, and sums (B,) int32,
    which gets seqlens + N. The caches and their arguments are those of ``decode_kernel``.
    """
    let_next_launch_start(PDL)
    k_cache = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    head_blocks = tl.cdiv(HKV, HEADS)
    pid = tl.program_id(0)
    first_head = pid % head_blocks * HEADS
    tile = pid // head_blocks % tiles
    if cu_seqlens_ptr is None:
        sequence = pid // head_blocks // tiles
        batch = tl.cast(sequence, tl.int64)
        first_row = 0
        num_new = existing_keys(new_lens_ptr, sequence, N)
    else:
        sequence, first_row, num_new, tile = packed_tile(tile, cu_seqlens_ptr, None, num_sequences, N, 0, BLOCK_T)
        num_new = rows_of_sequence(sequence, num_sequences, num_new)
        sequence = tl.minimum(sequence, num_sequences - 1)
        batch = tl.full((), 0, tl.int64)
    start = tile * BLOCK_T
    cached = 0
    if cache_seqlens_ptr is not None:
        cached = existing_keys(cache_seqlens_ptr, sequence, S)
        if sums_ptr is not None:
            if tile + first_head == 0:
                tl.store(sums_ptr + sequence, cached + N)
    # The tokens of this tile for which the cache has rows.
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
    if block_table_ptr is not None:
        table = BlockTable(block_table_ptr, table_strides, PAGE_SIZE, num_pages)
        pages = sequence_pages(table, sequence64, k_cache.strides[0], v_cache.strides[0])
        entries = page_entries(pages, positions, position + limit)
        assert_in_pool(entries, pages)
    norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    rotation = head_rotation(tables, sequence64, position_limit, norm)
    if CACHE_IS_ROTATED:
        cos, sin = load_angles(rotation, positions, BLOCK_D)
        weights = None
        if norm is not None:
            weights = pair_norm_weights(norm, rotation, BLOCK_D)
    slots = Slots(sequence64, first64, limit, positions, pages, entries, row_format)
    k_scales, v_scales = HeadScales(k_scale_ptr, k_scale_stride), HeadScales(v_scale_ptr, v_scale_stride)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        origin = Origin(batch=batch, head=head64, row=first_row + start)
        k_rows = head_rows(TensorView(k_ptr, k_strides), origin, limit, row_format)
        v_rows = head_rows(TensorView(v_ptr, v_strides), origin, limit, row_format)
        k_slots, v_slots = slots_of_head(k_cache, head64, slots), slots_of_head(v_cache, head64, slots)
        v = load_tile(v_rows, offs, CHECK_ROWS=True)
        if IS_FLOAT8:
            v = quantised(v, head_scale(v_scales, head64))
        if CACHE_IS_ROTATED:
            first, second = load_pairs(k_rows, offs, rotation)
            first, second = norm_and_rotate(first, second, cos, sin, 1.0, rotation, weights)
            if IS_FLOAT8:
                k_scale = head_scale(k_scales, head64)
                first, second = quantised(first, k_scale), quantised(second, k_scale)
            store_pairs(k_slots, first, second, offs, rotation)
        else:
            k = load_raw(k_rows, offs, rotation)
            if IS_FLOAT8:
                k = quantised(k, head_scale(k_scales, head64))
            store_tile(k_slots, k, offs)
        store_tile(v_slots, v, offs)
