# mypy: ignore-errors
"""The multiplying warpgroups of the sm_90 backward.

*By keys*, up to head dim 128: each owns half of the block's keys. Everything is transposed, keys by queries, so that
P^T and dS^T feed the tensor cores from the registers in which they are computed. Only dS passes through shared memory,
because dQ needs all keys; it is stored as queries by keys, so that no product reads a transposed first operand. Each
warpgroup owns half of dQ's columns. dQ is delayed by one step, so that neither waits for the other's half of dS.

*By columns*, for head dims 129 to 256: the registers of two warpgroups hold dK and dV of no more than 64 keys. Each
warpgroup owns half of the columns of dK, dV and dQ. The first one computes all scores and the second one all of dP,
because a product of 64 by 64 takes as long to read from shared memory as to compute, and two halves of it would read
half as much again. P passes to the second warpgroup through shared memory, as the 16-bit numbers from which dV is
computed too, and dS passes back. While the second makes dS of a block, the first has dV of it and the scores of the
next block in flight; while the first makes the next softmax, the second has dQ and the next dP in flight. dQ is added
to the accumulator from registers, because through shared memory it would be a third of the traffic there.
"""

from fused_rope_attn.attention.hopper import (
    backward_block,
    backward_epilogue,
    backward_transfers,
    channels,
    columns as column_parts,
    masks,
    softmax,
)
from fused_rope_attn.kernels.records import replace
from fused_rope_attn.runtime.triton_compat import (
    COPIES_OPERANDS,
    barrier,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Slots of dS by keys: the products of dQ read that of the previous step while this step's is stored.
DS_STAGES = gl.constexpr(2)


@jit
def add_buffers_by_keys(buffers, dq_desc, ADDERS: gl.constexpr):
    """Return the ``Buffers`` for ``accumulate_by_keys``. ADDERS: warps that add dQ by turns."""
    BLOCK_M: gl.constexpr = channels.BACKWARD_BLOCK_M
    BLOCK_N: gl.constexpr = channels.BACKWARD_BLOCK_N
    DTYPE: gl.constexpr = buffers.k.buffer.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], DTYPE)
    ds = channels.channel_of(gl.allocate_shared_memory(DTYPE, [DS_STAGES, BLOCK_M, BLOCK_N], DS_LAYOUT), DS_STAGES)
    ds.init(FILLS=channels.CONSUMERS, RELEASES=channels.CONSUMERS * channels.WARPGROUP_THREADS)
    # With more than 64 columns shared memory does not hold a tile for each adding warp.
    SHARED: gl.constexpr = ADDERS > 1 and buffers.q.buffer.shape[4] > 64
    dq_smem = channels.tiles_of(dq_desc, channels.CONSUMERS if SHARED else channels.CONSUMERS * ADDERS)
    full = channels.allocate_barriers(channels.CONSUMERS * ADDERS)
    empty = channels.allocate_barriers(channels.CONSUMERS * ADDERS)
    dq = channels.Channel(dq_smem, full, empty, STAGES=ADDERS, SHARED=SHARED)
    dq.init(FILLS=1, RELEASES=1)
    return replace(buffers, ds=ds, dq=dq)


@jit
def add_buffers_by_columns(buffers, dq_ptr, scale, IS_ORDERED: gl.constexpr):
    """Return the ``Buffers`` for ``accumulate_by_columns``. IS_ORDERED: there are ``permits``."""
    DTYPE: gl.constexpr = buffers.k.buffer.dtype
    TILE: gl.constexpr = [channels.KEYS, channels.BACKWARD_BLOCK_M]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, DTYPE)
    p = channels.channel_of(gl.allocate_shared_memory(DTYPE, [1] + TILE, LAYOUT), 1)
    ds = channels.written_once(gl.allocate_shared_memory(DTYPE, [1] + TILE, LAYOUT))
    p.init(FILLS=1, RELEASES=1)
    ds.init(FILLS=1, RELEASES=0)
    permits, additions = None, None
    if IS_ORDERED:
        permits = channels.channel_of(None, STAGES=2)
        additions = channels.Channel(None, channels.allocate_barriers(2), empty=None, STAGES=2)
        permits.init(FILLS=1, RELEASES=1)
        additions.init(FILLS=channels.CONSUMERS, RELEASES=0)
    buffers = replace(buffers, ds=ds, dq=dq_ptr, p=p, permits=permits, additions=additions)
    return softmax.with_factor(buffers, scale, TILE, DTYPE, LAYOUT)


