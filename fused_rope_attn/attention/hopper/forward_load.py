"""The sm_90 forward's loading warp, which takes tiles and fills shared memory through the TMA."""

from fused_rope_attn.attention.hopper.forward_schedule import first_work, next_work, take_index
from fused_rope_attn.attention.hopper.rows import load_existing, load_rows
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.attention.hopper.tiles import announce_tile, rotated_row
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class Loader:
    """What is the loading warp's alone. Descriptors are of (B, H, N, D) tensors, in the blocks of their buffers."""

    q_desc: gl.tensor | None  # queries that have been rotated; None: other warps rotate them
    k_desc: gl.tensor  # rotated keys
    v_desc: gl.tensor
    arrival: gl.tensor | None  # the mbarrier of ``load_existing``; None: keys end where the tensor does
    PDL: gl.constexpr  # programmatic dependent launch


@jit
def load_queries(q_desc, queries, tile, tile_step):
    """Load the rotated queries of a tile, for each warpgroup as soon as it has done with its last ones."""
    for warpgroup in gl.static_range(queries.CONSUMERS):
        queries.wait_empty(tile_step, warpgroup)
        row = rotated_row(tile) + warpgroup * ROWS
        full = queries.full.index(queries.barrier(tile_step, warpgroup))
        load_rows(q_desc, tile.batch, tile.head, row, queries.tile(tile_step, warpgroup), full)


@jit
def key_row(work, visit, BLOCK_N: gl.constexpr):
    """The first row of the key block that a tile visits in its step ``visit``: the last block comes first."""
    row = (work.tile.bounds.last_block - visit) * BLOCK_N
    if work.first_k is not None:
        row += work.first_k
    return row


@jit
def load_keys(k_desc, work, visit, keys, key_step):
    """Load the keys of a tile's step ``visit``, once their slot in the ``Ring`` is empty."""
    row = key_row(work, visit, keys.smem.shape[3])
    slot = keys.slot(key_step)
    keys.wait_empty(key_step)
    load_rows(k_desc, work.tile.batch, work.head_kv, row, keys.smem.index(slot), keys.full.index(slot))


@jit
def load(loader, schedule, masks, tiles, queries, keys, values):
    """Announce tiles and load the key and value blocks that they visit, the last one first; one warp's work.

    keys and values: the ``Ring``s of blocks, which make a step for each. queries: None where other warps rotate them.
    """
    IS_PACKED: gl.constexpr = tiles.IS_PACKED
    if IS_PACKED:
        # The pre-pass has described the tiles.
        wait_for_previous_launch(loader.PDL)
    work = first_work(schedule, masks)
    announce_tile(tiles, 0, work.tile)
    # The counter and the keys are the pre-pass's; the rotating warps need neither.
    wait_for_previous_launch(loader.PDL)
    tile_step = 0  # the tile that was announced last, which is one ahead of the tile that is loaded
    key_step = 0
    arrivals = 0
    while work.tile.num_blocks > 0:
        tile = work.tile
        first_row, last_row = tile.bounds.first_key, tile.bounds.num_keys
        if IS_PACKED:
            first_row += work.first_k
            last_row += work.first_k
        # The next tile's number is on its way from global memory while the keys' slot is awaited.
        index = take_index(schedule)
        # The warps that multiply wait for a tile's first keys and queries. They do not wait yet for the announcement of
        # the next tile, whose number takes divisions.
        load_keys(loader.k_desc, work, 0, keys, key_step)
        if queries is not None:
            # Behind the first keys, whose slot is free earlier than the queries' memory.
            load_queries(loader.q_desc, queries, tile, tile_step)
        tile_step += 1
        following = next_work(schedule, masks, index)
        announce_tile(tiles, tile_step, following.tile)
        for visit in range(tile.num_blocks):
            if visit > 0:
                load_keys(loader.k_desc, work, visit, keys, key_step)
            row = key_row(work, visit, schedule.BLOCK_N)
            values.wait_empty(key_step)
            slot = values.slot(key_step)
            v_tile, v_full = values.smem.index(slot), values.full.index(slot)
            if tiles.HAS_BOUNDS:
                # Scores of keys that do not exist are masked. Their values meet weights of zero; NaN would stay NaN.
                arrivals = load_existing(
                    loader.v_desc, tile.batch, work.head_kv, row, v_tile, v_full, first_row, last_row, loader.arrival,
                    arrivals,
                )  # fmt: skip
            else:
                load_rows(loader.v_desc, tile.batch, work.head_kv, row, v_tile, v_full)
            key_step += 1
        work = following
