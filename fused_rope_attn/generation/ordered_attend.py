# mypy: ignore-errors
"""The loop over the blocks of keys of an ordered step (``ordered_kernels``), in order: weights and values.

Long batches compute the scores here too, so that keys and values are read once and nothing else goes through memory.
Where there are few sequences, this loop would leave most of the card idle: there the scores and weights come from other
launches, and the values are split over their columns.

One warpgroup works on one unit. The products are transposed, because a tensor core's tile has 64 rows, or eight
columns: keys and values are the left operands. The product with the values of a block runs while the next block is
weighed, and the scores of a block are computed while the block before it is weighed.
"""

import triton.language as tl
from triton import constexpr_function

from fused_rope_attn.attention.hopper.softmax import lagging_maximum, sum_quads
from fused_rope_attn.generation.ordered_kernels import (
    NUMBERS,
    CachedRows,
    Unit,
    cached_rows_at,
    look_up,
    member_columns,
    quad_layout,
    query_positions,
    rows_of_cache,
    sums_layout,
    unit_of,
)
from fused_rope_attn.generation.pages import BlockTable, SequencePages, assert_in_pool, sequence_pages
from fused_rope_attn.generation.shares import CachedKeys, Caches, cache_view, cached_keys, count_key_tiles
from fused_rope_attn.kernels.masks import Mask, visible, window_of
from fused_rope_attn.kernels.products import approximate_tanh, tanh
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import LOG2E, finish_sums, log_sum_exp
from fused_rope_attn.kernels.tiles import RowFormat, row_pointers
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