@jit
def own_rows(channel, WARPGROUP: gl.constexpr):
    """Return the rows of K or V that a warpgroup owns, (KEYS, BLOCK_D)."""
    return backward_block.whole_tile(channel).slice(WARPGROUP * channels.KEYS, channels.KEYS, dim=0)


@jit
def give_ds(WARPGROUP: gl.constexpr, channel, ds, step):
    """Store a warpgroup's ds (KEYS, BLOCK_M) of the step before ``step`` for the product of dQ in ``step``."""
    cursor = channel.at(step)
    channel.tile(cursor).slice(WARPGROUP * channels.KEYS, channels.KEYS, dim=1).permute((1, 0)).store(ds)
    fence_async_shared()
    channel.fill(cursor)


@jit
def issue_dq(WARPGROUP: gl.constexpr, buffers, step, nothing):
    """Begin the product of dQ in ``step``, of the dS of the step before, which has arrived.

    nothing: zeros in the layout of the result, the warpgroup's columns (BLOCK_M, columns).
    """
    ds_tile = buffers.ds.tile(buffers.ds.at(step))
    HALF: gl.constexpr = buffers.k.buffer.shape[4] // channels.CONSUMERS
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
    tile = own.tile(cursor).reshape((channels.BACKWARD_BLOCK_M, HALF))
    if dq.shape[1] < HALF:
        tile = tile.slice(0, dq.shape[1], dim=1)
    tile.store(backward_transfers.stage_rows(dq))
    fence_async_shared()
    own.fill(cursor)


