# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type, call-arg"
"""The portable forward pass: Q rotated once per block, K rotated in the loop (inline) or read rotated (prepass)."""

import math

import torch
import triton
import triton.language as tl

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.configs import ForwardConfig
from fused_rope_attn.attention.intervals import IntervalBlocks
from fused_rope_attn.attention.portable import parts
from fused_rope_attn.attention.prepass import Rotate
from fused_rope_attn.attention.problem import Outputs, Problem, Saving, Tensors, split_outputs
from fused_rope_attn.kernels import schedule, sequences, softmax, tiles
from fused_rope_attn.kernels.masks import key_range, visible
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.runtime import device, layouts
from fused_rope_attn.runtime.launch import Launch, Source


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
    k = parts.load_parts(keys.k, start_n, offs_n, CHECK_ROWS=APPLY_MASK)
    scores = parts.parts_product(q, k, scale)
    if APPLY_MASK:
        sees = visible(keys.mask, positions_q[:, None], (start_n + offs_n)[None, :])
        scores = tl.where(sees, scores, float("-inf"))
    return scores


@triton.jit
def weigh(acc, row_max, row_sum, scores, scale, HAS_EMPTY_ROWS: tl.constexpr):
    """Return the ``RunningSoftmax`` with the scores of one more block. The rest as in ``online_softmax``."""
    p, correction, row_max, row_sum = softmax.online_softmax(scores, row_max, row_sum, scale.qk_scale, HAS_EMPTY_ROWS)
    return RunningSoftmax(acc=acc, row_max=row_max, row_sum=row_sum, p=p, correction=correction)


@triton.jit
def add_values(running, keys, start_n, scale, CHECK_ROWS: tl.constexpr):
    """Return ``acc`` plus the last weights times the values of their keys, [start_n, start_n + BLOCK_N)."""
    offs_n = tl.arange(0, keys.BLOCK_N)
    v = parts.load_head_tile(keys.v, start_n, offs_n, CHECK_ROWS)
    if CHECK_ROWS:
        v = parts.without_unseen(v, keys.mask, start_n, offs_n)
    p = running.p.to(v.dtype)
    return tl.dot(p, v, running.acc * running.correction[:, None], input_precision=scale.PRECISION)


@triton.jit
def attend_range(running, q, positions_q, keys, first, last, scale, APPLY_MASK: tl.constexpr, CHECK_VALUES=False):
    """Fold keys [first, last) into the ``RunningSoftmax`` and return it; their values follow one block later.

    The weights in ``running`` belong to the block before ``first``: the tensor cores multiply them with its values
    concurrently with the softmax of the next block. CHECK_VALUES: some of the values in the block before may not exist.
    APPLY_MASK as for ``block_scores``.
    """
    for start_n in range(first, last, keys.BLOCK_N):
        scores = block_scores(q, positions_q, keys, start_n, scale, APPLY_MASK)
        acc = add_values(running, keys, start_n - keys.BLOCK_N, scale, CHECK_VALUES)
        running = weigh(acc, running.row_max, running.row_sum, scores, scale, APPLY_MASK)
    return running


@triton.jit
def attend_run(sums, queries, keys, first, last, APPLY_MASK: tl.constexpr):
    """Fold keys [first, last) and their values into the running sums and return them, with ``attend_range``'s bits.

    sums: acc, row_max and row_sum as in ``RunningSoftmax``. queries: q, positions_q and scale as for ``block_scores``,
    and so is APPLY_MASK.
    """
    acc, row_max, row_sum = sums
    q, positions_q, scale = queries
    for start_n in range(first, last, keys.BLOCK_N):
        scores = block_scores(q, positions_q, keys, start_n, scale, APPLY_MASK)
        running = weigh(acc, row_max, row_sum, scores, scale, APPLY_MASK)
        acc, row_max, row_sum = add_values(running, keys, start_n, scale, APPLY_MASK), running.row_max, running.row_sum
    return acc, row_max, row_sum


