# mypy: ignore-errors
"""The warpgroups of the sm_90 forward that multiply: scores, softmax, values and output of 64 query rows each."""

from fused_rope_attn.attention.hopper.channels import (
    TENSOR_CORES,
    TWO_WARPGROUPS,
    arrive_at_named_barrier,
    wait_at_named_barrier,
)
from fused_rope_attn.attention.hopper.columns import (
    LEFT,
    issue_by_columns,
    issue_row_scores,
    right_columns,
    rows_in,
    store_parts,
    wait_for_parts,
    zero_parts,
)
from fused_rope_attn.attention.hopper.forward_queries import rotate_first_queries
from fused_rope_attn.attention.hopper.forward_tiles import next_tile, query_end, query_position
from fused_rope_attn.attention.hopper.masks import mask_diagonal, mask_visit
from fused_rope_attn.attention.hopper.ptxas import pin
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.attention.hopper.softmax import (
    cap_scores,
    finish_output,
    fold_scores,
    follow_maximum,
    no_sums,
    pack_weights,
    rescale_output,
    unpack_weights,
    weigh_scores,
    whole_sums,
    whole_weights,
)
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.softmax import LN2, LOG2E, finish_sums, log_sum_exp
from fused_rope_attn.kernels.tiles import RowFormat, TensorView, rows_at, store_tile
from fused_rope_attn.runtime.triton_compat import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)


@record
class Softmax:
    """Scales and choices of the step from scores to weights."""

    qk_scale: gl.tensor  # > 0, includes log2(e), and the cap if there is one
    cap_scale: gl.tensor | None  # factor of scores before their tanh
    sinks_ptr: gl.tensor | None  # (HQ,)
    PIN_SUMS: gl.constexpr  # see ``ptxas.pin``
    VALUES: gl.constexpr  # when a block's product with the values is awaited, see ``attend``


@record
class ForwardOutput:
    """The tensors o and lse, and the shared memory that o passes through."""

    desc: gl.tensor  # of o (B, HQ, NQ, D), in blocks of ROWS rows and the columns of one store
    view: TensorView  # o itself in packed calls: the last rows of a sequence are stored without the TMA; else None
    lse_ptr: gl.tensor  # (B, HQ, NQ) float32, natural logarithm
    highest_ptr: gl.tensor | None  # (B, HQ, NQ) float32, the largest logit of each row
    smem: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, columns of one store)
    format: RowFormat
    TWO_STORES: gl.constexpr  # whether the columns are stored as a left and a right half, one after the other


@record
class Warpgroup:
    """A warpgroup that attends: number INDEX of COUNT."""

    INDEX: gl.constexpr
    COUNT: gl.constexpr


@jit
def wait_for_tensor_cores(warpgroup):
    """Wait until the previous warpgroup has issued its products, so that one computes while another multiplies."""
    wait_at_named_barrier(TENSOR_CORES + warpgroup.INDEX, TWO_WARPGROUPS)


@jit
def hand_over_tensor_cores(warpgroup):
    """Let the next warpgroup issue its products."""
    arrive_at_named_barrier(TENSOR_CORES + (warpgroup.INDEX + 1) % warpgroup.COUNT, TWO_WARPGROUPS)


@jit
def visit_of(masks, cursor, step, exists):
    """Return how ``mask_visit`` knows a block: by the tile's ``step``, or with intervals by its ``Visit``."""
    if masks.key_rows is None:
        return step
    else:
        return masks.key_rows.visit(cursor, exists)


@jit
def counted(tile, masks, visit):
    """Return ``tile`` with the number of its blocks, which with intervals is announced with each of them."""
    if masks.key_rows is None:
        return tile
    else:
        return replace(tile, num_blocks=visit.count)


@jit
def masked_from(masks, tile, start_m, NQ, NK):
    """Return the number by which ``mask_visit`` knows query row start_m: its position, or with intervals the row."""
    if masks.key_rows is None:
        return query_position(tile, start_m, NQ, NK)
    else:
        return start_m


