# mypy: ignore-errors
"""Sequences: the keys that exist, the rows of packed sequences, and the tile and the sequence that a program works on.

Only the device knows lengths. Packed sequences follow one another in a tensor of N rows. ``cu_ptr`` points to their
``cu_seqlens`` (num_sequences + 1,) int32: the first row of each, and the end of the last one. Rows from there on belong
to none.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from fused_rope_attn.kernels import masks as masking, schedule
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import head_rotation, rotation_from
from fused_rope_attn.kernels.tiles import Origin

# Query rows that the sm_90 backward takes at a time: packed sequences have whole tiles of them in its buffers.
PADDED_TILE_ROWS = tl.constexpr(64)


@triton.jit
def existing_keys(lens_ptr, batch, NK):
    """Return how many of NK keys of a batch entry exist. lens_ptr (B,) int32, None: all of them do."""
    if lens_ptr is not None:
        NK = tl.minimum(NK, tl.maximum(0, tl.load(lens_ptr + batch)))
    return NK


@triton.jit
def packed_rows(cu_ptr, sequence, num_sequences, N):
    """Return (first row, rows) of a packed sequence; number ``num_sequences`` holds the rows after the last one.

    Whatever cu_seqlens hold, the rows are in [0, N).
    """
    begin = tl.minimum(N, tl.maximum(0, tl.load(cu_ptr + sequence)))
    end = tl.load(cu_ptr + sequence + 1, mask=sequence < num_sequences, other=N)
    return begin, tl.minimum(N, tl.maximum(begin, end)) - begin


@triton.jit
def is_wrong(cu_ptr, index, begin, num_sequences, N):
    """Return True for each sequence ``index`` with wrong bounds; ``begin`` is its first row.

    The first sequence must begin at 0, none may end before it begins, and the last must end at or before row N.
    """
    end = tl.load(cu_ptr + index + 1, mask=index < num_sequences, other=N)
    return ((index <= num_sequences) & (end < begin)) | ((index == 0) & (begin != 0))


@triton.jit
def packed_tile(
    tile, cu_ptr, partner_ptr, num_sequences, N, partner_N, BLOCK: tl.constexpr, LAYOUT: tl.constexpr = None
):
    """Return (sequence, its first row, its rows, tile within it) of tile number ``tile`` of all sequences.

    Sequence s owns the tiles from ``cu[s] // BLOCK + s`` on: at least as many as it has, and known without a sum over
    the sequences before it. So a tile belongs to the last sequence that begins at or before it; it may be past that
    sequence's end. Counting reads up to 1024 sequences at once, where a search would wait for each step.

    partner: the ``cu_seqlens`` of the keys of these queries, or of the queries of these keys, with ``partner_N`` rows;
    None if the kernel does not use them. If either tensor is wrong (``is_wrong``), all rows belong to no sequence.
    Every row is then still written, because tiles cover [0, N). Launches with ``debug`` assert that neither is wrong.

    LAYOUT: the layout of 1024 numbers, which Gluon kernels name.
    """
    CHUNK: tl.constexpr = 1024
    count = 0
    wrong = 0
    for start in range(0, num_sequences + 1, CHUNK):
        if LAYOUT is None:
            of_chunk = tl.arange(0, CHUNK)
        else:
            of_chunk = gl.arange(0, CHUNK, LAYOUT)
        index = start + of_chunk
        begin = tl.load(cu_ptr + index, mask=index <= num_sequences, other=0)
        begun = ((begin // BLOCK + index <= tile) & (index <= num_sequences)).to(tl.int32)
        is_bad = is_wrong(cu_ptr, index, begin, num_sequences, N)
        if partner_ptr is not None:
            partner_begin = tl.load(partner_ptr + index, mask=index <= num_sequences, other=0)
            is_bad = is_bad | is_wrong(partner_ptr, index, partner_begin, num_sequences, partner_N)
        # Add both counts, each at most CHUNK, in one sum, because a second sum would need another barrier.
        counts = tl.sum(begun + is_bad.to(tl.int32) * (2 * CHUNK), 0)
        count += counts % (2 * CHUNK)
        wrong += counts // (2 * CHUNK)
    tl.device_assert(wrong == 0, "cu_seqlens must begin with 0, never fall, and end at or before the last token")
    sequence = tl.maximum(0, count - 1)
    begin = tl.load(cu_ptr + sequence)
    first_row, rows = packed_rows(cu_ptr, sequence, num_sequences, N)
    within = tl.maximum(0, tile - (begin // BLOCK + sequence))
    is_good = wrong == 0
    return (
        tl.where(is_good, sequence, num_sequences),
        tl.where(is_good, first_row, 0),
        tl.where(is_good, rows, N),
        tl.where(is_good, within, tile),
    )


@triton.jit
def rows_of_sequence(sequence, num_sequences, num_rows):
    """Return how many of num_rows rows belong to a packed sequence: none of those after the last one.

    There may be more of them than rows in the tables, which have as many as the longest sequence.
    """
    return tl.where(sequence < num_sequences, num_rows, 0)


@triton.jit
def packed_partner(cu_ptr, sequence, num_sequences, N):
    """Return (first row, rows) of a sequence in the other tensor of N rows: the keys of queries, or the reverse.

    Rows after the last packed sequence have 0. cu_ptr None: all rows belong to one sequence.
    """
    if cu_ptr is None:
        return 0, N
    else:
        first_row, rows = packed_rows(cu_ptr, sequence, num_sequences, N)
        return first_row, rows_of_sequence(sequence, num_sequences, rows)


@triton.jit
def padded_row(first_row, sequence, BLOCK: tl.constexpr):
    """Return the row of a padded buffer in which a packed sequence begins: the first of its tiles of BLOCK rows.

    Each sequence has whole tiles to itself in a buffer of BLOCK * ``count_tiles`` rows: what adds whole tiles does not
    reach the next sequence.
    """
    return (first_row // BLOCK + sequence) * BLOCK


@record
class MaskArguments:
    """The masks of a call; None: the call has no such mask."""

    starts_ptr: tl.tensor | None  # kv_starts (B,) int32
    lens_ptr: tl.tensor | None  # kv_lens (B,) int32
    cu_q_ptr: tl.tensor | None  # cu_seqlens of queries and of keys, (num_sequences + 1,) int32; B = 1 then
    cu_k_ptr: tl.tensor | None
    num_sequences: tl.tensor | None
    window: masking.Window | None
    READS_LENGTHS: tl.constexpr  # as in ``masks.Mask``
    # A sequence begins at its kv_starts: blocks are counted from there, as they are in packed sequences.
    FROM_START: tl.constexpr
    TOKEN_TABLES: tl.constexpr = False  # row t of the tables belongs to packed token t
    intervals: masking.Intervals | None = None


@triton.jit
def complete_masks(masks, num_sequences, window_left, window_right):
    """Return the ``MaskArguments`` that the host passed, with the numbers for which Triton must not specialise."""
    return replace(masks, num_sequences=num_sequences, window=masking.window_of((window_left, window_right)))


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
    mask: masking.Mask


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
    tiles = schedule.count_tiles(NQ, masks.num_sequences, BLOCK_M)
    number, head = schedule.scheduled_tile(
        pid, tiles, num_heads, heads_per_section, masking.is_causal(masks.window.right)
    )
    return tile_of_head(number, head, NQ, HQ, masks.cu_q_ptr, masks.cu_k_ptr, NK, masks.num_sequences, BLOCK_M)


@triton.jit
def scheduled_keys(pid, NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N: tl.constexpr):
    """Return the tile of keys (B, HKV, NK, D) of program ``pid``: the first tile of a causal sequence runs first,
    because it takes the longest. The rest as in ``scheduled_queries``."""
    tiles = schedule.count_tiles(NK, masks.num_sequences, BLOCK_N)
    number, head = schedule.scheduled_tile(pid, tiles, num_heads, heads_per_section, LAST_TILE_FIRST=False)
    tile = tile_of_head(number, head, NK, HKV, masks.cu_k_ptr, masks.cu_q_ptr, NQ, masks.num_sequences, BLOCK_N)
    if masks.FROM_START:
        start = start_of(masks, tile.origin.batch, NK)
        tile = replace(tile, origin=replace(tile.origin, row=start), num_rows=NK - start)
    return tile


@triton.jit
def start_of(masks, batch, NK):
    """Return kv_starts of batch entry ``batch``, of at most its keys, with NK rows of keys in the tensor."""
    return masking.first_key(masks.starts_ptr, batch, 0, existing_keys(masks.lens_ptr, batch, NK), None)


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
        intervals = masking.sequence_intervals(masks.intervals, batch, first_k, num_rows, rows_k, q_offset - first_q)
    mask = masking.sequence_mask(starts_ptr, batch, q_offset, num_keys, masks.window, masks.READS_LENGTHS, intervals)
    return Sequence(batch, first_q, num_queries, first_k, num_keys, q_offset, first_position, mask)


@triton.jit
def sequence_of_queries(tile, NK, masks):
    """Return the ``Sequence`` of a tile of queries, with NK rows of keys in the tensor."""
    first_k, rows_k = packed_partner(masks.cu_k_ptr, tile.sequence, masks.num_sequences, NK)
    return described_sequence(tile.origin.batch, tile.origin.row, tile.num_rows, first_k, rows_k, masks)


@triton.jit
def sequence_of_keys(tile, NQ, NK, masks):
    """Return the ``Sequence`` of a tile of keys, with NQ rows of queries and NK rows of keys in the tensors.

    FROM_START: its queries begin with the first one that can see a key, because blocks of queries are counted too.
    """
    first_q, num_queries = packed_partner(masks.cu_q_ptr, tile.sequence, masks.num_sequences, NQ)
    batch = tile.origin.batch
    if masks.FROM_START:
        sequence = described_sequence(batch, first_q, num_queries, 0, NK, masks)
        if masks.READS_LENGTHS != 2:
            first_q = tl.maximum(0, -sequence.q_offset)
            sequence = described_sequence(batch, first_q, num_queries - first_q, 0, NK, masks)
        return sequence
    else:
        num_rows = tile.num_rows
        if masks.cu_k_ptr is not None:
            num_rows = rows_of_sequence(tile.sequence, masks.num_sequences, num_rows)
        return described_sequence(batch, first_q, num_queries, tile.origin.row, num_rows, masks)


@triton.jit
def sequence_rotation(tables, sequence):
    """Return the ``Rotation`` of a ``Sequence`` by the call's ``RotaryTables``."""
    rotation = head_rotation(tables, sequence.batch, sequence.num_keys)
    if sequence.first_position is not None:
        rotation = rotation_from(rotation, sequence.first_position)
    return rotation