@triton.jit
def save_queries(q, q_rot, tile, start_m, row_format, PAD_TO: tl.constexpr):
    """Write the rotated tile q (BLOCK_M, BLOCK_D) of a ``ScheduledTile`` to ``q_rot``, for the backward pass.

    Its rows are those of q, or with PAD_TO, for packed sequences, those from ``padded_row`` on; then the rows up to a
    multiple of PAD_TO are zero. PAD_TO is 0 or at most BLOCK_M.
    """
    origin = tile.origin
    num_rows = tile.num_rows
    if PAD_TO:
        first_row = sequences.padded_row(tile.origin.row, tile.sequence, PAD_TO)
        origin = tiles.Origin(batch=tile.origin.batch, head=tile.origin.head, row=first_row)
        num_rows = tl.cdiv(tile.num_rows, PAD_TO) * PAD_TO
    rows = tiles.head_rows(q_rot, origin, num_rows, row_format)
    tiles.store_tile(tiles.rows_from(rows, start_m), q, tl.arange(0, q.shape[0]))


@record
class ForwardInputs:
    """The tensors that a forward pass reads, and their formats.

    q (B, HQ, NQ, D), k (B, HKV, NK, D), v (B, HKV, NK, DV); q_nope and k_nope have DN columns. sinks (HQ,) or None.
    """

    q: tiles.TensorView
    k: tiles.TensorView
    v: tiles.TensorView
    sinks_ptr: tl.tensor | None
    format: tiles.RowFormat
    value_format: tiles.RowFormat
    nope: parts.NopeViews | None
    scale: softmax.ScoreScale
    USE_TMA: tl.constexpr  # k and v by descriptors


@record
class ForwardOutputs:
    """o (B, HQ, NQ, DV), and lse (B, HQ, NQ) float32, natural logarithm.

    max_logit (B, HQ) or (sequences, HQ) float32, -inf before the launch, or None. q_rot: where to save rotated queries
    (``save_queries``), or None.
    """

    o: tiles.TensorView
    lse_ptr: tl.tensor
    max_logit_ptr: tl.tensor | None
    q_rot: tiles.TensorView | None
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
    """Attend with BLOCK_M query rows of one head. Grid: (``count_tiles`` of the queries * B * HQ).

    inputs: ``ForwardInputs``; k_desc and v_desc: descriptors if it reads by the TMA. masks: ``MaskArguments``, with the
    blocks of ``interval_blocks_kernel``. rotations: ``CallRotation``; without its ROTATE_INLINE k is stored normed and
    rotated, in pair order. outputs: ``ForwardOutputs``. Queries from ``position_limit`` on are not rotated; None: all
    are.
    """
    inputs, masks, rotations, outputs = unpack((inputs, masks, rotations, outputs))
    if inputs.USE_TMA:
        inputs = replace(inputs, k=replace(inputs.k, ptr=k_desc), v=replace(inputs.v, ptr=v_desc))
    masks = sequences.complete_masks(masks, num_sequences, window_left, window_right)
    tile = sequences.scheduled_queries(tl.program_id(0), NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M)
    start_m = tile.index * BLOCK_M
    if masks.cu_q_ptr is not None:
        if start_m >= tile.num_rows:
            return
    sequence = sequences.sequence_of_queries(tile, NK, masks)
    mask, scale = sequence.mask, inputs.scale
    rotation = sequences.sequence_rotation(rotations.tables, sequence)
    if position_limit is not None:
        limit = position_limit
        if masks.FROM_START:
            limit -= sequence.first_position
        rotation = replace(rotation, num_positions=tl.minimum(sequence.num_keys, limit))
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    head_kv = tile.origin.head // GROUP_SIZE
    keys = parts.keys_of_head(inputs, sequence, head_kv, mask.first_key, k_rotation, BLOCK_N, inputs.USE_TMA)
    q_rotation = None if rotations.q_sign is None else replace(rotation, norm=rotations.q_norm)
    queries = parts.query_parts(inputs, sequence, tile.origin, None, q_rotation, rotations.q_sign, USE_TMA=False)
    offs = tl.arange(0, BLOCK_M)
    positions_q = start_m + sequence.q_offset + offs
    q = parts.load_parts(queries, start_m, offs)
    if outputs.q_rot is not None:
        save_queries(q.rope, outputs.q_rot, tile, start_m, inputs.format, outputs.PAD_TO)

    # The first block is processed before the loops; blocks in [full_first, full_last) run without masks.
    bounds = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    first, full_first, full_last, last = bounds
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
    schedule.wait_for_previous_launch(PDL)
    if mask.intervals is not None:
        sums, queries = (acc, row_max, row_sum), (q, positions_q, scale)
        acc, row_max, row_sum = parts.fold_intervals(attend_run, sums, queries, keys, start_m, bounds, BLOCK_M)
    else:
        scores = block_scores(q, positions_q, keys, first, scale, APPLY_MASK=True)
        running = weigh(acc, row_max, row_sum, scores, scale, HAS_EMPTY_ROWS=True)
        if mask.first_key is not None:
            start, end = first + BLOCK_N, tl.minimum(full_first, last)
            running = attend_range(running, q, positions_q, keys, start, end, scale, APPLY_MASK=True, CHECK_VALUES=True)
        running = attend_range(running, q, positions_q, keys, full_first, full_last, scale, APPLY_MASK=False)
        running = attend_range(running, q, positions_q, keys, full_last, last, scale, APPLY_MASK=True)
        last_block = tl.maximum(first, (tl.cdiv(last, BLOCK_N) - 1) * BLOCK_N)
        acc = add_values(running, keys, last_block, scale, CHECK_ROWS=True)
        row_max, row_sum = running.row_max, running.row_sum

    rows_left = tile.num_rows - start_m
    if outputs.max_logit_ptr is not None:
        entry = tile.batch_head if tile.sequence is None else tile.sequence * HQ + tile.origin.head
        # The bits do not depend on the order of programs. If no row sees a key nothing is written: rows after the last
        # packed sequence have no float32 of their own, and their entry is outside of the tensor.
        highest = tl.max(tl.where(offs < rows_left, row_max, float("-inf")), 0)
        is_seen = highest != float("-inf")
        tl.atomic_max(outputs.max_logit_ptr + entry, highest * softmax.LN2, mask=is_seen, sem="relaxed")
    sink = None
    if inputs.sinks_ptr is not None:
        sink = tl.load(inputs.sinks_ptr + tile.origin.head).to(tl.float32) * softmax.LOG2E
    o, lse = softmax.finish_softmax(acc, row_max, row_sum, sink)
    lse_rows = outputs.lse_ptr + tl.cast(tile.batch_head, tl.int64) * NQ + tile.origin.row + start_m
    tl.store(lse_rows + offs, lse, mask=offs < rows_left)
    o_rows = tiles.head_rows(outputs.o, tile.origin, tile.num_rows, inputs.value_format)
    tiles.store_tile(tiles.rows_from(o_rows, start_m), o, offs)