@jit
def fold_by_keys(WARPGROUP: gl.constexpr, dk, dv, buffers, total, keys, queries, sizes, mask, scale):
    """Fold ``total`` > 0 query blocks of the group's heads into dk and dv, ``ColumnParts`` of (KEYS, BLOCK_D).

    The products in the order of their issue: dV of this block, dQ of the previous one, dK of this one, scores and dP of
    the next one, which ``load`` provides after the last block too. EARLY_SCORES issues the scores before dQ, EARLY_DQ
    issues dQ before both.
    """
    q_blocks, do_blocks, ds_channel = buffers.q, buffers.do, buffers.ds
    BLOCK_D: gl.constexpr = q_blocks.buffer.shape[4]
    CLAMP: gl.constexpr = queries.num_masked is not None
    # With 128 columns the registers do not hold the next scores next to dQ: ptxas makes every product synchronous. With
    # two parts they do, but late scores are faster if Triton copies P and dS for the right part.
    EARLY_SCORES: gl.constexpr = BLOCK_D == 64 or (dk.right is not None and not COPIES_OPERANDS)
    # With more columns the registers do not hold dQ in addition to dP.
    EARLY_DQ: gl.constexpr = BLOCK_D == 64
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels.BACKWARD_BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.left.type.layout, 2)
    RIGHT: gl.constexpr = 0 if dk.right is None else dk.right.shape[1]
    # Groups of products in each of dV, dK, the scores and dP.
    GROUPS: gl.constexpr = 1 if dk.right is None else 2
    # Columns of dQ, of all rows of a query block: half of a tile's, or one of its two parts.
    OWN: gl.constexpr = RIGHT if WARPGROUP == 1 and RIGHT else BLOCK_D // channels.CONSUMERS
    no_s = gl.zeros([channels.KEYS, channels.BACKWARD_BLOCK_M], gl.float32, S)
    k_rows = None
    v_rows = None
    if BLOCK_D == 64:
        # Reading shared memory takes longer than the products. With more columns registers do not suffice for this.
        k_rows = own_rows(buffers.k, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
        v_rows = own_rows(buffers.v, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
    no_dq = column_parts.part_zeros(channels.BACKWARD_BLOCK_M, OWN)
    key_rows = gl.arange(0, channels.KEYS, gl.SliceLayout(1, S))
    columns = gl.arange(0, channels.BACKWARD_BLOCK_M, gl.SliceLayout(0, S))

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
        start_m = (queries.first + block) * channels.BACKWARD_BLOCK_M
        q = q_blocks.tile(q_cursor).reshape((channels.BACKWARD_BLOCK_M, BLOCK_D))
        do = do_blocks.tile(do_cursor).reshape((channels.BACKWARD_BLOCK_M, BLOCK_D))
        lse = buffers.lse.index(q_cursor.slot).load(gl.SliceLayout(0, S))
        diagonal = masks.mask_offset(mask, sizes, keys, start_m)
        if mask.intervals is None:
            diagonal -= WARPGROUP * channels.KEYS
        is_masked = masks.needs_mask(mask, diagonal, block, queries)
        p, s = softmax.weigh(s, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP)
        p16 = gl.convert_layout(p.to(DTYPE), P)
        p = softmax.derivative_factor(p, s, scale)
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
def accumulate_by_keys(WARPGROUP: gl.constexpr, buffers, gradients, keys, queries, sizes, mask, scale):
    """Compute dk and dv of keys [KEYS * WARPGROUP, KEYS * WARPGROUP + KEYS) of the block, and half its dQ's columns.

    mask.first_key None: all keys exist, or a window hides those that do not.
    """
    BLOCK_D: gl.constexpr = buffers.v.buffer.shape[4]
    RIGHT: gl.constexpr = column_parts.right_columns(gradients.format.D, BLOCK_D)
    mask = masks.with_own_keys(mask, keys.start_n // channels.KEYS + WARPGROUP)
    dv = column_parts.zero_parts(channels.KEYS, BLOCK_D, RIGHT)
    dk = column_parts.zero_parts(channels.KEYS, BLOCK_D, RIGHT)
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    total = sizes.num_heads * queries.count
    # One more than query blocks, because dQ is delayed by one step.
    dq_steps = 0
    if total > 0:
        dq_steps = total + 1
        # Step 0 multiplies zeros. This layout stores whole rows of shared memory.
        ROWS: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        no_ds = gl.zeros([channels.KEYS, channels.BACKWARD_BLOCK_M], buffers.k.buffer.dtype, ROWS)
        give_ds(WARPGROUP, buffers.ds, no_ds, 0)
        dk, dv = fold_by_keys(WARPGROUP, dk, dv, buffers, total, keys, queries, sizes, mask, scale)
    # Stage dv in V, because each warpgroup read only its own rows of it, and dk in the memory of dQ as soon as that has
    # been read.
    own_keys = backward_block.KeyBlock(
        batch=keys.batch, head=keys.head, start_n=keys.start_n + WARPGROUP * channels.KEYS
    )
    dq = buffers.dq.of_warpgroup(WARPGROUP)
    # ``index`` and not ``slice``: ``store_dk`` reinterprets the stage again, and triton 3.8 refuses this for slices.
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dk_stage = reinterpret(dq.tile(dq.at(dq_steps)), gl.float32, [1, channels.KEYS, dq.buffer.shape[4]], FLAT).index(0)
    stages = backward_epilogue.Stages(dk=dk_stage, dv=own_rows(buffers.v, WARPGROUP), dk_channel=dq)
    backward_epilogue.store_or_pass_on(
        dk, dv, own_keys, sizes.NK, mask, scale, gradients, stages, dq_steps, WARPGROUP, FIRST_COLUMN=0
    )


@jit
def add_half(pointer, dq):
    """Add dq (BLOCK_M, 64) float32 to the accumulator from ``pointer`` on.

    The order of its numbers is that of the registers, see ``postprocess_kernel.panel_offsets``: a warp adds 256
    contiguous bytes, a thread 8 of them. With 16 bytes a thread ptxas makes every product synchronous (C7512).
    """
    rows = gl.arange(0, channels.BACKWARD_BLOCK_M, gl.SliceLayout(1, dq.type.layout))
    columns = gl.arange(0, dq.shape[1], gl.SliceLayout(0, dq.type.layout))
    # The thread's own part first, so that the others are constants and take no registers, as in ``hide_pairs``.
    thread = ((rows // 16) * 128 + (rows % 8) * 8)[:, None] + (columns & 6)[None, :]
    others = ((rows & 8) * 8)[:, None] + ((columns // 8) * 512 + (columns & 1))[None, :]
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v2.f32 [$4], {$8, $9}; red.relaxed.gpu.global.add.v2.f32 [$6], {$10, $11}; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [(pointer + thread + others).to(gl.uint64, bitcast=True), dq],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@jit
def fold_by_columns(WARPGROUP: gl.constexpr, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale):
    """Fold all query blocks of the group's heads into dk and dv (KEYS, BLOCK_D / 2) float32.

    They are this warpgroup's columns. dq_ptr: its columns of the accumulator's first block. The products in the order
    of their issue: dV, the next scores, half of dQ, dK, the rest of dQ, the next dP.
    """
    q_blocks, do_blocks, weights, ds_channel = buffers.q, buffers.do, buffers.p, buffers.ds
    BLOCK_D: gl.constexpr = buffers.k.buffer.shape[4]
    OWN: gl.constexpr = BLOCK_D // channels.CONSUMERS
    # Columns of a product of dQ: registers suffice for half of this warpgroup's.
    HALF: gl.constexpr = OWN // 2
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels.BACKWARD_BLOCK_M, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    no_s = gl.zeros([channels.KEYS, channels.BACKWARD_BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([channels.BACKWARD_BLOCK_M, HALF], gl.float32, DQ)
    p_tile = weights.tile(weights.at(0))
    ds_tile = ds_channel.tile(ds_channel.at(0))
    ds_t = ds_tile.permute((1, 0))
    if WARPGROUP == 0:
        key_rows = gl.arange(0, channels.KEYS, gl.SliceLayout(1, S))
        columns = gl.arange(0, channels.BACKWARD_BLOCK_M, gl.SliceLayout(0, S))
        token = backward_block.issue_product(backward_block.whole_tile(buffers.k), q_blocks, q_blocks.at(0), no_s)
    else:
        token = backward_block.issue_product(backward_block.whole_tile(buffers.v), do_blocks, do_blocks.at(0), no_s)
    block = 0
    group_head = 0
    if queries.IN_ORDER:
        block = queries.count - 1
        dq_ptr += block * (channels.BACKWARD_BLOCK_M * BLOCK_D)
    for step in range(total):
        at_q = q_blocks.at(step)
        at_do = do_blocks.at(step)
        at_weights = weights.at(step)
        at_ds = ds_channel.at(step)
        q = q_blocks.tile(at_q).reshape((channels.BACKWARD_BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        do = do_blocks.tile(at_do).reshape((channels.BACKWARD_BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        x = warpgroup_mma_wait(0, deps=[token])
        if WARPGROUP == 0:
            lse = buffers.lse.index(at_q.slot).load(gl.SliceLayout(0, S))
            diagonal = masks.mask_offset(mask, sizes, keys, (queries.first + block) * channels.BACKWARD_BLOCK_M)
            is_masked = masks.needs_mask(mask, diagonal, block, queries)
            CLAMP: gl.constexpr = queries.num_masked is not None
            p, s = softmax.weigh(x, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP)
            weights.wait_empty(at_weights)
            p_tile.store(p.to(DTYPE))
            if buffers.ds_factor is not None:
                buffers.ds_factor.store(softmax.derivative_factor(p, s, scale).to(DTYPE))
            fence_async_shared()
            weights.fill(at_weights)
            do_blocks.wait_full(at_do)
            weights.wait_full(at_weights)
            dv_token = warpgroup_mma(p_tile, do, dv, is_async=True)
            token = backward_block.issue_product(
                backward_block.whole_tile(buffers.k), q_blocks, q_blocks.at(step + 1), no_s
            )
        else:
            delta = buffers.delta.index(at_do.slot).load(gl.SliceLayout(0, S))
            weights.wait_full(at_weights)
            factor = p_tile
            if buffers.ds_factor is not None:
                factor = buffers.ds_factor
            p = factor.load(S).to(gl.float32)
            dv_token = warpgroup_mma(p_tile, do, dv, is_async=True)
            # No wait for an empty slot: the first warpgroup has filled P, and before that it has read the last dS.
            ds_tile.store((p * (x - delta[None, :])).to(DTYPE))
            fence_async_shared()
            ds_channel.fill(at_ds)
            q_blocks.wait_full(at_q)
        ds_channel.wait_full(at_ds)
        k_columns = backward_block.whole_tile(buffers.k).slice(WARPGROUP * OWN, HALF, dim=1)
        dq_token = warpgroup_mma(ds_t, k_columns, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_tile, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        if WARPGROUP == 1:
            weights.release(at_weights)
        do_blocks.release_by_threads(at_do)
        if buffers.permits is not None:
            buffers.permits.wait_full(buffers.permits.at(step))
        add_half(dq_ptr, dq)
        # After it the other half can take the same registers. Triton 3.8 and 3.9 insert no barrier here themselves, and
        # without one the registers do not suffice (C7512).
        barrier()
        k_columns = backward_block.whole_tile(buffers.k).slice(WARPGROUP * OWN + HALF, HALF, dim=1)
        dq_token = warpgroup_mma(ds_t, k_columns, no_dq, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk_token])
        q_blocks.release_by_threads(at_q)
        if WARPGROUP == 0:
            dq = warpgroup_mma_wait(0, deps=[dq_token])
        else:
            token = backward_block.issue_product(
                backward_block.whole_tile(buffers.v), do_blocks, do_blocks.at(step + 1), no_s
            )
            dq = warpgroup_mma_wait(1, deps=[dq_token])
        add_half(dq_ptr + channels.BACKWARD_BLOCK_M * HALF, dq)
        if buffers.additions is not None:
            buffers.additions.fill(buffers.additions.at(step))
        if queries.IN_ORDER:
            group_head += 1
            dq_ptr += sizes.pitch * BLOCK_D
            if group_head == sizes.num_heads:
                group_head = 0
                block -= 1
                dq_ptr -= (sizes.num_heads.to(gl.int64) * sizes.pitch + channels.BACKWARD_BLOCK_M) * BLOCK_D
        else:
            block += 1
            dq_ptr += channels.BACKWARD_BLOCK_M * BLOCK_D
            dq_ptr += gl.where(
                block == queries.count, (sizes.pitch - queries.count * channels.BACKWARD_BLOCK_M) * BLOCK_D, 0
            )
            block = gl.where(block == queries.count, 0, block)
    warpgroup_mma_wait(0, deps=[token])
    return dk, dv


@jit
def accumulate_by_columns(WARPGROUP: gl.constexpr, buffers, gradients, keys, queries, sizes, mask, scale):
    """Compute half of the columns of dk and dv of the block's KEYS keys, and of their share of dQ.

    mask.first_key None: all keys exist, or a window hides those that do not.
    """
    k_smem, v_smem = buffers.k.buffer, buffers.v.buffer
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    OWN: gl.constexpr = BLOCK_D // channels.CONSUMERS
    DTYPE: gl.constexpr = k_smem.dtype
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if WARPGROUP == 0:
        mask = masks.with_own_keys(mask, keys.start_n // channels.KEYS)
    dv = gl.zeros([channels.KEYS, OWN], gl.float32, DKV)
    dk = gl.zeros([channels.KEYS, OWN], gl.float32, DKV)
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    total = sizes.num_heads * queries.count
    if total > 0:
        head_q = (keys.batch * sizes.HQ + backward_block.first_query_head(keys, sizes)).to(gl.int64)
        row = head_q * sizes.pitch + queries.first * channels.BACKWARD_BLOCK_M
        dq_ptr = buffers.dq + row * BLOCK_D + WARPGROUP * channels.BACKWARD_BLOCK_M * OWN
        dk, dv = fold_by_columns(WARPGROUP, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale)
    # Stage dv in V and dk in K, in half of each. The other warpgroup may still multiply with them: its last scores or
    # dP, which it discards, or dQ from its own half of K.
    stages = backward_epilogue.Stages(
        dk=reinterpret(k_smem, DTYPE, [channels.CONSUMERS, channels.KEYS, OWN], STAGE).index(WARPGROUP),
        dv=reinterpret(v_smem, DTYPE, [channels.CONSUMERS, channels.KEYS, OWN], STAGE).index(WARPGROUP),
    )
    dk, dv = column_parts.ColumnParts(left=dk, right=None), column_parts.ColumnParts(left=dv, right=None)
    backward_epilogue.store_or_pass_on(
        dk, dv, keys, sizes.NK, mask, scale, gradients, stages, 0, WARPGROUP, FIRST_COLUMN=WARPGROUP * OWN
    )
