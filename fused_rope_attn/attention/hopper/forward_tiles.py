# mypy: ignore-errors
"""Tiles of the sm_90 forward: their order, the keys that they see, and how the loading warp announces them.

The loading warp alone finds the next tile and divides its number into batch, head and key blocks. It announces the tile
to the other warps as a few int32 numbers in shared memory. All warps count the announced tiles: ``tile_step``.
"""

from triton import constexpr_function

from fused_rope_attn.attention.hopper.channels import Channel
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, WARPGROUP_THREADS, WARPGROUP_WARPS
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.kernels.lengths import existing_keys, padded_row
from fused_rope_attn.kernels.masks import first_key, is_causal, key_range, sequence_mask
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.runtime.triton_compat import gl, jit

# Number of tiles that may be announced before the slowest warp has read the first of them.
TILE_STAGES = gl.constexpr(4)


@record
class TileBounds:
    """The bounds of a tile's keys and queries, int32, in calls in which they do not follow from the shapes alone."""

    last_block: gl.tensor  # the last key block that some row sees, counted from the sequence's first key
    lower_masked_from: gl.tensor  # visited blocks from this number on hold keys before some row's first visible one
    first_key: gl.tensor  # no row sees a key before this one
    num_keys: gl.tensor  # keys from this one on do not exist
    query_end: gl.tensor | None  # in packed calls: the end of the tile's sequence, a row
    rotated_row: gl.tensor | None  # in packed calls: the tile's first row among rotated queries, saved or loaded


@record
class QueryTile:
    """ROWS query rows of one head for each warpgroup that multiplies, and the key blocks that they see, int32.

    Key blocks are visited from the last one down and counted in that order. A block may need a mask on both sides.
    """

    start_m: gl.tensor  # the first query row; in packed calls a row of the packed tensor
    bh: gl.tensor  # batch * HQ + head
    batch: gl.tensor
    head: gl.tensor
    num_blocks: gl.tensor  # key blocks to visit; 0 ends the work: there is no such tile, and none after it
    upper_masked: gl.tensor  # visited blocks before this number hold keys after some row's last visible one
    bounds: TileBounds | None  # None: keys begin at 0 and end at NK, queries end at NQ


@jit
def tile_bounds(tile, NK):
    """Return the ``TileBounds`` of any tile. If none are announced, loops need not carry them."""
    if tile.bounds is None:
        return TileBounds(tile.num_blocks - 1, tile.num_blocks, 0, NK, query_end=None, rotated_row=None)
    else:
        return tile.bounds


@jit
def query_end(tile, NQ):
    """Return the row at which a tile's queries end: NQ, or in packed calls the end of its sequence."""
    if tile.bounds is None:
        return NQ
    elif tile.bounds.query_end is None:
        return NQ
    else:
        return tile.bounds.query_end


@jit
def rotated_row(tile):
    """Return a tile's first row among rotated queries, which are loaded, or saved for the backward pass."""
    if tile.bounds is None:
        return tile.start_m
    elif tile.bounds.rotated_row is None:
        return tile.start_m
    else:
        return tile.bounds.rotated_row


@jit
def query_position(tile, row, NQ, NK):
    """Return the position of query ``row`` among its sequence's keys: the last query has the last key's."""
    return row + tile_bounds(tile, NK).num_keys - query_end(tile, NQ)


@record
class Announcements:
    """The channel through which tiles are announced; a slot holds WORDS int32 numbers."""

    channel: Channel
    WORDS: gl.constexpr  # as ``announced_words`` counts them
    HAS_BOUNDS: gl.constexpr  # whether tiles have ``TileBounds``
    IS_PACKED: gl.constexpr  # whether these have a ``query_end``

    @jit
    def write(self, word, number):
        ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.channel.buffer.index(word).store(gl.full([1], number, gl.int32, ONE_WARP))

    @jit
    def read(self, word):
        ONE_WARPGROUP: gl.constexpr = gl.BlockedLayout([1], [32], [WARPGROUP_WARPS], [0])
        return gl.max(self.channel.buffer.index(word).load(ONE_WARPGROUP), 0)


@constexpr_function
def announcement_releases(readers, is_packed):
    """Return how many arrivals release an announcement that ``readers`` warpgroups read by ``next_tile``."""
    return readers if is_packed else readers * WARPGROUP_THREADS


