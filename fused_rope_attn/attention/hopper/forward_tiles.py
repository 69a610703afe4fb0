# mypy: ignore-errors
"""Tiles of the sm_90 forward: their order, the keys that they see, and how the loading warp announces them.

The loading warp alone finds the next tile and divides its number into batch, head and key blocks (``first_work``,
``next_work``). It announces the tile to the other warps as a few int32 numbers in shared memory (``announce_tile``,
``next_tile``). All warps count the announced tiles: ``tile_step``.
"""

from triton import constexpr_function

from fused_rope_attn.attention.hopper import channels
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.kernels import masks, sequences
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

# Number of tiles that may be announced before the slowest warp has read the first of them.
TILE_STAGES = gl.constexpr(4)


@record
class QueryTile:
    """ROWS query rows of one head for each warpgroup that multiplies, and the key blocks that they see, int32.

    Key blocks are visited from the last one down and counted in that order. A block may need a mask on both sides.
    A tile is announced by its first 6, 10 or 12 fields, see ``announcements``.
    """

    start_m: gl.tensor  # the first query row; in packed calls a row of the packed tensor
    bh: gl.tensor  # batch * HQ + head
    batch: gl.tensor
    head: gl.tensor
    num_blocks: gl.tensor  # key blocks to visit; 0 ends the work: there is no such tile, and none after it
    upper_masked: gl.tensor  # visited blocks before this number hold keys after some row's last visible one
    last_block: gl.tensor | None  # see ``last_key_block``; None: num_blocks - 1
    lower_masked_from: gl.tensor  # visited blocks from this number on hold keys before some row's first visible one
    first_key: gl.tensor  # no row sees a key before this one
    num_keys: gl.tensor  # keys from this one on do not exist
    query_end: gl.tensor  # the row at which queries end: NQ, or in packed calls the end of the tile's sequence
    rotated_row: gl.tensor  # the tile's first row among rotated queries, saved or loaded

    @jit
    def last_key_block(self):
        """Return the last key block that some row sees, counted from the sequence's first key.

        If it is not announced it is not kept either, because wide heads have no register for it.
        """
        return self.num_blocks - 1 if self.last_block is None else self.last_block

    @jit
    def position(self, row):
        """Return the position of query ``row`` among its sequence's keys: the last query has the last key's."""
        return row + self.num_keys - self.query_end


@constexpr_function
def field_name(index):
    """Return the name of a field of ``QueryTile``."""
    return QueryTile.record_fields[index]


@record
class Announcements:
    """The channel through which tiles are announced: WORDS int32 in shared memory for each tile."""

    channel: channels.Channel
    WORDS: gl.constexpr
    NQ: gl.tensor | None  # None if tiles are announced with their ends: Triton 3.6 fails on unused arguments of warps
    NK: gl.tensor | None


@jit
def announcements(HAS_BOUNDS: gl.constexpr, IS_PACKED: gl.constexpr, READERS: gl.constexpr, NQ, NK):
    """Allocate the ``Announcements`` that READERS warpgroups read.

    HAS_BOUNDS: a tile's keys may begin after key 0 or end before NK, as in packed calls. Without, the fields from
    ``last_block`` on follow from those before, NQ and NK; unless the call IS_PACKED, those from ``query_end`` on do.
    """
    WORDS: gl.constexpr = 12 if IS_PACKED else (10 if HAS_BOUNDS else 6)
    smem = gl.allocate_shared_memory(gl.int32, [TILE_STAGES * WORDS, 1], mbarrier.MBarrierLayout())
    channel = channels.channel_of(smem, TILE_STAGES)
    channel.init(FILLS=1, RELEASES=READERS * channels.WARPGROUP_THREADS)
    return Announcements(channel, WORDS, None if IS_PACKED else NQ, None if HAS_BOUNDS else NK)


@jit
def announce_tile(tiles, step, tile):
    """Announce ``tile`` as number ``step``."""
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    cursor = tiles.channel.at(step)
    tiles.channel.wait_empty(cursor)
    for i in gl.static_range(tiles.WORDS):
        word = tiles.channel.buffer.index(cursor.slot * tiles.WORDS + i)
        word.store(gl.full([1], getattr(tile, field_name(i)), gl.int32, ONE_WARP))
    tiles.channel.fill(cursor)


