"""Lengths and packed sequences, which only the device knows: tiles of sequences, and the keys that exist."""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl


@triton.jit
def existing_keys(lens_ptr, batch, NK):
    """How many keys of a batch entry exist, at most NK; lens_ptr None: all of them."""
    if lens_ptr is None:
        return NK
    else:
        return tl.minimum(NK, tl.maximum(0, tl.load(lens_ptr + batch)))


@triton.jit
def count_tiles(N, num_sequences, BLOCK: tl.constexpr):
    """Tiles of N rows. Packed sequences end anywhere, so that each may take one tile more: ``packed_tile``."""
    if num_sequences is None:
        return tl.cdiv(N, BLOCK)
    else:
        return N // BLOCK + num_sequences + 1


@triton.jit
def packed_rows(cu_ptr, sequence, num_sequences, N):
    """(first row, rows) of a packed sequence; number ``num_sequences`` holds the rows behind the last one.

    Whatever cu_seqlens hold, the rows lie in [0, N).
    """
    first = tl.minimum(N, tl.maximum(0, tl.load(cu_ptr + sequence)))
    last = tl.load(cu_ptr + sequence + 1, mask=sequence < num_sequences, other=N)
    return first, tl.minimum(N, tl.maximum(first, last)) - first


@triton.jit
def packed_tile(tile, cu_ptr, num_sequences, N, BLOCK: tl.constexpr, LAYOUT: tl.constexpr = None):
    """(sequence, its first row, its rows, tile in it) of a tile among those of all sequences.

    Sequence s owns the tiles from ``cu[s] // BLOCK + s`` on: at least as many as it has, and known without a sum over
    the sequences before it. So the last sequence that begins at or before a tile is its own; the tile may lie behind
    that sequence's end. Counting reads up to 1024 sequences at once, where a search would wait for each step.

    LAYOUT: of a row of 1024, which Gluon kernels name.
    """
    CHUNK: tl.constexpr = 1024
    count = 0
    for first in range(0, num_sequences + 1, CHUNK):
        if LAYOUT is None:
            index = first + tl.arange(0, CHUNK)
        else:
            index = first + gl.arange(0, CHUNK, LAYOUT)
        begin = tl.load(cu_ptr + index, mask=index <= num_sequences, other=0)
        count += tl.sum(((begin // BLOCK + index <= tile) & (index <= num_sequences)).to(tl.int32), 0)
    sequence = tl.maximum(0, count - 1)
    begin = tl.load(cu_ptr + sequence)
    first_row, rows = packed_rows(cu_ptr, sequence, num_sequences, N)
    return sequence, first_row, rows, tl.maximum(0, tile - (begin // BLOCK + sequence))


@triton.jit
def packed_partner(cu_ptr, sequence, num_sequences, N):
    """(first row, rows) of the other tensor's part of a sequence; what lies behind the last one has no partner."""
    first, rows = packed_rows(cu_ptr, sequence, num_sequences, N)
    return first, tl.where(sequence < num_sequences, rows, 0)


@triton.jit
def padded_row(first_row, sequence, BLOCK: tl.constexpr):
    """The row of a padded buffer in which a packed sequence begins: the first of its tiles of BLOCK rows.

    Each sequence has whole tiles to itself in a buffer of BLOCK * ``count_tiles`` rows: what adds whole tiles does not
    reach the next sequence.
    """
    return (first_row // BLOCK + sequence) * BLOCK


@triton.jit
def describe_tiles(table_ptr, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK: tl.constexpr, ENTRY: tl.constexpr):
    """Write what attention needs to know of each tile of BLOCK queries, a program's share of all tiles.

    table (``count_tiles``, ENTRY) int32: the tile's first row, the row behind its sequence's last (not greater than the
    first: no such tile), the sequence's first key row, its numbers of keys and of queries; the rest is not written.
    """
    for tile in range(tl.program_id(0), count_tiles(NQ, num_sequences, BLOCK), tl.num_programs(0)):
        sequence, first_q, len_q, block = packed_tile(tile, cu_q_ptr, num_sequences, NQ, BLOCK)
        first_k, len_k = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        entry = table_ptr + tile * ENTRY
        tl.store(entry, first_q + block * BLOCK)
        tl.store(entry + 1, first_q + len_q)
        tl.store(entry + 2, first_k)
        tl.store(entry + 3, len_k)
        tl.store(entry + 4, len_q)