@constexpr_function
def announced_words(has_bounds, is_packed):
    """Return how many numbers announce a tile."""
    return 6 + 4 * has_bounds + 2 * is_packed


@jit
def announce_tile(tiles, step, tile):
    """Announce ``tile`` as number ``step``."""
    channel = tiles.channel
    cursor = channel.at(step)
    channel.wait_empty(cursor)
    word = cursor.slot * tiles.WORDS
    tiles.write(word, tile.start_m)
    tiles.write(word + 1, tile.bh)
    tiles.write(word + 2, tile.batch)
    tiles.write(word + 3, tile.head)
    tiles.write(word + 4, tile.num_blocks)
    tiles.write(word + 5, tile.upper_masked)
    if tiles.HAS_BOUNDS:
        tiles.write(word + 6, tile.bounds.last_block)
        tiles.write(word + 7, tile.bounds.lower_masked_from)
        tiles.write(word + 8, tile.bounds.first_key)
        tiles.write(word + 9, tile.bounds.num_keys)
        if tiles.IS_PACKED:
            tiles.write(word + 10, tile.bounds.query_end)
            tiles.write(word + 11, tile.bounds.rotated_row)
    channel.fill(cursor)


@jit
def read_bounds(tiles, word):
    """Return the ``TileBounds`` that begin with number ``word`` of the announcements."""
    last_block, lower_masked_from = tiles.read(word), tiles.read(word + 1)
    first_key, num_keys = tiles.read(word + 2), tiles.read(word + 3)
    query_end = tiles.read(word + 4) if tiles.IS_PACKED else None
    rotated_row = tiles.read(word + 5) if tiles.IS_PACKED else None
    return TileBounds(last_block, lower_masked_from, first_key, num_keys, query_end, rotated_row)


@jit
def next_tile(tiles, step):
    """Return the ``QueryTile`` that was announced as number ``step``; each warpgroup asks once for each step."""
    channel = tiles.channel
    cursor = channel.at(step)
    channel.wait_full(cursor)
    word = cursor.slot * tiles.WORDS
    start_m, bh, batch, head = tiles.read(word), tiles.read(word + 1), tiles.read(word + 2), tiles.read(word + 3)
    num_blocks, upper_masked = tiles.read(word + 4), tiles.read(word + 5)
    bounds = read_bounds(tiles, word + 6) if tiles.HAS_BOUNDS else None
    tile = QueryTile(start_m, bh, batch, head, num_blocks, upper_masked, bounds)
    if tiles.IS_PACKED:
        # With Triton 3.9 packed sequences of up to 1024 tokens take 1 to 4 % less so than with 128 arrivals.
        channel.release(cursor)
    else:
        channel.release_by_threads(cursor)
    return tile


@record
class VisitLists:
    """The results of ``visits_kernel``."""

    visits_ptr: gl.tensor
    hidden_ptr: gl.tensor
    num_blocks: gl.tensor


@record
class Schedule:
    """The numbers from which the tiles of a call follow.

    A block of the grid begins with the tile of its own number. It takes every further tile from a counter that all
    blocks share, so that the blocks end together, however long their tiles take. ``take_index`` has the exception.
    """

    # int32: how many tiles have been taken. In packed calls the table of ``describe_tiles`` follows after TILE_WORDS.
    counter_ptr: gl.tensor
    starts_ptr: gl.tensor | None  # kv_starts (B,) int32
    lens_ptr: gl.tensor | None  # kv_lens (B,) int32
    num_tiles: gl.tensor  # of all heads
    num_heads: gl.tensor  # B * HQ
    heads_per_section: gl.tensor  # heads that share the L2 for their keys and values, as for ``scheduled_tile``
    HQ: gl.tensor | None  # None in packed calls, as NQ and NK: the table replaces them
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor | None
    NK: gl.tensor | None
    tiles_per_head: gl.tensor | None  # packed calls: entries of the table; some hold no queries
    BLOCK_N: gl.constexpr
    BLOCK_M: gl.constexpr  # query rows of a tile
    QUERIES_IN_TILES: gl.constexpr  # whether rotated packed queries, saved or loaded, have whole tiles to a sequence
    FROM_START: gl.constexpr  # whether keys are counted from kv_starts, as in ``kernels.sequences.MaskArguments``
    intervals: VisitLists | None = None  # None: the call has no intervals


