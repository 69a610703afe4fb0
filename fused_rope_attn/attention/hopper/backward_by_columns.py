"""The multiplying warpgroups of the sm_90 backward for head dims 129 to 256: each owns half of the block's columns.

dK and dV of 64 keys are all that two warpgroups' registers hold, and so a block is shared by columns: each warpgroup
owns half of the columns of dK, dV and dQ. The scores are the first one's and dP is the second's, whole: a product of 64
by 64 takes as long to read from shared memory as to compute, and two halves of it would read half as much again. P
passes through shared memory, in the 16 bits in which dV reads it too, and dS comes back.

The warpgroups alternate: while the second makes dS of a block, the first has dV of it and the scores of the next in
flight; while the first is at the next softmax, the second's dQ and the next dP are.

dQ goes to the accumulator from registers, 8 bytes of a thread and 256 of a warp at a time, in the order in which the
threads hold it: through shared memory, as narrower heads do it, it would be a third of all that passes there.
"""

from fused_rope_attn.attention.hopper.backward_block import (
    Buffer,
    QueryRing,
    allocate_barrier,
    allocate_query_ring,
    init_query_ring,
    whole_tile,
)
from fused_rope_attn.attention.hopper.backward_masks import needs_mask
from fused_rope_attn.attention.hopper.backward_tile import issue_block_product, store_gradients, weigh
from fused_rope_attn.attention.hopper.columns import Pieces
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, KEYS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@record
class Weights:
    """P of a block in shared memory, and what dS is made of: P, or with a softcap P times the tanh's derivative.

    Both are (KEYS, BLOCK_M) 16-bit, and may be the same tile. The first warpgroup writes them and the second makes them
    ``empty`` again.
    """

    p: gl.shared_memory_descriptor
    ds_factor: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@record
class Buffers:
    """Shared memory that these warpgroups use.

    k, v: (1, 1, 1, KEYS, BLOCK_D) 16-bit. ds: (KEYS, BLOCK_M) 16-bit, which the second warpgroup fills.
    """

    k: Buffer
    v: Buffer
    weights: Weights
    ds: Buffer
    q: QueryRing
    do: QueryRing


@jit
def allocate_buffers(operands, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, DS_LAYOUT: gl.constexpr,
                     HAS_CAP: gl.constexpr):  # fmt: skip
    """``Buffers``, their barriers initialised. DS_LAYOUT: of a tile of P or dS; HAS_CAP: whether there is a softcap."""
    q = allocate_query_ring(operands.q, operands.stats, Q_STAGES)
    do = allocate_query_ring(operands.do, operands.stats, DO_STAGES)
    DTYPE: gl.constexpr = operands.k.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [1] + operands.k.block_type.shape, operands.k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1] + operands.v.block_type.shape, operands.v.layout)
    p = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_M], DS_LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_M], DS_LAYOUT)
    ds_factor = p
    if HAS_CAP:
        ds_factor = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_M], DS_LAYOUT)
    k = Buffer(smem=k_smem, full=allocate_barrier(), empty=None)
    v = Buffer(smem=v_smem, full=allocate_barrier(), empty=None)
    weights = Weights(p=p, ds_factor=ds_factor, full=allocate_barrier(), empty=allocate_barrier())
    ds = Buffer(smem=ds_smem, full=allocate_barrier(), empty=None)
    mbarrier.init(k.full, count=1)
    mbarrier.init(v.full, count=1)
    mbarrier.init(weights.full, count=1)
    mbarrier.init(weights.empty, count=1)
    mbarrier.init(ds.full, count=1)
    init_query_ring(q)
    init_query_ring(do)
    return Buffers(k=k, v=v, weights=weights, ds=ds, q=q, do=do)


