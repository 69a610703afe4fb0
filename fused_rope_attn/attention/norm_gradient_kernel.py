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
from fused_rope_attn.kernels.records import record, unpack

# Rows of sums that are added up at a time; the last of so many programs adds up their sums.
SUMS = tl.constexpr(32)


@record
class NormedRows:
    """Rows (B, H, N, D) as the caller gave them, and the gradient of the normed ones, which becomes theirs in place."""

    x: tiles.TensorView
    dx: tiles.TensorView
    norm: norms.Norm
    sums_ptr: tl.tensor  # the weight's gradient, (blocks, D) float32, a row of each program
    parts_ptr: tl.tensor  # workspace, (parts, D) float32
    gradient_ptr: tl.tensor  # (D,) in the weight's dtype
    format: tiles.RowFormat


@triton.jit
def add_rows(rows, ptr, first, last):
    """Add up rows [first, last) of a matrix (rows, D) float32 of ``NormedRows`` in one order, (BLOCK_D,)."""
    offs, columns = tl.arange(0, SUMS), tl.arange(0, rows.format.BLOCK_D)
    total = tl.zeros((SUMS, rows.format.BLOCK_D), tl.float32)
    for start in range(first, last, SUMS):
        offsets = (start + offs).to(tl.int64)[:, None] * rows.norm.D + columns[None, :]
        exists = (start + offs < last)[:, None] & (columns < rows.norm.D)[None, :]
        # Bypass the L1, because other programs of this launch may have written them.
        total += tl.load(ptr + offsets, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def store_row(rows, ptr, row):
    """Write a row (BLOCK_D,) of ``add_rows``, rounded to the memory's dtype."""
    columns = tl.arange(0, rows.format.BLOCK_D)
    tl.store(ptr + columns, row.to(ptr.dtype.element_ty), mask=columns < rows.norm.D)


@triton.jit
def is_last(counter_ptr, count):
    """Return whether this program is the last of ``count`` to arrive. Then it can read the others' writes."""
    # All of this program's own writes precede its count.
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1


@triton.jit
def add_own_sums(rows, counters_ptr, pid, blocks):
    """Add up the sums of ``NormedRows`` at the end of program ``pid`` of ``blocks``, which has written row pid of them.

    The last of each SUMS programs adds up their rows, and the last of those the parts. There is a counter for all and
    one for each part.
    """
    part = pid // SUMS
    parts = tl.cdiv(blocks, SUMS)
    first = part * SUMS
    last = tl.minimum(first + SUMS, blocks)
    if is_last(counters_ptr + 1 + part, last - first):
        total = add_rows(rows, rows.sums_ptr, first, last)
        store_row(rows, rows.parts_ptr + part * rows.norm.D, total)
        if is_last(counters_ptr, parts):
            store_row(rows, rows.gradient_ptr, add_rows(rows, rows.parts_ptr, 0, parts))


@triton.jit
def unnorm_block(rows, counters_ptr, pid, blocks, H, N, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
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
    sums_ptr = rows.sums_ptr + tl.cast(pid, tl.int64) * rows.norm.D
    columns1, columns2, exists = rotations.norm_columns(tl.arange(0, BLOCK_D // 2), rows.norm.D, halves)
    tl.store(sums_ptr + columns1, tl.sum(dweight1, 0), mask=exists)
    tl.store(sums_ptr + columns2, tl.sum(dweight2, 0), mask=exists)
    add_own_sums(rows, counters_ptr, pid, blocks)


@triton.jit(do_not_specialize=["first_counter", "HQ", "HKV", "NQ", "NK", "B"])
def norm_gradient_kernel(queries, keys, counters_ptr, first_counter, HQ, HKV, NQ, NK, B, HEADS: tl.constexpr,
                         BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Turn dq and dk of normed rows into those of q and k, in place. Grid: blocks of q, then blocks of k.

    queries and keys are ``NormedRows``. counters: int32, zeros from ``first_counter`` on, the queries' and then the
    keys'. Packed sequences are rows like any others.
    """
    queries, keys = unpack((queries, keys))
    schedule.wait_for_previous_launch(PDL)
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(NQ, BLOCK_N) * tl.cdiv(HQ, HEADS) * B
    counters_ptr += first_counter
    if pid < q_blocks:
        unnorm_block(queries, counters_ptr, pid, q_blocks, HQ, NQ, HEADS, BLOCK_N)
    else:
        counters_ptr += 1 + tl.cdiv(q_blocks, SUMS)
        unnorm_block(keys, counters_ptr, pid - q_blocks, tl.num_programs(0) - q_blocks, HKV, NK, HEADS, BLOCK_N)
