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
  them from their registers. In a fixed order three warps do this, or two tell the warpgroups when, see
  ``backward_transfers``.
"""

from fused_rope_attn.attention.hopper import (
    backward_block,
    backward_by_columns,
    backward_by_keys,
    backward_epilogue,
    backward_transfers,
    channels,
    latent_kernels,
    shapes,
)
from fused_rope_attn.attention.hopper import masks as hopper_masks
from fused_rope_attn.kernels import lengths, masks, products, rotation, schedule, tiles
from fused_rope_attn.kernels import norm as norms
from fused_rope_attn.kernels.intervals import WORD
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

_NUMBERS = (
    "num_heads heads_per_section most_overlapping HQ HKV GROUP_SIZE group_parts NQ pitch NK stats_size num_sequences "
    "window num_blocks".split()
)


@jit(do_not_specialize=_NUMBERS)
def backward_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dq_accumulator, progress_ptr, cos_ptr, sin_ptr, dk_ptr,
                    dv_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, k_norm_ptr, raw_k_ptr, k_sums_ptr, q_rope_desc,
                    k_rope_desc, dk_parts_ptr, key_rows_ptr, blocks_ptr, blind_ptr, shares_ptr, slots_ptr,
                    slot_counters_ptr, dk_strides, dv_strides, dk_parts_strides, cos_strides, sin_strides,
                    raw_k_strides, qk_scale, cap_scale, norm_eps, norm_offset, window, num_blocks, num_heads, HQ, HKV,
                    GROUP_SIZE, group_parts, NQ, pitch, NK, num_sequences, stats_size, heads_per_section,
                    most_overlapping, D: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr,
                    DO_STAGES: gl.constexpr, INTERLEAVED: gl.constexpr, READS_LENGTHS: gl.constexpr,
                    HAS_KEYS_BEFORE_WINDOW: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr, PDL: gl.constexpr,
                    DS_LAYOUT: gl.constexpr, TOKEN_TABLES: gl.constexpr):  # fmt: skip
    """Compute dk, dv of a block of keys of one key head, and their share of dQ.

    Grid: (``count_tiles`` of the keys * B * HKV * group_parts).

    q_desc, do_desc (B, HQ, NQ, D) and k_desc, v_desc (B, HKV, NK, D), q and k rotated; stats_desc the pre-process's
    (2 * B * HQ * pitch,) lse and delta, ``stats_size`` of each; pitch: NQ rounded up to whole query blocks.
    dq_accumulator (B, HQ, pitch, ``needed_columns``) float32, zero before the first block: a descriptor, or for BLOCK_D
    beyond 128 a pointer, each BLOCK_M rows in the order of ``add_half``.

    Arguments that a call does not use are None: starts_ptr and lens_ptr, kv_starts and kv_lens (B,) int32; cu_q_ptr,
    cu_k_ptr and num_sequences; window, for ``kernels.masks.window_of``; cap_scale, as in ``ScoreScale``; and for a
    norm of k its weights k_norm (D,), raw_k (B, HKV, NK, D), k as the caller gave it, and k_sums, float32: the parts of
    the weights' gradient, one of each warpgroup, (2 * programs, D), or for BLOCK_D beyond 128 one of both, (programs,
    D). READS_LENGTHS: there are starts, lens or packed sequences. HAS_KEYS_BEFORE_WINDOW: there are keys before the
    first query's window. num_heads: B * HKV. group_parts: programs for each tile of a group, which divide
    the group's query heads, None: one.
    heads_per_section groups, or parts of them, are scheduled together. DS_LAYOUT: of a tile of dS in shared memory, or
    in latent attention of a warpgroup's P.

    Multi-head latent attention: q_desc and k_desc hold the columns that are not rotated, q_rope_desc (B, HQ, NQ, R) and
    k_rope_desc (B, 1, NK, R) the rotated ones. ``dk_parts`` (B, HKV, NK, R) float32 gets each head's part of the
    rotated gradient of the latter, ``dk`` is not rotated, and dQ is left to ``latent_dq_kernel``: dq_accumulator is
    None. Else these three are None.

    key_rows and blocks, of ``key_rows_kernel`` for num_blocks blocks of KEYS keys, and blind, of ``write_blind_rows``
    for pitch rows: calls with intervals have them in place of all other masks; lens says where the tables end.
    shares, of ``deal_shares``: the work of each program, unless dQ is added in a fixed order. slots (slots,
    ``slot_words``) float32 and slot_counters (slots, CONSUMERS) int32, zero before the first block: where several
    programs add up dk and dv of the same keys.

    TOKEN_TABLES: row t of the tables belongs to packed key t.

    Packed sequences, B = 1: the pre-process pads q, stats and dq to whole query blocks of BLOCK_M rows, so that a block
    that is added to dq stays within a sequence.

    progress_ptr and most_overlapping, for ``overlapped_tile``: None, or dQ is added in the order of the key blocks, and
    progress is the int32 words of ``Progress``, zero before the first block. The first key block that sees a query
    block then stores its dQ, so that dq_accumulator need not be zero for BLOCK_D up to 128 without intervals.
    """
    IS_ORDERED: gl.constexpr = most_overlapping is not None
    IS_PACKED: gl.constexpr = num_sequences is not None
    IS_LATENT: gl.constexpr = k_rope_desc is not None
    HAS_INTERVALS: gl.constexpr = blocks_ptr is not None
    SPLITS_COLUMNS: gl.constexpr = BLOCK_D > 128
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = shapes.KEYS if SPLITS_COLUMNS else shapes.BACKWARD_BLOCK_N
    # True if tiles may hold rows of keys that do not exist, before or after the others, inside the tensors.
    ZEROES_ROWS: gl.constexpr = READS_LENGTHS or HAS_KEYS_BEFORE_WINDOW
    # True if the mask may let keys through that do not exist. A causal window hides all of them but those before
    # kv_starts.
    CLAMPS_WEIGHTS: gl.constexpr = window[0] is None or not masks.is_causal(window[1]) or starts_ptr is not None
    # The next launch then finds what the pre-process has written, and need not wait for this one.
    if not IS_LATENT:
        schedule.let_next_launch_start(PDL)

    # The block's keys, and the query blocks that see them.
    pid = gl.program_id(0)
    num_tiles = lengths.count_tiles(NK, num_sequences, BLOCK_N)
    share = None
    if shares_ptr is not None:
        shares_ptr += pid * backward_block.SHARE_WORDS
        share = backward_block.load_share(shares_ptr)
        tile, bh = share.tile, share.head
    elif IS_ORDERED:
        tile, bh = schedule.overlapped_tile(pid, num_tiles, num_heads, heads_per_section, most_overlapping)
    elif group_parts is not None:
        tile, part = schedule.scheduled_tile(
            pid, num_tiles, num_heads * group_parts, heads_per_section, LAST_TILE_FIRST=False
        )
        bh = part // group_parts
        share = backward_block.Share(
            tile, bh, part % group_parts, group_parts, slot=(bh * num_tiles + tile) * (group_parts - 1)
        )
    else:
        tile, bh = schedule.scheduled_tile(pid, num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST=False)
    batch = bh // HKV
    head = bh % HKV
    first_head, own_heads = None, GROUP_SIZE
    if share is not None:
        first_head = head * GROUP_SIZE
    if group_parts is not None:
        begin = GROUP_SIZE * share.number // group_parts
        own_heads = GROUP_SIZE * (share.number + 1) // group_parts - begin
        first_head += begin
    if IS_PACKED:
        # A block past its sequence's end sees no query and writes nothing.
        CU_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        sequence, first_k, NK, tile = lengths.packed_tile(
            tile, cu_k_ptr, cu_q_ptr, num_sequences, NK, NQ, BLOCK_N, CU_LAYOUT
        )
        first_q, NQ = lengths.packed_partner(cu_q_ptr, sequence, num_sequences, NQ)
        dk_ptr += first_k.to(gl.int64) * dk_strides[2]
        dv_ptr += first_k.to(gl.int64) * dv_strides[2]
        if IS_LATENT:
            dk_parts_ptr += first_k.to(gl.int64) * dk_parts_strides[2]
        if k_norm_ptr is not None:
            raw_k_ptr += first_k.to(gl.int64) * raw_k_strides[2]
    num_rows = NQ if IS_PACKED else pitch
    start_n = tile * BLOCK_N
    num_keys = lengths.existing_keys(lens_ptr, batch, NK)
    if IS_PACKED:
        num_keys = lengths.rows_of_sequence(sequence, num_sequences, NK)
    mask = masks.sequence_mask(starts_ptr, batch, num_keys - NQ, num_keys, masks.window_of(window), READS_LENGTHS)
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
    first_key = mask.first_key
    if first_key is None:
        first_key = gl.to_tensor(0)
    # Without lengths no key is before the first one, or the window hides those keys.
    intervals = None
    hidden_ptr = None
    if HAS_INTERVALS:
        key_rows_ptr += batch.to(gl.int64) * 2 * num_blocks * shapes.KEYS
        blocks_ptr += batch.to(gl.int64) * (4 + shapes.KEYS // WORD) * num_blocks
        blind_ptr += batch.to(gl.int64) * (pitch // WORD)
        intervals = hopper_masks.KeyIntervals(key_rows_ptr, blocks_ptr, num_blocks)
        queries = backward_block.interval_queries(intervals, start_n, share, BLOCK_N // shapes.KEYS)
        hidden_ptr = blocks_ptr + 4 * num_blocks + start_n // WORD
    mask = masks.Mask(num_keys, first_key if READS_LENGTHS else None, mask.window, READS_LENGTHS, intervals)
    keys = backward_block.KeyBlock(batch=batch, head=head, start_n=start_n)
    num_masked = queries.num_masked if CLAMPS_WEIGHTS and not HAS_INTERVALS else None
    queries = backward_block.QueryBlocks(queries.first, num_masked, queries.count, IS_ORDERED)

    # The same in rows of the tensors. Packed tensors hold all sequences, padded ones whole tiles of each sequence.
    start_row, first_block, first_key_row, end_key_row = start_n, queries.first, first_key, num_keys
    do_shift, do_end = None, None
    if IS_PACKED:
        padded = lengths.padded_row(first_q, sequence, BLOCK_M)
        start_row, first_key_row, end_key_row = start_n + first_k, first_key + first_k, num_keys + first_k
        first_block, first_row = queries.first + padded // BLOCK_M, first_row + padded
        do_shift, do_end = first_q - padded, first_q + NQ
        if SPLITS_COLUMNS:
            dq_accumulator += padded.to(gl.int64) * BLOCK_D
    key_rows = backward_block.KeyBlock(batch=batch, head=head, start_n=start_row)
    query_rows = backward_block.QueryBlocks(first_block, num_masked=None, count=queries.count, IN_ORDER=IS_ORDERED)
    if not ZEROES_ROWS:
        first_key_row, end_key_row = None, None
    existing = backward_transfers.ExistingRows(
        first_row if READS_LENGTHS else None, first_key_row, end_key_row, do_shift, do_end, hidden_ptr, blind_ptr
    )

    # Records and shared memory of the warps.
    sizes = backward_block.Sizes(HQ=HQ, first_head=first_head, num_heads=own_heads, NQ=NQ, pitch=pitch, NK=NK)
    descriptors = backward_transfers.Descriptors(q_desc, k_desc, v_desc, do_desc, stats_desc, q_rope_desc, k_rope_desc)
    scale = products.ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=None)
    key_norm = None
    if k_norm_ptr is not None:
        exchange = None
        if SPLITS_COLUMNS:
            exchange = backward_epilogue.allocate_exchange()
        SUMS: gl.constexpr = 1 if SPLITS_COLUMNS else shapes.CONSUMERS
        norm, raw = norms.Norm(k_norm_ptr, norm_eps, norm_offset, D), tiles.TensorView(raw_k_ptr, raw_k_strides)
        row = pid
        if share is not None:
            row = bh * num_tiles + share.tile
        key_norm = backward_block.KeyNorm(norm, raw, k_sums_ptr + row.to(gl.int64) * (SUMS * D), exchange)
    tables = rotation.RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    if TOKEN_TABLES:
        tables = rotation.tables_from(tables, first_k)
    dk, dv = tiles.TensorView(dk_ptr, dk_strides), tiles.TensorView(dv_ptr, dv_strides)
    row_format = tiles.RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    of_parts = share if group_parts is not None else None
    gradients = backward_block.KeyGradients(
        dk, dv, tables, key_norm, row_format, of_parts, shares_ptr, slots_ptr, slot_counters_ptr
    )
    if IS_LATENT:
        buffers = latent_kernels.allocate_buffers(descriptors, Q_STAGES, DO_STAGES, DS_LAYOUT)
    elif SPLITS_COLUMNS:
        HAS_CAP: gl.constexpr = cap_scale is not None
        buffers = backward_by_columns.allocate_buffers(descriptors, Q_STAGES, DO_STAGES, DS_LAYOUT, HAS_CAP, IS_ORDERED)
    else:
        NUM_ADDERS: gl.constexpr = backward_transfers.ADDERS if IS_ORDERED else 1
        buffers = backward_by_keys.allocate_buffers(
            descriptors, dq_accumulator, Q_STAGES, DO_STAGES, DS_LAYOUT, NUM_ADDERS
        )
    arrival = None
    if ZEROES_ROWS or HAS_INTERVALS:
        arrival = channels.allocate_barriers(1).index(0)
        mbarrier.init(arrival, count=1)
    destinations = backward_transfers.Destinations(
        buffers.k, buffers.v, buffers.q, buffers.do, buffers.lse, buffers.delta, arrival
    )

    progress = None
    if IS_ORDERED:
        progress = backward_transfers.Progress(progress_ptr, bh, tile, num_begun, intervals)

    if IS_LATENT:
        dk_parts = tiles.TensorView(dk_parts_ptr, dk_parts_strides)
        rope_format = tiles.RowFormat(R, R, USE_INT64_OFFSETS)
        gradients = latent_kernels.LatentGradients(dk, dv, dk_parts, gradients.format, rope_format)
        own_sizes = backward_block.Sizes(HQ=None, first_head=None, num_heads=None, NQ=NQ, pitch=None, NK=NK)
        gl.warp_specialize(
            [
                (latent_kernels.accumulate_latent, (0, buffers, gradients, keys, queries, own_sizes, mask, scale)),
                (latent_kernels.accumulate_latent, (1, buffers, gradients, keys, queries, own_sizes, mask, scale)),
                (
                    backward_transfers.load,
                    (descriptors, destinations, key_rows, query_rows, existing, sizes, stats_size, PDL, IS_LATENT),
                ),
            ],
            [4, 1],
            [shapes.MULTIPLY_REGISTERS, shapes.LOAD_REGISTERS],
        )
    elif SPLITS_COLUMNS and IS_ORDERED:
        gl.warp_specialize(
            [
                (
                    backward_by_columns.accumulate_by_columns,
                    (0, buffers, dq_accumulator, gradients, keys, queries, sizes, mask, scale),
                ),
                (
                    backward_by_columns.accumulate_by_columns,
                    (1, buffers, dq_accumulator, gradients, keys, queries, sizes, mask, scale),
                ),
                (
                    backward_transfers.load,
                    (descriptors, destinations, key_rows, query_rows, existing, sizes, stats_size, PDL, IS_LATENT),
                ),
                (backward_transfers.permit_additions, (buffers.permits, progress, query_rows, sizes, PDL)),
                (
                    backward_transfers.announce_additions,
                    (buffers.permits, buffers.additions, progress, query_rows, sizes, PDL),
                ),
            ],
            [4, 1, 1, 1],
            [shapes.MULTIPLY_REGISTERS, shapes.LOAD_REGISTERS, shapes.LOAD_REGISTERS, shapes.LOAD_REGISTERS],
        )
    elif SPLITS_COLUMNS:
        gl.warp_specialize(
            [
                (
                    backward_by_columns.accumulate_by_columns,
                    (0, buffers, dq_accumulator, gradients, keys, queries, sizes, mask, scale),
                ),
                (
                    backward_by_columns.accumulate_by_columns,
                    (1, buffers, dq_accumulator, gradients, keys, queries, sizes, mask, scale),
                ),
                (
                    backward_transfers.load,
                    (descriptors, destinations, key_rows, query_rows, existing, sizes, stats_size, PDL, IS_LATENT),
                ),
            ],
            [4, 1],
            [shapes.MULTIPLY_REGISTERS, shapes.LOAD_REGISTERS],
        )
    elif IS_ORDERED:
        gl.warp_specialize(
            [
                (backward_by_keys.accumulate_by_keys, (0, buffers, gradients, keys, queries, sizes, mask, scale)),
                (backward_by_keys.accumulate_by_keys, (1, buffers, gradients, keys, queries, sizes, mask, scale)),
                (
                    backward_transfers.load,
                    (descriptors, destinations, key_rows, query_rows, existing, sizes, stats_size, PDL, IS_LATENT),
                ),
                (
                    backward_transfers.reduce_in_order,
                    (0, dq_accumulator, buffers.dq, progress, key_rows, query_rows, sizes, PDL),
                ),
                (
                    backward_transfers.reduce_in_order,
                    (1, dq_accumulator, buffers.dq, progress, key_rows, query_rows, sizes, PDL),
                ),
                (
                    backward_transfers.reduce_in_order,
                    (2, dq_accumulator, buffers.dq, progress, key_rows, query_rows, sizes, PDL),
                ),
            ],
            [4, 1, 1, 1, 1],
            [
                shapes.MULTIPLY_REGISTERS,
                shapes.LOAD_REGISTERS,
                shapes.LOAD_REGISTERS,
                shapes.LOAD_REGISTERS,
                shapes.LOAD_REGISTERS,
            ],
        )
    else:
        gl.warp_specialize(
            [
                (backward_by_keys.accumulate_by_keys, (0, buffers, gradients, keys, queries, sizes, mask, scale)),
                (backward_by_keys.accumulate_by_keys, (1, buffers, gradients, keys, queries, sizes, mask, scale)),
                (
                    backward_transfers.load,
                    (descriptors, destinations, key_rows, query_rows, existing, sizes, stats_size, PDL, IS_LATENT),
                ),
                (backward_transfers.reduce, (dq_accumulator, buffers.dq, key_rows, query_rows, sizes)),
            ],
            [4, 1, 1],
            [shapes.MULTIPLY_REGISTERS, shapes.LOAD_REGISTERS, shapes.LOAD_REGISTERS],
        )
