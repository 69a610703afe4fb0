"""The main kernel of the sm_90 backward for head dims 129 to 256; what comes before and behind is ``backward``'s.

dK and dV of 64 keys are all that two warpgroups' registers hold, and so a block is shared by columns: each warpgroup
owns half of the columns of dK, dV and dQ. The scores are the first one's and dP is the second's, whole: a product of 64
by 64 takes as long to read from shared memory as to compute, and two halves of it would read half as much again. P
passes through shared memory, in the 16 bits in which dV reads it too, and dS comes back.

The warpgroups work in turns: while the second makes dS of a block, the first has dV of it and the scores of the next in
flight; while the first is at the next softmax, the second's dQ and the next dP are.

dQ goes to the accumulator from registers, 8 bytes of a thread and 256 of a warp at a time, in the order in which the
threads hold it: through shared memory, as ``backward`` does it, it would be a third of all that passes there.
"""

from fused_rope_attn.attention.hopper.backward_load import load, query_blocks
from fused_rope_attn.attention.hopper.backward_tile import KEYS, drop_keys, issue_product, store_dk, store_dv, weigh
from fused_rope_attn.attention.hopper.dq import BLOCK_M, CONSUMERS
from fused_rope_attn.attention.hopper.masks import needs_mask
from fused_rope_attn.kernels.lengths import existing_keys
from fused_rope_attn.kernels.masks import first_key
from fused_rope_attn.kernels.schedule import let_next_launch_start, scheduled_tile
from fused_rope_attn.kernels.softmax import LN2
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

# Key rows of one block.
BLOCK_N = KEYS


@jit
def whole(smem, BLOCK_D: gl.constexpr):
    """K or V (1, 1, 1, BLOCK_N, BLOCK_D) as a tile, whose address the compiler must not know from the last step.

    Otherwise ptxas keeps the 16 descriptors of a product of all its columns in 32 registers around the loop, which it
    then lacks, and makes every product synchronous (C7512).
    """
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return smem.index(zero).reshape((BLOCK_N, BLOCK_D))


