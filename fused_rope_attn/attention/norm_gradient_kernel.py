# mypy: ignore-errors
"""The gradient of the norms of q and k, behind backward kernels whose dq and dk are gradients of the normed rows.

A row needs the sum of g * n over all its columns (kernels/norm.py) and meets no other row but in the weights' gradient,
so that one pass over the rows does it, in place: it reads dx and x, of which it takes the statistic anew, and writes dx
and sums of the weights' gradients. A second launch adds those up.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.norm import Norm, unnorm_pairs
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import load_pairs, norm_columns, pair_norm_weights, store_pairs
from fused_rope_attn.kernels.schedule import block_of_heads, wait_for_previous_launch
from fused_rope_attn.kernels.tiles import RowFormat, heads_from, rows_of_head, sequence_heads, tile_range
from fused_rope_attn.runtime.triton_compat import barrier

# Rows of sums that are added up at a time, and programs whose sums the last of them adds up.
SUMS = tl.constexpr(32)


@record
class Pairing:
    """How ``load_pairs`` pairs columns, which else a ``Rotation`` says; a norm alone may pair them as it likes."""

    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@triton.jit
def zeros_like_ranges(rows, columns):
    """Zeros (len(rows), len(columns)) float32; rows and columns are ``tile_range``s, whose layout it has."""
    return (rows[:, None] + columns[None, :]) * 0.0


@triton.jit
def store_weight_sums(ptr, dweight1, dweight2, norm, R: tl.constexpr, INTERLEAVED: tl.constexpr,
                      LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """Sum the rows of dweight (rows, BLOCK_D / 2), of first and second members of pairs, into ``ptr`` (D,) float32.

    LAYOUT: theirs, which Gluon kernels name; FIRST_PAIR: the pair that they begin with.
    """
    BLOCK_D: tl.constexpr = 2 * dweight1.shape[1]
    columns1, columns2, exists = norm_columns(norm.D, R, INTERLEAVED, BLOCK_D, LAYOUT, FIRST_PAIR)
    tl.store(ptr + columns1, tl.sum(dweight1, 0), mask=exists)
    tl.store(ptr + columns2, tl.sum(dweight2, 0), mask=exists)


@triton.jit
def unnorm_rows(x, dx, norm, sums_ptr, start, first_head, last_head, BLOCK_N: tl.constexpr):
    """Turn dx of normed rows [start, start + BLOCK_N) of heads [first_head, last_head) into that of x, in place.

    x and dx are ``Heads`` of the same rows. The rows' sum of the weight's gradient goes to ``sums_ptr`` (D,) float32.
    """
    D: tl.constexpr = norm.D
    BLOCK_D: tl.constexpr = x.rows.format.BLOCK_D
    halves = Pairing(R=D, INTERLEAVED=False)
    weight1, weight2 = pair_norm_weights(norm, D, False, BLOCK_D)
    offs = tl.arange(0, BLOCK_N)
    x, dx = heads_from(x, start), heads_from(dx, start)
    dweight1 = tl.zeros((BLOCK_N, BLOCK_D // 2), tl.float32)
    dweight2 = tl.zeros((BLOCK_N, BLOCK_D // 2), tl.float32)
    for head in range(first_head, last_head):
        first, second = load_pairs(rows_of_head(x, head), offs, halves, CHECK_ROWS=True)
        dx_rows = rows_of_head(dx, head)
        dy1, dy2 = load_pairs(dx_rows, offs, halves, CHECK_ROWS=True)
        dx1, dx2, of_rows1, of_rows2 = unnorm_pairs(first, second, dy1, dy2, weight1, weight2, norm)
        store_pairs(dx_rows, dx1, dx2, offs, halves)
        dweight1 += of_rows1
        dweight2 += of_rows2
    store_weight_sums(sums_ptr, dweight1, dweight2, norm, D, False)


@triton.jit
def unnorm_block(pid, x_ptr, dx_ptr, x_strides, dx_strides, norm, sums_ptr, H, N, row_format, HEADS: tl.constexpr,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    """``unnorm_rows`` of block ``pid`` of x and dx (B, H, N, D): BLOCK_N rows of HEADS heads, row ``pid`` of sums."""
    block, chunk, batch = block_of_heads(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(H, HEADS))
    unnorm_rows(
        sequence_heads(x_ptr, x_strides, batch, 0, N, row_format),
        sequence_heads(dx_ptr, dx_strides, batch, 0, N, row_format),
        norm,
        sums_ptr + tl.cast(pid, tl.int64) * norm.D,
        block * BLOCK_N,
        chunk * HEADS,
        tl.minimum(chunk * HEADS + HEADS, H),
        BLOCK_N,
    )


@triton.jit
def clear_counters(counters_ptr):
    """Zero the counters of ``weight_gradient_kernel``, which is the next launch; one program's work."""
    if tl.program_id(0) == 0:
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


