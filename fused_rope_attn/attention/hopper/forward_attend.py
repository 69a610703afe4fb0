"""The warpgroups of the sm_90 forward that multiply: scores, softmax and values of 64 query rows each."""

from fused_rope_attn.attention.hopper.barriers import arrive_at_named_barrier, wait_at_named_barrier
from fused_rope_attn.attention.hopper.columns import (
    issue_by_columns,
    issue_over_columns,
    right_columns,
    wait_for_pieces,
    zero_pieces,
)
from fused_rope_attn.attention.hopper.forward_masks import mask_diagonal, mask_scores
from fused_rope_attn.attention.hopper.forward_output import write_output
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.attention.hopper.softmax import (
    cap_scores,
    finish_output,
    fold_scores,
    follow_maximum,
    no_sums,
    pack_weights,
    pin,
    rescale_output,
    unpack_weights,
    weigh_scores,
    whole_sums,
    whole_weights,
)
from fused_rope_attn.attention.hopper.tiles import next_tile, query_end, query_position
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.softmax import LOG2E, finish_sums, log_sum_exp
from fused_rope_attn.runtime.triton_compat import barrier, gl, jit, tma_store_wait, warpgroup_mma_wait

# The first of the named barriers: warpgroup 0 waits at this one for the tensor cores, warpgroup 1 at the next. Triton
# counts the barriers of its partitions from 0.
TENSOR_CORES = gl.constexpr(8)
TWO_WARPGROUPS = gl.constexpr(256)  # threads of the one that waits and the one that hands over


@record
class Softmax:
    """What turns the scores into weights."""

    qk_scale: gl.tensor  # > 0, times log2(e), and times the cap where there is one
    cap_scale: gl.tensor | None  # by which scores are multiplied before their tanh
    sinks_ptr: gl.tensor | None  # (HQ,)
    PIN_SUMS: gl.constexpr  # see ``softmax.pin``
    VALUES: gl.constexpr  # when a block's values are awaited, see ``attend``


@jit
def wait_for_tensor_cores(WARPGROUP: gl.constexpr):
    """Wait until the warpgroup before has issued its products, so that one computes while another multiplies."""
    wait_at_named_barrier(TENSOR_CORES + WARPGROUP, TWO_WARPGROUPS)


