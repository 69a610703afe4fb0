# mypy: ignore-errors
"""The gradient of the norms of q and k, after backward kernels that give dq and dk of the normed rows.

A row needs the sum of g * n over all its columns (kernels/norm.py), and only the weights' gradient needs other rows. So
one pass over the rows suffices, in place: it reads dx and x, computes the statistic of x again, and writes dx and sums
of the weights' gradients. The programs that finish last add those up.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import norm as norms
from fused_rope_attn.kernels import rotation as rotations
from fused_rope_attn.kernels import schedule, tiles
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.runtime.triton_compat import barrier

# Rows of sums that are added up at a time; the last of so many programs adds up their sums.
SUMS = tl.constexpr(32)


@record
class WeightSums:
    """The partial sums of a weight's gradient, and its buffers: all float32 but the counters."""

    sums_ptr: tl.tensor  # (count, D), a row of each program
    count: tl.tensor
    parts_ptr: tl.tensor  # workspace, (parts, D)
    counters_ptr: tl.tensor  # int32, zeros
    gradient_ptr: tl.tensor  # (D,) in the weight's dtype
    D: tl.constexpr
    BLOCK_D: tl.constexpr
    LAYOUT: tl.constexpr = None  # of tiles (SUMS, BLOCK_D) in Gluon kernels


@triton.jit
def zeros_like_ranges(rows, columns):
    """Return zeros (len(rows), len(columns)) float32 in the layout of the ``tile_range``s rows and columns."""
    return (rows[:, None] + columns[None, :]) * 0.0


@triton.jit
def store_weight_sums(ptr, first, second, norm, pairing, LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):
    """Sum the rows of dweight (rows, BLOCK_D / 2), of first and second members of pairs, into ``ptr`` (D,) float32.

    LAYOUT: of the members in Gluon kernels; FIRST_PAIR: their first pair.
    """
    pairs = rotations.tile_pairs(2 * first.shape[1], LAYOUT, FIRST_PAIR)
    columns1, columns2, exists = rotations.norm_columns(pairs, norm.D, pairing)
    tl.store(ptr + columns1, tl.sum(first, 0), mask=exists)
    tl.store(ptr + columns2, tl.sum(second, 0), mask=exists)


