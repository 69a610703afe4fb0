# mypy: ignore-errors
"""The sm_90 forward's warps that fill shared memory: one that loads tiles, and four that rotate queries."""

from fused_rope_attn.attention.hopper import channels, forward_tiles, masks
from fused_rope_attn.attention.hopper.channels import ROWS
from fused_rope_attn.kernels import norm, ptxas, rotation as rotary, tiles
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import barrier, fence_async_shared, gl, jit, tma_store, tma_store_wait


@record
class Loader:
    """Arguments of the loading warp alone. Descriptors are of (B, H, N, D) tensors, in the blocks of their buffers."""

    q_desc: gl.tensor | None  # queries that have been rotated; None: other warps rotate them
    k_desc: gl.tensor  # rotated keys
    v_desc: gl.tensor
    # Rotated columns of queries (B, HQ, NQ, R) and keys (B, 1, NK, R) in multi-head latent attention; None in others.
    q_rope_desc: gl.tensor | None
    k_rope_desc: gl.tensor | None
    # Their channels. ``keys`` and ``values`` take a step for each block; queries are None if other warps rotate them.
    queries: channels.Channel | None
    keys: channels.Channel
    values: channels.Channel
    arrival: gl.tensor | None  # the mbarrier of ``load_existing_rows``; None: keys end where the tensor does
    intervals: masks.IntervalMask | None
    PDL: gl.constexpr  # programmatic dependent launch: wait for the launch before
    # dO and its channel, which has the queries' steps, if the tiles are those of dQ. Zero out-of-range rows of K too
    # then, because dS is multiplied with them.
    do_desc: gl.tensor | None = None
    dos: channels.Channel | None = None
    EARLY: gl.constexpr = False
    LOOKUP: gl.constexpr = "last"


@jit
def load_queries(loader, tile, tile_step):
    """Load a tile's rotated queries, and dO, for each warpgroup as soon as it has released its last ones."""
    CONSUMERS: gl.constexpr = loader.queries.full.shape[0] // loader.queries.STAGES
    for warpgroup in gl.static_range(CONSUMERS):
        own = loader.queries.of_warpgroup(warpgroup)
        cursor = own.at(tile_step)
        own.wait_empty(cursor)
        # In the kernel for dQ, rotated_row counts the rows of lse and delta, and q and dO have no padding.
        row = (tile.rotated_row if loader.dos is None else tile.start_m) + warpgroup * ROWS
        channels.load_rows(
            loader.q_desc, tile.batch, tile.head, row, own, cursor, rope_desc=loader.q_rope_desc, rope_head=tile.head
        )
        if loader.dos is not None:
            own = loader.dos.of_warpgroup(warpgroup)
            cursor = own.at(tile_step)
            own.wait_empty(cursor)
            channels.load_rows(loader.do_desc, tile.batch, tile.head, row, own, cursor)


@jit
def load_keys(loader, work, visit, num_blocks, key_step, arrivals):
    """Load the keys of a ``key_row`` as soon as their slot is empty, and with intervals announce the visit.

    num_blocks: the blocks that the tile visits. Returns ``arrivals`` as ``load_existing_rows`` does.
    """
    keys, intervals, batch = loader.keys, loader.intervals, work.tile.batch
    row = work.key_row(visit, keys.buffer.shape[3])
    cursor = keys.at(key_step)
    keys.wait_empty(cursor)
    if intervals is not None:
        intervals.announce(cursor, visit, num_blocks)
    if loader.dos is not None and loader.arrival is not None:
        existing = work.existing_keys(loader.arrival)
        return channels.load_existing_rows(
            loader.k_desc, batch, work.head_kv, row, keys, cursor, existing, arrivals, None, loader.k_rope_desc
        )
    else:
        channels.load_rows(loader.k_desc, batch, work.head_kv, row, keys, cursor, rope_desc=loader.k_rope_desc)
        return arrivals


