# mypy: ignore-errors
"""The kernel of an ordered step (``ordered_tiles``) that goes through all tiles of a unit.

One warpgroup or two multiply, one copies keys, one copies values, and one adds up the weights. The product with
the values of a tile runs while the next tile is weighed, and the scores of a tile are computed while the tile before it
is weighed. A wait for the products finds both done, because a wait for one of them alone made ptxas serialise all.
"""

import triton.language as tl

from fused_rope_attn.attention.hopper.channels import channel_of, written_once
from fused_rope_attn.attention.hopper.softmax import lagging_maximum, sum_quads
from fused_rope_attn.generation import ordered_tiles as tiling
from fused_rope_attn.generation.inputs import complete_step
from fused_rope_attn.kernels.masks import Window
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import ScoreScale
from fused_rope_attn.runtime.triton_compat import (
    async_copy,
    async_load,
    fence_async_shared,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


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
def steps_of(walk, STEP: gl.constexpr):
    """Return the number of steps of STEP tiles that a walk takes."""
    return (walk.tiles + STEP - 1) // STEP


@jit
def entries_of_step(source, walk, step, STEP: gl.constexpr):
    """Return a tuple of ``entries_of`` the tiles of a step."""
    entries = ()
    for i in gl.static_range(STEP):
        entries = entries + (tiling.entries_of(source, walk, step * STEP + i),)
    return entries


@jit
def copy_values(walk, v_view, row_format, first_column, values, STEP: gl.constexpr):
    """Copy the values of all tiles, zeros for those after the last one; the work of warps of their own."""
    COLUMNS: gl.constexpr = row_format.BLOCK_D
    COPY: gl.constexpr = tiling.copy_layout(walk.BLOCK_N, COLUMNS, tiling.COPY_WARPS)
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    IS_WHOLE: gl.constexpr = row_format.D % COLUMNS == 0
    source = tiling.source_of(v_view, walk, row_format, columns, columns < row_format.D, COPY, IS_WHOLE)
    entries = entries_of_step(source, walk, 0, STEP)
    for step in range(steps_of(walk, STEP)):
        following = entries_of_step(source, walk, step + 1, STEP)
        for i in gl.static_range(STEP):
            visit = step * STEP + i
            first = tiling.first_elements(source, walk, visit, entries[i])
            cursor = values.at(visit)
            values.wait_empty(cursor)
            # A tensor core's tile may have more columns; they are not stored.
            tiling.copy_rows(source, walk, visit, first, values.tile(cursor).slice(0, COLUMNS, dim=1))
            tiling.fill_by_copies(values, cursor)
        entries = following
    async_copy.wait_group(0)


@jit
def copy_values_of_unit(walk, view, row_format, values, PDL: gl.constexpr):
    """Copy the values of a unit; the work of warps of their own."""
    wait_for_previous_launch(PDL)
    copy_values(walk, view, row_format, 0, values, STEP=1)


@jit
def add_up_weights(walk, weights, factors, total):
    """Add up the weights of all tiles as the sm_90 forward does; the work of warps of their own.

    weights: a ``Channel`` of tiles (BLOCK_R, BLOCK_N) float32, factors (slots, BLOCK_R) of the sums before them. The
    sums of the rows are written to ``total``, a channel of one (BLOCK_R,).
    """
    BLOCK_R: gl.constexpr = weights.buffer.shape[1]
    BLOCK_N: gl.constexpr = weights.buffer.shape[2]
    QUADS: gl.constexpr = tiling.quad_layout(BLOCK_R, BLOCK_N, tiling.SUM_WARPS)
    SUMS: gl.constexpr = tiling.sums_layout(BLOCK_R, tiling.SUM_WARPS)
    row_sum = gl.zeros([BLOCK_R, 4], gl.float32, SUMS)
    for visit in range(walk.tiles):
        cursor = weights.at(visit)
        weights.wait_full(cursor)
        p = weights.tile(cursor).load(QUADS)
        factor = factors.index(cursor.slot).load(gl.SliceLayout(1, SUMS))
        weights.release_by_threads(cursor)
        row_sum = row_sum * factor[:, None] + gl.convert_layout(sum_quads(p), SUMS)
    at_total = total.at(0)
    total.tile(at_total).store(gl.sum(row_sum, 1))
    total.fill(at_total)


@record
class Scoring:
    """The factors and masks from products to scores and weights."""

    scale: ScoreScale
    window: Window
    S: gl.tensor
    GROUP_SIZE: gl.tensor
    INTERLEAVED: gl.constexpr
    WARPS: gl.constexpr


@jit
def attend_all(walk, scoring, queries, keys, values, p_smem, weights, factors, total, outputs, HQ, NQ, D: gl.constexpr):
    """Multiply, weigh and add up all tiles of a unit, and write its output.

    queries: a ``Channel`` of one (BLOCK_R, BLOCK_D); p_smem (2, BLOCK_R, BLOCK_N): the weights as operands; outputs:
    ``StepOutputs``. A tile's scores are computed while the tile before it is weighed.
    """
    BLOCK_N: gl.constexpr = keys.buffer.shape[1]
    BLOCK_D: gl.constexpr = keys.buffer.shape[2]
    BLOCK_R: gl.constexpr = p_smem.shape[1]
    DTYPE: gl.constexpr = keys.buffer.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [scoring.WARPS, 1], [16, BLOCK_R, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    offs = gl.arange(0, BLOCK_R, ROW)
    positions = tiling.query_positions(walk.keys, walk.unit, offs, scoring.GROUP_SIZE, scoring.S)
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_D, BLOCK_R], gl.float32, SCORES))
    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, ROW)
    at_queries = queries.at(0)
    queries.wait_full(at_queries)
    at_first = keys.at(0)
    keys.wait_full(at_first)
    fence_async_shared()
    q = queries.tile(at_queries).permute((1, 0))
    first_k = tiling.key_operand(keys.tile(at_first), scoring.INTERLEAVED, SCORES, scoring.WARPS)
    scores = warpgroup_mma(first_k, q, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    keys.release_by_threads(at_first)
    for visit in range(walk.tiles):
        more = visit + 1 < walk.tiles
        at_keys = keys.at(visit + 1)
        keys.wait_full(at_keys, more)
        if scoring.INTERLEAVED:
            fence_async_shared()
        k = tiling.key_operand(keys.tile(at_keys), scoring.INTERLEAVED, SCORES, scoring.WARPS)
        start = walk.last - visit * BLOCK_N
        scores = tiling.mask_and_cap(scores, scoring.scale, walk, positions, start, scoring.window, DTYPE)
        highest = tiling.highest_scores(scores, scoring.WARPS)  # while the keys are on their way to the registers
        following = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        row_max, subtrahend, factor = lagging_maximum(row_max, highest, scoring.scale.qk_scale)
        p = tl.math.exp2(scores * scoring.scale.qk_scale - subtrahend[None, :])
        operand = p_smem.index(visit % 2).permute((1, 0))
        operand.store(p.to(DTYPE))
        at_weights = weights.at(visit)
        weights.wait_empty(at_weights)
        weights.tile(at_weights).permute((1, 0)).store(p)
        factors.index(at_weights.slot).store(factor)
        acc, scores = warpgroup_mma_wait(0, deps=[acc, following])
        keys.release_by_threads(at_keys, more)
        if visit > 0:
            values.release_by_threads(values.at(visit - 1))
        at_values = values.at(visit)
        values.wait_full(at_values)
        fence_async_shared()
        weights.fill(at_weights)  # and with it the barrier after which all of ``operand`` is stored
        acc = acc * factor[None, :]
        acc = warpgroup_mma(values.tile(at_values).permute((1, 0)), operand, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    at_total = total.at(0)
    total.wait_full(at_total)
    row_sum = total.tile(at_total).load(ROW)
    tiling.store_unit(walk, acc, row_max, row_sum, outputs, NQ, HQ, scoring.GROUP_SIZE, 0, D)


@jit(do_not_specialize=tiling.NUMBERS)
def attend_kernel(
    inputs, outputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, window_left, window_right,
    BLOCK_R: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one unit to all tiles of a cache of rotated keys. Grid: (units,).

    The arguments are those of ``query_kernel``, and outputs: ``StepOutputs``. WARPS: those that multiply.
    """
    let_next_launch_start(PDL)
    inputs, outputs, workspaces = unpack((inputs, outputs, workspaces))
    inputs = complete_step(inputs, B, NQ, S, num_pages, None, window_left, window_right)
    DTYPE: gl.constexpr = inputs.q.ptr.dtype.element_ty
    D: gl.constexpr = inputs.format.D
    BLOCK_D: gl.constexpr = inputs.format.BLOCK_D
    BLOCK_N: gl.constexpr = inputs.lengths.BLOCK_N
    tables, row_format = inputs.rotations.tables, inputs.cache.format
    walk = tiling.walk_of(gl.program_id(0), inputs, HKV, GROUP_SIZE, 0, BLOCK_R)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], DTYPE)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_D], DTYPE)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], DTYPE)
    # Two neighbours in each of eight rows are in different banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE), STAGES)
    values = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE), STAGES)
    queries = written_once(gl.allocate_shared_memory(DTYPE, [1, BLOCK_R, BLOCK_D], ROWS))
    p_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_R, BLOCK_N], OPERAND)
    weights = channel_of(gl.allocate_shared_memory(gl.float32, [2, BLOCK_R, BLOCK_N], WEIGHTS), 2)
    factors = gl.allocate_shared_memory(gl.float32, [2, BLOCK_R], FLAT)
    total = written_once(gl.allocate_shared_memory(gl.float32, [1, BLOCK_R], FLAT))
    keys.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=32 * WARPS)
    values.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=32 * WARPS)
    queries.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=1)
    weights.init(FILLS=1, RELEASES=32 * tiling.SUM_WARPS)
    total.init(FILLS=1, RELEASES=1)
    scoring = Scoring(inputs.scale, inputs.window, S, GROUP_SIZE, tables.INTERLEAVED, WARPS)
    # Copies from pages need the most. More query rows need the registers for products.
    ADD_REGISTERS: gl.constexpr = 56 if BLOCK_R <= 16 else 48
    ROW_REGISTERS: gl.constexpr = 104 if BLOCK_R <= 16 else 80
    gl.warp_specialize(
        [
            (attend_all, (walk, scoring, queries, keys, values, p_smem, weights, factors, total, outputs,
                          HKV * GROUP_SIZE, NQ, D)),
            (add_up_weights, (walk, weights, factors, total)),
            (copy_keys, (walk, Part(0, 1, walk.tiles), inputs.cache.k, workspaces.rotated_ptr, queries, keys,
                         row_format, tables.R, tables.INTERLEAVED, PDL)),
            (copy_values_of_unit, (walk, inputs.cache.v, row_format, values, PDL)),
        ],
        [tiling.SUM_WARPS, tiling.COPY_WARPS, tiling.COPY_WARPS],
        [ADD_REGISTERS, ROW_REGISTERS, ROW_REGISTERS],
    )  # fmt: skip
