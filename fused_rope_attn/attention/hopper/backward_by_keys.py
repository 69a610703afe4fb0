# mypy: ignore-errors
"""The multiplying warpgroups of the sm_90 backward up to head dim 128: each owns half of the block's keys.

Everything is transposed, keys by queries, so that P^T and dS^T feed the tensor cores from the registers in which they
are computed. Only dS passes through shared memory, because dQ needs all keys. Each warpgroup owns half of dQ's columns.
dS is stored there as queries by keys, so that no product reads a transposed first operand. dQ is delayed by one step:
by then the other warpgroup has long stored its half of dS, and neither waits for the other.
"""

from fused_rope_attn.attention.hopper import (
    backward_block,
    backward_epilogue,
    backward_transfers,
    channels,
    masks,
    shapes,
)
from fused_rope_attn.attention.hopper import columns as column_parts
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import (
    COPIES_OPERANDS,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Slots of dS: the products of dQ read that of the previous step while this step's is stored.
DS_STAGES = gl.constexpr(2)


@record
class BuffersByKeys:
    """Shared memory that these warpgroups use.

    k, v: (1, 1, 1, BLOCK_N, BLOCK_D) 16-bit. ds: slots of (BLOCK_M, BLOCK_N) 16-bit, full when both warpgroups have
    written their keys, empty when the products of both have read it; the slot of step s holds dS of step s - 1, and
    zeros in step 0. dq: a channel for each warpgroup, with tiles (1, 1, BLOCK_M, BLOCK_D / CONSUMERS) float32 and a
    slot for each warp that adds them. lse and delta: as in ``Destinations``.
    """

    k: channels.Channel
    v: channels.Channel
    ds: channels.Channel
    q: channels.Channel
    do: channels.Channel
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    dq: channels.Channel


@jit
def allocate_buffers(
    descriptors,
    dq_desc,
    Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    ADDERS: gl.constexpr,
):
    """Allocate ``BuffersByKeys`` and initialise their barriers.

    ADDERS: warps that add dQ by turns.
    """
    q, lse = backward_block.allocate_query_channel(descriptors.q, descriptors.stats, Q_STAGES)
    do, delta = backward_block.allocate_query_channel(descriptors.do, descriptors.stats, DO_STAGES)
    k_smem = gl.allocate_shared_memory(descriptors.k.dtype, [1] + descriptors.k.block_type.shape, descriptors.k.layout)
    v_smem = gl.allocate_shared_memory(descriptors.v.dtype, [1] + descriptors.v.block_type.shape, descriptors.v.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [shapes.BACKWARD_BLOCK_M, shapes.BACKWARD_BLOCK_N], descriptors.k.dtype
    )
    ds_smem = gl.allocate_shared_memory(
        descriptors.k.dtype, [DS_STAGES, shapes.BACKWARD_BLOCK_M, shapes.BACKWARD_BLOCK_N], DS_LAYOUT
    )
    # With more than 64 columns shared memory does not hold a tile for each adding warp.
    SHARED: gl.constexpr = ADDERS > 1 and descriptors.q.block_type.shape[3] > 64
    DQ_TILES: gl.constexpr = shapes.CONSUMERS if SHARED else shapes.CONSUMERS * ADDERS
    dq_smem = gl.allocate_shared_memory(gl.float32, [DQ_TILES] + dq_desc.block_type.shape, dq_desc.layout)
    k = channels.written_once(k_smem)
    v = channels.written_once(v_smem)
    ds = channels.channel_of(ds_smem, DS_STAGES)
    full, empty = (
        channels.allocate_barriers(shapes.CONSUMERS * ADDERS),
        channels.allocate_barriers(shapes.CONSUMERS * ADDERS),
    )
    dq = channels.Channel(dq_smem, full, empty, STAGES=ADDERS, SHARED=SHARED)
    k.init(FILLS=1, RELEASES=0)
    v.init(FILLS=1, RELEASES=0)
    ds.init(FILLS=shapes.CONSUMERS, RELEASES=shapes.CONSUMERS * shapes.WARPGROUP_THREADS)
    backward_block.init_query_channel(q)
    backward_block.init_query_channel(do)
    dq.init(FILLS=1, RELEASES=1)
    return BuffersByKeys(k=k, v=v, ds=ds, q=q, do=do, lse=lse, delta=delta, dq=dq)


@jit
def own_rows(channel, WARPGROUP: gl.constexpr):
    """Return the rows of K or V that a warpgroup owns, (KEYS, BLOCK_D)."""
    return backward_block.whole_tile(channel).slice(WARPGROUP * shapes.KEYS, shapes.KEYS, dim=0)


@jit
def give_ds(WARPGROUP: gl.constexpr, channel, ds, step):
    """Store a warpgroup's ds (KEYS, BLOCK_M) of the step before ``step`` for the product of dQ in ``step``."""
    cursor = channel.at(step)
    channel.tile(cursor).slice(WARPGROUP * shapes.KEYS, shapes.KEYS, dim=1).permute((1, 0)).store(ds)
    fence_async_shared()
    channel.fill(cursor)


@jit
def issue_dq(WARPGROUP: gl.constexpr, buffers, step, nothing):
    """Begin the product of dQ in ``step``, of the dS of the step before, which has arrived.

    It makes the warpgroup's columns, as many as ``nothing``, zeros (BLOCK_M, columns), has.
    """
    ds_tile = buffers.ds.tile(buffers.ds.at(step))
    HALF: gl.constexpr = buffers.k.buffer.shape[4] // shapes.CONSUMERS
    k_columns = backward_block.whole_tile(buffers.k).slice(WARPGROUP * HALF, nothing.shape[1], dim=1)
    return warpgroup_mma(ds_tile, k_columns, nothing, use_acc=False, is_async=True)


@jit
def issue_scores(held, keys, queries, cursor, nothing, WARPGROUP: gl.constexpr, RIGHT: gl.constexpr):
    """Begin ``issue_product`` of ``own_rows`` of K or V, or of those ``held`` in registers if that is not None."""
    if held is None:
        return backward_block.issue_product(own_rows(keys, WARPGROUP), queries, cursor, nothing, RIGHT)
    else:
        return backward_block.issue_product(held, queries, cursor, nothing)


@jit
def send_dq(WARPGROUP: gl.constexpr, dq, channel, step):
    """Pass a warpgroup's columns of a step's dQ, (BLOCK_M, columns) float32, to the warp that adds them."""
    HALF: gl.constexpr = channel.buffer.shape[4]
    own = channel.of_warpgroup(WARPGROUP)
    cursor = own.at(step)
    own.wait_empty(cursor)
    tile = own.tile(cursor).reshape((shapes.BACKWARD_BLOCK_M, HALF))
    if dq.shape[1] < HALF:
        tile = tile.slice(0, dq.shape[1], dim=1)
    tile.store(backward_transfers.stage_rows(dq))
    fence_async_shared()
    own.fill(cursor)


@jit
def fold_queries(WARPGROUP: gl.constexpr, dk, dv, buffers, total, keys, queries, sizes, mask, scale):
    """Fold ``total`` > 0 query blocks of the group's heads into dk and dv, ``ColumnParts`` of (KEYS, BLOCK_D).

    The products in the order of their issue: dV of this block, dQ of the previous one, dK of this one, scores and dP of
    the next one, which ``load`` provides after the last block too. EARLY_SCORES issues the scores before dQ, EARLY_DQ
    issues dQ before both.
    """
    q_blocks, do_blocks, ds_channel = buffers.q, buffers.do, buffers.ds
    BLOCK_D: gl.constexpr = q_blocks.buffer.shape[4]
    CLAMP: gl.constexpr = queries.num_masked is not None
    # With 128 columns the registers do not hold the next scores in addition to dQ: ptxas makes every product
    # synchronous. With two parts they do, but if Triton copies P and dS for the right part it is faster to issue the
    # scores late.
    EARLY_SCORES: gl.constexpr = BLOCK_D == 64 or (dk.right is not None and not COPIES_OPERANDS)
    # With more columns the registers do not hold dQ in addition to dP.
    EARLY_DQ: gl.constexpr = BLOCK_D == 64
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shapes.BACKWARD_BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.left.type.layout, 2)
    RIGHT: gl.constexpr = 0 if dk.right is None else dk.right.shape[1]
    # Groups of products in each of dV, dK, the scores and dP.
    GROUPS: gl.constexpr = 1 if dk.right is None else 2
    # Columns of dQ, of all rows of a query block: half of a tile's, or one of its two parts.
    OWN: gl.constexpr = RIGHT if WARPGROUP == 1 and RIGHT else BLOCK_D // shapes.CONSUMERS
    no_s = gl.zeros([shapes.KEYS, shapes.BACKWARD_BLOCK_M], gl.float32, S)
    k_rows = None
    v_rows = None
    if BLOCK_D == 64:
        # Reading shared memory takes longer than the products. With more columns registers do not suffice for this.
        k_rows = own_rows(buffers.k, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
        v_rows = own_rows(buffers.v, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
    no_dq = column_parts.part_zeros(shapes.BACKWARD_BLOCK_M, OWN)
    key_rows = gl.arange(0, shapes.KEYS, gl.SliceLayout(1, S))
    columns = gl.arange(0, shapes.BACKWARD_BLOCK_M, gl.SliceLayout(0, S))

    block = 0
    group_head = 0
    if queries.IN_ORDER:
        block = queries.count - 1
    q_cursor = q_blocks.start_at(gl.to_tensor(0))
    s_token = issue_scores(k_rows, buffers.k, q_blocks, q_cursor, no_s, WARPGROUP, RIGHT)
    dp_token = issue_scores(v_rows, buffers.v, do_blocks, do_blocks.at(gl.to_tensor(0)), no_s, WARPGROUP, RIGHT)
    s = warpgroup_mma_wait(GROUPS, deps=[s_token])
    for step in range(total):
        do_cursor = do_blocks.at(step)
        next_q = q_blocks.after(q_cursor)
        start_m = (queries.first + block) * shapes.BACKWARD_BLOCK_M
        q = q_blocks.tile(q_cursor).reshape((shapes.BACKWARD_BLOCK_M, BLOCK_D))
        do = do_blocks.tile(do_cursor).reshape((shapes.BACKWARD_BLOCK_M, BLOCK_D))
        lse = buffers.lse.index(q_cursor.slot).load(gl.SliceLayout(0, S))
        diagonal = masks.mask_offset(mask, sizes, keys, start_m)
        if mask.intervals is None:
            diagonal -= WARPGROUP * shapes.KEYS
        is_masked = masks.needs_mask(mask, diagonal, block, queries)
        p, s = backward_block.weigh(s, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP)
        p16 = gl.convert_layout(p.to(DTYPE), P)
        if scale.cap_scale is not None:
            # The tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
            p *= 1.0 - s * s
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        dv = column_parts.issue_by_columns(p16, do, dv)
        if EARLY_DQ:
            ds_channel.wait_full(ds_channel.at(step))
            dq_token = issue_dq(WARPGROUP, buffers, step, no_dq)
        delta = buffers.delta.index(do_cursor.slot).load(gl.SliceLayout(0, S))
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        ds_channel.wait_empty(ds_channel.at(step + 1))
        give_ds(WARPGROUP, buffers.ds, ds, step + 1)
        ds_operand = gl.convert_layout(ds, P)
        if EARLY_SCORES:
            s_token = issue_scores(k_rows, buffers.k, q_blocks, next_q, no_s, WARPGROUP, RIGHT)
        if not EARLY_DQ:
            ds_channel.wait_full(ds_channel.at(step))
        # Without early scores only dV is in flight, and this waits for nothing: the wait for dQ covers dV.
        dv = column_parts.wait_for_parts(dv, PENDING=GROUPS + EARLY_DQ)
        if not EARLY_DQ:
            dq_token = issue_dq(WARPGROUP, buffers, step, no_dq)
        dk = column_parts.issue_by_columns(ds_operand, q, dk)
        if EARLY_SCORES:
            dq, s = warpgroup_mma_wait(GROUPS, deps=[dq_token, s_token])
        else:
            dq = warpgroup_mma_wait(GROUPS, deps=[dq_token])
        do_blocks.release_by_threads(do_cursor)
        ds_channel.release_by_threads(ds_channel.at(step))
        send_dq(WARPGROUP, dq, buffers.dq, step)
        if not EARLY_SCORES:
            s_token = issue_scores(k_rows, buffers.k, q_blocks, next_q, no_s, WARPGROUP, RIGHT)
        next_do = do_blocks.at(step + 1)
        dp_token = issue_scores(v_rows, buffers.v, do_blocks, next_do, no_s, WARPGROUP, RIGHT)
        # Only dP is in flight at the end of an iteration: ptxas makes every product synchronous if an accumulator
        # in flight meets another value, as dk and dv would meet their initial zeros.
        if EARLY_SCORES:
            dk = column_parts.wait_for_parts(dk, PENDING=GROUPS)
        else:
            dk, s = column_parts.wait_for_parts_and(dk, s_token, PENDING=GROUPS)
        q_blocks.release_by_threads(q_cursor)
        q_cursor = next_q
        if queries.IN_ORDER:
            group_head += 1
            block = gl.where(group_head == sizes.num_heads, block - 1, block)
            group_head = gl.where(group_head == sizes.num_heads, 0, group_head)
        else:
            block += 1
            block = gl.where(block == queries.count, 0, block)
    warpgroup_mma_wait(0, deps=[dp_token])
    ds_channel.wait_full(ds_channel.at(total))
    dq_token = issue_dq(WARPGROUP, buffers, total, no_dq)
    send_dq(WARPGROUP, warpgroup_mma_wait(0, deps=[dq_token]), buffers.dq, total)
    return dk, dv


@jit
def accumulate_by_keys(warpgroup, buffers, gradients, keys, queries, sizes, mask, scale):
    """Compute dk and dv of keys [KEYS * WARPGROUP, KEYS * WARPGROUP + KEYS) of the block, and half its dQ's columns.

    mask.first_key None: all keys exist, or a window hides those that do not.
    """
    WARPGROUP: gl.constexpr = warpgroup.INDEX
    BLOCK_D: gl.constexpr = buffers.v.buffer.shape[4]
    RIGHT: gl.constexpr = column_parts.right_columns(gradients.format.D, BLOCK_D)
    mask = masks.with_own_keys(mask, keys.start_n // shapes.KEYS + WARPGROUP)
    dv = column_parts.zero_parts(shapes.KEYS, BLOCK_D, RIGHT)
    dk = column_parts.zero_parts(shapes.KEYS, BLOCK_D, RIGHT)
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    total = sizes.num_heads * queries.count
    # One more than query blocks, because dQ is delayed by one step.
    dq_steps = 0
    if total > 0:
        dq_steps = total + 1
        # Of no block, in a layout that stores whole rows of shared memory.
        ROWS: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        no_ds = gl.zeros([shapes.KEYS, shapes.BACKWARD_BLOCK_M], buffers.k.buffer.dtype, ROWS)
        give_ds(WARPGROUP, buffers.ds, no_ds, 0)
        dk, dv = fold_queries(WARPGROUP, dk, dv, buffers, total, keys, queries, sizes, mask, scale)
    # Stage dv in V, because each warpgroup read only its own rows of it, and dk in the memory of dQ as soon as that has
    # been read.
    own_keys = backward_block.KeyBlock(batch=keys.batch, head=keys.head, start_n=keys.start_n + WARPGROUP * shapes.KEYS)
    dq = buffers.dq.of_warpgroup(WARPGROUP)
    # ``index`` and not ``slice``: ``store_dk`` reinterprets the stage again, and triton 3.8 refuses this for slices.
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dk_stage = reinterpret(dq.tile(dq.at(dq_steps)), gl.float32, [1, shapes.KEYS, dq.buffer.shape[4]], FLAT).index(0)
    stages = backward_epilogue.Stages(dk=dk_stage, dv=own_rows(buffers.v, WARPGROUP), dk_channel=dq)
    backward_epilogue.store_or_pass_on(
        dk, dv, own_keys, sizes.NK, mask, scale, gradients, stages, dq_steps, WARPGROUP, FIRST_COLUMN=0
    )
