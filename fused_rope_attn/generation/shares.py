# mypy: ignore-errors
"""The key tiles of each program of the generation step: equal shares of all tiles of all sequences.

The work of one sequence is cut into blocks: BLOCK_M query rows of one key head, with as many tiles of BLOCK_N cached
keys as the sequence has. The key tiles of all blocks, sequence by sequence, are dealt to the programs in equal shares
(stream-K, Osama et al. 2023). Every program reads the lengths of all sequences on the device, so that a long sequence
among short ones is spread over as many programs as it needs. If several programs share a block, they write their
partial sums to a workspace.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import first_key
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.sequences import existing_keys


@record
class Caches:
    """The number of keys of every sequence in its cache, and their tiles. The kernel adds those with a default None."""

    seqlens_ptr: tl.tensor  # (B,) int32: keys before this call
    starts_ptr: tl.tensor | None  # (B,) int32: keys before this one do not exist
    B: tl.tensor = None
    NQ: tl.tensor = None  # queries of each sequence, and new keys
    S: tl.tensor = None  # rows of the cache
    left: tl.tensor | None = None  # number of keys before its own position that a query sees
    HAS_NEW_KEYS: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_B: tl.constexpr = 1  # sequences that are read together
    # Tiles begin at multiples of so many keys, if they are within a page or begin with one; else 1.
    ALIGNMENT: tl.constexpr = 1
    ONE_PASS: tl.constexpr = True  # there are no more than BLOCK_B sequences: no loop over them
    # The new tokens are in the cache, and tiles are counted from kv_starts, or from 0, by BLOCK_N.
    IN_ORDER: tl.constexpr = False


@record
class CachedKeys:
    """The keys in the cache before this call, or IN_ORDER after it, of a sequence or of each of a vector of them."""

    num_keys: tl.tensor
    q_offset: tl.tensor  # position of the first query
    first_key: tl.tensor  # the first one that a query sees
    first_tile: tl.tensor  # the first row of the first tile, at the first key or before it


@record
class Parts:
    """The workspace for partial sums of ``num_programs`` programs, float32."""

    ptr: tl.tensor
    num_programs: tl.tensor
    BLOCK_M: tl.constexpr
    D: tl.constexpr


@triton.jit
def cached_keys(caches, sequence):
    """Return the ``CachedKeys`` of a sequence, or of each of a vector of sequences.

    New tokens follow the cached ones; without new ones the queries are aligned with the last keys.
    """
    num_keys = existing_keys(caches.seqlens_ptr, sequence, caches.S)
    q_offset = num_keys
    if not caches.HAS_NEW_KEYS:
        q_offset = num_keys - caches.NQ
    elif caches.IN_ORDER:
        num_keys = tl.minimum(caches.S, num_keys + caches.NQ)
    first = first_key(caches.starts_ptr, sequence, q_offset, num_keys, caches.left)
    first_tile = first
    if caches.IN_ORDER:
        start = first_key(caches.starts_ptr, sequence, q_offset, num_keys, None)
        first_tile = start + (first - start) // caches.BLOCK_N * caches.BLOCK_N
    elif caches.ALIGNMENT > 1:
        # Without a visible key there must be no tile, because its page would be looked up.
        first_tile = tl.where(first < num_keys, first // caches.ALIGNMENT * caches.ALIGNMENT, num_keys)
    return CachedKeys(num_keys=num_keys, q_offset=q_offset, first_key=first, first_tile=first_tile)


@triton.jit
def count_key_tiles(keys, BLOCK_N: tl.constexpr):
    """Return the number of tiles of cached keys that a block reads, at least 1, so that every block is in a share."""
    return tl.maximum(1, tl.cdiv(keys.num_keys - keys.first_tile, BLOCK_N))


@triton.jit
def key_tiles_of(caches, sequences):
    """Return ``count_key_tiles`` of each of a vector of sequences, 0 for those past B."""
    keys = cached_keys(caches, tl.minimum(sequences, caches.B - 1))
    return tl.where(sequences < caches.B, count_key_tiles(keys, caches.BLOCK_N), 0)


@triton.jit
def tiles_before(caches, sequence):
    """Count the key tiles of one block of every sequence: (of all sequences, of those before ``sequence``)."""
    total = 0
    before = 0
    for start in range(0, 1 if caches.ONE_PASS else caches.B, caches.BLOCK_B):
        sequences = start + tl.arange(0, caches.BLOCK_B)
        tiles = key_tiles_of(caches, sequences)
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(sequences < sequence, tiles, 0), 0)
    return total, before


@triton.jit
def sequence_of(caches, tile):
    """Return (sequence, key tiles before it) of a tile among those of one block of every sequence."""
    sequence = 0
    before = 0
    passed = 0
    for start in range(0, 1 if caches.ONE_PASS else caches.B, caches.BLOCK_B):
        tiles = key_tiles_of(caches, start + tl.arange(0, caches.BLOCK_B))
        is_past = (passed + tl.cumsum(tiles, 0) <= tile) & (tiles > 0)
        sequence += tl.sum(is_past.to(tl.int32), 0)
        before += tl.sum(tl.where(is_past, tiles, 0), 0)
        passed += tl.sum(tiles, 0)
    return sequence, before


@triton.jit
def share_of(total, num_programs):
    """Return the number of key tiles of each program: equal shares of at least one."""
    return tl.maximum(1, tl.cdiv(total, num_programs))


@triton.jit
def part_pointers(parts, program, begins):
    """Return pointers to a program's part of a shared block: to its sums (BLOCK_M, D), and to its BLOCK_M maxima, which
    its BLOCK_M sums of weights follow.

    A program shares at most two blocks: one that began before its share, and one that ``begins`` in it and goes on.
    """
    SIZE: tl.constexpr = parts.BLOCK_M * parts.D
    part = tl.cast(2 * program + begins.to(tl.int32), tl.int64)
    stats = parts.ptr + tl.cast(2 * parts.num_programs, tl.int64) * SIZE + part * (2 * parts.BLOCK_M)
    return parts.ptr + part * SIZE, stats


@triton.jit
def whole_part_pointers(parts, block):
    """Return ``part_pointers`` of a block that one program has alone; these parts follow those of shared blocks."""
    SIZE: tl.constexpr = parts.BLOCK_M * parts.D
    part = parts.ptr + tl.cast(2 * parts.num_programs + block, tl.int64) * (SIZE + 2 * parts.BLOCK_M)
    return part, part + SIZE
