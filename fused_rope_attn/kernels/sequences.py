# mypy: ignore-errors
"""The rows and the sequence that a program works on, and the mask of that sequence."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.intervals import IntervalArguments, sequence_intervals
from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, rows_of_sequence
from fused_rope_attn.kernels.masks import Mask, Window, first_key, is_causal, sequence_mask, window_of
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import head_rotation, rotation_from
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.kernels.tiles import Origin


@record
class MaskArguments:
    """The masks of a call; None: the call has no such mask."""

    starts_ptr: tl.tensor | None  # kv_starts (B,) int32
    lens_ptr: tl.tensor | None  # kv_lens (B,) int32
    cu_q_ptr: tl.tensor | None  # cu_seqlens of queries and of keys, (num_sequences + 1,) int32; B = 1 then
    cu_k_ptr: tl.tensor | None
    num_sequences: tl.tensor | None
    window: Window | None
    READS_LENGTHS: tl.constexpr  # whether the call has any of the tensors
    # A sequence begins at its kv_starts: blocks are counted from there, as they are in packed sequences.
    FROM_START: tl.constexpr
    TOKEN_TABLES: tl.constexpr = False  # row t of the tables belongs to packed token t
    intervals: IntervalArguments | None = None


@triton.jit
def complete_masks(masks, num_sequences, window_left, window_right):
    """Return the ``MaskArguments`` that the host passed, with the numbers for which Triton must not specialise."""
    return replace(masks, num_sequences=num_sequences, window=window_of((window_left, window_right)))


@record
class ScheduledTile:
    """A program's tile of rows of one head of one sequence; by ``scheduled_queries`` or ``scheduled_keys``."""

    number: tl.tensor  # among the tiles of this head, of all sequences
    index: tl.tensor  # among the tiles of its sequence; a packed sequence's tile may begin after its last row
    num_rows: tl.tensor  # of the sequence
    sequence: tl.tensor | None  # the number of the packed sequence
    origin: Origin  # the sequence's first row
    batch_head: tl.tensor  # batch * H + head


@record
class Sequence:
    """The queries and keys of a batch entry or of a packed sequence."""

    batch: tl.tensor  # int64
    first_q: tl.tensor  # first query row in the tensor, 0 unless packed
    num_queries: tl.tensor
    first_k: tl.tensor  # first key row in the tensor, 0 unless packed or ``FROM_START``
    num_keys: tl.tensor  # keys that exist
    q_offset: tl.tensor  # position of the first query; keys count their positions from 0
    first_position: tl.tensor | None  # the tables' row of the first key; None: 0
    mask: Mask


