# mypy: ignore-errors
"""Generation steps with the bits of the sm_90 forward: each key's scores, weights and values in that kernel's order.

The sm_90 forward visits tiles of BLOCK_N keys from the last one down. The weights of a tile depend on the maxima of the
tiles before it, and the output and the sums of the weights are added up tile by tile. Scores depend on nothing else.

Long batches have a program for each unit, the query rows of one key head of one sequence, which goes through its tiles
in that order (``attend_kernel``). Few sequences would leave most of the card idle: there several programs
compute the scores of a unit's tiles (``score_kernel``), and others weigh them and add up the values, split over their
columns (``value_kernel``). Both kernels run at the same time.

A product has the same bits with other tiles, with its operands exchanged, or with another order of the 16 columns that
one instruction multiplies; the order of these groups matters. Here keys and values are the left operands, because there
are few query rows. Rotated caches hold keys in the order of memory, and the sm_90 forward has them in pair
order: a group of 16 columns is then eight first members, and eight second ones. A copy to shared memory that exchanges
words of 16 bytes takes several times as long as one that does not, so that the groups are made on the way from there to
the registers.

Products are transposed, because a tensor core's tile has 64 rows, or eight columns.
"""

import triton
import triton.language as tl
from triton import constexpr_function

from fused_rope_attn.attention.hopper.softmax import cap_scores
from fused_rope_attn.generation import inputs as step, keys as running
from fused_rope_attn.kernels import masks, rotation, schedule, tiles
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.softmax import LOG2E, finish_sums, log_sum_exp
from fused_rope_attn.runtime.triton_compat import async_copy, async_load, gl, jit

# The parameters that Triton must not specialise on.
NUMBERS = "window_left window_right programs B HKV GROUP_SIZE NQ S num_pages position_limit most_tiles".split()
# Warps that copy, in partitions of their own, and those that add up sums of weights.
COPY_WARPS = gl.constexpr(4)
SUM_WARPS = gl.constexpr(4)
# The programs that share the scores of a unit, at most.
MOST_PROGRAMS = gl.constexpr(4)
COPY_REGISTERS = gl.constexpr(152)
SUM_REGISTERS = gl.constexpr(96)


