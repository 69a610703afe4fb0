"""sm_90 attention forward: persistent, warp-specialised; Q rotated ahead by warps of its own, K by the pre-pass.

One block per multiprocessor runs four kinds of warps, which meet only at barriers in shared memory:

- ``load``, one warp: takes tiles from a counter and keeps the rings of K and V blocks full through the TMA;
- ``rotate_queries``, four warps: rotate the query rows of the *next* tile into shared memory;
- ``attend``, two warpgroups of 64 query rows each: products and softmax (FlashAttention-3, Shah et al. 2024), one block
  behind with the values, and one tile ahead with the first scores, so that the tensor cores work through the ends of
  the tiles.
"""

import torch
import triton.language as tl

from fused_rope_attn import device
from fused_rope_attn.kernels.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fused_rope_attn.kernels.launch import (
    Launch,
    PreparedCalls,
    Source,
    block_d,
    heads_per_section,
    is_long,
    output_strides,
    scale_and_sign,
    table_strides,
)
from fused_rope_attn.kernels.primitives import (
    LN2,
    head_tables,
    load_rotated,
    online_softmax,
    scheduled_tile,
    visible,
    wait_for_previous_launch,
)
from fused_rope_attn.kernels.rotary import RotateKeys

# Query rows of one consumer warpgroup: the M of a wgmma.
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
BLOCK_M = 128
# Tiles announced ahead of the slowest reader.
RING = gl.constexpr(4)


