# mypy: ignore-errors
"""The kernels of the portable backward pass, without atomics: dK/dV by tiles of keys and dQ by tiles of queries, in two
launches after a pre-process.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per tile. If q and k were normed before they were rotated, these are
the gradients of the normed ones; ``norm_gradient_kernel`` does the rest.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable import parts
from fused_rope_attn.kernels import schedule, sequences, softmax, tiles
from fused_rope_attn.kernels.masks import NO_ROW, Mask, first_query, key_range, query_range, row_interval, visible
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.rotation import store_unrotated

# Numbers for which no kernel is compiled again.
_NUMBERS = "num_sequences window_left window_right num_heads heads_per_section HQ HKV GROUP_SIZE NQ NK".split()


@record
class BackwardInputs:
    """The tensors that both kernels read, and their formats: q (B, HQ, NQ, D), k (B, HKV, NK, D), do (B, HQ, NQ, DV), v
    (B, HKV, NK, DV).

    With ``nope``, of multi-head latent attention, key head c of dkdv has GROUP_SIZE query heads that share its k and
    have each its own k_nope and v, which have HQ heads.

    With USE_TMA a kernel reads descriptors for the tensors that it goes through tile by tile: q and do for dK and dV, k
    and v for dQ.
    """

    q: tiles.TensorView
    k: tiles.TensorView
    v: tiles.TensorView
    do: tiles.TensorView
    stats_ptr: tl.tensor  # ``prepass_kernel``'s (2, B, HQ, NQ) float32: lse in base 2, then delta
    format: tiles.RowFormat
    value_format: tiles.RowFormat
    nope: parts.NopeViews | None
    scale: softmax.ScoreScale
    USE_TMA: tl.constexpr


@record
class QueryOutputs:
    """dq (B, HQ, NQ, D), and the sinks' gradient: dsinks (tiles, B * HQ) float32, or None as ``sinks_ptr`` (HQ,).

    dq_nope is in ``BackwardInputs.nope``.
    """

    dq: tiles.TensorView
    softmax_scale: tl.tensor
    dsinks_ptr: tl.tensor | None
    sinks_ptr: tl.tensor | None


@record
class HeadQueries:
    """Queries of one head of a sequence with their dO, lse, delta and mask, read BLOCK_M at a time.

    Rows before the first one that sees a key may hold anything. If a call may have such, that row is the tiles'
    first_row.
    """

    q: parts.PartTiles
    do: parts.HeadTiles
    lse_ptr: tl.tensor  # of the first row; float32 in base 2, +inf if a row saw nothing
    delta_ptr: tl.tensor  # of the first row; float32
    mask: Mask
    BLOCK_M: tl.constexpr


@triton.jit
def queries_of_head(
    inputs, sequence, head, rotation, sign, HQ, NQ, num_rows, BLOCK_M: tl.constexpr, USE_TMA: tl.constexpr
):
    """Return the ``HeadQueries`` of query head ``head`` (int64) of a ``Sequence``. num_rows: B * HQ * NQ, int64."""
    mask, first_row = sequence.mask, None
    if mask.READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    origin = tiles.Origin(batch=sequence.batch, head=head, row=sequence.first_q)
    q = parts.query_parts(inputs, sequence, origin, first_row, rotation, sign, USE_TMA)
    do = parts.head_tiles(
        inputs.do, origin, sequence.num_queries, inputs.value_format, first_row, mask.READS_LENGTHS, USE_TMA
    )
    lse_ptr = inputs.stats_ptr + (sequence.batch * HQ + head) * NQ + sequence.first_q
    return HeadQueries(q, do, lse_ptr, lse_ptr + num_rows, mask, BLOCK_M)


@triton.jit
def without_unseeing(tile, lse, mask):
    """Return a tile (rows, columns) of q or dO with zeros for queries that see no key: their lse is +inf.

    With intervals these rows are anywhere, so that loads do not check for them. They may hold NaN, and 0 * NaN is NaN.
    """
    if mask.intervals is not None:
        tile = tl.where((lse != float("inf"))[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def without_missing(x, sequence, positions_k, rows):
    """Return a tile x of gradients of keys, 0 for keys that do not exist: their rows are written too.

    rows: with intervals the ``row_interval`` of the keys; 0 where it is empty. Else None.
    """
    mask = sequence.mask
    if mask.READS_LENGTHS or mask.first_key is not None:
        exists = positions_k < sequence.num_keys
        if mask.first_key is not None:
            exists = exists & (positions_k >= mask.first_key)
        if mask.intervals is not None:
            exists = exists & (rows[0] < rows[1])
        return tl.where(exists[:, None], x, 0.0)
    else:
        return x


@triton.jit
def zero_tile(ROWS: tl.constexpr, format):
    """Return zeros (ROWS, BLOCK_D) float32 with the columns of a ``RowFormat``."""
    return tl.zeros((ROWS, format.BLOCK_D), tl.float32)


@triton.jit
def zero_parts(ROWS: tl.constexpr, inputs):
    """Return ``Parts`` of zeros, float32."""
    rope = zero_tile(ROWS, inputs.format)
    if inputs.nope is None:
        return parts.Parts(rope=rope, nope=None)
    else:
        return parts.Parts(rope=rope, nope=zero_tile(ROWS, inputs.nope.format))


@triton.jit
def store_rows(view, origin, num_rows, format, start, x):
    """Write the tile x to the rows from ``start`` on of one head of a ``TensorView``."""
    rows = tiles.rows_from(tiles.head_rows(view, origin, num_rows, format), start)
    tiles.store_tile(rows, x, tl.arange(0, x.shape[0]))


@triton.jit
def add_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b for long sums. In float32 the block's product is summed first and added whole.

    A chain of one addition per key or query loses up to sqrt(N) units in the last place: 4e-5 of dv's rms at 128K. The
    multiplication by one keeps Triton from folding the sum back into the product.
    """
    if a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.math.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def dkdv_range(
    dk, dv, k, v, positions_k, rows, queries, scale, first, count, jump_after, jump_to, APPLY_MASK: tl.constexpr
):
    """Add ``count`` query blocks to dk, ``Parts``, and dv (BLOCK_N, BLOCK_DV), both float32, and return them.

    k, ``Parts``, v (BLOCK_N, BLOCK_DV), their positions_k (BLOCK_N,) and with intervals their ``row_interval``, else
    None, are the program's. The query blocks are ``jump_after`` blocks from number ``first`` on, and then those from
    number ``jump_to`` on.

    APPLY_MASK: some of the pairs may be hidden, and some of the queries may not exist. Without it there is no jump.
    Keys that do not exist need no mask here: they only reach rows of dk and dv that are not stored, or stored as zero.
    """
    BLOCK_M: tl.constexpr = queries.BLOCK_M
    mask, offs = queries.mask, tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        exists = None
        if APPLY_MASK:
            start_m = tl.where(i < jump_after, start_m, (jump_to - jump_after) * BLOCK_M + i * BLOCK_M)
            exists = offs < queries.do.rows.num_rows - start_m
        q = parts.load_parts(queries.q, start_m, offs, CHECK_ROWS=APPLY_MASK)
        lse = tiles.load_where(queries.lse_ptr + start_m + offs, exists, float("inf"))
        if APPLY_MASK:
            q = replace(q, rope=without_unseeing(q.rope, lse, mask))
        scores_t = parts.parts_product(k, q, scale)
        p_t = tl.math.exp2(scores_t * scale.qk_scale - lse[None, :])
        if APPLY_MASK:
            if mask.READS_LENGTHS or mask.window.HIDES_PAIRS:
                positions_q = (start_m + queries.q.position + offs)[None, :]
                of_keys = None
                if rows is not None:
                    of_keys = rows[0][:, None], rows[1][:, None]
                p_t = tl.where(visible(mask, positions_q, positions_k[:, None], of_keys), p_t, 0.0)
        do = parts.load_head_tile(queries.do, start_m, offs, CHECK_ROWS=APPLY_MASK)
        if APPLY_MASK:
            do = without_unseeing(do, lse, mask)
        dv = add_product(p_t.to(do.dtype), do, dv, scale.PRECISION)
        delta = tiles.load_where(queries.delta_ptr + start_m + offs, exists, 0.0)
        dp_t = tl.dot(v, tl.trans(do), input_precision=scale.PRECISION)
        ds_t = softmax.score_gradient(p_t, dp_t, delta[None, :], scores_t, scale).to(q.rope.dtype)
        dk_rope = add_product(ds_t, q.rope, dk.rope, scale.PRECISION)
        if q.nope is None:
            dk = parts.Parts(rope=dk_rope, nope=None)
        else:
            dk = parts.Parts(rope=dk_rope, nope=add_product(ds_t, q.nope, dk.nope, scale.PRECISION))
    return dk, dv