@jit
def add_half(pointer, dq):
    """Add dq (BLOCK_M, 64) float32 to the accumulator, where ``pointer`` is the first of its numbers.

    Their order is that of the registers, see ``postprocess_kernel.panel_offsets``: a warp adds 256 bytes that lie
    together, a thread 8 of them. With 16 of a thread ptxas makes every product synchronous (C7512).
    """
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, dq.type.layout))
    columns = gl.arange(0, dq.shape[1], gl.SliceLayout(0, dq.type.layout))
    # The thread's own part first, so that the rest are constants and not registers, as in ``hide_pairs``.
    thread = ((rows // 16) * 128 + (rows % 8) * 8)[:, None] + (columns & 6)[None, :]
    others = ((rows & 8) * 8)[:, None] + ((columns // 8) * 512 + (columns & 1))[None, :]
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v2.f32 [$4], {$8, $9}; red.relaxed.gpu.global.add.v2.f32 [$6], {$10, $11}; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [(pointer + thread + others).to(gl.uint64, bitcast=True), dq],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@jit
def fold_queries(WARPGROUP: gl.constexpr, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale):
    """As for narrower heads; dk, dv (KEYS, BLOCK_D / 2) float32, this warpgroup's columns of all keys.

    dq_ptr: its columns of the accumulator's first block. The products in the order of their issue: dV, the next scores,
    half of dQ, dK, the rest of dQ, the next dP.
    """
    q_ring, do_ring, weights = buffers.q.blocks, buffers.do.blocks, buffers.weights
    k_smem, v_smem, ds_smem = buffers.k.smem, buffers.v.smem, buffers.ds.smem
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    OWN: gl.constexpr = BLOCK_D // CONSUMERS
    # Half of this warpgroup's columns, for which there are registers beside the rest.
    HALF: gl.constexpr = OWN // 2
    DTYPE: gl.constexpr = q_ring.smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    no_s = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([BLOCK_M, HALF], gl.float32, DQ)
    ds_t = ds_smem.permute((1, 0))
    if WARPGROUP == 0:
        key_rows = gl.arange(0, KEYS, gl.SliceLayout(1, S))
        columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
        token = issue_block_product(whole_tile(k_smem), q_ring, 0, 0, no_s)
    else:
        token = issue_block_product(whole_tile(v_smem), do_ring, 0, 0, no_s)
    block = 0
    for step in range(total):
        q_slot = q_ring.slot(step)
        do_slot = do_ring.slot(step)
        q = q_ring.smem.index(q_slot).reshape((BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        do = do_ring.smem.index(do_slot).reshape((BLOCK_M, BLOCK_D)).slice(WARPGROUP * OWN, OWN, dim=1)
        x = warpgroup_mma_wait(0, deps=[token])
        if WARPGROUP == 0:
            lse = buffers.q.stats.index(q_slot).load(gl.SliceLayout(0, S))
            diagonal = (queries.first + block) * BLOCK_M + mask.num_keys - sizes.NQ - keys.start_n
            is_masked = needs_mask(mask, diagonal, block, queries)
            p, s = weigh(
                x, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE,
                CLAMP=queries.num_masked is not None,
            )  # fmt: skip
            mbarrier.wait(weights.empty, (step & 1) ^ 1)
            weights.p.store(p.to(DTYPE))
            if scale.cap_scale is not None:
                # Times the tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
                weights.ds_factor.store((p * (1.0 - s * s)).to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(weights.full)
            do_ring.wait_full(step)
            mbarrier.wait(weights.full, step & 1)
            dv_token = warpgroup_mma(weights.p, do, dv, is_async=True)
            next_slot = q_ring.slot(step + 1)
            token = issue_block_product(whole_tile(k_smem), q_ring, next_slot, step + 1, no_s)
        else:
            delta = buffers.do.stats.index(do_slot).load(gl.SliceLayout(0, S))
            mbarrier.wait(weights.full, step & 1)
            p = weights.ds_factor.load(S).to(gl.float32)
            dv_token = warpgroup_mma(weights.p, do, dv, is_async=True)
            # That P is there says that the first warpgroup has done with the last dS.
            ds_smem.store((p * (x - delta[None, :])).to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(buffers.ds.full)
            q_ring.wait_full(step)
        mbarrier.wait(buffers.ds.full, step & 1)
        k_columns = whole_tile(k_smem).slice(WARPGROUP * OWN, HALF, dim=1)
        dq_token = warpgroup_mma(ds_t, k_columns, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_smem, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        if WARPGROUP == 1:
            mbarrier.arrive(weights.empty)
        do_ring.release_operands(step)
        add_half(dq_ptr, dq)
        # Behind it the other half can take the same registers. Triton 3.8 and 3.9 put none there themselves, and then
        # they do not suffice (C7512).
        barrier()
        k_columns = whole_tile(k_smem).slice(WARPGROUP * OWN + HALF, HALF, dim=1)
        dq_token = warpgroup_mma(ds_t, k_columns, no_dq, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk_token])
        q_ring.release_operands(step)
        if WARPGROUP == 0:
            dq = warpgroup_mma_wait(0, deps=[dq_token])
        else:
            next_slot = do_ring.slot(step + 1)
            token = issue_block_product(whole_tile(v_smem), do_ring, next_slot, step + 1, no_s)
            dq = warpgroup_mma_wait(1, deps=[dq_token])
        add_half(dq_ptr + BLOCK_M * HALF, dq)
        block += 1
        dq_ptr += BLOCK_M * BLOCK_D
        dq_ptr += gl.where(block == queries.count, (sizes.pitch - queries.count * BLOCK_M) * BLOCK_D, 0)
        block = gl.where(block == queries.count, 0, block)
    warpgroup_mma_wait(0, deps=[token])
    return dk, dv


@jit
def accumulate_by_columns(WARPGROUP: gl.constexpr, buffers, dq_ptr, gradients, keys, queries, sizes, mask, scale):
    """Half of the columns of dk and dv of the block's KEYS keys, and of their share of dQ.

    dq_ptr: the accumulator. mask.first_key None: there are no keys that do not exist, or a window hides them all. The
    second warpgroup makes no scores, and so it needs neither num_masked, nor NQ, nor the rest of the mask.
    """
    k_smem, v_smem = buffers.k.smem, buffers.v.smem
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    OWN: gl.constexpr = BLOCK_D // CONSUMERS
    DTYPE: gl.constexpr = k_smem.dtype
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dv = gl.zeros([KEYS, OWN], gl.float32, DKV)
    dk = gl.zeros([KEYS, OWN], gl.float32, DKV)
    mbarrier.wait(buffers.k.full, 0)
    mbarrier.wait(buffers.v.full, 0)
    total = sizes.GROUP_SIZE * queries.count
    if total > 0:
        head_q = (keys.batch * sizes.HQ + keys.head * sizes.GROUP_SIZE).to(gl.int64)
        row = head_q * sizes.pitch + queries.first * BLOCK_M
        dq_ptr += row * BLOCK_D + WARPGROUP * BLOCK_M * OWN
        dk, dv = fold_queries(WARPGROUP, dk, dv, buffers, dq_ptr, total, keys, queries, sizes, mask, scale)
    # Through V and K, half of each. The other warpgroup may be at its last products of them, which are dropped, or at
    # dQ from its own half of K.
    store_gradients(
        Pieces(left=dk, right=None), Pieces(left=dv, right=None), keys, sizes.NK, mask, scale, gradients,
        dv_stage=reinterpret(v_smem, DTYPE, [CONSUMERS, KEYS, OWN], STAGE).index(WARPGROUP),
        dk_room=reinterpret(k_smem, DTYPE, [CONSUMERS, KEYS, OWN], STAGE).index(WARPGROUP),
        dk_room_empty=None, dk_room_uses=0, WARPGROUP=WARPGROUP, FIRST_COLUMN=WARPGROUP * OWN,
    )  # fmt: skip
