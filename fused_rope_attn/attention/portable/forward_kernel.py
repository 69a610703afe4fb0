"""Portable attention forward: Q rotated once per block, K rotated in the loop (inline) or read rotated (prepass)."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile
from fused_rope_attn.kernels.masks import first_key, key_range, visible
from fused_rope_attn.kernels.primitives import (
    LN2,
    LOG2E,
    head_source,
    head_tables,
    load_head_tile,
    load_rotated,
    online_softmax,
    prefetch_rows,
    scheduled_tile,
    store_tile,
    tanh,
    wait_for_previous_launch,
)


@triton.jit
def score_block(q, positions_q, k_source, k_strides, tables, place, start_n, NK, start, left, right, cap_scale,
                D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, INLINE: tl.constexpr,
                MASKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Unscaled scores of a query block with keys [start_n, start_n + BLOCK_N); -inf where MASKED says so.

    Capped scores are tanh(scores * cap_scale); the cap itself is in qk_scale then.
    """
    offs_n = tl.arange(0, BLOCK_N)
    if INLINE:
        first_row = None
        if start is not None:
            first_row = start - start_n
        k = load_rotated(
            k_source + tl.cast(start_n, tl.int64) * k_strides[2], offs_n, NK - start_n, k_strides, tables, start_n, NK,
            1.0, D, R, BLOCK_D, INTERLEAVED, MASKED, LONG, None, None, first_row,
        )  # fmt: skip
    else:
        k = load_head_tile(
            k_source, place, start_n, offs_n, NK, k_strides[2], k_strides[3], D, BLOCK_N, BLOCK_D, TMA, MASKED,
            LONG, BOUNDED, start,
        )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if cap_scale is not None:
        scores = tanh(scores * cap_scale, q.dtype == tl.float32)
    if MASKED:
        positions_k = (start_n + offs_n)[None, :]
        exists = visible(positions_q[:, None], positions_k, NK, IS_CAUSAL, start, left, right, BOUNDED)
        scores = tl.where(exists, scores, float("-inf"))
    return scores


@triton.jit
def add_values(acc, p, correction, v_source, v_strides, place, start_n, NK, start, D: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr, CHECK_ROWS: tl.constexpr,
               PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """acc * correction + p V for the values of keys [start_n, start_n + BLOCK_N)."""
    v = load_head_tile(
        v_source, place, start_n, tl.arange(0, BLOCK_N), NK, v_strides[2], v_strides[3], D, BLOCK_N, BLOCK_D, TMA,
        CHECK_ROWS, LONG, BOUNDED, start,
    )  # fmt: skip
    return tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)


@triton.jit
def attend_range(acc, p, correction, row_max, row_sum, q, positions_q, k_source, v_source, k_strides, v_strides,
                 tables, place, first, last, NK, start, left, right, qk_scale, cap_scale, D: tl.constexpr,
                 R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                 IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, INLINE: tl.constexpr, MASKED: tl.constexpr,
                 CHECK_VALUES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                 LONG: tl.constexpr):  # fmt: skip
    """Fold keys [first, last) into the running softmax, one block behind with the values.

    ``p`` and ``correction`` belong to the block before ``first``, whose values are still to be added: their product
    then runs on the tensor cores while the softmax of the next block runs beside it. CHECK_VALUES: some of the values
    in the block before may not exist.
    """
    for start_n in range(first, last, BLOCK_N):
        scores = score_block(
            q, positions_q, k_source, k_strides, tables, place, start_n, NK, start, left, right, cap_scale, D, R,
            BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, MASKED, PRECISION, TMA, LONG,
        )  # fmt: skip
        acc = add_values(
            acc, p, correction, v_source, v_strides, place, start_n - BLOCK_N, NK, start, D, BLOCK_N, BLOCK_D,
            BOUNDED, CHECK_VALUES, PRECISION, TMA, LONG,
        )  # fmt: skip
        p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, qk_scale, MASKED)
    return acc, p, correction, row_max, row_sum


@triton.jit(do_not_specialize=["NQ", "NK", "HQ", "HKV", "GROUP_SIZE", "num_heads", "section", "num_sequences", "left",
                               "right"])  # fmt: skip
