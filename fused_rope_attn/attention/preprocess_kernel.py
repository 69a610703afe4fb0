"""What a backward pass computes once, before its products: row statistics, and where asked Q and K rotated.

The portable kernels and those of sm_90 share it.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.prepass_kernel import rotate_heads
from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, padded_row
from fused_rope_attn.kernels.rotation import head_rotation
from fused_rope_attn.kernels.schedule import block_of_heads, let_next_launch_start
from fused_rope_attn.kernels.softmax import LOG2E
from fused_rope_attn.kernels.tiles import Origin, RowFormat, Rows, head_rows, load_tile, rows_from, shifted, store_tile


@triton.jit(do_not_specialize=["NQ", "pitch", "NK", "B", "HQ", "HKV", "num_sequences", "position_limit"])
def preprocess_kernel(o_ptr, do_ptr, lse_ptr, stats_ptr, accumulator_ptr, progress_ptr, q_ptr, q_rot_ptr, k_ptr,
                      k_rot_ptr, cos_ptr, sin_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, o_strides, do_strides, q_strides,
                      q_rot_strides, k_strides, k_rot_strides, cos_strides, sin_strides, q_sign, B, HQ, HKV, NQ, pitch,
                      NK, num_sequences, position_limit, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                      READS_LENGTHS: tl.constexpr, ROTATE: tl.constexpr, PROGRESS_ROWS: tl.constexpr,
                      PAD_TO: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Row statistics, and with ROTATE the rotated copies of q and k. Grid: query programs, then key programs.

    ``stats`` (2, B, HQ, pitch) float32: lse in base 2 (+inf where a row saw nothing, so that p = exp2(s - lse) = 0) and
    delta = sum(o * do); both are 0 from NQ to pitch, which are equal for packed sequences. Set to zero, where they are
    not None: ``accumulator`` (B, HQ, pitch, BLOCK_D) float32, and ``progress`` (B * HKV + B * HQ * pitch /
    PROGRESS_ROWS,) int32.

    PAD_TO, a multiple of BLOCK_N or 0: stats, accumulator and the rotated q have a packed sequence's rows from
    ``padded_row`` on, up to a multiple of PAD_TO, where rows without a query are 0 too; pitch is that of
    ``count_tiles`` tiles.
    """
    let_next_launch_start(PDL)
    pid = tl.program_id(0)
    if PAD_TO:
        q_blocks = pitch // BLOCK_N
    else:
        q_blocks = count_tiles(pitch, num_sequences, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    if pid < q_blocks * q_chunks * B:
        block, chunk, batch = block_of_heads(pid, q_blocks, q_chunks)
        first_head = chunk * HEADS
        last_head = tl.minimum(first_head + HEADS, HQ)
        len_k = existing_keys(lens_ptr, batch, NK)
        # A sequence's first row and its number of rows, in what the caller passed and in what is padded.
        first_row = 0
        first_padded = 0
        len_q = NQ
        len_padded = pitch
        if cu_q_ptr is not None:
            if PAD_TO:
                PARTS: tl.constexpr = PAD_TO // BLOCK_N
                sequence, first_row, len_q, tile = packed_tile(block // PARTS, cu_q_ptr, num_sequences, NQ, PAD_TO)
                block = tile * PARTS + block % PARTS
                first_padded = padded_row(first_row, sequence, PAD_TO)
                len_padded = tl.cdiv(len_q, PAD_TO) * PAD_TO
            else:
                sequence, first_row, len_q, block = packed_tile(block, cu_q_ptr, num_sequences, NQ, BLOCK_N)
                first_padded = first_row
                len_padded = len_q
            first_k, len_k = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        start = block * BLOCK_N
        offs = tl.arange(0, BLOCK_N)
        origin = Origin(batch=batch, head=0, row=first_row)
        o_rows = rows_from(head_rows(o_ptr, o_strides, origin, len_q, row_format), start)
        do_rows = rows_from(head_rows(do_ptr, do_strides, origin, len_q, row_format), start)
        exists = offs < len_q - start
        exists_padded = offs < len_padded - start
        for head in range(first_head, last_head):
            h = tl.cast(head, tl.int64)
            o = load_tile(shifted(o_rows, h * o_strides[1]), offs, CHECK_ROWS=True)
            do = load_tile(shifted(do_rows, h * do_strides[1]), offs, CHECK_ROWS=True)
            bh = batch * HQ + h
            lse = tl.load(lse_ptr + bh * NQ + first_row + start + offs, mask=exists, other=0.0)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            row_index = bh * pitch + first_padded + start + offs
            tl.store(stats_ptr + row_index, lse, mask=exists_padded)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            if READS_LENGTHS:
                # Padding may hold anything: nothing of a row that saw nothing may reach a gradient.
                delta = tl.where(lse == float("inf"), 0.0, delta)
            tl.store(stats_ptr + tl.cast(B, tl.int64) * HQ * pitch + row_index, delta, mask=exists_padded)
            if progress_ptr is not None:
                words = progress_ptr + B * HKV + row_index // PROGRESS_ROWS
                tl.store(words, 0, mask=(row_index % PROGRESS_ROWS == 0) & exists_padded)
            if accumulator_ptr is not None:
                cleared = Rows(
                    ptr=accumulator_ptr + (bh * pitch + first_padded + start) * BLOCK_D,
                    stride_row=BLOCK_D,
                    stride_column=1,
                    num_rows=len_padded - start,
                    first_row=None,
                    format=RowFormat(D=BLOCK_D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=False),
                )
                store_tile(cleared, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), offs)
        if ROTATE:
            written = len_q
            if PAD_TO:
                written = len_padded
            origin_rot = Origin(batch=batch, head=0, row=first_padded)
            rotate_heads(
                rows_from(head_rows(q_ptr, q_strides, origin, len_q, row_format), start),
                rows_from(head_rows(q_rot_ptr, q_rot_strides, origin_rot, written, row_format), start),
                q_strides[1],
                q_rot_strides[1],
                head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, position_limit, R, INTERLEAVED),
                start + (len_k - len_q),
                q_sign,
                first_head,
                last_head,
                BLOCK_N,
            )
    else:
        if ROTATE:
            pid -= q_blocks * q_chunks * B
            block, chunk, batch = block_of_heads(pid, count_tiles(NK, num_sequences, BLOCK_N), tl.cdiv(HKV, HEADS))
            first_head = chunk * HEADS
            last_head = tl.minimum(first_head + HEADS, HKV)
            if progress_ptr is not None:
                if block == 0:
                    for head in range(first_head, last_head):
                        tl.store(progress_ptr + batch * HKV + head, 0)
            len_k = existing_keys(lens_ptr, batch, NK)
            first_row = 0
            if cu_k_ptr is not None:
                sequence, first_row, len_k, block = packed_tile(block, cu_k_ptr, num_sequences, NK, BLOCK_N)
            start = block * BLOCK_N
            origin = Origin(batch=batch, head=0, row=first_row)
            rotate_heads(
                rows_from(head_rows(k_ptr, k_strides, origin, len_k, row_format), start),
                rows_from(head_rows(k_rot_ptr, k_rot_strides, origin, len_k, row_format), start),
                k_strides[1],
                k_rot_strides[1],
                head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, position_limit, R, INTERLEAVED),
                start,
                1.0,
                first_head,
                last_head,
                BLOCK_N,
            )
