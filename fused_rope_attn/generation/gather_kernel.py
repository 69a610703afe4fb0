# mypy: ignore-errors
"""Kernels around the attention to a chunk of a prompt: one gathers the visible cached keys and values in contiguous
memory, in pair order, one clears rows of the output for tokens past the end of the cache."""

import triton
import triton.language as tl

from fused_rope_attn.generation import float8
from fused_rope_attn.generation.inputs import complete_cache
from fused_rope_attn.generation.write_kernel import slots_of_head, slots_of_tile
from fused_rope_attn.kernels import masks, rotation, schedule, sequences, tiles
from fused_rope_attn.kernels.records import unpack


@triton.jit(do_not_specialize="window_left NQ NK S HKV num_pages position_limit num_tiles".split())
def gather_kernel(
    cache, k, v, tables, lens_ptr, kv_starts_ptr, counter_ptr, window_left, NQ, NK, S, HKV, num_pages, position_limit,
    num_tiles, BLOCK_T: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather BLOCK_T cached rows of HEADS key heads of one sequence. Grid: (head blocks * num_tiles * B,).

    cache: ``CacheInputs``. k and v (B, HKV, S, D) get the rows that a query sees: keys rotated and in pair order,
    values; v None: only keys. lens (B,) int32: keys of each sequence, NQ new ones among them, of NK at most; the cache
    has no rows from S on. The word at ``counter`` becomes zero.
    """
    schedule.let_next_launch_start(PDL)
    cache, k, v, tables = unpack((cache, k, v, tables))
    cache = complete_cache(cache, num_pages)
    IS_FLOAT8: tl.constexpr = cache.FLOAT8_DTYPE is not None
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(counter_ptr, 0)
    head_blocks = tl.cdiv(HKV, HEADS)
    first_head = pid % head_blocks * HEADS
    start = pid // head_blocks % num_tiles * BLOCK_T
    sequence = pid // head_blocks // num_tiles
    num_keys = sequences.existing_keys(lens_ptr, sequence, NK)
    first_seen = masks.first_key(kv_starts_ptr, sequence, num_keys - NQ, num_keys, window_left)
    end = tl.minimum(num_keys, S)
    if (start >= end) | (start + BLOCK_T <= first_seen):
        return
    offs = tl.arange(0, BLOCK_T)
    limit = end - start
    # Rows before the first visible key may have no page: read the first visible key in their place.
    slots = slots_of_tile(cache, sequence, start, limit, tl.maximum(start + offs, first_seen))
    of_sequence = rotation.head_rotation(tables, slots.sequence, position_limit)
    if not cache.IS_ROTATED:
        cos, sin = rotation.load_angles(of_sequence, start + offs, cache.format.BLOCK_D)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        first, second = rotation.load_pairs(slots_of_head(cache.k, head64, slots), offs, of_sequence)
        if IS_FLOAT8:
            k_scale = float8.head_scale(cache.k_scales, head64)
            first, second = first * k_scale, second * k_scale
        if not cache.IS_ROTATED:
            first, second = rotation.rotate(first, second, cos, sin, CONJUGATE=False)
        origin = tiles.Origin(batch=slots.sequence, head=head64, row=start)
        k_rows = tiles.head_rows(k, origin, limit, cache.format)
        tiles.store_tile(k_rows, rotation.pack_pairs(first, second), offs)
        if v is not None:
            values = tiles.load_tile(slots_of_head(cache.v, head64, slots), offs, CHECK_ROWS=True)
            if IS_FLOAT8:
                values = values.to(tl.float32) * float8.head_scale(cache.v_scales, head64)
            tiles.store_tile(tiles.head_rows(v, origin, limit, cache.format), values, offs)


@triton.jit(do_not_specialize=["NQ", "S", "HQ"])
def clear_kernel(lens_ptr, o, lse_ptr, NQ, S, HQ, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Clear rows of o (B, HQ, NQ, D) and lse (B, HQ, NQ), 0 and -inf, of tokens past the S rows of the cache.

    lens (B,) int32 as in ``gather_kernel``. Grid: (B * HQ,).
    """
    o = unpack(o)
    strides = o.strides
    pid = tl.program_id(0).to(tl.int64)
    num_keys = tl.load(lens_ptr + pid // HQ)
    columns = tl.arange(0, BLOCK_D)
    head = o.ptr + pid // HQ * strides[0] + pid % HQ * strides[1]
    for token in range(tl.maximum(0, S - (num_keys - NQ)), NQ):
        row = head + tl.cast(token, tl.int64) * strides[2] + columns * strides[3]
        tl.store(row, tl.zeros((BLOCK_D,), o.ptr.dtype.element_ty), mask=columns < D)
        tl.store(lse_ptr + pid * NQ + token, float("-inf"))