@record
class Work:
    """A ``QueryTile`` and what only the loading warp needs."""

    tile: QueryTile
    index: gl.tensor  # the tile's number
    head_kv: gl.tensor
    first_k: gl.tensor | None  # the row at which the sequence's keys begin; None: 0
    visits_ptr: gl.tensor | None = None  # with intervals: the tile's visits, and before them how many there are
    hidden_ptr: gl.tensor | None = None  # a bit for each of the sequence's keys that no row sees


@jit
def make_tile(schedule, mask, start_m, bh, batch, head, q_offset, query_end=None, rotated_row=None):
    """Return the ``QueryTile`` of a head's queries from row ``start_m`` on, at position start_m + q_offset.

    mask: the sequence's ``kernels.masks.Mask``; query_end and rotated_row as in ``TileBounds``. Every tile visits at
    least one block. If nothing in it is visible the mask hides all scores, and the rows become zero on the usual path.
    """
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    first, full_first, full_last, last = key_range(mask, start_m, q_offset, schedule.BLOCK_M, BLOCK_N)
    if mask.first_key is not None:
        # Without a lower bound, because both ends of a window that is narrower than a block may be in the same one.
        upper = replace(mask, first_key=None, window=replace(mask.window, left=None))
        _, _, full_last, _ = key_range(upper, start_m, q_offset, schedule.BLOCK_M, BLOCK_N)
    first_block = first // BLOCK_N
    num_blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N - first_block)
    last_block = first_block + num_blocks - 1
    lower_masked_from = last_block + 1 - full_first // BLOCK_N
    first_key = 0 if mask.first_key is None else mask.first_key
    bounds = TileBounds(last_block, lower_masked_from, first_key, mask.num_keys, query_end, rotated_row)
    upper_masked = last_block + 1 - full_last // BLOCK_N
    return QueryTile(start_m, bh, batch, head, num_blocks, upper_masked, bounds)


@jit
def tile_if(exists, tile):
    """Return ``tile``, or unless it exists one of no blocks, which ends the work of the warps that read it."""
    return replace(tile, num_blocks=gl.where(exists, tile.num_blocks, 0))


@jit
def listed_work(schedule, index, start_m, bh, batch, head, num_keys, head_kv, first_k):
    """Return the ``Work`` of a head's queries from row ``start_m`` on, tile number ``index``, by the ``VisitLists``."""
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    lists = schedule.intervals
    tiles = (schedule.NQ + BLOCK_M - 1) // BLOCK_M
    visits_ptr = lists.visits_ptr + (batch * tiles + start_m // BLOCK_M).to(gl.int64) * (1 + lists.num_blocks)
    WORDS: gl.constexpr = schedule.BLOCK_N // 32
    hidden_ptr = lists.hidden_ptr + batch.to(gl.int64) * WORDS * lists.num_blocks
    # The number of blocks is announced with each of them, so that warps that rotate queries need not wait for the
    # launch that counts them. The tile's last block and what needs a mask are not read.
    bounds = TileBounds(num_keys * 0, num_keys * 0, num_keys * 0, num_keys, query_end=None, rotated_row=None)
    tile = QueryTile(start_m, bh, batch, head, num_keys * 0 + 1, num_keys * 0, bounds)
    return Work(tile, index, head_kv, first_k, visits_ptr + 1, hidden_ptr)


@jit
def first_visit_of(work):
    """Return the first visit of a tile, 0 without intervals, and the number of its blocks."""
    if work.visits_ptr is None:
        return 0, work.tile.num_blocks
    else:
        return gl.load(work.visits_ptr), gl.load(work.visits_ptr - 1)


@jit
def tile_work(schedule, masks, index):
    """Return the ``Work`` of tile number ``index``, which exists."""
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    num_m_blocks = (schedule.NQ + BLOCK_M - 1) // BLOCK_M
    block, bh = scheduled_tile(
        index,
        num_m_blocks,
        schedule.num_heads,
        schedule.heads_per_section,
        # With intervals too, because the last rows of a prefix or a tree see the most keys.
        LAST_TILE_FIRST=is_causal(masks.window.right) or schedule.intervals is not None,
    )
    start_m = block * BLOCK_M
    batch = bh // schedule.HQ
    head = bh % schedule.HQ
    num_keys = existing_keys(schedule.lens_ptr, batch, schedule.NK)
    starts_ptr, first_k = schedule.starts_ptr, None
    if schedule.FROM_START:
        first_k = first_key(starts_ptr, batch, 0, num_keys, None)
        num_keys -= first_k
        starts_ptr = None
    head_kv = head // schedule.GROUP_SIZE
    if schedule.intervals is not None:
        return listed_work(schedule, index, start_m, bh, batch, head, num_keys, head_kv, first_k)
    else:
        q_offset = num_keys - schedule.NQ
        mask = sequence_mask(starts_ptr, batch, q_offset, num_keys, masks.window, masks.READS_LENGTHS)
        tile = make_tile(schedule, mask, start_m, bh, batch, head, q_offset)
        return Work(tile, index, head_kv, first_k)


@jit
def table_entry(schedule, masks, index):
    """Return (head, first row, end of the sequence, first key row, keys, queries, sequence) of a packed tile.

    ``describe_tiles`` of the pre-pass has written the table. A tile past the last one is read as the last one.
    """
    index, section = gl.minimum(index, schedule.num_tiles - 1), schedule.heads_per_section
    slot, head = scheduled_tile(
        index, schedule.tiles_per_head, schedule.num_heads, section, is_causal(masks.window.right)
    )
    entry = schedule.counter_ptr + TILE_WORDS + slot * TILE_WORDS
    first_row, end, first_k = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    return head, first_row, end, first_k, gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)


