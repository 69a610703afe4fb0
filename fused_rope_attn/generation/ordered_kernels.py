# mypy: ignore-errors
"""The kernels of an ordered step (``ordered_tiles``), which need its queries from ``query_kernel``.

``attend_kernel`` goes through all tiles of a unit. One warpgroup or two multiply, one copies keys, one copies values,
and one adds up the weights. The product with the values of a tile runs while the next tile is weighed, and the scores
of a tile are computed while the tile before it is weighed. A wait for the products finds both done, because a wait for
one of them alone made ptxas serialise all.

Few sequences have two kernels. The programs of ``score_kernel`` take a unit's tiles in turn, from the last one down,
and say how many they have finished. Those of ``value_kernel`` run at the same time on other multiprocessors, each with
some columns of a unit's values: warps of their own copy scores as soon as they are written, others weigh them, others
copy values, and one warpgroup multiplies. That product is the longest chain of the step, so that its loop has little
else.
"""

import triton.language as tl
from triton.experimental.gluon.language.nvidia import hopper

from fused_rope_attn.attention.hopper.channels import channel_of, written_once
from fused_rope_attn.attention.hopper.softmax import lagging_maximum, sum_quads
from fused_rope_attn.generation import ordered_tiles as tiling
from fused_rope_attn.generation.inputs import complete_step, query_positions
from fused_rope_attn.kernels.masks import Window
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import ScoreScale
from fused_rope_attn.runtime.triton_compat import async_copy, async_load, barrier, gl, jit, reinterpret

# A program of ``score_kernel`` has finished its tiles, however many they were.
FINISHED = gl.constexpr(1 << 30)


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
    rows = gl.to_tensor(walk.number).to(gl.int64) * q_smem.shape[0]
    rows = rows + gl.arange(0, q_smem.shape[0], gl.SliceLayout(1, COPY))
    columns = gl.arange(0, q_smem.shape[1], gl.SliceLayout(0, COPY))
    async_load(q_smem, rotated_ptr + rows[:, None] * q_smem.shape[1] + columns[None, :])
    tiling.fill_by_copies(queries, at_queries)
    tiling.copy_tiles(source, walk, part, keys)


@jit
def copy_values(walk, view, row_format, first_column, values, STEP: gl.constexpr, WAIT: gl.constexpr):
    """Copy the values of all tiles; the work of warps of their own. WAIT: for the previous launch."""
    wait_for_previous_launch(WAIT)
    COLUMNS: gl.constexpr = row_format.BLOCK_D
    COPY: gl.constexpr = tiling.copy_layout(walk.BLOCK_N, COLUMNS, tiling.COPY_WARPS)
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    IS_WHOLE: gl.constexpr = row_format.D % COLUMNS == 0
    source = tiling.source_of(view, walk, row_format, columns, columns < row_format.D, COPY, IS_WHOLE)
    tiling.copy_tiles(source, walk, tiling.Part(0, 1, walk.tiles), values, STEP)


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
    INTERLEAVED: gl.constexpr
    WARPS: gl.constexpr