@jit
def multiply(
    q, acc, p, correction, keys, values, key_step, exists, softmax, warpgroup, masks, step, COUNT: gl.constexpr
):
    """Multiply the queries with key block ``key_step``, and weights p with the values of the block before it.

    q: ``ScoreRows``; p: packed weights; correction (ROWS,): a factor for acc, ``ColumnParts`` of
    (ROWS, BLOCK_D), before the product is added. Returns the scores (ROWS, COUNT) float32 of the block's first COUNT
    keys, capped if the call has a cap, and acc, which is still in flight unless VALUES is "before scores", and
    ``visit_of`` the block, which is the tile's number ``step``. Unless it ``exists``, the scores are meaningless.
    """
    BLOCK_D: gl.constexpr = q.columns.shape[1]
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    RIGHT: gl.constexpr = 0 if acc.right is None else acc.right.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    nothing = gl.zeros([ROWS, COUNT], gl.float32, S)
    at_values = values.at(key_step - 1)
    weights = unpack_weights(p, q.columns.dtype, gl.DotOperandLayout(0, acc.left.type.layout, 2))
    if softmax.VALUES == "before scores":
        acc = rescale_output(acc, correction)
        values.wait_full(at_values)
        v = values.tile(at_values).reshape((BLOCK_N, BLOCK_D))
        wait_for_tensor_cores(warpgroup)
        acc = issue_by_columns(weights, v, acc)
        at_keys = keys.at(key_step)
        keys.wait_full(at_keys, exists)
        visit = visit_of(masks, at_keys, step, exists)
        k = rows_in(keys, at_keys, 0, COUNT)
        acc = wait_for_parts(acc, PENDING=0)
        values.release_by_threads(at_values)
        scores = issue_row_scores(q, k, nothing, RIGHT)
        hand_over_tensor_cores(warpgroup)
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        at_keys = keys.at(key_step)
        keys.wait_full(at_keys, exists)
        visit = visit_of(masks, at_keys, step, exists)
        k = rows_in(keys, at_keys, 0, COUNT)
        wait_for_tensor_cores(warpgroup)
        scores = issue_row_scores(q, k, nothing, RIGHT)
        acc = rescale_output(acc, correction)
        # Triton's analysis of shared memory inserts one barrier an iteration. Without this one it would be before the
        # wait for keys, when this warpgroup has no product in flight.
        barrier()
        values.wait_full(at_values)
        v = values.tile(at_values).reshape((BLOCK_N, BLOCK_D))
        acc = issue_by_columns(weights, v, acc)
        hand_over_tensor_cores(warpgroup)
        # The groups of the values may stay in flight.
        scores = warpgroup_mma_wait(2 if RIGHT else 1, deps=[scores])
    keys.release_by_threads(at_keys, exists)
    return cap_scores(scores, softmax.cap_scale, q.columns.dtype), acc, visit


@jit
def write_columns(output, o_tile, tile, row, row_end, COLUMN: gl.constexpr):
    """Store o_tile (1, 1, ROWS, columns), fenced for the TMA, in rows [row, row + ROWS) of the tile's head of o.

    It is stored in the columns from COLUMN on, and in the rows before ``row_end``. The TMA stops at the tensor's end,
    but not at a packed sequence's, so that the last rows of a sequence are stored from registers.
    """
    if output.view.ptr is None:
        tma_store(output.desc, [tile.batch, tile.head, row, COLUMN], o_tile)
    else:
        if row + ROWS <= row_end:
            tma_store(output.desc, [tile.batch, tile.head, row, COLUMN], o_tile)
        elif row < row_end:
            BLOCK_D: gl.constexpr = o_tile.shape[3]
            WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
            strides = output.view.strides
            base = output.view.ptr + tile.head.to(gl.int64) * strides[1] + row.to(gl.int64) * strides[2]
            if COLUMN:
                base += COLUMN * strides[3]
            o = o_tile.reshape((ROWS, BLOCK_D)).load(WHOLE)
            row_format = replace(output.format, D=output.format.D - COLUMN, BLOCK_D=BLOCK_D)
            rows = rows_at(base, strides, row_end - row, row_format)
            store_tile(rows, o, gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE)), WHOLE)