@triton.jit
def add_rows(sums, ptr, first, last):
    """Add up rows [first, last) of a matrix (rows, D) float32 of ``WeightSums`` in one order, (BLOCK_D,)."""
    rows = tiles.tile_range(SUMS, 0, sums.LAYOUT)
    columns = tiles.tile_range(sums.BLOCK_D, 1, sums.LAYOUT)
    total = zeros_like_ranges(rows, columns)
    for start in range(first, last, SUMS):
        offsets = (start + rows).to(tl.int64)[:, None] * sums.D + columns[None, :]
        exists = (start + rows < last)[:, None] & (columns < sums.D)[None, :]
        # Bypass the L1, because other programs of this launch may have written them.
        total += tl.load(ptr + offsets, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def store_row(sums, ptr, row):
    """Write a row (BLOCK_D,) of ``add_rows``, rounded to the memory's dtype."""
    columns = tiles.tile_range(sums.BLOCK_D, 1, sums.LAYOUT)
    tl.store(ptr + columns, row.to(ptr.dtype.element_ty), mask=columns < sums.D)


@triton.jit
def is_last(sums, counter_ptr, count):
    """Return whether this program is the last of ``count`` to arrive. Then it can read the others' writes."""
    # All of this program's own writes precede its count.
    if sums.LAYOUT is None:
        tl.debug_barrier()
    else:
        barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1


@triton.jit
def add_sums(sums, part, PARTS: tl.constexpr):
    """Add up the rows of ``WeightSums`` that a launch before has written.

    Each of PARTS programs adds up its part of the rows, and the last one to finish adds up the parts. The order of the
    sums does not depend on which one that is. There is one counter.
    """
    rows = tl.cdiv(sums.count, PARTS)
    total = add_rows(sums, sums.sums_ptr, part * rows, tl.minimum(part * rows + rows, sums.count))
    store_row(sums, sums.parts_ptr + part * sums.D, total)
    if is_last(sums, sums.counters_ptr, PARTS):
        store_row(sums, sums.gradient_ptr, add_rows(sums, sums.parts_ptr, 0, PARTS))


@triton.jit
def add_own_sums(sums, pid):
    """Add up the rows of ``WeightSums`` of the same launch, at the end of program ``pid``, which has written row pid.

    The last of each SUMS programs adds up their rows, and the last of those the parts. There is a counter for all and
    one for each part.
    """
    part = pid // SUMS
    parts = tl.cdiv(sums.count, SUMS)
    first = part * SUMS
    last = tl.minimum(first + SUMS, sums.count)
    if is_last(sums, sums.counters_ptr + 1 + part, last - first):
        total = add_rows(sums, sums.sums_ptr, first, last)
        store_row(sums, sums.parts_ptr + part * sums.D, total)
        if is_last(sums, sums.counters_ptr, parts):
            store_row(sums, sums.gradient_ptr, add_rows(sums, sums.parts_ptr, 0, parts))


@record
class NormedRows:
    """Rows (B, H, N, D) as the caller gave them, and the gradient of the normed ones, which becomes theirs in place."""

    x: tiles.TensorView
    dx: tiles.TensorView
    norm: norms.Norm
    sums: WeightSums  # a row of each block, without their count
    format: tiles.RowFormat


@triton.jit
def unnorm_block(pid, blocks, rows, H, N, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Turn dx of block ``pid`` of ``NormedRows``, BLOCK_N rows of HEADS heads, into that of x, in place.

    The sum of the weight's gradient over these rows goes to row ``pid`` of sums, which has ``blocks`` rows.
    """
    block, chunk, batch = schedule.block_of_heads(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(H, HEADS))
    start, last_head = block * BLOCK_N, tl.minimum(chunk * HEADS + HEADS, H)
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    halves = rotations.Pairing(R=rows.norm.D, INTERLEAVED=False)
    weight1, weight2 = rotations.pair_norm_weights(rows.norm, halves, BLOCK_D)
    offs = tl.arange(0, BLOCK_N)
    dweight1 = tl.zeros((BLOCK_N, BLOCK_D // 2), tl.float32)
    dweight2 = tl.zeros((BLOCK_N, BLOCK_D // 2), tl.float32)
    for head in range(chunk * HEADS, last_head):
        origin = tiles.Origin(batch, tl.cast(head, tl.int64), start)
        first, second = rotations.load_pairs(tiles.head_rows(rows.x, origin, N - start, rows.format), offs, halves)
        dx_rows = tiles.head_rows(rows.dx, origin, N - start, rows.format)
        dy1, dy2 = rotations.load_pairs(dx_rows, offs, halves)
        dx1, dx2, of_rows1, of_rows2 = norms.unnorm_pairs(first, second, dy1, dy2, weight1, weight2, rows.norm)
        rotations.store_pairs(dx_rows, dx1, dx2, offs, halves)
        dweight1 += of_rows1
        dweight2 += of_rows2
    sums_ptr = rows.sums.sums_ptr + tl.cast(pid, tl.int64) * rows.norm.D
    store_weight_sums(sums_ptr, dweight1, dweight2, rows.norm, halves)
    add_own_sums(replace(rows.sums, count=blocks), pid)


@triton.jit(do_not_specialize=["HQ", "HKV", "NQ", "NK", "B"])
def norm_gradient_kernel(
    queries, keys, HQ, HKV, NQ, NK, B, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    """Turn dq and dk of normed rows into those of q and k, in place. Grid: blocks of q, then blocks of k.

    queries and keys are ``NormedRows`` with one workspace and its counters: zeros, the queries' first. Packed sequences
    are rows like any others.
    """
    queries, keys = unpack((queries, keys))
    schedule.wait_for_previous_launch(PDL)
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(NQ, BLOCK_N) * tl.cdiv(HQ, HEADS) * B
    if pid < q_blocks:
        unnorm_block(pid, q_blocks, queries, HQ, NQ, HEADS, BLOCK_N)
    else:
        sums, parts = keys.sums, tl.cdiv(q_blocks, SUMS)
        parts_ptr, counters_ptr = sums.parts_ptr + parts * sums.D, sums.counters_ptr + 1 + parts
        keys = replace(keys, sums=replace(sums, parts_ptr=parts_ptr, counters_ptr=counters_ptr))
        unnorm_block(pid - q_blocks, tl.num_programs(0) - q_blocks, keys, HKV, NK, HEADS, BLOCK_N)
