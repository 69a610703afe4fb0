# mypy: ignore-errors
"""The post-process of the sm_90 backward: dq from its float32 accumulator, and the gradients of the norms."""

import triton
import triton.language as tl

from fused_rope_attn.attention import norm_gradient_kernel
from fused_rope_attn.attention.hopper import channels
from fused_rope_attn.kernels import norm as norms
from fused_rope_attn.kernels import rotation as rotations
from fused_rope_attn.kernels import schedule, sequences, softmax, tiles
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.triton_compat import gl, jit


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
class NormSums:
    """The norm of q, and sums of the gradients of both norms' weights; all float32 but the counters and gradients.

    raw: q as the caller gave it, (B, HQ, NQ, D). Each program writes its part of the gradient of q's weights, a row of
    sums (programs, D), and the last programs add the parts up, into dq_norm (D,). KEY_PARTS further programs add up the
    rows of k_sums that the main kernel has written, into dk_norm. parts: workspace, a row of D for each SUMS programs
    and each of KEY_PARTS. counters: zeros, int32; those of the sums begin at number first_counter, one for each of the
    former rows and two more.
    """

    norm: norms.Norm
    raw: tiles.TensorView
    q_sums_ptr: tl.tensor
    k_sums_ptr: tl.tensor
    sum_parts_ptr: tl.tensor
    sum_counters_ptr: tl.tensor
    dq_norm_ptr: tl.tensor
    dk_norm_ptr: tl.tensor


@record
class PostprocessSizes:
    """Tiles of the post-process.

    IN_PANELS: the accumulator is in the order of ``panel_offsets`` instead of ``staged_rows``. TOKEN_TABLES: row t of
    the tables belongs to packed token t, and sequences have as many queries as keys. PAIRS and WHOLE: the layouts of
    tiles of pairs and of whole rows, see ``load_pairs``; None: the compiler's choice.
    """

    format: tiles.RowFormat
    HEADS: tl.constexpr
    BLOCK_N: tl.constexpr
    COLUMNS: tl.constexpr
    IN_PANELS: tl.constexpr
    PAIRS: tl.constexpr
    WHOLE: tl.constexpr
    KEY_PARTS: tl.constexpr
    TOKEN_TABLES: tl.constexpr
    PDL: tl.constexpr


