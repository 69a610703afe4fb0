# mypy: ignore-errors
"""The two warpgroups of the sm_90 backward that make dk and dv of multi-head latent attention.

Each owns 64 keys: 192 columns of dK and 128 of dV are 160 registers a thread, so that there are none for dQ, which a
kernel of its own makes (``latent_queries``). P is held in 16 bits, in shared memory while dP needs the registers. The
warpgroups take turns at the tensor cores, twice in each block: one issues dP and dV, or dK and the next scores, while
the other computes P or dS.
"""

from fused_rope_attn.attention.hopper.backward_block import (
    KeyBlock,
    allocate_query_channel,
    init_query_channel,
    issue_product,
    weigh,
)
from fused_rope_attn.attention.hopper.backward_epilogue import drop_keys, store_dv, store_sums
from fused_rope_attn.attention.hopper.channels import (
    Channel,
    Cursor,
    hand_over_tensor_cores,
    tiles_of,
    wait_for_tensor_cores,
    written_once,
)
from fused_rope_attn.attention.hopper.columns import ColumnParts, issue_row_scores, part_zeros, rows_in
from fused_rope_attn.attention.hopper.masks import needs_mask
from fused_rope_attn.attention.hopper.ptxas import opaque
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, KEYS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.softmax import LN2
from fused_rope_attn.kernels.tiles import Origin, RowFormat, TensorView, head_rows
from fused_rope_attn.runtime.triton_compat import gl, jit, warpgroup_mma, warpgroup_mma_wait


@record
class LatentBuffers:
    """Shared memory of these warpgroups. k and q hold rotated columns too (``Channel.rope``), q also lse, do delta."""

    k: Channel
    v: Channel
    q: Channel
    do: Channel
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor


@record
class LatentGradients:
    """The gradients of a key block: dk and dv (B, H, NK, columns), and dk_parts (B, H, NK, R) float32, rotated."""

    dk: TensorView
    dv: TensorView
    dk_parts: TensorView
    format: RowFormat  # of dk and dv
    rope_format: RowFormat


