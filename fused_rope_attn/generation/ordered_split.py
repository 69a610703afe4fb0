# mypy: ignore-errors
"""The kernels of an ordered step (``ordered_units``) of few sequences: scores, weights and values, a launch each."""

import triton.language as tl

from fused_rope_attn.attention.hopper.channels import channel_of
from fused_rope_attn.attention.hopper.softmax import LAG, lagging_maximum, sum_quads
from fused_rope_attn.generation.ordered_tiles import (
    COPY_REGISTERS,
    COPY_WARPS,
    copy_layout,
    copy_queries,
    copy_rows,
    fill_by_copies,
    key_operand,
    key_source,
    mask_and_cap,
    store_unit,
    value_source,
    walk_of,
)
from fused_rope_attn.generation.ordered_units import NUMBERS, quad_layout, query_positions, sums_layout
from fused_rope_attn.generation.pages import BlockTable
from fused_rope_attn.generation.shares import Caches, cache_view, cached_keys, count_key_tiles
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime.triton_compat import (
    async_copy,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@jit(do_not_specialize=NUMBERS)
def score_kernel(
    rotated_ptr, k_cache_ptr, cache_seqlens_ptr, kv_starts_ptr, block_table_ptr, scores_ptr, maxima_ptr,
    k_cache_strides, table_strides, cap_scale, window, B, HKV, GROUP_SIZE, NQ, S, num_pages, most_tiles,
    D: gl.constexpr, R: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, INTERLEAVED: gl.constexpr, APPENDS: gl.constexpr,
    STRIDE_UNIT: gl.constexpr, PAGE_SIZE: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the scores of GROUP tiles of one unit, and their maxima. Grid: (units * cdiv(most_tiles, GROUP),).

    scores (units, most_tiles, rows, BLOCK_N) and maxima (units, most_tiles, rows) float32: capped, -inf where a query
    does not see the key; rows is NQ * GROUP_SIZE, or BLOCK_R if this is less. The others as in ``attend_kernel``.
    """
    let_next_launch_start(PDL)
    DTYPE: gl.constexpr = rotated_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    caches = Caches(cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], APPENDS, BLOCK_N, 1, 1, True, IN_ORDER=True)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    groups = (most_tiles + GROUP - 1) // GROUP
    number, group = gl.program_id(0) // groups, gl.program_id(0) % groups
    walk = walk_of(number, caches, table, window_of(window), HKV, GROUP_SIZE, most_tiles, BLOCK_R)
    first = group * GROUP
    if first >= walk.tiles:
        return
    # This program's tiles; number 0 is the last of them again.
    end = gl.minimum(walk.tiles, first + GROUP)
    skipped = walk.tiles - end
    walk = replace(walk, first_tile=walk.first_tile - skipped, last=walk.last - skipped * BLOCK_N, tiles=end - first)
    view = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    source = key_source(view, table, walk, RowFormat(D, BLOCK_D, USE_INT64_OFFSETS), R, INTERLEAVED)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_D], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_R, BLOCK_D], ROWS)
    offs = gl.arange(0, BLOCK_R, ROW)
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    exists = offs < walk.unit.num_rows
    positions = query_positions(walk.keys, walk.unit, offs, GROUP_SIZE, S)
    window = window_of(window)
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    wait_for_previous_launch(PDL)
    copy_queries(rotated_ptr, number, q_smem, 4)
    for i in gl.static_range(STAGES - 1):
        copy_rows(source, walk, i, k_smem.index(i))
        async_copy.commit_group()
    for visit in range(walk.tiles):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        q = q_smem.permute((1, 0))
        k = key_operand(k_smem.index(visit % STAGES), INTERLEAVED, SCORES, 4)
        scores = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        # The slot of the tile before, which all warps have multiplied.
        number_of = visit + STAGES - 1
        copy_rows(source, walk, number_of, k_smem.index(number_of % STAGES))
        async_copy.commit_group()
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = mask_and_cap(scores, cap_scale, walk, positions, walk.last - visit * BLOCK_N, window, DTYPE)
        row = (walk.first_tile - visit) * walk.rows + offs
        gl.store(scores_ptr + row[None, :] * BLOCK_N + keys[:, None], scores, mask=exists[None, :])
        gl.store(maxima_ptr + row, gl.max(scores, 0), mask=exists)
    async_copy.wait_group(0)


@jit(do_not_specialize=NUMBERS)
def weight_kernel(
    cache_seqlens_ptr, kv_starts_ptr, scores_ptr, maxima_ptr, weights_ptr, sums_ptr, factors_ptr, moves_ptr,
    last_maxima_ptr, qk_scale, window, B, HKV, GROUP_SIZE, NQ, S, most_tiles, BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, APPENDS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Weigh the scores of GROUP tiles of one unit. Grid: (units * cdiv(most_tiles, GROUP),).

    weights: like the scores, rounded to their dtype, which is q's; sums (units, most_tiles, rows, 4) float32: of the
    weights of a tile that one thread of a quad of the sm_90 forward has; factors (units, most_tiles, rows) float32: of
    the sums and the output before the tile; moves (units, most_tiles) int32: whether any factor is not 1; last_maxima
    (units, rows) float32: those after all tiles, in base 2.
    """
    let_next_launch_start(PDL)
    # A warp has eight rows, and each of its threads two neighbours of every eight keys, as in the sm_90 forward.
    QUADS: gl.constexpr = quad_layout(BLOCK_R, BLOCK_N, BLOCK_R // 8)
    SUMS: gl.constexpr = sums_layout(BLOCK_R, BLOCK_R // 8)
    ROW: gl.constexpr = gl.SliceLayout(1, QUADS)
    CHUNK: gl.constexpr = 32
    CHUNKS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [BLOCK_R // 8, 1], [1, 0])
    caches = Caches(cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], APPENDS, BLOCK_N, 1, 1, True, IN_ORDER=True)
    rows = NQ * GROUP_SIZE
    stored = gl.minimum(rows, BLOCK_R)
    row_blocks = (rows + BLOCK_R - 1) // BLOCK_R
    groups = (most_tiles + GROUP - 1) // GROUP
    number, group = gl.program_id(0) // groups, gl.program_id(0) % groups
    sequence = number // (HKV * row_blocks)
    keys = cached_keys(caches, sequence)
    tiles = count_key_tiles(keys, BLOCK_N)
    first = group * GROUP
    if first >= tiles:
        return
    offs = gl.arange(0, BLOCK_R, ROW)
    num_rows = gl.minimum(stored, rows - number % row_blocks * BLOCK_R)
    exists = offs < num_rows
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, QUADS))
    quad = gl.arange(0, 4, gl.SliceLayout(0, SUMS))
    rows_of_sums = gl.arange(0, BLOCK_R, gl.SliceLayout(1, SUMS))
    place = number.to(gl.int64) * most_tiles
    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, ROW)
    wait_for_previous_launch(PDL)
    # The tiles after this group's, CHUNK at a time: the maximum moves in few of them.
    end = gl.minimum(tiles, first + GROUP)
    top = tiles
    while top > end:
        bottom = gl.maximum(end, top - CHUNK)
        chunk = bottom + gl.arange(0, CHUNK, gl.SliceLayout(0, CHUNKS))
        chunk_rows = gl.arange(0, BLOCK_R, gl.SliceLayout(1, CHUNKS))
        at = maxima_ptr + (place + chunk)[None, :] * stored + chunk_rows[:, None]
        mask = (chunk < top)[None, :] & (chunk_rows < num_rows)[:, None]
        highest = gl.convert_layout(gl.max(gl.load(at, mask=mask, other=float("-inf")), 1), ROW)
        grows = gl.where(highest * qk_scale - row_max > LAG, 1, 0)
        if gl.max(grows, 0) > 0:
            for tile in range(top - 1, bottom - 1, -1):
                highest = gl.load(maxima_ptr + (place + tile) * stored + offs, mask=exists, other=float("-inf"))
                row_max, _, _ = lagging_maximum(row_max, highest, qk_scale)
        top = bottom
    highest = gl.load(maxima_ptr + (place + end - 1) * stored + offs, mask=exists, other=float("-inf"))
    for i in range(end - first):
        tile = place + end - 1 - i
        row_max, subtrahend, factor = lagging_maximum(row_max, highest, qk_scale)
        within = (tile * stored + offs)[:, None] * BLOCK_N + columns[None, :]
        scores = gl.load(scores_ptr + within, mask=exists[:, None], other=float("-inf"))
        if i + 1 < end - first:
            highest = gl.load(maxima_ptr + (tile - 1) * stored + offs, mask=exists, other=float("-inf"))
        p = tl.math.exp2(scores * qk_scale - subtrahend[:, None])
        part = gl.convert_layout(sum_quads(p), SUMS)
        gl.store(weights_ptr + within, p.to(weights_ptr.dtype.element_ty), mask=exists[:, None])
        gl.store(factors_ptr + tile * stored + offs, factor, mask=exists)
        gl.store(moves_ptr + tile, gl.max(gl.where(exists & (factor != 1.0), 1, 0), 0))
        sums = sums_ptr + (tile * stored + rows_of_sums)[:, None] * 4 + quad[None, :]
        gl.store(sums, part, mask=(rows_of_sums < num_rows)[:, None])
    if first == 0:
        gl.store(last_maxima_ptr + number * stored + offs, row_max, mask=exists)


@record
class StepWeights:
    """Pointers to the results of ``weight_kernel``."""

    weights_ptr: gl.tensor
    factors_ptr: gl.tensor
    moves_ptr: gl.tensor
    sums_ptr: gl.tensor
    last_maxima_ptr: gl.tensor


@jit
def copy_weighed(weights, walk, v_view, table, row_format, first_column, values, p_smem, factors, moves, sums,
                 BLOCK_R: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Copy the values of all tiles, and what ``weight_kernel`` wrote for them; the work of warps of their own."""
    source = value_source(v_view, table, walk, row_format, first_column)
    COPY: gl.constexpr = copy_layout(BLOCK_R, walk.BLOCK_N, COPY_WARPS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [COPY_WARPS], [0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [COPY_WARPS, 1], [1, 0])
    rows = gl.arange(0, BLOCK_R, gl.SliceLayout(1, COPY))
    keys = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(0, COPY))
    line = gl.arange(0, BLOCK_R, LINE)
    square = gl.arange(0, BLOCK_R, gl.SliceLayout(1, SQUARE))
    quads = gl.arange(0, 4, gl.SliceLayout(0, SQUARE))
    p_at = weights.weights_ptr + rows[:, None] * walk.BLOCK_N + keys[None, :]
    factor_at = weights.factors_ptr + line
    sums_at = weights.sums_ptr + square[:, None] * 4 + quads[None, :]
    num_rows = walk.unit.num_rows
    wait_for_previous_launch(PDL)
    for visit in range(walk.tiles):
        cursor = values.at(visit)
        values.wait_empty(cursor)
        row = (walk.first_tile - visit) * walk.rows
        async_load(p_smem.index(cursor.slot), p_at + row * walk.BLOCK_N, (rows < num_rows)[:, None])
        async_load(factors.index(cursor.slot), factor_at + row, line < num_rows)
        async_load(moves.index(cursor.slot), weights.moves_ptr + (walk.first_tile - visit) + gl.arange(0, 1, LINE))
        async_load(sums.index(cursor.slot), sums_at + row * 4, (square < num_rows)[:, None])
        # A tensor core's tile may have more columns; they are not stored.
        copy_rows(source, walk, visit, values.tile(cursor).slice(0, row_format.BLOCK_D, dim=1))
        fill_by_copies(values, cursor)
    async_copy.wait_group(0)


@jit
def add_up_values(
    walk, weights, values, p_smem, factors, moves, sums, first_column, end_column, o, sinks_ptr, HQ, NQ, GROUP_SIZE
):
    """Add up the values of all tiles of a unit, and write its output."""
    BLOCK_R: gl.constexpr = p_smem.shape[1]
    COLUMNS: gl.constexpr = values.buffer.shape[2]
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    SUMS: gl.constexpr = sums_layout(BLOCK_R, 4)
    ROW: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    acc = warpgroup_mma_init(gl.zeros([COLUMNS, BLOCK_R], gl.float32, OUTPUT))
    row_sum = gl.zeros([BLOCK_R, 4], gl.float32, SUMS)
    for visit in range(walk.tiles):
        cursor = values.at(visit)
        values.wait_full(cursor)
        fence_async_shared()
        if gl.max(moves.index(cursor.slot).load(ONE), 0) > 0:
            # The products of tiles between which no maximum moves follow one another without a wait.
            factor = factors.index(cursor.slot).load(ROW)
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]) * factor[None, :])
        v, p = values.tile(cursor).permute((1, 0)), p_smem.index(cursor.slot).permute((1, 0))
        acc = warpgroup_mma(v, p, acc, is_async=True)
        row_factor = factors.index(cursor.slot).load(gl.SliceLayout(1, SUMS))
        row_sum = row_sum * row_factor[:, None] + sums.index(cursor.slot).load(SUMS)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
        if visit > 0:
            values.release_by_threads(values.at(visit - 1))
    acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, BLOCK_R, ROW)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    last_maxima = weights.last_maxima_ptr + walk.unit.number * walk.rows + row
    row_max = gl.load(last_maxima, mask=row < walk.unit.num_rows, other=float("-inf"))
    store_unit(walk, acc, row_max, row_sum, sinks_ptr, o[0], o[1], o[2], NQ, HQ, GROUP_SIZE, first_column, end_column)


@jit(do_not_specialize=NUMBERS)
def value_kernel(
    v_cache_ptr, cache_seqlens_ptr, kv_starts_ptr, sinks_ptr, block_table_ptr, weights_ptr, sums_ptr, factors_ptr,
    moves_ptr, last_maxima_ptr, o_ptr, lse_ptr, v_cache_strides, table_strides, o_strides, window, B, HKV, HQ,
    GROUP_SIZE, NQ, S, num_pages, most_tiles, D: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, APPENDS: gl.constexpr, STRIDE_UNIT: gl.constexpr,
    PAGE_SIZE: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Add up COLUMNS columns of the values of one unit. Grid: (units * cdiv(D, COLUMNS),).

    weights, sums, factors, moves and last_maxima: of ``weight_kernel``; o (B, HQ, NQ, D), lse (B, HQ, NQ) float32, and
    the others as in ``decode_kernel``.
    """
    let_next_launch_start(PDL)
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    TILE_COLUMNS: gl.constexpr = max(64, COLUMNS)  # of a tensor core's tile
    caches = Caches(cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], APPENDS, BLOCK_N, 1, 1, True, IN_ORDER=True)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    parts = (D + COLUMNS - 1) // COLUMNS
    number, first_column = gl.program_id(0) // parts, gl.program_id(0) % parts * COLUMNS
    walk = walk_of(number, caches, table, window_of(window), HKV, GROUP_SIZE, most_tiles, BLOCK_R)
    v_view = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    row_format = RowFormat(D, COLUMNS, USE_INT64_OFFSETS)
    end_column = gl.minimum(D, first_column + COLUMNS)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, TILE_COLUMNS], DTYPE)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], DTYPE)
    values = channel_of(gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, TILE_COLUMNS], TILE), STAGES)
    p_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_R, BLOCK_N], OPERAND)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_R, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    moves = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    values.init(FILLS=32 * COPY_WARPS, RELEASES=128)
    weights = StepWeights(weights_ptr, factors_ptr, moves_ptr, sums_ptr, last_maxima_ptr)
    o = (o_ptr, lse_ptr, o_strides)
    gl.warp_specialize(
        [
            (add_up_values, (walk, weights, values, p_smem, factors, moves, sums, first_column, end_column, o,
                             sinks_ptr, HQ, NQ, GROUP_SIZE)),
            (copy_weighed, (weights, walk, v_view, table, row_format, first_column, values, p_smem, factors,
                            moves, sums, BLOCK_R, PDL)),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )  # fmt: skip
