# mypy: ignore-errors
"""Rotation of queries in the sm_90 forward: by warps of their own, and of the first tile by the warps that attend."""

from fused_rope_attn.attention.hopper.forward_tiles import (
    next_tile,
    query_end,
    query_position,
    rotated_row,
    tile_bounds,
)
from fused_rope_attn.attention.hopper.ptxas import opaque
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import (
    PairLayouts,
    RotaryTables,
    head_rotation,
    load_angles,
    load_pairs,
    norm_and_rotate,
    pack_pairs,
    pair_norm_weights,
    rotation_from,
)
from fused_rope_attn.kernels.tiles import RowFormat, TensorView, prefetch_rows, rows_at, rows_from
from fused_rope_attn.runtime.triton_compat import barrier, fence_async_shared, gl, jit, tma_store, tma_store_wait


@record
class QuerySource:
    """The queries that the caller gave, (B, HQ, NQ, D), and how they are normed and rotated."""

    view: TensorView
    tables: RotaryTables
    norm: Norm | None
    sign: gl.tensor  # 1 or -1, the sign of softmax_scale
    position_limit: gl.tensor | None  # positions that the tables have; None: at least as many as there are keys
    starts_ptr: gl.tensor | None  # kv_starts (B,) int32 if positions are counted from there: ``Schedule.FROM_START``
    TOKEN_TABLES: gl.constexpr  # row t of the tables belongs to packed token t
    saved_desc: gl.tensor | None  # the tensor that saves rotated queries for the backward pass, in blocks of ROWS rows
    format: RowFormat


@jit
def tile_rotation(source, tile, NQ, NK):
    """Return the ``Rotation`` of a tile's queries."""
    num_positions = tile_bounds(tile, NK).num_keys
    if source.position_limit is not None:
        num_positions = source.position_limit
    rotation = head_rotation(source.tables, tile.batch.to(gl.int64), num_positions, source.norm)
    if source.starts_ptr is not None:
        start = gl.maximum(0, gl.load(source.starts_ptr + tile.batch))
        rotation = rotation_from(rotation, start)
        if source.position_limit is not None:
            rotation = replace(rotation, num_positions=num_positions - start)
    if source.TOKEN_TABLES:
        # The sequence has as many queries as keys.
        rotation = rotation_from(rotation, query_end(tile, NQ) - num_positions)
    return rotation


@jit
def tile_rows(source, tile, NQ):
    """Return the ``Rows`` of a tile's head, as the caller gave them."""
    strides = source.view.strides
    ptr = source.view.ptr + tile.batch.to(gl.int64) * strides[0] + tile.head.to(gl.int64) * strides[1]
    return rows_at(ptr, strides, query_end(tile, NQ), source.format)


@jit
def rotate_tile_rows(source, head, tile, rotation, weights, start, offs, layouts, NQ, NK, BLOCK_D: gl.constexpr):
    """Return rows ``offs`` from ``start`` on of a tile's queries, normed and rotated, in pair order (rows, BLOCK_D).

    head: their ``tile_rows``; rotation: their ``tile_rotation``; weights: the norm's, for the pairs of ``layouts``.
    """
    rows, position = rows_from(head, start), query_position(tile, start, NQ, NK)
    first, second = load_pairs(rows, offs, rotation, layouts)
    cos, sin = load_angles(rotation, offs + position, BLOCK_D, layouts.PAIRS)
    first, second = norm_and_rotate(first, second, cos, sin, source.sign, rotation, weights, layouts.PAIRS)
    return pack_pairs(first, second)


@jit
def save_queries(source, tile, row, end, rotated):
    """Begin to save the queries from ``row`` on, rotated in shared memory (ROWS, BLOCK_D) and fenced for the TMA.

    They are not saved if there are none, because rows end with ``end``.
    """
    BLOCK_D: gl.constexpr = rotated.shape[1]
    # A packed sequence has whole blocks of ROWS to itself, and the next sequence follows.
    if row < end:
        saved_row = rotated_row(tile) + row - tile.start_m
        tma_store(source.saved_desc, [tile.batch, tile.head, saved_row, 0], rotated.reshape((1, 1, ROWS, BLOCK_D)))


@jit
def rotate_first_queries(source, tile, queries, row, NQ, NK):
    """Rotate the ROWS queries from ``row`` on of a block's first tile, for the warpgroup that calls this and attends.

    It has no other work yet, and registers for all of its rows at once, so that their loads take one round trip to
    memory. ``rotate_queries`` begins with the second tile. queries: the warpgroup's channel; its first slot gets the
    rotated queries. If they are saved, the TMA may still read that slot when the function returns.
    """
    BLOCK_D: gl.constexpr = queries.buffer.shape[2]
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    offs = gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS))
    weights = None
    if source.norm is not None:
        weights = pair_norm_weights(source.norm, source.tables, BLOCK_D, PAIRS)
    rotation, head = tile_rotation(source, tile, NQ, NK), tile_rows(source, tile, NQ)
    layouts = PairLayouts(PAIRS, WHOLE)
    q = rotate_tile_rows(source, head, tile, rotation, weights, row, offs, layouts, NQ, NK, BLOCK_D)
    rotated = queries.tile(queries.at(0))
    rotated.store(q.to(queries.buffer.dtype))
    fence_async_shared()
    barrier()
    if source.saved_desc is not None:
        save_queries(source, tile, row, query_end(tile, NQ), rotated)


