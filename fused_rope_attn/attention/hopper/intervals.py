# mypy: disable-error-code="no-untyped-def, attr-defined, call-arg"
"""Calls with intervals on sm_90: small kernels before the main ones, and their launches.

All masks of the call become one interval of query rows for each key, so that the main kernels know no other mask. The
kernels write each key's rows, the blocks that the forward's tiles visit, and the shares of the backward's programs.

Intervals make tiles of the backward uneven. For example all rows see the root of a tree, so that its few tiles would
take longer than everything else together. A tile that has clearly more query blocks than a multiprocessor has on
average is therefore divided into shares, each the work of one program. The longest shares start first.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fused_rope_attn.attention import arguments as call_arguments
from fused_rope_attn.attention.hopper import backward_block, channels
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels import schedule, sequences
from fused_rope_attn.kernels.masks import NO_ROW, WORD, row_interval
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.runtime import device, launch

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
def load_key_tile(batch, block, masks, NQ, NK, BLOCK_N: tl.constexpr):
    """Return the ``KeyTile`` of blocks of BLOCK_N keys, numbers counted from the sequence's first key."""
    sequence = sequences.described_sequence(batch, 0, NQ, 0, NK, masks)
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


@triton.jit(do_not_specialize=["NQ", "NK", "num_blocks", "window_left", "window_right"])
def key_rows_kernel(
    key_rows_ptr, blocks_ptr, masks, NQ, NK, num_blocks, window_left, window_right, BLOCK_N: tl.constexpr
):
    """Write the rows of q that see each key under all masks. Grid: (num_blocks / BLOCKS * B). Keys are those of
    num_blocks blocks of BLOCK_N from the sequence's first one, num_keys in all.

    key_rows (B, 2, num_keys) int32: the rows [first, end), both 0 for a key that no row sees.
    blocks (B, 4 * num_blocks + num_keys / WORD) int32: ``some_rows`` and ``all_rows`` of each block, and then a bit for
    each of the NK keys that no row sees.
    """
    masks = sequences.complete_masks(unpack(masks), None, window_left, window_right)
    programs = tl.cdiv(num_blocks, BLOCKS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    tile = load_key_tile(batch, block, masks, NQ, NK, BLOCK_N)
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


@triton.jit(do_not_specialize=["NQ", "NK", "num_blocks", "window_left", "window_right"])
def visits_kernel(
    visits_ptr, key_rows_ptr, hidden_ptr, masks, NQ, NK, num_blocks, window_left, window_right, BLOCK_M: tl.constexpr,
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
    schedule.let_next_launch_start(PDL)
    masks = sequences.complete_masks(unpack(masks), None, window_left, window_right)
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
        tile = load_key_tile(batch, block, masks, NQ, NK, BLOCK_N)
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


# Query blocks, each of one query head, that are worth a share of their own. Shares of four times as many, or more, have
# half of a multiprocessor's mean work, so that they even out; shorter ones cost more than that saves.
LEAST_STEPS = 8
# Tiles that ``deal_shares`` reads at once.
LANES = tl.constexpr(128)


@triton.jit
def count_visits(blocks_ptr, batch_stride, num_blocks, tile, num_tiles, HALVES: tl.constexpr):
    """Return how many query blocks each of some tiles visits; 0 from tile num_tiles on."""
    tiles = num_blocks // HALVES
    existing = tl.minimum(tile, num_tiles - 1)
    blocks_ptr += (existing // tiles).to(tl.int64) * batch_stride
    first, end = backward_block.visited_blocks(blocks_ptr, num_blocks, existing % tiles * HALVES, HALVES)
    return tl.where(tile < num_tiles, tl.maximum(end - first, 0), 0)


@triton.jit
def count_shares(visits, limit):
    """Return the number of shares of tiles with ``visits`` query blocks; limit float32.

    A tile of up to 5 / 4 of ``limit`` stays whole, and the shares of others have at most 9 / 8 of it, rounded up.
    """
    return tl.maximum(tl.ceil(visits / limit - 0.25).to(tl.int32), 1)


@triton.jit
def work_of_share(mean, longest, least_share):
    """Return the query blocks of a share, float32, if multiprocessors have ``mean`` and the longest tile ``longest``.

    A little more than ``mean / 2`` or more, because the number of shares and slots has a limit. If the longest tile is
    not divided by shares of the mean, none is.
    """
    mean *= 1.0001
    half = tl.maximum(mean / 2, tl.minimum(mean, 4 * least_share))
    return tl.maximum(tl.where(longest > 1.25 * mean, half, mean), least_share)


@triton.jit
def deal_shares(
    own, shares_ptr, counters_ptr, blocks_ptr, batch_stride, num_blocks, num_tiles, num_shares, least_share, num_heads,
    heads_per_section, heads_per_multiprocessor, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the shares of tile ``own`` of num_tiles tiles of HALVES blocks of KEYS keys, for all num_heads key heads.

    shares (num_shares, SHARE_WORDS) int32: the ``Share`` of each program; there may be more of them than work.
    counters (slots, CONSUMERS) int32: those of used slots are cleared. least_share: query blocks.
    blocks (B, batch_stride) int32, num_blocks: as ``key_rows_kernel`` writes them.

    Heads are dealt in sections of heads_per_section, because the L2 holds one section's queries. If tiles are divided,
    the longest shares of each section are first. Other tiles keep their order, because neighbours have the same
    queries.

    Every program reads the bounds of all tiles, so that none waits for another.
    """
    lane = tl.arange(0, LANES)
    total = 0.0
    longest = 0
    for start in range(0, num_tiles, LANES):
        visits = count_visits(blocks_ptr, batch_stride, num_blocks, start + lane, num_tiles, HALVES)
        total += tl.sum(visits.to(tl.float32))
        longest = tl.maximum(longest, tl.max(visits))
    limit = work_of_share(total * heads_per_multiprocessor, longest, least_share)
    is_uneven = count_shares(longest, limit) > 1

    own_visits = count_visits(blocks_ptr, batch_stride, num_blocks, own, num_tiles, HALVES)
    count = count_shares(own_visits, limit)
    length = own_visits // count
    position = 0
    num_slots = 0
    num_dealt = 0
    for start in range(0, num_tiles, LANES):
        tile = start + lane
        its_visits = count_visits(blocks_ptr, batch_stride, num_blocks, tile, num_tiles, HALVES)
        its_count = tl.where(tile < num_tiles, count_shares(its_visits, limit), 0)
        its_length = its_visits // tl.maximum(its_count, 1)
        starts_first = tl.where(is_uneven & (its_length != length), its_length > length, tile < own)
        position += tl.sum(tl.where(starts_first, its_count, 0))
        num_slots += tl.sum(tl.where(tile < own, tl.maximum(its_count, 1) - 1, 0))
        num_dealt += tl.sum(its_count)
    tiles = num_blocks // HALVES
    end = num_shares * backward_block.SHARE_WORDS
    slots_of_head = count - 1
    first_slot = num_slots * num_heads
    for start in range(0, count * num_heads, LANES):
        number = (start + lane) // num_heads
        head = (start + lane) % num_heads
        first_head = head // heads_per_section * heads_per_section
        heads = tl.minimum(heads_per_section, num_heads - first_head)
        at = (first_head * num_dealt + (position + number) * heads + head - first_head) * backward_block.SHARE_WORDS
        exists = number < count
        tl.store(shares_ptr + at, tl.zeros_like(lane) + own % tiles, mask=exists)
        tl.store(shares_ptr + at + 1, own // tiles * num_heads + head, mask=exists)
        tl.store(shares_ptr + at + 2, number, mask=exists)
        tl.store(shares_ptr + at + 3, tl.zeros_like(lane) + count, mask=exists)
        tl.store(shares_ptr + at + 4, first_slot + head * slots_of_head, mask=exists)
    own_counters = slots_of_head * num_heads * channels.CONSUMERS
    for start in range(0, own_counters, LANES):
        counters = counters_ptr + first_slot * channels.CONSUMERS + start + lane
        tl.store(counters, tl.zeros_like(lane), mask=start + lane < own_counters)
    if own == 0:
        for start in range(num_dealt * num_heads * backward_block.SHARE_WORDS, end, LANES):
            tl.store(shares_ptr + start + lane, 0, mask=start + lane < end)


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


# Words of a program of ``write_blind_rows``.
BLIND_WORDS = 32


class Visits:
    """The blocks of block_n keys that each tile of block_m queries visits, as ``visits_kernel`` lists them.

    pdl: the next launch may begin at once. It must end after this one.
    """

    def __init__(self, problem: Problem, block_m: int, block_n: int, pdl: bool):
        self.problem = problem
        batch, tiles = problem.batch, triton.cdiv(problem.len_q, block_m)
        self.num_blocks = triton.cdiv(problem.len_k, block_n)
        num_keys = self.num_blocks * block_n
        self.shapes = {
            "visits_ptr": (batch, tiles, 1 + self.num_blocks),
            "key_rows_ptr": (batch, 2, num_keys),
            "hidden_ptr": (batch, num_keys // WORD.value),
        }
        self.launch = launch.Launch(
            visits_kernel,
            batch * triton.cdiv(tiles, TILES.value),
            {"num_warps": 8},
            call_arguments.numbers_of(problem),
            num_blocks=self.num_blocks,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            PDL=pdl,
        )

    def __call__(self, stream: int, tensors: Tensors) -> dict[str, Any]:
        """Launch, and return the results by the names of the main kernel's arguments."""
        device = tensors.q.device
        found: dict[str, Any] = {
            name: torch.empty(x, dtype=torch.int32, device=device) for name, x in self.shapes.items()
        }
        self.launch(stream, masks=call_arguments.masks_of(self.problem, tensors), **found)
        return found


class VisibleRows:
    """The rows that see each key, a bit for each of num_rows rows of q that sees no key, and ``Share``s.

    num_blocks: blocks of KEYS keys, ``halves`` of them in a tile. columns: as for ``slot_words``. section: key heads
    that run together. programs: those of the main kernel, one for each share; None for a deterministic call, which has
    no shares.
    """

    def __init__(self, problem: Problem, num_blocks: int, halves: int, num_rows: int, columns: int, section: int):
        self.problem, batch, num_keys = problem, problem.batch, num_blocks * channels.KEYS.value
        self.key_shapes = (batch, 2, num_keys), (batch, 4 * num_blocks + num_keys // WORD.value)
        self.shape = (batch, num_rows // WORD.value)
        multiprocessors, heads = device.num_sms(problem.device), problem.heads_kv
        tiles = batch * num_blocks // halves
        # A share has half of a multiprocessor's mean work or more, and a tile one slot less than shares.
        slots = 2 * multiprocessors // heads * heads
        shares = tiles * heads + slots
        self.programs = None if problem.is_deterministic else shares
        self.shares_size = shares * backward_block.SHARE_WORDS.value
        self.slots_shape = slots, backward_block.slot_words(columns)
        self.counters_shape = slots, channels.CONSUMERS.value
        programs = batch * triton.cdiv(self.shape[1], BLIND_WORDS)
        numbers = call_arguments.numbers_of(problem)
        self.key_rows = launch.Launch(
            key_rows_kernel,
            batch * triton.cdiv(num_blocks, BLOCKS.value),
            {"num_warps": 4},
            numbers,
            num_blocks=num_blocks,
            BLOCK_N=channels.KEYS.value,
        )
        self.launch = launch.Launch(
            backward_rows_kernel,
            programs + (0 if self.programs is None else tiles),
            {"num_warps": 4},
            numbers,
            num_words=self.shape[1],
            batch_stride=self.key_shapes[1][1],
            num_blocks=num_blocks,
            num_tiles=tiles,
            num_shares=shares,
            least_share=max(1, LEAST_STEPS // problem.group_size),
            heads_per_section=min(section, heads),
            heads_per_multiprocessor=heads / multiprocessors,
            BLOCK=BLIND_WORDS,
            HALVES=halves,
        )

    def __call__(self, stream: int, tensors: Tensors, lse: torch.Tensor) -> dict[str, Any]:
        """Launch, and return the results by the names of the main kernel's arguments. lse ``(B, HQ, NQ)``."""
        key_rows, blocks = (torch.empty(x, dtype=torch.int32, device=lse.device) for x in self.key_shapes)
        found: dict[str, Any] = {"key_rows_ptr": key_rows, "blocks_ptr": blocks}
        # Blocks are counted from the tensor's first key.
        masks = call_arguments.masks_of(self.problem, tensors)._replace(FROM_START=tl.constexpr(False))
        self.key_rows(stream, masks=masks, **found)
        found["blind_ptr"] = torch.empty(self.shape, dtype=torch.int32, device=lse.device)
        if self.programs is not None:
            found["shares_ptr"] = torch.empty(self.shares_size, dtype=torch.int32, device=lse.device)
            found["slots_ptr"] = torch.empty(self.slots_shape, dtype=torch.float32, device=lse.device)
            found["slot_counters_ptr"] = torch.empty(self.counters_shape, dtype=torch.int32, device=lse.device)
        of_launch = {name: found.get(name) for name in ("blind_ptr", "shares_ptr", "slot_counters_ptr", "blocks_ptr")}
        self.launch(stream, of_launch, lse_ptr=lse)
        return found