@jit
def split_columns(x):
    """Return the left and the right half of the columns of x (ROWS, columns); each thread keeps its values."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = gl.split(x.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@jit
def write_output(output, o, tile, row, row_end, WARPGROUP: gl.constexpr):
    """Write o, 16-bit ``ColumnParts`` of (ROWS, BLOCK_D), to rows [row, row + ROWS), those before ``row_end``.

    The caller has waited for the TMA to read the warpgroup's last output. It may still be reading this one when the
    function returns.
    """
    BLOCK_D: gl.constexpr = output.format.BLOCK_D
    o_tile = output.smem.index(WARPGROUP)
    if output.TWO_STORES:
        left_half, right_half = split_columns(o.left)
        o_tile.reshape((ROWS, BLOCK_D // 2)).store(left_half)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=0)
        tma_store_wait(0)
        o_tile.reshape((ROWS, BLOCK_D // 2)).store(right_half)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=BLOCK_D // 2)
    else:
        # The TMA does not store the columns after two parts, because the tensor has none there.
        store_parts(o_tile.reshape((ROWS, BLOCK_D)), o, LEFT)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=0)


@jit
def finish_rows(output, softmax, tile, rows, row_end, row_max, row_sum, NQ, WARPGROUP: gl.constexpr):
    """Write lse of a warpgroup's rows before ``row_end``; returns (seen, factor) for ``finish_output``.

    rows (ROWS,) int32: 0 .. ROWS; row_max (ROWS,) and row_sum (ROWS, 4) as ``fold_scores`` left them. factor (ROWS,):
    the output is acc times this; a row that is not ``seen`` has seen no key, and its output is 0.
    """
    ROW: gl.constexpr = row_max.type.layout
    row_sum = whole_sums(row_sum, ROW)
    sink = None
    if softmax.sinks_ptr is not None:
        sink = gl.load(softmax.sinks_ptr + tile.head).to(gl.float32) * LOG2E
    seen, row_max, divisor, weight = finish_sums(row_max, row_sum, sink)
    lse = log_sum_exp(seen, row_max, divisor)
    offs_m = tile.start_m + WARPGROUP * ROWS + rows
    gl.store(output.lse_ptr + tile.bh.to(gl.int64) * NQ + offs_m, lse, mask=offs_m < row_end)
    return seen, gl.where(seen, weight / divisor, 0.0)


@jit
def mask_first(scores, positions, columns, visit, tile, masks, NK, BLOCK_N: gl.constexpr, WARPGROUP: gl.constexpr):
    """Mask the scores of a tile's first block, or of as many of its keys as the warpgroup sees."""
    if masks.IS_ALIGNED:
        return mask_diagonal(scores, positions, columns, tile, NK, BLOCK_N, SEEN=WARPGROUP * ROWS)
    else:
        return mask_visit(scores, positions, columns, visit, tile, masks, NK)


