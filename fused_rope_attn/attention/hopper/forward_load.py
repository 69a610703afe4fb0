"""The sm_90 forward's warps that fill shared memory: keys, values, and queries, rotated or as they are."""

from fused_rope_attn.attention.hopper.rows import load_existing, load_rows
from fused_rope_attn.attention.hopper.tiles import (
    CONSUMERS,
    PACKED_BOUNDS,
    ROWS,
    announce,
    next_tile,
    packed_work,
    query_limit,
    tile_bounds,
    work,
)
from fused_rope_attn.kernels.rotation import head_rotation, load_rotated
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.tiles import RowFormat, Rows
from fused_rope_attn.runtime.triton_compat import fence_async_shared, gl, jit, mbarrier


@jit
def load(q_desc, k_desc, v_desc, counter_ptr, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full,
         v_empty, tile_smem, tile_full, tile_empty, raw, starts_ptr, lens_ptr, left, right, num_tiles, num_heads,
         section, HQ, GROUP_SIZE, NQ, NK, slots, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
         BOUNDED: gl.constexpr, RANGED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Announce tiles and load their key and value blocks, the last (masked) block first, and with q_desc queries."""
    PACKED: gl.constexpr = RANGED == PACKED_BOUNDS
    WIDE: gl.constexpr = q_desc is not None
    if PACKED:
        # The pre-pass has described the tiles.
        wait_for_previous_launch(PDL)
        start_m, bh, batch, head, head_kv, blocks, masked, bounds, origin = packed_work(
            gl.program_id(0), num_tiles, counter_ptr, num_heads, section, GROUP_SIZE, slots, left, right, BLOCK_N,
            IS_CAUSAL, BOUNDED,
        )  # fmt: skip
    else:
        start_m, bh, batch, head, head_kv, blocks, masked, bounds = work(
            gl.program_id(0), num_heads, section, HQ, GROUP_SIZE, NQ, NK, starts_ptr, lens_ptr, left, right, BLOCK_N,
            IS_CAUSAL, BOUNDED,
        )  # fmt: skip
    announce(tile_smem, tile_full, tile_empty, 0, start_m, bh, batch, head, blocks, masked, bounds, RANGED)
    # The counter and the keys are the pre-pass's; the rotating warps need neither.
    wait_for_previous_launch(PDL)
    turn = 0
    step = 0
    zeroed = 0
    while blocks > 0:
        top, first_row, last_row = bounds[0], bounds[2], bounds[3]
        if PACKED:
            first_row += origin
            last_row += origin
        first_query, head_q = start_m, head
        turn += 1
        tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        if PACKED:
            start_m, bh, next_batch, head, next_head_kv, next_blocks, masked, bounds, next_origin = packed_work(
                tile, num_tiles, counter_ptr, num_heads, section, GROUP_SIZE, slots, left, right, BLOCK_N, IS_CAUSAL,
                BOUNDED,
            )  # fmt: skip
        else:
            another = tile < num_tiles
            if lens_ptr is not None or starts_ptr is not None:
                # There is nothing to read for a tile past the last one.
                tile = gl.minimum(tile, num_tiles - 1)
            start_m, bh, next_batch, head, next_head_kv, next_blocks, masked, bounds = work(
                tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, starts_ptr, lens_ptr, left, right, BLOCK_N,
                IS_CAUSAL, BOUNDED,
            )  # fmt: skip
            next_blocks = gl.where(another, next_blocks, 0)
        announce(
            tile_smem, tile_full, tile_empty, turn, start_m, bh, next_batch, head, next_blocks, masked, bounds, RANGED
        )
        for i in range(blocks):
            slot = step % STAGES
            free = ((step // STAGES) & 1) ^ 1
            row = (top - i) * BLOCK_N
            if PACKED:
                row += origin
            mbarrier.wait(k_empty.index(slot), free)
            load_rows(k_desc, batch, head_kv, row, k_smem.index(slot), k_full.index(slot))
            if WIDE:
                # Behind the keys, whose slot is free before the last tile's queries have been used.
                if i == 0:
                    for member in gl.static_range(CONSUMERS):
                        mbarrier.wait(q_empty.index(member), turn & 1)
                        load_rows(
                            q_desc, batch, head_q, first_query + member * ROWS, q_smem.index(member),
                            q_full.index(member),
                        )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), free)
            if RANGED:
                # Scores of keys that do not exist are masked; values would meet weights of zero.
                slot_v = v_smem.index(slot)
                zeroed = load_existing(
                    v_desc, batch, head_kv, row, slot_v, v_full.index(slot), raw, zeroed, first_row, last_row
                )
            else:
                load_rows(v_desc, batch, head_kv, row, v_smem.index(slot), v_full.index(slot))
            step += 1
        batch, head_kv, blocks = next_batch, next_head_kv, next_blocks
        if PACKED:
            origin = next_origin


@jit
def rotate_queries(q_ptr, cos_ptr, sin_ptr, q_smem, q_full, q_empty, tile_smem, tile_full, tile_empty, q_strides,
                   cos_strides, sin_strides, q_sign, NQ, NK, D: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr,
                   INTERLEAVED: gl.constexpr, RANGED: gl.constexpr, LONG: gl.constexpr):  # fmt: skip
    """Rotate the query rows of each tile into one of two buffers."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    # Rows that four warps turn at a time, eight pairs a thread.
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    turn = 0
    start_m, bh, batch, head, blocks, masked, bounds = next_tile(tile_smem, tile_full, tile_empty, turn, 4, RANGED)
    while blocks > 0:
        _, _, _, len_k = tile_bounds(bounds, blocks, NK, RANGED)
        limit = query_limit(bounds, NQ, RANGED)
        rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch.to(gl.int64), len_k, R, INTERLEAVED)
        base = q_ptr + batch.to(gl.int64) * q_strides[0] + head.to(gl.int64) * q_strides[1]
        buffer = turn % 2
        mbarrier.wait(q_empty.index(buffer), ((turn // 2) & 1) ^ 1)
        for member in gl.static_range(CONSUMERS):
            for chunk in gl.static_range(ROWS // CHUNK):
                start = start_m + member * ROWS + chunk * CHUNK
                q_rows = Rows(
                    ptr=base + start.to(gl.int64) * q_strides[2], stride_row=q_strides[2], stride_column=q_strides[3],
                    num_rows=limit - start, first_row=None,
                    format=RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG),
                )  # fmt: skip
                q = load_rotated(
                    q_rows, rows, rotation, start + len_k - limit, q_sign, PAIR_LAYOUT=PAIRS, TILE_LAYOUT=WHOLE
                )
                q_smem.index(buffer * CONSUMERS + member).slice(chunk * CHUNK, CHUNK, dim=0).store(q)
        fence_async_shared()
        mbarrier.arrive(q_full.index(buffer))
        turn += 1
        start_m, bh, batch, head, blocks, masked, bounds = next_tile(tile_smem, tile_full, tile_empty, turn, 4, RANGED)