@jit
def allocate_buffers(descriptors, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Allocate ``LatentBuffers`` and initialise their barriers."""
    q, lse = allocate_query_channel(descriptors.q, descriptors.stats, Q_STAGES, descriptors.q_rope)
    do, delta = allocate_query_channel(descriptors.do, descriptors.stats, DO_STAGES)
    k = written_once(tiles_of(descriptors.k, 1), tiles_of(descriptors.k_rope, 1))
    v = written_once(tiles_of(descriptors.v, 1))
    k.init(FILLS=1, RELEASES=0)
    v.init(FILLS=1, RELEASES=0)
    init_query_channel(q)
    init_query_channel(do)
    p = gl.allocate_shared_memory(descriptors.q.dtype, [CONSUMERS, KEYS, BLOCK_M], P_LAYOUT)
    return LatentBuffers(k=k, v=v, q=q, do=do, lse=lse, delta=delta, p=p)


@jit
def own_rows(channel, WARPGROUP: gl.constexpr):
    """Return a warpgroup's ``ScoreRows`` of K or V, at an ``opaque`` address, see ``backward_block.whole_tile``."""
    return rows_in(channel, Cursor(slot=opaque(0), step=None, parity=None), WARPGROUP * KEYS, KEYS)


@jit
def issue_scores(buffers, cursor, nothing, WARPGROUP: gl.constexpr):
    """Begin the scores of the warpgroup's keys and a query block as soon as that has arrived."""
    buffers.q.wait_full(cursor)
    return issue_row_scores(own_rows(buffers.k, WARPGROUP), rows_in(buffers.q, cursor, 0, BLOCK_M), nothing, 0)


@jit
def fold_queries(WARPGROUP: gl.constexpr, dk, dk_rope, dv, buffers, total, keys, queries, sizes, mask, scale):
    """Fold ``total`` > 0 query blocks into dk, dk_rope and dv, each (KEYS, columns) float32; return the three."""
    q_blocks, do_blocks = buffers.q, buffers.do
    DTYPE: gl.constexpr = q_blocks.buffer.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    P_ROPE: gl.constexpr = gl.DotOperandLayout(0, dk_rope.type.layout, 2)
    no_s = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
    key_rows = gl.arange(0, KEYS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    q_cursor = q_blocks.start_at(gl.to_tensor(0))
    s_token = issue_scores(buffers, q_cursor, no_s, WARPGROUP)
    if WARPGROUP == CONSUMERS - 1:
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
    for step in range(total):
        do_cursor = do_blocks.at(step)
        s = warpgroup_mma_wait(0, deps=[s_token])
        lse = buffers.lse.index(q_cursor.slot).load(gl.SliceLayout(0, S))
        start_m = (queries.first + step) * BLOCK_M
        diagonal = start_m + mask.num_keys - sizes.NQ - keys.start_n - WARPGROUP * KEYS
        is_masked = needs_mask(mask, diagonal, step, queries)
        p, _ = weigh(
            s, lse, is_masked, key_rows, columns, diagonal, mask, scale, DTYPE, CLAMP=queries.num_masked is not None
        )
        p16 = p.to(DTYPE)
        p_tile = buffers.p.index(WARPGROUP)
        p_tile.store(p16)
        do_blocks.wait_full(do_cursor)
        wait_for_tensor_cores(WARPGROUP)
        dp_token = issue_product(own_rows(buffers.v, WARPGROUP).columns, do_blocks, do_cursor, no_s)
        do = rows_in(do_blocks, do_cursor, 0, BLOCK_M).columns
        dv = warpgroup_mma(gl.convert_layout(p16, P), do, dv, is_async=True)
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
        dv, dp = warpgroup_mma_wait(0, deps=[dv, dp_token])
        delta = buffers.delta.index(do_cursor.slot).load(gl.SliceLayout(0, S))
        # P as dV takes it: 16 registers less than in float32.
        ds = (p_tile.load(S).to(gl.float32) * (dp - delta[None, :])).to(DTYPE)
        q = rows_in(q_blocks, q_cursor, 0, BLOCK_M)
        wait_for_tensor_cores(WARPGROUP)
        dk = warpgroup_mma(gl.convert_layout(ds, P), q.columns, dk, is_async=True)
        dk_rope = warpgroup_mma(gl.convert_layout(ds, P_ROPE), q.rope, dk_rope, is_async=True)
        do_blocks.release_by_threads(do_cursor)
        next_q = q_blocks.after(q_cursor)
        s_token = issue_scores(buffers, next_q, no_s, WARPGROUP)
        hand_over_tensor_cores(WARPGROUP, CONSUMERS)
        # Only scores are in flight at the end of an iteration, see ``backward_by_keys.fold_queries``.
        dk, dk_rope = warpgroup_mma_wait(2, deps=[dk, dk_rope])
        q_blocks.release_by_threads(q_cursor)
        q_cursor = next_q
    warpgroup_mma_wait(0, deps=[s_token])
    if WARPGROUP == 0:
        # The last warpgroup hands the tensor cores over once more.
        wait_for_tensor_cores(WARPGROUP)
    return dk, dk_rope, dv


@jit
def store_latent_gradients(dk, dk_rope, dv, buffers, keys, NK, mask, scale, gradients, WARPGROUP: gl.constexpr):
    """Write dv, and dk and dk_rope scaled, of the KEYS keys from keys.start_n on; keys that do not exist get zeros.

    dv and dk pass through the memory of the warpgroup's rows of V and K, which no other warps read.
    """
    k_scale = scale.qk_scale * LN2
    dk, dk_rope = dk * k_scale, dk_rope * k_scale
    if mask.first_key is not None:
        dk, dv = drop_keys(dk, keys.start_n, mask), drop_keys(dv, keys.start_n, mask)
        dk_rope = drop_keys(dk_rope, keys.start_n, mask)
    origin = Origin(batch=keys.batch.to(gl.int64), head=keys.head.to(gl.int64), row=keys.start_n)
    num_rows = NK - keys.start_n
    dv_rows = head_rows(gradients.dv, origin, num_rows, gradients.format)
    dk_rows = head_rows(gradients.dk, origin, num_rows, gradients.format)
    store_dv(dv_rows, ColumnParts(left=dv, right=None), own_rows(buffers.v, WARPGROUP).columns)
    store_dv(dk_rows, ColumnParts(left=dk, right=None), own_rows(buffers.k, WARPGROUP).columns)
    store_sums(head_rows(gradients.dk_parts, origin, num_rows, gradients.rope_format), dk_rope)


@jit
def accumulate_latent(WARPGROUP: gl.constexpr, buffers, gradients, keys, queries, sizes, mask, scale):
    """Compute dk, dk_rope and dv of keys [KEYS * WARPGROUP, KEYS * WARPGROUP + KEYS) of the block.

    mask.first_key None: all keys exist, or a window hides those that do not.
    """
    dv = part_zeros(KEYS, buffers.v.buffer.shape[4])
    dk = part_zeros(KEYS, buffers.k.buffer.shape[4])
    dk_rope = part_zeros(KEYS, buffers.k.rope.shape[4])
    buffers.k.wait_full(buffers.k.at(0))
    buffers.v.wait_full(buffers.v.at(0))
    if queries.count > 0:
        dk, dk_rope, dv = fold_queries(
            WARPGROUP, dk, dk_rope, dv, buffers, queries.count, keys, queries, sizes, mask, scale
        )
    own = KeyBlock(batch=keys.batch, head=keys.head, start_n=keys.start_n + WARPGROUP * KEYS)
    store_latent_gradients(dk, dk_rope, dv, buffers, own, sizes.NK, mask, scale, gradients, WARPGROUP)