@jit
def next_tile(tiles, step):
    """Return the ``QueryTile`` that was announced as number ``step``; each warpgroup asks once for each step."""
    ONE_WARPGROUP: gl.constexpr = gl.BlockedLayout([1], [32], [channels.WARPGROUP_WARPS], [0])
    cursor = tiles.channel.at(step)
    tiles.channel.wait_full(cursor)
    fields = ()
    for i in gl.static_range(tiles.WORDS):
        word = tiles.channel.buffer.index(cursor.slot * tiles.WORDS + i)
        fields = fields + (gl.max(word.load(ONE_WARPGROUP), 0),)
    tiles.channel.release_by_threads(cursor)
    if tiles.WORDS == 12:
        return QueryTile(*fields)
    elif tiles.WORDS == 10:
        return QueryTile(*fields, query_end=tiles.NQ, rotated_row=fields[0])
    else:
        return QueryTile(
            *fields,
            last_block=None,
            lower_masked_from=fields[4],  # no block: all keys from 0 on exist
            first_key=0,
            num_keys=tiles.NK,
            query_end=tiles.NQ,
            rotated_row=fields[0],
        )


@record
class TileSource:
    """From what the tiles of a call and their masks follow, but for its numbers; None: the call has no such mask."""

    # int32: how many tiles have been taken, zeroed by the pre-pass. In packed calls the table of ``describe_tiles``
    # follows after TILE_WORDS.
    counter_ptr: gl.tensor
    starts_ptr: gl.tensor | None  # kv_starts (B,) int32
    lens_ptr: gl.tensor | None  # kv_lens (B,) int32
    READS_LENGTHS: gl.constexpr  # as in ``kernels.masks.Mask``
    FROM_START: gl.constexpr = False  # keys are counted from kv_starts, as in ``kernels.sequences.MaskArguments``
    IS_ALIGNED: gl.constexpr = False  # use ``is_aligned``, which holds
    # The results of ``visits_kernel``, if masks are intervals of query rows. With these there is no other mask, and
    # starts and lens say only at which positions the sequence is.
    visits_ptr: gl.tensor | None = None
    key_rows_ptr: gl.tensor | None = None
    hidden_ptr: gl.tensor | None = None


@record
class Schedule:
    """The numbers from which the tiles of a call follow.

    A block of the grid begins with the tile of its own number. It takes every further tile from a counter that all
    blocks share, so that the blocks end together, however long their tiles take. ``take_index`` has the exception.
    """

    source: TileSource
    window: masks.Window
    num_tiles: gl.tensor  # of all heads
    num_heads: gl.tensor  # B * HQ
    heads_per_section: gl.tensor  # heads that share the L2 for their keys and values, as for ``scheduled_tile``
    tiles_per_head: gl.tensor | None  # packed calls: entries of the table; some hold no queries
    HQ: gl.tensor | None  # None in packed calls, as NQ and NK: the table replaces them
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor | None
    NK: gl.tensor | None
    BLOCK_N: gl.constexpr
    BLOCK_M: gl.constexpr  # query rows of a tile
    QUERIES_IN_TILES: gl.constexpr  # whether rotated packed queries, saved or loaded, have whole tiles to a sequence
    IS_STATIC: gl.constexpr = False  # tiles are dealt by their numbers, and back in every second round


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
    def first_visit(self):
        """Return the first visit of the tile, 0 without intervals, and the number of its blocks."""
        if self.visits_ptr is None:
            return 0, self.tile.num_blocks
        else:
            return gl.load(self.visits_ptr), gl.load(self.visits_ptr - 1)

    @jit
    def key_row(self, visit, BLOCK_N: gl.constexpr):
        """Return the first row of the key block that the tile visits in step ``visit``, from its last block down.

        With intervals visit is a word of ``visits_kernel``.
        """
        if self.visits_ptr is None:
            row = (self.tile.last_block - visit) * BLOCK_N
        else:
            row = (visit >> 3) * BLOCK_N
        if self.first_k is not None:
            row += self.first_k
        return row

    @jit
    def existing_keys(self, arrival):
        """Return the ``ExistingRows`` that hold keys that some row of the tile may see."""
        first, end = self.tile.first_key, self.tile.num_keys
        if self.first_k is not None:
            first += self.first_k
            end += self.first_k
        return channels.ExistingRows(arrival, first, end)


