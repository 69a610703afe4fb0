# mypy: ignore-errors
"""The two roles of a program of the portable backward pass: dK and dV of a tile of keys, and dQ of a tile of queries.

With P = softmax(scale * Q_rot K_rot^T) (FlashAttention-2, Dao 2023, algorithm 2):
dV = P^T dO;  dS = P * (dO V^T - delta);  dQ_rot = scale * dS K_rot;  dK_rot = scale * dS^T Q_rot,
and dQ, dK follow by the transposed rotation, once per tile. If q and k were normed before they were rotated, these are
the gradients of the normed ones; ``norm_gradient_kernel`` does the rest.
"""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.keys import keys_of_head
from fused_rope_attn.attention.portable.parts import (
    NopeViews,
    Parts,
    accumulate_parts,
    add_to_parts,
    load_parts,
    nope_tiles,
    parts_product,
    zero_parts,
    zero_tile,
)
from fused_rope_attn.kernels.intervals import narrowed_queries, next_run, row_interval, without_unseen
from fused_rope_attn.kernels.masks import Mask, first_query, key_range, query_range, visible
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import (
    Rotation,
    load_rotated_tile,
    store_unrotated,
)
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.sequences import sequence_of_keys, sequence_of_queries, sequence_rotation
from fused_rope_attn.kernels.softmax import ScoreScale, add_product, gradient_scale, score_gradient, sink_gradient
from fused_rope_attn.kernels.tiles import (
    HeadTiles,
    Origin,
    RowFormat,
    TensorView,
    head_rows,
    head_tiles,
    load_head_tile,
    load_where,
    rows_from,
    store_tile,
)


