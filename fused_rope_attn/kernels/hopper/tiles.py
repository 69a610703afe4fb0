"""Which tile a block of the sm_90 forward works on, and how its warps hear of it."""

from fused_rope_attn.kernels.hopper.gluon_compat import gl, jit, mbarrier
from fused_rope_attn.kernels.primitives import scheduled_tile

# Query rows of one consumer warpgroup (the M of a wgmma), and the warpgroups that share a tile.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
BLOCK_M = 128
# Tiles announced ahead of the slowest reader, and the numbers that announce one.
RING = gl.constexpr(4)
NUMBERS = gl.constexpr(6)


@jit
def work(tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first row, batch * HQ + head, batch, head, key head, key blocks, those of them that need a mask)."""
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    block, bh = scheduled_tile(tile, (NQ + BLOCK_M - 1) // BLOCK_M, num_heads, section, LAST_FIRST=IS_CAUSAL)
    start_m = block * BLOCK_M
    last = NK
    full = NK
    if IS_CAUSAL:
        last = gl.minimum(NK, gl.maximum(0, start_m + BLOCK_M + NK - NQ))
        full = gl.minimum(NK, gl.maximum(0, start_m + NK - NQ + 1))
    blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N)
    head = bh % HQ
    return start_m, bh, bh // HQ, head, head // GROUP_SIZE, blocks, blocks - full // BLOCK_N


@jit
def announce(tile_smem, tile_full, tile_empty, turn, start_m, bh, batch, head, blocks, masked):
    """Tell the other warps which tile this turn has, so that its divisions are made once; no blocks: there is none."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % RING
    mbarrier.wait(tile_empty.index(slot), ((turn // RING) & 1) ^ 1)
    first = slot * NUMBERS
    tile_smem.index(first).store(gl.full([1], start_m, gl.int32, LANE))
    tile_smem.index(first + 1).store(gl.full([1], bh, gl.int32, LANE))
    tile_smem.index(first + 2).store(gl.full([1], batch, gl.int32, LANE))
    tile_smem.index(first + 3).store(gl.full([1], head, gl.int32, LANE))
    tile_smem.index(first + 4).store(gl.full([1], blocks, gl.int32, LANE))
    tile_smem.index(first + 5).store(gl.full([1], masked, gl.int32, LANE))
    mbarrier.arrive(tile_full.index(slot))


@jit
def number(tile_smem, index, NUM_WARPS: gl.constexpr):
    return gl.max(tile_smem.index(index).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@jit
def next_tile(tile_smem, tile_full, tile_empty, turn, NUM_WARPS: gl.constexpr):
    """What ``announce`` said in this turn: (start_m, bh, batch, head, blocks, masked)."""
    slot = turn % RING
    mbarrier.wait(tile_full.index(slot), (turn // RING) & 1)
    first = slot * NUMBERS
    start_m = number(tile_smem, first, NUM_WARPS)
    bh = number(tile_smem, first + 1, NUM_WARPS)
    batch = number(tile_smem, first + 2, NUM_WARPS)
    head = number(tile_smem, first + 3, NUM_WARPS)
    blocks = number(tile_smem, first + 4, NUM_WARPS)
    masked = number(tile_smem, first + 5, NUM_WARPS)
    mbarrier.arrive(tile_empty.index(slot))
    return start_m, bh, batch, head, blocks, masked
