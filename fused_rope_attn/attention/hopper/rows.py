"""Loading a tile of which some rows do not exist: they become zero, whatever memory holds there.

A weight of zero does not hide a NaN: what products read has to be zero itself. The TMA gives zeros past the end of a
tensor, but where a sequence ends or begins inside it, the loading warp waits for the tile and zeroes those rows. The
warps that multiply know nothing of it. One tile or two of a sequence are affected, and cost a round trip to memory.
"""

from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import fence_async_shared, gl, jit, mbarrier, reinterpret, tma_load


@record
class RowStatistics:
    """One float32 for each row of a tile, which the TMA loads with it: from ``start`` of ``desc`` on, into ``smem``."""

    desc: gl.tensor
    start: gl.tensor
    smem: gl.shared_memory_descriptor


@jit
def zero_rows(tile, first_row, last_row):
    """Zero rows [first_row, last_row) of a tile in shared memory, with one warp.

    tile: (1, 1, rows, columns), 16-bit, its columns a multiple of 64. Such a tile lies in panels of 64 columns, 128
    bytes a row, within which the swizzle permutes 16 bytes: whole rows of a panel stay together, and their order does
    not matter to zeros.
    """
    ROWS: gl.constexpr = tile.shape[2]
    PANELS: gl.constexpr = tile.shape[3] // 64
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A row of a panel, and eight of them at a time, in words.
    rows = reinterpret(tile, gl.int32, [PANELS * ROWS, 32], FLAT)
    eights = reinterpret(tile, gl.int32, [PANELS * ROWS // 8, 256], FLAT)
    row = gl.to_tensor(first_row)
    while row < last_row:
        if (row % 8 == 0) & (row + 8 <= last_row):
            for panel in gl.static_range(PANELS):
                eights.index(panel * (ROWS // 8) + row // 8).store(gl.zeros([256], gl.int32, ONE_WARP))
            row += 8
        else:
            for panel in gl.static_range(PANELS):
                rows.index(panel * ROWS + row).store(gl.zeros([32], gl.int32, ONE_WARP))
            row += 1


@jit
def load_rows(desc, batch, head, row, tile, full, stats=None):
    """Load rows [row, row + BLOCK) of a head (of ``desc``, (B, H, N, D)) into ``tile`` (1, 1, BLOCK, columns).

    The mbarrier ``full`` completes when they have arrived, with the ``RowStatistics`` where there are any.
    """
    if stats is None:
        mbarrier.expect(full, desc.block_type.nbytes)
    else:
        mbarrier.expect(full, desc.block_type.nbytes + stats.desc.block_type.nbytes)
        tma_load(stats.desc, [stats.start], full, stats.smem)
    tma_load(desc, [batch, head, row, 0], full, tile)


@jit
def load_existing(desc, batch, head, row, tile, full, first_row, last_row, arrival, arrivals, stats=None):
    """As ``load_rows``, with zeros for rows outside [first_row, last_row).

    ``arrival`` is an mbarrier of the loading warp alone, at which it waits for a tile before it zeroes rows;
    ``arrivals`` is how often that has happened. Returns the new ``arrivals``.
    """
    BLOCK: gl.constexpr = tile.shape[2]
    if (first_row > row) | (last_row < row + BLOCK):
        load_rows(desc, batch, head, row, tile, arrival, stats)
        mbarrier.wait(arrival, arrivals & 1)
        zero_rows(tile, 0, gl.minimum(first_row - row, BLOCK))
        zero_rows(tile, gl.maximum(last_row - row, 0), BLOCK)
        fence_async_shared()
        mbarrier.arrive(full)
        arrivals += 1
    else:
        load_rows(desc, batch, head, row, tile, full, stats)
    return arrivals