@jit
def work(tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first row, batch * HQ + head, batch, head, key head, key blocks, those of them that need a mask)."""
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    block, bh = scheduled_tile(tile, (NQ + BLOCK_M - 1) // BLOCK_M, num_heads, section, LAST_FIRST=IS_CAUSAL)
    start_m = block * BLOCK_M
    last = NK
    full = NK
    if IS_CAUSAL:
        last = gl.minimum(NK, gl.maximum(0, start_m + BLOCK_M + NK - NQ))
        full = gl.minimum(NK, gl.maximum(0, start_m + NK - NQ + 1))
    blocks = gl.maximum(1, (last + BLOCK_N - 1) // BLOCK_N)
    head = bh % HQ
    return start_m, bh, bh // HQ, head, head // GROUP_SIZE, blocks, blocks - full // BLOCK_N


@jit
def load(k_desc, v_desc, counter_ptr, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_smem, tile_full,
         tile_empty, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N: gl.constexpr,
         STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Announce tiles and load their key and value blocks, the last (masked) block first."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = gl.program_id(0)
    tile_smem.index(0).store(gl.full([1], tile, gl.int32, LANE))
    mbarrier.arrive(tile_full.index(0))
    # The counter and the keys are the pre-pass's; the rotating warps need neither.
    wait_for_previous_launch(PDL)
    turn = 0
    step = 0
    while tile < num_tiles:
        start_m, bh, batch, head, head_kv, blocks, masked = work(
            tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N, IS_CAUSAL
        )
        turn += 1
        slot = turn % RING
        tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        mbarrier.wait(tile_empty.index(slot), ((turn // RING) & 1) ^ 1)
        tile_smem.index(slot).store(gl.full([1], tile, gl.int32, LANE))
        mbarrier.arrive(tile_full.index(slot))
        for i in range(blocks):
            slot = step % STAGES
            free = ((step // STAGES) & 1) ^ 1
            row = (blocks - 1 - i) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, head_kv, row, 0], k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, head_kv, row, 0], v_full.index(slot), v_smem.index(slot))
            step += 1


@jit
def next_tile(tile_smem, tile_full, tile_empty, turn, NUM_WARPS: gl.constexpr):
    """The tile announced in this turn."""
    slot = turn % RING
    mbarrier.wait(tile_full.index(slot), (turn // RING) & 1)
    tile = gl.max(tile_smem.index(slot).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)
    mbarrier.arrive(tile_empty.index(slot))
    return tile


@jit
def rotate_queries(q_ptr, cos_ptr, sin_ptr, q_smem, q_full, q_empty, tile_smem, tile_full, tile_empty, q_strides,
                   cos_strides, sin_strides, q_sign, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK,
                   D: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
                   INTERLEAVED: gl.constexpr, IS_CAUSAL: gl.constexpr, LONG: gl.constexpr):  # fmt: skip
    """Rotate the query rows of each tile into one of two buffers."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    # Rows that four warps turn at a time, eight pairs a thread.
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    turn = 0
    tile = next_tile(tile_smem, tile_full, tile_empty, turn, 4)
    while tile < num_tiles:
        start_m, bh, batch, head, head_kv, blocks, masked = work(
            tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N, IS_CAUSAL
        )
        tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch.to(gl.int64))
        base = q_ptr + batch.to(gl.int64) * q_strides[0] + head.to(gl.int64) * q_strides[1]
        buffer = turn % 2
        mbarrier.wait(q_empty.index(buffer), ((turn // 2) & 1) ^ 1)
        for member in gl.static_range(CONSUMERS):
            for chunk in gl.static_range(ROWS // CHUNK):
                start = start_m + member * ROWS + chunk * CHUNK
                q = load_rotated(
                    base + start.to(gl.int64) * q_strides[2], rows, NQ - start, q_strides, tables, start + NK - NQ, NK,
                    q_sign, D, R, BLOCK_D, INTERLEAVED, True, LONG, PAIRS, WHOLE,
                )  # fmt: skip
                q_smem.index(buffer * CONSUMERS + member).slice(chunk * CHUNK, CHUNK, dim=0).store(q)
        fence_async_shared()
        mbarrier.arrive(q_full.index(buffer))
        turn += 1
        tile = next_tile(tile_smem, tile_full, tile_empty, turn, 4)


@jit
def mask_scores(scores, position, columns, start_n, NK, IS_CAUSAL: gl.constexpr):
    """-inf where a query at ``position`` (rows,) must not see key start_n + column."""
    exists = visible(position[:, None], (start_n + columns)[None, :], NK, IS_CAUSAL)
    return gl.where(exists, scores, float("-inf"))


@jit
def pin(row_sum):
    """Keep what row_sum is computed from before the waits that follow.

    ptxas moves the wait for a product up past arithmetic that could run beside the product. It does not move it past a
    store, not even one that never happens: row_sum is not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred negative; .reg .u32 nowhere; mov.u32 nowhere, 0; setp.lt.f32 negative, $1, 0f00000000; "
        "@negative st.volatile.shared.u32 [nowhere], nowhere; mov.u32 $0, 0; }",
        "=r,f", [row_sum], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def fold_blocks(acc, p, row_max, row_sum, step, first, last, blocks, q, k_smem, v_smem, k_full, k_empty, v_full,
                v_empty, position, columns, NK, qk_scale, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, PIN: gl.constexpr):  # fmt: skip
    """Fold key blocks [first, last), counted from the end, into the running softmax, one block behind with the values.

    ``p`` are the weights of the block before ``first``, rounded; ``step`` is its number among the blocks of all tiles.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    BLOCK_D: gl.constexpr = q.shape[1]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    for i in range(first, last):
        before = step % STAGES
        filled_before = (step // STAGES) & 1
        step += 1
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        k = k_smem.index(slot).reshape((BLOCK_N, BLOCK_D))
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), filled_before)
        acc = warpgroup_mma(p, v_smem.index(before).reshape((BLOCK_N, BLOCK_D)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot))
        if MASKED:
            scores = mask_scores(scores, position, columns, (blocks - 1 - i) * BLOCK_N, NK, IS_CAUSAL)
        p32, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, qk_scale, MASKED)
        if PIN:
            pin(row_sum)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(p32.to(p.dtype), p.type.layout)
    return acc, p, row_max, row_sum, step


@jit
def attend(MEMBER: gl.constexpr, o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty,
           v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, num_tiles, num_heads, section, HQ, GROUP_SIZE,
           NQ, NK, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
           PIN: gl.constexpr):  # fmt: skip
    """Rows [64 * MEMBER, 64 * MEMBER + 64) of every tile."""
    DTYPE: gl.constexpr = q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    unseen = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    empty = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    o_tile = o_smem.index(MEMBER)

    turn = 0
    step = 0
    tile = next_tile(tile_smem, tile_full, tile_empty, turn, 4)
    start_m, bh, batch, head, head_kv, blocks, masked = work(
        tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N, IS_CAUSAL
    )
    position = start_m + MEMBER * ROWS + NK - NQ + rows
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0).reshape((BLOCK_N, BLOCK_D))
    scores = warpgroup_mma(q_smem.index(MEMBER), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    scores = mask_scores(scores, position, columns, (blocks - 1) * BLOCK_N, NK, IS_CAUSAL)
    p, correction, row_max, row_sum = online_softmax(scores, unseen, empty, qk_scale, True)
    p = gl.convert_layout(p.to(DTYPE), P)
    while tile < num_tiles:
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT)
        buffer = turn % 2
        q = q_smem.index(buffer * CONSUMERS + MEMBER)
        middle = gl.maximum(1, masked)
        acc, p, row_max, row_sum, step = fold_blocks(
            acc, p, row_max, row_sum, step, 1, middle, blocks, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            position, columns, NK, qk_scale, BLOCK_N, STAGES, IS_CAUSAL, True, PIN,
        )  # fmt: skip
        acc, p, row_max, row_sum, step = fold_blocks(
            acc, p, row_max, row_sum, step, middle, blocks, blocks, q, k_smem, v_smem, k_full, k_empty, v_full,
            v_empty, position, columns, NK, qk_scale, BLOCK_N, STAGES, IS_CAUSAL, False, PIN,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(buffer))
        before = step % STAGES
        filled_before = (step // STAGES) & 1

        # The next tile's first scores run beside this tile's last values. After the last tile they are computed from
        # whatever the buffers hold, and dropped.
        turn += 1
        step += 1
        tile = next_tile(tile_smem, tile_full, tile_empty, turn, 4)
        more = tile < num_tiles
        old_m, old_bh, old_batch, old_head = start_m, bh, batch, head
        start_m, bh, batch, head, head_kv, blocks, masked = work(
            tile, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N, IS_CAUSAL
        )
        position = start_m + MEMBER * ROWS + NK - NQ + rows
        buffer = turn % 2
        slot = step % STAGES
        mbarrier.wait(q_full.index(buffer), (turn // 2) & 1, pred=more)
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1, pred=more)
        k = k_smem.index(slot).reshape((BLOCK_N, BLOCK_D))
        scores = warpgroup_mma(
            q_smem.index(buffer * CONSUMERS + MEMBER), k.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), filled_before)
        acc = warpgroup_mma(p, v_smem.index(before).reshape((BLOCK_N, BLOCK_D)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), pred=more)
        scores = mask_scores(scores, position, columns, (blocks - 1) * BLOCK_N, NK, IS_CAUSAL)
        p32, correction, new_max, new_sum = online_softmax(scores, unseen, empty, qk_scale, True)

        # Only a row that saw no key sums to zero; NaN counts as seen and stays NaN.
        seen = row_sum != 0.0
        divisor = gl.where(seen, row_sum, 1.0)
        lse = gl.where(seen, (row_max + tl.math.log2(divisor)) * LN2, float("-inf"))
        lse_rows = old_m + MEMBER * ROWS + rows
        gl.store(lse_ptr + old_bh.to(gl.int64) * NQ + lse_rows, lse, mask=lse_rows < NQ)
        factor = gl.convert_layout(gl.where(seen, 1.0 / divisor, 0.0), gl.SliceLayout(1, OUT))
        seen = gl.convert_layout(seen, gl.SliceLayout(1, OUT))
        tma_store_wait(0)
        if PIN:
            pin(new_sum)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        o_tile.reshape((ROWS, BLOCK_D)).store(gl.where(seen[:, None], acc * factor[:, None], 0.0).to(DTYPE))
        fence_async_shared()
        tma_store(o_desc, [old_batch, old_head, old_m + MEMBER * ROWS, 0], o_tile)
        p = gl.convert_layout(p32.to(DTYPE), P)
        row_max, row_sum = new_max, new_sum
    tma_store_wait(0)


@jit(do_not_specialize=["num_tiles", "num_heads", "section", "HQ", "GROUP_SIZE", "NQ", "NK"])
def forward_kernel(q_ptr, k_desc, v_desc, o_desc, cos_ptr, sin_ptr, lse_ptr, counter_ptr, q_strides, cos_strides,
                   sin_strides, qk_scale, q_sign, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK,
                   D: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                   INTERLEAVED: gl.constexpr, IS_CAUSAL: gl.constexpr, LONG: gl.constexpr, PDL: gl.constexpr,
                   ATTEND_REGISTERS: gl.constexpr, ROTATE_REGISTERS: gl.constexpr,
                   LOAD_REGISTERS: gl.constexpr, PIN: gl.constexpr, Q_LAYOUT: gl.constexpr):  # fmt: skip
    """Grid: one block per multiprocessor. counter_ptr: int32, zero when the pre-pass has finished."""
    DTYPE: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, BLOCK_D], Q_LAYOUT)
    o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [RING, 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS + 1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    gl.warp_specialize([
        (attend, (
            0, o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            tile_smem, tile_full, tile_empty, qk_scale, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N,
            BLOCK_D, STAGES, IS_CAUSAL, PIN,
        )),
        (attend, (
            1, o_desc, lse_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            tile_smem, tile_full, tile_empty, qk_scale, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N,
            BLOCK_D, STAGES, IS_CAUSAL, PIN,
        )),
        (rotate_queries, (
            q_ptr, cos_ptr, sin_ptr, q_smem, q_full, q_empty, tile_smem, tile_full, tile_empty, q_strides, cos_strides,
            sin_strides, q_sign, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, D, R, BLOCK_N, BLOCK_D,
            INTERLEAVED, IS_CAUSAL, LONG,
        )),
        (load, (
            k_desc, v_desc, counter_ptr, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_smem, tile_full,
            tile_empty, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, BLOCK_N, STAGES, IS_CAUSAL, PDL,
        )),
    ], [4, 4, 1], [ATTEND_REGISTERS, ROTATE_REGISTERS, LOAD_REGISTERS])  # fmt: skip


class ForwardCall:
    """The launches of one forward signature."""

    def __init__(self, q, k, v, cos, sin, causal, softmax_scale, rotary_dim, interleaved, config):
        batch, heads_q, len_q, head_dim = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        pad_d = max(64, block_d(head_dim))
        self.empty = batch * len_q == 0
        self.o_strides = output_strides(q)
        if self.empty:
            return
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16
        block_n = config.block_n
        self.rotate_keys = RotateKeys(k, cos, sin, rotary_dim, interleaved, config, counter=True)
        k_like = k.new_empty(k.shape)
        o_like = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        key_layout = gl.NVMMASharedLayout.get_default_for([1, 1, block_n, pad_d], element)
        o_layout = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS.value, pad_d], element)
        self.k_source = Source(k_like, block_n, pad_d, True, key_layout)
        self.v_source = Source(v, block_n, pad_d, True, key_layout)
        self.o_source = Source(o_like, ROWS.value, pad_d, True, o_layout)
        qk_scale, q_sign, _ = scale_and_sign(softmax_scale)
        cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
        num_heads, group_size = batch * heads_q, heads_q // heads_kv
        num_tiles = -(-len_q // BLOCK_M) * num_heads
        kv_bytes = 2 * len_k * head_dim * k.element_size()
        section = heads_per_section(num_heads, group_size, kv_bytes, config.section_bytes)
        self.launch = Launch(
            forward_kernel,
            min(num_tiles, device.num_sms(q.device)),
            (
                q.stride(), cos_strides, sin_strides, qk_scale, q_sign, num_tiles, num_heads, section, heads_q,
                group_size, len_q, len_k,
            ),
            {
                "D": head_dim,
                "R": rotary_dim,
                "BLOCK_N": block_n,
                "BLOCK_D": pad_d,
                "STAGES": config.stages,
                "INTERLEAVED": interleaved,
                "IS_CAUSAL": causal,
                "LONG": is_long(q.stride()),
                "PDL": config.pdl,
                "ATTEND_REGISTERS": config.attend_registers,
                "ROTATE_REGISTERS": config.rotate_registers,
                "LOAD_REGISTERS": 24,
                "PIN": config.pin,
                "Q_LAYOUT": gl.NVMMASharedLayout.get_default_for([ROWS.value, pad_d], element),
            },
            {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {})},
        )  # fmt: skip

    def __call__(self, q, k, v, cos, sin):
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if self.empty:
            return o, lse
        stream = device.current_stream(q.device)
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        k = self.rotate_keys(stream, k, cos, sin, counter)
        self.launch(stream, q, self.k_source(k), self.v_source(v), self.o_source(o), cos, sin, lse, counter)
        return o, lse


_prepared = PreparedCalls(ForwardCall)


def attention_forward(q, k, v, cos, sin, *, causal, softmax_scale, rotary_dim, interleaved, config):
    """As the portable ``attention_forward``; ``config`` a ``configs.HopperForwardConfig``."""
    return _prepared((q, k, v, cos, sin), (causal, softmax_scale, rotary_dim, interleaved), config)(q, k, v, cos, sin)
