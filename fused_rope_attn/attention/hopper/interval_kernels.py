# mypy: ignore-errors
"""Small kernels before the sm_90 kernels of a call with intervals: each key's rows, and the blocks that tiles visit.

All masks of the call become one interval of query rows for each key, so that the main kernels know no other mask.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.hopper.shares import deal_shares
from fused_rope_attn.kernels.intervals import NO_ROW, IntervalArguments, row_interval
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import let_next_launch_start
from fused_rope_attn.kernels.sequences import MaskArguments, described_sequence

# Keys or rows of a bit mask's word, and words of a program.
WORD = tl.constexpr(32)
# Blocks of keys of a program of ``key_rows_kernel``.
BLOCKS = tl.constexpr(4)
# Tiles of a program of ``visits_kernel``, and the blocks of keys that it reads at once.
TILES = tl.constexpr(8)
VISIT_BLOCKS = tl.constexpr(32)


@triton.jit
def words_of(bits):
    """Return bits (..., WORD) of 0 and 1 as words (...,) int32, the first one in the lowest bit."""
    lane = tl.arange(0, WORD)
    for _ in tl.static_range(len(bits.shape) - 1):
        lane = lane[None]
    return tl.sum(bits.to(tl.int32) << lane, len(bits.shape) - 1)


@record
class KeyTile:
    """The rows [first, end) of q that see each key of some blocks, (blocks, BLOCK_N) int32; both 0 if no row does."""

    first: tl.tensor
    end: tl.tensor
    hidden: tl.tensor  # keys of the tensor that no row sees


@triton.jit
def load_key_tile(
    batch, block, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides, window, NQ, NK,
    READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the ``KeyTile`` of blocks of BLOCK_N keys, numbers counted from the sequence's first key."""
    arguments = IntervalArguments(query_starts_ptr, query_ends_ptr, None, interval_strides)
    masks = MaskArguments(
        starts_ptr, lens_ptr, None, None, None, window_of(window), READS_LENGTHS, FROM_START, intervals=arguments
    )
    sequence = described_sequence(batch, 0, NQ, 0, NK, masks)
    keys = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first, end = row_interval(sequence.mask, keys)
    seen = first < end
    first = tl.where(seen, first - sequence.q_offset, 0)
    end = tl.where(seen, end - sequence.q_offset, 0)
    # The TMA itself writes zeros for keys past the end of the tensor.
    return KeyTile(first, end, (first >= end) & (keys + sequence.first_k < NK))


@triton.jit
def some_rows(tile):
    """Return the first row that sees any key of each block, NO_ROW if none does, and the row after the last one, 0."""
    return tl.min(tl.where(tile.first < tile.end, tile.first, NO_ROW), 1), tl.max(tile.end, 1)


@triton.jit
def all_rows(tile):
    """Return the rows [first, end) that see all keys of each block; end is 0 if no row sees one of them."""
    return tl.max(tile.first, 1), tl.min(tile.end, 1)


