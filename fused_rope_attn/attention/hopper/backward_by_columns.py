# mypy: ignore-errors
"""The multiplying warpgroups of the sm_90 backward for head dims 129 to 256: each owns half of the block's columns.

The registers of two warpgroups hold dK and dV of no more than 64 keys. The warpgroups split a block by columns: each
owns half of the columns of dK, dV and dQ. The first one computes all scores and the second one all of dP, because a
product of 64 by 64 takes as long to read from shared memory as to compute, and two halves of it would read half as much
again. P passes to the second warpgroup through shared memory, as the 16-bit numbers from which dV is computed too, and
dS passes back.

The warpgroups alternate. While the second makes dS of a block, the first has dV of it and the scores of the next block
in flight; while the first makes the next softmax, the second has dQ and the next dP in flight.

dQ is added to the accumulator from registers, 8 bytes of a thread and 256 of a warp at a time, in the order in which
the threads hold it. Through shared memory, as for narrower heads, it would be a third of the traffic there.
"""

from fused_rope_attn.attention.hopper import backward_block, backward_epilogue, channels, masks, shapes
from fused_rope_attn.attention.hopper import columns as column_parts
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@record
class BuffersByColumns:
    """Shared memory that these warpgroups use.

    k, v: (1, 1, 1, KEYS, BLOCK_D) 16-bit. p: P of a block, (KEYS, BLOCK_M) 16-bit; the first warpgroup fills it and the
    second releases it. ds_factor, filled with it: the factor of dP - delta in dS, which is P, or with a softcap P times
    the tanh's derivative; may be the same tile. ds: (KEYS, BLOCK_M) 16-bit, which the second warpgroup fills. lse and
    delta: as in ``Destinations``. permits, additions: channels without tiles, or None if dQ is
    added in any order. ``permit_additions`` fills the first when both warpgroups may add a step's dQ, both fill the
    second when they have, and ``announce_additions`` empties the first then.
    """

    k: channels.Channel
    v: channels.Channel
    p: channels.Channel
    ds_factor: gl.shared_memory_descriptor
    ds: channels.Channel
    q: channels.Channel
    do: channels.Channel
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    permits: channels.Channel | None
    additions: channels.Channel | None


@jit
def allocate_buffers(
    descriptors,
    Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    HAS_CAP: gl.constexpr,
    IS_ORDERED: gl.constexpr,
):
    """Allocate ``BuffersByColumns`` and initialise their barriers.

    HAS_CAP: whether there is a softcap; IS_ORDERED: there are ``permits``.
    """
    q, lse = backward_block.allocate_query_channel(descriptors.q, descriptors.stats, Q_STAGES)
    do, delta = backward_block.allocate_query_channel(descriptors.do, descriptors.stats, DO_STAGES)
    DTYPE: gl.constexpr = descriptors.k.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [1] + descriptors.k.block_type.shape, descriptors.k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1] + descriptors.v.block_type.shape, descriptors.v.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([shapes.KEYS, shapes.BACKWARD_BLOCK_M], DTYPE)
    p_smem = gl.allocate_shared_memory(DTYPE, [1, shapes.KEYS, shapes.BACKWARD_BLOCK_M], DS_LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [1, shapes.KEYS, shapes.BACKWARD_BLOCK_M], DS_LAYOUT)
    ds_factor = p_smem.index(0)
    if HAS_CAP:
        ds_factor = gl.allocate_shared_memory(DTYPE, [shapes.KEYS, shapes.BACKWARD_BLOCK_M], DS_LAYOUT)
    k = channels.written_once(k_smem)
    v = channels.written_once(v_smem)
    p = channels.channel_of(p_smem, 1)
    ds = channels.written_once(ds_smem)
    k.init(FILLS=1, RELEASES=0)
    v.init(FILLS=1, RELEASES=0)
    p.init(FILLS=1, RELEASES=1)
    ds.init(FILLS=1, RELEASES=0)
    backward_block.init_query_channel(q)
    backward_block.init_query_channel(do)
    permits = None
    additions = None
    if IS_ORDERED:
        permits = channels.channel_of(None, STAGES=2)
        additions = channels.Channel(None, channels.allocate_barriers(2), empty=None, STAGES=2)
        permits.init(FILLS=1, RELEASES=1)
        additions.init(FILLS=shapes.CONSUMERS, RELEASES=0)
    return BuffersByColumns(k, v, p, ds_factor, ds, q, do, lse, delta, permits, additions)