@jit
def rotate_queries(tiles, queries, source, NQ, NK):
    """Rotate the query rows of each tile into shared memory, and save them if asked to; a warpgroup's work.

    The first tile's are left to ``rotate_first_queries``.
    """
    BLOCK_D: gl.constexpr = queries.buffer.shape[2]
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 64], [32, 1], [4, 1], [1, 0])
    # Four warps rotate so many rows at a time, eight pairs a thread.
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    offs = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    layouts = PairLayouts(PAIRS, WHOLE)
    weights = None
    if source.norm is not None:
        weights = pair_norm_weights(source.norm, source.tables, BLOCK_D, PAIRS)
    tile_step = 0
    tile = next_tile(tiles, tile_step)
    while tile.num_blocks > 0:
        at_queries = queries.at(tile_step)
        if tile_step > 0:
            rotation, head = tile_rotation(source, tile, NQ, NK), tile_rows(source, tile, NQ)
            # Rotation takes longer than a tile of few key blocks, and waits for memory most of the time.
            prefetch_rows(head, tile.start_m, query_end(tile, NQ), queries.TILES * ROWS, LINES)
            queries.wait_empty(at_queries)
            if source.saved_desc is not None:
                # Until the stores of the last tile, and so those from this buffer, have read it.
                tma_store_wait(0)
                barrier()
            for warpgroup in gl.static_range(queries.TILES):
                for chunk in gl.static_range(ROWS // CHUNK):
                    # These warps lack registers for the addresses of all rows at once.
                    start = opaque(tile.start_m) + warpgroup * ROWS + chunk * CHUNK
                    q = rotate_tile_rows(source, head, tile, rotation, weights, start, offs, layouts, NQ, NK, BLOCK_D)
                    # Do not load further chunks early: registers suffice for one, and with the norm's weights for none.
                    if warpgroup + chunk > 0 or weights is not None:
                        barrier()
                    rotated = queries.of_warpgroup(warpgroup).tile(at_queries).slice(chunk * CHUNK, CHUNK, dim=0)
                    rotated.store(q.to(queries.buffer.dtype))
            fence_async_shared()
            if source.saved_desc is not None:
                barrier()
                for warpgroup in gl.static_range(queries.TILES):
                    rotated = queries.of_warpgroup(warpgroup).tile(at_queries)
                    save_queries(source, tile, tile.start_m + warpgroup * ROWS, query_end(tile, NQ), rotated)
        queries.fill(at_queries)
        tile_step += 1
        tile = next_tile(tiles, tile_step)
    if source.saved_desc is not None:
        tma_store_wait(0)


@jit
def rotate_rope(tiles, queries, source, NQ, NK):
    """Rotate q_rope of each tile into shared memory, and save it if asked to; a warpgroup's work.

    Each warpgroup that attends has one slot, ``queries.rope``, next to the columns that the loading warp loads. Its
    rows are rotated in registers before the slot is empty.
    """
    BLOCK_D: gl.constexpr = queries.rope.shape[4]
    CONSUMERS: gl.constexpr = queries.full.shape[0]
    DTYPE: gl.constexpr = queries.rope.dtype
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    offs = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    layouts = PairLayouts(PAIRS, WHOLE)
    tile_step = 0
    tile = next_tile(tiles, tile_step)
    while tile.num_blocks > 0:
        rotation, head = tile_rotation(source, tile, NQ, NK), tile_rows(source, tile, NQ)
        prefetch_rows(head, tile.start_m, query_end(tile, NQ), CONSUMERS * ROWS, LINES)
        for warpgroup in gl.static_range(CONSUMERS):
            chunks = ()
            for chunk in gl.static_range(ROWS // CHUNK):
                # These warps lack registers for the addresses of all rows at once, and for angles of two chunks.
                if chunk > 0:
                    barrier()
                start = opaque(tile.start_m) + warpgroup * ROWS + chunk * CHUNK
                q = rotate_tile_rows(source, head, tile, rotation, None, start, offs, layouts, NQ, NK, BLOCK_D)
                chunks = chunks + (q.to(DTYPE),)
            own = queries.of_warpgroup(warpgroup)
            cursor = own.at(tile_step)
            own.wait_empty(cursor)
            if source.saved_desc is not None and warpgroup == 0:
                # Until the stores of the last tile have read the slots.
                tma_store_wait(0)
                barrier()
            rotated = own.rope.index(cursor.slot).reshape((ROWS, BLOCK_D))
            for chunk in gl.static_range(ROWS // CHUNK):
                rotated.slice(chunk * CHUNK, CHUNK, dim=0).store(chunks[chunk])
            fence_async_shared()
            if source.saved_desc is not None:
                barrier()
                save_queries(source, tile, tile.start_m + warpgroup * ROWS, query_end(tile, NQ), rotated)
            own.fill(cursor)
        tile_step += 1
        tile = next_tile(tiles, tile_step)
    if source.saved_desc is not None:
        tma_store_wait(0)
