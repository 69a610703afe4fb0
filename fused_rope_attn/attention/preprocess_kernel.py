"""What a backward pass computes once, before its products: row statistics, and where asked Q and K rotated.

The portable kernels and those of sm_90 share it.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.prepass_kernel import rotate_rows
from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, padded_row
from fused_rope_attn.kernels.primitives import LOG2E, head_tables, let_next_launch_start, load_tile, store_tile


@triton.jit(do_not_specialize=["NQ", "pitch", "NK", "B", "HQ", "HKV", "num_sequences", "position_limit"])
def preprocess_kernel(o_ptr, do_ptr, lse_ptr, stats_ptr, accumulator_ptr, progress_ptr, q_ptr, q_rot_ptr, k_ptr,
                      k_rot_ptr, cos_ptr, sin_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, o_strides, do_strides, q_strides,
                      q_rot_strides, k_strides, k_rot_strides, cos_strides, sin_strides, q_sign, B, HQ, HKV, NQ, pitch,
                      NK, num_sequences, position_limit, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, BOUNDED: tl.constexpr,
                      ROTATE: tl.constexpr, PROGRESS_ROWS: tl.constexpr, PADDED: tl.constexpr, LONG: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """Row statistics, and with ROTATE the rotated copies of q and k. Grid: query programs, then key programs.

    ``stats`` (2, B, HQ, pitch) float32: lse in base 2 (+inf where a row saw nothing, so that p = exp2(s - lse) = 0) and
    delta = sum(o * do); both are 0 from NQ to pitch, which are equal for packed sequences. Set to zero, where they are
    not None: ``accumulator`` (B, HQ, pitch, BLOCK_D) float32, and ``progress`` (B * HKV + B * HQ * pitch /
    PROGRESS_ROWS,) int32.

    PADDED, a multiple of BLOCK_N or 0: stats, accumulator and the rotated q have a packed sequence's rows from
    ``padded_row`` on, up to a multiple of PADDED, where rows without a query are 0 too; pitch is that of
    ``count_tiles`` tiles.
    """
    let_next_launch_start(PDL)
    pid = tl.program_id(0)
    if PADDED:
        q_blocks = pitch // BLOCK_N
    else:
        q_blocks = count_tiles(pitch, num_sequences, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    if pid < q_blocks * q_chunks * B:
        block = pid % q_blocks
        chunk = (pid // q_blocks) % q_chunks
        batch = (pid // (q_blocks * q_chunks)).to(tl.int64)
        first_row = 0
        place = 0
        len_q = NQ
        padded = pitch
        len_k = NK
        if lens_ptr is not None:
            len_k = existing_keys(lens_ptr, batch, NK)
        if cu_q_ptr is not None:
            if PADDED:
                PARTS: tl.constexpr = PADDED // BLOCK_N
                sequence, first_row, len_q, tile = packed_tile(block // PARTS, cu_q_ptr, num_sequences, NQ, PADDED)
                block = tile * PARTS + block % PARTS
                place = padded_row(first_row, sequence, PADDED)
                padded = tl.cdiv(len_q, PADDED) * PADDED
            else:
                sequence, first_row, len_q, block = packed_tile(block, cu_q_ptr, num_sequences, NQ, BLOCK_N)
                place = first_row
                padded = len_q
            first_k, len_k = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        start = block * BLOCK_N
        start64 = tl.cast(first_row + start, tl.int64)
        rows = tl.arange(0, BLOCK_N)
        left = len_q - start
        last_head = tl.minimum(chunk * HEADS + HEADS, HQ)
        for head in range(chunk * HEADS, last_head):
            h = tl.cast(head, tl.int64)
            o_rows = o_ptr + batch * o_strides[0] + h * o_strides[1] + start64 * o_strides[2]
            do_rows = do_ptr + batch * do_strides[0] + h * do_strides[1] + start64 * do_strides[2]
            o = load_tile(o_rows, rows, left, o_strides[2], o_strides[3], D, BLOCK_D, True, LONG)
            do = load_tile(do_rows, rows, left, do_strides[2], do_strides[3], D, BLOCK_D, True, LONG)
            bh = batch * HQ + h
            lse = tl.load(lse_ptr + bh * NQ + first_row + start + rows, mask=rows < left, other=0.0)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            row_index = bh * pitch + place + start + rows
            tl.store(stats_ptr + row_index, lse, mask=rows < padded - start)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            if BOUNDED:
                # Padding may hold anything: nothing of a row that saw nothing may reach a gradient.
                delta = tl.where(lse == float("inf"), 0.0, delta)
            tl.store(stats_ptr + tl.cast(B, tl.int64) * HQ * pitch + row_index, delta, mask=rows < padded - start)
            if progress_ptr is not None:
                words = progress_ptr + B * HKV + row_index // PROGRESS_ROWS
                tl.store(words, 0, mask=(row_index % PROGRESS_ROWS == 0) & (rows < padded - start))
            if accumulator_ptr is not None:
                nothing = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                cleared = accumulator_ptr + (bh * pitch + place + start) * BLOCK_D
                store_tile(cleared, nothing, rows, padded - start, BLOCK_D, 1, BLOCK_D, BLOCK_D, False)
        if ROTATE:
            tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
            if cu_q_ptr is not None:
                q_ptr += tl.cast(first_row, tl.int64) * q_strides[2]
                q_rot_ptr += tl.cast(place, tl.int64) * q_rot_strides[2]
            written = len_q
            if PADDED:
                written = padded
            rotate_rows(
                q_ptr, q_rot_ptr, q_strides, q_rot_strides, tables, q_sign, len_q, len_k - len_q, position_limit, batch,
                chunk * HEADS, last_head, start, BLOCK_N, D, R, BLOCK_D, INTERLEAVED, LONG, written,
            )  # fmt: skip
    else:
        if ROTATE:
            pid -= q_blocks * q_chunks * B
            k_blocks = count_tiles(NK, num_sequences, BLOCK_N)
            k_chunks = tl.cdiv(HKV, HEADS)
            block = pid % k_blocks
            chunk = (pid // k_blocks) % k_chunks
            batch = (pid // (k_blocks * k_chunks)).to(tl.int64)
            if progress_ptr is not None:
                if block == 0:
                    for head in range(chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HKV)):
                        tl.store(progress_ptr + batch * HKV + head, 0)
            tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
            len_k = NK
            if lens_ptr is not None:
                len_k = existing_keys(lens_ptr, batch, NK)
            if cu_k_ptr is not None:
                sequence, first_row, len_k, block = packed_tile(block, cu_k_ptr, num_sequences, NK, BLOCK_N)
                k_ptr += tl.cast(first_row, tl.int64) * k_strides[2]
                k_rot_ptr += tl.cast(first_row, tl.int64) * k_rot_strides[2]
            rotate_rows(
                k_ptr, k_rot_ptr, k_strides, k_rot_strides, tables, 1.0, len_k, 0, position_limit, batch, chunk * HEADS,
                tl.minimum(chunk * HEADS + HEADS, HKV), block * BLOCK_N, BLOCK_N, D, R, BLOCK_D, INTERLEAVED, LONG,
            )  # fmt: skip
