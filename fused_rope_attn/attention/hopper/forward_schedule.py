"""Which tile a block of the sm_90 forward works on next, and which keys it sees: what the loading warp finds out."""

from fused_rope_attn.attention.hopper.shapes import FORWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.tiles import QueryTile, TileBounds
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.kernels.lengths import existing_keys
from fused_rope_attn.kernels.masks import Mask, key_range, sequence_mask
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class Schedule:
    """What the tiles of a call follow from. The blocks of the grid begin with one tile each, and count on together."""

    counter_ptr: gl.tensor  # int32, how many tiles have been given out behind the first ones; in packed calls the
    # table that ``describe_tiles`` has written follows it, TILE_WORDS behind
    starts_ptr: gl.tensor | None  # kv_starts (B,) int32
    lens_ptr: gl.tensor | None  # kv_lens (B,) int32
    num_tiles: gl.tensor  # of all heads
    num_heads: gl.tensor  # B * HQ
    heads_per_section: gl.tensor  # heads whose keys and values share the L2, as for ``scheduled_tile``
    HQ: gl.tensor | None  # None in packed calls, as all that the table says instead
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor | None
    NK: gl.tensor | None
    tiles_per_head: gl.tensor | None  # entries of the table in packed calls, some of which hold no queries; else None
    BLOCK_N: gl.constexpr


@record
class Work:
    """A ``QueryTile`` and what only the loading warp needs to know of it."""

    tile: QueryTile
    head_kv: gl.tensor
    first_k: gl.tensor | None  # packed calls: the row of the packed keys where the tile's sequence begins


@jit
def visited_blocks(mask, start_m, q_offset, BLOCK_N: gl.constexpr):
    """(num_blocks, upper_masked, last_block, lower_masked_from) of the tile of queries from ``start_m`` on.

    As ``QueryTile`` and ``TileBounds`` define them; ``mask`` is the sequence's ``kernels.masks.Mask``.
    """
    first, full_first, full_last, last = key_range(mask, start_m, q_offset, BLOCK_M, BLOCK_N)
    if mask.first_key is not None:
        # That of the rows' last keys alone: where a window is narrower than a block, both ends may lie in the same one.
        upper = Mask(
            num_keys=mask.num_keys, first_key=None, left=None, right=mask.right, IS_CAUSAL=mask.IS_CAUSAL,
            READS_LENGTHS=mask.READS_LENGTHS,
        )  # fmt: skip
        _, _, full_last, _ = key_range(upper, start_m, q_offset, BLOCK_M, BLOCK_N)
    first_block = first // BLOCK_N
    num_blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N - first_block)
    last_block = first_block + num_blocks - 1
    lower_masked_from = last_block + 1 - full_first // BLOCK_N
    upper_masked = last_block + 1 - full_last // BLOCK_N
    return num_blocks, upper_masked, last_block, lower_masked_from


@jit
def tile_work(schedule, masks, index):
    """The ``Work`` of tile number ``index``, which exists."""
    num_m_blocks = (schedule.NQ + BLOCK_M - 1) // BLOCK_M
    block, bh = scheduled_tile(
        index, num_m_blocks, schedule.num_heads, schedule.heads_per_section, LAST_TILE_FIRST=masks.IS_CAUSAL
    )
    start_m = block * BLOCK_M
    batch = bh // schedule.HQ
    head = bh % schedule.HQ
    num_keys = existing_keys(schedule.lens_ptr, batch, schedule.NK)
    q_offset = num_keys - schedule.NQ
    mask = sequence_mask(
        schedule.starts_ptr, batch, q_offset, num_keys, masks.left, masks.right, masks.IS_CAUSAL, masks.READS_LENGTHS
    )
    num_blocks, upper_masked, last_block, lower_masked_from = visited_blocks(mask, start_m, q_offset, schedule.BLOCK_N)
    bounds = TileBounds(
        last_block=last_block, lower_masked_from=lower_masked_from,
        first_key=0 if mask.first_key is None else mask.first_key, num_keys=num_keys, query_end=None,
    )  # fmt: skip
    tile = QueryTile(
        start_m=start_m, bh=bh, batch=batch, head=head, num_blocks=num_blocks, upper_masked=upper_masked, bounds=bounds
    )
    return Work(tile=tile, head_kv=head // schedule.GROUP_SIZE, first_k=None)


@jit
def table_entry(schedule, masks, index):
    """(head, first row, row behind the sequence's last, first key row, keys, queries) of a tile of packed queries.

    As ``describe_tiles`` left it in the table. A tile past the last one is read as the last.
    """
    slot, head = scheduled_tile(
        gl.minimum(index, schedule.num_tiles - 1), schedule.tiles_per_head, schedule.num_heads,
        schedule.heads_per_section, LAST_TILE_FIRST=masks.IS_CAUSAL,
    )  # fmt: skip
    entry = schedule.counter_ptr + TILE_WORDS + slot * TILE_WORDS
    return head, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)


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
    head, row, end, first_k, len_k, len_q = table_entry(schedule, masks, index)
    while (row >= end) & (index < schedule.num_tiles):
        index = take_index(schedule)
        head, row, end, first_k, len_k, len_q = table_entry(schedule, masks, index)
    mask = sequence_mask(None, 0, len_k - len_q, len_k, masks.left, masks.right, masks.IS_CAUSAL, masks.READS_LENGTHS)
    num_blocks, upper_masked, last_block, lower_masked_from = visited_blocks(mask, row, len_k - end, schedule.BLOCK_N)
    num_blocks = gl.where(index < schedule.num_tiles, num_blocks, 0)
    bounds = TileBounds(
        last_block=last_block, lower_masked_from=lower_masked_from,
        first_key=0 if mask.first_key is None else mask.first_key, num_keys=len_k, query_end=end,
    )  # fmt: skip
    tile = QueryTile(
        start_m=row, bh=head, batch=head * 0, head=head, num_blocks=num_blocks, upper_masked=upper_masked, bounds=bounds
    )
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
        tile = work.tile
        tile = QueryTile(
            start_m=tile.start_m, bh=tile.bh, batch=tile.batch, head=tile.head,
            num_blocks=gl.where(exists, tile.num_blocks, 0), upper_masked=tile.upper_masked, bounds=tile.bounds,
        )  # fmt: skip
        return Work(tile=tile, head_kv=work.head_kv, first_k=None)
    else:
        return packed_work(schedule, masks, index)