@record
class BackwardInputs:
    """The tensors that both roles read, and their formats: q (B, HQ, NQ, D), k (B, HKV, NK, D), do (B, HQ, NQ, DV), v
    (B, HKV, NK, DV).

    With ``nope``, of multi-head latent attention, key head c of the dkdv role has GROUP_SIZE query heads that share its
    k and have each its own k_nope and v, which have HQ heads.

    With USE_TMA a role reads descriptors for the tensors that it goes through tile by tile: q and do for dK and dV, k
    and v for dQ.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    do: TensorView
    stats_ptr: tl.tensor  # ``preprocess_kernel``'s (2, B, HQ, NQ) float32: lse in base 2, then delta
    format: RowFormat
    value_format: RowFormat
    nope: NopeViews | None
    scale: ScoreScale
    USE_TMA: tl.constexpr


@record
class BackwardSizes:
    """The numbers of a backward pass for which its kernels are not compiled again."""

    num_heads: tl.tensor  # B * HKV for dK and dV, B * HQ for dQ
    HQ: tl.tensor
    GROUP_SIZE: tl.tensor
    NQ: tl.tensor
    NK: tl.tensor
    num_rows: tl.tensor  # B * HQ * NQ, int64


@record
class KeyOutputs:
    """dk (B, HKV, NK, D) and dv (B, HKV, NK, DV); ``write_dkdv`` says what they hold with ``nope``."""

    dk: TensorView
    dv: TensorView


@record
class QueryOutputs:
    """dq (B, HQ, NQ, D), and the sinks' gradient: dsinks (tiles, B * HQ) float32, or None as ``sinks_ptr`` (HQ,).

    dq_nope is in ``BackwardInputs.nope``.
    """

    dq: TensorView
    softmax_scale: tl.tensor
    dsinks_ptr: tl.tensor | None
    sinks_ptr: tl.tensor | None


@record
class RoleQueries:
    """Queries of one head of a sequence with their dO, lse, delta, rotation and mask, read BLOCK_M at a time.

    Rows before the first one that sees a key may hold anything. If a call may have such, that row is the tiles'
    first_row.
    """

    q: HeadTiles
    q_nope: HeadTiles | None
    do: HeadTiles
    lse_ptr: tl.tensor  # of the first row; float32 in base 2, +inf if a row saw nothing
    delta_ptr: tl.tensor  # of the first row; float32
    rotation: Rotation | None  # of the queries, which are then multiplied by ``sign``; None: stored rotated
    sign: tl.tensor
    nope_sign: tl.tensor | None  # as ``signed`` takes it
    q_offset: tl.tensor  # position of the first row
    mask: Mask
    BLOCK_M: tl.constexpr


@triton.jit
def query_tiles(inputs, origin, num_rows, first_row, READS_LENGTHS: tl.constexpr, USE_TMA: tl.constexpr):
    """Return the ``HeadTiles`` of the num_rows queries of a head that begin at ``origin``, and of their dO."""
    q = head_tiles(inputs.q, origin, num_rows, inputs.format, first_row, READS_LENGTHS, USE_TMA)
    return q, head_tiles(inputs.do, origin, num_rows, inputs.value_format, first_row, READS_LENGTHS, USE_TMA)


@triton.jit
def statistics_of_head(inputs, sizes, origin):
    """Return pointers to lse and delta of the rows of one head that begin at ``origin``."""
    lse_ptr = inputs.stats_ptr + (origin.batch * sizes.HQ + origin.head) * sizes.NQ + origin.row
    return lse_ptr, lse_ptr + sizes.num_rows


@triton.jit
def without_unseeing(tile, lse, mask):
    """Return a tile (rows, columns) of q or dO with zeros for queries that see no key: their lse is +inf.

    With intervals these rows are anywhere, so that loads do not check for them. They may hold NaN, and 0 * NaN is NaN.
    """
    if mask.intervals is not None:
        tile = tl.where((lse != float("inf"))[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def dkdv_range(
    dk, dv, k, v, positions_k, rows, queries, scale, first, count, jump_after, jump_to, APPLY_MASK: tl.constexpr
):
    """Add ``count`` query blocks to dk, ``Parts``, and dv (BLOCK_N, BLOCK_DV), both float32, and return them.

    k, ``Parts``, v (BLOCK_N, BLOCK_DV), their positions_k (BLOCK_N,) and with intervals their ``row_interval``, else
    None, are the program's. The query blocks are
    ``jump_after`` blocks from number ``first`` on, and then those from number ``jump_to`` on.

    APPLY_MASK: some of the pairs may be hidden, and some of the queries may not exist. Without it there is no jump.
    Keys that do not exist need no mask here: they only reach rows of dk and dv that are not stored, or stored as zero.
    """
    BLOCK_M: tl.constexpr = queries.BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    for i in range(count):
        start_m = (first + i) * BLOCK_M
        if APPLY_MASK:
            start_m = tl.where(i < jump_after, start_m, (jump_to - jump_after) * BLOCK_M + i * BLOCK_M)
        exists = None
        if APPLY_MASK:
            exists = offs < queries.q.rows.num_rows - start_m
        q = load_parts(
            queries.q,
            queries.q_nope,
            queries.rotation,
            start_m,
            offs,
            queries.q_offset,
            queries.sign,
            queries.nope_sign,
            CHECK_ROWS=APPLY_MASK,
        )
        lse = load_where(queries.lse_ptr + start_m + offs, exists, float("inf"))
        if APPLY_MASK:
            q = replace(q, rope=without_unseeing(q.rope, lse, queries.mask))
        scores_t = parts_product(k, q, scale)
        p_t = tl.math.exp2(scores_t * scale.qk_scale - lse[None, :])
        if APPLY_MASK:
            mask = queries.mask
            if mask.READS_LENGTHS or mask.window.HIDES_PAIRS:
                positions_q = (start_m + queries.q_offset + offs)[None, :]
                of_keys = None
                if rows is not None:
                    of_keys = rows[0][:, None], rows[1][:, None]
                p_t = tl.where(visible(mask, positions_q, positions_k[:, None], of_keys), p_t, 0.0)
        do = load_head_tile(queries.do, start_m, offs, CHECK_ROWS=APPLY_MASK)
        if APPLY_MASK:
            do = without_unseeing(do, lse, queries.mask)
        dv = add_product(p_t.to(do.dtype), do, dv, scale.PRECISION)
        delta = load_where(queries.delta_ptr + start_m + offs, exists, 0.0)
        dp_t = tl.dot(v, tl.trans(do), input_precision=scale.PRECISION)
        ds_t = score_gradient(p_t, dp_t, delta[None, :], scores_t, scale)
        dk = add_to_parts(ds_t.to(q.rope.dtype), q, dk, scale.PRECISION)
    return dk, dv


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
def write_dkdv(tile, inputs, sizes, masks, rotations, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write ``KeyOutputs`` of a ``ScheduledTile`` of BLOCK_N keys, summed in float32 over its query heads.

    With ``inputs.nope`` dk has one head for each key head of the tiles, in pair order,
    not un-rotated yet, and each query head has its own dk_nope and dv.
    """
    READS_LENGTHS: tl.constexpr = masks.READS_LENGTHS
    row_format, scale = inputs.format, inputs.scale
    start_n = tile.index * BLOCK_N
    sequence = sequence_of_keys(tile, sizes.NQ, sizes.NK, masks)
    mask, num_keys = sequence.mask, sequence.num_keys
    rotation = sequence_rotation(rotations.tables, sequence)
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    q_rotation = replace(rotation, norm=rotations.q_norm) if rotations.ROTATE_INLINE else None
    k_tiles = head_tiles(inputs.k, tile.origin, num_keys, row_format, None, READS_LENGTHS, USE_TMA=False)
    v_tiles = head_tiles(inputs.v, tile.origin, num_keys, inputs.value_format, None, READS_LENGTHS, USE_TMA=False)
    offs = tl.arange(0, BLOCK_N)
    nope = inputs.nope
    if nope is None:
        k_rope = without_unseen(load_rotated_tile(k_tiles, k_rotation, start_n, offs, 0), mask, start_n, offs)
        k = Parts(rope=k_rope, nope=None)
        v = without_unseen(load_head_tile(v_tiles, start_n, offs, CHECK_ROWS=True), mask, start_n, offs)
    else:
        k_rope = load_rotated_tile(k_tiles, k_rotation, start_n, offs, 0)
    positions_k = start_n + offs

    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    first, full_first, full_last, last = query_range(
        mask, start_n, sequence.q_offset, sequence.num_queries, BLOCK_M, BLOCK_N
    )
    rows = None
    if mask.intervals is not None:
        rows = row_interval(mask, positions_k)
        bounds = first, full_first, full_last, last
        first, full_first, full_last, last = narrowed_queries(bounds, rows, sequence.q_offset, BLOCK_M)
    dk_sum = zero_parts(BLOCK_N, row_format, nope)
    dv_sum = zero_tile(BLOCK_N, inputs.value_format)
    sign, q_offset, num_queries = rotations.q_sign, sequence.q_offset, sequence.num_queries
    for member in range(sizes.GROUP_SIZE):
        head_q = tile.origin.head * sizes.GROUP_SIZE + member
        origin = Origin(batch=sequence.batch, head=head_q, row=sequence.first_q)
        q_tiles, do_tiles = query_tiles(inputs, origin, num_queries, first_row, READS_LENGTHS, inputs.USE_TMA)
        lse_ptr, delta_ptr = statistics_of_head(inputs, sizes, origin)
        q_nope, nope_sign = None, None
        if nope is not None:
            of_keys = Origin(batch=sequence.batch, head=head_q, row=tile.origin.row)
            q_nope = nope_tiles(nope.q, nope, origin, num_queries, first_row, READS_LENGTHS)
            nope_sign = nope.sign
            k_nope = nope_tiles(nope.k, nope, of_keys, num_keys, None, READS_LENGTHS)
            v_of_head = head_tiles(inputs.v, of_keys, num_keys, inputs.value_format, None, READS_LENGTHS, USE_TMA=False)
            k = Parts(rope=k_rope, nope=load_head_tile(k_nope, start_n, offs, CHECK_ROWS=True))
            v = load_head_tile(v_of_head, start_n, offs, CHECK_ROWS=True)
            dk_sum = Parts(rope=dk_sum.rope, nope=zero_tile(BLOCK_N, nope.format))
            dv_sum = zero_tile(BLOCK_N, inputs.value_format)
        queries = RoleQueries(
            q_tiles, q_nope, do_tiles, lse_ptr, delta_ptr, q_rotation, sign, nope_sign, q_offset, mask, BLOCK_M
        )
        count, jump_after = full_first - first + last - full_last, full_first - first
        dk_sum, dv_sum = dkdv_range(
            dk_sum,
            dv_sum,
            k,
            v,
            positions_k,
            rows,
            queries,
            scale,
            first,
            count,
            jump_after,
            full_last,
            APPLY_MASK=True,
        )
        count = full_last - full_first
        dk_sum, dv_sum = dkdv_range(
            dk_sum, dv_sum, k, v, positions_k, rows, queries, scale, full_first, count, 0, 0, APPLY_MASK=False
        )
        if nope is not None:
            dk_nope = without_missing(dk_sum.nope, sequence, positions_k, rows) * gradient_scale(scale)
            store_tile(rows_from(head_rows(nope.dk, of_keys, tile.num_rows, nope.format), start_n), dk_nope, offs)
            dv_rows = head_rows(outputs.dv, of_keys, tile.num_rows, inputs.value_format)
            store_tile(rows_from(dv_rows, start_n), without_missing(dv_sum, sequence, positions_k, rows), offs)
    dk_rope = without_missing(dk_sum.rope, sequence, positions_k, rows)
    if nope is None:
        dv_sum = without_missing(dv_sum, sequence, positions_k, rows)
        softmax_scale = gradient_scale(scale)
        dv_rows = head_rows(outputs.dv, tile.origin, tile.num_rows, inputs.value_format)
        store_tile(rows_from(dv_rows, start_n), dv_sum, offs)
        dk_rows = head_rows(outputs.dk, tile.origin, tile.num_rows, row_format)
        store_unrotated(rows_from(dk_rows, start_n), dk_rope * softmax_scale, offs, rotation, start_n)
    else:
        dk_rows = head_rows(outputs.dk, tile.origin, tile.num_rows, row_format)
        store_tile(rows_from(dk_rows, start_n), dk_rope * gradient_scale(scale), offs)