@triton.jit
def tile_of_head(number, batch_head, num_rows, H, cu_ptr, partner_ptr, partner_N, num_sequences, BLOCK: tl.constexpr):
    """Return the ``ScheduledTile`` with this number, of BLOCK rows, of head ``batch_head`` of B * H.

    A (B, H, num_rows, D) tensor has the rows. cu_ptr (sequences + 1,) int32: the first rows of packed sequences;
    partner_ptr and partner_N are of the other tensor, as ``packed_tile`` takes them. Without packed sequences both
    pointers and num_sequences are None.
    """
    batch = (batch_head // H).to(tl.int64)
    head = (batch_head % H).to(tl.int64)
    sequence = None
    first_row = 0
    index = number
    if cu_ptr is not None:
        sequence, first_row, num_rows, index = packed_tile(
            number, cu_ptr, partner_ptr, num_sequences, num_rows, partner_N, BLOCK
        )
    origin = Origin(batch=batch, head=head, row=first_row)
    return ScheduledTile(number, index, num_rows, sequence, origin, batch_head)


@triton.jit
def scheduled_queries(pid, NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M: tl.constexpr):
    """Return the tile of queries (B, HQ, NQ, D) of program ``pid``: the last tile of a causal sequence runs first,
    because it takes the longest. num_heads is B * HQ. There are ``count_tiles`` * num_heads programs."""
    tiles = count_tiles(NQ, masks.num_sequences, BLOCK_M)
    number, head = scheduled_tile(pid, tiles, num_heads, heads_per_section, is_causal(masks.window.right))
    return tile_of_head(number, head, NQ, HQ, masks.cu_q_ptr, masks.cu_k_ptr, NK, masks.num_sequences, BLOCK_M)


@triton.jit
def scheduled_keys(pid, NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N: tl.constexpr):
    """Return the tile of keys (B, HKV, NK, D) of program ``pid``: the first tile of a causal sequence runs first,
    because it takes the longest. The rest as in ``scheduled_queries``."""
    tiles = count_tiles(NK, masks.num_sequences, BLOCK_N)
    number, head = scheduled_tile(pid, tiles, num_heads, heads_per_section, LAST_TILE_FIRST=False)
    tile = tile_of_head(number, head, NK, HKV, masks.cu_k_ptr, masks.cu_q_ptr, NQ, masks.num_sequences, BLOCK_N)
    if masks.FROM_START:
        start = start_of(masks, tile.origin.batch, NK)
        return replace(tile, origin=replace(tile.origin, row=start), num_rows=NK - start)
    else:
        return tile


@triton.jit
def partner_rows(tile, cu_ptr, num_sequences, N):
    """Return (first row, rows) of a tile's sequence in the other tensor of N rows: the keys of a tile of queries."""
    if cu_ptr is None:
        return 0, N
    else:
        return packed_partner(cu_ptr, tile.sequence, num_sequences, N)


@triton.jit
def start_of(masks, batch, NK):
    """Return kv_starts of batch entry ``batch``, of at most its keys, with NK rows of keys in the tensor."""
    return first_key(masks.starts_ptr, batch, 0, existing_keys(masks.lens_ptr, batch, NK), None)


@triton.jit
def described_sequence(batch, first_q, num_queries, first_k, rows_k, masks):
    """Return the ``Sequence`` with num_queries rows of queries and rows_k rows of keys; some keys may not exist."""
    num_keys = existing_keys(masks.lens_ptr, batch, rows_k)
    starts_ptr = masks.starts_ptr
    first_position = None
    if masks.FROM_START:
        first_position = start_of(masks, batch, rows_k)
        first_k += first_position
        num_keys -= first_position
        starts_ptr = None
    if masks.TOKEN_TABLES:
        first_position = first_k
    q_offset = num_keys - num_queries
    intervals = None
    if masks.intervals is not None:
        num_rows = first_q + num_queries
        intervals = sequence_intervals(masks.intervals, batch, first_k, num_rows, rows_k, q_offset - first_q)
    mask = sequence_mask(starts_ptr, batch, q_offset, num_keys, masks.window, masks.READS_LENGTHS, intervals)
    return Sequence(batch, first_q, num_queries, first_k, num_keys, q_offset, first_position, mask)


@triton.jit
def sequence_of_queries(tile, NK, masks):
    """Return the ``Sequence`` of a tile of queries, with NK rows of keys in the tensor."""
    first_k, rows_k = partner_rows(tile, masks.cu_k_ptr, masks.num_sequences, NK)
    return described_sequence(tile.origin.batch, tile.origin.row, tile.num_rows, first_k, rows_k, masks)


@triton.jit
def sequence_of_keys(tile, NQ, NK, masks):
    """Return the ``Sequence`` of a tile of keys, with NQ rows of queries and NK rows of keys in the tensors.

    FROM_START: its queries begin with the first one that has a position, because blocks of queries are counted too.
    """
    first_q, num_queries = partner_rows(tile, masks.cu_q_ptr, masks.num_sequences, NQ)
    batch = tile.origin.batch
    if masks.FROM_START:
        sequence = described_sequence(batch, first_q, num_queries, 0, NK, masks)
        first_q = tl.maximum(0, -sequence.q_offset)
        return described_sequence(batch, first_q, num_queries - first_q, 0, NK, masks)
    else:
        num_rows = tile.num_rows
        if masks.cu_k_ptr is not None:
            num_rows = rows_of_sequence(tile.sequence, masks.num_sequences, num_rows)
        return described_sequence(batch, first_q, num_queries, tile.origin.row, num_rows, masks)


@triton.jit
def sequence_rotation(tables, sequence):
    """Return the ``Rotation`` of a ``Sequence`` by the call's ``RotaryTables``."""
    rotation = head_rotation(tables, sequence.batch, sequence.num_keys)
    if sequence.first_position is None:
        return rotation
    else:
        return rotation_from(rotation, sequence.first_position)
