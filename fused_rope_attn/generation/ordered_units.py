# mypy: ignore-errors
"""Generation steps with the bits of the sm_90 forward: each key's scores, weights and values in that kernel's order.

The sm_90 forward visits tiles of BLOCK_N keys from the last one down. The weights of a tile depend on the maxima of the
tiles before it, and the output and the sums of the weights are added up tile by tile. Scores depend on nothing else.

Long batches have a program for each unit, up to BLOCK_R query rows of one key head of one sequence, which goes through
its tiles in that order (``attend_kernel``). Few sequences would leave most of the card idle: there several programs
compute the scores of a unit's tiles (``score_kernel``), and others weigh them and add up the values, split over their
columns (``value_kernel``). Both kernels run at the same time.

A product has the same bits with other tiles, with its operands exchanged, or with another order of the 16 columns that
one instruction multiplies; the order of these groups matters. Here keys and values are the left operands, because there
are few query rows. Rotated caches hold keys in the order of memory, and the sm_90 forward has them in pair
order: a group of 16 columns is then eight first members, and eight second ones. A copy to shared memory that exchanges
words of 16 bytes takes several times as long as one that does not, so that the groups are made on the way from there to
the registers.
"""

import triton
import triton.language as tl
from triton import constexpr_function

from fused_rope_attn.generation import pages as paging
from fused_rope_attn.generation.inputs import QueryRows, complete_step, rows_of_queries
from fused_rope_attn.generation.shares import cached_keys
from fused_rope_attn.kernels import rotation, schedule, tiles
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.runtime.triton_compat import gl

# The parameters that Triton must not specialise on.
NUMBERS = "window_left window_right programs B HKV GROUP_SIZE NQ S num_pages position_limit most_tiles".split()


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
class Unit:
    """Up to BLOCK_R query rows of one key head of one sequence: row r belongs to token ``r // GROUP_SIZE``."""

    sequence: tl.tensor
    head_kv: tl.tensor
    number: tl.tensor  # among all units
    start: tl.tensor  # its first row
    num_rows: tl.tensor
    BLOCK_R: tl.constexpr


