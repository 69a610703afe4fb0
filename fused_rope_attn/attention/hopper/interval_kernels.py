# mypy: ignore-errors
"""Small kernels before the sm_90 kernels of a call with intervals: each key's rows, and the blocks that tiles visit.

All masks of the call become one interval of query rows for each key, so that the main kernels know no other mask.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.intervals import CHUNK, NO_ROW, IntervalArguments, row_interval
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.sequences import MaskArguments, described_sequence

# Keys or rows of a bit mask's word, and words of a program.
WORD = tl.constexpr(32)
# Blocks of keys of a program of ``key_rows_kernel``.
BLOCKS = tl.constexpr(4)


@triton.jit
def words_of(bits):
    """Return bits (..., WORD) of 0 and 1 as words (...,) int32, the first one in the lowest bit."""
    lane = tl.arange(0, WORD)
    for _ in tl.static_range(len(bits.shape) - 1):
        lane = lane[None]
    return tl.sum(bits.to(tl.int32) << lane, len(bits.shape) - 1)


@triton.jit(do_not_specialize=["NQ", "NK", "num_blocks", "window", "interval_strides"])
def key_rows_kernel(
    key_rows_ptr, blocks_ptr, query_starts_ptr, query_ends_ptr, starts_ptr, lens_ptr, interval_strides, window, NQ, NK,
    num_blocks, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the rows of q that see each key under all masks. Grid: (num_blocks / BLOCKS * B). Keys are those of
    num_blocks blocks of BLOCK_N from the sequence's first one, num_keys in all.

    key_rows (B, 2, num_keys) int32: the rows [first, end), both 0 for a key that no row sees.
    blocks (B, 4 * num_blocks + num_keys / WORD) int32: for each block the first row that sees any of its keys (NO_ROW
    if none does) and the row after the last one (0), then the largest first row of its keys and their smallest end,
    which is 0 if no row sees a key. At last a bit for each of the NK keys that no row sees.
    """
    let_next_launch_start(PDL)
    programs = tl.cdiv(num_blocks, BLOCKS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
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
    num_keys = num_blocks * BLOCK_N
    is_written = block < num_blocks
    key_rows_ptr += batch * 2 * num_keys
    tl.store(key_rows_ptr + keys, first, mask=is_written[:, None])
    tl.store(key_rows_ptr + num_keys + keys, end, mask=is_written[:, None])
    blocks_ptr += batch * (4 * num_blocks + num_keys // WORD)
    bounds = blocks_ptr + block
    tl.store(bounds, tl.min(tl.where(seen, first, NO_ROW), 1), mask=is_written)
    tl.store(bounds + num_blocks, tl.max(end, 1), mask=is_written)
    tl.store(bounds + 2 * num_blocks, tl.max(first, 1), mask=is_written)
    tl.store(bounds + 3 * num_blocks, tl.min(end, 1), mask=is_written)
    # The TMA itself writes zeros for keys past the end of the tensor.
    hidden = (first >= end) & (keys + sequence.first_k < NK)
    words = words_of(hidden.reshape(BLOCKS, BLOCK_N // WORD, WORD))
    index = block[:, None] * (BLOCK_N // WORD) + tl.arange(0, BLOCK_N // WORD)[None, :]
    tl.store(blocks_ptr + 4 * num_blocks + index, words, mask=is_written[:, None])


@triton.jit(do_not_specialize=["NQ", "num_blocks"])
def visits_kernel(
    visits_ptr, blocks_ptr, NQ, num_blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    """List the blocks of keys that each tile of BLOCK_M rows visits. Grid: (tiles * B). blocks: ``key_rows_kernel``'s.

    visits (B, tiles, 1 + num_blocks) int32: how many, at least one, and for each of them, the last block first, eight
    times its number, plus 1 if some of its keys begin after the tile's first row, plus 2 if some end before the tile
    does, plus 4 if no row sees some of them.
    """
    let_next_launch_start(PDL)
    wait_for_previous_launch(PDL)
    tiles = tl.cdiv(NQ, BLOCK_M)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    start_m = tl.program_id(0) % tiles * BLOCK_M
    last_m = tl.minimum(start_m + BLOCK_M, NQ)
    WORDS: tl.constexpr = BLOCK_N // WORD
    blocks_ptr += batch * (4 + WORDS) * num_blocks
    visits_ptr += tl.program_id(0).to(tl.int64) * (1 + num_blocks)
    found = 0
    for begin in range(0, num_blocks, CHUNK):
        block = num_blocks - 1 - begin - tl.arange(0, CHUNK)
        exists = block >= 0
        first = tl.load(blocks_ptr + block, mask=exists, other=NO_ROW)
        end = tl.load(blocks_ptr + num_blocks + block, mask=exists, other=0)
        all_first = tl.load(blocks_ptr + 2 * num_blocks + block, mask=exists, other=0)
        all_end = tl.load(blocks_ptr + 3 * num_blocks + block, mask=exists, other=0)
        hidden = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(WORDS):
            hidden |= tl.load(blocks_ptr + 4 * num_blocks + block * WORDS + i, mask=exists, other=0)
        sides = (all_first > start_m).to(tl.int32) + (all_end < last_m).to(tl.int32) * 2
        seen = (first < last_m) & (end > start_m)
        place = found + tl.cumsum(seen.to(tl.int32), 0)
        word = block * 8 + (hidden != 0).to(tl.int32) * 4 + sides
        tl.store(visits_ptr + place, word, mask=seen)
        found += tl.sum(seen.to(tl.int32), 0)
    if found == 0:
        # All scores of block 0 are masked, and the rows become zero on the usual path.
        tl.store(visits_ptr + 1, 7)
    tl.store(visits_ptr, tl.maximum(found, 1))


@triton.jit(do_not_specialize=["NQ", "HQ", "num_words"])
def blind_rows_kernel(blind_ptr, lse_ptr, NQ, HQ, num_words, BLOCK: tl.constexpr):
    """Write a bit for each row of q that sees no key: the lse (B, HQ, NQ) of its first head is -inf.

    blind (B, num_words) int32. Grid: (num_words / BLOCK * B).
    """
    programs = tl.cdiv(num_words, BLOCK)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    word = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    rows = word[:, None] * WORD + tl.arange(0, WORD)[None, :]
    lse = tl.load(lse_ptr + batch * HQ * NQ + rows, mask=rows < NQ, other=0.0)
    tl.store(blind_ptr + batch * num_words + word, words_of(lse == float("-inf")), mask=word < num_words)