@triton.jit(do_not_specialize=["HQ", "HKV", "NQ", "NK", "B"])
def norm_gradient_kernel(q_ptr, dq_ptr, k_ptr, dk_ptr, q_norm_ptr, k_norm_ptr, q_sums_ptr, k_sums_ptr, counters_ptr,
                         raw_q_strides, dq_strides, raw_k_strides, dk_strides, norm_eps, norm_offset, HQ, HKV, NQ, NK,
                         B, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                         USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """dq and dk (B, H, N, D) of normed rows become those of q and k, in place. Grid: blocks of q, then blocks of k.

    q and k as they came; q_norm and k_norm (D,) the weights; q_sums and k_sums (blocks, D) float32: each block's part
    of their gradients. Packed sequences are rows like any others.
    """
    wait_for_previous_launch(PDL)
    clear_counters(counters_ptr)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(NQ, BLOCK_N) * tl.cdiv(HQ, HEADS) * B
    if pid < q_blocks:
        norm = Norm(weight_ptr=q_norm_ptr, eps=norm_eps, offset=norm_offset, D=D)
        unnorm_block(
            pid, q_ptr, dq_ptr, raw_q_strides, dq_strides, norm, q_sums_ptr, HQ, NQ, row_format, HEADS, BLOCK_N
        )
    else:
        norm = Norm(weight_ptr=k_norm_ptr, eps=norm_eps, offset=norm_offset, D=D)
        unnorm_block(
            pid - q_blocks, k_ptr, dk_ptr, raw_k_strides, dk_strides, norm, k_sums_ptr, HKV, NK, row_format, HEADS,
            BLOCK_N,
        )  # fmt: skip


@triton.jit
def add_rows(ptr, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows [first, last) of a matrix (rows, D) float32 added up in one order, (BLOCK_D,).

    LAYOUT: of a tile (SUMS, BLOCK_D), which Gluon kernels name; else None.
    """
    rows = tile_range(SUMS, 0, LAYOUT)
    columns = tile_range(BLOCK_D, 1, LAYOUT)
    total = zeros_like_ranges(rows, columns)
    for start in range(first, last, SUMS):
        offsets = (start + rows).to(tl.int64)[:, None] * D + columns[None, :]
        exists = (start + rows < last)[:, None] & (columns < D)[None, :]
        # Others of this launch may have written them: past the L1.
        total += tl.load(ptr + offsets, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def store_row(ptr, row, D: tl.constexpr, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr):
    """Write a row (BLOCK_D,) of ``add_rows``, rounded to the memory's dtype."""
    columns = tile_range(BLOCK_D, 1, LAYOUT)
    tl.store(ptr + columns, row.to(ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def is_last(counter_ptr, count, LAYOUT: tl.constexpr):
    """Whether this program is the last of ``count`` to come here; then it can read what the others have written."""
    # All of this program's own writes come before it is counted.
    if LAYOUT is None:
        tl.debug_barrier()
    else:
        barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1


@triton.jit
def add_sums(part, sums_ptr, parts_ptr, counter_ptr, gradient_ptr, blocks, D: tl.constexpr, BLOCK_D: tl.constexpr,
             PARTS: tl.constexpr, LAYOUT: tl.constexpr = None):  # fmt: skip
    """A weight's gradient (D,) from ``sums`` (blocks, D) of a launch before: each of PARTS programs adds up its part of
    the rows, and the one that is last to finish adds up the parts. The order of the sums does not depend on which that
    is."""
    rows = tl.cdiv(blocks, PARTS)
    total = add_rows(sums_ptr, part * rows, tl.minimum(part * rows + rows, blocks), D, BLOCK_D, LAYOUT)
    store_row(parts_ptr + part * D, total, D, BLOCK_D, LAYOUT)
    if is_last(counter_ptr, PARTS, LAYOUT):
        store_row(gradient_ptr, add_rows(parts_ptr, 0, PARTS, D, BLOCK_D, LAYOUT), D, BLOCK_D, LAYOUT)


@triton.jit
def add_own_sums(pid, sums_ptr, parts_ptr, counters_ptr, gradient_ptr, blocks, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 LAYOUT: tl.constexpr):  # fmt: skip
    """As ``add_sums``, of the same launch: the end of program ``pid`` of ``blocks``, which has written row pid of sums.

    The last of each SUMS programs adds up their rows, and the last of those the parts. counters: int32, zero before the
    launch, one for all and one for each part.
    """
    part = pid // SUMS
    parts = tl.cdiv(blocks, SUMS)
    first = part * SUMS
    last = tl.minimum(first + SUMS, blocks)
    if is_last(counters_ptr + 1 + part, last - first, LAYOUT):
        total = add_rows(sums_ptr, first, last, D, BLOCK_D, LAYOUT)
        store_row(parts_ptr + part * D, total, D, BLOCK_D, LAYOUT)
        if is_last(counters_ptr, parts, LAYOUT):
            store_row(gradient_ptr, add_rows(parts_ptr, 0, parts, D, BLOCK_D, LAYOUT), D, BLOCK_D, LAYOUT)


@triton.jit(do_not_specialize=["q_blocks", "k_blocks"])
def weight_gradient_kernel(q_sums_ptr, k_sums_ptr, parts_ptr, counters_ptr, dq_norm_ptr, dk_norm_ptr, q_blocks,
                           k_blocks, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
                           PDL: tl.constexpr):  # fmt: skip
    """dq_norm and dk_norm (D,) from q_sums (q_blocks, D) and k_sums (k_blocks, D), float32. Grid: (2 * PARTS,).

    parts (2, PARTS, D) float32 is room for what lies between. counters (2,) int32 are zero, as ``clear_counters`` has
    left them.
    """
    wait_for_previous_launch(PDL)
    pid = tl.program_id(0)
    if pid < PARTS:
        add_sums(pid, q_sums_ptr, parts_ptr, counters_ptr, dq_norm_ptr, q_blocks, D, BLOCK_D, PARTS)
    else:
        add_sums(
            pid - PARTS, k_sums_ptr, parts_ptr + PARTS * D, counters_ptr + 1, dk_norm_ptr, k_blocks, D, BLOCK_D, PARTS,
        )  # fmt: skip