@jit
def load(loader, schedule, announced):
    """Announce tiles, and load the key and value blocks that they visit, the last one first; one warp's work."""
    intervals, values = loader.intervals, loader.values
    if schedule.tiles_per_head is not None:
        # The pre-pass has described the tiles.
        wait_for_previous_launch(loader.PDL)
    work = forward_tiles.first_work(schedule)
    forward_tiles.announce_tile(announced, 0, work.tile)
    # The pre-pass writes the counter and the keys. The warps that rotate queries need neither, and have begun.
    if not loader.EARLY:
        wait_for_previous_launch(loader.PDL)
    tile_step = 0  # the tile that was announced last, which is the one after the tile that is being loaded
    key_step = 0
    arrivals = 0
    first_visit, following_blocks = work.first_visit()
    while work.tile.num_blocks > 0:
        tile = work.tile
        existing = work.existing_keys(loader.arrival)
        # Before the next tile is announced, because the warps that multiply wait for a tile's first keys and queries,
        # and the announcement takes a round trip to the counter in global memory and divisions.
        visit, num_blocks = first_visit, following_blocks
        arrivals = load_keys(loader, work, visit, num_blocks, key_step, arrivals)
        if loader.queries is not None:
            # After the first keys, because their slot is free earlier than the queries' memory.
            if loader.LOOKUP == "last":
                load_queries(loader, tile, tile_step)
            else:
                if tile_step == 0:
                    load_queries(loader, tile, tile_step)
        if loader.EARLY and tile_step == 0:
            wait_for_previous_launch(loader.PDL)
        tile_step += 1
        following = forward_tiles.next_work(schedule, work)
        forward_tiles.announce_tile(announced, tile_step, following.tile)
        if loader.queries is not None and loader.LOOKUP == "queries" and tile_step > 1:
            load_queries(loader, tile, tile_step - 1)
        # Early, because they take a round trip to memory.
        first_visit, following_blocks = following.first_visit()
        for step in range(num_blocks):
            if intervals is None:
                visit = step
            if step > 0:
                arrivals = load_keys(loader, work, visit, num_blocks, key_step, arrivals)
            if intervals is not None:
                # Early, because a load takes as long as half a block's products.
                next_visit = gl.load(work.visits_ptr + gl.minimum(step + 1, num_blocks - 1))
            row = work.key_row(visit, schedule.BLOCK_N)
            cursor = values.at(key_step)
            values.wait_empty(cursor)
            # Zero out-of-range V rows: their weight is 0, but 0 * NaN is NaN. Scores of such keys are masked.
            of_block = existing
            if intervals is not None:
                words_ptr = work.hidden_ptr + (visit >> 3) * (schedule.BLOCK_N // 32)
                of_block = channels.ExistingRows(loader.arrival, None, None, words_ptr, (visit & 4) != 0)
            if loader.arrival is not None:
                arrivals = channels.load_existing_rows(
                    loader.v_desc, tile.batch, work.head_kv, row, values, cursor, of_block, arrivals
                )
            else:
                channels.load_rows(loader.v_desc, tile.batch, work.head_kv, row, values, cursor)
            if loader.queries is not None and loader.LOOKUP == "ahead":
                if (step == gl.minimum(1, num_blocks - 1)) & (following.tile.num_blocks > 0):
                    load_queries(loader, following.tile, tile_step)
            key_step += 1
            if intervals is not None:
                visit = next_visit
        work = following


@record
class QuerySource:
    """The queries that the caller gave, (B, HQ, NQ, D), and how they are normed and rotated."""

    view: tiles.TensorView
    tables: rotary.RotaryTables
    norm: norm.Norm | None
    sign: gl.tensor  # 1 or -1, the sign of softmax_scale
    TOKEN_TABLES: gl.constexpr  # row t of the tables belongs to packed token t
    format: tiles.RowFormat
    position_limit: gl.tensor | None = None  # positions that the tables have; None: at least as many as there are keys
    starts_ptr: gl.tensor | None = None  # kv_starts (B,) int32 if positions are counted from there
    saved_desc: gl.tensor | None = None  # the tensor that saves rotated queries, in blocks of ROWS rows


@record
class TileQueries:
    """The queries of a tile as the caller gave them, and what norms and rotates them."""

    tile: forward_tiles.QueryTile
    rows: tiles.Rows  # of the tile's head
    rotation: rotary.Rotation
    sign: gl.tensor
    weights: gl.tuple | None  # the norm's

    @jit
    def rotated(self, start, COUNT: gl.constexpr):
        """Return COUNT rows from ``start`` on, normed and rotated, in pair order (COUNT, BLOCK_D)."""
        BLOCK_D: gl.constexpr = self.rows.format.BLOCK_D
        layouts = pair_layouts(BLOCK_D)
        PAIRS: gl.constexpr = layouts.PAIRS
        offs = gl.arange(0, COUNT, gl.SliceLayout(1, PAIRS))
        rows, position = tiles.rows_from(self.rows, start), self.tile.position(start)
        first, second = rotary.load_pairs(rows, offs, self.rotation, layouts)
        angles = rotary.load_angles(self.rotation, offs + position, BLOCK_D, PAIRS)
        first, second = rotary.norm_and_rotate(first, second, angles, self.sign, self.rotation, self.weights, PAIRS)
        return rotary.pack_pairs(first, second)


@jit
def pair_layouts(BLOCK_D: gl.constexpr):
    """Return the ``PairLayouts`` in which four warps hold rows: eight pairs a thread."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    return rotary.PairLayouts(PAIRS, WHOLE)


@jit
def tile_queries(source, tile, weights):
    """Return the ``TileQueries`` of a tile; weights: the norm's, or None."""
    batch = tile.batch.to(gl.int64)
    num_positions = tile.num_keys if source.position_limit is None else source.position_limit
    rotation = rotary.head_rotation(source.tables, batch, num_positions, source.norm)
    if source.starts_ptr is not None:
        start = gl.maximum(0, gl.load(source.starts_ptr + tile.batch))
        rotation = rotary.rotation_from(rotation, start)
        if source.position_limit is not None:
            rotation = replace(rotation, num_positions=num_positions - start)
    if source.TOKEN_TABLES:
        # The sequence has as many queries as keys.
        rotation = rotary.rotation_from(rotation, tile.query_end - num_positions)
    strides = source.view.strides
    ptr = source.view.ptr + batch * strides[0] + tile.head.to(gl.int64) * strides[1]
    rows = tiles.rows_at(ptr, strides, tile.query_end, source.format)
    return TileQueries(tile, rows, rotation, source.sign, weights)


@jit
def save_queries(source, tile, row, rotated):
    """Begin to save the tile's queries from ``row`` on, rotated in shared memory (ROWS, BLOCK_D), fenced for the TMA.

    They are not saved if there are none, because the tile's queries end before.
    """
    BLOCK_D: gl.constexpr = rotated.shape[1]
    # A packed sequence has whole blocks of ROWS to itself, and the next sequence follows.
    if row < tile.query_end:
        saved_row = tile.rotated_row + row - tile.start_m
        tma_store(source.saved_desc, [tile.batch, tile.head, saved_row, 0], rotated.reshape((1, 1, ROWS, BLOCK_D)))


@jit
def rotate_first_queries(source, tile, queries, row):
    """Rotate the ROWS queries from ``row`` on of a block's first tile, for the warpgroup that calls this and attends.

    It has no other work yet, and registers for all of its rows at once, so that their loads take one round trip to
    memory. ``rotate_queries`` begins with the second tile. queries: the warpgroup's channel; its first slot gets the
    rotated queries. If they are saved, the TMA may still read that slot when the function returns.
    """
    BLOCK_D: gl.constexpr = queries.buffer.shape[2]
    weights = None
    if source.norm is not None:
        weights = rotary.pair_norm_weights(source.norm, source.tables, BLOCK_D, pair_layouts(BLOCK_D).PAIRS)
    q = tile_queries(source, tile, weights).rotated(row, ROWS)
    rotated = queries.tile(queries.at(0))
    rotated.store(q.to(queries.buffer.dtype))
    fence_async_shared()
    barrier()
    if source.saved_desc is not None:
        save_queries(source, tile, row, rotated)


@jit
def rotate_queries(announced, queries, source):
    """Rotate the query rows of each tile into shared memory, and save them if asked to; a warpgroup's work.

    The first tile's are left to ``rotate_first_queries``.
    """
    BLOCK_D: gl.constexpr = queries.buffer.shape[2]
    LINES: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 64], [32, 1], [4, 1], [1, 0])
    # Four warps rotate so many rows at a time, eight pairs a thread.
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    weights = None
    if source.norm is not None:
        weights = rotary.pair_norm_weights(source.norm, source.tables, BLOCK_D, pair_layouts(BLOCK_D).PAIRS)
    tile_step = 0
    tile = forward_tiles.next_tile(announced, tile_step)
    while tile.num_blocks > 0:
        at_queries = queries.at(tile_step)
        if tile_step > 0:
            given = tile_queries(source, tile, weights)
            # Rotation takes longer than a tile of few key blocks, and waits for memory most of the time.
            tiles.prefetch_rows(given.rows, tile.start_m, tile.query_end, queries.TILES * ROWS, LINES)
            queries.wait_empty(at_queries)
            if source.saved_desc is not None:
                # Until the stores of the last tile, and so those from this buffer, have read it.
                tma_store_wait(0)
                barrier()
            for warpgroup in gl.static_range(queries.TILES):
                for chunk in gl.static_range(ROWS // CHUNK):
                    # These warps lack registers for the addresses of all rows at once.
                    q = given.rotated(ptxas.opaque(tile.start_m) + warpgroup * ROWS + chunk * CHUNK, CHUNK)
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
                    save_queries(source, tile, tile.start_m + warpgroup * ROWS, rotated)
        queries.fill(at_queries)
        tile_step += 1
        tile = forward_tiles.next_tile(announced, tile_step)
    if source.saved_desc is not None:
        tma_store_wait(0)


@jit
def rotate_rope(announced, queries, source):
    """Rotate q_rope of each tile into shared memory, and save it if asked to; a warpgroup's work.

    Each warpgroup that attends has one slot, ``queries.rope``, next to the columns that the loading warp loads. Its
    rows are rotated in registers before the slot is empty.
    """
    BLOCK_D: gl.constexpr = queries.rope.shape[4]
    CONSUMERS: gl.constexpr = queries.full.shape[0]
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    tile_step = 0
    tile = forward_tiles.next_tile(announced, tile_step)
    while tile.num_blocks > 0:
        given = tile_queries(source, tile, None)
        tiles.prefetch_rows(given.rows, tile.start_m, tile.query_end, CONSUMERS * ROWS, LINES)
        for warpgroup in gl.static_range(CONSUMERS):
            chunks = ()
            for chunk in gl.static_range(ROWS // CHUNK):
                # These warps lack registers for the addresses of all rows at once, and for angles of two chunks.
                if chunk > 0:
                    barrier()
                q = given.rotated(ptxas.opaque(tile.start_m) + warpgroup * ROWS + chunk * CHUNK, CHUNK)
                chunks = chunks + (q.to(queries.rope.dtype),)
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
                save_queries(source, tile, tile.start_m + warpgroup * ROWS, rotated)
            own.fill(cursor)
        tile_step += 1
        tile = forward_tiles.next_tile(announced, tile_step)
    if source.saved_desc is not None:
        tma_store_wait(0)
