"""Which tile a block of the sm_90 forward works on next, and which keys it sees: what the loading warp finds out."""

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M
from fused_rope_attn.attention.hopper.tiles import QueryTile, TileBounds
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.kernels.lengths import existing_keys, padded_row
from fused_rope_attn.kernels.masks import Mask, is_causal, key_range, sequence_mask
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class Schedule:
    """What the tiles of a call follow from.

    A block of the grid begins with the tile of its own number. Every further one it takes from a counter that all
    blocks share, so that the blocks end together, however long their tiles take.
    """

    # int32: how many tiles have been taken. In packed calls the table of ``describe_tiles`` follows, TILE_WORDS behind.
    counter_ptr: gl.tensor
    starts_ptr: gl.tensor | None  # kv_starts (B,) int32
    lens_ptr: gl.tensor | None  # kv_lens (B,) int32
    num_tiles: gl.tensor  # of all heads
    num_heads: gl.tensor  # B * HQ
    heads_per_section: gl.tensor  # heads whose keys and values share the L2, as for ``scheduled_tile``
    HQ: gl.tensor | None  # None in packed calls, as NQ and NK: the table says what they would
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor | None
    NK: gl.tensor | None
    tiles_per_head: gl.tensor | None  # packed calls: entries of the table, some of which hold no queries
    BLOCK_N: gl.constexpr
    BLOCK_M: gl.constexpr  # query rows of a tile
    QUERIES_IN_TILES: gl.constexpr  # whether rotated packed queries, saved or loaded, have whole tiles to a sequence


@record
class Work:
    """A ``QueryTile`` and what only the loading warp needs to know of it."""

    tile: QueryTile
    head_kv: gl.tensor
    first_k: gl.tensor | None  # packed calls: the row of the packed keys where the tile's sequence begins


@jit
def make_tile(mask, start_m, bh, batch, head, q_offset, query_end, rotated_row, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr):  # fmt: skip
    """The ``QueryTile`` of a head's queries from row ``start_m`` on, whose position is start_m + q_offset.

    mask: the sequence's ``kernels.masks.Mask``; query_end and rotated_row as in ``TileBounds``. Every tile visits a
    block at least, whose scores are masked where nothing is visible: its rows become zero on the usual path.
    """
    first, full_first, full_last, last = key_range(mask, start_m, q_offset, BLOCK_M, BLOCK_N)
    if mask.first_key is not None:
        # That of the rows' last keys alone: where a window is narrower than a block, both ends may lie in the same one.
        upper = Mask(
            num_keys=mask.num_keys, first_key=None, left=None, right=mask.right,
            READS_LENGTHS=mask.READS_LENGTHS,
        )  # fmt: skip
        _, _, full_last, _ = key_range(upper, start_m, q_offset, BLOCK_M, BLOCK_N)
    first_block = first // BLOCK_N
    num_blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N - first_block)
    last_block = first_block + num_blocks - 1
    bounds = TileBounds(
        last_block=last_block, lower_masked_from=last_block + 1 - full_first // BLOCK_N,
        first_key=0 if mask.first_key is None else mask.first_key, num_keys=mask.num_keys, query_end=query_end,
        rotated_row=rotated_row,
    )  # fmt: skip
    return QueryTile(
        start_m=start_m, bh=bh, batch=batch, head=head, num_blocks=num_blocks,
        upper_masked=last_block + 1 - full_last // BLOCK_N, bounds=bounds,
    )  # fmt: skip


@jit
def tile_if(exists, tile):
    """``tile``, or where there is none one of no blocks, which ends the work of those who hear of it."""
    return QueryTile(
        start_m=tile.start_m, bh=tile.bh, batch=tile.batch, head=tile.head,
        num_blocks=gl.where(exists, tile.num_blocks, 0), upper_masked=tile.upper_masked, bounds=tile.bounds,
    )  # fmt: skip


