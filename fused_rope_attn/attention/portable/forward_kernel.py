# mypy: ignore-errors
"""Portable attention forward: Q rotated once per block, K rotated in the loop (inline) or read rotated (prepass)."""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.keys import keys_of_head
from fused_rope_attn.attention.portable.parts import NopeViews, Parts, load_parts, parts_product, signed
from fused_rope_attn.kernels.intervals import next_run, without_unseen
from fused_rope_attn.kernels.masks import key_range, visible
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.rotation import load_rotated
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.sequences import (
    complete_masks,
    padded_row,
    scheduled_queries,
    sequence_of_queries,
    sequence_rotation,
)
from fused_rope_attn.kernels.softmax import LN2, LOG2E, ScoreScale, finish_softmax, online_softmax
from fused_rope_attn.kernels.tiles import (
    Origin,
    RowFormat,
    TensorView,
    head_rows,
    load_head_tile,
    load_tile,
    prefetch_rows,
    rows_from,
    store_tile,
)


@record
class RunningSoftmax:
    """The sums over the keys so far, and the weights of the last block. Its values are not added yet."""

    acc: tl.tensor  # (BLOCK_M, BLOCK_DV) float32
    row_max: tl.tensor  # (BLOCK_M,) float32, in base 2
    row_sum: tl.tensor  # (BLOCK_M,) float32
    p: tl.tensor  # (BLOCK_M, BLOCK_N) float32
    correction: tl.tensor  # (BLOCK_M,) float32: the factor of acc before p's values are added


@triton.jit
def block_scores(q, positions_q, keys, start_n, scale, APPLY_MASK: tl.constexpr):
    """Return ``parts_product`` of q, ``Parts`` of BLOCK_M rows, and keys [start_n, start_n + BLOCK_N).

    APPLY_MASK: some of the pairs may be hidden, with score -inf, and some of the keys may not exist.
    """
    offs_n = tl.arange(0, keys.BLOCK_N)
    k = load_parts(keys.k, keys.k_nope, keys.rotation, start_n, offs_n, 0, CHECK_ROWS=APPLY_MASK)
    scores = parts_product(q, k, scale)
    if APPLY_MASK:
        sees = visible(keys.mask, positions_q[:, None], (start_n + offs_n)[None, :])
        scores = tl.where(sees, scores, float("-inf"))
    return scores


@triton.jit
def add_values(softmax, keys, start_n, scale, CHECK_ROWS: tl.constexpr):
    """Return ``acc`` plus the last weights times the values of their keys, [start_n, start_n + BLOCK_N)."""
    offs_n = tl.arange(0, keys.BLOCK_N)
    v = load_head_tile(keys.v, start_n, offs_n, CHECK_ROWS)
    if CHECK_ROWS:
        v = without_unseen(v, keys.mask, start_n, offs_n)
    p = softmax.p.to(v.dtype)
    return tl.dot(p, v, softmax.acc * softmax.correction[:, None], input_precision=scale.PRECISION)


@triton.jit
def attend_range(softmax, q, positions_q, keys, first, last, scale, APPLY_MASK: tl.constexpr, CHECK_VALUES=False):
    """Fold keys [first, last) into the running softmax; their values follow one block later.

    The weights in ``softmax`` belong to the block before ``first``: the tensor cores multiply them with its values
    concurrently with the softmax of the next block. CHECK_VALUES: some of the values in the block before may not exist.
    APPLY_MASK as for ``block_scores``.
    """
    for start_n in range(first, last, keys.BLOCK_N):
        scores = block_scores(q, positions_q, keys, start_n, scale, APPLY_MASK)
        acc = add_values(softmax, keys, start_n - keys.BLOCK_N, scale, CHECK_VALUES)
        p, correction, row_max, row_sum = online_softmax(
            scores, softmax.row_max, softmax.row_sum, scale.qk_scale, HAS_EMPTY_ROWS=APPLY_MASK
        )
        softmax = RunningSoftmax(acc=acc, row_max=row_max, row_sum=row_sum, p=p, correction=correction)
    return softmax


@triton.jit
def attend_run(acc, row_max, row_sum, q, positions_q, keys, first, last, scale, APPLY_MASK: tl.constexpr):
    """Fold keys [first, last) and their values into the running sums and return them, with ``attend_range``'s bits.

    acc, row_max and row_sum as in ``RunningSoftmax``. APPLY_MASK as for ``block_scores``.
    """
    for start_n in range(first, last, keys.BLOCK_N):
        scores = block_scores(q, positions_q, keys, start_n, scale, APPLY_MASK)
        p, correction, row_max, row_sum = online_softmax(
            scores, row_max, row_sum, scale.qk_scale, HAS_EMPTY_ROWS=APPLY_MASK
        )
        softmax = RunningSoftmax(acc=acc, row_max=row_max, row_sum=row_sum, p=p, correction=correction)
        acc = add_values(softmax, keys, start_n, scale, APPLY_MASK)
    return acc, row_max, row_sum