@triton.jit
def dq_range(dq, q, do, lse, delta, positions_q, keys, scale, first, last, APPLY_MASK: tl.constexpr):
    """Add keys [first, last) to dq, float32 ``Parts``, and return it; ``first`` is a multiple of BLOCK_N.

    q, ``Parts`` of BLOCK_M rows, do (BLOCK_M, BLOCK_DV), lse (base 2) and delta (BLOCK_M,) float32 and positions_q
    (BLOCK_M,) are the program's. APPLY_MASK: some of the pairs may be hidden, and some of the keys may not exist.
    """
    offs = tl.arange(0, keys.BLOCK_N)
    for start_n in range(first, last, keys.BLOCK_N):
        k = load_parts(keys.k, keys.k_nope, keys.rotation, start_n, offs, 0, CHECK_ROWS=APPLY_MASK)
        v = load_head_tile(keys.v, start_n, offs, CHECK_ROWS=APPLY_MASK)
        if APPLY_MASK:
            k = replace(k, rope=without_unseen(k.rope, keys.mask, start_n, offs))
            v = without_unseen(v, keys.mask, start_n, offs)
        scores = parts_product(q, k, scale)
        p = tl.math.exp2(scores * scale.qk_scale - lse[:, None])
        if APPLY_MASK:
            p = tl.where(visible(keys.mask, positions_q[:, None], (start_n + offs)[None, :]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=scale.PRECISION)
        ds = score_gradient(p, dp, delta[:, None], scores, scale)
        dq = accumulate_parts(ds.to(k.rope.dtype), k, dq, scale.PRECISION)
    return dq


@triton.jit
def dq_intervals(dq, q, do, lse, delta, positions_q, keys, scale, bounds, start_m, BLOCK_M: tl.constexpr):
    """Add the keys that the tile of rows [start_m, start_m + BLOCK_M) sees to dq, as ``dq_range`` does, and return it.

    Blocks of keys that no row sees are skipped. bounds: ``key_range``'s.
    """
    BLOCK_N: tl.constexpr = keys.BLOCK_N
    first, full_first, full_last, last = bounds
    block, last_block = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    full_first, full_last = full_first // BLOCK_N, full_last // BLOCK_N
    while block < last_block:
        begin, middle, block = next_run(keys.mask, block, last_block, full_first, full_last, start_m, BLOCK_M, BLOCK_N)
        start, end = begin * BLOCK_N, middle * BLOCK_N
        dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, start, end, APPLY_MASK=True)
        start, end = middle * BLOCK_N, block * BLOCK_N
        dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, start, end, APPLY_MASK=False)
    # Queries that see no key may hold NaN.
    return replace(dq, rope=tl.where((lse != float("inf"))[:, None], dq.rope, 0.0))


