# mypy: ignore-errors
"""New keys and values into a cache, contiguous or in pages: rotated, quantised and scattered in one launch."""

import triton
import triton.language as tl

from fused_rope_attn.generation import float8, keys, pages
from fused_rope_attn.generation.inputs import CacheInputs, complete_cache, pages_of
from fused_rope_attn.kernels import rotation, schedule, sequences, tiles
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record, unpack


@record
class Slots:
    """``limit`` rows of a cache from row ``first`` (int64) of one sequence (int64) on.

    pages, entries: of the rows at ``positions`` (``page_entries``) if the cache is in pages, else None.
    """

    sequence: tl.tensor
    first: tl.tensor
    limit: tl.tensor
    positions: tl.tensor
    pages: pages.SequencePages | None
    entries: tl.tensor | None
    format: tiles.RowFormat


@triton.jit
def slots_of_head(cache, head, slots):
    """Return the ``Rows`` of ``Slots`` in one head (int64) of a cache, a ``TensorView``."""
    if slots.pages is None:
        origin = tiles.Origin(batch=slots.sequence, head=head, row=0)
        rows = tiles.head_rows(cache, origin, slots.limit, slots.format)
        return keys.from_row(rows, slots.first, slots.limit)
    else:
        page_0 = tiles.Origin(batch=tl.full((), 0, tl.int64), head=head, row=0)
        rows = tiles.head_rows(cache, page_0, slots.limit, slots.format)
        page_stride = tiles.row_stride(cache.strides[0], cache.ptr, slots.format.ALIGNED)
        end = slots.first + slots.limit
        return pages.rows_in_pages(rows, page_stride, slots.pages, slots.entries, slots.positions, end)


@triton.jit
def slots_of_tile(cache, sequence, start, limit, positions):
    """Return the ``Slots`` of ``CacheInputs`` from row ``start`` on, ``limit`` rows, at ``positions`` if in pages."""
    sequence64, first = tl.cast(sequence, tl.int64), tl.cast(start, tl.int64)
    of_sequence = None
    entries = None
    if cache.table is not None:
        of_sequence = pages_of(cache, sequence64)
        entries = pages.page_entries(of_sequence, positions, start + limit)
        pages.assert_in_pool(entries, of_sequence)
    return Slots(sequence64, first, limit, positions, of_sequence, entries, cache.format)


@record
class WriteInputs:
    """New k and v (B, HKV, N, D), the caches, and lengths (B,) int32; None: the call does not have them.

    Tokens from new_lens on do not exist, None: from N on. With cu_seqlens sequences are packed along N. seqlens: rows
    in the caches before this call, None: 0; sums gets seqlens + N.
    """

    k: tiles.TensorView
    v: tiles.TensorView
    cache: CacheInputs
    tables: rotation.RotaryTables
    k_norm: Norm | None
    seqlens_ptr: tl.tensor | None
    new_lens_ptr: tl.tensor | None
    cu_seqlens_ptr: tl.tensor | None
    sums_ptr: tl.tensor | None
    format: tiles.RowFormat


@triton.jit(do_not_specialize=["N", "S", "HKV", "num_sequences", "num_pages", "position_limit", "num_tiles"])
def write_kernel(
    inputs, N, S, HKV, num_sequences, num_pages, position_limit, num_tiles, BLOCK_T: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T tokens of HEADS key heads. Grid: (head blocks * num_tiles * B,), packed sequences have one B.

    inputs: ``WriteInputs``. Token i of sequence b is written to row seqlens[b] + i of the cache, if that is below S.
    """
    schedule.let_next_launch_start(PDL)
    inputs = unpack(inputs)
    cache = complete_cache(inputs.cache, num_pages)
    IS_FLOAT8: tl.constexpr = cache.FLOAT8_DTYPE is not None
    head_blocks = tl.cdiv(HKV, HEADS)
    pid = tl.program_id(0)
    first_head = pid % head_blocks * HEADS
    tile = pid // head_blocks % num_tiles
    if inputs.cu_seqlens_ptr is None:
        sequence = pid // head_blocks // num_tiles
        batch = tl.cast(sequence, tl.int64)
        first_row = 0
        num_new = sequences.existing_keys(inputs.new_lens_ptr, sequence, N)
    else:
        sequence, first_row, num_new, tile = sequences.packed_tile(
            tile, inputs.cu_seqlens_ptr, None, num_sequences, N, 0, BLOCK_T
        )
        num_new = sequences.rows_of_sequence(sequence, num_sequences, num_new)
        sequence = tl.minimum(sequence, num_sequences - 1)
        batch = tl.full((), 0, tl.int64)
    start = tile * BLOCK_T
    cached = 0
    if inputs.seqlens_ptr is not None:
        cached = sequences.existing_keys(inputs.seqlens_ptr, sequence, S)
        if inputs.sums_ptr is not None:
            if tile + first_head == 0:
                tl.store(inputs.sums_ptr + sequence, cached + N)
    # The tokens of this tile for which the cache has rows.
    limit = tl.minimum(num_new, S - cached) - start
    if limit <= 0:
        return
    offs = tl.arange(0, BLOCK_T)
    position = cached + start
    positions = position + offs
    slots = slots_of_tile(cache, sequence, position, limit, positions)
    of_sequence = rotation.head_rotation(inputs.tables, slots.sequence, position_limit, inputs.k_norm)
    if cache.IS_ROTATED:
        cos, sin = rotation.load_angles(of_sequence, positions, inputs.format.BLOCK_D)
        weights = None
        if inputs.k_norm is not None:
            weights = rotation.pair_norm_weights(inputs.k_norm, of_sequence, inputs.format.BLOCK_D)
    for head in range(first_head, tl.minimum(first_head + HEADS, HKV)):
        head64 = tl.cast(head, tl.int64)
        origin = tiles.Origin(batch=batch, head=head64, row=first_row + start)
        k_rows = tiles.head_rows(inputs.k, origin, limit, inputs.format)
        v_rows = tiles.head_rows(inputs.v, origin, limit, inputs.format)
        k_slots, v_slots = slots_of_head(cache.k, head64, slots), slots_of_head(cache.v, head64, slots)
        v = tiles.load_tile(v_rows, offs, CHECK_ROWS=True)
        if IS_FLOAT8:
            v = float8.quantised(v, float8.head_scale(cache.v_scales, head64))
        if cache.IS_ROTATED:
            first, second = rotation.load_pairs(k_rows, offs, of_sequence)
            first, second = rotation.norm_and_rotate(first, second, cos, sin, 1.0, of_sequence, weights)
            if IS_FLOAT8:
                k_scale = float8.head_scale(cache.k_scales, head64)
                first, second = float8.quantised(first, k_scale), float8.quantised(second, k_scale)
            rotation.store_pairs(k_slots, first, second, offs, of_sequence)
        else:
            k = keys.load_raw(k_rows, offs, of_sequence)
            if IS_FLOAT8:
                k = float8.quantised(k, float8.head_scale(cache.k_scales, head64))
            tiles.store_tile(k_slots, k, offs)
        tiles.store_tile(v_slots, v, offs)