@constexpr_function
def row_bases(rows, warps):
    """Return the bases of registers and of warps for rows in eights; warps that find no rows have those of others."""
    bases = [[8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    levels = warps.bit_length() - 1
    return bases[levels:], bases[:levels] + [[0, 0]] * (levels - len(bases))


@constexpr_function
def quad_layout(rows, columns, warps):
    """Return the layout of weights (rows, columns) in warps of eight rows: a thread has two of every eight columns."""
    of_thread = [[0, 1]] + [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    of_registers, of_warps = row_bases(rows, warps)
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(of_thread + of_registers, lanes, of_warps, [], [rows, columns])


@constexpr_function
def sums_layout(rows, warps):
    """Return the layout of sums (rows, 4), one for each thread of ``quad_layout``."""
    of_registers, of_warps = row_bases(rows, warps)
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(of_registers, lanes, of_warps, [], [rows, 4])


@record
class Workspaces:
    """Buffers of an ordered step; the last three are None if ``attend_kernel`` does the rest.

    rotated (units, BLOCK_R, BLOCK_D): of ``query_kernel``. scores (units, most_tiles, rows, BLOCK_N) and maxima (units,
    most_tiles, rows) float32, and progress (units, MOST_PROGRAMS) int32: of ``score_kernel``; rows: NQ * GROUP_SIZE.
    """

    rotated_ptr: tl.tensor
    scores_ptr: tl.tensor | None = None
    maxima_ptr: tl.tensor | None = None
    progress_ptr: tl.tensor | None = None


@triton.jit
def member_columns(BLOCK_D: tl.constexpr, D: tl.constexpr, R: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the columns in memory of the half layout, all first members before the second ones, and which exist."""
    offs = tiles.tile_range(BLOCK_D, 1, LAYOUT)
    if D == BLOCK_D and R == D:
        return offs, offs < D
    else:
        pairs = offs % (BLOCK_D // 2)
        first, second = rotation.pair_columns(pairs, D, R)
        RUN: tl.constexpr = min(8, ((R // 2) | (D // 2)) & -((R // 2) | (D // 2)))
        columns = tl.where(offs < BLOCK_D // 2, first, second)
        return tl.max_contiguous(tl.multiple_of(columns, RUN), RUN), pairs < D // 2


@triton.jit(do_not_specialize=NUMBERS)
def query_kernel(
    inputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, window_left, window_right,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the queries of one unit, and check that its pages are in the pool. Grid: (units,).

    inputs: ``StepInputs``, with lengths IN_ORDER; workspaces: ``Workspaces``. rotated gets q's dtype, in the order of
    ``key_operand``, or interleaved ones in that of memory; rows that do not exist are 0. progress becomes zeros.
    """
    schedule.let_next_launch_start(PDL)
    inputs, workspaces = unpack((inputs, workspaces))
    inputs = step.complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right)
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    number = tl.program_id(0)
    keys = step.cached_keys(inputs.lengths, number // HKV)
    batch, head_kv = tl.cast(number // HKV, tl.int64), tl.cast(number % HKV, tl.int64)
    q_rows = step.query_rows(batch, head_kv, 0, NQ * GROUP_SIZE, GROUP_SIZE, BLOCK_R)
    # The units of a sequence share its pages.
    running.assert_pages(inputs.cache.table, batch, keys, number % HKV, HKV)
    if workspaces.progress_ptr is not None:
        program = tl.arange(0, MOST_PROGRAMS)
        tl.store(workspaces.progress_ptr + number * MOST_PROGRAMS + program, tl.zeros((MOST_PROGRAMS,), tl.int32))
    q = step.load_step_queries(inputs, q_rows, keys, step.float8_of(inputs.cache, head_kv)).q
    if not inputs.rotations.tables.INTERLEAVED:
        # The first members of every eight pairs, and then the second ones.
        q = tl.permute(tl.reshape(q, (BLOCK_R, BLOCK_D // 16, 8, 2)), (0, 1, 3, 2)).reshape((BLOCK_R, BLOCK_D))
    at = workspaces.rotated_ptr + (tl.cast(number, tl.int64) * BLOCK_R + q_rows.offs_m)[:, None] * BLOCK_D
    tl.store(at + tl.arange(0, BLOCK_D)[None, :], q)
    # The next launch waits for this one, and so for the new tokens, which are being written.
    schedule.wait_for_previous_launch(PDL)


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
def entry_layout(rows, columns, warps):
    """Return the layout of one number for each row of a tile in ``copy_layout``.

    A warp has the numbers of its own rows. If it has 32 rows or fewer, each number is in one thread.
    """
    of_copy = copy_layout(rows, columns, warps)
    of_warp = [[row] for row, _ in of_copy.lane_bases + of_copy.reg_bases if row]
    lanes = of_warp[:5] + [[0]] * (5 - len(of_warp))
    return gl.DistributedLinearLayout(of_warp[5:], lanes, [[row] for row, _ in of_copy.warp_bases], [], [rows])


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
def key_operand(tile, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """Return keys (BLOCK_N, BLOCK_D) from shared memory as the left operand of a product with a result of LAYOUT.

    Their columns are in the order of ``query_kernel``'s. INTERLEAVED: they are already in shared memory.
    """
    if INTERLEAVED:
        return tile
    else:
        ROWS: gl.constexpr = tile.shape[0]
        COLUMNS: gl.constexpr = tile.shape[1]
        k = tile.load(member_layout(ROWS, COLUMNS, WARPS))
        k = k.reshape((ROWS, 2, COLUMNS // 16, 8)).permute((0, 2, 1, 3)).reshape((ROWS, COLUMNS))
        return gl.convert_layout(k, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@constexpr_function
def partials_layout(rows, warps):
    """Return the layout of partial results (warps, rows) in which a thread has all those of the rows it multiplies."""
    of_rows = [[0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    partials = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[0, 1], *of_rows, *partials], lanes, [[0, 0]] * len(partials), [], [warps, rows])


@jit
def partial_maxima(scores, WARPS: gl.constexpr):
    """Return the maxima (WARPS, BLOCK_R) of the scores (BLOCK_N, BLOCK_R) that each warp has."""
    BLOCK_N: gl.constexpr = scores.shape[0]
    BLOCK_R: gl.constexpr = scores.shape[1]
    # A warp has 16 keys of every 16 * WARPS.
    return gl.max(gl.max(scores.reshape((BLOCK_N // (16 * WARPS), WARPS, 16, BLOCK_R)), 0), 1)


@jit
def highest_scores(scores, WARPS: gl.constexpr):
    """Return the maxima (BLOCK_R,) of scores (BLOCK_N, BLOCK_R), with one exchange between warps."""
    BLOCK_R: gl.constexpr = scores.shape[1]
    highest = gl.max(gl.convert_layout(partial_maxima(scores, WARPS), partials_layout(BLOCK_R, WARPS)), 0)
    return gl.convert_layout(highest, gl.SliceLayout(0, scores.type.layout), assert_trivial=True)


@jit
def mask_and_cap(scores, scale, walk, positions, start, window, DTYPE: gl.constexpr):
    """Return scores (BLOCK_N, BLOCK_R), capped, and -inf where a query does not see a key."""
    scores = cap_scores(scores, scale, DTYPE)
    offs = gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
    if (start < walk.seen_from) | (start + walk.BLOCK_N > walk.seen_until):
        mask = masks.Mask(walk.keys.num_keys, walk.keys.first_key, window, READS_LENGTHS=1)
        scores = gl.where(masks.visible(mask, positions[None, :], (start + offs)[:, None]), scores, float("-inf"))
    return scores


@record
class Walk:
    """A unit, and the tiles of its sequence: number 0 is the last one. Row r belongs to token ``r // GROUP_SIZE``."""

    sequence: gl.tensor
    head_kv: gl.tensor
    number: gl.tensor  # of the unit
    rows: gl.tensor  # query rows, also of a tile in the workspaces
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor
    S: gl.tensor
    keys: step.CachedKeys
    tiles: gl.tensor
    pages: running.BlockTable | None
    first_tile: gl.tensor  # of the workspaces: the one of the last tile
    last: gl.tensor  # position of the last tile's first key
    seen_from: gl.tensor  # every query sees the keys from here on
    seen_until: gl.tensor  # ... before this one
    BLOCK_N: gl.constexpr


@jit
def walk_of(number, inputs, HKV, GROUP_SIZE, most_tiles):
    """Return the ``Walk`` of unit ``number`` of complete ``StepInputs``."""
    lengths, window, table = inputs.lengths, inputs.window, inputs.cache.table
    sequence = number // HKV
    keys = step.cached_keys(lengths, sequence)
    num_tiles = step.count_key_tiles(keys, lengths.BLOCK_N)
    pages = None
    if table is not None:
        pages = running.sequence_pages(table, gl.to_tensor(sequence).to(gl.int64))
    first_tile = gl.to_tensor(number).to(gl.int64) * most_tiles + num_tiles - 1
    last = keys.first_tile + (num_tiles - 1) * lengths.BLOCK_N
    first_position, last_position = keys.q_offset, keys.q_offset + lengths.NQ - 1
    seen_from, seen_until = keys.first_key, keys.num_keys
    if window.left is not None:
        seen_from = gl.maximum(seen_from, last_position - window.left)
    if window.right is not None:
        seen_until = gl.minimum(seen_until, first_position + window.right + 1)
    seen_until = gl.where((first_position >= 0) & (last_position < lengths.S), seen_until, 0)
    return Walk(
        sequence, number - sequence * HKV, number, lengths.NQ * GROUP_SIZE, GROUP_SIZE, lengths.NQ, lengths.S, keys,
        num_tiles, pages, first_tile, last, seen_from, seen_until, lengths.BLOCK_N,
    )  # fmt: skip


@record
class Part:
    """A program's part of a walk: the tiles ``first``, ``first + programs`` and so on, ``tiles`` of them."""

    first: gl.tensor
    programs: gl.tensor
    tiles: gl.tensor


@record
class Source:
    """The cached rows of a unit's key head, keys or values, and how tiles of them are copied."""

    rows: tiles.Rows  # in pages, those of page 0 of the pool
    page_stride: gl.tensor
    columns: gl.tensor  # in memory
    exists: gl.tensor  # which of the columns do
    offsets: gl.tensor  # of a tile's elements from its first row, or each from the first row of its page
    LAYOUT: gl.constexpr
    IS_WHOLE: gl.constexpr  # whether all columns exist


@jit
def rows_in_pages(walk, start, offs):
    """Return the rows of the tile ``start + offs``, each counted from the first row of its page."""
    position = (start + offs).to(gl.uint32, bitcast=True)
    return (position % walk.pages.PAGE_SIZE).to(gl.int32, bitcast=True)


@jit
def source_of(view, walk, row_format, columns, exists, LAYOUT: gl.constexpr, IS_WHOLE: gl.constexpr):
    """Return the ``Source`` of a walk's unit."""
    batch = gl.to_tensor(walk.sequence).to(gl.int64)
    if walk.pages is not None:
        batch *= 0  # the pool
    origin = tiles.Origin(batch=batch, head=gl.to_tensor(walk.head_kv).to(gl.int64), row=0)
    rows = tiles.head_rows(view, origin, walk.keys.num_keys, row_format, walk.keys.first_key)
    page_stride = tiles.row_stride(view.strides[0], view.ptr, row_format.ALIGNED)
    offs = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if walk.pages is not None:
        offs = rows_in_pages(walk, walk.last, offs)
    offsets = tiles.row_pointers(replace(rows, ptr=0), offs, columns)
    return Source(rows, page_stride, columns, exists, offsets, LAYOUT, IS_WHOLE)


@jit
def key_source(view, walk, row_format, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Return the ``Source`` of rotated keys for ``key_operand``."""
    D: gl.constexpr = row_format.D
    BLOCK_D: gl.constexpr = row_format.BLOCK_D
    COPY: gl.constexpr = copy_layout(walk.BLOCK_N, BLOCK_D, COPY_WARPS)
    if INTERLEAVED:
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))
        return source_of(view, walk, row_format, columns, columns < D, COPY, D == BLOCK_D)
    else:
        columns, exists = member_columns(BLOCK_D, D, R, COPY)
        return source_of(view, walk, row_format, columns, exists, COPY, D == BLOCK_D)


@jit
def entries_of(source, walk, visit):
    """Load the entries of the block table for the rows of the walk's tile ``visit``; a zero if there are no pages.

    They are loaded a tile early, because the load takes as long as the copy. They are in
    the pool, even if an assertion is about to stop the call.
    """
    if walk.pages is not None:
        offs = gl.arange(0, walk.BLOCK_N, entry_layout(walk.BLOCK_N, source.columns.shape[0], COPY_WARPS))
        # Rows before the first key that is seen, where pages may be gone, look up the page of this key.
        start = walk.last - visit * walk.BLOCK_N
        positions = tl.cast(tl.maximum(start + offs, walk.keys.first_key), tl.uint32, bitcast=True)
        found = running.page_entries(walk.pages, positions, tl.cast(walk.keys.num_keys, tl.uint32, bitcast=True))
        return tl.minimum(found, tl.cast(walk.pages.num_pages - 1, tl.uint32, bitcast=True))
    else:
        return gl.to_tensor(0)


@jit
def copy_rows(source, walk, visit, first, tile):
    """Begin to copy the rows of the walk's tile ``visit``, zeros for those that no query sees, and commit nothing.

    first: pointers from which ``source.offsets`` are counted. Tiles after the last one are zeros. Pages outside the
    pool count as its last page; ``query_kernel`` stops the call.
    """
    offs = gl.arange(0, walk.BLOCK_N, gl.SliceLayout(1, source.LAYOUT))
    start = walk.last - visit * walk.BLOCK_N
    offsets = source.offsets
    if walk.pages is not None:
        if walk.BLOCK_N % walk.pages.PAGE_SIZE != 0:
            rows = replace(source.rows, ptr=0)
            offsets = tiles.row_pointers(rows, rows_in_pages(walk, start, offs), source.columns)
    pointers = first + offsets
    mask = ((start + offs >= walk.keys.first_key) & (start + offs < walk.keys.num_keys))[:, None]
    if not source.IS_WHOLE:
        async_load(tile, pointers, mask & source.exists[None, :])
    elif (start >= walk.keys.first_key) & (start + walk.BLOCK_N <= walk.keys.num_keys):
        async_load(tile, pointers)
    else:
        async_load(tile, pointers, mask)


@jit
def entries_of_step(source, walk, part, number, STEP: gl.constexpr):
    """Return a tuple of ``entries_of`` the tiles of step ``number`` of a ``Part``."""
    entries = ()
    for i in gl.static_range(STEP):
        entries = entries + (entries_of(source, walk, part.first + (number * STEP + i) * part.programs),)
    return entries


@jit
def copy_tiles(source, walk, part, channel, STEP: gl.constexpr = 1):
    """Copy the tiles of a ``Part`` in steps of STEP tiles, zeros for those after the last one.

    A tensor core's tile may have more columns than are copied; they are not stored.
    """
    COLUMNS: gl.constexpr = source.columns.shape[0]
    rows = source.rows
    entries = entries_of_step(source, walk, part, 0, STEP)
    for number in range(tl.cdiv(part.tiles, STEP)):
        following = entries_of_step(source, walk, part, number + 1, STEP)
        for i in gl.static_range(STEP):
            visit = part.first + (number * STEP + i) * part.programs
            # Pointers to the tile's first row, or for each row to the first one of its page, (BLOCK_N, 1). They are
            # computed before the wait for the slot, so that the copies begin at once after it.
            if walk.pages is not None:
                pages = gl.convert_layout(entries[i], gl.SliceLayout(1, source.LAYOUT)).to(gl.int64)
                first = (rows.ptr + pages * source.page_stride)[:, None]
            else:
                first = rows.ptr + gl.to_tensor(walk.last - visit * walk.BLOCK_N).to(gl.int64) * rows.stride_row
            cursor = channel.at(number * STEP + i)
            channel.wait_empty(cursor)
            copy_rows(source, walk, visit, first, channel.tile(cursor).slice(0, COLUMNS, dim=1))
            fill_by_copies(channel, cursor)
        entries = following
    async_copy.wait_group(0)


@jit
def store_unit(walk, acc, row_max, row_sum, outputs, HQ, column, end):
    """Write the output of a unit, acc (columns, BLOCK_R) of columns from ``column`` on before ``end``, and its lse.

    outputs: ``StepOutputs``. row_max, in base 2, and row_sum (BLOCK_R,): as the sm_90 forward leaves them.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    BLOCK_R: gl.constexpr = acc.shape[1]
    GROUP_SIZE = walk.GROUP_SIZE
    offs = gl.arange(0, BLOCK_R, ROW)
    tokens, heads = offs // GROUP_SIZE, walk.head_kv * GROUP_SIZE + offs % GROUP_SIZE
    exists = offs < walk.rows
    sink = None
    if outputs.sinks_ptr is not None:
        sink = gl.load(outputs.sinks_ptr + heads, mask=exists, other=0.0).to(gl.float32) * LOG2E
    seen, row_max, divisor, weight = finish_sums(row_max, row_sum, sink)
    factor = gl.where(seen, weight / divisor, 0.0)
    o = gl.where(seen[None, :], acc * factor[None, :], 0.0).to(outputs.o.ptr.dtype.element_ty)
    columns = column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    batch = gl.to_tensor(walk.sequence).to(gl.int64)
    o_strides = outputs.o.strides
    rows = batch * o_strides[0] + heads.to(gl.int64) * o_strides[1] + tokens.to(gl.int64) * o_strides[2]
    at = outputs.o.ptr + rows[None, :] + columns[:, None] * o_strides[3]
    gl.store(at, o, mask=exists[None, :] & (columns < end)[:, None])
    if column == 0:
        lse = log_sum_exp(seen, row_max, divisor)
        gl.store(outputs.lse_ptr + (batch * HQ + heads) * walk.NQ + tokens, lse, mask=exists)


@jit
def fill_by_copies(channel, cursor):
    """Let the slot be full when all copies of the calling threads have arrived; each thread arrives."""
    async_copy.mbarrier_arrive(channel.full.index(cursor.slot), increment_count=False)
