# mypy: ignore-errors
"""Kernels around the attention to a chunk of a prompt: one gathers the visible cached keys and values in contiguous
memory, in pair order, one clears rows of the output for tokens past the end of the cache."""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import HeadScales, head_scale
from fused_rope_attn.generation.pages import BlockTable, assert_in_pool, page_entries, sequence_pages
from fused_rope_attn.generation.shares import cache_view
from fused_rope_attn.generation.write_kernel import Slots, slots_of_head
from fused_rope_attn.kernels.lengths import existing_keys
from fused_rope_attn.kernels.masks import first_key
from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation, load_angles, load_pairs, pack_pairs, rotate
from fused_rope_attn.kernels.schedule import let_next_launch_start
from fused_rope_attn.kernels.tiles import Origin, RowFormat, TensorView, head_rows, load_tile, store_tile


@triton.jit(do_not_specialize=["left", "NQ", "NK", "S", "HKV", "num_pages", "position_limit", "tiles"])
def gather_kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, block_table_ptr, lens_ptr, kv_starts_ptr, k_scale_ptr,
    v_scale_ptr, counter_ptr, k_cache_strides, v_cache_strides, k_strides, v_strides, cos_strides, sin_strides,
    table_strides, k_scale_stride, v_scale_stride, left, NQ, NK, S, HKV, num_pages, position_limit, tiles,
    D: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr, STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_FLOAT8: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather BLOCK_T cached rows of HEADS key heads of one sequence. Grid: (head blocks * tiles * B,).

    k and v (B, HKV, S, D) get the rows that a query sees: keys rotated and in pair order, values; v None: only keys.
    lens (B,) int32: keys of each sequence, NQ new ones among them, of NK at most; the cache has no rows from S on. The
    word at ``counter`` becomes zero. The caches and their arguments are those of ``decode_kernel``.
    """
    let_next_launch_start(PDL)
    k_cache = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(counter_ptr, 0)
    head_blocks = tl.cdiv(HKV, HEADS)
    first_head = pid % head_blocks * HEADS
    start = pid // head_blocks % tiles * BLOCK_T
    sequence = pid // head_blocks // tiles
    sequence64 = tl.cast(sequence, tl.int64)
    num_keys = existing_keys(lens_ptr, sequence, NK)
    first_seen = first_key(kv_starts_ptr, sequence, num_keys - NQ, num_keys, left)
    end = tl.minimum(num_keys, S)
    if (start >= end) | (start + BLOCK_T <= first_seen):
        return
    offs = tl.arange(0, BLOCK_T)
    # Rows before the first visible key may have no page: read the first visible key in their place.
    positions = tl.maximum(start + offs, first_seen)
    limit = end - start
    start64 = tl.cast(start, tl.int64)
    pages = None
    entries = None
    if block_table_ptr is not None:
        table = BlockTable(block_table_ptr, table_strides, PAGE_SIZE, num_pages)
        pages = sequence_pages(table, sequence64, k_cache.strides[0], v_cache.strides[0])
        entries = page_entries(pages, positions, end)
        assert_in_pool(entries, pages)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    rotation = head_rotation(tables, sequence64, position_limit)
    if not CACHE_IS_ROTATED:
        cos, sin = load_angles(rotation, start + offs, BLOCK_D)
    slots = Slots(sequence64, start64, limit, positions, pages, entries, row_format)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        first, second = load_pairs(slots_of_head(k_cache, head64, slots), offs, rotation)
        if IS_FLOAT8:
            k_scale = head_scale(HeadScales(k_scale_ptr, k_scale_stride), head64)
            first, second = first * k_scale, second * k_scale
        if not CACHE_IS_ROTATED:
            first, second = rotate(first, second, cos, sin, CONJUGATE=False)
        origin = Origin(batch=sequence64, head=head64, row=start)
        k_rows = head_rows(TensorView(k_ptr, k_strides), origin, limit, row_format)
        store_tile(k_rows, pack_pairs(first, second), offs)
        if v_ptr is not None:
            v = load_tile(slots_of_head(v_cache, head64, slots), offs, CHECK_ROWS=True)
            if IS_FLOAT8:
                v = v.to(tl.float32) * head_scale(HeadScales(v_scale_ptr, v_scale_stride), head64)
            store_tile(head_rows(TensorView(v_ptr, v_strides), origin, limit, row_format), v, offs)


@triton.jit(do_not_specialize=["NQ", "S", "HQ"])
def clear_kernel(lens_ptr, o_ptr, lse_ptr, o_strides, NQ, S, HQ, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Clear rows of o (B, HQ, NQ, D) and lse (B, HQ, NQ), 0 and -inf, of tokens past the S rows of the cache.

    lens (B,) int32 as in ``gather_kernel``. Grid: (B * HQ,).
    """
    pid = tl.program_id(0).to(tl.int64)
    num_keys = tl.load(lens_ptr + pid // HQ)
    columns = tl.arange(0, BLOCK_D)
    o = o_ptr + pid // HQ * o_strides[0] + pid % HQ * o_strides[1]
    for token in range(tl.maximum(0, S - (num_keys - NQ)), NQ):
        row = o + tl.cast(token, tl.int64) * o_strides[2] + columns * o_strides[3]
        tl.store(row, tl.zeros((BLOCK_D,), o_ptr.dtype.element_ty), mask=columns < D)
        tl.store(lse_ptr + pid * NQ + token, float("-inf"))
