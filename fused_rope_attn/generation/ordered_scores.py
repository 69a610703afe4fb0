# mypy: ignore-errors
"""Scores of an ordered step (``ordered_units``) of few sequences.

The programs of ``score_kernel`` take a unit's tiles in turn, from the last one down, and say how many they have
finished, so that ``ordered_values`` can follow.
"""

from fused_rope_attn.attention.hopper.channels import channel_of, written_once
from fused_rope_attn.generation import ordered_tiles as tiling
from fused_rope_attn.generation import ordered_units as units
from fused_rope_attn.generation.inputs import complete_step
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import (
    async_copy,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# A program of ``score_kernel`` has finished its tiles, however many they were.
FINISHED = gl.constexpr(1 << 30)


@record
class Part:
    """A program's part of a unit's scores: the tiles ``first``, ``first + programs`` and so on of a walk, ``tiles``."""

    first: gl.tensor
    programs: gl.tensor
    tiles: gl.tensor


@jit
def copy_keys(
    walk, part, view, rotated_ptr, queries, keys, row_format, R: gl.constexpr, INTERLEAVED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copy the queries of a unit and the keys of a part; the work of warps of their own."""
    source = tiling.key_source(view, walk, row_format, R, INTERLEAVED)
    wait_for_previous_launch(PDL)
    # The next launch reads what the previous one has cleared.
    let_next_launch_start(PDL)
    at_queries = queries.at(0)
    q_smem = queries.tile(at_queries)
    COPY: gl.constexpr = tiling.copy_layout(q_smem.shape[0], q_smem.shape[1], tiling.COPY_WARPS)
    rows = gl.to_tensor(walk.unit.number).to(gl.int64) * q_smem.shape[0]
    rows = rows + gl.arange(0, q_smem.shape[0], gl.SliceLayout(1, COPY))
    columns = gl.arange(0, q_smem.shape[1], gl.SliceLayout(0, COPY))
    async_load(q_smem, rotated_ptr + rows[:, None] * q_smem.shape[1] + columns[None, :])
    tiling.fill_by_copies(queries, at_queries)
    entries = tiling.entries_of(source, walk, part.first)
    for i in range(part.tiles):
        visit = part.first + i * part.programs
        following = tiling.entries_of(source, walk, visit + part.programs)
        first = tiling.first_elements(source, walk, visit, entries)
        cursor = keys.at(i)
        keys.wait_empty(cursor)
        tiling.copy_rows(source, walk, visit, first, keys.tile(cursor))
        tiling.fill_by_copies(keys, cursor)
        entries = following
    async_copy.wait_group(0)


@jit
def announce_scores(walk, part, maxima_ptr, progress, partials):
    """Write the maxima of a part's tiles, and how many are finished; the work of a warp of its own.

    A release makes its warp wait, so that neither the warps that copy nor those that multiply do it.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 1], [1, 0])
    offs = gl.arange(0, partials.buffer.shape[2], gl.SliceLayout(0, LAYOUT))
    for i in range(part.tiles):
        cursor = partials.at(i)
        partials.wait_full(cursor)
        highest = gl.max(partials.tile(cursor).load(LAYOUT), 0)
        partials.release_by_threads(cursor)
        row = (walk.first_tile - part.first - i * part.programs) * walk.rows + offs
        gl.store(maxima_ptr + row, highest, mask=offs < walk.unit.num_rows)
        is_last = i + 1 == part.tiles
        if (i % 2 == 0) | is_last:  # fewer releases, and yet the first tile at once
            barrier()
            gl.atomic_max(progress, gl.where(is_last, FINISHED, i + 1), sem="release", scope="gpu")


@jit
def multiply_keys(
    walk, part, queries, keys, partials, scores_ptr, cap_scale, window, GROUP_SIZE, S, INTERLEAVED: gl.constexpr
):
    """Write the scores of a part's tiles."""
    BLOCK_N: gl.constexpr = walk.BLOCK_N
    BLOCK_R: gl.constexpr = queries.buffer.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    offs = gl.arange(0, BLOCK_R, gl.SliceLayout(0, SCORES))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    exists = offs < walk.unit.num_rows
    positions = units.query_positions(walk.keys, walk.unit, offs, GROUP_SIZE, S)
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    at_queries = queries.at(0)
    queries.wait_full(at_queries)
    fence_async_shared()
    q = queries.tile(at_queries).permute((1, 0))
    for i in range(part.tiles):
        visit = part.first + i * part.programs
        cursor = keys.at(i)
        keys.wait_full(cursor)
        if INTERLEAVED:
            fence_async_shared()
        k = tiling.key_operand(keys.tile(cursor), INTERLEAVED, SCORES, 4)
        scores = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        keys.release_by_threads(cursor)
        scores = tiling.mask_and_cap(
            scores, cap_scale, walk, positions, walk.last - visit * BLOCK_N, window, keys.buffer.dtype
        )
        row = (walk.first_tile - visit) * walk.rows + offs
        gl.store(scores_ptr + row[None, :] * BLOCK_N + offs_n[:, None], scores, mask=exists[None, :])
        at_partials = partials.at(i)
        partials.wait_empty(at_partials)
        partials.tile(at_partials).store(tiling.partial_maxima(scores, 4))
        partials.fill(at_partials)


@jit(do_not_specialize=units.NUMBERS)
def score_kernel(
    inputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, window_left, window_right, most_tiles, programs,
    BLOCK_R: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the scores of every ``programs``-th tile of one unit, and their maxima. Grid: (units * programs,).

    The arguments are those of ``query_kernel``. Scores are capped, and -inf where a query does not see the key; a tile
    has NQ * GROUP_SIZE rows, or BLOCK_R if this is less. progress counts the finished tiles of each program.
    """
    inputs, workspaces = unpack((inputs, workspaces))
    inputs = complete_step(inputs, B, NQ, S, num_pages, None, window_left, window_right)
    DTYPE: gl.constexpr = inputs.q.ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = inputs.lengths.BLOCK_N
    BLOCK_D: gl.constexpr = inputs.format.BLOCK_D
    tables, cap_scale = inputs.rotations.tables, inputs.scale.cap_scale
    number, first = gl.program_id(0) // programs, gl.program_id(0) % programs
    walk = tiling.walk_of(number, inputs, HKV, GROUP_SIZE, most_tiles, BLOCK_R)
    part = Part(first, programs, (walk.tiles - first + programs - 1) // programs)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], DTYPE)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_D], DTYPE)
    keys = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE), STAGES)
    queries = written_once(gl.allocate_shared_memory(DTYPE, [1, BLOCK_R, BLOCK_D], ROWS))
    PARTIALS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    partials = channel_of(gl.allocate_shared_memory(gl.float32, [4, 4, BLOCK_R], PARTIALS), 4)
    keys.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=128)
    queries.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=1)
    partials.init(FILLS=1, RELEASES=32)
    progress = workspaces.progress_ptr + number * workspaces.MOST_PROGRAMS + first
    gl.warp_specialize(
        [
            (multiply_keys, (walk, part, queries, keys, partials, workspaces.scores_ptr, cap_scale, inputs.window,
                             GROUP_SIZE, S, tables.INTERLEAVED)),
            (copy_keys, (walk, part, inputs.cache.k, workspaces.rotated_ptr, queries, keys, inputs.cache.format,
                         tables.R, tables.INTERLEAVED, PDL)),
            (announce_scores, (walk, part, workspaces.maxima_ptr, progress, partials)),
        ],
        [tiling.COPY_WARPS, 1],
        [tiling.COPY_REGISTERS, tiling.SUM_REGISTERS],
    )  # fmt: skip
