# mypy: ignore-errors
"""sm_90 attention backward: one warp-specialised kernel of five products between a pre- and a post-process.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot.

The pre-process rotates q and k once and computes the row statistics. The main kernel rotates only dK, in its epilogue.
dQ is summed in float32, in an order that varies, and the last bits vary with it, or in a fixed order. The post-process
rotates it back.

A block of the main kernel owns the keys of one key head from one row on and visits the query blocks of the group's
heads. Its warps meet only at barriers in shared memory:

- two warpgroups multiply. ``accumulate_by_keys`` has 128 keys, and each warpgroup owns half of them; above head dim 128
  ``accumulate_by_columns`` has 64 keys, and each warpgroup owns half of the columns. ``accumulate_latent`` (multi-head
  latent attention) has 128 keys, and makes no dQ;
- ``load``, one warp: loads K and V and keeps the channels of Q and dO blocks full through the TMA;
- ``reduce``, one warp: adds the dQ blocks to the accumulator through the TMA. Above head dim 128 the two warpgroups add
  them from their registers. In a fixed order three warps do this, or two tell the warpgroups when to do it.
"""

import triton.language as tl
from triton import constexpr_function

from fused_rope_attn.attention.hopper import (
    backward_accumulate,
    backward_block,
    backward_transfers,
    channels,
    latent_kernels,
)
from fused_rope_attn.attention.hopper import masks as hopper_masks
from fused_rope_attn.attention.hopper.backward_accumulate import accumulate_by_columns, accumulate_by_keys
from fused_rope_attn.attention.hopper.latent_kernels import accumulate_latent
from fused_rope_attn.kernels import masks, schedule, sequences
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

_NUMBERS = "GROUP_SIZE pitch stats_size num_sequences heads_per_section window_left window_right".split()


@record
class BackwardMasks:
    """The masks of a call but its window; what a call does not use is None.

    key_rows and blocks, of ``key_rows_kernel`` for blocks of KEYS keys, and blind, of ``write_blind_rows`` for pitch
    rows: calls with intervals have them in place of all other masks; lens says where the tables end.
    """

    starts_ptr: gl.tensor | None  # kv_starts and kv_lens (B,) int32
    lens_ptr: gl.tensor | None
    cu_q_ptr: gl.tensor | None
    cu_k_ptr: gl.tensor | None
    key_rows_ptr: gl.tensor | None
    blocks_ptr: gl.tensor | None
    blind_ptr: gl.tensor | None
    READS_LENGTHS: tl.constexpr  # there are starts, lens or packed sequences
    HAS_KEYS_BEFORE_WINDOW: tl.constexpr  # there are keys before the first query's window


@record
class Programs:
    """The division of work among programs, the order in which they add to dQ, and blocks of Q and of dO in flight."""

    group_parts: gl.tensor | None  # programs for each tile of a group, which divide its query heads; None: one
    most_overlapping: gl.tensor | None  # for ``overlapped_tile``; None: dQ is added in any order
    progress_ptr: gl.tensor | None  # in a fixed order the words of ``Progress``, zero before the first block
    Q_STAGES: tl.constexpr
    DO_STAGES: tl.constexpr
    PDL: tl.constexpr  # launches overlap


@constexpr_function
def warps_that_add(is_latent, splits_columns, is_ordered):
    """Return how many warps add dQ, or with wide heads say when the warps that multiply may add it."""
    if is_latent:
        return 0
    return 2 * is_ordered if splits_columns else backward_transfers.ADDERS.value if is_ordered else 1