@jit
def hand_over_tensor_cores(WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next warpgroup issue its products."""
    arrive_at_named_barrier(TENSOR_CORES + (WARPGROUP + 1) % CONSUMERS, TWO_WARPGROUPS)


@jit
def first_keys(keys, key_step, COUNT: gl.constexpr):
    """The first COUNT keys of the block that the ``Ring`` holds in this step, (COUNT, BLOCK_D)."""
    BLOCK_N: gl.constexpr = keys.smem.shape[3]
    block = keys.smem.index(keys.slot(key_step)).reshape((BLOCK_N, keys.smem.shape[4]))
    if COUNT == BLOCK_N:
        return block
    else:
        return block.slice(0, COUNT, dim=0)


@record
class Ended:
    """A tile whose output is still to be written, and what makes it of acc; there is none before the first tile."""

    exists: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor  # the first one of the warpgroup
    row_end: gl.tensor
    seen: gl.tensor  # (ROWS,), as ``finish_rows`` returns it, like factor
    factor: gl.tensor


@jit
def give_away(output, ended, acc, DTYPE: gl.constexpr, WARPGROUP: gl.constexpr):
    """Write the output of a tile that has ended, where there is one; returns an empty acc."""
    RIGHT: gl.constexpr = 0 if acc.right is None else acc.right.shape[1]
    if ended.exists:
        tma_store_wait(0)
        o = finish_output(acc, ended.seen, ended.factor, DTYPE)
        write_output(output, o, ended, ended.row, ended.row_end, WARPGROUP)
    return zero_pieces(ROWS, output.BLOCK_D, RIGHT)


@jit
def multiply(q, acc, p, correction, ended, output, keys, values, key_step, exists, cap_scale, WARPGROUP: gl.constexpr,
             CONSUMERS: gl.constexpr, COUNT: gl.constexpr, VALUES: gl.constexpr):  # fmt: skip
    """The scores of key block ``key_step``, and the values of the block before with weights p.

    q: (ROWS, BLOCK_D) in shared memory; p: packed weights; correction (ROWS,): what acc, ``Pieces`` of (ROWS, BLOCK_D),
    is multiplied by first. Returns the scores (ROWS, COUNT) float32 of the block's first COUNT keys, capped where there
    is a ``cap_scale``, and acc, in flight behind them, or with VALUES "before scores" complete. Unless the block
    ``exists``, the scores mean nothing.
    """
    BLOCK_D: gl.constexpr = q.shape[1]
    BLOCK_N: gl.constexpr = keys.smem.shape[3]
    RIGHT: gl.constexpr = 0 if acc.right is None else acc.right.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    nothing = gl.zeros([ROWS, COUNT], gl.float32, S)
    v_slot = values.slot(key_step - 1)
    weights = unpack_weights(p, q.dtype, gl.DotOperandLayout(0, acc.left.type.layout, 2))
    if VALUES == "before scores":
        acc = rescale_output(acc, correction)
        values.wait_full(key_step - 1)
        v = values.smem.index(v_slot).reshape((BLOCK_N, BLOCK_D))
        wait_for_tensor_cores(WARPGROUP)
        acc = issue_by_columns(weights, v, acc)
        keys.wait_full(key_step, exists)
        k = first_keys(keys, key_step, COUNT)
        acc = wait_for_pieces(acc, PENDING=0)
        values.release_operands(key_step - 1)
        scores = issue_over_columns(q, k, nothing, RIGHT)
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        keys.wait_full(key_step, exists)
        k = first_keys(keys, key_step, COUNT)
        wait_for_tensor_cores(WARPGROUP)
        scores = issue_over_columns(q, k, nothing, RIGHT)
        if ended is None:
            acc = rescale_output(acc, correction)
        else:
            hand_over_tensor_cores(WARPGROUP, CONSUMERS)
            acc = give_away(output, ended, acc, q.dtype, WARPGROUP)
            wait_for_tensor_cores(WARPGROUP)
        # Triton's analysis of shared memory makes the four warps meet once an iteration. It does so in front of the
        # wait for keys, where nothing is multiplied for them, unless they meet here, where something is.
        barrier()
        values.wait_full(key_step - 1)
        v = values.smem.index(v_slot).reshape((BLOCK_N, BLOCK_D))
        acc = issue_by_columns(weights, v, acc, ADDS=ended is None)
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
        # All but the groups of the values.
        scores = warpgroup_mma_wait(2 if RIGHT else 1, deps=[scores])
    keys.release_operands(key_step, exists)
    return cap_scores(scores, cap_scale, q.dtype), acc


@jit
def finish_rows(output, softmax, tile, rows, row_end, row_max, row_sum, NQ, WARPGROUP: gl.constexpr):
    """Write lse of a warpgroup's rows that lie before ``row_end``; returns (seen, factor), what makes acc the output.

    rows (ROWS,) int32: 0 .. ROWS; row_max (ROWS,) and row_sum (ROWS, 4) as ``fold_scores`` left them. factor (ROWS,):
    what acc is multiplied by; a row that is not ``seen`` has seen no key, and its output is 0.
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
def mask_first(scores, positions, columns, tile, masks, NK, BLOCK_N: gl.constexpr, WARPGROUP: gl.constexpr):
    """``mask_scores`` of a tile's first block, or of as many of its keys as the warpgroup sees."""
    if masks.IS_ALIGNED:
        return mask_diagonal(scores, positions, columns, tile, NK, BLOCK_N, SEEN=WARPGROUP * ROWS)
    else:
        return mask_scores(scores, positions, columns, 0, tile, masks, NK)


@jit
def attend_block(q, acc, p, correction, row_max, row_sum, ended, tile, tile_step, key_step, visit, positions, columns,
                 queries, keys, values, output, softmax, masks, NK, WARPGROUP: gl.constexpr):  # fmt: skip
    """A tile's block of number ``visit``, from 1 on; see ``attend``."""
    scores, acc = multiply(
        q, acc, p, correction, ended, output, keys, values, key_step, True, softmax.cap_scale, WARPGROUP,
        queries.CONSUMERS, keys.smem.shape[3], softmax.VALUES,
    )  # fmt: skip
    if queries.IS_SINGLE:
        # The next tile's queries can come while this one's last softmax is computed.
        if visit + 1 == tile.num_blocks:
            queries.release(tile_step, WARPGROUP)
    if not masks.IS_ALIGNED:
        scores = mask_scores(scores, positions, columns, visit, tile, masks, NK)
    row_max, subtrahend, correction = follow_maximum(scores, row_max, softmax.qk_scale)
    if softmax.VALUES == "before weights":
        acc = wait_for_pieces(acc, PENDING=0)
        values.release_operands(key_step - 1)
    p, row_sum = weigh_scores(scores, subtrahend, correction, row_sum, softmax.qk_scale)
    if softmax.PIN_SUMS:
        pin(row_sum)
    if softmax.VALUES == "behind weights":
        acc = wait_for_pieces(acc, PENDING=0)
        values.release_operands(key_step - 1)
    return acc, pack_weights(p, q.dtype), correction, row_max, row_sum


@jit
def attend(WARPGROUP: gl.constexpr, tiles, queries, keys, values, output, softmax, masks, NQ, NK):
    """Rows [ROWS * WARPGROUP, ROWS * WARPGROUP + ROWS) of every tile.

    ``tile_step`` counts the tiles, ``key_step`` the key blocks of all tiles. One loop serves the blocks that need a
    mask and those that do not: of two, ptxas set up the address of q in the first alone, and jumped past it when that
    loop had no iterations.

    Of an aligned tile's first block, the one on the diagonal, the first warpgroup sees half: FIRST_COUNT keys. The
    others get weights of zero, whose product with the values costs time but little energy.

    A block's product with the values runs beside the scores and the maxima of the next block, and is awaited before
    that block's weights are made, or behind them, as VALUES says. Before them it leaves registers free, and the weights
    may be packed between exponentials. VALUES "before scores" lets it run beside nothing, so that weights and scores
    are never alive together.
    """
    BLOCK_N: gl.constexpr = keys.smem.shape[3]
    BLOCK_D: gl.constexpr = keys.smem.shape[4]
    DTYPE: gl.constexpr = keys.smem.dtype
    CONSUMERS: gl.constexpr = queries.CONSUMERS
    FIRST_COUNT: gl.constexpr = BLOCK_N // 2 if masks.IS_ALIGNED and WARPGROUP == 0 else BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST_COUNT, 16])
    RIGHT: gl.constexpr = right_columns(output.D, BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    rows = gl.arange(0, ROWS, ROW)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    # The same beside a tile's first scores.
    first_rows = gl.arange(0, ROWS, gl.SliceLayout(1, FIRST))
    first_columns = gl.arange(0, FIRST_COUNT, gl.SliceLayout(0, FIRST))
    nothing = gl.zeros([ROWS, FIRST_COUNT], gl.float32, FIRST)
    unseen = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, FIRST))

    tile_step = 0
    key_step = 0
    tile = next_tile(tiles, tile_step)
    start_m = tile.start_m + WARPGROUP * ROWS
    positions = query_position(tile, start_m, NQ, NK) + first_rows
    exists = True
    if tiles.IS_PACKED:
        # How many tiles hold queries only the device knows.
        exists = tile.num_blocks > 0
    queries.wait_full(tile_step, WARPGROUP, exists)
    keys.wait_full(key_step, exists)
    k = first_keys(keys, key_step, FIRST_COUNT)
    q = queries.tile(tile_step, WARPGROUP).reshape((ROWS, BLOCK_D))
    first = issue_over_columns(q, k, nothing, RIGHT)
    first = warpgroup_mma_wait(0, deps=[first])
    keys.release_operands(key_step, exists)
    barrier()  # see ``multiply``
    first = cap_scores(first, softmax.cap_scale, DTYPE)
    first = mask_first(first, positions, first_columns, tile, masks, NK, BLOCK_N, WARPGROUP)
    first, _, row_max, row_sum = fold_scores(first, unseen, no_sums(), softmax.qk_scale)
    row_max = gl.convert_layout(row_max, ROW, assert_trivial=True)
    p = whole_weights(pack_weights(first, DTYPE), S)
    if WARPGROUP == CONSUMERS - 1:
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
    DEFERS: gl.constexpr = softmax.VALUES != "before scores"
    acc = zero_pieces(ROWS, BLOCK_D, RIGHT)
    ended = Ended(
        exists=tile.num_blocks < 0, batch=tile.batch, head=tile.head, row=start_m, row_end=query_end(tile, NQ),
        seen=rows < 0, factor=gl.zeros([ROWS], gl.float32, ROW),
    )  # fmt: skip
    while tile.num_blocks > 0:
        correction = gl.full([ROWS], 1.0, gl.float32, ROW)
        q = queries.tile(tile_step, WARPGROUP).reshape((ROWS, BLOCK_D))
        begin = 1
        if DEFERS:
            if tile.num_blocks > 1:
                # The last tile's output leaves beside these scores.
                key_step += 1
                acc, p, correction, row_max, row_sum = attend_block(
                    q, acc, p, correction, row_max, row_sum, ended, tile, tile_step, key_step, 1, positions, columns,
                    queries, keys, values, output, softmax, masks, NK, WARPGROUP,
                )  # fmt: skip
            else:
                acc = give_away(output, ended, acc, DTYPE, WARPGROUP)
            begin = 2
        else:
            acc = zero_pieces(ROWS, BLOCK_D, RIGHT)
        for visit in range(begin, tile.num_blocks):
            key_step += 1
            acc, p, correction, row_max, row_sum = attend_block(
                q, acc, p, correction, row_max, row_sum, None, tile, tile_step, key_step, visit, positions, columns,
                queries, keys, values, output, softmax, masks, NK, WARPGROUP,
            )  # fmt: skip
        if queries.IS_SINGLE:
            queries.release(tile_step, WARPGROUP, tile.num_blocks == 1)
        else:
            queries.release(tile_step, WARPGROUP)

        # The next tile's first scores run beside this tile's last values. After the last tile they are computed from
        # whatever the buffers hold, and dropped.
        tile_step += 1
        key_step += 1
        finished = tile
        row_end = query_end(finished, NQ)
        tile = next_tile(tiles, tile_step)
        exists = tile.num_blocks > 0
        positions = query_position(tile, tile.start_m + WARPGROUP * ROWS, NQ, NK) + first_rows
        queries.wait_full(tile_step, WARPGROUP, exists)
        first, acc = multiply(
            queries.tile(tile_step, WARPGROUP).reshape((ROWS, BLOCK_D)), acc, p, correction, None, output, keys,
            values, key_step, exists, softmax.cap_scale, WARPGROUP, CONSUMERS, FIRST_COUNT, softmax.VALUES,
        )  # fmt: skip
        first = mask_first(first, positions, first_columns, tile, masks, NK, BLOCK_N, WARPGROUP)
        first, _, new_max, new_sum = fold_scores(first, unseen, no_sums(), softmax.qk_scale)

        seen, factor = finish_rows(output, softmax, finished, rows, row_end, row_max, row_sum, NQ, WARPGROUP)
        if softmax.PIN_SUMS:
            pin(new_sum)
        if DEFERS:
            acc = wait_for_pieces(acc, PENDING=0)
            values.release_operands(key_step - 1)
        ended = Ended(
            exists=finished.num_blocks > 0, batch=finished.batch, head=finished.head,
            row=finished.start_m + WARPGROUP * ROWS, row_end=row_end, seen=seen, factor=factor,
        )  # fmt: skip
        if not DEFERS:
            acc = give_away(output, ended, acc, DTYPE, WARPGROUP)
        p = whole_weights(pack_weights(first, DTYPE), S)
        row_max = gl.convert_layout(new_max, ROW, assert_trivial=True)
        row_sum = new_sum
    if DEFERS:
        acc = give_away(output, ended, acc, DTYPE, WARPGROUP)
    if WARPGROUP == 0:
        # The last warpgroup hands the tensor cores over once more.
        wait_for_tensor_cores(WARPGROUP)
    tma_store_wait(0)
