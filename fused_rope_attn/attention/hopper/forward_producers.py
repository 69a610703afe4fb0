# mypy: ignore-errors
"""The sm_90 forward's loading warp, which announces tiles and loads what they need through the TMA."""

from fused_rope_attn.attention.hopper.channels import load_existing_rows, load_rows, load_seen_rows, rope_part
from fused_rope_attn.attention.hopper.forward_tiles import (
    announce_tile,
    first_visit_of,
    first_work,
    next_work,
    rotated_row,
)
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class Loader:
    """Arguments of the loading warp alone. Descriptors are of (B, H, N, D) tensors, in the blocks of their buffers."""

    q_desc: gl.tensor | None  # queries that have been rotated; None: other warps rotate them
    k_desc: gl.tensor  # rotated keys
    v_desc: gl.tensor
    arrival: gl.tensor | None  # the mbarrier of ``load_existing_rows``; None: keys end where the tensor does
    PDL: gl.constexpr  # programmatic dependent launch
    # Rotated columns of queries (B, HQ, NQ, R) and keys (B, 1, NK, R) in multi-head latent attention; None in others.
    q_rope_desc: gl.tensor | None = None
    k_rope_desc: gl.tensor | None = None


@jit
def load_queries(loader, queries, tile, tile_step):
    """Load a tile's rotated queries, for each warpgroup as soon as it has released its last ones."""
    CONSUMERS: gl.constexpr = queries.full.shape[0]
    for warpgroup in gl.static_range(CONSUMERS):
        own = queries.of_warpgroup(warpgroup)
        cursor = own.at(tile_step)
        own.wait_empty(cursor)
        row = rotated_row(tile) + warpgroup * ROWS
        rope = rope_part(loader.q_rope_desc, tile.head, own, cursor)
        load_rows(loader.q_desc, tile.batch, tile.head, row, own.tile(cursor), own.full_barrier(cursor), None, rope)


@jit
def key_row(work, visit, BLOCK_N: gl.constexpr):
    """Return the first row of the key block that a tile visits in step ``visit``, counted from its last block down.

    With intervals visit is a word of ``visits_kernel``.
    """
    if work.visits_ptr is None:
        row = (work.tile.bounds.last_block - visit) * BLOCK_N
    else:
        row = (visit >> 3) * BLOCK_N
    if work.first_k is not None:
        row += work.first_k
    return row


@jit
def load_keys(loader, work, visit, count, keys, key_step, masks):
    """Load the keys of a ``key_row`` as soon as their slot is empty, and with intervals announce the visit.

    count: the blocks that the tile visits.
    """
    row = key_row(work, visit, keys.buffer.shape[3])
    cursor = keys.at(key_step)
    keys.wait_empty(cursor)
    if masks.key_rows is not None:
        masks.key_rows.announce(cursor, visit, count)
    rope = rope_part(loader.k_rope_desc, 0, keys, cursor)
    full = keys.full_barrier(cursor)
    load_rows(loader.k_desc, work.tile.batch, work.head_kv, row, keys.tile(cursor), full, None, rope)
    if masks.key_rows is not None:
        masks.key_rows.prefetch(visit, work.tile.batch, keys.buffer.shape[3])


@jit
def load(loader, schedule, masks, tiles, queries, keys, values):
    """Announce tiles, and load the key and value blocks that they visit, the last one first; one warp's work.

    keys and values: their channels, which take a step for each block. queries: the channel of rotated queries, or None
    if other warps rotate them.
    """
    IS_PACKED: gl.constexpr = tiles.IS_PACKED
    if IS_PACKED:
        # The pre-pass has described the tiles.
        wait_for_previous_launch(loader.PDL)
    work = first_work(schedule, masks)
    announce_tile(tiles, 0, work.tile)
    # The pre-pass writes the counter and the keys. The warps that rotate queries need neither, and have begun.
    wait_for_previous_launch(loader.PDL)
    tile_step = 0  # the tile that was announced last, which is the one after the tile that is being loaded
    key_step = 0
    arrivals = 0
    first_visit, count = first_visit_of(work)
    while work.tile.num_blocks > 0:
        tile = work.tile
        first_row, last_row = tile.bounds.first_key, tile.bounds.num_keys
        if work.first_k is not None:
            first_row += work.first_k
            last_row += work.first_k
        # Before the next tile is announced, because the warps that multiply wait for a tile's first keys and queries,
        # and the announcement takes a round trip to the counter in global memory and divisions.
        visit, num_blocks = first_visit, count
        load_keys(loader, work, visit, num_blocks, keys, key_step, masks)
        if queries is not None:
            # After the first keys, because their slot is free earlier than the queries' memory.
            load_queries(loader, queries, tile, tile_step)
        tile_step += 1
        following = next_work(schedule, masks, work)
        announce_tile(tiles, tile_step, following.tile)
        # Early, because they take a round trip to memory.
        first_visit, count = first_visit_of(following)
        for step in range(num_blocks):
            if masks.key_rows is None:
                visit = step
            if step > 0:
                load_keys(loader, work, visit, num_blocks, keys, key_step, masks)
            if masks.key_rows is not None:
                # Early, because a load takes as long as half a block's products.
                next_visit = gl.load(work.visits_ptr + gl.minimum(step + 1, num_blocks - 1))
            row = key_row(work, visit, schedule.BLOCK_N)
            at_values = values.at(key_step)
            values.wait_empty(at_values)
            v_tile, v_full = values.tile(at_values), values.full_barrier(at_values)
            if masks.key_rows is not None:
                # Zero the V rows of keys that no row sees, for the same reason as below.
                words_ptr, is_hidden = work.hidden_ptr + (visit >> 3) * (schedule.BLOCK_N // 32), (visit & 4) != 0
                desc, arrival = loader.v_desc, loader.arrival
                arrivals = load_seen_rows(
                    desc, tile.batch, work.head_kv, row, v_tile, v_full, words_ptr, is_hidden, arrival, arrivals
                )
            elif tiles.HAS_BOUNDS:
                # Zero out-of-range V rows: their weight is 0, but 0 * NaN is NaN. Scores of such keys are masked.
                desc, arrival = loader.v_desc, loader.arrival
                arrivals = load_existing_rows(
                    desc, tile.batch, work.head_kv, row, v_tile, v_full, first_row, last_row, arrival, arrivals
                )
            else:
                load_rows(loader.v_desc, tile.batch, work.head_kv, row, v_tile, v_full)
            key_step += 1
            if masks.key_rows is not None:
                visit = next_visit
        work = following
