# mypy: ignore-errors
"""The pre-process of a backward pass: row statistics, and rotated Q and K if the call asks for them.

The portable kernels and those of sm_90 share it.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.prepass_kernel import rotate_heads, sequence_rows
from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation, rotation_from
from fused_rope_attn.kernels.schedule import block_of_heads, let_next_launch_start
from fused_rope_attn.kernels.softmax import lse_in_base_2, output_delta
from fused_rope_attn.kernels.tiles import (
    RowFormat,
    Rows,
    TensorView,
    heads_from,
    load_tile,
    rows_of_head,
    sequence_heads,
    store_tile,
)


@record
class Statistics:
    """The kernel's results for each query row in addition to q, each (B, HQ, pitch)."""

    stats_ptr: tl.tensor  # float32: lse in base 2, (B, HQ, pitch), followed by delta, the same
    accumulator_ptr: tl.tensor | None  # (B, HQ, pitch, COLUMNS) float32, set to zero
    progress_ptr: tl.tensor | None  # int32: a word for every PROGRESS_ROWS rows, set to zero
    pitch: tl.tensor  # rows of a head in the results
    size: tl.tensor  # B * HQ * pitch
    PROGRESS_ROWS: tl.constexpr
    COLUMNS: tl.constexpr  # of the accumulator
    READS_LENGTHS: tl.constexpr


@triton.jit
def write_statistics(out, o, do, lse_ptr, dlse_ptr, rows, batch_head, start, NQ, BLOCK_N: tl.constexpr):
    """Write lse and delta of rows [start, start + BLOCK_N) of the head batch * HQ + head = batch_head (int64).

    out: ``Statistics``; rows: ``SequenceRows``; o and do: ``Rows`` from ``start`` on; lse_ptr
    and dlse_ptr (or None): (B, HQ, NQ).
    """
    offs = tl.arange(0, BLOCK_N)
    exists = offs < rows.num_rows - start
    is_written = offs < rows.num_padded - start
    o_tile = load_tile(o, offs, CHECK_ROWS=True)
    do_tile = load_tile(do, offs, CHECK_ROWS=True)
    lse = tl.load(lse_ptr + batch_head * NQ + rows.first_row + start + offs, mask=exists, other=0.0)
    lse = lse_in_base_2(lse)
    dlse = None
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + batch_head * NQ + rows.first_row + start + offs, mask=exists, other=0.0)
    index = batch_head * out.pitch + rows.first_padded + start + offs
    tl.store(out.stats_ptr + index, lse, mask=is_written)
    delta = output_delta(o_tile, do_tile, lse, dlse, out.READS_LENGTHS)
    tl.store(out.stats_ptr + out.size + index, delta, mask=is_written)
    if out.progress_ptr is not None:
        words = out.progress_ptr + index // out.PROGRESS_ROWS
        tl.store(words, 0, mask=(index % out.PROGRESS_ROWS == 0) & is_written)
    if out.accumulator_ptr is not None:
        BLOCK_D: tl.constexpr = o.format.BLOCK_D
        cleared_ptr = out.accumulator_ptr + (batch_head * out.pitch + rows.first_padded + start) * out.COLUMNS
        row_format = RowFormat(out.COLUMNS, BLOCK_D, USE_INT64_OFFSETS=False)
        cleared = Rows(cleared_ptr, out.COLUMNS, 1, rows.num_padded - start, first_row=None, format=row_format)
        store_tile(cleared, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), offs)