@triton.jit
def write_dq(
    tile, inputs, sizes, masks, rotations, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    """Write ``QueryOutputs`` of a ``ScheduledTile`` of BLOCK_M query rows.

    With PDL it waits for the launch before this one before it stores.
    """
    READS_LENGTHS: tl.constexpr = masks.READS_LENGTHS
    row_format, scale = inputs.format, inputs.scale
    start_m = tile.index * BLOCK_M
    sequence = sequence_of_queries(tile, sizes.NK, masks)
    mask = sequence.mask
    first_row = None
    if READS_LENGTHS:
        first_row = first_query(mask, sequence.q_offset)
    rotation = sequence_rotation(rotations.tables, sequence)
    k_rotation = replace(rotation, norm=rotations.k_norm) if rotations.ROTATE_INLINE else None
    q_rotation = replace(rotation, norm=rotations.q_norm) if rotations.ROTATE_INLINE else None
    head_kv = tile.origin.head // sizes.GROUP_SIZE
    nope = inputs.nope
    keys = keys_of_head(
        sequence,
        head_kv,
        inputs.k,
        inputs.v,
        nope,
        k_rotation,
        row_format,
        inputs.value_format,
        BLOCK_N,
        inputs.USE_TMA,
    )
    q_tiles, do_tiles = query_tiles(inputs, tile.origin, tile.num_rows, first_row, READS_LENGTHS, USE_TMA=False)

    offs = tl.arange(0, BLOCK_M)
    position_m = start_m + sequence.q_offset
    positions_q = position_m + offs
    q_nope, nope_sign = None, None
    if nope is not None:
        q_nope = nope_tiles(nope.q, nope, tile.origin, tile.num_rows, first_row, READS_LENGTHS)
        nope_sign = nope.sign
    q = load_parts(q_tiles, q_nope, q_rotation, start_m, offs, sequence.q_offset, rotations.q_sign, nope_sign)
    do = load_head_tile(do_tiles, start_m, offs, CHECK_ROWS=True)
    lse_ptr, delta_ptr = statistics_of_head(inputs, sizes, tile.origin)
    exists = offs < tile.num_rows - start_m
    lse = load_where(lse_ptr + start_m + offs, exists, float("inf"))
    delta = load_where(delta_ptr + start_m + offs, exists, 0.0)

    first, full_first, full_last, last = key_range(mask, start_m, sequence.q_offset, BLOCK_M, BLOCK_N)
    dq = zero_parts(BLOCK_M, row_format, nope)
    if mask.intervals is not None:
        bounds = first, full_first, full_last, last
        dq = dq_intervals(dq, q, do, lse, delta, positions_q, keys, scale, bounds, start_m, BLOCK_M)
    else:
        if mask.first_key is not None:
            end = tl.minimum(full_first, last)
            dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, first, end, APPLY_MASK=True)
        dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, full_first, full_last, APPLY_MASK=False)
        dq = dq_range(dq, q, do, lse, delta, positions_q, keys, scale, full_last, last, APPLY_MASK=True)
    # Not for data: the launch after this one must find dk and dv finished too.
    wait_for_previous_launch(PDL)
    if outputs.sinks_ptr is not None:
        part = sink_gradient(tl.load(outputs.sinks_ptr + tile.origin.head), lse, delta)
        tl.store(outputs.dsinks_ptr + (tile.number * sizes.num_heads + tile.batch_head), part)
    dq_rows = head_rows(outputs.dq, tile.origin, tile.num_rows, row_format)
    store_unrotated(rows_from(dq_rows, start_m), dq.rope * outputs.softmax_scale, offs, rotation, position_m)
    if nope is not None:
        nope_rows = head_rows(nope.dq, tile.origin, tile.num_rows, nope.format)
        store_tile(rows_from(nope_rows, start_m), dq.nope * outputs.softmax_scale, offs)
