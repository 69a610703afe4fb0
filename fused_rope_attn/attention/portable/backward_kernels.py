# mypy: ignore-errors
"""The kernels of the portable backward pass, without atomics: dK/dV by tiles of keys and dQ by tiles of queries, in two
launches after a pre-process. The work of their programs is in ``backward_roles``.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable import backward_roles as roles
from fused_rope_attn.kernels import rotation, schedule, sequences, tiles
from fused_rope_attn.kernels.records import replace, unpack

# Numbers for which no kernel is compiled again.
_NUMBERS = "num_sequences window_left window_right num_heads heads_per_section HQ HKV GROUP_SIZE NQ NK".split()


@triton.jit
def with_descriptors(inputs, q=None, k=None, v=None, do=None):
    """Return ``BackwardInputs`` that read tensors by these descriptors, which cannot be in the record of the host."""
    if inputs.USE_TMA:
        if q is not None:
            inputs = replace(inputs, q=replace(inputs.q, ptr=q), do=replace(inputs.do, ptr=do))
        if k is not None:
            inputs = replace(inputs, k=replace(inputs.k, ptr=k), v=replace(inputs.v, ptr=v))
    return inputs


@triton.jit(do_not_specialize=[name for name in _NUMBERS if name != "HQ"])
def dkdv_kernel(
    inputs, q_desc, do_desc, masks, rotations, outputs, num_sequences, window_left, window_right, num_heads,
    heads_per_section, HKV, GROUP_SIZE, NQ, NK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). The records are those of ``backward_roles``; with ``inputs.nope``
    there are HKV * GROUP_SIZE heads of k_nope and v, as ``write_dkdv`` says, and the stride of k's heads is 0.
    """
    schedule.wait_for_previous_launch(PDL)
    schedule.let_next_launch_start(PDL)
    inputs, masks, rotations, outputs = unpack((inputs, masks, rotations, outputs))
    inputs = with_descriptors(inputs, q=q_desc, do=do_desc)
    masks = sequences.complete_masks(masks, num_sequences, window_left, window_right)
    tile = sequences.scheduled_keys(tl.program_id(0), NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N)
    if masks.cu_k_ptr is not None or masks.FROM_START:
        if tile.index * BLOCK_N >= tile.num_rows:
            return
    num_rows, HQ = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ, HKV * GROUP_SIZE
    sizes = roles.BackwardSizes(num_heads, HQ, GROUP_SIZE, NQ, NK, num_rows)
    roles.write_dkdv(tile, inputs, sizes, masks, rotations, outputs, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=[name for name in _NUMBERS if name != "HKV"])
def dq_kernel(
    inputs, k_desc, v_desc, masks, rotations, outputs, num_sequences, window_left, window_right, num_heads,
    heads_per_section, HQ, GROUP_SIZE, NQ, NK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M query rows of one head, and their part of the sink's gradient.

    Grid: (``count_tiles`` of the queries * B * HQ). The masks have the blocks of ``interval_blocks_kernel``. With PDL
    it starts while dkdv_kernel drains: it reads only the pre-process's results, for which dkdv_kernel has waited.
    """
    inputs, masks, rotations, outputs = unpack((inputs, masks, rotations, outputs))
    inputs = with_descriptors(inputs, k=k_desc, v=v_desc)
    masks = sequences.complete_masks(masks, num_sequences, window_left, window_right)
    tile = sequences.scheduled_queries(tl.program_id(0), NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    if masks.cu_q_ptr is not None:
        if tile.index * BLOCK_M >= tile.num_rows:
            return
    sizes = roles.BackwardSizes(num_heads, HQ, GROUP_SIZE, NQ, NK, tl.cast(num_heads, tl.int64) * NQ)
    roles.write_dq(tile, inputs, sizes, masks, rotations, outputs, BLOCK_M, BLOCK_N, PDL)


@triton.jit(do_not_specialize=["NQ", "NK", "num_heads", "num_batches", "num_sequences"])
def sum_heads_kernel(
    parts, dk, masks, tables, num_sequences, num_heads, num_batches, NQ, NK, row_format, BLOCK_N: tl.constexpr
):
    """Sum the gradient of the key head that all query heads share, and un-rotate it.

    parts (B, num_heads, NK, D) float32, in pair order, from ``dkdv_kernel``; dk (B, 1, NK, D), ``RowFormat`` of both.
    Grid: (``count_tiles`` of the keys * B). Heads are added in a fixed order.
    """
    parts, dk, masks, tables, row_format = unpack((parts, dk, masks, tables, row_format))
    # 64 elements a thread, so that enough loads are in flight: a call has few programs.
    HEADS: tl.constexpr = 8192 // (BLOCK_N * row_format.BLOCK_D)
    masks = sequences.complete_masks(masks, num_sequences, None, None)
    tile = sequences.scheduled_keys(tl.program_id(0), NK, NQ, 1, num_batches, num_batches, masks, BLOCK_N)
    if masks.cu_k_ptr is not None:
        if tile.index * BLOCK_N >= tile.num_rows:
            return
    start_n = tile.index * BLOCK_N
    sequence = sequences.sequence_of_keys(tile, NQ, NK, masks)
    of_sequence = sequences.sequence_rotation(tables, sequence)
    offs = tl.arange(0, BLOCK_N)
    heads = tiles.sequence_heads(parts, tile.origin.batch, tile.origin.row, tile.num_rows, row_format)
    heads = tiles.heads_from(heads, start_n)
    total = tl.zeros((BLOCK_N, row_format.BLOCK_D), tl.float32)
    for first_head in range(0, num_heads, HEADS):
        total += tl.sum(tiles.load_heads(heads, first_head, num_heads, offs, HEADS), axis=0)
    dk_rows = tiles.head_rows(dk, tile.origin, tile.num_rows, row_format)
    rotation.store_unrotated(tiles.rows_from(dk_rows, start_n), total, offs, of_sequence, start_n)
