# mypy: ignore-errors
"""The post-process of the sm_90 backward: dq from its float32 accumulator."""

import triton
import triton.language as tl

from fused_rope_attn.attention.hopper import channels
from fused_rope_attn.kernels import rotation as rotations, schedule, sequences, softmax, tiles
from fused_rope_attn.kernels.records import record, unpack


@triton.jit
def staged_rows(rows):
    """Return the rows of the accumulator to which ``backward_transfers.stage_rows`` has moved ``rows``."""
    return (rows // 8) * 8 + (rows % 4) * 2 + (rows // 4) % 2


@triton.jit
def panel_offsets(rows, columns, BLOCK_D: tl.constexpr):
    """Return the offsets of numbers in an accumulator to which ``add_half`` has added: (len(rows), len(columns)).

    It is stored as panels of 8 columns, row after row, because a tensor core's results are 8 rows by 8 columns a
    register pair, two numbers a lane.
    """
    row = (rows // channels.BACKWARD_BLOCK_M) * (channels.BACKWARD_BLOCK_M * BLOCK_D) + (
        rows % channels.BACKWARD_BLOCK_M
    ) * 8
    column = (columns // 8) * (8 * channels.BACKWARD_BLOCK_M) + columns % 8
    return row[:, None] + column[None, :]


@record
class SinkParts:
    """The sinks (HQ,), and each program's part of their gradient, (B * row blocks, HQ) float32."""

    sinks_ptr: tl.tensor
    dsinks_ptr: tl.tensor
    stats_ptr: tl.tensor  # the pre-process's


@record
class PostprocessSizes:
    """Tiles of the post-process."""

    format: tiles.RowFormat
    HEADS: tl.constexpr
    BLOCK_N: tl.constexpr
    COLUMNS: tl.constexpr
    IN_PANELS: tl.constexpr  # the accumulator is in the order of ``panel_offsets`` instead of ``staged_rows``
    TOKEN_TABLES: tl.constexpr  # row t of the tables belongs to packed token t; sequences have as many keys as queries
    PDL: tl.constexpr


@triton.jit(do_not_specialize="HQ NQ pitch NK num_sequences stats_size".split())
def postprocess_kernel(accumulator_ptr, progress_ptr, dq_out, tables, sinks, lens_ptr, cu_q_ptr, cu_k_ptr,
                       softmax_scale, HQ, NQ, pitch, NK, num_sequences, stats_size, sizes):  # fmt: skip
    """Read dq from the accumulator (B, HQ, pitch, COLUMNS) float32, scale it, rotate it back, and round it once.

    dq_out: ``TensorView``; sinks: ``SinkParts`` or None; sizes: ``PostprocessSizes``. Grid: (row blocks * head chunks *
    B), row blocks as ``count_tiles`` counts them. Packed sequences are padded as for ``backward_kernel``. With
    ``progress``, see ``backward_transfers.Progress``, rows that no program began are zero.
    """
    dq_out, tables, sinks, sizes = unpack((dq_out, tables, sinks, sizes))
    row_format = sizes.format
    BLOCK_D: tl.constexpr = row_format.BLOCK_D
    HEADS: tl.constexpr = sizes.HEADS
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    COLUMNS: tl.constexpr = sizes.COLUMNS
    num_blocks = schedule.count_tiles(NQ, num_sequences, BLOCK_N)
    num_chunks = tl.cdiv(HQ, HEADS)
    pid = tl.program_id(0)
    chunk = (pid // num_blocks) % num_chunks
    batch = (pid // (num_blocks * num_chunks)).to(tl.int64)
    block = pid % num_blocks
    first_row = 0
    padded = 0
    if cu_q_ptr is not None:
        sequence, first_row, NQ, block = sequences.packed_tile(
            block, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK_N
        )
        first_k, NK = sequences.packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        padded = sequences.padded_row(first_row, sequence, channels.BACKWARD_BLOCK_M)
    start = block * BLOCK_N
    offs = tl.arange(0, BLOCK_N)
    staged = staged_rows(offs)
    NK = sequences.existing_keys(lens_ptr, batch, NK)
    rotation = rotations.head_rotation(tables, batch, NK)
    if sizes.TOKEN_TABLES:
        rotation = rotations.rotation_from(rotation, first_k)
    angles = rotations.load_angles(rotation, offs + (start + NK - NQ), BLOCK_D)
    columns = tl.arange(0, BLOCK_D)
    schedule.wait_for_previous_launch(sizes.PDL)
    for head in range(chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HQ)):
        origin = tiles.Origin(batch, tl.cast(head, tl.int64), first_row + start)
        row = (batch * HQ + origin.head) * pitch + padded + start
        if sizes.IN_PANELS:
            # row - start is a multiple of BLOCK_M, and ``start`` need not be.
            words = accumulator_ptr + (row - start) * BLOCK_D + panel_offsets(start + offs, columns, BLOCK_D)
        else:
            words = accumulator_ptr + row * COLUMNS + staged[:, None] * COLUMNS + columns[None, :]
        added = None
        if cu_q_ptr is not None:
            # The block may be past its sequence's end, and past the end of the accumulator.
            added = offs[:, None] < NQ - start
        if progress_ptr is not None:
            word = progress_ptr + row // channels.BACKWARD_BLOCK_M
            if added is None:
                added = tl.load(word) != 0
            else:
                added = added & (tl.load(word, mask=start < NQ, other=0) != 0)
        if BLOCK_D != COLUMNS:
            exists = columns[None, :] < COLUMNS
            added = exists if added is None else exists & added
        dq = tiles.load_where(words, added, 0.0) * softmax_scale
        first, second = rotations.unpack_pairs(dq)
        first, second = rotations.rotate_back(first, second, angles)
        dq_rows = tiles.head_rows(dq_out, origin, NQ - start, row_format)
        rotations.store_pairs(dq_rows, first, second, offs, rotation)
        if sinks is not None:
            lse = tl.load(sinks.stats_ptr + row + offs, mask=offs < NQ - start, other=float("inf"))
            delta = tl.load(sinks.stats_ptr + stats_size + row + offs, mask=offs < NQ - start, other=0.0)
            part = softmax.sink_gradient(tl.load(sinks.sinks_ptr + head), lse, delta)
            tl.store(sinks.dsinks_ptr + (batch * num_blocks + pid % num_blocks) * HQ + head, part)
