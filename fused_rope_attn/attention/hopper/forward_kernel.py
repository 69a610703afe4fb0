"""sm_90 attention forward: persistent, warp-specialised; Q rotated ahead by warps of its own, K by the pre-pass.

One block per multiprocessor runs four kinds of warps, which meet only at barriers in shared memory:

- ``load``, one warp: takes tiles from a counter and keeps the rings of K and V blocks full through the TMA;
- ``rotate_queries``, four warps: rotate the query rows of the *next* tile into shared memory;
- ``attend``, two warpgroups of 64 query rows each: products and softmax (FlashAttention-3, Shah et al. 2024), one block
  behind with the values, and one tile ahead with the first scores, so that the tensor cores work through the ends of
  the tiles.

Head dims beyond 128 ("wide") leave neither registers for warps that rotate nor room for a second buffer of queries: the
pre-pass rotates Q too, and the loading warp brings each warpgroup its 64 rows as soon as that one has done with the
last ones. O leaves in two halves of its columns, through the same memory.
"""

import triton.language as tl

from fused_rope_attn.attention.hopper.forward_load import load, rotate_queries
from fused_rope_attn.attention.hopper.masks import first_position, mask_scores
from fused_rope_attn.attention.hopper.softmax import (
    cap_scores,
    fold_scores,
    no_sums,
    pack_weights,
    pin,
    rescale,
    unpack_weights,
    whole_sums,
)
from fused_rope_attn.attention.hopper.tiles import (
    BOUNDS,
    CONSUMERS,
    NUMBERS,
    PACKED_BOUNDS,
    RING,
    ROWS,
    next_tile,
    query_limit,
)
from fused_rope_attn.kernels.softmax import LN2, LOG2E, add_sink
from fused_rope_attn.kernels.tiles import RowFormat, Rows, store_tile
from fused_rope_attn.runtime.triton_compat import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@jit
def take_turn(MEMBER: gl.constexpr):
    """Wait until the other warpgroup has issued its products, so that one computes while the other multiplies.

    Named barriers 8 and 9: triton counts those of its partitions from 0.
    """
    if MEMBER == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def pass_turn(MEMBER: gl.constexpr):
    if MEMBER == 0:
        gl.inline_asm_elementwise("bar.arrive 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def multiply(q, acc, p, correction, k_step, k_smem, v_smem, k_full, k_empty, v_full, more, cap_scale,
             MEMBER: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Issue the scores of key block ``k_step`` and, behind them, the values of the block before, whose weights are p.

    Returns the scores (capped where there is a ``cap_scale``), and acc in flight. Without ``more`` there is no such
    block: the scores mean nothing.
    """
    BLOCK_D: gl.constexpr = q.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    slot = k_step % STAGES
    before = (k_step - 1) % STAGES
    weights = unpack_weights(p, q.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(k_full.index(slot), (k_step // STAGES) & 1, pred=more)
    k = k_smem.index(slot).reshape((BLOCK_N, BLOCK_D))
    take_turn(MEMBER)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    acc = rescale(acc, correction)
    mbarrier.wait(v_full.index(before), ((k_step - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_smem.index(before).reshape((BLOCK_N, BLOCK_D)), acc, is_async=True)
    pass_turn(MEMBER)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), pred=more)
    return cap_scores(scores, cap_scale, q.dtype), acc


@jit
def write_rows(o_desc, o_ptr, o_strides, o_tile, batch, head, row, limit, COLUMN: gl.constexpr, D: gl.constexpr,
               LONG: gl.constexpr, RANGED: gl.constexpr):  # fmt: skip
    """Send o_tile (1, 1, ROWS, columns), fenced for the TMA, to rows [row, row + ROWS) of o, and to none from limit on;
    to its columns from COLUMN on.

    The TMA knows where the tensor ends, but not where a packed sequence does: its last rows go through registers.
    """
    if RANGED == PACKED_BOUNDS:
        if row + ROWS <= limit:
            tma_store(o_desc, [batch, head, row, COLUMN], o_tile)
        elif row < limit:
            BLOCK_D: gl.constexpr = o_tile.shape[3]
            WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
            base = o_ptr + head.to(gl.int64) * o_strides[1] + row.to(gl.int64) * o_strides[2]
            if COLUMN:
                base += COLUMN * o_strides[3]
            rows = Rows(
                ptr=base, stride_row=o_strides[2], stride_column=o_strides[3], num_rows=limit - row, first_row=None,
                format=RowFormat(D=D - COLUMN, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG),
            )  # fmt: skip
            o = o_tile.reshape((ROWS, BLOCK_D)).load(WHOLE)
            store_tile(rows, o, gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE)), WHOLE)
    else:
        tma_store(o_desc, [batch, head, row, COLUMN], o_tile)


@jit
def halves(x):
    """The left and the right half of the columns of x (ROWS, columns); they lie in the same threads."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = gl.split(x.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@jit
def query_slot(turn, MEMBER: gl.constexpr, WIDE: gl.constexpr):
    """(the barriers, the tile of shared memory) of a warpgroup's queries of this turn, and how often both have served.

    Two buffers for all queries of a tile, with barriers of their own; WIDE: one, with barriers for each warpgroup.
    """
    if WIDE:
        return MEMBER, MEMBER, turn
    else:
        return turn % 2, (turn % 2) * CONSUMERS + MEMBER, turn // 2


@jit
def attend(MEMBER: gl.constexpr, o_desc, o_ptr, o_strides, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, o_smem, q_full,
           q_empty, k_full, k_empty, v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, cap_scale, left,
           right, NQ, NK, D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
           LONG: gl.constexpr, IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, RANGED: gl.constexpr,
           STARTS: gl.constexpr, WIDE: gl.constexpr, PIN: gl.constexpr):  # fmt: skip
    """Rows [64 * MEMBER, 64 * MEMBER + 64) of every tile.

    ``step`` counts the key blocks of all tiles. One loop serves the blocks that need a mask and those that do not: of
    two, ptxas set up the address of q in the first alone, and jumped past it when that loop had no turns (log).
    """
    DTYPE: gl.constexpr = q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    unseen = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    o_tile = o_smem.index(MEMBER)

    turn = 0
    step = 0
    start_m, bh, batch, head, blocks, masked, bounds = next_tile(tile_smem, tile_full, tile_empty, turn, 4, RANGED)
    position = first_position(start_m + MEMBER * ROWS, blocks, bounds, NQ, NK, RANGED) + rows
    some = True
    if RANGED == PACKED_BOUNDS:
        # How many tiles hold queries only the device knows.
        some = blocks > 0
    mbarrier.wait(q_full.index(MEMBER if WIDE else 0), 0, pred=some)
    mbarrier.wait(k_full.index(0), 0, pred=some)
    k = k_smem.index(0).reshape((BLOCK_N, BLOCK_D))
    q = q_smem.index(MEMBER).reshape((ROWS, BLOCK_D))
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), pred=some)
    scores = cap_scores(scores, cap_scale, DTYPE)
    scores = mask_scores(
        scores, position, columns, 0, blocks, masked, bounds, NK, left, right, IS_CAUSAL, BOUNDED, RANGED, STARTS
    )
    p, correction, row_max, row_sum = fold_scores(scores, unseen, no_sums(), qk_scale)
    p = pack_weights(p, DTYPE)
    if MEMBER == 1:
        pass_turn(MEMBER)
    while blocks > 0:
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT)
        correction = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
        buffer, tile, _ = query_slot(turn, MEMBER, WIDE)
        q = q_smem.index(tile).reshape((ROWS, BLOCK_D))
        for i in range(1, blocks):
            step += 1
            scores, acc = multiply(
                q, acc, p, correction, step, k_smem, v_smem, k_full, k_empty, v_full, True, cap_scale, MEMBER, BLOCK_N,
                STAGES,
            )  # fmt: skip
            if WIDE:
                # The next tile's queries can come while this one's last softmax is computed.
                if i + 1 == blocks:
                    mbarrier.arrive(q_empty.index(buffer))
            scores = mask_scores(
                scores, position, columns, i, blocks, masked, bounds, NK, left, right, IS_CAUSAL, BOUNDED, RANGED,
                STARTS,
            )  # fmt: skip
            p, correction, row_max, row_sum = fold_scores(scores, row_max, row_sum, qk_scale)
            if PIN:
                pin(row_sum)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index((step - 1) % STAGES))
            p = pack_weights(p, DTYPE)
        if WIDE:
            mbarrier.arrive(q_empty.index(buffer), pred=blocks == 1)
        else:
            mbarrier.arrive(q_empty.index(buffer))

        # The next tile's first scores run beside this tile's last values. After the last tile they are computed from
        # whatever the buffers hold, and dropped.
        turn += 1
        step += 1
        old_m, old_bh, old_batch, old_head = start_m, bh, batch, head
        limit = query_limit(bounds, NQ, RANGED)
        start_m, bh, batch, head, blocks, masked, bounds = next_tile(tile_smem, tile_full, tile_empty, turn, 4, RANGED)
        more = blocks > 0
        position = first_position(start_m + MEMBER * ROWS, blocks, bounds, NQ, NK, RANGED) + rows
        buffer, tile, served = query_slot(turn, MEMBER, WIDE)
        mbarrier.wait(q_full.index(buffer), served & 1, pred=more)
        scores, acc = multiply(
            q_smem.index(tile).reshape((ROWS, BLOCK_D)), acc, p, correction, step, k_smem, v_smem, k_full, k_empty,
            v_full, more, cap_scale, MEMBER, BLOCK_N, STAGES,
        )  # fmt: skip
        scores = mask_scores(
            scores, position, columns, 0, blocks, masked, bounds, NK, left, right, IS_CAUSAL, BOUNDED, RANGED, STARTS
        )
        p, correction, new_max, new_sum = fold_scores(scores, unseen, no_sums(), qk_scale)

        # Only a row that saw no key sums to zero; NaN counts as seen and stays NaN.
        row_sum = whole_sums(row_sum, gl.SliceLayout(1, S))
        seen = row_sum != 0.0
        weight = 1.0
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + old_head).to(gl.float32) * LOG2E
            row_max, row_sum, weight = add_sink(row_max, row_sum, sink, seen)
        divisor = gl.where(seen, row_sum, 1.0)
        lse = gl.where(seen, (row_max + tl.math.log2(divisor)) * LN2, float("-inf"))
        lse_rows = old_m + MEMBER * ROWS + rows
        gl.store(lse_ptr + old_bh.to(gl.int64) * NQ + lse_rows, lse, mask=lse_rows < limit)
        factor = gl.convert_layout(gl.where(seen, weight / divisor, 0.0), gl.SliceLayout(1, OUT))
        seen = gl.convert_layout(seen, gl.SliceLayout(1, OUT))
        tma_store_wait(0)
        if PIN:
            pin(new_sum)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((step - 1) % STAGES))
        o = gl.where(seen[:, None], acc * factor[:, None], 0.0).to(DTYPE)
        row = old_m + MEMBER * ROWS
        if WIDE:
            left_half, right_half = halves(o)
            o_tile.reshape((ROWS, BLOCK_D // 2)).store(left_half)
            fence_async_shared()
            write_rows(o_desc, o_ptr, o_strides, o_tile, old_batch, old_head, row, limit, 0, D, LONG, RANGED)
            tma_store_wait(0)
            o_tile.reshape((ROWS, BLOCK_D // 2)).store(right_half)
            fence_async_shared()
            write_rows(
                o_desc, o_ptr, o_strides, o_tile, old_batch, old_head, row, limit, BLOCK_D // 2, D, LONG, RANGED
            )  # fmt: skip
        else:
            o_tile.reshape((ROWS, BLOCK_D)).store(o)
            fence_async_shared()
            write_rows(o_desc, o_ptr, o_strides, o_tile, old_batch, old_head, row, limit, 0, D, LONG, RANGED)
        p = pack_weights(p, DTYPE)
        row_max, row_sum = new_max, new_sum
    if MEMBER == 0:
        # The other warpgroup's last turn.
        take_turn(MEMBER)
    tma_store_wait(0)


@jit(do_not_specialize=["num_tiles", "num_heads", "section", "HQ", "GROUP_SIZE", "NQ", "NK", "slots", "left", "right"])
def forward_kernel(q_ptr, q_desc, k_desc, v_desc, o_desc, o_ptr, cos_ptr, sin_ptr, lse_ptr, counter_ptr, sinks_ptr,
                   starts_ptr, lens_ptr, q_strides, o_strides, cos_strides, sin_strides, qk_scale, q_sign, cap_scale,
                   left, right, num_tiles, num_heads, section, HQ, GROUP_SIZE, NQ, NK, slots, D: gl.constexpr,
                   R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                   INTERLEAVED: gl.constexpr,
                   IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LONG: gl.constexpr, PDL: gl.constexpr,
                   ATTEND_REGISTERS: gl.constexpr, ROTATE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
                   PIN: gl.constexpr, Q_LAYOUT: gl.constexpr):  # fmt: skip
    """Grid: one block per multiprocessor. counter_ptr: int32, zero when the pre-pass has finished.

    Queries either as they are, at q_ptr, to be rotated here, or as q_desc, rotated.

    What a call does not use is None, and costs nothing: sinks (HQ,), kv_starts and kv_lens (B,) int32, cap_scale to
    right as in the portable kernel. Packed sequences, B = 1, have o itself and its strides beside its descriptor, and
    ``slots`` tiles of a head, of which the table behind the counter says which hold queries.
    """
    # Instead of what a partition does not use: Triton 3.6 fails on arguments without a use.
    NONE: gl.constexpr = None
    STARTS: gl.constexpr = starts_ptr is not None
    PACKED: gl.constexpr = slots is not None
    # Where a tile's keys may begin after key 0, or end before NK, it is announced with them.
    SOME: gl.constexpr = STARTS or lens_ptr is not None or left is not None
    RANGED: gl.constexpr = PACKED_BOUNDS if PACKED else BOUNDS if SOME else 0
    DTYPE: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = q_desc is not None
    if WIDE:
        q_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
        o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D // 2], o_desc.layout)
    else:
        q_smem = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, BLOCK_D], Q_LAYOUT)
        o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [RING * (NUMBERS + RANGED), 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if RANGED:
        raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(raw, count=1)
    for i in gl.static_range(RING):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS if WIDE else CONSUMERS + 1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1 if WIDE else CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    # Twice, because constants stay constants in literal tuples only, and lists cannot be added.
    if WIDE:
        gl.warp_specialize([
            (attend, (
                0, o_desc, o_ptr, o_strides, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty,
                k_full, k_empty, v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, cap_scale, left, right,
                NQ, NONE if RANGED else NK, D, BLOCK_N, BLOCK_D, STAGES, LONG, IS_CAUSAL, BOUNDED, RANGED, STARTS,
                WIDE, PIN,
            )),
            (attend, (
                1, o_desc, o_ptr, o_strides, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty,
                k_full, k_empty, v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, cap_scale, left, right,
                NQ, NONE if RANGED else NK, D, BLOCK_N, BLOCK_D, STAGES, LONG, IS_CAUSAL, BOUNDED, RANGED, STARTS,
                WIDE, PIN,
            )),
            (load, (
                q_desc, k_desc, v_desc, counter_ptr, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, tile_smem, tile_full, tile_empty, raw if RANGED else NONE, starts_ptr, lens_ptr, left,
                right, num_tiles, num_heads, section, NONE if PACKED else HQ, GROUP_SIZE, NONE if PACKED else NQ,
                NONE if PACKED else NK, slots, BLOCK_N, STAGES, IS_CAUSAL, BOUNDED, RANGED, PDL,
            )),
        ], [4, 1], [ATTEND_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend, (
                0, o_desc, o_ptr, o_strides, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty,
                k_full, k_empty, v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, cap_scale, left, right,
                NQ, NONE if RANGED else NK, D, BLOCK_N, BLOCK_D, STAGES, LONG, IS_CAUSAL, BOUNDED, RANGED, STARTS,
                WIDE, PIN,
            )),
            (attend, (
                1, o_desc, o_ptr, o_strides, lse_ptr, sinks_ptr, q_smem, k_smem, v_smem, o_smem, q_full, q_empty,
                k_full, k_empty, v_full, v_empty, tile_smem, tile_full, tile_empty, qk_scale, cap_scale, left, right,
                NQ, NONE if RANGED else NK, D, BLOCK_N, BLOCK_D, STAGES, LONG, IS_CAUSAL, BOUNDED, RANGED, STARTS,
                WIDE, PIN,
            )),
            (rotate_queries, (
                q_ptr, cos_ptr, sin_ptr, q_smem, q_full, q_empty, tile_smem, tile_full, tile_empty, q_strides,
                cos_strides, sin_strides, q_sign, NONE if PACKED else NQ, NONE if RANGED else NK, D, R, BLOCK_D,
                INTERLEAVED, RANGED, LONG,
            )),
            (load, (
                NONE, k_desc, v_desc, counter_ptr, NONE, k_smem, v_smem, NONE, NONE, k_full, k_empty,
                v_full, v_empty, tile_smem, tile_full, tile_empty, raw if RANGED else NONE, starts_ptr, lens_ptr, left,
                right, num_tiles, num_heads, section, NONE if PACKED else HQ, GROUP_SIZE, NONE if PACKED else NQ,
                NONE if PACKED else NK, slots, BLOCK_N, STAGES, IS_CAUSAL, BOUNDED, RANGED, PDL,
            )),
        ], [4, 4, 1], [ATTEND_REGISTERS, ROTATE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