@triton.jit
def attend_intervals(acc, row_max, row_sum, q, positions_q, keys, start_m, bounds, scale, BLOCK_M: tl.constexpr):
    """Fold the keys that the tile of rows [start_m, start_m + BLOCK_M) sees into the running sums and return them.

    Blocks of keys that no row sees are skipped. bounds: ``key_range``'s.
    """
    BLOCK_N: tl.constexpr = keys.BLOCK_N
    first, full_first, full_last, last = bounds
    block, last_block = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    full_first, full_last = full_first // BLOCK_N, full_last // BLOCK_N
    while block < last_block:
        begin, middle, block = next_run(keys.mask, block, last_block, full_first, full_last, start_m, BLOCK_M, BLOCK_N)
        start, end = begin * BLOCK_N, middle * BLOCK_N
        acc, row_max, row_sum = attend_run(
            acc, row_max, row_sum, q, positions_q, keys, start, end, scale, APPLY_MASK=True
        )
        start, end = middle * BLOCK_N, block * BLOCK_N
        acc, row_max, row_sum = attend_run(
            acc, row_max, row_sum, q, positions_q, keys, start, end, scale, APPLY_MASK=False
        )
    return acc, row_max, row_sum


@triton.jit
def raise_max_logit(ptr, row_max, exists):
    """Raise the float32 at ``ptr`` to the largest natural logit of rows that ``exist``, of base-2 row_max (rows,).

    The bits do not depend on the order in which programs do so. If no row sees a key nothing is written: rows after the
    last packed sequence have no float32 of their own, and ``ptr`` is outside of the tensor.
    """
    highest = tl.max(tl.where(exists, row_max, float("-inf")), 0)
    tl.atomic_max(ptr, highest * LN2, mask=highest != float("-inf"), sem="relaxed")


@triton.jit
def save_queries(q, q_rot, tile, start_m, row_format, PAD_TO: tl.constexpr):
    """Write the rotated tile q (BLOCK_M, BLOCK_D) of a ``ScheduledTile`` to ``q_rot``, for the backward pass.

    Its rows are those of q, or with PAD_TO, for packed sequences, those from ``padded_row`` on; then the rows up to a
    multiple of PAD_TO are zero. PAD_TO is 0 or at most BLOCK_M.
    """
    origin = tile.origin
    num_rows = tile.num_rows
    if PAD_TO:
        first_row = padded_row(tile.origin.row, tile.sequence, PAD_TO)
        origin = Origin(batch=tile.origin.batch, head=tile.origin.head, row=first_row)
        num_rows = tl.cdiv(tile.num_rows, PAD_TO) * PAD_TO
    rows = head_rows(q_rot, origin, num_rows, row_format)
    store_tile(rows_from(rows, start_m), q, tl.arange(0, q.shape[0]))