def postprocess_kernel(accumulator_ptr, progress_ptr, dq_out, tables, sinks, sums, lens_ptr, cu_q_ptr, cu_k_ptr,
                       softmax_scale, HQ, NQ, pitch, NK, num_sequences, stats_size, k_sums, first_counter,
                       sizes):  # fmt: skip
    """Read dq from the accumulator (B, HQ, pitch, COLUMNS) float32, scale it, rotate it back, and round it once.

    dq_out: ``TensorView``; sinks: ``SinkParts`` or None, sums: ``NormSums`` or None; sizes: ``PostprocessSizes``. Grid:
    (row blocks * head chunks * B), row blocks as ``count_tiles`` counts them, and KEY_PARTS more with norms. k_sums:
    the rows of k_sums_ptr. Packed sequences are padded as for ``backward_kernel``. With ``progress``, see
    ``backward_transfers.Progress``, rows that no program began are zero.
    """
    dq_out, tables, sinks, sums, sizes = unpack((dq_out, tables, sinks, sums, sizes))
    row_format = sizes.format
    D: tl.constexpr = row_format.D
    BLOCK_D: tl.constexpr = row_format.BLOCK_D
    HEADS: tl.constexpr = sizes.HEADS
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    COLUMNS: tl.constexpr = sizes.COLUMNS
    PAIRS: tl.constexpr = sizes.PAIRS
    WHOLE: tl.constexpr = sizes.WHOLE
    KEY_PARTS: tl.constexpr = sizes.KEY_PARTS
    num_blocks = schedule.count_tiles(NQ, num_sequences, BLOCK_N)
    num_chunks = tl.cdiv(HQ, HEADS)
    programs = tl.num_programs(0) - KEY_PARTS
    pid = tl.program_id(0)
    if sums is not None:
        norm = sums.norm
        parts_ptr, counters_ptr = sums.sum_parts_ptr, sums.sum_counters_ptr + first_counter
        # The last heads first, because the L2 still holds what the main kernel has written last.
        pid = tl.num_programs(0) - 1 - pid
        if pid >= programs:
            schedule.wait_for_previous_launch(sizes.PDL)
            own_parts = tl.cdiv(programs, norm_gradient_kernel.SUMS)
            parts_ptr += own_parts * D
            counters_ptr += 1 + own_parts
            of_keys = norm_gradient_kernel.WeightSums(
                sums.k_sums_ptr, k_sums, parts_ptr, counters_ptr, sums.dk_norm_ptr, D, BLOCK_D, WHOLE
            )
            norm_gradient_kernel.add_sums(of_keys, pid - programs, KEY_PARTS)
            return
    chunk = (pid // num_blocks) % num_chunks
    batch = (pid // (num_blocks * num_chunks)).to(tl.int64)
    block = pid % num_blocks
    first_row = 0
    padded = 0
    if cu_q_ptr is not None:
        CU: tl.constexpr = None if PAIRS is None else gl.BlockedLayout([8], [32], [4], [0])
        sequence, first_row, NQ, block = sequences.packed_tile(
            block, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK_N, CU
        )
        first_k, NK = sequences.packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        padded = sequences.padded_row(first_row, sequence, channels.BACKWARD_BLOCK_M)
    start = block * BLOCK_N
    offs = tiles.tile_range(BLOCK_N, 0, PAIRS)
    whole_offs = tiles.tile_range(BLOCK_N, 0, WHOLE)
    staged = staged_rows(whole_offs)
    NK = sequences.existing_keys(lens_ptr, batch, NK)
    layouts = None if PAIRS is None else rotations.PairLayouts(PAIRS, WHOLE)
    rotation = rotations.head_rotation(tables, batch, NK)
    if sizes.TOKEN_TABLES:
        rotation = rotations.rotation_from(rotation, first_k)
    cos, sin = rotations.load_angles(rotation, offs + (start + NK - NQ), BLOCK_D, PAIRS)
    columns = tiles.tile_range(BLOCK_D, 1, WHOLE)
    if sums is not None:
        weight1, weight2 = rotations.pair_norm_weights(norm, rotation, BLOCK_D, PAIRS)
        dweight1 = norm_gradient_kernel.zeros_like_ranges(offs, tiles.tile_range(BLOCK_D // 2, 1, PAIRS))
        dweight2 = dweight1
        # After the last query the accumulator is undefined.
        exists = (offs < NQ - start)[:, None]
    schedule.wait_for_previous_launch(sizes.PDL)
    for head in range(chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HQ)):
        origin = tiles.Origin(batch, tl.cast(head, tl.int64), first_row + start)
        row = (batch * HQ + origin.head) * pitch + padded + start
        if sizes.IN_PANELS:
            # row - start is a multiple of BLOCK_M, and ``start`` need not be.
            words = accumulator_ptr + (row - start) * BLOCK_D + panel_offsets(start + whole_offs, columns, BLOCK_D)
        else:
            words = accumulator_ptr + row * COLUMNS + staged[:, None] * COLUMNS + columns[None, :]
        if sums is not None:
            raw_rows = tiles.head_rows(sums.raw, origin, NQ - start, row_format)
            raw1, raw2 = rotations.load_pairs(raw_rows, offs, rotation, layouts)
        added = None
        if cu_q_ptr is not None:
            # The block may be past its sequence's end, and past the end of the accumulator.
            added = whole_offs[:, None] < NQ - start
        if progress_ptr is not None:
            word = progress_ptr + row // channels.BACKWARD_BLOCK_M
            if added is None:
                added = tl.load(word) != 0
            else:
                added = added & (tl.load(word, mask=start < NQ, other=0) != 0)
        if BLOCK_D != COLUMNS:
            is_needed = columns[None, :] < COLUMNS
            added = is_needed if added is None else is_needed & added
        dq = tiles.load_where(words, added, 0.0) * softmax_scale
        first, second = rotations.unpack_pairs(dq)
        if PAIRS is not None:
            first, second = gl.convert_layout(first, PAIRS), gl.convert_layout(second, PAIRS)
        first, second = rotations.rotate(first, second, cos, sin, CONJUGATE=True)
        if sums is not None:
            first, second = tl.where(exists, first, 0.0), tl.where(exists, second, 0.0)
            first, second, of_rows1, of_rows2 = norms.unnorm_pairs(raw1, raw2, first, second, weight1, weight2, norm)
            dweight1 += of_rows1
            dweight2 += of_rows2
        dq_rows = tiles.head_rows(dq_out, origin, NQ - start, row_format)
        rotations.store_pairs(dq_rows, first, second, offs, rotation, layouts)
        if sinks is not None:
            lse = tl.load(sinks.stats_ptr + row + offs, mask=offs < NQ - start, other=float("inf"))
            delta = tl.load(sinks.stats_ptr + stats_size + row + offs, mask=offs < NQ - start, other=0.0)
            part = softmax.sink_gradient(tl.load(sinks.sinks_ptr + head), lse, delta)
            tl.store(sinks.dsinks_ptr + (batch * num_blocks + pid % num_blocks) * HQ + head, part)
    if sums is not None:
        own_ptr = sums.q_sums_ptr + tl.cast(pid, tl.int64) * D
        norm_gradient_kernel.store_weight_sums(own_ptr, dweight1, dweight2, norm, rotation, PAIRS)
        of_queries = norm_gradient_kernel.WeightSums(
            sums.q_sums_ptr, programs, parts_ptr, counters_ptr, sums.dq_norm_ptr, D, BLOCK_D, WHOLE
        )
        norm_gradient_kernel.add_own_sums(of_queries, pid)


_NUMBERS = "HQ NQ pitch NK num_sequences stats_size k_sums first_counter".split()
# Triton picks a layout for each load, and rows pass through shared memory from one to the next. With a norm there is
# more to read and rows are summed, so Gluon names layouts in which each thread takes the same pairs of all tensors.
norm_postprocess_kernel = (triton.jit if device.is_interpreted() else jit)(
    postprocess_kernel, do_not_specialize=_NUMBERS
)
postprocess_kernel = triton.jit(postprocess_kernel, do_not_specialize=_NUMBERS)