@jit
def attend_all(walk, scoring, queries, keys, values, p_smem, weights, factors, total, outputs, HQ, D: gl.constexpr):
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
    positions = query_positions(walk.keys, offs // walk.GROUP_SIZE, walk.S)
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    acc = hopper.warpgroup_mma_init(gl.zeros([BLOCK_D, BLOCK_R], gl.float32, SCORES))
    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, ROW)
    at_queries = queries.at(0)
    queries.wait_full(at_queries)
    at_first = keys.at(0)
    keys.wait_full(at_first)
    hopper.fence_async_shared()
    q = queries.tile(at_queries).permute((1, 0))
    first_k = tiling.key_operand(keys.tile(at_first), scoring.INTERLEAVED, SCORES, scoring.WARPS)
    scores = hopper.warpgroup_mma(first_k, q, nothing, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    keys.release_by_threads(at_first)
    for visit in range(walk.tiles):
        more = visit + 1 < walk.tiles
        at_keys = keys.at(visit + 1)
        keys.wait_full(at_keys, more)
        if scoring.INTERLEAVED:
            hopper.fence_async_shared()
        k = tiling.key_operand(keys.tile(at_keys), scoring.INTERLEAVED, SCORES, scoring.WARPS)
        start = walk.last - visit * BLOCK_N
        scores = tiling.mask_and_cap(scores, scoring.scale, walk, positions, start, scoring.window, DTYPE)
        highest = tiling.highest_scores(scores, scoring.WARPS)  # while the keys are on their way to the registers
        following = hopper.warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        row_max, subtrahend, factor = lagging_maximum(row_max, highest, scoring.scale.qk_scale)
        p = tl.math.exp2(scores * scoring.scale.qk_scale - subtrahend[None, :])
        operand = p_smem.index(visit % 2).permute((1, 0))
        operand.store(p.to(DTYPE))
        at_weights = weights.at(visit)
        weights.wait_empty(at_weights)
        weights.tile(at_weights).permute((1, 0)).store(p)
        factors.index(at_weights.slot).store(factor)
        acc, scores = hopper.warpgroup_mma_wait(0, deps=[acc, following])
        keys.release_by_threads(at_keys, more)
        if visit > 0:
            values.release_by_threads(values.at(visit - 1))
        at_values = values.at(visit)
        values.wait_full(at_values)
        hopper.fence_async_shared()
        weights.fill(at_weights)  # and with it the barrier after which all of ``operand`` is stored
        acc = acc * factor[None, :]
        acc = hopper.warpgroup_mma(values.tile(at_values).permute((1, 0)), operand, acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    at_total = total.at(0)
    total.wait_full(at_total)
    row_sum = total.tile(at_total).load(ROW)
    tiling.store_unit(walk, acc, row_max, row_sum, outputs, HQ, 0, D)


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
    walk = tiling.walk_of(gl.program_id(0), inputs, HKV, GROUP_SIZE, 0)
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
    scoring = Scoring(inputs.scale, inputs.window, tables.INTERLEAVED, WARPS)
    # Copies from pages need the most. More query rows need the registers for products.
    ADD_REGISTERS: gl.constexpr = 56 if BLOCK_R <= 16 else 48
    ROW_REGISTERS: gl.constexpr = 104 if BLOCK_R <= 16 else 80
    gl.warp_specialize(
        [
            (attend_all, (walk, scoring, queries, keys, values, p_smem, weights, factors, total, outputs,
                          HKV * GROUP_SIZE, D)),
            (add_up_weights, (walk, weights, factors, total)),
            (copy_keys, (walk, tiling.Part(0, 1, walk.tiles), inputs.cache.k, workspaces.rotated_ptr, queries, keys,
                         row_format, tables.R, tables.INTERLEAVED, PDL)),
            (copy_values, (walk, inputs.cache.v, row_format, 0, values, 1, PDL)),
        ],
        [tiling.SUM_WARPS, tiling.COPY_WARPS, tiling.COPY_WARPS],
        [ADD_REGISTERS, ROW_REGISTERS, ROW_REGISTERS],
    )  # fmt: skip


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
        gl.store(maxima_ptr + row, highest, mask=offs < walk.rows)
        is_last = i + 1 == part.tiles
        if (i % 2 == 0) | is_last:  # fewer releases, and yet the first tile at once
            barrier()
            gl.atomic_max(progress, gl.where(is_last, FINISHED, i + 1), sem="release", scope="gpu")


@jit
def multiply_keys(walk, part, scoring, queries, keys, partials, scores_ptr):
    """Write the scores of a part's tiles."""
    BLOCK_N: gl.constexpr = walk.BLOCK_N
    BLOCK_R: gl.constexpr = queries.buffer.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    offs = gl.arange(0, BLOCK_R, gl.SliceLayout(0, SCORES))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    exists = offs < walk.rows
    positions = query_positions(walk.keys, offs // walk.GROUP_SIZE, walk.S)
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    at_queries = queries.at(0)
    queries.wait_full(at_queries)
    hopper.fence_async_shared()
    q = queries.tile(at_queries).permute((1, 0))
    for i in range(part.tiles):
        visit = part.first + i * part.programs
        cursor = keys.at(i)
        keys.wait_full(cursor)
        if scoring.INTERLEAVED:
            hopper.fence_async_shared()
        k = tiling.key_operand(keys.tile(cursor), scoring.INTERLEAVED, SCORES, scoring.WARPS)
        scores = hopper.warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        keys.release_by_threads(cursor)
        start = walk.last - visit * BLOCK_N
        scores = tiling.mask_and_cap(scores, scoring.scale, walk, positions, start, scoring.window, keys.buffer.dtype)
        row = (walk.first_tile - visit) * walk.rows + offs
        gl.store(scores_ptr + row[None, :] * BLOCK_N + offs_n[:, None], scores, mask=exists[None, :])
        at_partials = partials.at(i)
        partials.wait_empty(at_partials)
        partials.tile(at_partials).store(tiling.partial_maxima(scores, scoring.WARPS))
        partials.fill(at_partials)


@jit(do_not_specialize=tiling.NUMBERS)
def score_kernel(
    inputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, window_left, window_right, most_tiles, programs,
    BLOCK_R: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the scores of every ``programs``-th tile of one unit, and their maxima. Grid: (units * programs,).

    The arguments are those of ``query_kernel``. Scores are capped, and -inf where a query does not see the key;
    progress counts the finished tiles of each program.
    """
    inputs, workspaces = unpack((inputs, workspaces))
    inputs = complete_step(inputs, B, NQ, S, num_pages, None, window_left, window_right)
    DTYPE: gl.constexpr = inputs.q.ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = inputs.lengths.BLOCK_N
    BLOCK_D: gl.constexpr = inputs.format.BLOCK_D
    tables = inputs.rotations.tables
    number, first = gl.program_id(0) // programs, gl.program_id(0) % programs
    walk = tiling.walk_of(number, inputs, HKV, GROUP_SIZE, most_tiles)
    part = tiling.Part(first, programs, (walk.tiles - first + programs - 1) // programs)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], DTYPE)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_D], DTYPE)
    keys = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE), STAGES)
    queries = written_once(gl.allocate_shared_memory(DTYPE, [1, BLOCK_R, BLOCK_D], ROWS))
    PARTIALS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    partials = channel_of(gl.allocate_shared_memory(gl.float32, [4, 4, BLOCK_R], PARTIALS), 4)
    keys.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=128)
    queries.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=1)
    partials.init(FILLS=1, RELEASES=32)
    progress = workspaces.progress_ptr + number * tiling.MOST_PROGRAMS + first
    scoring = Scoring(inputs.scale, inputs.window, tables.INTERLEAVED, 4)
    gl.warp_specialize(
        [
            (multiply_keys, (walk, part, scoring, queries, keys, partials, workspaces.scores_ptr)),
            (copy_keys, (walk, part, inputs.cache.k, workspaces.rotated_ptr, queries, keys, inputs.cache.format,
                         tables.R, tables.INTERLEAVED, PDL)),
            (announce_scores, (walk, part, workspaces.maxima_ptr, progress, partials)),
        ],
        [tiling.COPY_WARPS, 1],
        [tiling.COPY_REGISTERS, tiling.SUM_REGISTERS],
    )  # fmt: skip


@jit
def load_acquired(pointers):
    """Load 32-bit words with acquire semantics."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [pointers.to(gl.uint64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def copy_scores(walk, written, programs, scores, maxima, STEP: gl.constexpr):
    """Copy the scores and maxima of all tiles as soon as they are written; the work of warps of their own.

    written: the ``Workspaces`` of ``score_kernel``, which has ``programs`` programs for a unit.
    """
    ROWS: gl.constexpr = scores.buffer.shape[1]
    BLOCK_R: gl.constexpr = ROWS // STEP
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [tiling.COPY_WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [tiling.COPY_WARPS], [0])
    # Each warp reads all numbers.
    program = gl.arange(0, tiling.MOST_PROGRAMS, gl.BlockedLayout([1], [32], [tiling.COPY_WARPS], [0]))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    keys = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(0, TILE))
    line = gl.arange(0, ROWS, LINE)
    program = gl.minimum(program, gl.minimum(programs, walk.tiles) - 1)
    progress = written.progress_ptr + walk.number * tiling.MOST_PROGRAMS + program
    finished = gl.to_tensor(0)  # tiles of each program
    for step in range(tl.cdiv(walk.tiles, STEP)):
        cursor = scores.at(step)
        scores.wait_empty(cursor)
        first = step * STEP
        while finished * programs < gl.minimum(first + STEP, walk.tiles):
            finished = gl.minimum(gl.min(load_acquired(progress), 0), walk.tiles)
            if finished * programs < gl.minimum(first + STEP, walk.tiles):
                gl.inline_asm_elementwise(
                    "nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                )
        at = (walk.first_tile - first - rows // BLOCK_R) * walk.rows + rows % BLOCK_R
        mask = (first + rows // BLOCK_R < walk.tiles) & (rows % BLOCK_R < walk.rows)
        pointers = written.scores_ptr + at[:, None] * walk.BLOCK_N + keys[None, :]
        async_load(scores.tile(cursor), pointers, mask[:, None])
        at = (walk.first_tile - first - line // BLOCK_R) * walk.rows + line % BLOCK_R
        mask = (first + line // BLOCK_R < walk.tiles) & (line % BLOCK_R < walk.rows)
        async_load(maxima.index(cursor.slot), written.maxima_ptr + at, mask)
        tiling.fill_by_copies(scores, cursor)
    async_copy.wait_group(0)


@record
class Weighed:
    """Results of the warps that weigh scores, for those that multiply, in slots of STEP tiles.

    weights: a ``Channel`` of operands (BLOCK_R, STEP * BLOCK_N). sums (slots * STEP, BLOCK_R, 4) float32: of the
    weights of a tile that one thread of a quad of the sm_90 forward has. factors (slots * STEP, BLOCK_R) float32: of
    the sums and the output before a tile. moves (slots, 1) int32: whether any of a slot's factors is not 1. last: a
    channel of one (BLOCK_R,), the maxima after all tiles, in base 2.
    """

    weights: gl.tensor
    sums: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    moves: gl.shared_memory_descriptor
    last: gl.tensor
    STEP: gl.constexpr


@jit
def weigh_all(walk, qk_scale, scores, maxima, weighed):
    """Weigh the scores of all tiles as the sm_90 forward does; the work of warps of their own.

    scores: a ``Channel`` of slots (STEP * BLOCK_R, BLOCK_N) float32. maxima (slots, STEP * BLOCK_R) float32.
    """
    STEP: gl.constexpr = weighed.STEP
    ROWS: gl.constexpr = scores.buffer.shape[1]
    BLOCK_R: gl.constexpr = ROWS // STEP
    BLOCK_N: gl.constexpr = walk.BLOCK_N
    weights = weighed.weights
    SLOTS: gl.constexpr = weights.STAGES
    DTYPE: gl.constexpr = weights.buffer.dtype
    FLAT: gl.constexpr = weighed.factors.layout
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [tiling.SUM_WARPS], [0])
    # A warp has eight rows, and each of its threads two neighbours of every eight keys, as in the sm_90 forward.
    QUADS: gl.constexpr = tiling.quad_layout(ROWS, BLOCK_N, tiling.SUM_WARPS)
    SUMS: gl.constexpr = tiling.sums_layout(ROWS, tiling.SUM_WARPS)
    tile = (gl.arange(0, ROWS, gl.SliceLayout(1, QUADS)) // BLOCK_R).reshape((STEP, BLOCK_R))
    PAIRS: gl.constexpr = tile.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, PAIRS)
    highest_of = reinterpret(maxima, gl.float32, [scores.STAGES * STEP, BLOCK_R], FLAT)
    factors_of = reinterpret(weighed.factors, gl.float32, [SLOTS, ROWS], FLAT)
    sums_of = reinterpret(weighed.sums, gl.float32, [SLOTS, ROWS, 4], weighed.sums.layout)
    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, ROW)
    for step in range(tl.cdiv(walk.tiles, STEP)):
        cursor = scores.at(step)
        scores.wait_full(cursor)
        s = scores.tile(cursor).load(QUADS)
        subtrahends = gl.full([STEP, BLOCK_R], float("inf"), gl.float32, PAIRS)
        factors = gl.full([STEP, BLOCK_R], 1.0, gl.float32, PAIRS)
        moves = gl.zeros([BLOCK_R], gl.int32, ROW)
        for i in gl.static_range(STEP):
            highest = highest_of.index(cursor.slot * STEP + i).load(ROW)
            exists = step * STEP + i < walk.tiles  # if not, its weights are 0
            highest = gl.where(exists, highest, float("-inf"))
            row_max, subtrahend, factor = lagging_maximum(row_max, highest, qk_scale)
            subtrahend = gl.where(exists, subtrahend, float("inf"))
            subtrahends = gl.where(tile == i, subtrahend[None, :], subtrahends)
            factors = gl.where(tile == i, factor[None, :], factors)
            moves = gl.where(factor != 1.0, 1, moves)
        scores.release_by_threads(cursor)
        subtrahend = gl.convert_layout(subtrahends.reshape((ROWS,)), gl.SliceLayout(1, QUADS), assert_trivial=True)
        p = gl.exp2(s * qk_scale - subtrahend[:, None])
        at_weights = weights.at(step)
        weights.wait_empty(at_weights)
        operand = p.to(DTYPE).reshape((STEP, BLOCK_R, BLOCK_N)).permute((1, 0, 2)).reshape((BLOCK_R, STEP * BLOCK_N))
        weights.tile(at_weights).store(operand)
        factors_of.index(at_weights.slot).store(factors.reshape((ROWS,)))
        weighed.moves.index(at_weights.slot).store(gl.full([1], gl.max(moves, 0), gl.int32, ONE))
        sums_of.index(at_weights.slot).store(gl.convert_layout(sum_quads(p), SUMS, assert_trivial=True))
        hopper.fence_async_shared()
        weights.fill(at_weights)
    at_last = weighed.last.at(0)
    weighed.last.tile(at_last).store(row_max)
    weighed.last.fill(at_last)


@jit
def add_up_values(walk, weighed, values, first_column, end_column, outputs, HQ, PDL: gl.constexpr):
    """Add up the values of all tiles of a unit, and write its output."""
    STEP: gl.constexpr = weighed.STEP
    BLOCK_N: gl.constexpr = walk.BLOCK_N
    weights = weighed.weights
    BLOCK_R: gl.constexpr = weights.buffer.shape[1]
    COLUMNS: gl.constexpr = values.buffer.shape[2]
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    SUMS: gl.constexpr = tiling.sums_layout(BLOCK_R, 4)
    ROW: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    acc = hopper.warpgroup_mma_init(gl.zeros([COLUMNS, BLOCK_R], gl.float32, OUTPUT))
    row_sum = gl.zeros([BLOCK_R, 4], gl.float32, SUMS)
    for step in range(tl.cdiv(walk.tiles, STEP)):
        at_weights = weights.at(step)
        weights.wait_full(at_weights)
        operand = weights.tile(at_weights)
        moves = gl.max(weighed.moves.index(at_weights.slot).load(ONE), 0)
        for i in gl.static_range(STEP):
            visit = step * STEP + i
            at = at_weights.slot * STEP + i  # in ``weighed``
            cursor = values.at(visit)
            values.wait_full(cursor)
            hopper.fence_async_shared()
            if moves > 0:
                # Products between which no maximum moves follow one another without a wait.
                factor = weighed.factors.index(at).load(ROW)
                acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(0, deps=[acc]) * factor[None, :])
            v = values.tile(cursor).permute((1, 0))
            p = operand.slice(i * BLOCK_N, BLOCK_N, dim=1).permute((1, 0))
            acc = hopper.warpgroup_mma(v, p, acc, is_async=True)
            row_factor = weighed.factors.index(at).load(gl.SliceLayout(1, SUMS))
            row_sum = row_sum * row_factor[:, None] + weighed.sums.index(at).load(SUMS)
            acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(1, deps=[acc]))
            if visit > 0:
                values.release_by_threads(values.at(visit - 1))
            if i == 0:
                if step > 0:
                    weights.release_by_threads(weights.at(step - 1))
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    at_last = weighed.last.at(0)
    weighed.last.wait_full(at_last)
    row_max = weighed.last.tile(at_last).load(ROW)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    # Whatever waits for this launch waits for the previous one too.
    wait_for_previous_launch(PDL)
    tiling.store_unit(walk, acc, row_max, row_sum, outputs, HQ, first_column, end_column)


@jit(do_not_specialize=tiling.NUMBERS)
def value_kernel(
    inputs, outputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, window_left, window_right, most_tiles, programs,
    BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, SCORE_SLOTS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Add up COLUMNS columns of the values of one unit. Grid: (units * cdiv(D, COLUMNS),).

    All programs of ``score_kernel`` run or have finished when this launch starts, because each of them allows it, so
    that no program here waits for one that cannot start. STEP tiles are weighed at a time. The arguments are those of
    ``score_kernel``, and outputs: ``StepOutputs``.
    """
    let_next_launch_start(PDL)
    inputs, outputs, workspaces = unpack((inputs, outputs, workspaces))
    inputs = complete_step(inputs, B, NQ, S, num_pages, None, window_left, window_right)
    DTYPE: gl.constexpr = inputs.q.ptr.dtype.element_ty
    D: gl.constexpr = inputs.format.D
    BLOCK_N: gl.constexpr = inputs.lengths.BLOCK_N
    TILE_COLUMNS: gl.constexpr = max(64, COLUMNS)  # of a tensor core's tile
    SLOTS: gl.constexpr = 2
    parts = (D + COLUMNS - 1) // COLUMNS
    number, first_column = gl.program_id(0) // parts, gl.program_id(0) % parts * COLUMNS
    walk = tiling.walk_of(number, inputs, HKV, GROUP_SIZE, most_tiles)
    row_format = replace(inputs.cache.format, BLOCK_D=COLUMNS)
    end_column = gl.minimum(D, first_column + COLUMNS)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, TILE_COLUMNS], DTYPE)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, STEP * BLOCK_N], DTYPE)
    # Two neighbours in each of eight rows are in different banks.
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = STEP * BLOCK_R
    values = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, TILE_COLUMNS], TILE), STAGES)
    scores = channel_of(gl.allocate_shared_memory(gl.float32, [SCORE_SLOTS, ROWS, BLOCK_N], WEIGHTS), SCORE_SLOTS)
    maxima = gl.allocate_shared_memory(gl.float32, [SCORE_SLOTS, ROWS], FLAT)
    weights = channel_of(gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_R, STEP * BLOCK_N], OPERAND), SLOTS)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS * STEP, BLOCK_R], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [SLOTS * STEP, BLOCK_R, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    moves = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], FLAT)
    last = written_once(gl.allocate_shared_memory(gl.float32, [1, BLOCK_R], FLAT))
    values.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=128)
    scores.init(FILLS=32 * tiling.COPY_WARPS, RELEASES=32 * tiling.SUM_WARPS)
    weights.init(FILLS=1, RELEASES=128)
    last.init(FILLS=1, RELEASES=1)
    weighed = Weighed(weights, sums, factors, moves, last, STEP)
    gl.warp_specialize(
        [
            (add_up_values, (walk, weighed, values, first_column, end_column, outputs, HKV * GROUP_SIZE, PDL)),
            (weigh_all, (walk, inputs.scale.qk_scale, scores, maxima, weighed)),
            (copy_values, (walk, inputs.cache.v, row_format, first_column, values, STEP, False)),
            (copy_scores, (walk, workspaces, programs, scores, maxima, STEP)),
        ],
        [tiling.SUM_WARPS, tiling.COPY_WARPS, tiling.COPY_WARPS],
        [tiling.COPY_REGISTERS, tiling.SUM_REGISTERS, tiling.SUM_REGISTERS],
    )  # fmt: skip