@jit
def attend(WARPGROUP: gl.constexpr, tiles, queries, keys, values, output, softmax, masks, source, NQ, NK):
    """Attend with rows [ROWS * WARPGROUP, ROWS * WARPGROUP + ROWS) of every tile.

    ``tile_step`` counts the tiles, ``key_step`` the key blocks of all tiles. One loop serves the blocks that need a
    mask and those that do not: with two loops ptxas set up the address of q in the first one alone, and jumped past it
    if that loop had no iterations.

    The first block of an aligned tile is on the diagonal, and the first warpgroup sees half of it: FIRST_COUNT keys.
    The other keys get weights of zero. Their product with the values costs time, but little energy.

    source: the ``QuerySource`` of a launch that rotates queries, those of the block's first tile here; else None.

    A block's product with the values runs concurrently with the scores and the maxima of the next block. VALUES says
    when it is awaited. "before weights" of that block leaves registers free, and the weights may be packed between
    exponentials; "after weights" hides more of the product. "before scores" overlaps it with nothing, so that weights
    and scores are never alive together.
    """
    BLOCK_N: gl.constexpr = keys.buffer.shape[3]
    BLOCK_D: gl.constexpr = keys.buffer.shape[4]
    DTYPE: gl.constexpr = keys.buffer.dtype
    CONSUMERS: gl.constexpr = output.smem.shape[0]
    warpgroup = Warpgroup(WARPGROUP, CONSUMERS)
    FIRST_COUNT: gl.constexpr = BLOCK_N // 2 if masks.IS_ALIGNED and WARPGROUP == 0 else BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_COUNT, 16])
    RIGHT: gl.constexpr = right_columns(output.format.D, BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    rows = gl.arange(0, ROWS, ROW)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    # The same in the layout of a tile's first scores.
    first_rows = gl.arange(0, ROWS, gl.SliceLayout(1, FIRST))
    first_columns = gl.arange(0, FIRST_COUNT, gl.SliceLayout(0, FIRST))
    nothing = gl.zeros([ROWS, FIRST_COUNT], gl.float32, FIRST)
    unseen = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, FIRST))

    queries = queries.of_warpgroup(WARPGROUP)
    tile_step = 0
    key_step = 0
    tile = next_tile(tiles, tile_step)
    start_m = tile.start_m + WARPGROUP * ROWS
    positions = masked_from(masks, tile, start_m, NQ, NK) + first_rows
    exists = True
    if tiles.IS_PACKED:
        # The block may have no tile at all, because only the device knows how many hold queries.
        exists = tile.num_blocks > 0
    at_queries = queries.at(tile_step)
    at_keys = keys.at(key_step)
    if source is None:
        queries.wait_full(at_queries, exists)
    else:
        rotate_first_queries(source, tile, queries, start_m, NQ, NK)
    keys.wait_full(at_keys, exists)
    k = rows_in(keys, at_keys, 0, FIRST_COUNT)
    q = rows_in(queries, at_queries, 0, ROWS)
    visit = visit_of(masks, at_keys, 0, exists)
    tile = counted(tile, masks, visit)
    first = issue_row_scores(q, k, nothing, RIGHT)
    first = warpgroup_mma_wait(0, deps=[first])
    keys.release_by_threads(at_keys, exists)
    barrier()  # see ``multiply``
    first = cap_scores(first, softmax.cap_scale, DTYPE)
    first = mask_first(first, positions, first_columns, visit, tile, masks, NK, BLOCK_N, WARPGROUP)
    first, _, row_max, row_sum = fold_scores(first, unseen, no_sums(), softmax.qk_scale)
    row_max = gl.convert_layout(row_max, ROW, assert_trivial=True)
    p = whole_weights(pack_weights(first, DTYPE), S)
    if WARPGROUP == CONSUMERS - 1:
        hand_over_tensor_cores(warpgroup)
    if source is not None:
        if source.saved_desc is not None:
            # Until the TMA has read the first queries, before their slot is released.
            tma_store_wait(0)
    while tile.num_blocks > 0:
        acc = zero_parts(ROWS, BLOCK_D, RIGHT)
        correction = gl.full([ROWS], 1.0, gl.float32, ROW)
        highest = None
        if output.highest_ptr is not None:
            highest = row_max  # that of one block does not lag
        at_queries = queries.at(tile_step)
        q = rows_in(queries, at_queries, 0, ROWS)
        for step in range(1, tile.num_blocks):
            key_step += 1
            scores, acc, visit = multiply(
                q, acc, p, correction, keys, values, key_step, True, softmax, warpgroup, masks, step, BLOCK_N
            )
            if queries.STAGES == 1:
                # Early, so that the next tile's queries arrive while this one's last softmax is computed.
                if step + 1 == tile.num_blocks:
                    queries.release(at_queries)
            if not masks.IS_ALIGNED:
                scores = mask_visit(scores, positions, columns, visit, tile, masks, NK)
            before = row_max if output.highest_ptr is None else highest
            row_max, so_far, subtrahend, correction = follow_maximum(scores, row_max, before, softmax.qk_scale)
            if output.highest_ptr is not None:
                highest = so_far
            if softmax.VALUES == "before weights":
                acc = wait_for_parts(acc, PENDING=0)
                values.release_by_threads(values.at(key_step - 1))
            p, row_sum = weigh_scores(scores, subtrahend, correction, row_sum, softmax.qk_scale)
            if softmax.PIN_SUMS:
                pin(row_sum)
            if softmax.VALUES == "after weights":
                acc = wait_for_parts(acc, PENDING=0)
                values.release_by_threads(values.at(key_step - 1))
            p = pack_weights(p, DTYPE)
        if output.highest_ptr is not None:
            # Before the next tile's first scores, where registers are scarcest.
            offs_m = tile.start_m + WARPGROUP * ROWS + rows
            of_head = output.highest_ptr + tile.bh.to(gl.int64) * NQ
            gl.store(of_head + offs_m, highest * LN2, mask=offs_m < query_end(tile, NQ))
        if queries.STAGES == 1:
            queries.release(at_queries, tile.num_blocks == 1)
        else:
            queries.release(at_queries)

        # The next tile's first scores run concurrently with this tile's last product with the values. After the last
        # tile they are computed from stale buffers and discarded.
        tile_step += 1
        key_step += 1
        finished = tile
        row_end = query_end(finished, NQ)
        tile = next_tile(tiles, tile_step)
        exists = tile.num_blocks > 0
        positions = masked_from(masks, tile, tile.start_m + WARPGROUP * ROWS, NQ, NK) + first_rows
        at_queries = queries.at(tile_step)
        queries.wait_full(at_queries, exists)
        q = rows_in(queries, at_queries, 0, ROWS)
        first, acc, visit = multiply(
            q, acc, p, correction, keys, values, key_step, exists, softmax, warpgroup, masks, 0, FIRST_COUNT
        )
        tile = counted(tile, masks, visit)
        first = mask_first(first, positions, first_columns, visit, tile, masks, NK, BLOCK_N, WARPGROUP)
        first, _, new_max, new_sum = fold_scores(first, unseen, no_sums(), softmax.qk_scale)

        seen, factor = finish_rows(output, softmax, finished, rows, row_end, row_max, row_sum, NQ, WARPGROUP)
        tma_store_wait(0)
        if softmax.PIN_SUMS:
            pin(new_sum)
        if softmax.VALUES != "before scores":
            acc = wait_for_parts(acc, PENDING=0)
            values.release_by_threads(values.at(key_step - 1))
        o = finish_output(acc, seen, factor, DTYPE)
        write_output(output, o, finished, finished.start_m + WARPGROUP * ROWS, row_end, WARPGROUP)
        p = whole_weights(pack_weights(first, DTYPE), S)
        row_max = gl.convert_layout(new_max, ROW, assert_trivial=True)
        row_sum = new_sum
    if WARPGROUP == 0:
        # The last warpgroup hands the tensor cores over once more.
        wait_for_tensor_cores(warpgroup)
    tma_store_wait(0)
