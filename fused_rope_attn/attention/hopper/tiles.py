"""Which tile a block of the sm_90 forward works on, and how its warps hear of it."""

from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.kernels.lengths import existing_keys
from fused_rope_attn.kernels.masks import Mask, first_key, key_range
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

# Query rows of one consumer warpgroup (the M of a wgmma), and the warpgroups that share a tile.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
BLOCK_M = 128
# Tiles announced ahead of the slowest reader, and the numbers that announce one: those of every call, and those of
# calls whose keys do not begin at 0 or end at NK, with one more where queries end before NQ, in packed calls. RANGED
# everywhere is how many of the latter there are: 0, BOUNDS or PACKED_BOUNDS.
RING = gl.constexpr(4)
NUMBERS = gl.constexpr(6)
BOUNDS = gl.constexpr(4)
PACKED_BOUNDS = gl.constexpr(5)


@jit
def visited_blocks(start_m, q_offset, NK, start, left, right, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr,
                   BOUNDED: gl.constexpr):  # fmt: skip
    """(key blocks, those of them that need a mask, bounds) of the tile of queries from start_m on; see ``work``."""
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    mask = Mask(num_keys=NK, first_key=start, left=left, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=BOUNDED)
    first, full_first, full_last, last = key_range(mask, start_m, q_offset, BLOCK_M, BLOCK_N)
    if start is None:
        start = 0
    else:
        # That of the rows' last keys alone: where a window is narrower than a block, both ends may lie in the same one.
        upper = Mask(num_keys=NK, first_key=None, left=None, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=BOUNDED)
        _, _, full_last, _ = key_range(upper, start_m, q_offset, BLOCK_M, BLOCK_N)
    first_block = first // BLOCK_N
    blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N - first_block)
    top = first_block + blocks - 1
    bounds = (top, top + 1 - full_first // BLOCK_N, start, NK)
    return blocks, top + 1 - full_last // BLOCK_N, bounds


@jit
def work(tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, starts_ptr, lens_ptr, left, right, BLOCK_N: gl.constexpr,
         IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr):  # fmt: skip
    """(first row, batch * HQ + head, batch, head, key head, key blocks, those of them that need a mask, bounds).

    Key blocks are visited from the last one down; the first ``masked`` hold keys behind some row's last one.
    ``bounds``: (the last key block, how many blocks come before those that hold keys before some row's first one, first
    key, number of keys). A block may be of both kinds.
    """
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    block, bh = scheduled_tile(tile, (NQ + BLOCK_M - 1) // BLOCK_M, num_heads, section, IS_CAUSAL)
    start_m = block * BLOCK_M
    batch = bh // HQ
    head = bh % HQ
    if lens_ptr is not None:
        NK = existing_keys(lens_ptr, batch, NK)
    start = None
    if starts_ptr is not None or left is not None:
        start = first_key(starts_ptr, batch, NK - NQ, NK, left)
    blocks, masked, bounds = visited_blocks(
        start_m, NK - NQ, NK, start, left, right, BLOCK_N, IS_CAUSAL, BOUNDED
    )  # fmt: skip
    return start_m, bh, batch, head, head // GROUP_SIZE, blocks, masked, bounds


@jit
def table_entry(tile, num_tiles, table_ptr, slots, num_heads, section, IS_CAUSAL: gl.constexpr):
    """(head, first row, row behind the sequence's last, first key row, keys, queries) of a tile of packed queries.

    As ``describe_tiles`` left it in ``table``. A tile past the last one is read as the last.
    """
    slot, head = scheduled_tile(gl.minimum(tile, num_tiles - 1), slots, num_heads, section, IS_CAUSAL)
    entry = table_ptr + slot * TILE_WORDS
    return head, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)


@jit
def packed_work(tile, num_tiles, counter_ptr, num_heads, section, GROUP_SIZE, slots, left, right,
                BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr):  # fmt: skip
    """``work`` of the first tile from ``tile`` on that holds queries: (..., bounds, first key row); no blocks: none.

    Rows are those of the packed tensors, so that a tile has its first row for ``start_m``, and its bounds end with the
    row behind its sequence's last, in place of NQ: positions, which depend on the difference, come out as they are.
    """
    table_ptr = counter_ptr + TILE_WORDS
    head, row, end, first_k, len_k, len_q = table_entry(
        tile, num_tiles, table_ptr, slots, num_heads, section, IS_CAUSAL
    )  # fmt: skip
    while (row >= end) & (tile < num_tiles):
        tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        head, row, end, first_k, len_k, len_q = table_entry(
            tile, num_tiles, table_ptr, slots, num_heads, section, IS_CAUSAL
        )  # fmt: skip
    start = None
    if left is not None:
        start = first_key(None, 0, len_k - len_q, len_k, left)
    blocks, masked, bounds = visited_blocks(row, len_k - end, len_k, start, left, right, BLOCK_N, IS_CAUSAL, BOUNDED)
    blocks = gl.where(tile < num_tiles, blocks, 0)
    top, low, start, len_k = bounds
    bounds = (top, low, start, len_k, end)
    return row, head, head * 0, head, head // GROUP_SIZE, blocks, masked, bounds, first_k


@jit
def announce(tile_smem, tile_full, tile_empty, turn, start_m, bh, batch, head, blocks, masked, bounds,
             RANGED: gl.constexpr):  # fmt: skip
    """Tell the other warps which tile this turn has, so that its divisions are made once; no blocks: there is none."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % RING
    mbarrier.wait(tile_empty.index(slot), ((turn // RING) & 1) ^ 1)
    first = slot * (NUMBERS + RANGED)
    tile_smem.index(first).store(gl.full([1], start_m, gl.int32, LANE))
    tile_smem.index(first + 1).store(gl.full([1], bh, gl.int32, LANE))
    tile_smem.index(first + 2).store(gl.full([1], batch, gl.int32, LANE))
    tile_smem.index(first + 3).store(gl.full([1], head, gl.int32, LANE))
    tile_smem.index(first + 4).store(gl.full([1], blocks, gl.int32, LANE))
    tile_smem.index(first + 5).store(gl.full([1], masked, gl.int32, LANE))
    if RANGED:
        for i in gl.static_range(RANGED):
            tile_smem.index(first + NUMBERS + i).store(gl.full([1], bounds[i], gl.int32, LANE))
    mbarrier.arrive(tile_full.index(slot))


@jit
def number(tile_smem, index, NUM_WARPS: gl.constexpr):
    return gl.max(tile_smem.index(index).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@jit
def next_tile(tile_smem, tile_full, tile_empty, turn, NUM_WARPS: gl.constexpr, RANGED: gl.constexpr):
    """What ``announce`` said in this turn: (start_m, bh, batch, head, blocks, masked, bounds); see ``tile_bounds``."""
    slot = turn % RING
    mbarrier.wait(tile_full.index(slot), (turn // RING) & 1)
    first = slot * (NUMBERS + RANGED)
    start_m = number(tile_smem, first, NUM_WARPS)
    bh = number(tile_smem, first + 1, NUM_WARPS)
    batch = number(tile_smem, first + 2, NUM_WARPS)
    head = number(tile_smem, first + 3, NUM_WARPS)
    blocks = number(tile_smem, first + 4, NUM_WARPS)
    masked = number(tile_smem, first + 5, NUM_WARPS)
    bounds = ()
    if RANGED:
        top = number(tile_smem, first + NUMBERS, NUM_WARPS)
        low = number(tile_smem, first + NUMBERS + 1, NUM_WARPS)
        start = number(tile_smem, first + NUMBERS + 2, NUM_WARPS)
        len_k = number(tile_smem, first + NUMBERS + 3, NUM_WARPS)
        bounds = (top, low, start, len_k)
        if RANGED == PACKED_BOUNDS:
            bounds = (top, low, start, len_k, number(tile_smem, first + NUMBERS + 4, NUM_WARPS))
    mbarrier.arrive(tile_empty.index(slot))
    return start_m, bh, batch, head, blocks, masked, bounds


@jit
def tile_bounds(bounds, blocks, NK, RANGED: gl.constexpr):
    """(last key block, blocks before those at the other end that need a mask, first key, number of keys) of a tile.

    Without RANGED nothing is announced, and nothing carried around loops: NK keys, seen from the first on.
    """
    if RANGED:
        return bounds[0], bounds[1], bounds[2], bounds[3]
    else:
        return blocks - 1, blocks, 0, NK


@jit
def query_limit(bounds, NQ, RANGED: gl.constexpr):
    """The row at which a tile's queries end: NQ, or in packed calls its sequence's own."""
    if RANGED == PACKED_BOUNDS:
        return bounds[4]
    else:
        return NQ
