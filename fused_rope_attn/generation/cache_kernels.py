# mypy: ignore-errors
"""Kernels around attention to a cache: new keys and values are rotated, quantised and scattered into it, the visible
ones of a chunk are gathered in contiguous memory, and rows of tokens past its end are cleared in the output."""

import triton
import triton.language as tl

from fused_rope_attn.generation import float8 as eight_bits, inputs as step, keys
from fused_rope_attn.kernels import masks, rotation, schedule, sequences, tiles
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record, unpack


@record
class Slots:
    """Rows of a cache at ``positions`` of one sequence (int64), before ``end``; entries: their ``tile_entries``."""

    sequence: tl.tensor
    positions: tl.tensor
    end: tl.tensor
    pages: keys.BlockTable | None
    entries: tl.tensor


@triton.jit
def slots_of_tile(cache, sequence, positions, end):
    """Return ``Slots`` of ``CacheInputs``, and assert that their pages are in the pool."""
    sequence = tl.cast(sequence, tl.int64)
    pages = None
    if cache.table is not None:
        pages = keys.sequence_pages(cache.table, sequence)
    entries = keys.page_entries(pages, positions, end)
    keys.assert_in_pool(entries, pages)
    return Slots(sequence, positions, end, pages, entries)


@triton.jit
def slots_of_head(view, cache, head, slots):
    """Return the ``Rows`` of ``Slots`` in one head (int64) of the keys or values of ``CacheInputs``."""
    rows, page_stride = step.rows_of_cache(view, cache, slots.sequence, head, 0)
    return keys.rows_at(rows, page_stride, slots.pages, slots.entries, slots.positions, slots.end)


@record
class WriteInputs:
    """New k and v (B, HKV, N, D), the caches, and lengths (B,) int32; None: the call does not have them.

    Tokens from new_lens on do not exist, None: from N on. With cu_seqlens sequences are packed along N. seqlens: rows
    in the caches before this call, None: 0; sums gets seqlens + N.
    """

    k: tiles.TensorView
    v: tiles.TensorView
    cache: step.CacheInputs
    tables: rotation.RotaryTables
    k_norm: Norm | None
    seqlens_ptr: tl.tensor | None
    new_lens_ptr: tl.tensor | None
    cu_seqlens_ptr: tl.tensor | None
    sums_ptr: tl.tensor | None
    format: tiles.RowFormat


