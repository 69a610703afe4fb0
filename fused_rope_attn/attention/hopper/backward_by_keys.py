"""The multiplying warpgroups of the sm_90 backward up to head dim 128: each owns half of the block's keys.

Everything is transposed, keys by queries, so that P^T and dS^T feed the tensor cores from the registers they are
computed in. Only dS goes through shared memory, for dQ, which needs all keys; of dQ each warpgroup owns half of the
columns. dS lies there as queries by keys, so that no product reads a transposed first operand. dQ is computed one step
late: by then the other warpgroup's half of dS has long been there, and the two need not move in step.
"""

from triton import constexpr_function

from fused_rope_attn.attention.hopper.backward_block import (
    Buffer,
    KeyBlock,
    QueryRing,
    allocate_barrier,
    allocate_query_ring,
    init_query_ring,
    whole_tile,
)
from fused_rope_attn.attention.hopper.backward_masks import needs_mask
from fused_rope_attn.attention.hopper.backward_tile import issue_product, store_gradients, weigh
from fused_rope_attn.attention.hopper.barriers import Ring, allocate_barriers, arrive_by_threads
from fused_rope_attn.attention.hopper.columns import (
    issue_by_columns,
    piece_zeros,
    right_columns,
    wait_for_pieces,
    wait_for_pieces_and,
    zero_pieces,
)
from fused_rope_attn.attention.hopper.dq import stage_rows
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_N as BLOCK_N
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, KEYS, WARPGROUP_THREADS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import (
    COPIES_OPERANDS,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Slots for dS: of the step before, which the products of dQ read, and of this one.
DS_STAGES = gl.constexpr(2)


@record
class Buffers:
    """Shared memory that these warpgroups use.

    k, v: (1, 1, 1, BLOCK_N, BLOCK_D) 16-bit. ds: slots of (BLOCK_M, BLOCK_N) 16-bit, full when both warpgroups have
    written their keys, empty when the products of both have read it; the slot of step s holds dS of step s - 1, and
    zeros in step 0. dq: (CONSUMERS, 1, 1, BLOCK_M, BLOCK_D / CONSUMERS) float32, a part and a pair of mbarriers for
    each warpgroup.
    """

    k: Buffer
    v: Buffer
    ds: Ring
    q: QueryRing
    do: QueryRing
    dq: Buffer


@jit
def allocate_buffers(operands, dq_desc, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, DS_LAYOUT: gl.constexpr):
    """``Buffers``, their barriers initialised. DS_LAYOUT: of a tile of dS in shared memory."""
    q = allocate_query_ring(operands.q, operands.stats, Q_STAGES)
    do = allocate_query_ring(operands.do, operands.stats, DO_STAGES)
    k_smem = gl.allocate_shared_memory(operands.k.dtype, [1] + operands.k.block_type.shape, operands.k.layout)
    v_smem = gl.allocate_shared_memory(operands.v.dtype, [1] + operands.v.block_type.shape, operands.v.layout)
    ds_smem = gl.allocate_shared_memory(operands.k.dtype, [DS_STAGES, BLOCK_M, BLOCK_N], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [CONSUMERS] + dq_desc.block_type.shape, dq_desc.layout)
    k = Buffer(smem=k_smem, full=allocate_barrier(), empty=None)
    v = Buffer(smem=v_smem, full=allocate_barrier(), empty=None)
    full, empty = allocate_barriers(DS_STAGES), allocate_barriers(DS_STAGES)
    ds = Ring(smem=ds_smem, full=full, empty=empty, STAGES=DS_STAGES)
    dq = Buffer(smem=dq_smem, full=allocate_barriers(CONSUMERS), empty=allocate_barriers(CONSUMERS))
    mbarrier.init(k.full, count=1)
    mbarrier.init(v.full, count=1)
    for slot in gl.static_range(DS_STAGES):
        ds.init_slot(slot, FILLS=CONSUMERS, RELEASES=CONSUMERS * WARPGROUP_THREADS)
    init_query_ring(q)
    init_query_ring(do)
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(dq.full.index(part), count=1)
        mbarrier.init(dq.empty.index(part), count=1)
    return Buffers(k=k, v=v, ds=ds, q=q, do=do, dq=dq)


@jit
def own_rows(tile, WARPGROUP: gl.constexpr):
    """The rows of K or V that a warpgroup owns, (KEYS, BLOCK_D)."""
    return whole_tile(tile.smem).slice(WARPGROUP * KEYS, KEYS, dim=0)


@jit
def own_ds(tile, WARPGROUP: gl.constexpr):
    """The part of a tile of dS in shared memory that a warpgroup writes, (KEYS, BLOCK_M)."""
    return tile.slice(WARPGROUP * KEYS, KEYS, dim=1).permute((1, 0))


@jit
def give_ds(WARPGROUP: gl.constexpr, ring, ds, step):
    """Put a warpgroup's ds (KEYS, BLOCK_M) of the step before ``step`` where the product of dQ in ``step`` reads it."""
    slot = ring.slot(step)
    own_ds(ring.smem.index(slot), WARPGROUP).store(ds)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot))