@triton.jit
def store_key_tile(key_rows_ptr, hidden_ptr, tile, block, num_blocks, BLOCK_N: tl.constexpr):
    """Write a ``KeyTile`` to key_rows (2, num_keys) int32, and a bit for a hidden key to hidden (num_keys / WORD,)."""
    BLOCKS: tl.constexpr = block.shape[0]
    exists = (block < num_blocks)[:, None]
    keys = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(key_rows_ptr + keys, tile.first, mask=exists)
    tl.store(key_rows_ptr + num_blocks * BLOCK_N + keys, tile.end, mask=exists)
    words = words_of(tile.hidden.reshape(BLOCKS, BLOCK_N // WORD, WORD))
    index = block[:, None] * (BLOCK_N // WORD) + tl.arange(0, BLOCK_N // WORD)[None, :]
    tl.store(hidden_ptr + index, words, mask=exists)


@triton.jit(do_not_specialize=["NQ", "NK", "num_blocks", "window", "interval_strides"])
def key_rows_kernel(
    key_rows_ptr, blocks_ptr, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides, window, NQ, NK,
    num_blocks, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the rows of q that see each key under all masks. Grid: (num_blocks / BLOCKS * B). Keys are those of
    num_blocks blocks of BLOCK_N from the sequence's first one, num_keys in all.

    key_rows (B, 2, num_keys) int32: the rows [first, end), both 0 for a key that no row sees.
    blocks (B, 4 * num_blocks + num_keys / WORD) int32: ``some_rows`` and ``all_rows`` of each block, and then a bit for
    each of the NK keys that no row sees.
    """
    programs = tl.cdiv(num_blocks, BLOCKS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    tile = load_key_tile(
        batch, block, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides, window, NQ, NK,
        READS_LENGTHS, FROM_START, BLOCK_N,
    )  # fmt: skip
    num_keys = num_blocks * BLOCK_N
    blocks_ptr += batch * (4 * num_blocks + num_keys // WORD)
    first, end = some_rows(tile)
    all_first, all_end = all_rows(tile)
    bounds, exists = blocks_ptr + block, block < num_blocks
    tl.store(bounds, first, mask=exists)
    tl.store(bounds + num_blocks, end, mask=exists)
    tl.store(bounds + 2 * num_blocks, all_first, mask=exists)
    tl.store(bounds + 3 * num_blocks, all_end, mask=exists)
    store_key_tile(key_rows_ptr + batch * 2 * num_keys, blocks_ptr + 4 * num_blocks, tile, block, num_blocks, BLOCK_N)


@triton.jit(do_not_specialize=["NQ", "NK", "num_blocks", "window", "interval_strides"])
def visits_kernel(
    visits_ptr, key_rows_ptr, hidden_ptr, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides,
    window, NQ, NK, num_blocks, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the blocks of keys that tiles of BLOCK_M rows visit, and write the rows that see each key.

    visits (B, tiles, 1 + num_blocks) int32: how many, at least one, and for each of them, the last block first, eight
    times its number, plus 1 if some of its keys begin after the tile's first row, plus 2 if some end before the tile
    does, plus 4 if no row sees some of them. key_rows as for ``key_rows_kernel``; hidden (B, num_keys / WORD) int32: a
    bit for each of the NK keys that no row sees.

    Grid: (tiles / TILES * B). Each program reads the intervals of all keys, so that none waits for another, and writes
    the rows of some.
    """
    let_next_launch_start(PDL)
    tiles = tl.cdiv(NQ, BLOCK_M)
    programs = tl.cdiv(tiles, TILES)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    number = program * TILES + tl.arange(0, TILES)
    start_m = (number * BLOCK_M)[:, None]
    last_m = tl.minimum(start_m + BLOCK_M, NQ)
    is_tile = number < tiles
    visits_ptr += (batch * tiles + number) * (1 + num_blocks)
    key_rows_ptr += batch * 2 * num_blocks * BLOCK_N
    hidden_ptr += batch * num_blocks * (BLOCK_N // WORD)
    chunks = tl.cdiv(num_blocks, VISIT_BLOCKS)
    found = tl.zeros((TILES,), tl.int32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        block = chunk * VISIT_BLOCKS + VISIT_BLOCKS - 1 - tl.arange(0, VISIT_BLOCKS)
        tile = load_key_tile(
            batch, block, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides, window, NQ, NK,
            READS_LENGTHS, FROM_START, BLOCK_N,
        )  # fmt: skip
        if chunk % programs == program:
            store_key_tile(key_rows_ptr, hidden_ptr, tile, block, num_blocks, BLOCK_N)
        first, end = some_rows(tile)
        all_first, all_end = all_rows(tile)
        has_hidden = tl.max(tile.hidden.to(tl.int32), 1)
        seen = (first[None, :] < last_m) & (end[None, :] > start_m)
        word = (block * 8 + has_hidden * 4)[None, :]
        word += (all_first[None, :] > start_m).to(tl.int32) + (all_end[None, :] < last_m).to(tl.int32) * 2
        place = found[:, None] + tl.cumsum(seen.to(tl.int32), 1)
        tl.store(visits_ptr[:, None] + place, word, mask=seen & is_tile[:, None])
        found += tl.sum(seen.to(tl.int32), 1)
    # If nothing is visible, all scores of block 0 are masked, and the rows become zero on the usual path.
    tl.store(visits_ptr + 1, tl.full((TILES,), 7, tl.int32), mask=is_tile & (found == 0))
    tl.store(visits_ptr, tl.maximum(found, 1), mask=is_tile)


@triton.jit
def write_blind_rows(program, blind_ptr, lse_ptr, NQ, HQ, num_words, BLOCK: tl.constexpr):
    """Write a bit for each row of q that sees no key: the lse (B, HQ, NQ) of its first head is -inf.

    blind (B, num_words) int32. Programs: num_words / BLOCK * B.
    """
    programs = tl.cdiv(num_words, BLOCK)
    batch = (program // programs).to(tl.int64)
    word = program % programs * BLOCK + tl.arange(0, BLOCK)
    rows = word[:, None] * WORD + tl.arange(0, WORD)[None, :]
    lse = tl.load(lse_ptr + batch * HQ * NQ + rows, mask=rows < NQ, other=0.0)
    tl.store(blind_ptr + batch * num_words + word, words_of(lse == float("-inf")), mask=word < num_words)


_NUMBERS = "NQ HQ HKV num_words batch_stride num_blocks num_tiles num_shares least_share heads_per_section".split()


@triton.jit(do_not_specialize=_NUMBERS)
def backward_rows_kernel(
    blind_ptr, lse_ptr, shares_ptr, slot_counters_ptr, blocks_ptr, NQ, HQ, HKV, num_words, batch_stride, num_blocks,
    num_tiles, num_shares, least_share, heads_per_section, heads_per_multiprocessor, BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Write what the backward needs in addition to the results of ``key_rows_kernel``.

    Grid: (num_tiles, for ``deal_shares``, unless shares is None, and then the programs of ``write_blind_rows``).
    """
    program = tl.program_id(0)
    if shares_ptr is None:
        write_blind_rows(program, blind_ptr, lse_ptr, NQ, HQ, num_words, BLOCK)
    elif program < num_tiles:
        deal_shares(
            program, shares_ptr, slot_counters_ptr, blocks_ptr, batch_stride, num_blocks, num_tiles, num_shares,
            least_share, HKV, heads_per_section, heads_per_multiprocessor, HALVES,
        )  # fmt: skip
    else:
        write_blind_rows(program - num_tiles, blind_ptr, lse_ptr, NQ, HQ, num_words, BLOCK)
