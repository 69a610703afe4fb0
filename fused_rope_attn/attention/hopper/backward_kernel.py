"""sm_90 attention backward: one warp-specialised kernel of five products between a pre- and a post-process.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot.

The pre-process rotates q and k once and computes the row statistics; the main kernel contains no rotation but that of
dK in its epilogue; dQ is summed in float32 through the TMA (its order varies, and its last bits with it), and the
post-process turns it back. Everything between is transposed, keys by queries, so that P^T and dS^T feed the tensor
cores from the registers they are computed in. Only dS goes through shared memory, for dQ, which needs all keys.

A block of the main kernel owns BLOCK_N keys of one key head and goes through the query blocks of the group's heads.
Three kinds of warps meet only at barriers in shared memory:

- ``accumulate``, two warpgroups of 64 keys each: the products, with the scores and dP of the next query block issued
  before the dK of this one is waited for;
- ``load``, one warp: keeps the rings of Q and dO blocks full through the TMA;
- ``reduce``, one warp: adds the dQ blocks to the accumulator through the TMA.
"""

from fused_rope_attn.attention.hopper.backward_load import BLOCK_N, KEYS, load, query_blocks
from fused_rope_attn.attention.hopper.backward_tile import drop_keys, issue_product, store_dk, store_dv, weigh
from fused_rope_attn.attention.hopper.dq import BLOCK_M, CONSUMERS, reduce, stage_rows
from fused_rope_attn.attention.hopper.masks import needs_mask
from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, padded_row
from fused_rope_attn.kernels.masks import first_key
from fused_rope_attn.kernels.schedule import let_next_launch_start, scheduled_tile
from fused_rope_attn.kernels.softmax import LN2
from fused_rope_attn.runtime.triton_compat import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@jit
def fold_queries(MEMBER: gl.constexpr, dk, dv, k_tile, v_tile, ds_buffer, q_ring, do_ring, dq_ring, total, first,
                 masked, count, start_n, NQ, NK, left, right, qk_scale, cap_scale, BLOCK_D: gl.constexpr,
                 Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr):  # fmt: skip
    """Fold ``total`` > 0 query blocks, ``count`` of each head of the group from ``first`` on, into dk and dv.

    Those before number ``masked`` need a mask. With a window a block's place says what it needs, and ``masked`` is
    ``count`` where there may be keys that do not exist and that no window hides, None where there are none.

    dk, dv (KEYS, BLOCK_D) float32. The products in the order of their issue: dV, dQ, dK of this block, scores and dP of
    the next, which ``load`` provides after the last block too; early scores come before dQ.
    """
    # With 128 columns the registers do not hold the next scores beside dQ: ptxas then makes every product synchronous.
    EARLY_SCORES: gl.constexpr = BLOCK_D == 64
    q_smem, lse_smem, q_full, q_empty = q_ring
    do_smem, delta_smem, do_full, do_empty = do_ring
    dq_smem, dq_full, dq_empty = dq_ring
    ds_smem, ds_full = ds_buffer
    DTYPE: gl.constexpr = q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    # All rows of the block's dQ, half of the columns.
    HALF: gl.constexpr = BLOCK_D // CONSUMERS
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    no_s = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
    no_dq = gl.zeros([BLOCK_M, HALF], gl.float32, DQ)
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    k = k_tile.slice(MEMBER * KEYS, KEYS, dim=0)
    v = v_tile.slice(MEMBER * KEYS, KEYS, dim=0)
    k_columns = k_tile.slice(MEMBER * HALF, HALF, dim=1)

    s_token = issue_product(k, q_smem.index(0), q_full.index(0), 0, no_s)
    dp_token = issue_product(v, do_smem.index(0), do_full.index(0), 0, no_s)
    s = warpgroup_mma_wait(1, deps=[s_token])
    block = 0
    q_slot = 0
    q_phase = 0
    for step in range(total):
        do_slot = step % DO_STAGES
        next_slot = gl.where(q_slot == Q_STAGES - 1, 0, q_slot + 1)
        next_phase = gl.where(q_slot == Q_STAGES - 1, q_phase ^ 1, q_phase)
        start_m = (first + block) * BLOCK_M
        q = q_smem.index(q_slot).reshape((BLOCK_M, BLOCK_D))
        do = do_smem.index(do_slot).reshape((BLOCK_M, BLOCK_D))
        lse = lse_smem.index(q_slot).load(gl.SliceLayout(0, S))
        diagonal = start_m + NK - NQ - start_n - MEMBER * KEYS
        hidden = needs_mask(diagonal, block, masked, count, left, right, IS_CAUSAL)
        p, s = weigh(
            s, lse, hidden, masked is not None, keys, columns, diagonal, left, right, qk_scale, cap_scale, DTYPE,
            IS_CAUSAL,
        )  # fmt: skip
        p16 = gl.convert_layout(p.to(DTYPE), P)
        if cap_scale is not None:
            # The tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
            p *= 1.0 - s * s
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        dv_token = warpgroup_mma(p16, do, dv, is_async=True)
        delta = delta_smem.index(do_slot).load(gl.SliceLayout(0, S))
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        # Two buffers need no barrier for their release: that both warpgroups had stored dS of the last step, seen below
        # in that step, says that both had finished dQ of the step before it.
        ds_tile = ds_smem.index(step % 2)
        ds_tile.slice(MEMBER * KEYS, KEYS, dim=0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full)
        ds_operand = gl.convert_layout(ds, P)
        next_q = q_smem.index(next_slot)
        if EARLY_SCORES:
            s_token = issue_product(k, next_q, q_full.index(next_slot), next_phase, no_s)
        mbarrier.wait(ds_full, step & 1)
        # Without early scores dV is alone in flight, and this waits for nothing: the wait for dQ covers dV.
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        dq_token = warpgroup_mma(ds_tile.permute((1, 0)), k_columns, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)
        if EARLY_SCORES:
            dq, s = warpgroup_mma_wait(1, deps=[dq_token, s_token])
        else:
            dq = warpgroup_mma_wait(1, deps=[dq_token])
        mbarrier.arrive(do_empty.index(do_slot))
        mbarrier.wait(dq_empty.index(MEMBER), (step & 1) ^ 1)
        dq_smem.index(MEMBER).reshape((BLOCK_M, HALF)).store(stage_rows(dq))
        fence_async_shared()
        mbarrier.arrive(dq_full.index(MEMBER))
        if not EARLY_SCORES:
            s_token = issue_product(k, next_q, q_full.index(next_slot), next_phase, no_s)
        next_do_slot = (step + 1) % DO_STAGES
        next_do, next_do_phase = do_smem.index(next_do_slot), ((step + 1) // DO_STAGES) & 1
        dp_token = issue_product(v, next_do, do_full.index(next_do_slot), next_do_phase, no_s)
        # Only dP crosses the loop's edge in flight: ptxas makes every product synchronous where an accumulator in
        # flight meets one from elsewhere, as dk and dv would meet their zeros.
        if EARLY_SCORES:
            dk = warpgroup_mma_wait(1, deps=[dk_token])
        else:
            dk, s = warpgroup_mma_wait(1, deps=[dk_token, s_token])
        mbarrier.arrive(q_empty.index(q_slot))
        q_slot = next_slot
        q_phase = next_phase
        block += 1
        block = gl.where(block == count, 0, block)
    warpgroup_mma_wait(0, deps=[dp_token])
    return dk, dv


@jit
def accumulate(MEMBER: gl.constexpr, k_buffer, v_buffer, ds_buffer, q_ring, do_ring, dq_ring, dk_ptr, dv_ptr, cos_ptr,
               sin_ptr, dk_strides, dv_strides, cos_strides, sin_strides, batch, head, start_n, first, masked, count,
               GROUP_SIZE, NQ, NK, len_k, start_k, left, right, qk_scale, cap_scale, D: gl.constexpr,
               R: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
               INTERLEAVED: gl.constexpr, IS_CAUSAL: gl.constexpr, LONG: gl.constexpr):  # fmt: skip
    """dk and dv of keys [64 * MEMBER, 64 * MEMBER + 64) of the block, and half the columns of its dQ.

    Keys outside [start_k, len_k) do not exist, and get zeros; len_k None: NK, start_k None: from the first on, or a
    window hides those before.
    """
    if len_k is None:
        len_k = NK
    k_smem, k_full = k_buffer
    v_smem, v_full = v_buffer
    dq_smem, dq_full, dq_empty = dq_ring
    DTYPE: gl.constexpr = k_smem.dtype
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    k_tile = k_smem.reshape((BLOCK_N, BLOCK_D))
    v_tile = v_smem.reshape((BLOCK_N, BLOCK_D))
    dv = gl.zeros([KEYS, BLOCK_D], gl.float32, DKV)
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, DKV)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    total = GROUP_SIZE * count
    if total > 0:
        dk, dv = fold_queries(
            MEMBER, dk, dv, k_tile, v_tile, ds_buffer, q_ring, do_ring, dq_ring, total, first, masked, count,
            start_n, NQ, len_k, left, right, qk_scale, cap_scale, BLOCK_D, Q_STAGES, DO_STAGES, IS_CAUSAL,
        )  # fmt: skip

    start = start_n + MEMBER * KEYS
    rows_left = NK - start
    if start_k is not None:
        dk, dv = drop_keys(dk, dv, start, start_k, len_k)
    start64 = start.to(gl.int64)
    dv_rows = dv_ptr + batch.to(gl.int64) * dv_strides[0] + head.to(gl.int64) * dv_strides[1] + start64 * dv_strides[2]
    dk_rows = dk_ptr + batch.to(gl.int64) * dk_strides[0] + head.to(gl.int64) * dk_strides[1] + start64 * dk_strides[2]
    # dv goes through V, of which each warpgroup read its own rows only, and dk through the room for dQ once that has
    # been read.
    store_dv(dv_rows, dv.to(DTYPE), v_tile.slice(MEMBER * KEYS, KEYS, dim=0), rows_left, dv_strides, D, BLOCK_D, LONG)
    k_scale = qk_scale * LN2
    if cap_scale is not None:
        k_scale *= cap_scale
    mbarrier.wait(dq_empty.index(MEMBER), (total & 1) ^ 1)
    store_dk(
        dk_rows, dk * k_scale, dq_smem.index(MEMBER), cos_ptr, sin_ptr, cos_strides, sin_strides, batch, start, NK,
        dk_strides, 0, D, R, BLOCK_D, INTERLEAVED, LONG,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "section", "HQ", "HKV", "GROUP_SIZE", "NQ", "pitch", "NK", "stats_size", "left",
                        "num_sequences", "right"])  # fmt: skip