@triton.jit
def narrowed_queries(bounds, rows, q_offset, BLOCK_M: tl.constexpr):
    """Return the ``query_range`` ``bounds`` of some keys, narrowed by ``rows``, the ``row_interval`` of each key.

    Keys that no query sees count in neither direction, because their gradients are zero.
    """
    first_position, end_position = rows
    seen = first_position < end_position
    low = tl.min(tl.where(seen, first_position, NO_ROW), 0) - q_offset
    high = tl.max(tl.where(seen, end_position - q_offset, 0), 0)
    all_low = tl.max(tl.where(seen, first_position - q_offset, 0), 0)
    all_high = tl.maximum(0, tl.min(tl.where(seen, end_position, NO_ROW), 0) - q_offset)
    first, full_first, full_last, last = bounds
    last = tl.minimum(last, tl.cdiv(high, BLOCK_M))
    first = tl.minimum(last, tl.maximum(first, tl.maximum(low, 0) // BLOCK_M))
    full_first = tl.maximum(first, tl.minimum(last, tl.maximum(full_first, tl.cdiv(all_low, BLOCK_M))))
    full_last = tl.minimum(last, tl.minimum(full_last, all_high // BLOCK_M))
    return first, full_first, tl.maximum(full_first, full_last), last


@triton.jit(do_not_specialize=[name for name in _NUMBERS if name != "HQ"])
def dkdv_kernel(
    inputs, q_desc, do_desc, masks, rotations, dk, dv, num_sequences, window_left, window_right, num_heads,
    heads_per_section, HKV, GROUP_SIZE, NQ, NK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BLOCK_N keys of one key head, summed in float32 over its query heads.

    Grid: (``count_tiles`` of the keys * B * HKV). inputs: ``BackwardInputs``; q_desc and do_desc: descriptors if it
    reads by the TMA. masks: ``MaskArguments``. rotations: ``CallRotation``. dk (B, HKV, NK, D), dv (B, HKV, NK, DV).

    With ``inputs.nope`` there are HKV * GROUP_SIZE heads of k_nope, dk_nope, v and dv, the stride of k's heads is 0,
    and dk is in pair order, not un-rotated yet.
    """
    schedule.wait_for_previous_launch(PDL)
    schedule.let_next_launch_start(PDL)
    inputs, masks, rotations, dk, dv = unpack((inputs, masks, rotations, dk, dv))
    if inputs.USE_TMA:
        inputs = replace(inputs, q=replace(inputs.q, ptr=q_desc), do=replace(inputs.do, ptr=do_desc))
    masks = sequences.complete_masks(masks, num_sequences, window_left, window_right)
    tile = sequences.scheduled_keys(tl.program_id(0), NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N)
    start_n = tile.index * BLOCK_N
    if masks.cu_k_ptr is not None or masks.FROM_START:
        if start_n >= tile.num_rows:
            return
    num_rows, HQ = tl.cast(num_heads, tl.int64) * GROUP_SIZE * NQ, HKV * GROUP_SIZE
    scale, nope = inputs.scale, inputs.nope
    sequence = sequences.sequence_of_keys(tile, NQ, NK, masks)
    mask, q_offset = sequence.mask, sequence.q_offset
    rotation = sequences.sequence_rotation(rotations.tables, sequence)
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    q_rotation = replace(rotation, norm=rotations.q_norm) if rotations.ROTATE_INLINE else None
    offs = tl.arange(0, BLOCK_N)
    positions_k = start_n + offs
    keys = parts.keys_of_head(inputs, sequence, tile.origin.head, None, k_rotation, BLOCK_N, USE_TMA=False)
    k_rope = parts.load_rope(keys.k, start_n, offs)
    if nope is None:
        k = parts.Parts(rope=parts.without_unseen(k_rope, mask, start_n, offs), nope=None)
        v = parts.load_head_tile(keys.v, start_n, offs, CHECK_ROWS=True)
        v = parts.without_unseen(v, mask, start_n, offs)
    bounds = query_range(mask, start_n, q_offset, sequence.num_queries, BLOCK_M, BLOCK_N)
    rows = None
    if mask.intervals is not None:
        rows = row_interval(mask, positions_k)
        bounds = narrowed_queries(bounds, rows, q_offset, BLOCK_M)
    first, full_first, full_last, last = bounds
    dk_sum, dv_sum = zero_parts(BLOCK_N, inputs), zero_tile(BLOCK_N, inputs.value_format)
    for member in range(GROUP_SIZE):
        head = tile.origin.head * GROUP_SIZE + member
        queries = queries_of_head(
            inputs, sequence, head, q_rotation, rotations.q_sign, HQ, NQ, num_rows, BLOCK_M, inputs.USE_TMA
        )
        if nope is not None:
            keys = parts.keys_of_head(inputs, sequence, head, None, k_rotation, BLOCK_N, USE_TMA=False)
            k = parts.Parts(rope=k_rope, nope=parts.load_nope(keys.k, start_n, offs))
            v = parts.load_head_tile(keys.v, start_n, offs, CHECK_ROWS=True)
            dk_sum = parts.Parts(rope=dk_sum.rope, nope=zero_tile(BLOCK_N, nope.format))
            dv_sum = zero_tile(BLOCK_N, inputs.value_format)
        count, jump_after = full_first - first + last - full_last, full_first - first
        dk_sum, dv_sum = dkdv_range(
            dk_sum, dv_sum, k, v, positions_k, rows, queries, scale, first, count, jump_after, full_last,
            APPLY_MASK=True,
        )  # fmt: skip
        count = full_last - full_first
        dk_sum, dv_sum = dkdv_range(
            dk_sum, dv_sum, k, v, positions_k, rows, queries, scale, full_first, count, 0, 0, APPLY_MASK=False
        )
        if nope is not None:
            origin = replace(tile.origin, head=head)
            dk_nope = without_missing(dk_sum.nope, sequence, positions_k, rows) * softmax.gradient_scale(scale)
            store_rows(nope.dk, origin, tile.num_rows, nope.format, start_n, dk_nope)
            dv_sum = without_missing(dv_sum, sequence, positions_k, rows)
            store_rows(dv, origin, tile.num_rows, inputs.value_format, start_n, dv_sum)
    dk_rope = without_missing(dk_sum.rope, sequence, positions_k, rows) * softmax.gradient_scale(scale)
    if nope is None:
        dv_sum = without_missing(dv_sum, sequence, positions_k, rows)
        store_rows(dv, tile.origin, tile.num_rows, inputs.value_format, start_n, dv_sum)
        dk_rows = tiles.head_rows(dk, tile.origin, tile.num_rows, inputs.format)
        store_unrotated(tiles.rows_from(dk_rows, start_n), dk_rope, offs, rotation, start_n)
    else:
        store_rows(dk, tile.origin, tile.num_rows, inputs.format, start_n, dk_rope)


@triton.jit
def dq_range(dq, queries, keys, first, last, APPLY_MASK: tl.constexpr):
    """Add keys [first, last) to dq, float32 ``Parts``, and return it; ``first`` is a multiple of BLOCK_N.

    queries: the program's q, ``Parts`` of BLOCK_M rows, do (BLOCK_M, BLOCK_DV), lse (base 2) and delta (BLOCK_M,)
    float32, positions_q (BLOCK_M,), and scale. APPLY_MASK: some of the pairs may be hidden, and some of the keys may
    not exist.
    """
    q, do, lse, delta, positions_q, scale = queries
    offs = tl.arange(0, keys.BLOCK_N)
    for start_n in range(first, last, keys.BLOCK_N):
        k = parts.load_parts(keys.k, start_n, offs, CHECK_ROWS=APPLY_MASK)
        v = parts.load_head_tile(keys.v, start_n, offs, CHECK_ROWS=APPLY_MASK)
        if APPLY_MASK:
            k = replace(k, rope=parts.without_unseen(k.rope, keys.mask, start_n, offs))
            v = parts.without_unseen(v, keys.mask, start_n, offs)
        scores = parts.parts_product(q, k, scale)
        p = tl.math.exp2(scores * scale.qk_scale - lse[:, None])
        if APPLY_MASK:
            p = tl.where(visible(keys.mask, positions_q[:, None], (start_n + offs)[None, :]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=scale.PRECISION)
        ds = softmax.score_gradient(p, dp, delta[:, None], scores, scale).to(k.rope.dtype)
        dq_rope = tl.dot(ds, k.rope, dq.rope, input_precision=scale.PRECISION)
        if k.nope is None:
            dq = parts.Parts(rope=dq_rope, nope=None)
        else:
            dq = parts.Parts(rope=dq_rope, nope=tl.dot(ds, k.nope, dq.nope, input_precision=scale.PRECISION))
    return dq


@triton.jit(do_not_specialize=[name for name in _NUMBERS if name != "HKV"])
def dq_kernel(
    inputs, k_desc, v_desc, masks, rotations, outputs, num_sequences, window_left, window_right, num_heads,
    heads_per_section, HQ, GROUP_SIZE, NQ, NK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write dq of BLOCK_M query rows of one head, and their part of the sink's gradient.

    Grid: (``count_tiles`` of the queries * B * HQ). The arguments are as in ``dkdv_kernel``; outputs: ``QueryOutputs``.
    The masks have the blocks of ``interval_blocks_kernel``. With PDL it starts while dkdv_kernel drains: it reads only
    the pre-process's results, for which dkdv_kernel has waited.
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
    scale, nope = inputs.scale, inputs.nope
    sequence = sequences.sequence_of_queries(tile, NK, masks)
    mask = sequence.mask
    rotation = sequences.sequence_rotation(rotations.tables, sequence)
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    q_rotation = replace(rotation, norm=rotations.q_norm) if rotations.ROTATE_INLINE else None
    head_kv = tile.origin.head // GROUP_SIZE
    keys = parts.keys_of_head(inputs, sequence, head_kv, mask.first_key, k_rotation, BLOCK_N, inputs.USE_TMA)
    num_rows = tl.cast(num_heads, tl.int64) * NQ
    queries = queries_of_head(
        inputs, sequence, tile.origin.head, q_rotation, rotations.q_sign, HQ, NQ, num_rows, BLOCK_M, USE_TMA=False
    )
    offs = tl.arange(0, BLOCK_M)
    position_m = start_m + sequence.q_offset
    positions_q = position_m + offs
    q = parts.load_parts(queries.q, start_m, offs)
    do = parts.load_head_tile(queries.do, start_m, offs, CHECK_ROWS=True)
    exists = offs < tile.num_rows - start_m
    lse = tiles.load_where(queries.lse_ptr + start_m + offs, exists, float("inf"))
    delta = tiles.load_where(queries.delta_ptr + start_m + offs, exists, 0.0)

    bounds = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    dq, loaded = zero_parts(BLOCK_M, inputs), (q, do, lse, delta, positions_q, scale)
    if mask.intervals is not None:
        dq = parts.fold_intervals(dq_range, dq, loaded, keys, start_m, bounds, BLOCK_M)
        # Queries that see no key may hold NaN.
        dq = replace(dq, rope=tl.where((lse != float("inf"))[:, None], dq.rope, 0.0))
    else:
        first, full_first, full_last, last = bounds
        if mask.first_key is not None:
            end = tl.minimum(full_first, last)
            dq = dq_range(dq, loaded, keys, first, end, APPLY_MASK=True)
        dq = dq_range(dq, loaded, keys, full_first, full_last, APPLY_MASK=False)
        dq = dq_range(dq, loaded, keys, full_last, last, APPLY_MASK=True)
    # Not for data: the launch after this one must find dk and dv finished too.
    schedule.wait_for_previous_launch(PDL)
    if outputs.sinks_ptr is not None:
        part = softmax.sink_gradient(tl.load(outputs.sinks_ptr + tile.origin.head), lse, delta)
        tl.store(outputs.dsinks_ptr + (tile.number * num_heads + tile.batch_head), part)
    dq_rows = tiles.rows_from(tiles.head_rows(outputs.dq, tile.origin, tile.num_rows, inputs.format), start_m)
    store_unrotated(dq_rows, dq.rope * outputs.softmax_scale, offs, rotation, position_m)
    if nope is not None:
        store_rows(nope.dq, tile.origin, tile.num_rows, nope.format, start_m, dq.nope * outputs.softmax_scale)


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
    first_rows = tiles.head_rows(parts, replace(tile.origin, head=0), tile.num_rows, row_format)
    first_rows = tiles.rows_from(first_rows, start_n)
    total = tl.zeros((BLOCK_N, row_format.BLOCK_D), tl.float32)
    for first_head in range(0, num_heads, HEADS):
        head = (first_head + tl.arange(0, HEADS))[:, None, None]
        columns = tl.arange(0, row_format.BLOCK_D)
        pointers = tiles.row_pointers(first_rows, offs, columns)[None, :, :] + head.to(tl.int64) * parts.strides[1]
        exists = tiles.row_mask(first_rows, offs) & (columns[None, :] < row_format.D)
        total += tl.sum(tl.load(pointers, mask=(head < num_heads) & exists[None, :, :], other=0.0), axis=0)
    dk_rows = tiles.head_rows(dk, tile.origin, tile.num_rows, row_format)
    store_unrotated(tiles.rows_from(dk_rows, start_n), total, offs, of_sequence, start_n)