@jit
def no_ds(DTYPE: gl.constexpr):
    """Zeros (KEYS, BLOCK_M), whose store fills rows of shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    return gl.zeros([KEYS, BLOCK_M], DTYPE, LAYOUT)


@jit
def issue_dq(WARPGROUP: gl.constexpr, buffers, step, nothing):
    """Begin the product of dQ in ``step``, of the dS of the step before, which is there: a warpgroup's columns, as many
    as ``nothing``, zeros (BLOCK_M, columns), has."""
    ds_tile = buffers.ds.smem.index(buffers.ds.slot(step))
    k_columns = own_columns(buffers.k, WARPGROUP, nothing.shape[1])
    return warpgroup_mma(ds_tile, k_columns, nothing, use_acc=False, is_async=True)


@jit
def issue_scores(held, tile, b, b_full, phase, nothing, WARPGROUP: gl.constexpr, RIGHT: gl.constexpr):
    """``issue_product`` of ``own_rows``, or of those ``held`` in registers, which is None where they are not."""
    if held is None:
        return issue_product(own_rows(tile, WARPGROUP), b, b_full, phase, nothing, RIGHT)
    else:
        return issue_product(held, b, b_full, phase, nothing)


@jit
def own_columns(tile, WARPGROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """The columns of K that make a warpgroup's part of dQ, (BLOCK_N, COLUMNS)."""
    HALF: gl.constexpr = tile.smem.shape[4] // CONSUMERS
    return whole_tile(tile.smem).slice(WARPGROUP * HALF, COLUMNS, dim=1)


@constexpr_function
def own_width(warpgroup, block_d, right):
    """How many columns of dQ a warpgroup owns: half of a tile's, or one of two pieces, the second of ``right``."""
    return right if warpgroup == 1 and right else block_d // CONSUMERS.value


@jit
def send_dq(WARPGROUP: gl.constexpr, dq, buffer, step):
    """Give a warpgroup's columns of the dQ of a step, (BLOCK_M, columns) float32, to the warp that adds them."""
    HALF: gl.constexpr = buffer.smem.shape[4]
    mbarrier.wait(buffer.empty.index(WARPGROUP), (step & 1) ^ 1)
    tile = buffer.smem.index(WARPGROUP).reshape((BLOCK_M, HALF))
    if dq.shape[1] < HALF:
        tile = tile.slice(0, dq.shape[1], dim=1)
    tile.store(stage_rows(dq))
    fence_async_shared()
    mbarrier.arrive(buffer.full.index(WARPGROUP))


@jit
def pass_hidden_queries(WARPGROUP: gl.constexpr, buffers, total, RIGHT: gl.constexpr):
    """A warpgroup's part of the first ``total`` query blocks, which see none of its keys: zeros for its keys' dS, and
    its columns of dQ. RIGHT: ``right_columns``."""
    q_ring, do_ring = buffers.q.blocks, buffers.do.blocks
    OWN: gl.constexpr = own_width(WARPGROUP, q_ring.smem.shape[4], RIGHT)
    no_dq = piece_zeros(BLOCK_M, OWN)
    for step in range(total):
        buffers.ds.wait_empty(step + 1)
        give_ds(WARPGROUP, buffers.ds, no_ds(q_ring.smem.dtype), step + 1)
        buffers.ds.wait_full(step)
        token = issue_dq(WARPGROUP, buffers, step, no_dq)
        dq = warpgroup_mma_wait(0, deps=[token])
        buffers.ds.release_operands(step)
        # Not before the other warpgroup has stored dS of the step before: it has then released what it had two steps
        # ago, and rings have two slots or more, so that what both release is one and the same.
        do_ring.release_operands(step)
        q_ring.release_operands(step)
        send_dq(WARPGROUP, dq, buffers.dq, step)


