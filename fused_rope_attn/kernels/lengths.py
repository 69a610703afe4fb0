# mypy: ignore-errors
"""Lengths and packed sequences, which only the device knows: how many keys exist, and which tiles a sequence has.

Packed sequences follow one another in a tensor of N rows. ``cu_ptr`` points to their ``cu_seqlens`` (num_sequences +
1,) int32: the first row of each, and the end of the last one. Rows from there on belong to none.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

# Query rows that the sm_90 backward takes at a time: packed sequences have whole tiles of them in its buffers.
PADDED_TILE_ROWS = tl.constexpr(64)


@triton.jit
def existing_keys(lens_ptr, batch, NK):
    """Return how many of NK keys of a batch entry exist. lens_ptr (B,) int32, None: all of them do."""
    if lens_ptr is None:
        return NK
    else:
        return tl.minimum(NK, tl.maximum(0, tl.load(lens_ptr + batch)))


@triton.jit
def count_tiles(N, num_sequences, BLOCK: tl.constexpr):
    """Return how many tiles of BLOCK rows N rows take; num_sequences None: they are not packed.

    Packed sequences end anywhere, so that each may take one tile more: ``packed_tile``.
    """
    if num_sequences is None:
        return tl.cdiv(N, BLOCK)
    else:
        return N // BLOCK + num_sequences + 1


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
    """(first row, number of rows) of the keys of a sequence of queries, or of the queries of a sequence of keys.

    Rows after the last sequence have 0.
    """
    first_row, rows = packed_rows(cu_ptr, sequence, num_sequences, N)
    return first_row, rows_of_sequence(sequence, num_sequences, rows)


@triton.jit
def padded_row(first_row, sequence, BLOCK: tl.constexpr):
    """The row of a padded buffer in which a packed sequence begins: the first of its tiles of BLOCK rows.

    Each sequence has whole tiles to itself in a buffer of BLOCK * ``count_tiles`` rows: what adds whole tiles does not
    reach the next sequence.
    """
    return (first_row // BLOCK + sequence) * BLOCK


@triton.jit
def describe_tiles(
    table_ptr, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK: tl.constexpr, ENTRY_WORDS: tl.constexpr
):
    """Write what attention needs to know of each tile of BLOCK queries; the programs of a launch share the tiles.

    table (``count_tiles``, ENTRY_WORDS) int32: the tile's first row, the row after its sequence's last (not greater
    than the first: the tile holds no query), the sequence's first key row, its numbers of keys and of queries, and the
    sequence's own number. The other words are not written.
    """
    for tile in range(tl.program_id(0), count_tiles(NQ, num_sequences, BLOCK), tl.num_programs(0)):
        sequence, first_q, len_q, block = packed_tile(tile, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK)
        first_k, len_k = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        entry = table_ptr + tile * ENTRY_WORDS
        tl.store(entry, first_q + block * BLOCK)
        tl.store(entry + 1, first_q + len_q)
        tl.store(entry + 2, first_k)
        tl.store(entry + 3, len_k)
        tl.store(entry + 4, len_q)
        tl.store(entry + 5, sequence)