@jit
def tile_work(schedule, masks, index):
    """The ``Work`` of tile number ``index``, which exists."""
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    num_m_blocks = (schedule.NQ + BLOCK_M - 1) // BLOCK_M
    block, bh = scheduled_tile(
        index, num_m_blocks, schedule.num_heads, schedule.heads_per_section, LAST_TILE_FIRST=is_causal(masks.right)
    )
    start_m = block * BLOCK_M
    batch = bh // schedule.HQ
    head = bh % schedule.HQ
    num_keys = existing_keys(schedule.lens_ptr, batch, schedule.NK)
    q_offset = num_keys - schedule.NQ
    mask = sequence_mask(schedule.starts_ptr, batch, q_offset, num_keys, masks.left, masks.right, masks.READS_LENGTHS)
    tile = make_tile(mask, start_m, bh, batch, head, q_offset, None, None, BLOCK_M, schedule.BLOCK_N)
    return Work(tile=tile, head_kv=head // schedule.GROUP_SIZE, first_k=None)


@jit
def table_entry(schedule, masks, index):
    """(head, first row, row behind the sequence's last, first key row, keys, queries, sequence) of a packed tile.

    As ``describe_tiles`` left it in the table. A tile past the last one is read as the last.
    """
    slot, head = scheduled_tile(
        gl.minimum(index, schedule.num_tiles - 1), schedule.tiles_per_head, schedule.num_heads,
        schedule.heads_per_section, LAST_TILE_FIRST=is_causal(masks.right),
    )  # fmt: skip
    entry = schedule.counter_ptr + TILE_WORDS + slot * TILE_WORDS
    return (
        head,
        gl.load(entry),
        gl.load(entry + 1),
        gl.load(entry + 2),
        gl.load(entry + 3),
        gl.load(entry + 4),
        gl.load(entry + 5),
    )


@jit
def take_index(schedule):
    """The number of the next tile that no block has; there may be no such tile any more."""
    return gl.num_programs(0) + gl.atomic_add(schedule.counter_ptr, 1)


@jit
def packed_work(schedule, masks, index):
    """The ``Work`` of the first tile from number ``index`` on that holds queries; without any, one of no blocks.

    Rows are those of the packed tensors, so that a tile has its first row for ``start_m``, and the row behind its
    sequence's last in place of NQ: positions, which depend on the difference, come out as they are.
    """
    head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, masks, index)
    while (row >= end) & (index < schedule.num_tiles):
        index = take_index(schedule)
        head, row, end, first_k, len_k, len_q, sequence = table_entry(schedule, masks, index)
    mask = sequence_mask(None, 0, len_k - len_q, len_k, masks.left, masks.right, masks.READS_LENGTHS)
    rotated_row = row
    if schedule.QUERIES_IN_TILES:
        first_q = end - len_q
        rotated_row = padded_row(first_q, sequence, BACKWARD_BLOCK_M) + row - first_q
    tile = make_tile(mask, row, head, head * 0, head, len_k - end, end, rotated_row, schedule.BLOCK_M, schedule.BLOCK_N)
    tile = tile_if(index < schedule.num_tiles, tile)
    return Work(tile=tile, head_kv=head // schedule.GROUP_SIZE, first_k=first_k)


@jit
def first_work(schedule, masks):
    """The ``Work`` that this block of the grid begins with."""
    if schedule.tiles_per_head is None:
        return tile_work(schedule, masks, gl.program_id(0))
    else:
        return packed_work(schedule, masks, gl.program_id(0))


@jit
def next_work(schedule, masks):
    """The ``Work`` of the next tile that no block has, or one of no blocks: then the block has done its part."""
    index = take_index(schedule)
    if schedule.tiles_per_head is None:
        exists = index < schedule.num_tiles
        if schedule.lens_ptr is not None or schedule.starts_ptr is not None:
            # There is nothing to read for a tile past the last one.
            index = gl.minimum(index, schedule.num_tiles - 1)
        work = tile_work(schedule, masks, index)
        return Work(tile=tile_if(exists, work.tile), head_kv=work.head_kv, first_k=None)
    else:
        return packed_work(schedule, masks, index)