@jit
def fold_queries(WARPGROUP: gl.constexpr, dk, dv, buffers, first, total, keys, queries, sizes, mask, scale):
    """Fold query blocks [first, total) of the group's heads into dk and dv, ``Pieces`` of (KEYS, BLOCK_D).

    first None: from 0 on. total is more than 0; with ``first`` it may be no more than that.

    The products in the order of their issue: dV of this block, dQ of the one before, dK of this one, scores and dP of
    the next, which ``load`` provides after the last block too; early scores come before dQ, an early dQ before both.
    """
    q_ring, do_ring = buffers.q.blocks, buffers.do.blocks
    BLOCK_D: gl.constexpr = q_ring.smem.shape[4]
    # With 128 columns the registers do not hold the next scores beside dQ: ptxas then makes every product synchronous.
    # With two pieces they do, but where P and dS are copied for the second one it is faster not to.
    EARLY_SCORES: gl.constexpr = BLOCK_D == 64 or (dk.right is not None and not COPIES_OPERANDS)
    # Beside dP, which with more columns the registers do not hold either.
    EARLY_DQ: gl.constexpr = BLOCK_D == 64
    DTYPE: gl.constexpr = q_ring.smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk.left.type.layout, 2)
    RIGHT: gl.constexpr = 0 if dk.right is None else dk.right.shape[1]
    # Groups of products that dV, dK, the scores or dP are.
    GROUPS: gl.constexpr = 1 if dk.right is None else 2
    # All rows of the block's dQ.
    OWN: gl.constexpr = own_width(WARPGROUP, BLOCK_D, RIGHT)
    no_s = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
    k_rows = None
    v_rows = None
    if BLOCK_D == 64:
        # Reading shared memory takes longer than the products do. With more columns there are no registers for this.
        k_rows = own_rows(buffers.k, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
        v_rows = own_rows(buffers.v, WARPGROUP).load(gl.DotOperandLayout(0, S, 2))
    num_ahead = None
    if queries.num_ahead is not None:
        num_ahead = sizes.GROUP_SIZE * queries.num_ahead
    no_dq = piece_zeros(BLOCK_M, OWN)
    key_rows = gl.arange(0, KEYS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))

    q_slot = 0
    q_phase = 0
    do_slot = 0
    do_phase = 0
    block = 0
    if first is not None:
        q_slot, q_phase = q_ring.slot(first), (first // q_ring.STAGES) & 1
        do_slot, do_phase = do_ring.slot(first), (first // do_ring.STAGES) & 1
        block = queries.num_ahead
    s_token = issue_scores(
        k_rows, buffers.k, q_ring.smem.index(q_slot), q_ring.full.index(q_slot), q_phase, no_s, WARPGROUP, RIGHT
    )
    dp_token = issue_scores(
        v_rows, buffers.v, do_ring.smem.index(do_slot), do_ring.full.index(do_slot), do_phase, no_s, WARPGROUP, RIGHT
    )
    s = warpgroup_mma_wait(GROUPS, deps=[s_token])
    for step in range(0 if first is None else first, total):
        do_slot = do_ring.slot(step)
        next_slot = gl.where(q_slot == q_ring.STAGES - 1, 0, q_slot + 1)
        next_phase = gl.where(q_slot == q_ring.STAGES - 1, q_phase ^ 1, q_phase)
        start_m = (queries.first + block) * BLOCK_M
        q = q_ring.smem.index(q_slot).reshape((BLOCK_M, BLOCK_D))
        do = do_ring.smem.index(do_slot).reshape((BLOCK_M, BLOCK_D))
        lse = buffers.q.stats.index(q_slot).load(gl.SliceLayout(0, S))
        diagonal = start_m + mask.num_keys - sizes.NQ - keys.start_n - WARPGROUP * KEYS
        is_masked = needs_mask(mask, diagonal, block, queries)
        p, s = weigh(
            s, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP=queries.num_masked is not None
        )
        p16 = gl.convert_layout(p.to(DTYPE), P)
        if scale.cap_scale is not None:
            # The tanh's derivative: dS = P (1 - tanh^2) (dP - delta).
            p *= 1.0 - s * s
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        dv = issue_by_columns(p16, do, dv)
        if EARLY_DQ:
            buffers.ds.wait_full(step)
            dq_token = issue_dq(WARPGROUP, buffers, step, no_dq)
        delta = buffers.do.stats.index(do_slot).load(gl.SliceLayout(0, S))
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        buffers.ds.wait_empty(step + 1)
        give_ds(WARPGROUP, buffers.ds, ds, step + 1)
        ds_operand = gl.convert_layout(ds, P)
        next_q = q_ring.smem.index(next_slot)
        if EARLY_SCORES:
            s_token = issue_scores(
                k_rows, buffers.k, next_q, q_ring.full.index(next_slot), next_phase, no_s, WARPGROUP, RIGHT
            )
        if not EARLY_DQ:
            buffers.ds.wait_full(step)
        # Without early scores dV is alone in flight, and this waits for nothing: the wait for dQ covers dV.
        dv = wait_for_pieces(dv, PENDING=GROUPS + EARLY_DQ)
        if not EARLY_DQ:
            dq_token = issue_dq(WARPGROUP, buffers, step, no_dq)
        dk = issue_by_columns(ds_operand, q, dk)
        if EARLY_SCORES:
            dq, s = warpgroup_mma_wait(GROUPS, deps=[dq_token, s_token])
        else:
            dq = warpgroup_mma_wait(GROUPS, deps=[dq_token])
        do_ring.release_operands(step)
        buffers.ds.release_operands(step)
        send_dq(WARPGROUP, dq, buffers.dq, step)
        if not EARLY_SCORES:
            s_token = issue_scores(
                k_rows, buffers.k, next_q, q_ring.full.index(next_slot), next_phase, no_s, WARPGROUP, RIGHT
            )
        next_do_slot = do_ring.slot(step + 1)
        next_do, next_do_phase = do_ring.smem.index(next_do_slot), ((step + 1) // do_ring.STAGES) & 1
        dp_token = issue_scores(
            v_rows, buffers.v, next_do, do_ring.full.index(next_do_slot), next_do_phase, no_s, WARPGROUP, RIGHT
        )
        # Only dP crosses the loop's edge in flight: ptxas makes every product synchronous where an accumulator in
        # flight meets one from elsewhere, as dk and dv would meet their zeros.
        if EARLY_SCORES:
            dk = wait_for_pieces(dk, PENDING=GROUPS)
        else:
            dk, s = wait_for_pieces_and(dk, s_token, PENDING=GROUPS)
        arrive_by_threads(q_ring.empty.index(q_slot))
        q_slot = next_slot
        q_phase = next_phase
        block += 1
        if queries.num_ahead is None:
            block = gl.where(block == queries.count, 0, block)
        else:
            block = gl.where(block == queries.count, queries.num_ahead, block)
            block = gl.where(step + 1 < num_ahead, 0, block)
    warpgroup_mma_wait(0, deps=[dp_token])
    buffers.ds.wait_full(total)
    dq_token = issue_dq(WARPGROUP, buffers, total, no_dq)
    send_dq(WARPGROUP, warpgroup_mma_wait(0, deps=[dq_token]), buffers.dq, total)
    return dk, dv


@jit
def accumulate_by_keys(WARPGROUP: gl.constexpr, buffers, gradients, keys, queries, sizes, mask, scale):
    """dk and dv of keys [KEYS * WARPGROUP, KEYS * WARPGROUP + KEYS) of the block, and half the columns of its dQ.

    mask.first_key None: there are no keys that do not exist, or a window hides them all.
    """
    BLOCK_D: gl.constexpr = buffers.v.smem.shape[4]
    RIGHT: gl.constexpr = right_columns(gradients.D, BLOCK_D)
    dv = zero_pieces(KEYS, BLOCK_D, RIGHT)
    dk = zero_pieces(KEYS, BLOCK_D, RIGHT)
    mbarrier.wait(buffers.k.full, 0)
    mbarrier.wait(buffers.v.full, 0)
    total = sizes.GROUP_SIZE * queries.count
    # One more than query blocks, because dQ comes one step late.
    dq_steps = 0
    if total > 0:
        dq_steps = total + 1
        first = None
        give_ds(WARPGROUP, buffers.ds, no_ds(buffers.k.smem.dtype), 0)
        if WARPGROUP == 1 and queries.num_ahead is not None:
            first = sizes.GROUP_SIZE * queries.num_ahead
            pass_hidden_queries(WARPGROUP, buffers, first, RIGHT)
        dk, dv = fold_queries(WARPGROUP, dk, dv, buffers, first, total, keys, queries, sizes, mask, scale)
    # dv goes through V, of which each warpgroup read its own rows only, and dk through the room for dQ once that has
    # been read.
    own_keys = KeyBlock(batch=keys.batch, head=keys.head, start_n=keys.start_n + WARPGROUP * KEYS)
    store_gradients(
        dk, dv, own_keys, sizes.NK, mask, scale, gradients,
        dv_stage=own_rows(buffers.v, WARPGROUP),
        dk_room=buffers.dq.smem.index(WARPGROUP), dk_room_empty=buffers.dq.empty.index(WARPGROUP),
        dk_room_uses=dq_steps, WARPGROUP=WARPGROUP, FIRST_COLUMN=0,
    )  # fmt: skip