@jit
def make_tile(schedule, mask, start_m, bh, batch, head, q_offset, query_end, rotated_row):
    """Return the ``QueryTile`` of a head's queries from row ``start_m`` on, at position start_m + q_offset.

    mask: the sequence's ``kernels.masks.Mask``; query_end and rotated_row as in ``QueryTile``. Every tile visits at
    least one block. If nothing in it is visible the mask hides all scores, and the rows become zero on the usual path.
    """
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    first, full_first, full_last, last = masks.key_range(mask, start_m, q_offset, schedule.BLOCK_M, BLOCK_N)
    if mask.first_key is not None:
        # Without a lower bound, because both ends of a window that is narrower than a block may be in the same one.
        upper = replace(mask, first_key=None, window=replace(mask.window, left=None))
        _, _, full_last, _ = masks.key_range(upper, start_m, q_offset, schedule.BLOCK_M, BLOCK_N)
    first_block = first // BLOCK_N
    num_blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N - first_block)
    last_block = first_block + num_blocks - 1
    return QueryTile(
        start_m,
        bh,
        batch,
        head,
        num_blocks,
        upper_masked=last_block + 1 - full_last // BLOCK_N,
        last_block=last_block,
        lower_masked_from=last_block + 1 - full_first // BLOCK_N,
        first_key=0 if mask.first_key is None else mask.first_key,
        num_keys=mask.num_keys,
        query_end=query_end,
        rotated_row=rotated_row,
    )


@jit
def tile_work(schedule, index):
    """Return the ``Work`` of tile number ``index``, which exists."""
    # With intervals too, because the last rows of a prefix or a tree see the most keys.
    LAST_FIRST: gl.constexpr = masks.is_causal(schedule.window.right) or schedule.source.visits_ptr is not None
    query_blocks = (schedule.NQ + schedule.BLOCK_M - 1) // schedule.BLOCK_M
    block, bh = scheduled_tile(index, query_blocks, schedule.num_heads, schedule.heads_per_section, LAST_FIRST)
    start_m = block * schedule.BLOCK_M
    batch = bh // schedule.HQ
    head = bh % schedule.HQ
    source = schedule.source
    num_keys = sequences.existing_keys(source.lens_ptr, batch, schedule.NK)
    starts_ptr, first_k = source.starts_ptr, None
    if source.FROM_START:
        first_k = masks.first_key(starts_ptr, batch, 0, num_keys, None)
        num_keys -= first_k
        starts_ptr = None
    head_kv = head // schedule.GROUP_SIZE
    if source.visits_ptr is not None:
        key_blocks = (schedule.NK + schedule.BLOCK_N - 1) // schedule.BLOCK_N
        tile_number = batch * query_blocks + start_m // schedule.BLOCK_M
        visits_ptr = source.visits_ptr + tile_number.to(gl.int64) * (1 + key_blocks)
        WORDS: gl.constexpr = schedule.BLOCK_N // 32
        hidden_ptr = source.hidden_ptr + batch.to(gl.int64) * WORDS * key_blocks
        # The number of blocks is announced with each of them, so that warps that rotate queries need not wait for the
        # launch that counts them. The tile's last block and what needs a mask are not read.
        zero = num_keys * 0
        tile = QueryTile(start_m, bh, batch, head, zero + 1, zero, zero, zero, zero, num_keys, schedule.NQ, start_m)
        return Work(tile, index, head_kv, first_k, visits_ptr + 1, hidden_ptr)
    else:
        q_offset = num_keys - schedule.NQ
        mask = masks.sequence_mask(
            starts_ptr, batch, q_offset, num_keys, schedule.window, schedule.source.READS_LENGTHS
        )
        tile = make_tile(schedule, mask, start_m, bh, batch, head, q_offset, schedule.NQ, start_m)
        return Work(tile, index, head_kv, first_k)