def backward_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dq_desc, progress_ptr, cos_ptr, sin_ptr, dk_ptr,
                    dv_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, dk_strides, dv_strides, cos_strides, sin_strides,
                    qk_scale, cap_scale, left, right, num_heads, HQ, HKV, GROUP_SIZE, NQ, pitch, NK, num_sequences,
                    stats_size, section, D: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr,
                    Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, INTERLEAVED: gl.constexpr,
                    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, TRIMMED: gl.constexpr, LONG: gl.constexpr,
                    PDL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, DS_LAYOUT: gl.constexpr):  # fmt: skip
    """dk, dv of BLOCK_N keys of one key head, and their share of dQ. Grid: (``count_tiles`` of the keys * B * HKV).

    q_desc, do_desc (B, HQ, NQ, D) and k_desc, v_desc (B, HKV, NK, D), q and k rotated; stats_desc the pre-process's
    (2 * B * HQ * pitch,) lse and delta; dq_desc (B, HQ, pitch, BLOCK_D) float32, zero before the first block. What a
    call does not use is None: kv_starts and kv_lens (B,) int32, cap_scale to right as in the portable kernels. TRIMMED:
    there are keys before the first query's window. Packed sequences, B = 1: q, stats and dq are padded to whole query
    blocks, as the pre-process does by BLOCK_M, so that what adds to dq in blocks stays within a sequence.

    progress_ptr: None, or how many programs of each key head are done (B * HKV,) and which query blocks of dQ are begun
    (B * HQ * pitch / BLOCK_M,), int32, zero before the first block; then dq_desc need not be zero. The last key block
    that sees a query block begins it, and first of all. The others wait for it, and were launched later: programs
    start in the order of their numbers, which CUB's scans rely on too.
    """
    OWNED: gl.constexpr = progress_ptr is not None
    if not OWNED:
        let_next_launch_start(PDL)
    DTYPE: gl.constexpr = k_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Instead of what a partition does not use: Triton 3.6 fails on arguments without a use.
    NONE: gl.constexpr = None
    # Whether there may be keys that do not exist, before or behind the others.
    RANGED: gl.constexpr = BOUNDED or TRIMMED
    # A causal window hides all keys that do not exist, but those before kv_starts.
    CLAMPED: gl.constexpr = left is None or not IS_CAUSAL or starts_ptr is not None
    PACKED: gl.constexpr = num_sequences is not None
    pid = gl.program_id(0)
    tiles = count_tiles(NK, num_sequences, BLOCK_N)
    tile, bh = scheduled_tile(pid, tiles, num_heads, section, LAST_TILE_FIRST=OWNED)
    batch = bh // HKV
    head = bh % HKV
    len_k = NK
    if PACKED:
        # A block behind its sequence's end sees no query, and writes nothing.
        EIGHTS: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        sequence, first_k, NK, tile = packed_tile(tile, cu_k_ptr, num_sequences, NK, BLOCK_N, EIGHTS)
        first_q, NQ = packed_partner(cu_q_ptr, sequence, num_sequences, NQ)
        len_k = NK
        dk_ptr += first_k.to(gl.int64) * dk_strides[2]
        dv_ptr += first_k.to(gl.int64) * dv_strides[2]
    rows_q = NQ if PACKED else pitch
    start_n = tile * BLOCK_N
    if lens_ptr is not None:
        len_k = existing_keys(lens_ptr, batch, NK)
    start_k = None
    if starts_ptr is not None or left is not None:
        start_k = first_key(starts_ptr, batch, len_k - NQ, len_k, left)
    first, masked, count, alive = query_blocks(start_n, NQ, rows_q, len_k, start_k, left, right, IS_CAUSAL, BOUNDED)
    owned = count
    if OWNED:
        if start_n + BLOCK_N < NK:
            after, _, _, _ = query_blocks(start_n + BLOCK_N, NQ, pitch, len_k, start_k, left, right, IS_CAUSAL, BOUNDED)
            owned = gl.minimum(count, after - first)
    if start_k is None:
        start_k = first * 0
    # What the TMA addresses, and what of it exists: rows of the packed tensors, and of what is padded.
    row_n, block_m, first_n, last_n, alive_m, shift, limit = start_n, first, start_k, len_k, alive, None, None
    if PACKED:
        place = padded_row(first_q, sequence, BLOCK_M)
        row_n, first_n, last_n = start_n + first_k, start_k + first_k, len_k + first_k
        block_m, alive_m, shift, limit = first + place // BLOCK_M, alive + place, first_q - place, first_q + NQ

    q_smem = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [DO_STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, 1, BLOCK_M, BLOCK_D // CONSUMERS], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], stats_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], stats_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(ds_full, count=CONSUMERS)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)

    if RANGED:
        raw = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(raw, count=1)

    # Buffers with the barriers that guard them, in the order in which every partition takes them apart.
    k_buffer = (k_smem, k_full)
    v_buffer = (v_smem, v_full)
    ds_buffer = (ds_smem, ds_full)
    q_ring = (q_smem, lse_smem, q_full, q_empty)
    do_ring = (do_smem, delta_smem, do_full, do_empty)
    dq_ring = (dq_smem, dq_full, dq_empty)
    gl.warp_specialize([
        (accumulate, (
            0, k_buffer, v_buffer, ds_buffer, q_ring, do_ring, dq_ring, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dk_strides,
            dv_strides, cos_strides, sin_strides, batch, head, start_n, first, masked if CLAMPED else NONE, count,
            GROUP_SIZE, NQ, NK, len_k if BOUNDED else NONE, start_k if BOUNDED else NONE, left, right, qk_scale,
            cap_scale, D, R, BLOCK_D, Q_STAGES, DO_STAGES, INTERLEAVED, IS_CAUSAL, LONG,
        )),
        (accumulate, (
            1, k_buffer, v_buffer, ds_buffer, q_ring, do_ring, dq_ring, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dk_strides,
            dv_strides, cos_strides, sin_strides, batch, head, start_n, first, masked if CLAMPED else NONE, count,
            GROUP_SIZE, NQ, NK, len_k if BOUNDED else NONE, start_k if BOUNDED else NONE, left, right, qk_scale,
            cap_scale, D, R, BLOCK_D, Q_STAGES, DO_STAGES, INTERLEAVED, IS_CAUSAL, LONG,
        )),
        (load, (
            q_desc, k_desc, v_desc, do_desc, stats_desc, k_buffer, v_buffer, q_ring, do_ring, raw if RANGED else NONE,
            batch, head, row_n, block_m, count, alive_m if BOUNDED else NONE, first_n if RANGED else NONE,
            last_n if RANGED else NONE, shift, limit, GROUP_SIZE, HQ, pitch, stats_size, Q_STAGES, DO_STAGES, OWNED,
            PDL,
        )),
        (reduce, (
            dq_desc, dq_ring, progress_ptr, batch, head, bh if OWNED else NONE, num_heads if OWNED else NONE, block_m,
            owned if OWNED else NONE, count, GROUP_SIZE, pitch if OWNED else NONE, BLOCK_D, PDL,
        )),
    ], [4, 1, 1], [CONSUMER_REGISTERS, 24, 24])  # fmt: skip