@jit
def add_half(pointer, dq):
    """Add dq (BLOCK_M, 64) float32 to the accumulator from ``pointer`` on.

    The order of its numbers is that of the registers, see ``postprocess_kernel.panel_offsets``: a warp adds 256
    contiguous bytes, a thread 8 of them. With 16 bytes a thread ptxas makes every product synchronous (C7512).
    """
    rows = gl.arange(0, shapes.BACKWARD_BLOCK_M, gl.SliceLayout(1, dq.type.layout))
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
def fold_queries(WARPGROUP: gl.constexpr, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale):
    """Fold all query blocks of the group's heads into dk and dv (KEYS, BLOCK_D / 2) float32.

    dk, dv: this warpgroup's columns of all keys. dq_ptr: its columns of the accumulator's first block. The products in
    the order of their issue: dV, the next scores, half of dQ, dK, the rest of dQ, the next dP.
    """
    q_blocks, do_blocks, weights, ds_channel = buffers.q, buffers.do, buffers.p, buffers.ds
    BLOCK_D: gl.constexpr = buffers.k.buffer.shape[4]
    OWN: gl.constexpr = BLOCK_D // shapes.CONSUMERS
    # Columns of a product of dQ: registers suffice for half of this warpgroup's.
    HALF: gl.constexpr = OWN // 2
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shapes.BACKWARD_BLOCK_M, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    no_s = gl.zeros([shapes.KEYS, shapes.BACKWARD_BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([shapes.BACKWARD_BLOCK_M, HALF], gl.float32, DQ)
    p_tile = weights.tile(weights.at(0))
    ds_tile = ds_channel.tile(ds_channel.at(0))
    ds_t = ds_tile.permute((1, 0))
    if WARPGROUP == 0:
        key_rows = gl.arange(0, shapes.KEYS, gl.SliceLayout(1, S))
        columns = gl.arange(0, shapes.BACKWARD_BLOCK_M, gl.SliceLayout(0, S))
        token = backward_block.issue_product(backward_block.whole_tile(buffers.k), q_blocks, q_blocks.at(0), no_s)
    else:
        token = backward_block.issue_product(backward_block.whole_tile(buffers.v), do_blocks, do_blocks.at(0), no_s)
    block = 0
    group_head = 0
    if queries.IN_ORDER:
        block = queries.count - 1
        dq_ptr += block * (shapes.BACKWARD_BLOCK_M * BLOCK_D)
    for step in range(total):
        at_q = q_blocks.at(step)
        at_do = do_blocks.at(step)
        at_weights = weights.at(step)
        at_ds = ds_channel.at(step)
        q = q_blocks.tile(at_q).reshape((shapes.BACKWARD_BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        do = do_blocks.tile(at_do).reshape((shapes.BACKWARD_BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        x = warpgroup_mma_wait(0, deps=[token])
        if WARPGROUP == 0:
            lse = buffers.lse.index(at_q.slot).load(gl.SliceLayout(0, S))
            diagonal = masks.mask_offset(mask, sizes, keys, (queries.first + block) * shapes.BACKWARD_BLOCK_M)
            is_masked = masks.needs_mask(mask, diagonal, block, queries)
            CLAMP: gl.constexpr = queries.num_masked is not None
            p, s = backward_block.weigh(x, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP)
            weights.wait_empty(at_weights)
            p_tile.store(p.to(DTYPE))
            if scale.cap_scale is not None:
                # Times the tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
                buffers.ds_factor.store((p * (1.0 - s * s)).to(DTYPE))
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
            p = buffers.ds_factor.load(S).to(gl.float32)
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
        add_half(dq_ptr + shapes.BACKWARD_BLOCK_M * HALF, dq)
        if buffers.additions is not None:
            buffers.additions.fill(buffers.additions.at(step))
        if queries.IN_ORDER:
            group_head += 1
            dq_ptr += sizes.pitch * BLOCK_D
            if group_head == sizes.num_heads:
                group_head = 0
                block -= 1
                dq_ptr -= (sizes.num_heads.to(gl.int64) * sizes.pitch + shapes.BACKWARD_BLOCK_M) * BLOCK_D
        else:
            block += 1
            dq_ptr += shapes.BACKWARD_BLOCK_M * BLOCK_D
            dq_ptr += gl.where(
                block == queries.count, (sizes.pitch - queries.count * shapes.BACKWARD_BLOCK_M) * BLOCK_D, 0
            )
            block = gl.where(block == queries.count, 0, block)
    warpgroup_mma_wait(0, deps=[token])
    return dk, dv


@jit
def accumulate_by_columns(warpgroup, buffers, dq_ptr, gradients, keys, queries, sizes, mask, scale):
    """Compute half of the columns of dk and dv of the block's KEYS keys, and of their share of dQ.

    dq_ptr: the accumulator. mask.first_key None: all keys exist, or a window hides those that do not.
    """
    WARPGROUP: gl.constexpr = warpgroup.INDEX
    k_smem, v_smem = buffers.k.buffer, buffers.v.buffer
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    OWN: gl.constexpr = BLOCK_D // shapes.CONSUMERS
    DTYPE: gl.constexpr = k_smem.dtype
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if WARPGROUP == 0:
        mask = masks.with_own_keys(mask, keys.start_n // shapes.KEYS)
    dv = gl.zeros([shapes.KEYS, OWN], gl.float32, DKV)
    dk = gl.zeros([shapes.KEYS, OWN], gl.float32, DKV)
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    total = sizes.num_heads * queries.count
    if total > 0:
        head_q = (keys.batch * sizes.HQ + backward_block.first_query_head(keys, sizes)).to(gl.int64)
        row = head_q * sizes.pitch + queries.first * shapes.BACKWARD_BLOCK_M
        dq_ptr += row * BLOCK_D + WARPGROUP * shapes.BACKWARD_BLOCK_M * OWN
        dk, dv = fold_queries(WARPGROUP, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale)
    # Stage dv in V and dk in K, in half of each. The other warpgroup may still multiply with them: its last scores or
    # dP, which it discards, or dQ from its own half of K.
    stages = backward_epilogue.Stages(
        dk=reinterpret(k_smem, DTYPE, [shapes.CONSUMERS, shapes.KEYS, OWN], STAGE).index(WARPGROUP),
        dv=reinterpret(v_smem, DTYPE, [shapes.CONSUMERS, shapes.KEYS, OWN], STAGE).index(WARPGROUP),
    )
    dk, dv = column_parts.ColumnParts(left=dk, right=None), column_parts.ColumnParts(left=dv, right=None)
    backward_epilogue.store_or_pass_on(
        dk, dv, keys, sizes.NK, mask, scale, gradients, stages, 0, WARPGROUP, FIRST_COLUMN=WARPGROUP * OWN
    )