@triton.jit
def unit_of(sequence, block, row_blocks, HKV, rows, BLOCK_R: tl.constexpr):
    """Return the ``Unit`` with number ``block`` among the ``row_blocks`` * HKV units of a sequence."""
    start = block % row_blocks * BLOCK_R
    number = sequence * HKV * row_blocks + block
    return Unit(sequence, block // row_blocks, number, start, tl.minimum(BLOCK_R, rows - start), BLOCK_R)


@triton.jit
def query_rows(unit, GROUP_SIZE):
    """Return the ``QueryRows`` of a unit."""
    offs = tl.arange(0, unit.BLOCK_R)
    row = unit.start + offs
    heads = tl.cast(unit.head_kv, tl.int64) * GROUP_SIZE + row % GROUP_SIZE
    return QueryRows(tl.cast(unit.sequence, tl.int64), heads, row // GROUP_SIZE, offs, unit.num_rows)


@record
class Workspaces:
    """Buffers of an ordered step; the last three are None if ``attend_kernel`` does the rest.

    rotated (units, BLOCK_R, BLOCK_D): of ``query_kernel``. scores (units, most_tiles, rows, BLOCK_N) and maxima (units,
    most_tiles, rows) float32, and progress (units, MOST_PROGRAMS) int32: of ``score_kernel``.
    """

    rotated_ptr: tl.tensor
    scores_ptr: tl.tensor | None
    maxima_ptr: tl.tensor | None
    progress_ptr: tl.tensor | None
    MOST_PROGRAMS: tl.constexpr


@triton.jit
def look_up(pages, keys, start, offs):
    """Return ``page_entries`` of the tile ``start + offs``; for rows before the first key that is seen, where pages may
    be gone, that of this key's page. They are in the pool, even if an assertion is about to stop the call."""
    positions = tl.cast(tl.maximum(start + offs, keys.first_key), tl.uint32, bitcast=True)
    entries = paging.page_entries(pages, positions, tl.cast(keys.num_keys, tl.uint32, bitcast=True))
    return tl.minimum(entries, tl.cast(pages.num_pages - 1, tl.uint32, bitcast=True))


@triton.jit
def group_pairs(x):
    """Return x (rows, columns) in pair order with the first members of every eight pairs before the second ones."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 8, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]))


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


@triton.jit
def query_positions(keys, unit, offs, GROUP_SIZE, S):
    """Return the positions of a unit's query rows ``offs``, -1 for those of tokens past the end of the cache."""
    positions = keys.q_offset + (unit.start + offs) // GROUP_SIZE
    return tl.where(positions < S, positions, -1)


@triton.jit(do_not_specialize=NUMBERS)
def query_kernel(
    inputs, workspaces, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, window_left, window_right,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the queries of one unit, and check that its pages are in the pool. Grid: (units,).

    inputs: ``StepInputs``, with lengths IN_ORDER; workspaces: ``Workspaces``. rotated gets q's dtype, in the order of
    ``group_pairs``, or interleaved ones in that of memory; rows that do not exist are 0. progress becomes zeros.
    """
    schedule.let_next_launch_start(PDL)
    inputs, workspaces = unpack((inputs, workspaces))
    inputs = complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right)
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    rows = NQ * GROUP_SIZE
    row_blocks = tl.cdiv(rows, BLOCK_R)
    units = HKV * row_blocks
    number = tl.program_id(0)
    unit = unit_of(number // units, number % units, row_blocks, HKV, rows, BLOCK_R)
    keys = cached_keys(inputs.lengths, unit.sequence)
    q_rows = query_rows(unit, GROUP_SIZE)
    positions = query_positions(keys, unit, q_rows.offs_m, GROUP_SIZE, S)
    table = inputs.cache.table
    if table is not None:
        # The units of a sequence share its pages.
        pages = paging.sequence_pages(table, q_rows.batch, 0, 0)
        PAGE_SIZE: tl.constexpr = table.PAGE_SIZE
        PAGES: tl.constexpr = 512
        first_page = keys.first_key // PAGE_SIZE + number % units * PAGES
        highest = tl.zeros((PAGES,), tl.uint32)
        for start in range(first_page * PAGE_SIZE, keys.num_keys, units * PAGES * PAGE_SIZE):
            first_rows = start + tl.arange(0, PAGES) * PAGE_SIZE
            highest = tl.maximum(highest, paging.page_entries(pages, first_rows, keys.num_keys))
        paging.assert_in_pool(highest, pages)
    if workspaces.progress_ptr is not None:
        MOST_PROGRAMS: tl.constexpr = workspaces.MOST_PROGRAMS
        program = tl.arange(0, MOST_PROGRAMS)
        zeros = tl.zeros((MOST_PROGRAMS,), tl.int32)
        tl.store(workspaces.progress_ptr + number * MOST_PROGRAMS + program, zeros)
    rotations = inputs.rotations
    of_sequence = rotation.head_rotation(rotations.tables, q_rows.batch, position_limit, rotations.q_norm)
    rows = rows_of_queries(inputs.q, q_rows, inputs.format)
    q = rotation.load_rotated(rows, q_rows.offs_m, of_sequence, positions - q_rows.offs_m, rotations.q_sign)
    if not rotations.tables.INTERLEAVED:
        q = group_pairs(q)
    at = workspaces.rotated_ptr + (tl.cast(number, tl.int64) * BLOCK_R + q_rows.offs_m)[:, None] * BLOCK_D
    tl.store(at + tl.arange(0, BLOCK_D)[None, :], q)
    # The next launch waits for this one, and so for the new tokens, which are being written.
    schedule.wait_for_previous_launch(PDL)
