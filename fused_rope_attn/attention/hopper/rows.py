"""Loading a tile of which some rows do not exist: they become zero, whatever memory holds there.

A weight of zero does not hide a NaN: what products read has to be zero itself. The TMA gives zeros past the end of a
tensor, but where a sequence ends or begins inside it, the loading warp waits for the tile and zeroes those rows. The
warps that multiply know nothing of it. One tile or two of a sequence are affected, and cost a round trip to memory.
"""

from fused_rope_attn.runtime.triton_compat import fence_async_shared, gl, jit, mbarrier, reinterpret, tma_load


@jit
def zero_rows(tile, first, last):
    """Rows [first, last) of a tile of shared memory (1, 1, rows, columns), 16-bit, columns a multiple of 64; one warp.

    Such a tile lies in panels of 64 columns, 128 bytes a row, within which the swizzle permutes 16 bytes: whole rows of
    a panel stay together, and their order does not matter to zeros.
    """
    ROWS: gl.constexpr = tile.shape[2]
    PANELS: gl.constexpr = tile.shape[3] // 64
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A row of a panel, and eight of them at a time, in words.
    rows = reinterpret(tile, gl.int32, [PANELS * ROWS, 32], FLAT)
    eights = reinterpret(tile, gl.int32, [PANELS * ROWS // 8, 256], FLAT)
    row = gl.to_tensor(first)
    while row < last:
        if (row % 8 == 0) & (row + 8 <= last):
            for panel in gl.static_range(PANELS):
                eights.index(panel * (ROWS // 8) + row // 8).store(gl.zeros([256], gl.int32, LANES))
            row += 8
        else:
            for panel in gl.static_range(PANELS):
                rows.index(panel * ROWS + row).store(gl.zeros([32], gl.int32, LANES))
            row += 1


@jit
def load_rows(desc, batch, head, row, tile, full, stats_desc=None, stats_row=None, stats_tile=None):
    """Load rows [row, row + BLOCK) of a head into ``tile``, perhaps with numbers of theirs, and say so at ``full``."""
    if stats_desc is None:
        mbarrier.expect(full, desc.block_type.nbytes)
    else:
        mbarrier.expect(full, desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma_load(stats_desc, [stats_row], full, stats_tile)
    tma_load(desc, [batch, head, row, 0], full, tile)


@jit
def load_existing(desc, batch, head, row, tile, full, raw, zeroed, first, last, stats_desc=None, stats_row=None,
                  stats_tile=None):  # fmt: skip
    """``load_rows`` with zeros for rows outside [first, last).

    ``raw``: a barrier of the loading warp's own, ``zeroed``: how often it has been used, which is returned.
    """
    BLOCK: gl.constexpr = tile.shape[2]
    if (first > row) | (last < row + BLOCK):
        load_rows(desc, batch, head, row, tile, raw, stats_desc, stats_row, stats_tile)
        mbarrier.wait(raw, zeroed & 1)
        zero_rows(tile, 0, gl.minimum(first - row, BLOCK))
        zero_rows(tile, gl.maximum(last - row, 0), BLOCK)
        fence_async_shared()
        mbarrier.arrive(full)
        zeroed += 1
    else:
        load_rows(desc, batch, head, row, tile, full, stats_desc, stats_row, stats_tile)
    return zeroed