@jit(do_not_specialize=_NUMBERS)
def backward_kernel(q_desc, do_desc, k_desc, v_desc, stats_desc, dq_accumulator, q_rope_desc, k_rope_desc, call_masks,
                    gradients, programs, scale, GROUP_SIZE, pitch, stats_size, num_sequences, heads_per_section,
                    window_left, window_right):  # fmt: skip
    """Compute dk, dv of a block of keys of one key head, and their share of dQ.

    Grid: (``count_tiles`` of the keys * B * HKV * group_parts), or one for each share of ``deal_shares``.

    q_desc, do_desc (B, HQ, NQ, D) and k_desc, v_desc (B, HKV, NK, D), q and k rotated; stats_desc the pre-process's
    (2 * B * HQ * pitch,) lse and delta, stats_size of each; pitch: NQ rounded up to whole query blocks. dq_accumulator
    (B, HQ, pitch, ``needed_columns``) float32, zero before the first block: a descriptor, or for BLOCK_D beyond 128 a
    pointer, each BLOCK_M rows in the order of ``add_half``. In a fixed order the first key block that sees a query
    block stores its dQ, so that dq_accumulator need not be zero for BLOCK_D up to 128 without intervals.

    call_masks: ``BackwardMasks``; gradients: ``KeyGradients``; programs: ``Programs``; scale: ``ScoreScale``.
    heads_per_section groups, or parts of them, are scheduled together. The window is as in ``kernels.masks.Window``.

    Multi-head latent attention: q_desc and k_desc hold the columns that are not rotated, q_rope_desc (B, HQ, NQ, R) and
    k_rope_desc (B, 1, NK, R) the rotated ones. dk is not rotated, and dQ is left to ``latent_dq_kernel``:
    dq_accumulator is None. Else these descriptors are None.

    Packed sequences, B = 1: the pre-process pads q, stats and dq to whole query blocks of BLOCK_M rows, so that a block
    that is added to dq stays within a sequence.
    """
    call_masks, gradients, programs, scale = unpack((call_masks, gradients, programs, scale))
    PDL: gl.constexpr = programs.PDL
    IS_ORDERED: gl.constexpr = programs.most_overlapping is not None
    IS_PACKED: gl.constexpr = num_sequences is not None
    IS_LATENT: gl.constexpr = k_rope_desc is not None
    HAS_INTERVALS: gl.constexpr = call_masks.blocks_ptr is not None
    READS_LENGTHS: gl.constexpr = call_masks.READS_LENGTHS
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    SPLITS_COLUMNS: gl.constexpr = BLOCK_D > 128
    SPLITS_KEYS: gl.constexpr = not (IS_LATENT or SPLITS_COLUMNS)
    BLOCK_M: gl.constexpr = channels.BACKWARD_BLOCK_M
    BLOCK_N: gl.constexpr = channels.KEYS if SPLITS_COLUMNS else channels.BACKWARD_BLOCK_N
    # True if tiles may hold rows of keys that do not exist, before or after the others, inside the tensors.
    ZEROES_ROWS: gl.constexpr = READS_LENGTHS or call_masks.HAS_KEYS_BEFORE_WINDOW
    # True if the mask may let keys through that do not exist. A causal window hides all of them but those before
    # kv_starts.
    CLAMPS_WEIGHTS: gl.constexpr = (
        window_left is None or not masks.is_causal(window_right) or call_masks.starts_ptr is not None
    )
    # The next launch then finds what the pre-process has written, and need not wait for this one.
    if not IS_LATENT:
        schedule.let_next_launch_start(PDL)

    # The block's keys, and the query blocks that see them. NQ is of a parameter before that of NK, because LLVM orders
    # the terms of positions so: the other way round the loop at 64 columns spills 8 bytes with 3.9.0.
    HQ, HKV, NQ, NK = do_desc.shape[1], v_desc.shape[1], do_desc.shape[2], v_desc.shape[2]
    num_heads = v_desc.shape[0] * HKV
    pid = gl.program_id(0)
    num_tiles = schedule.count_tiles(NK, num_sequences, BLOCK_N)
    share = None
    if gradients.share_ptr is not None:
        gradients = replace(gradients, share_ptr=gradients.share_ptr + pid * backward_block.SHARE_WORDS)
        share = backward_block.load_share(gradients.share_ptr)
        tile, bh = share.tile, share.head
    elif IS_ORDERED:
        tile, bh = schedule.overlapped_tile(pid, num_tiles, num_heads, heads_per_section, programs.most_overlapping)
    elif programs.group_parts is not None:
        parts = programs.group_parts
        tile, part = schedule.scheduled_tile(
            pid, num_tiles, num_heads * parts, heads_per_section, LAST_TILE_FIRST=False
        )
        bh = part // parts
        share = backward_block.Share(tile, bh, part % parts, parts, slot=(bh * num_tiles + tile) * (parts - 1))
        gradients = replace(gradients, share=share)
    else:
        tile, bh = schedule.scheduled_tile(pid, num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST=False)
    batch, head = bh // HKV, bh % HKV
    first_head, own_heads = None, GROUP_SIZE
    if share is not None:
        first_head = head * GROUP_SIZE
    if programs.group_parts is not None:
        begin = GROUP_SIZE * share.number // programs.group_parts
        own_heads = GROUP_SIZE * (share.number + 1) // programs.group_parts - begin
        first_head += begin
    if IS_PACKED:
        # A block past its sequence's end sees no query and writes nothing.
        CU_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        cu_q_ptr, cu_k_ptr = call_masks.cu_q_ptr, call_masks.cu_k_ptr
        sequence, first_k, NK, tile = sequences.packed_tile(
            tile, cu_k_ptr, cu_q_ptr, num_sequences, NK, NQ, BLOCK_N, CU_LAYOUT
        )
        first_q, NQ = sequences.packed_partner(cu_q_ptr, sequence, num_sequences, NQ)
        gradients = backward_block.gradients_from(gradients, first_k)
    num_rows = NQ if IS_PACKED else pitch
    start_n = tile * BLOCK_N
    num_keys = sequences.existing_keys(call_masks.lens_ptr, batch, NK)
    if IS_PACKED:
        num_keys = sequences.rows_of_sequence(sequence, num_sequences, NK)
    window = masks.Window(window_left, window_right, HIDES_PAIRS=window_left is not None or window_right is not None)
    mask = masks.sequence_mask(call_masks.starts_ptr, batch, num_keys - NQ, num_keys, window, READS_LENGTHS)
    queries, first_row = backward_block.query_blocks(mask, start_n, NQ, num_rows, BLOCK_M, BLOCK_N)
    # The query blocks that no program with a smaller number sees: this program stores their dQ instead of adding it.
    num_begun = queries.count
    if IS_ORDERED:
        if HAS_INTERVALS:
            num_begun = 0
        elif tile > 0:
            others, _ = backward_block.query_blocks(mask, start_n - BLOCK_N, NQ, num_rows, BLOCK_M, BLOCK_N)
            end = queries.first + queries.count
            num_begun = end - gl.minimum(gl.maximum(queries.first, others.first + others.count), end)
    # Without lengths no key is before the first one, or the window hides those keys.
    first_key = mask.first_key
    if first_key is None:
        first_key = gl.to_tensor(0)
    intervals, hidden_ptr, blind_ptr = None, None, None
    if HAS_INTERVALS:
        # One or two blocks for each tile, also if the last one has fewer keys.
        num_blocks = num_tiles * (BLOCK_N // channels.KEYS)
        key_rows_ptr = call_masks.key_rows_ptr + batch.to(gl.int64) * 2 * num_blocks * channels.KEYS
        blocks_ptr = call_masks.blocks_ptr + batch.to(gl.int64) * (4 + channels.KEYS // masks.WORD) * num_blocks
        blind_ptr = call_masks.blind_ptr + batch.to(gl.int64) * (pitch // masks.WORD)
        intervals = hopper_masks.KeyIntervals(key_rows_ptr, blocks_ptr, num_blocks)
        queries = backward_block.interval_queries(intervals, start_n, share, BLOCK_N // channels.KEYS)
        hidden_ptr = blocks_ptr + 4 * num_blocks
    mask = masks.Mask(num_keys, first_key if READS_LENGTHS else None, window, READS_LENGTHS, intervals)
    keys = backward_block.KeyBlock(batch=batch, head=head, start_n=start_n)
    num_masked = queries.num_masked if CLAMPS_WEIGHTS and not HAS_INTERVALS else None
    queries = backward_block.QueryBlocks(queries.first, num_masked, queries.count, IS_ORDERED)

    # The same in rows of the tensors. Packed tensors hold all sequences, padded ones whole tiles of each sequence.
    start_row, first_block, first_key_row, end_key_row = start_n, queries.first, first_key, num_keys
    do_shift, do_end = None, None
    if IS_PACKED:
        padded = sequences.padded_row(first_q, sequence, BLOCK_M)
        start_row, first_key_row, end_key_row = start_n + first_k, first_key + first_k, num_keys + first_k
        first_block, first_row = queries.first + padded // BLOCK_M, first_row + padded
        do_shift, do_end = first_q - padded, first_q + NQ
        if SPLITS_COLUMNS:
            dq_accumulator += padded.to(gl.int64) * BLOCK_D
    key_rows = backward_block.KeyBlock(batch=batch, head=head, start_n=start_row)
    query_rows = backward_block.QueryBlocks(first_block, num_masked=None, count=queries.count, IN_ORDER=IS_ORDERED)
    if not ZEROES_ROWS:
        first_key_row, end_key_row = None, None
    if not READS_LENGTHS:
        first_row = None

    # Shared memory and channels.
    sizes = backward_block.Sizes(HQ=HQ, first_head=first_head, num_heads=own_heads, NQ=NQ, pitch=pitch, NK=NK)
    buffers = backward_block.allocate_buffers(
        q_desc, do_desc, k_desc, v_desc, stats_desc, q_rope_desc, k_rope_desc, programs.Q_STAGES, programs.DO_STAGES
    )
    if IS_LATENT:
        buffers = latent_kernels.add_buffers(buffers)
    elif SPLITS_COLUMNS:
        buffers = backward_accumulate.add_buffers_by_columns(buffers, scale, IS_ORDERED)
    else:
        NUM_ADDERS: gl.constexpr = backward_transfers.ADDERS if IS_ORDERED else 1
        buffers = backward_accumulate.add_buffers_by_keys(buffers, dq_accumulator, NUM_ADDERS)
    arrival = None
    if ZEROES_ROWS or HAS_INTERVALS:
        arrival = channels.allocate_barriers(1).index(0)
        mbarrier.init(arrival, count=1)
    k = backward_transfers.Operand(
        k_desc, buffers.k, arrival, rope_desc=k_rope_desc, first=first_key_row, end=end_key_row, words_ptr=hidden_ptr
    )
    v = replace(k, desc=v_desc, channel=buffers.v, rope_desc=None)
    do = backward_transfers.Operand(
        do_desc, buffers.do, arrival, stats_desc, buffers.delta, None, first_row, do_end, blind_ptr, do_shift
    )
    q = replace(do, desc=q_desc, channel=buffers.q, stats=buffers.lse, rope_desc=q_rope_desc)
    if not IS_LATENT:
        q = replace(q, end=None, shift=None)

    # The warps: two warpgroups that multiply, one warp that loads, and up to three that add dQ or say when to add it.
    loads = (q, do, k, v, key_rows, query_rows, sizes, stats_size, backward_transfers.LaunchOrder(PDL, IS_LATENT))
    zero, one, two = backward_block.Member(0), backward_block.Member(1), backward_block.Member(2)
    if IS_ORDERED:
        progress = backward_transfers.Progress(programs.progress_ptr, bh, tile, num_begun, intervals, PDL)
    own = (gradients, keys, queries, sizes, mask, scale)
    if IS_LATENT:
        own_sizes = backward_block.Sizes(HQ=None, first_head=None, num_heads=None, NQ=NQ, pitch=None, NK=NK)
        own = (replace(gradients, tables=None), keys, queries, own_sizes, mask, scale)
    if SPLITS_COLUMNS:
        own = (dq_accumulator,) + own
        order = (buffers.permits, query_rows, sizes)
    else:
        adds = (dq_accumulator, buffers.dq, key_rows, query_rows, sizes)
    first, second = (zero, buffers) + own, (one, buffers) + own
    WARPS_THAT_ADD: gl.constexpr = warps_that_add(IS_LATENT, SPLITS_COLUMNS, IS_ORDERED)
    gl.warp_specialize(
        ([(accumulate_latent, first), (accumulate_latent, second)] if IS_LATENT else [])
        + ([(accumulate_by_columns, first), (accumulate_by_columns, second)] if SPLITS_COLUMNS else [])
        + ([(accumulate_by_keys, first), (accumulate_by_keys, second)] if SPLITS_KEYS else [])
        + [(backward_transfers.load, loads)]
        + ([(backward_transfers.reduce, adds)] if WARPS_THAT_ADD == 1 else [])
        + ([(backward_transfers.permit_additions, (progress,) + order)] if WARPS_THAT_ADD == 2 else [])
        + (
            [(backward_transfers.announce_additions, (progress,) + order + (buffers.additions,))]
            if WARPS_THAT_ADD == 2
            else []
        )
        + ([(backward_transfers.reduce_in_order, (zero, progress) + adds)] if WARPS_THAT_ADD == 3 else [])
        + ([(backward_transfers.reduce_in_order, (one, progress) + adds)] if WARPS_THAT_ADD == 3 else [])
        + ([(backward_transfers.reduce_in_order, (two, progress) + adds)] if WARPS_THAT_ADD == 3 else []),
        [channels.WARPGROUP_WARPS, 1] + [1] * WARPS_THAT_ADD,
        [channels.MULTIPLY_REGISTERS, channels.LOAD_REGISTERS] + [channels.LOAD_REGISTERS] * WARPS_THAT_ADD,
    )