@constexpr_function
def copy_layout(rows, columns, warps):
    """Return the layout in which warps copy a tile (rows, columns), 16 bytes a thread."""
    across = [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    down = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    threads = 5 + warps.bit_length() - 1
    bases = across + down
    bases += [[0, 0]] * (threads - len(bases))  # tiles of less than 16 bytes a thread
    of_registers = [[0, 1], [0, 2], [0, 4], *bases[threads:]]
    return gl.DistributedLinearLayout(of_registers, bases[:5], bases[5:threads], [], [rows, columns])


@constexpr_function
def member_layout(rows, columns, warps):
    """Return the layout of keys (rows, columns), all first members before the second ones, as tensor cores read them.

    A thread has two neighbours of every eight columns, in rows eight apart. A warp has 16 rows.
    """
    eights = [[0, 8 << i] for i in range((columns // 16).bit_length() - 1)]
    of_registers = [[0, 1], [8, 0], [0, columns // 2], *eights]
    levels = warps.bit_length() - 1
    of_rows = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(of_registers + of_rows[levels:], lanes, of_rows[:levels], [], [rows, columns])


@jit
def key_operand(tile, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return keys (BLOCK_N, BLOCK_D) from shared memory as the left operand of a product with a result of LAYOUT.

    Their columns are in the order of ``query_kernel``'s. INTERLEAVED: they are already in shared memory.
    """
    if INTERLEAVED:
        return tile
    else:
        ROWS: gl.constexpr = tile.shape[0]
        COLUMNS: gl.constexpr = tile.shape[1]
        k = tile.load(member_layout(ROWS, COLUMNS, gl.num_warps()))
        k = k.reshape((ROWS, 2, COLUMNS // 16, 8)).permute((0, 2, 1, 3)).reshape((ROWS, COLUMNS))
        return gl.convert_layout(k, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@jit
def mask_and_cap(scores, cap_scale, walk, positions, start, window, DTYPE: gl.constexpr):
    """Return scores (BLOCK_N, BLOCK_R), capped, and -inf where a query does not see a key."""
    if cap_scale is not None:
        if DTYPE == gl.bfloat16:
            scores = approximate_tanh(scores * cap_scale)
        else:
            scores = tanh(scores * cap_scale, PRECISE=False)
    offs = gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
    if (start < walk.seen_from) | (start + walk.BLOCK_N > walk.seen_until):
        mask = Mask(walk.keys.num_keys, walk.keys.first_key, window, READS_LENGTHS=True)
        scores = gl.where(visible(mask, positions[None, :], (start + offs)[:, None]), scores, float("-inf"))
    return scores


@record
class Walk:
    """A unit, and the tiles of its sequence: number 0 is the last one."""

    unit: Unit
    keys: CachedKeys
    tiles: gl.tensor
    pages: SequencePages | None
    first_tile: gl.tensor  # of the workspaces: the one of the last tile
    rows: gl.tensor  # of a tile in the workspaces
    last: gl.tensor  # position of the last tile's first key
    seen_from: gl.tensor  # every query sees the keys from here on
    seen_until: gl.tensor  # ... before this one
    BLOCK_N: gl.constexpr


@jit
def walk_of(number, caches, table, window, HKV, GROUP_SIZE, most_tiles, BLOCK_R: gl.constexpr):
    """Return the ``Walk`` of unit ``number``."""
    rows = caches.NQ * GROUP_SIZE
    row_blocks = (rows + BLOCK_R - 1) // BLOCK_R
    units = HKV * row_blocks
    unit = unit_of(number // units, number % units, row_blocks, HKV, rows, BLOCK_R)
    keys = cached_keys(caches, unit.sequence)
    tiles = count_key_tiles(keys, caches.BLOCK_N)
    pages = None
    if table.ptr is not None:
        pages = sequence_pages(table, gl.to_tensor(unit.sequence).to(gl.int64), 0, 0)
    first_tile = gl.to_tensor(number).to(gl.int64) * most_tiles + tiles - 1
    last = keys.first_tile + (tiles - 1) * caches.BLOCK_N
    first_position, last_position = keys.q_offset, keys.q_offset + caches.NQ - 1
    seen_from, seen_until = keys.first_key, keys.num_keys
    if window.left is not None:
        seen_from = gl.maximum(seen_from, last_position - window.left)
    if window.right is not None:
        seen_until = gl.minimum(seen_until, first_position + window.right + 1)
    seen_until = gl.where((first_position >= 0) & (last_position < caches.S), seen_until, 0)
    stored = gl.minimum(rows, BLOCK_R)
    return Walk(unit, keys, tiles, pages, first_tile, stored, last, seen_from, seen_until, caches.BLOCK_N)


@record
class Source:
    """The cached rows of a unit, keys or values, and how tiles of them are copied."""

    cached: CachedRows
    columns: gl.tensor  # in memory
    exists: gl.tensor  # which of the columns do
    offsets: gl.tensor  # of a contiguous cache: of a tile's elements from its first row
    LAYOUT: gl.constexpr
    IS_WHOLE: gl.constexpr  # whether all columns exist


@jit
def source_of(view, table, walk, row_format, columns, exists, LAYOUT: gl.constexpr, IS_WHOLE: gl.constexpr):
    """Return the ``Source`` of a walk's unit."""
    cached = rows_of_cache(view, table, walk.unit, walk.keys, row_format)
    offs = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(1, LAYOUT))
    offsets = row_pointers(replace(cached.rows, ptr=0), offs, columns)
    return Source(cached, columns, exists, offsets, LAYOUT, IS_WHOLE)


@jit
def key_source(view, table, walk, row_format, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Return the ``Source`` of rotated keys for ``key_operand``."""
    D: gl.constexpr = row_format.D
    BLOCK_D: gl.constexpr = row_format.BLOCK_D
    COPY: gl.constexpr = copy_layout(walk.BLOCK_N, BLOCK_D, gl.num_warps())
    if INTERLEAVED:
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))
        return source_of(view, table, walk, row_format, columns, columns < D, COPY, D == BLOCK_D)
    else:
        columns, exists = member_columns(BLOCK_D, D, R, COPY)
        return source_of(view, table, walk, row_format, columns, exists, COPY, D == BLOCK_D)


@jit
def value_source(view, table, walk, row_format, first, end):
    """Return the ``Source`` of values, of the columns from ``first`` on before ``end``; None: all."""
    D: gl.constexpr = row_format.D
    BLOCK_D: gl.constexpr = row_format.BLOCK_D
    COPY: gl.constexpr = copy_layout(walk.BLOCK_N, BLOCK_D, gl.num_warps())
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))
    if end is None:
        return source_of(view, table, walk, row_format, columns, columns < D, COPY, D == BLOCK_D)
    else:
        columns += first
        return source_of(view, table, walk, row_format, columns, columns < end, COPY, False)


@record
class Pages:
    """The highest entry of the block table that each thread has looked up so far; None without pages."""

    highest: gl.tensor | None


@jit
def no_pages(walk, source):
    """Return the ``Pages`` of a walk before it copies anything from ``source``."""
    if walk.pages is None:
        return Pages(highest=None)
    else:
        return Pages(highest=gl.zeros([walk.BLOCK_N], gl.uint32, gl.SliceLayout(1, source.LAYOUT)))


@jit
def copy_rows(source, walk, visit, tile, seen):
    """Begin to copy the rows of the walk's tile ``visit``, zeros for those that no query sees, and commit nothing.

    Returns ``seen``, the walk's ``Pages``, with those of this tile. Tiles past the last one are not copied.
    """
    offs = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(1, source.LAYOUT))
    start = walk.last - visit * walk.BLOCK_N
    if visit < walk.tiles:
        if walk.pages is not None:
            entries = look_up(walk.pages, walk.keys, start, offs)
            seen = Pages(highest=gl.maximum(seen.highest, entries))
            cached = source.cached
            pointers, mask = cached_rows_at(cached, walk.pages, walk.keys, entries, start, offs, source.columns)
            async_load(tile, pointers, mask & source.exists[None, :])
        else:
            rows = source.cached.rows
            pointers = rows.ptr + gl.to_tensor(start).to(gl.int64) * rows.stride_row + source.offsets
            if source.IS_WHOLE:
                if (start >= walk.keys.first_key) & (start + walk.BLOCK_N <= walk.keys.num_keys):
                    async_load(tile, pointers)
                else:
                    mask = (start + offs >= walk.keys.first_key) & (start + offs < walk.keys.num_keys)
                    async_load(tile, pointers, mask[:, None])
            else:
                mask = (start + offs >= walk.keys.first_key) & (start + offs < walk.keys.num_keys)
                async_load(tile, pointers, mask[:, None] & source.exists[None, :])
    return seen


@jit
def copy_queries(rotated_ptr, number, q_smem):
    """Begin to copy the queries of unit ``number``, of ``query_kernel``."""
    COPY: gl.constexpr = copy_layout(q_smem.shape[0], q_smem.shape[1], gl.num_warps())
    rows = gl.arange(0, q_smem.shape[0], gl.SliceLayout(1, COPY))
    columns = gl.arange(0, q_smem.shape[1], gl.SliceLayout(0, COPY))
    first_row = gl.to_tensor(number).to(gl.int64) * q_smem.shape[0]
    async_load(q_smem, rotated_ptr + (first_row + rows)[:, None] * q_smem.shape[1] + columns[None, :])


@jit
def store_unit(walk, acc, row_max, row_sum, sinks_ptr, o_ptr, lse_ptr, o_strides, NQ, HQ, GROUP_SIZE, column, end):
    """Write the output of a unit, acc (columns, BLOCK_R) of columns from ``column`` on before ``end``, and its lse.

    row_max (BLOCK_R,) in base 2, row_sum (BLOCK_R, 4): as the sm_90 forward leaves them.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    BLOCK_R: gl.constexpr = acc.shape[1]
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    row_max = gl.convert_layout(row_max, ROW)
    unit = walk.unit
    offs = gl.arange(0, BLOCK_R, ROW)
    row = unit.start + offs
    tokens, heads = row // GROUP_SIZE, unit.head_kv * GROUP_SIZE + row % GROUP_SIZE
    exists = offs < unit.num_rows
    sink = None
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + heads, mask=exists, other=0.0).to(gl.float32) * LOG2E
    seen, row_max, divisor, weight = finish_sums(row_max, row_sum, sink)
    factor = gl.where(seen, weight / divisor, 0.0)
    o = gl.where(seen[None, :], acc * factor[None, :], 0.0).to(o_ptr.dtype.element_ty)
    columns = column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    batch = gl.to_tensor(unit.sequence).to(gl.int64)
    rows = batch * o_strides[0] + heads.to(gl.int64) * o_strides[1] + tokens.to(gl.int64) * o_strides[2]
    at = o_ptr + rows[None, :] + columns[:, None] * o_strides[3]
    gl.store(at, o, mask=exists[None, :] & (columns < end)[:, None])
    if column == 0:
        gl.store(lse_ptr + (batch * HQ + heads) * NQ + tokens, log_sum_exp(seen, row_max, divisor), mask=exists)


@jit(do_not_specialize=NUMBERS)
def attend_kernel(
    rotated_ptr, k_cache_ptr, v_cache_ptr, cache_seqlens_ptr, kv_starts_ptr, sinks_ptr, block_table_ptr, o_ptr, lse_ptr,
    k_cache_strides, v_cache_strides, table_strides, o_strides, qk_scale, cap_scale, window, B, HKV, HQ, GROUP_SIZE, NQ,
    S, num_pages, D: gl.constexpr, R: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, INTERLEAVED: gl.constexpr, APPENDS: gl.constexpr,
    STRIDE_UNIT: gl.constexpr, PAGE_SIZE: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one unit to all tiles of a cache of rotated keys. Grid: (units,).

    rotated: of ``query_kernel``. o (B, HQ, NQ, D), lse (B, HQ, NQ) float32, and the others as in ``decode_kernel``.
    """
    let_next_launch_start(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_R, 16])
    QUADS: gl.constexpr = quad_layout(BLOCK_R, BLOCK_N, WARPS)
    SUMS: gl.constexpr = sums_layout(BLOCK_R, WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    caches = Caches(cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], APPENDS, BLOCK_N, 1, 1, True, IN_ORDER=True)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    number = gl.program_id(0)
    walk = walk_of(number, caches, table, window_of(window), HKV, GROUP_SIZE, 0, BLOCK_R)
    k_view = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_view = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    k_source = key_source(k_view, table, walk, row_format, R, INTERLEAVED)
    v_source = value_source(v_view, table, walk, row_format, None, None)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_D], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_R, BLOCK_D], ROWS)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], DTYPE)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_R, BLOCK_N], WEIGHTS)
    positions = query_positions(walk.keys, walk.unit, gl.arange(0, BLOCK_R, ROW), GROUP_SIZE, S)
    window = window_of(window)
    wait_for_previous_launch(PDL)
    copy_queries(rotated_ptr, number, q_smem)
    # Keys and values look up the same pages, but hold them in other layouts.
    seen = copy_rows(k_source, walk, 0, k_smem.index(0), no_pages(walk, k_source))
    v_seen = no_pages(walk, v_source)
    async_copy.commit_group()
    for i in gl.static_range(STAGES - 1):
        seen = copy_rows(k_source, walk, i + 1, k_smem.index((i + 1) % STAGES), seen)
        v_seen = copy_rows(v_source, walk, i, v_smem.index(i), v_seen)
        async_copy.commit_group()
    nothing = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, SCORES)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_D, BLOCK_R], gl.float32, SCORES))
    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([BLOCK_R, 4], gl.float32, SUMS)
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    barrier()
    q = q_smem.permute((1, 0))
    k = key_operand(k_smem.index(0), INTERLEAVED, SCORES)
    scores = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for visit in range(walk.tiles):
        # Values of this tile and keys of the next one.
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        k = key_operand(k_smem.index((visit + 1) % STAGES), INTERLEAVED, SCORES)
        following = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        start = walk.last - visit * BLOCK_N
        scores = mask_and_cap(scores, cap_scale, walk, positions, start, window, DTYPE)
        row_max, subtrahend, factor = lagging_maximum(row_max, gl.max(scores, 0), qk_scale)
        p = tl.math.exp2(scores * qk_scale - subtrahend[None, :])
        weights = p_smem.index(visit % 2).permute((1, 0))
        weights.store(p.to(DTYPE))
        part = gl.convert_layout(sum_quads(gl.convert_layout(p.permute((1, 0)), QUADS)), SUMS)
        row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None] + part
        acc = warpgroup_mma_wait(1, deps=[acc])
        fence_async_shared()
        barrier()
        seen = copy_rows(k_source, walk, visit + STAGES, k_smem.index(visit % STAGES), seen)
        v_slot = (visit + STAGES - 1) % STAGES
        v_seen = copy_rows(v_source, walk, visit + STAGES - 1, v_smem.index(v_slot), v_seen)
        async_copy.commit_group()
        acc = acc * factor[None, :]
        acc = warpgroup_mma(v_smem.index(visit % STAGES).permute((1, 0)), weights, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[following])
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    if walk.pages is not None:
        assert_in_pool(seen.highest, walk.pages)
    store_unit(walk, acc, row_max, row_sum, sinks_ptr, o_ptr, lse_ptr, o_strides, NQ, HQ, GROUP_SIZE, 0, D)


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
    # Only this program's tiles, of which number 0 is the last one again.
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
    copy_queries(rotated_ptr, number, q_smem)
    seen = no_pages(walk, source)
    for i in gl.static_range(STAGES - 1):
        seen = copy_rows(source, walk, i, k_smem.index(i), seen)
        async_copy.commit_group()
    for visit in range(walk.tiles):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        q = q_smem.permute((1, 0))
        k = key_operand(k_smem.index(visit % STAGES), INTERLEAVED, SCORES)
        scores = warpgroup_mma(k, q, nothing, use_acc=False, is_async=True)
        # The slot of the tile before, which all warps have multiplied.
        number_of = visit + STAGES - 1
        seen = copy_rows(source, walk, number_of, k_smem.index(number_of % STAGES), seen)
        async_copy.commit_group()
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = mask_and_cap(scores, cap_scale, walk, positions, walk.last - visit * BLOCK_N, window, DTYPE)
        row = (walk.first_tile - visit) * walk.rows + offs
        gl.store(scores_ptr + row[None, :] * BLOCK_N + keys[:, None], scores, mask=exists[None, :])
        gl.store(maxima_ptr + row, gl.max(scores, 0), mask=exists)
    async_copy.wait_group(0)
    if walk.pages is not None:
        assert_in_pool(seen.highest, walk.pages)


@record
class StepWeights:
    """Pointers to what ``weight_kernel`` wrote for tile 0 of unit 0, each with the rows that exist."""

    weights: gl.tensor  # (BLOCK_R, BLOCK_N)
    weights_exist: gl.tensor
    factors: gl.tensor  # (BLOCK_R,)
    factors_exist: gl.tensor
    sums: gl.tensor  # (BLOCK_R, 4)
    sums_exist: gl.tensor


@jit
def copy_weights(weights, walk, visit, p_tile, factor_tile, sums_tile):
    """Begin to copy the weights, factors and sums of the walk's tile ``visit``."""
    row = (walk.first_tile - visit) * walk.rows
    exists = visit < walk.tiles
    async_load(p_tile, weights.weights + row * walk.BLOCK_N, (weights.weights_exist & exists)[:, None])
    async_load(factor_tile, weights.factors + row, weights.factors_exist & exists)
    async_load(sums_tile, weights.sums + row * 4, (weights.sums_exist & exists)[:, None])


@jit(do_not_specialize=NUMBERS)
def value_kernel(
    v_cache_ptr, cache_seqlens_ptr, kv_starts_ptr, sinks_ptr, block_table_ptr, weights_ptr, sums_ptr, factors_ptr,
    last_maxima_ptr, o_ptr, lse_ptr, v_cache_strides, table_strides, o_strides, window, B, HKV, HQ, GROUP_SIZE, NQ, S,
    num_pages, most_tiles, D: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, APPENDS: gl.constexpr, STRIDE_UNIT: gl.constexpr, PAGE_SIZE: gl.constexpr,
    USE_INT64_OFFSETS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Add up COLUMNS columns of the values of one unit. Grid: (units * cdiv(D, COLUMNS),).

    weights, sums, factors and last_maxima: of ``weight_kernel``; o (B, HQ, NQ, D), lse (B, HQ, NQ) float32, and the
    others as in ``decode_kernel``.
    """
    let_next_launch_start(PDL)
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    TILE_COLUMNS: gl.constexpr = max(64, COLUMNS)  # of a tensor core's tile
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    SUMS: gl.constexpr = sums_layout(BLOCK_R, 4)
    COPY_WEIGHTS: gl.constexpr = copy_layout(BLOCK_R, BLOCK_N, 4)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    caches = Caches(cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], APPENDS, BLOCK_N, 1, 1, True, IN_ORDER=True)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    parts = (D + COLUMNS - 1) // COLUMNS
    number, first_column = gl.program_id(0) // parts, gl.program_id(0) % parts * COLUMNS
    walk = walk_of(number, caches, table, window_of(window), HKV, GROUP_SIZE, most_tiles, BLOCK_R)
    v_view = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    row_format = RowFormat(D, TILE_COLUMNS, USE_INT64_OFFSETS)
    end_column = gl.minimum(D, first_column + COLUMNS)
    source = value_source(v_view, table, walk, row_format, first_column, end_column)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, TILE_COLUMNS], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_N], DTYPE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, TILE_COLUMNS], TILE)
    p_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_R, BLOCK_N], WEIGHTS)
    factor_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_R, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows = gl.arange(0, BLOCK_R, gl.SliceLayout(1, COPY_WEIGHTS))
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, COPY_WEIGHTS))
    line = gl.arange(0, BLOCK_R, LINE)
    square_rows = gl.arange(0, BLOCK_R, gl.SliceLayout(1, SQUARE))
    quads = gl.arange(0, 4, gl.SliceLayout(0, SQUARE))
    num_rows = walk.unit.num_rows
    weights = StepWeights(
        weights_ptr + rows[:, None] * BLOCK_N + keys[None, :], rows < num_rows, factors_ptr + line, line < num_rows,
        sums_ptr + square_rows[:, None] * 4 + quads[None, :], square_rows < num_rows,
    )  # fmt: skip
    acc = warpgroup_mma_init(gl.zeros([TILE_COLUMNS, BLOCK_R], gl.float32, OUTPUT))
    row_sum = gl.zeros([BLOCK_R, 4], gl.float32, SUMS)
    wait_for_previous_launch(PDL)
    seen = no_pages(walk, source)
    for i in gl.static_range(STAGES - 1):
        copy_weights(weights, walk, i, p_smem.index(i), factor_smem.index(i), sums_smem.index(i))
        seen = copy_rows(source, walk, i, v_smem.index(i), seen)
        async_copy.commit_group()
    for visit in range(walk.tiles):
        slot = visit % STAGES
        async_copy.wait_group(STAGES - 2)
        acc = warpgroup_mma_wait(0, deps=[acc])
        fence_async_shared()
        barrier()
        factor = factor_smem.index(slot).load(gl.SliceLayout(0, OUTPUT))
        row_factor = factor_smem.index(slot).load(gl.SliceLayout(1, SUMS))
        acc = acc * factor[None, :]
        acc = warpgroup_mma(
            v_smem.index(slot).permute((1, 0)), p_smem.index(slot).permute((1, 0)), acc, is_async=True
        )
        row_sum = row_sum * row_factor[:, None] + sums_smem.index(slot).load(SUMS)
        following = (visit + STAGES - 1) % STAGES
        number_of = visit + STAGES - 1
        copy_weights(
            weights, walk, number_of, p_smem.index(following), factor_smem.index(following), sums_smem.index(following)
        )
        seen = copy_rows(source, walk, number_of, v_smem.index(following), seen)
        async_copy.commit_group()
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    row = gl.arange(0, BLOCK_R, gl.SliceLayout(0, OUTPUT))
    row_max = gl.load(last_maxima_ptr + number * walk.rows + row, mask=row < num_rows, other=float("-inf"))
    store_unit(
        walk, acc, row_max, row_sum, sinks_ptr, o_ptr, lse_ptr, o_strides, NQ, HQ, GROUP_SIZE, first_column, end_column
    )