@record
class ForwardInputs:
    """The tensors that a forward pass reads, and their formats.

    q (B, HQ, NQ, D), k (B, HKV, NK, D), v (B, HKV, NK, DV); q_nope and k_nope have DN columns. sinks (HQ,) or None.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    sinks_ptr: tl.tensor | None
    format: RowFormat
    value_format: RowFormat
    nope: NopeViews | None
    scale: ScoreScale
    USE_TMA: tl.constexpr  # k and v by descriptors
    PREFETCH_ROWS: tl.constexpr


@record
class ForwardOutputs:
    """o (B, HQ, NQ, DV), and lse (B, HQ, NQ) float32, natural logarithm.

    max_logit (B, HQ) or (sequences, HQ) float32, -inf before the launch, or None. q_rot: where to save rotated queries
    (``save_queries``), or None.
    """

    o: TensorView
    lse_ptr: tl.tensor
    max_logit_ptr: tl.tensor | None
    q_rot: TensorView | None
    PAD_TO: tl.constexpr


@triton.jit(
    do_not_specialize="num_sequences window_left window_right num_heads heads_per_section HQ GROUP_SIZE NQ NK "
    "position_limit".split()
)
def forward_kernel(
    inputs, k_desc, v_desc, masks, rotations, outputs, num_sequences, window_left, window_right, num_heads,
    heads_per_section, HQ, GROUP_SIZE, NQ, NK, position_limit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_M query rows of one head. Grid: (``count_tiles`` of the queries * B * HQ).

    inputs: ``ForwardInputs``; k_desc and v_desc: descriptors if it reads by the TMA. masks: ``MaskArguments``, with the
    blocks of ``interval_blocks_kernel``. rotations: ``CallRotation``; without its ROTATE_INLINE k is stored normed and
    rotated, in pair order. outputs: ``ForwardOutputs``. Queries from ``position_limit`` on are not rotated; None: all
    are.
    """
    inputs, masks, rotations, outputs = unpack((inputs, masks, rotations, outputs))
    if inputs.USE_TMA:
        inputs = replace(inputs, k=replace(inputs.k, ptr=k_desc), v=replace(inputs.v, ptr=v_desc))
    masks = complete_masks(masks, num_sequences, window_left, window_right)
    tile = scheduled_queries(tl.program_id(0), NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    start_m = tile.index * BLOCK_M
    if masks.cu_q_ptr is not None:
        if start_m >= tile.num_rows:
            return
    sequence = sequence_of_queries(tile, NK, masks)
    mask, nope, scale = sequence.mask, inputs.nope, inputs.scale
    rotation = sequence_rotation(rotations.tables, sequence)
    if position_limit is not None:
        limit = position_limit
        if masks.FROM_START:
            limit -= sequence.first_position
        rotation = replace(rotation, num_positions=tl.minimum(sequence.num_keys, limit))
    q_rows = head_rows(inputs.q, tile.origin, tile.num_rows, inputs.format)
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    keys = keys_of_head(
        sequence, tile.origin.head // GROUP_SIZE, inputs.k, inputs.v, nope, k_rotation, inputs.format,
        inputs.value_format, BLOCK_N, inputs.USE_TMA,
    )  # fmt: skip
    rotation = replace(rotation, norm=rotations.q_norm)

    offs = tl.arange(0, BLOCK_M)
    position_m = start_m + sequence.q_offset
    positions_q = position_m + offs
    q = load_rotated(rows_from(q_rows, start_m), offs, rotation, position_m, rotations.q_sign)
    if outputs.q_rot is not None:
        save_queries(q, outputs.q_rot, tile, start_m, inputs.format, outputs.PAD_TO)

    if nope is None:
        q = Parts(rope=q, nope=None)
    else:
        nope_rows = head_rows(nope.q, tile.origin, tile.num_rows, nope.format)
        q_nope_tile = load_tile(rows_from(nope_rows, start_m), offs, CHECK_ROWS=True)
        q = Parts(rope=q, nope=signed(q_nope_tile, nope.sign))

    # The first block is processed before the loops; blocks in [full_first, full_last) run without masks.
    first, full_first, full_last, last = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    of_intervals = first, full_first, full_last, last
    if mask.first_key is None:
        first = 0
        full_first = BLOCK_N
    else:
        # The loop without masks adds the values of the block before it. That must not be the block of the first key.
        full_first = tl.maximum(full_first, first + tl.where(mask.first_key > first, 2 * BLOCK_N, BLOCK_N))
    full_last = tl.maximum(full_last, full_first)

    acc = tl.zeros((BLOCK_M, inputs.value_format.BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if inputs.PREFETCH_ROWS > 0:
        # Values need no rotation: fetch them while the pre-pass rotates the keys.
        prefetch_rows(keys.v.rows, first, last, inputs.PREFETCH_ROWS)
    wait_for_previous_launch(PDL)
    if mask.intervals is not None:
        acc, row_max, row_sum = attend_intervals(
            acc, row_max, row_sum, q, positions_q, keys, start_m, of_intervals, scale, BLOCK_M
        )
    else:
        scores = block_scores(q, positions_q, keys, first, scale, APPLY_MASK=True)
        p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, scale.qk_scale, HAS_EMPTY_ROWS=True)
        softmax = RunningSoftmax(acc=acc, row_max=row_max, row_sum=row_sum, p=p, correction=correction)
        if mask.first_key is not None:
            start, end = first + BLOCK_N, tl.minimum(full_first, last)
            softmax = attend_range(softmax, q, positions_q, keys, start, end, scale, APPLY_MASK=True, CHECK_VALUES=True)
        softmax = attend_range(softmax, q, positions_q, keys, full_first, full_last, scale, APPLY_MASK=False)
        softmax = attend_range(softmax, q, positions_q, keys, full_last, last, scale, APPLY_MASK=True)
        last_block = tl.maximum(first, (tl.cdiv(last, BLOCK_N) - 1) * BLOCK_N)
        acc = add_values(softmax, keys, last_block, scale, CHECK_ROWS=True)
        row_max, row_sum = softmax.row_max, softmax.row_sum

    rows_left = tile.num_rows - start_m
    if outputs.max_logit_ptr is not None:
        entry = tile.batch_head if tile.sequence is None else tile.sequence * HQ + tile.origin.head
        raise_max_logit(outputs.max_logit_ptr + entry, row_max, exists=offs < rows_left)
    sink = None
    if inputs.sinks_ptr is not None:
        sink = tl.load(inputs.sinks_ptr + tile.origin.head).to(tl.float32) * LOG2E
    o, lse = finish_softmax(acc, row_max, row_sum, sink)
    lse_rows = outputs.lse_ptr + tl.cast(tile.batch_head, tl.int64) * NQ + tile.origin.row + start_m
    tl.store(lse_rows + offs, lse, mask=offs < rows_left)
    o_rows = head_rows(outputs.o, tile.origin, tile.num_rows, inputs.value_format)
    store_tile(rows_from(o_rows, start_m), o, offs)