@triton.jit(do_not_specialize=["NQ", "S", "HKV", "num_sequences", "num_pages", "position_limit", "num_tiles"])
def write_kernel(
    inputs, NQ, S, HKV, num_sequences, num_pages, position_limit, num_tiles, BLOCK_T: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T tokens of HEADS key heads. Grid: (num_tiles * head blocks * B,), packed sequences have one B.

    inputs: ``WriteInputs``. Token i of sequence b is written to row seqlens[b] + i of the cache, if that is below S.
    """
    schedule.let_next_launch_start(PDL)
    inputs = unpack(inputs)
    cache = step.complete_cache(inputs.cache, num_pages)
    tile, head_block, batch = schedule.block_of_heads(tl.program_id(0), num_tiles, tl.cdiv(HKV, HEADS))
    first_head = head_block * HEADS
    if inputs.cu_seqlens_ptr is None:
        sequence = batch
        first_row = 0
        num_new = sequences.existing_keys(inputs.new_lens_ptr, sequence, NQ)
    else:
        sequence, first_row, num_new, tile = sequences.packed_tile(
            tile, inputs.cu_seqlens_ptr, None, num_sequences, NQ, 0, BLOCK_T
        )
        num_new = sequences.rows_of_sequence(sequence, num_sequences, num_new)
        sequence = tl.minimum(sequence, num_sequences - 1)
    start = tile * BLOCK_T
    cached = 0
    if inputs.seqlens_ptr is not None:
        cached = sequences.existing_keys(inputs.seqlens_ptr, sequence, S)
        if inputs.sums_ptr is not None:
            if tile + first_head == 0:
                tl.store(inputs.sums_ptr + sequence, cached + NQ)
    # The tokens of this tile for which the cache has rows.
    limit = tl.minimum(num_new, S - cached) - start
    if limit <= 0:
        return
    offs = tl.arange(0, BLOCK_T)
    positions = cached + start + offs
    slots = slots_of_tile(cache, sequence, positions, cached + start + limit)
    of_sequence = rotation.head_rotation(inputs.tables, slots.sequence, position_limit, inputs.k_norm)
    weights = None
    if inputs.k_norm is not None:
        weights = rotation.pair_norm_weights(inputs.k_norm, of_sequence, inputs.format.BLOCK_D)
    angles = rotation.Angles(cos=None, sin=None)
    if cache.IS_ROTATED:
        angles = rotation.load_angles(of_sequence, positions, inputs.format.BLOCK_D)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        origin = tiles.Origin(batch=batch, head=head64, row=first_row + start)
        k_rows = tiles.head_rows(inputs.k, origin, limit, inputs.format)
        v_rows = tiles.head_rows(inputs.v, origin, limit, inputs.format)
        float8 = step.float8_of(cache, head64)
        v = eight_bits.as_stored(tiles.load_tile(v_rows, offs, CHECK_ROWS=True), float8, float8.v_scale)
        first, second = rotation.load_pairs(k_rows, offs, of_sequence)
        first, second = rotation.norm_and_rotate(first, second, angles, 1.0, of_sequence, weights)
        first = eight_bits.as_stored(first, float8, float8.k_scale)
        second = eight_bits.as_stored(second, float8, float8.k_scale)
        rotation.store_pairs(slots_of_head(cache.k, cache, head64, slots), first, second, offs, of_sequence)
        tiles.store_tile(slots_of_head(cache.v, cache, head64, slots), v, offs)


@triton.jit(do_not_specialize="window_left NQ NK S HKV num_pages position_limit num_tiles".split())
def gather_kernel(
    cache, k, v, tables, lens_ptr, kv_starts_ptr, counter_ptr, window_left, NQ, NK, S, HKV, num_pages, position_limit,
    num_tiles, BLOCK_T: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather BLOCK_T cached rows of HEADS key heads of one sequence. Grid: (num_tiles * head blocks * B,).

    cache: ``CacheInputs``. k and v (B, HKV, S, D) get the rows that a query sees: keys rotated and in pair order,
    values; v None: only keys. lens (B,) int32: keys of each sequence, NQ new ones among them, of NK at most; the cache
    has no rows from S on. The word at ``counter`` becomes zero.
    """
    schedule.let_next_launch_start(PDL)
    cache, k, v, tables = unpack((cache, k, v, tables))
    cache = step.complete_cache(cache, num_pages)
    tile, head_block, sequence = schedule.block_of_heads(tl.program_id(0), num_tiles, tl.cdiv(HKV, HEADS))
    first_head, start = head_block * HEADS, tile * BLOCK_T
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    num_keys = sequences.existing_keys(lens_ptr, sequence, NK)
    first_seen = masks.first_key(kv_starts_ptr, sequence, num_keys - NQ, num_keys, window_left)
    end = tl.minimum(num_keys, S)
    if (start >= end) | (start + BLOCK_T <= first_seen):
        return
    offs = tl.arange(0, BLOCK_T)
    # Rows before the first visible key may have no page: read the first visible key in their place.
    slots = slots_of_tile(cache, sequence, tl.maximum(start + offs, first_seen), end)
    of_sequence = rotation.head_rotation(tables, slots.sequence, position_limit)
    if not cache.IS_ROTATED:
        angles = rotation.load_angles(of_sequence, start + offs, cache.format.BLOCK_D)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        first, second = rotation.load_pairs(slots_of_head(cache.k, cache, head64, slots), offs, of_sequence)
        float8 = step.float8_of(cache, head64)
        if float8.DTYPE is not None:
            first, second = first * float8.k_scale, second * float8.k_scale
        if not cache.IS_ROTATED:
            first, second = rotation.rotate(first, second, angles.cos, angles.sin, CONJUGATE=False)
        origin = tiles.Origin(batch=slots.sequence, head=head64, row=start)
        k_rows = tiles.head_rows(k, origin, end - start, cache.format)
        tiles.store_tile(k_rows, rotation.pack_pairs(first, second), offs)
        if v is not None:
            values = tiles.load_tile(slots_of_head(cache.v, cache, head64, slots), offs, CHECK_ROWS=True)
            if float8.DTYPE is not None:
                values = values.to(tl.float32) * float8.v_scale
            tiles.store_tile(tiles.head_rows(v, origin, end - start, cache.format), values, offs)


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