@jit
def take_index(schedule, index):
    """Return the number of the tile that this block takes after number ``index``; it may be past the last tile.

    The longest tiles are dealt first, and a block takes its second tile when it begins its first one. So a block with a
    long tile would take another long one from the counter. If there are few tiles, the second one is fixed instead:
    block 0, which has the longest first tile, gets number 2 * blocks - 1, block 1 the number before, and so on.
    """
    blocks = gl.num_programs(0)
    # With more than 9/4 for each block a simulation gains nothing. With four, calls take 6 to 8 % more time.
    are_few = 4 * schedule.num_tiles <= 9 * blocks
    is_fixed = are_few & (index < blocks)
    # With Triton 3.6 a branch around the counter takes 1 to 4 % more time than adding 0.
    taken = gl.atomic_add(schedule.counter_ptr, gl.where(is_fixed, 0, 1))
    return gl.where(is_fixed, 2 * blocks - 1 - index, gl.where(are_few, 2 * blocks, blocks) + taken)


@jit
def packed_work(schedule, masks, index):
    """Return the ``Work`` of the first tile from number ``index`` on that holds queries; if there is none, no blocks.

    Rows are those of the packed tensors: a tile has its first row for ``start_m``, and the end of its sequence in place
    of NQ. Positions depend on the difference alone, and are the sequence's own.
    """
    head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, masks, index)
    while (row >= end) & (index < schedule.num_tiles):
        index = take_index(schedule, index)
        head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, masks, index)
    mask = sequence_mask(None, 0, len_k - len_q, len_k, masks.window, masks.READS_LENGTHS)
    rotated_row = row
    if schedule.QUERIES_IN_TILES:
        first_q = end - len_q
        rotated_row = padded_row(first_q, sequence, BACKWARD_BLOCK_M) + row - first_q
    tile = make_tile(schedule, mask, row, head, head * 0, head, len_k - end, end, rotated_row)
    tile = tile_if(index < schedule.num_tiles, tile)
    return Work(tile, index, head // schedule.GROUP_SIZE, first_k)


@jit
def first_work(schedule, masks):
    """Return the ``Work`` that this block of the grid begins with."""
    if schedule.tiles_per_head is None:
        return tile_work(schedule, masks, gl.program_id(0))
    else:
        return packed_work(schedule, masks, gl.program_id(0))


@jit
def next_work(schedule, masks, work):
    """Return the ``Work`` that follows this block's ``work``, or one of no blocks if no tile is left for it."""
    index = take_index(schedule, work.index)
    if schedule.tiles_per_head is None:
        exists = index < schedule.num_tiles
        if schedule.lens_ptr is not None or schedule.starts_ptr is not None or schedule.intervals is not None:
            # A tile past the last one has no lengths and no visits to read.
            index = gl.minimum(index, schedule.num_tiles - 1)
        work = tile_work(schedule, masks, index)
        return replace(work, tile=tile_if(exists, work.tile))
    else:
        return packed_work(schedule, masks, index)