@jit
def add_half(pointer, dq):
    """Add dq (BLOCK_M, 64) float32 to the accumulator, where ``pointer`` is the first of its numbers.

    Their order is that of the registers, see ``dq.tiled_words``: a warp adds 256 bytes that lie together, a thread 8 of
    them. With 16 of a thread ptxas makes every product synchronous (C7512).
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
def fold_queries(MEMBER: gl.constexpr, dk, dv, k_smem, v_smem, p_buffer, ds_buffer, q_ring, do_ring, dq_ptr, pitch,
                 total, first, masked, count, start_n, NQ, NK, left, right, qk_scale, cap_scale,
                 BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
                 IS_CAUSAL: gl.constexpr):  # fmt: skip
    """As ``backward.fold_queries``; dk, dv (BLOCK_N, BLOCK_D / 2) float32, this warpgroup's columns of all keys.

    dq_ptr: its columns of the accumulator's first block. The products in the order of their issue: dV, the next scores,
    half of dQ, dK, the rest of dQ, the next dP.
    """
    OWN: gl.constexpr = BLOCK_D // CONSUMERS
    # Half of this warpgroup's columns, for which there are registers beside the rest.
    HALF: gl.constexpr = OWN // 2
    q_smem, lse_smem, q_full, q_empty = q_ring
    do_smem, delta_smem, do_full, do_empty = do_ring
    p_smem, weights_smem, p_full, p_empty = p_buffer
    ds_smem, ds_full = ds_buffer
    DTYPE: gl.constexpr = q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    no_s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([BLOCK_M, HALF], gl.float32, DQ)
    ds_t = ds_smem.permute((1, 0))
    k_tile = k_smem.index(0).reshape((BLOCK_N, BLOCK_D))
    if MEMBER == 0:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, S))
        columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
        token = issue_product(whole(k_smem, BLOCK_D), q_smem.index(0), q_full.index(0), 0, no_s)
    else:
        token = issue_product(whole(v_smem, BLOCK_D), do_smem.index(0), do_full.index(0), 0, no_s)
    block = 0
    for step in range(total):
        q_slot = step % Q_STAGES
        do_slot = step % DO_STAGES
        q = q_smem.index(q_slot).reshape((BLOCK_M, BLOCK_D)).slice(MEMBER * OWN, OWN, dim=1)
        do = do_smem.index(do_slot).reshape((BLOCK_M, BLOCK_D)).slice(MEMBER * OWN, OWN, dim=1)
        x = warpgroup_mma_wait(0, deps=[token])
        if MEMBER == 0:
            lse = lse_smem.index(q_slot).load(gl.SliceLayout(0, S))
            diagonal = (first + block) * BLOCK_M + NK - NQ - start_n
            hidden = needs_mask(diagonal, block, masked, count, left, right, IS_CAUSAL)
            p, s = weigh(
                x, lse, hidden, masked is not None, keys, columns, diagonal, left, right, qk_scale, cap_scale, DTYPE,
                IS_CAUSAL,
            )  # fmt: skip
            mbarrier.wait(p_empty, (step & 1) ^ 1)
            p_smem.store(p.to(DTYPE))
            if cap_scale is not None:
                # Times the tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
                weights_smem.store((p * (1.0 - s * s)).to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(p_full)
            mbarrier.wait(do_full.index(do_slot), (step // DO_STAGES) & 1)
            mbarrier.wait(p_full, step & 1)
            dv_token = warpgroup_mma(p_smem, do, dv, is_async=True)
            next_slot = (step + 1) % Q_STAGES
            token = issue_product(
                whole(k_smem, BLOCK_D), q_smem.index(next_slot), q_full.index(next_slot), ((step + 1) // Q_STAGES) & 1,
                no_s,
            )  # fmt: skip
        else:
            delta = delta_smem.index(do_slot).load(gl.SliceLayout(0, S))
            mbarrier.wait(p_full, step & 1)
            p = weights_smem.load(S).to(gl.float32)
            dv_token = warpgroup_mma(p_smem, do, dv, is_async=True)
            # That P is there says that the first warpgroup has done with the last dS.
            ds_smem.store((p * (x - delta[None, :])).to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(ds_full)
            mbarrier.wait(q_full.index(q_slot), (step // Q_STAGES) & 1)
        mbarrier.wait(ds_full, step & 1)
        dq_token = warpgroup_mma(ds_t, k_tile.slice(MEMBER * OWN, HALF, dim=1), no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_smem, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        if MEMBER == 1:
            mbarrier.arrive(p_empty)
        mbarrier.arrive(do_empty.index(do_slot))
        add_half(dq_ptr, dq)
        # Behind it the other half can take the same registers. Triton 3.8 and 3.9 put none there themselves, and then
        # they do not suffice (C7512).
        barrier()
        k_columns = k_tile.slice(MEMBER * OWN + HALF, HALF, dim=1)
        dq_token = warpgroup_mma(ds_t, k_columns, no_dq, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk_token])
        mbarrier.arrive(q_empty.index(q_slot))
        if MEMBER == 0:
            dq = warpgroup_mma_wait(0, deps=[dq_token])
        else:
            next_slot = (step + 1) % DO_STAGES
            token = issue_product(
                whole(v_smem, BLOCK_D), do_smem.index(next_slot), do_full.index(next_slot),
                ((step + 1) // DO_STAGES) & 1, no_s,
            )  # fmt: skip
            dq = warpgroup_mma_wait(1, deps=[dq_token])
        add_half(dq_ptr + BLOCK_M * HALF, dq)
        block += 1
        dq_ptr += BLOCK_M * BLOCK_D
        dq_ptr += gl.where(block == count, (pitch - count * BLOCK_M) * BLOCK_D, 0)
        block = gl.where(block == count, 0, block)
    warpgroup_mma_wait(0, deps=[token])
    return dk, dv


@jit
def accumulate(MEMBER: gl.constexpr, k_buffer, v_buffer, p_buffer, ds_buffer, q_ring, do_ring, dq_ptr, dk_ptr, dv_ptr,
               cos_ptr, sin_ptr, dk_strides, dv_strides, cos_strides, sin_strides, batch, head, start_n, first, masked,
               count, HQ, GROUP_SIZE, NQ, pitch, NK, len_k, start_k, left, right, qk_scale, cap_scale, D: gl.constexpr,
               R: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
               INTERLEAVED: gl.constexpr, IS_CAUSAL: gl.constexpr, LONG: gl.constexpr):  # fmt: skip
    """Half of the columns of dk, dv and dQ of the block; len_k and start_k as in ``backward.accumulate``."""
    if len_k is None:
        len_k = NK
    OWN: gl.constexpr = BLOCK_D // CONSUMERS
    k_smem, k_full = k_buffer
    v_smem, v_full = v_buffer
    DTYPE: gl.constexpr = k_smem.dtype
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dv = gl.zeros([BLOCK_N, OWN], gl.float32, DKV)
    dk = gl.zeros([BLOCK_N, OWN], gl.float32, DKV)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    total = GROUP_SIZE * count
    if total > 0:
        row = (batch * HQ + head * GROUP_SIZE).to(gl.int64) * pitch + first * BLOCK_M
        dq_ptr += row * BLOCK_D + MEMBER * BLOCK_M * OWN
        dk, dv = fold_queries(
            MEMBER, dk, dv, k_smem, v_smem, p_buffer, ds_buffer, q_ring, do_ring, dq_ptr, pitch, total, first, masked,
            count, start_n, NQ, len_k, left, right, qk_scale, cap_scale, BLOCK_D, Q_STAGES, DO_STAGES, IS_CAUSAL,
        )  # fmt: skip
    rows_left = NK - start_n
    if start_k is not None:
        dk, dv = drop_keys(dk, dv, start_n, start_k, len_k)
    start64 = start_n.to(gl.int64)
    dv_rows = dv_ptr + batch.to(gl.int64) * dv_strides[0] + head.to(gl.int64) * dv_strides[1] + start64 * dv_strides[2]
    dk_rows = dk_ptr + batch.to(gl.int64) * dk_strides[0] + head.to(gl.int64) * dk_strides[1] + start64 * dk_strides[2]
    # Through V and K, half of each. The other warpgroup may be at its last products of them, which are dropped, or at
    # dQ from its own half of K.
    stage = reinterpret(v_smem, DTYPE, [CONSUMERS, BLOCK_N, OWN], STAGE).index(MEMBER)
    dv_rows += MEMBER * OWN * dv_strides[3]
    store_dv(dv_rows, dv.to(DTYPE), stage, rows_left, dv_strides, D - MEMBER * OWN, OWN, LONG)
    k_scale = qk_scale * LN2
    if cap_scale is not None:
        k_scale *= cap_scale
    halves = reinterpret(k_smem, DTYPE, [CONSUMERS, BLOCK_N, OWN], STAGE)
    store_dk(
        dk_rows, dk * k_scale, halves.index(MEMBER), cos_ptr, sin_ptr, cos_strides, sin_strides, batch, start_n, NK,
        dk_strides, MEMBER * OWN // 2, D, R, OWN, INTERLEAVED, LONG,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "section", "HQ", "HKV", "GROUP_SIZE", "NQ", "pitch", "NK", "stats_size", "left",
                        "num_sequences", "right"])  # fmt: skip
def backward_wide_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dq_ptr, progress_ptr, cos_ptr, sin_ptr, dk_ptr,
                         dv_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, dk_strides, dv_strides, cos_strides,
                         sin_strides, qk_scale, cap_scale, left, right, num_heads, HQ, HKV, GROUP_SIZE, NQ, pitch, NK,
                         num_sequences, stats_size, section,
                         D: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr,
                         DO_STAGES: gl.constexpr, INTERLEAVED: gl.constexpr, IS_CAUSAL: gl.constexpr,
                         BOUNDED: gl.constexpr, TRIMMED: gl.constexpr, LONG: gl.constexpr, PDL: gl.constexpr,
                         CONSUMER_REGISTERS: gl.constexpr, DS_LAYOUT: gl.constexpr):  # fmt: skip
    """As ``backward.backward_kernel``, for blocks of BLOCK_N keys.

    dq_ptr (B, HQ, pitch, BLOCK_D) float32, zero before the first block, each BLOCK_M rows in the order of ``add_half``.
    progress_ptr, cu_q_ptr, cu_k_ptr and num_sequences are None: there are no packed sequences, and dQ is added to.
    """
    let_next_launch_start(PDL)
    DTYPE: gl.constexpr = k_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NONE: gl.constexpr = None
    RANGED: gl.constexpr = BOUNDED or TRIMMED
    CLAMPED: gl.constexpr = left is None or not IS_CAUSAL or starts_ptr is not None
    tiles = (NK + BLOCK_N - 1) // BLOCK_N
    tile, bh = scheduled_tile(gl.program_id(0), tiles, num_heads, section, LAST_TILE_FIRST=False)
    batch = bh // HKV
    head = bh % HKV
    start_n = tile * BLOCK_N
    len_k = NK
    if lens_ptr is not None:
        len_k = existing_keys(lens_ptr, batch, NK)
    start_k = None
    if starts_ptr is not None or left is not None:
        start_k = first_key(starts_ptr, batch, len_k - NQ, len_k, left)
    first, masked, count, alive = query_blocks(
        start_n, NQ, pitch, len_k, start_k, left, right, IS_CAUSAL, BOUNDED, BLOCK_N
    )  # fmt: skip
    if start_k is None:
        start_k = first * 0

    q_smem = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [DO_STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    # What dS is made of: P, or with a softcap P times a derivative.
    weights_smem = p_smem
    if cap_scale is not None:
        weights_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], stats_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], stats_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    mbarrier.init(ds_full, count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=CONSUMERS)
    if RANGED:
        raw = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(raw, count=1)

    k_buffer = (k_smem, k_full)
    v_buffer = (v_smem, v_full)
    k_tile = (k_smem.index(0), k_full)
    v_tile = (v_smem.index(0), v_full)
    p_buffer = (p_smem, weights_smem, p_full, p_empty)
    ds_buffer = (ds_smem, ds_full)
    q_ring = (q_smem, lse_smem, q_full, q_empty)
    do_ring = (do_smem, delta_smem, do_full, do_empty)
    gl.warp_specialize([
        (accumulate, (
            0, k_buffer, v_buffer, p_buffer, ds_buffer, q_ring, do_ring, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
            dk_strides, dv_strides, cos_strides, sin_strides, batch, head, start_n, first, masked if CLAMPED else NONE,
            count, HQ, GROUP_SIZE, NQ, pitch, NK, len_k if BOUNDED else NONE, start_k if BOUNDED else NONE, left, right,
            qk_scale, cap_scale, D, R, BLOCK_D, Q_STAGES, DO_STAGES, INTERLEAVED, IS_CAUSAL, LONG,
        )),
        (accumulate, (
            1, k_buffer, v_buffer, p_buffer, ds_buffer, q_ring, do_ring, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
            dk_strides, dv_strides, cos_strides, sin_strides, batch, head, start_n, first, NONE, count, HQ, GROUP_SIZE,
            NONE, pitch, NK, len_k if BOUNDED else NONE, start_k if BOUNDED else NONE, NONE, NONE, qk_scale, cap_scale,
            D, R, BLOCK_D, Q_STAGES, DO_STAGES, INTERLEAVED, IS_CAUSAL, LONG,
        )),
        (load, (
            q_desc, k_desc, v_desc, do_desc, stats_desc, k_tile, v_tile, q_ring, do_ring, raw if RANGED else NONE,
            batch, head, start_n, first, count, alive if BOUNDED else NONE, start_k if RANGED else NONE,
            len_k if RANGED else NONE, NONE, NONE, GROUP_SIZE, HQ, pitch, stats_size, Q_STAGES, DO_STAGES, False, PDL,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