def nope_views(problem: Problem, tensors: Tensors, row_format, dq=None, dk=None):
    """Return the ``NopeViews`` of a call, None for a call without them. dq, dk: of the gradients."""
    if problem.nope_dim is None:
        return None
    sign = arguments.scale_and_sign(problem.softmax_scale)[1]
    views = map(arguments.view, (tensors.q_nope, tensors.k_nope, dq, dk))
    # Most calls have a sign of 1, and do not multiply.
    return parts.NopeViews.host(*views, None if sign == 1.0 else sign, row_format)


class ForwardCall:
    """The launches of one forward signature: with a pre-pass, or without.

    keys_are_ready: k is rotated and in pair order when the call begins.
    """

    def __init__(
        self, problem: Problem, tensors: tuple, config: ForwardConfig, saving=Saving.NOTHING, keys_are_ready=False
    ):
        given, outputs = split_outputs(tensors, 1)
        q, k, v = given.q, given.k, given.v
        self.o_shape = (*q.shape[:3], problem.value_dim)
        self.o_strides = arguments.result_strides(outputs, [layouts.output_strides(q, problem.value_dim)])[0]
        self.max_logit_shape = problem.maxima_shape if problem.return_max_logit else None
        self.empty = problem.batch * problem.len_q == 0
        self.problem = problem
        self.rotate_keys = None
        k_like = k
        keys_are_ready = keys_are_ready or problem.is_plain
        if config.strategy == "prepass" and not keys_are_ready and problem.batch * problem.len_k > 0:
            num_maxima = math.prod(problem.maxima_shape) if problem.fills_results else None
            self.rotate_keys = Rotate("k", given, problem, config, num_maxima=num_maxima)
            k_like = k.new_empty(k.shape)
        inline = self.rotate_keys is None and not keys_are_ready
        tile, pad_d = config.tile, layouts.block_d(problem.head_dim)
        padding = arguments.PADDED_TILE_ROWS if saving is Saving.TILES else 0
        # Smaller tiles would not write all of the padding.
        self.saves_rotated = saving is not Saving.NOTHING and not inline and tile.block_m >= padding
        shape = arguments.rotated_shape(problem, in_tiles=padding > 0)
        self.q_rot_layout = shape, layouts.contiguous_strides(shape)
        tma = config.tma and not inline and layouts.has_descriptor(v) and layouts.has_descriptor(k_like)
        block = [1, 1, tile.block_n, pad_d] if tma else None
        self.k_source, self.v_source = Source(k_like, block), Source(v, block)
        # Without a launch before this one there is none to overlap with.
        pdl = config.pdl and not (inline or problem.is_plain)
        self.find_blocks = IntervalBlocks(problem, tile.block_n) if problem.has_intervals else None
        is_wide = layouts.is_long(self.o_strides, *(x.stride() for x in arguments.rows_of(given)))
        self.formats = [
            None if columns is None else tiles.RowFormat.host(columns, layouts.block_d(columns), is_wide, ALIGNED=True)
            for columns in (problem.head_dim, problem.value_dim, problem.nope_dim)
        ]
        self.inline, self.tma, self.padding = inline, tma, padding
        num_heads = problem.batch * problem.heads_q
        columns = (problem.nope_dim or problem.head_dim) + problem.value_dim
        kv_bytes = problem.longest(problem.len_k) * columns * k.element_size()
        self.launch = Launch(
            forward_kernel,
            schedule.tile_count(problem.len_q, problem.sequences, tile.block_m) * num_heads,
            {**tile.launch_options, "launch_pdl": True} if pdl else tile.launch_options,
            arguments.numbers_of(problem),
            # Only such calls have queries past the last row of the tables.
            position_limit=arguments.table_rows(given) if keys_are_ready else None,
            num_heads=num_heads,
            heads_per_section=schedule.heads_per_section(num_heads, problem.group_size, kv_bytes, config.section_bytes),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PDL=pdl,
        )

    def __call__(self, given: tuple) -> Outputs:
        """Launch the call. given: ``Tensors``, and then o if the call was prepared for an output buffer."""
        tensors, (o,) = split_outputs(given, 1)
        problem, q, k = self.problem, tensors.q, tensors.k
        if o is None:
            o = torch.empty_strided(self.o_shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        max_logit = None
        if self.max_logit_shape is not None:
            max_logit = torch.empty(self.max_logit_shape, dtype=torch.float32, device=q.device)
            if self.empty or self.rotate_keys is None:
                # No pre-pass fills it. A call that PyTorch fills is not replayed.
                max_logit.fill_(float("-inf"))
        if self.empty:
            return Outputs(o, lse, max_logit=max_logit)
        stream = device.current_stream(q.device)
        # Before the pre-pass: the kernel reads the bounds before it waits for that.
        blocks = None if self.find_blocks is None else self.find_blocks(stream, tensors)
        if self.rotate_keys is not None:
            k = self.rotate_keys(stream, tensors, maxima=max_logit)
        q_rot = None
        if self.saves_rotated:
            q_rot = torch.empty_strided(*self.q_rot_layout, dtype=q.dtype, device=q.device)
        self.launch(
            stream,
            inputs=ForwardInputs.host(
                q=arguments.view(q),
                k=arguments.view_of_keys(problem, k),
                v=arguments.view(tensors.v),
                sinks_ptr=tensors.sinks,
                format=self.formats[0],
                value_format=self.formats[1],
                nope=nope_views(problem, tensors, self.formats[2]),
                scale=arguments.scale_of(problem),
                USE_TMA=self.tma,
            ),
            k_desc=self.k_source(k),
            v_desc=self.v_source(tensors.v),
            masks=arguments.masks_of(problem, tensors, blocks),
            rotations=arguments.rotation_of(problem, tensors, self.inline),
            outputs=ForwardOutputs.host(arguments.view(o), lse, max_logit, arguments.view(q_rot), PAD_TO=self.padding),
        )
        return Outputs(o, lse, q_rot, k if self.saves_rotated else None, max_logit)