@triton.jit(do_not_specialize="NQ pitch NK B HQ HKV num_sequences position_limit num_counters".split())
def preprocess_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, accumulator_ptr, progress_ptr, q_ptr, q_rot_ptr,
                      k_ptr, k_rot_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, counters_ptr, lens_ptr, cu_q_ptr,
                      cu_k_ptr, o_strides, do_strides, q_strides, q_rot_strides, k_strides, k_rot_strides, cos_strides,
                      sin_strides, q_sign, norm_eps, norm_offset, num_counters, B, HQ, HKV, NQ, pitch, NK,
                      num_sequences, position_limit, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                      INTERLEAVED: tl.constexpr, READS_LENGTHS: tl.constexpr, TOKEN_TABLES: tl.constexpr,
                      ROTATE: tl.constexpr, PROGRESS_ROWS: tl.constexpr, PAD_TO: tl.constexpr, COLUMNS: tl.constexpr,
                      USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write row statistics, and with ROTATE the rotated copies of q and k, normed before if the call has weights q_norm
    and k_norm (D,). Grid: query programs, then key programs. o and do have DV columns.

    ``stats`` (2, B, HQ, pitch) float32: lse in base 2 (+inf if a row saw nothing, so that p = exp2(s - lse) = 0) and
    delta = sum(o * do) - dlse, where dlse (B, HQ, NQ) float32 is the gradient of lse, or None; both are 0 from NQ to
    pitch, which are equal for packed sequences. Set to zero, unless they are None: ``accumulator`` (B, HQ, pitch,
    COLUMNS) float32, ``progress`` (B * HQ * pitch / PROGRESS_ROWS,) int32, and ``counters`` (num_counters,)
    int32.

    PAD_TO, a multiple of BLOCK_N or 0: stats, accumulator and the rotated q have a packed sequence's rows from
    ``padded_row`` on, up to a multiple of PAD_TO. Rows without a query are 0 there too, and pitch is that of
    ``count_tiles`` tiles.
    """
    let_next_launch_start(PDL)
    pid = tl.program_id(0)
    if counters_ptr is not None:
        if pid == 0:
            for first in range(0, num_counters, 1024):
                words = first + tl.arange(0, 1024)
                tl.store(counters_ptr + words, tl.zeros((1024,), tl.int32), mask=words < num_counters)
    if PAD_TO:
        q_blocks = pitch // BLOCK_N
    else:
        q_blocks = count_tiles(pitch, num_sequences, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    value_format = RowFormat(DV, BLOCK_DV, USE_INT64_OFFSETS)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    if pid < q_blocks * q_chunks * B:
        block, chunk, batch = block_of_heads(pid, q_blocks, q_chunks)
        first_head = chunk * HEADS
        last_head = tl.minimum(first_head + HEADS, HQ)
        len_k = existing_keys(lens_ptr, batch, NK)
        block, sequence, rows = sequence_rows(block, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, pitch, BLOCK_N, PAD_TO)
        if cu_q_ptr is not None:
            _, len_k = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        start = block * BLOCK_N
        o = sequence_heads(TensorView(o_ptr, o_strides), batch, rows.first_row, rows.num_rows, value_format)
        do = sequence_heads(TensorView(do_ptr, do_strides), batch, rows.first_row, rows.num_rows, value_format)
        o, do = heads_from(o, start), heads_from(do, start)
        size = tl.cast(B, tl.int64) * HQ * pitch
        out = Statistics(stats_ptr, accumulator_ptr, progress_ptr, pitch, size, PROGRESS_ROWS, COLUMNS, READS_LENGTHS)
        for head in range(first_head, last_head):
            o_rows, do_rows = rows_of_head(o, head), rows_of_head(do, head)
            batch_head = batch * HQ + tl.cast(head, tl.int64)
            write_statistics(out, o_rows, do_rows, lse_ptr, dlse_ptr, rows, batch_head, start, NQ, BLOCK_N)
        if ROTATE:
            num_rot = rows.num_padded if PAD_TO else rows.num_rows
            q, q_rot = TensorView(q_ptr, q_strides), TensorView(q_rot_ptr, q_rot_strides)
            q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
            if TOKEN_TABLES:
                position_limit -= rows.first_row
            rotation = head_rotation(tables, batch, position_limit, q_norm)
            if TOKEN_TABLES:
                rotation = rotation_from(rotation, rows.first_row)
            rotate_heads(
                sequence_heads(q, batch, rows.first_row, rows.num_rows, row_format),
                sequence_heads(q_rot, batch, rows.first_padded, num_rot, row_format),
                rotation,
                start=start,
                q_offset=len_k - rows.num_rows,
                sign=q_sign,
                first_head=first_head,
                last_head=last_head,
                BLOCK_N=BLOCK_N,
            )
    else:
        if ROTATE:
            pid -= q_blocks * q_chunks * B
            block, chunk, batch = block_of_heads(pid, count_tiles(NK, num_sequences, BLOCK_N), tl.cdiv(HKV, HEADS))
            first_head = chunk * HEADS
            last_head = tl.minimum(first_head + HEADS, HKV)
            len_k = existing_keys(lens_ptr, batch, NK)
            first_k = 0
            if cu_k_ptr is not None:
                _, first_k, len_k, block = packed_tile(block, cu_k_ptr, None, num_sequences, NK, 0, BLOCK_N)
            k, k_rot = TensorView(k_ptr, k_strides), TensorView(k_rot_ptr, k_rot_strides)
            k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
            if TOKEN_TABLES:
                position_limit -= first_k
            rotation = head_rotation(tables, batch, position_limit, k_norm)
            if TOKEN_TABLES:
                rotation = rotation_from(rotation, first_k)
            rotate_heads(
                sequence_heads(k, batch, first_k, len_k, row_format),
                sequence_heads(k_rot, batch, first_k, len_k, row_format),
                rotation,
                start=block * BLOCK_N,
                q_offset=0,
                sign=1.0,
                first_head=first_head,
                last_head=last_head,
                BLOCK_N=BLOCK_N,
            )