def forward_kernel(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, o_ptr, lse_ptr, sinks_ptr, starts_ptr, lens_ptr, cu_q_ptr,
                   cu_k_ptr, q_strides, k_strides, v_strides, o_strides, cos_strides, sin_strides, qk_scale, q_sign,
                   cap_scale, left, right, num_heads, HQ, GROUP_SIZE, NQ, NK, num_sequences, section,
                   D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
                   INLINE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
                   PREFETCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One block of BLOCK_M query rows of one head. Grid: (``count_tiles`` of the queries * B * HQ).

    What a call does not use is None, and costs nothing: sinks to cu_k, cap_scale to right, num_sequences.
    """
    tiles = count_tiles(NQ, num_sequences, BLOCK_M)
    tile, bh = scheduled_tile(tl.program_id(0), tiles, num_heads, section, LAST_FIRST=IS_CAUSAL)
    batch = (bh // HQ).to(tl.int64)
    head = (bh % HQ).to(tl.int64)
    lse_base = lse_ptr + tl.cast(bh, tl.int64) * NQ
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    first_q = 0
    first_k = 0
    if lens_ptr is not None:
        NK = existing_keys(lens_ptr, batch, NK)
    if cu_q_ptr is not None:
        sequence, first_q, NQ, tile = packed_tile(tile, cu_q_ptr, num_sequences, NQ, BLOCK_M)
        if tile * BLOCK_M >= NQ:
            return
        first_k, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        lse_base += first_q
    place_q = (batch, head, first_q)
    place_k = (batch, head // GROUP_SIZE, first_k)
    q_base = head_source(q_ptr, place_q, q_strides, False)
    k_source = head_source(k_ptr, place_k, k_strides, TMA)
    v_source = head_source(v_ptr, place_k, v_strides, TMA)
    o_base = head_source(o_ptr, place_q, o_strides, False)

    start_m = tile * BLOCK_M
    q_offset = NK - NQ
    rows = tl.arange(0, BLOCK_M)
    positions_q = start_m + q_offset + rows
    q_rows = q_base + tl.cast(start_m, tl.int64) * q_strides[2]
    q = load_rotated(
        q_rows, rows, NQ - start_m, q_strides, tables, start_m + q_offset, NK, q_sign, D, R, BLOCK_D, INTERLEAVED,
        True, LONG,
    )  # fmt: skip

    # The first block is taken apart; blocks in [full_first, full_last) run without masks.
    start = None
    if starts_ptr is not None or left is not None:
        start = first_key(starts_ptr, batch, q_offset, NK, left)
    first, full_first, full_last, last = key_range(
        start_m, q_offset, NK, start, left, right, IS_CAUSAL, BOUNDED, BLOCK_M, BLOCK_N
    )
    if start is None:
        first = 0
        full_first = BLOCK_N
    else:
        # The loop without masks adds the values of the block before it: not those of the block that ``start`` is in.
        full_first = tl.maximum(full_first, first + tl.where(start > first, 2 * BLOCK_N, BLOCK_N))
    full_last = tl.maximum(full_last, full_first)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if PREFETCH > 0:
        # Values need no rotation: they come while the keys are turned.
        prefetch_rows(v_source, first, last, v_strides[2], PREFETCH, BLOCK_D, LONG)
    wait_for_previous_launch(PDL)
    scores = score_block(
        q, positions_q, k_source, k_strides, tables, place_k, first, NK, start, left, right, cap_scale, D, R,
        BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, True, PRECISION, TMA, LONG,
    )  # fmt: skip
    p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, qk_scale, True)
    if start is not None:
        acc, p, correction, row_max, row_sum = attend_range(
            acc, p, correction, row_max, row_sum, q, positions_q, k_source, v_source, k_strides, v_strides, tables,
            place_k, first + BLOCK_N, tl.minimum(full_first, last), NK, start, left, right, qk_scale, cap_scale,
            D, R, BLOCK_N, BLOCK_D, INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, True, True, PRECISION, TMA, LONG,
        )  # fmt: skip
    acc, p, correction, row_max, row_sum = attend_range(
        acc, p, correction, row_max, row_sum, q, positions_q, k_source, v_source, k_strides, v_strides, tables, place_k,
        full_first, full_last, NK, start, left, right, qk_scale, cap_scale, D, R, BLOCK_N, BLOCK_D,
        INTERLEAVED, IS_CAUSAL, BOUNDED, INLINE, False, False, PRECISION, TMA, LONG,
    )  # fmt: skip
    acc, p, correction, row_max, row_sum = attend_range(
        acc, p, correction, row_max, row_sum, q, positions_q, k_source, v_source, k_strides, v_strides, tables, place_k,
        full_last, last, NK, start, left, right, qk_scale, cap_scale, D, R, BLOCK_N, BLOCK_D, INTERLEAVED,
        IS_CAUSAL, BOUNDED, INLINE, True, False, PRECISION, TMA, LONG,
    )  # fmt: skip
    last_block = tl.maximum(first, (tl.cdiv(last, BLOCK_N) - 1) * BLOCK_N)
    acc = add_values(
        acc, p, correction, v_source, v_strides, place_k, last_block, NK, start, D, BLOCK_N, BLOCK_D, BOUNDED,
        True, PRECISION, TMA, LONG,
    )  # fmt: skip

    # Only a row that saw no key sums to zero; NaN counts as seen and stays NaN. Such a row has met the first block's
    # values with p = 0, which NaN or infinity among them would have turned into NaN.
    seen = row_sum != 0.0
    if sinks_ptr is not None:
        # One more key of this score, without a value; a row that saw nothing else stays as it is.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        new_max = tl.where(seen, tl.maximum(row_max, sink), 0.0)
        correction = tl.math.exp2(row_max - new_max)
        acc *= correction[:, None]
        row_sum = tl.where(seen, row_sum * correction + tl.math.exp2(sink - new_max), 0.0)
        row_max = new_max
    acc = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (row_max + tl.math.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    tl.store(lse_base + start_m + rows, lse, mask=rows < NQ - start_m)
    o_rows = o_base + tl.cast(start_m, tl.int64) * o_strides[2]
    store_tile(o_rows, acc, rows, NQ - start_m, o_strides[2], o_strides[3], D, BLOCK_D, LONG)