@jit
def take_index(schedule, index):
    """Return the number of the tile that this block takes after number ``index``; it may be past the last tile.

    The longest tiles are dealt first, and a block takes its second tile when it begins its first one. So a block with a
    long tile would take another long one from the counter. If there are few tiles, the second one is fixed instead:
    block 0, which has the longest first tile, gets number 2 * blocks - 1, block 1 the number before, and so on.
    """
    blocks = gl.num_programs(0)
    if schedule.IS_STATIC:
        return 2 * (index // blocks + 1) * blocks - 1 - index
    else:
        # With more than 9/4 for each block a simulation gains nothing. With four, calls take 6 to 8 % more time.
        are_few = 4 * schedule.num_tiles <= 9 * blocks
        is_fixed = are_few & (index < blocks)
        # With Triton 3.6 a branch around the counter takes 1 to 4 % more time than adding 0.
        taken = gl.atomic_add(schedule.source.counter_ptr, gl.where(is_fixed, 0, 1))
        return gl.where(is_fixed, 2 * blocks - 1 - index, gl.where(are_few, 2 * blocks, blocks) + taken)


@jit
def table_entry(schedule, index):
    """Return (head, first row, end of the sequence, first key row, keys, queries, sequence) of a packed tile.

    ``describe_tiles`` of the pre-pass has written the table. A tile past the last one is read as the last one.
    """
    index, section = gl.minimum(index, schedule.num_tiles - 1), schedule.heads_per_section
    slot, head = scheduled_tile(
        index, schedule.tiles_per_head, schedule.num_heads, section, masks.is_causal(schedule.window.right)
    )
    entry = schedule.source.counter_ptr + TILE_WORDS + slot * TILE_WORDS
    first_row, end, first_k = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    return head, first_row, end, first_k, gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)


@jit
def packed_work(schedule, index):
    """Return the ``Work`` of the first tile from number ``index`` on that holds queries; if there is none, no blocks.

    Rows are those of the packed tensors: a tile has its first row for ``start_m``, and the end of its sequence in place
    of NQ. Positions depend on the difference alone, and are the sequence's own.
    """
    head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, index)
    while (row >= end) & (index < schedule.num_tiles):
        index = take_index(schedule, index)
        head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, index)
    mask = masks.sequence_mask(None, 0, len_k - len_q, len_k, schedule.window, schedule.source.READS_LENGTHS)
    rotated_row = row
    if schedule.QUERIES_IN_TILES:
        first_q = end - len_q
        rotated_row = sequences.padded_row(first_q, sequence, channels.BACKWARD_BLOCK_M) + row - first_q
    tile = make_tile(schedule, mask, row, head, head * 0, head, len_k - end, end, rotated_row)
    tile = replace(tile, num_blocks=gl.where(index < schedule.num_tiles, tile.num_blocks, 0))
    return Work(tile, index, head // schedule.GROUP_SIZE, first_k)


@jit
def first_work(schedule):
    """Return the ``Work`` that this block of the grid begins with."""
    index = gl.program_id(0)
    return tile_work(schedule, index) if schedule.tiles_per_head is None else packed_work(schedule, index)


@jit
def next_work(schedule, work):
    """Return the ``Work`` that follows this block's ``work``, or one of no blocks if no tile is left for it."""
    index = take_index(schedule, work.index)
    if schedule.tiles_per_head is not None:
        return packed_work(schedule, index)
    else:
        exists = index < schedule.num_tiles
        source = schedule.source
        if source.lens_ptr is not None or source.starts_ptr is not None or source.visits_ptr is not None:
            # A tile past the last one has no lengths and no visits to read.
            index = gl.minimum(index, schedule.num_tiles - 1)
        work = tile_work(schedule, index)
        tile = replace(work.tile, num_blocks=gl.where(exists, work.tile.num_blocks, 0))
        return replace(work, tile=tile)
