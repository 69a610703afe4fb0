# mypy: ignore-errors
"""Co-RoPE's Triton kernels, forward and backward in O(N) memory. DESIGN.md has their reasons.

A program has BLOCK_M query rows and up to HEADS heads of one group. The group's leader measures the distances
(``distances``) for all of them.
"""

import triton
import triton.language as tl

from fused_rope_attn.experimental.corope.distances import (
    TWO_PI,
    Distances,
    Frequencies,
    causal_pairs,
    distance_phases,
    revolutions_per_step,
    split_mileage,
    steps,
    sum_steps,
)
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.kernels.rotation import rotate
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.kernels.softmax import online_softmax
from fused_rope_attn.kernels.tiles import (
    Origin,
    RowFormat,
    Rows,
    TensorView,
    head_rows,
    load_tile,
    rows_at,
    tile_pointers,
)

_NUMBERS = ["num_groups", "head_chunks", "HKV", "GROUP_SIZE", "N"]
BLOCK_PAIRS = tl.constexpr(16)  # columns of one product: the smallest inner side of one in 16 bits


@record
class CoRopeInputs:
    """Queries (B, HQ, N, D), keys and values (B, HKV, N, D), and ``launch.frequency_tables``."""

    q: TensorView
    k: TensorView
    v: TensorView
    frequencies: Frequencies
    qk_scale: tl.tensor
    format: RowFormat


@record
class Shape:
    """Sizes of a call and of a program's tiles."""

    N: tl.tensor
    HKV: tl.tensor
    GROUP_SIZE: tl.tensor
    HEADS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    format: RowFormat  # its USE_INT64_OFFSETS: an offset within one tile or one group can pass 2**31


@record
class Program:
    """A program's part of the output: its first query row, batch entry and key head, both int64, and the number of its
    chunk of HEADS heads within the group."""

    start_m: tl.tensor
    batch: tl.tensor
    head_kv: tl.tensor
    chunk: tl.tensor


@record
class GroupQueries:
    """The query rows of a program."""

    leader: Rows  # of the group's first head
    offs_m: tl.tensor  # (BLOCK_M,): positions
    heads: tl.tensor  # (HEADS,): within the group
    exists: tl.tensor  # (BLOCK_M, HEADS)
    pointers: tl.tensor  # (BLOCK_M, HEADS): to the rows' first columns
    leader_tile: tl.tensor  # (BLOCK_M, BLOCK_D)


@record
class TileKeys:
    """Pointers to the first columns of a tile's keys, and whether they exist, both (BLOCK_N,)."""

    pointers: tl.tensor
    stride_column: tl.tensor
    exists: tl.tensor
    format: RowFormat


@triton.jit
def load_halves(pointers, pairs, stride_column, mask, format):
    """Load both members of some pairs, from the pointers to the first column of rows; zero if a pair is past D/2.

    pairs, int32, broadcasts against pointers and mask; the result has the memory's dtype. format: ``RowFormat``.
    """
    D: tl.constexpr = format.D
    mask = mask & (pairs < D // 2)
    if format.USE_INT64_OFFSETS:
        pairs = pairs.to(tl.int64)
    first = tl.load(pointers + pairs * stride_column, mask=mask, other=0.0)
    return first, tl.load(pointers + (pairs + D // 2) * stride_column, mask=mask, other=0.0)


@triton.jit
def load_key_pairs(pairs, keys):
    """Load both members of some pairs of the keys, (pairs, keys) float32."""
    first, second = load_halves(
        keys.pointers[None, :], pairs[:, None], keys.stride_column, keys.exists[None, :], keys.format
    )
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def split_dot(x, precise, acc, PRECISION: tl.constexpr):
    """Return acc + x @ precise, x in the input dtype, ``precise`` float32: as two words of 16 bits if x has 16.

    One word would do for scores. But the distances' gradient sums one rounding error of each key over all keys.
    """
    high = precise.to(x.dtype)
    acc = tl.dot(x, high, acc, input_precision=PRECISION)
    if x.dtype != tl.float32:
        low = (precise - high.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, low, acc, input_precision=PRECISION)
    return acc


@triton.jit
def tile_scores(queries, keys, distances, frequencies, shape, PRECISION: tl.constexpr):
    """Return unscaled scores (BLOCK_M, HEADS, BLOCK_N): a small product a row, of keys rotated once for all heads."""
    scores = tl.zeros((shape.BLOCK_M, shape.HEADS, shape.BLOCK_N), tl.float32)
    for start in range(0, shape.format.D // 2, BLOCK_PAIRS):
        pairs = start + tl.arange(0, BLOCK_PAIRS)
        pointers, exists = queries.pointers[:, :, None], queries.exists[:, :, None]
        q1, q2 = load_halves(pointers, pairs[None, None, :], queries.leader.stride_column, exists, shape.format)
        k1, k2 = load_key_pairs(pairs, keys)
        cos, sin = distance_phases(pairs, distances, frequencies, shape.format.D)
        k1_rot, k2_rot = rotate(k1[None, :, :], k2[None, :, :], cos, sin, CONJUGATE=True)
        scores = split_dot(q1, k1_rot, scores, PRECISION)
        scores = split_dot(q2, k2_rot, scores, PRECISION)
    return scores


@triton.jit
def spread_heads(x, SLOTS: tl.constexpr):
    """(rows, HEADS, keys) -> (rows, SLOTS, keys): head h in slot ``h * SLOTS // HEADS``, zeros between."""
    if SLOTS == x.shape[1]:
        return x
    else:
        between = tl.arange(0, SLOTS // x.shape[1])[None, None, :, None]
        return tl.reshape(tl.where(between == 0, x[:, :, None, :], 0.0), (x.shape[0], SLOTS, x.shape[2]))


@triton.jit
def first_columns(rows, offs):
    """Return pointers to the first columns of the rows ``offs`` of ``Rows``."""
    if rows.format.USE_INT64_OFFSETS:
        offs = offs.to(tl.int64)
    return rows.ptr + offs * rows.stride_row


@triton.jit
def leader_rows(tensor, program, shape):
    """Return the ``Rows`` of the leader, the first head of a program's group, in a tensor with HQ heads."""
    strides = tensor.strides
    ptr = tensor.ptr + program.batch * strides[0] + program.head_kv * shape.GROUP_SIZE * strides[1]
    return rows_at(ptr, strides, shape.N, shape.format)


@triton.jit
def group_pointers(leader, stride_head, queries):
    """Return pointers to the first columns of a program's rows (BLOCK_M, HEADS), from the leader's ``Rows``."""
    return tile_pointers(
        leader.ptr, queries.offs_m, queries.heads, leader.stride_row, stride_head, leader.format.USE_INT64_OFFSETS
    )


@triton.jit
def load_group(leader, stride_head, queries):
    """Load a group as one tile (BLOCK_M * HEADS, BLOCK_D), row m * HEADS + h, from the leader's ``Rows``."""
    ROWS: tl.constexpr = queries.exists.shape[0] * queries.exists.shape[1]
    pointers = tl.reshape(group_pointers(leader, stride_head, queries), (ROWS,))
    columns = tl.arange(0, leader.format.BLOCK_D)
    mask = tl.reshape(queries.exists, (ROWS,))[:, None] & (columns[None, :] < leader.format.D)
    return tl.load(pointers[:, None] + columns[None, :] * leader.stride_column, mask=mask, other=0.0)


@triton.jit
def find_program(num_groups, head_chunks, shape):
    """Return this ``Program``; the longest ones start first. num_groups is B * HKV."""
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(shape.N, shape.BLOCK_M)
    num_heads = num_groups * head_chunks
    tile, head = scheduled_tile(pid, num_tiles, num_heads, num_heads, LAST_TILE_FIRST=True)
    group = head // head_chunks
    return Program(
        start_m=tile * shape.BLOCK_M,
        batch=(group // shape.HKV).to(tl.int64),
        head_kv=(group % shape.HKV).to(tl.int64),
        chunk=head % head_chunks,
    )


@triton.jit
def program_inputs(inputs, num_groups, head_chunks, shape):
    """Return this ``Program``, its ``GroupQueries``, its group's number in the batch (int64), and the ``Rows`` of its
    keys and values."""
    program = find_program(num_groups, head_chunks, shape)
    rows = tl.arange(0, shape.BLOCK_M)
    offs_m = program.start_m + rows
    heads = program.chunk * shape.HEADS + tl.arange(0, shape.HEADS)
    leader = leader_rows(inputs.q, program, shape)
    exists = (offs_m < shape.N)[:, None] & (heads < shape.GROUP_SIZE)[None, :]
    IS_LONG: tl.constexpr = shape.format.USE_INT64_OFFSETS
    pointers = tile_pointers(leader.ptr, offs_m, heads, leader.stride_row, inputs.q.strides[1], IS_LONG)
    leader_tile = load_tile(leader, offs_m, CHECK_ROWS=True)
    queries = GroupQueries(leader, offs_m, heads, exists, pointers, leader_tile)
    group = program.batch * shape.HKV + program.head_kv
    origin = Origin(batch=program.batch, head=program.head_kv, row=0)
    k_rows = head_rows(inputs.k, origin, shape.N, shape.format)
    return program, queries, group, k_rows, head_rows(inputs.v, origin, shape.N, shape.format)


@triton.jit(do_not_specialize=_NUMBERS)
def forward_kernel(
    inputs, o_view, lse_ptr, mileage_ptr, num_groups, head_chunks, HKV, GROUP_SIZE, N, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o, lse (B, HQ, N) in base 2 and mileage (B, HKV, N) of BLOCK_M query rows of up to HEADS heads of a group.

    Grid: (query blocks * num_groups * head_chunks,). Keys are visited from the diagonal backwards, so that a row's
    distances need only its running sum.
    """
    inputs, o_view = unpack((inputs, o_view))
    shape = Shape(N, HKV, GROUP_SIZE, HEADS=HEADS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, format=inputs.format)
    frequencies, qk_scale = inputs.frequencies, inputs.qk_scale
    D: tl.constexpr = inputs.format.D
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    program, queries, group, k_rows, v_rows = program_inputs(inputs, num_groups, head_chunks, shape)
    offs_m = queries.offs_m

    mileage = tl.zeros((BLOCK_M,), tl.int64)
    acc = tl.zeros((BLOCK_M * HEADS, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M * HEADS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M * HEADS,), tl.float32)
    blocks = tl.cdiv(tl.minimum(N, program.start_m + BLOCK_M), BLOCK_N)
    for block in range(blocks):
        start_n = (blocks - 1 - block) * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k_rows, offs_n, CHECK_ROWS=True)
        k_pointers = first_columns(k_rows, offs_n)
        z, fixed = steps(queries.leader_tile, k_tile, offs_m, offs_n, N, qk_scale, PRECISION)
        whole, rest = split_mileage(mileage)
        total, local = sum_steps(fixed)
        keys = TileKeys(k_pointers, k_rows.stride_column, exists=offs_n < N, format=shape.format)
        scores = tile_scores(queries, keys, Distances(whole, rest, local), frequencies, shape, PRECISION)
        mileage += total
        exists = causal_pairs(offs_m, offs_n, N)
        scores = tl.where(exists[:, None, :], scores * qk_scale, float("-inf"))
        scores = tl.reshape(scores, (BLOCK_M * HEADS, BLOCK_N))
        p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, 1.0, HAS_EMPTY_ROWS=True)
        v_tile = load_tile(v_rows, offs_n, CHECK_ROWS=True)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], input_precision=PRECISION)

    # Every stored row has seen itself. Rows past the end have seen all keys and are not stored.
    o_leader = leader_rows(o_view, program, shape)
    o_rows = tl.reshape(group_pointers(o_leader, o_view.strides[1], queries), (BLOCK_M * HEADS,))
    columns = tl.arange(0, BLOCK_D)
    mask = tl.reshape(queries.exists, (BLOCK_M * HEADS,))
    o = (acc / row_sum[:, None]).to(o_view.ptr.dtype.element_ty)
    tl.store(o_rows[:, None] + columns[None, :], o, mask=mask[:, None] & (columns[None, :] < D))
    lse_base = lse_ptr + group * GROUP_SIZE * N
    lse_rows = tl.reshape(
        tile_pointers(lse_base, offs_m, queries.heads, 1, N, USE_INT64_OFFSETS=True), (BLOCK_M * HEADS,)
    )
    tl.store(lse_rows, row_max + tl.math.log2(row_sum), mask=mask)
    # Every chunk of a group's heads finds the leader's mileage, and the first chunk's program stores it. The
    # chunk is broadcast before the comparison: in Triton's interpreter `&` of a block and a scalar condition gives
    # integers, which 3.9 refuses as a mask.
    chunk_of_row = tl.zeros((BLOCK_M,), tl.int32) + program.chunk
    tl.store(mileage_ptr + group * N + offs_m, mileage, mask=(offs_m < N) & (chunk_of_row == 0))


@triton.jit(do_not_specialize=_NUMBERS)
def backward_kernel(
    inputs, do_view, o_view, lse_ptr, mileage_ptr, dq_ptr, dk_ptr, dv_ptr, softmax_scale, num_groups, head_chunks, HKV,
    GROUP_SIZE, N, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_SLOTS: tl.constexpr, DISTANCE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients from the rows of up to HEADS heads of one group to float32 sums (B, H, N, D). Grid: as forward.

    Keys are visited from the first to the diagonal: step m of a row collects the distance gradients of all keys before
    it, a running sum, and distances are the rest of the row's whole mileage.
    """
    inputs, do_view, o_view = unpack((inputs, do_view, o_view))
    shape = Shape(N, HKV, GROUP_SIZE, HEADS=HEADS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, format=inputs.format)
    frequencies, qk_scale = inputs.frequencies, inputs.qk_scale
    D: tl.constexpr = inputs.format.D
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    IS_LONG: tl.constexpr = inputs.format.USE_INT64_OFFSETS
    program, queries, group, k_rows, v_rows = program_inputs(inputs, num_groups, head_chunks, shape)
    offs_m, heads = queries.offs_m, queries.heads
    dq_base = dq_ptr + group * GROUP_SIZE * D * N
    dk_base = dk_ptr + group * D * N
    dv_base = dv_ptr + group * N * D
    columns = tl.arange(0, BLOCK_D)
    dq_rows = tile_pointers(dq_base, offs_m, heads, D, tl.cast(D, tl.int64) * N, USE_INT64_OFFSETS=True)
    # The queries once more, their heads spread over the smallest inner side of a product.
    slots = tl.arange(0, HEAD_SLOTS)
    slot_heads = program.chunk * HEADS + slots // (HEAD_SLOTS // HEADS)
    q_slots = tile_pointers(
        queries.leader.ptr, offs_m, slot_heads, queries.leader.stride_row, inputs.q.strides[1], IS_LONG
    )
    slot_exists = (slots % (HEAD_SLOTS // HEADS) == 0) & (slot_heads < GROUP_SIZE)
    q_slots_exist = (offs_m < N)[:, None] & slot_exists[None, :]

    do = load_group(leader_rows(do_view, program, shape), do_view.strides[1], queries)
    o = load_group(leader_rows(o_view, program, shape), o_view.strides[1], queries)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Rows and heads that do not exist get p = 0 by their lse.
    lse_rows = tile_pointers(lse_ptr + group * GROUP_SIZE * N, offs_m, heads, 1, N, USE_INT64_OFFSETS=True)
    lse = tl.load(lse_rows, mask=queries.exists, other=float("inf"))
    remaining_mileage = tl.load(mileage_ptr + group * N + offs_m, mask=offs_m < N, other=0)

    earlier_ddistance = tl.zeros((BLOCK_M,), tl.float32)  # the sum of the distances' gradients of all keys so far
    dq_leader = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start_n in range(0, tl.minimum(N, program.start_m + BLOCK_M), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        key_exists = offs_n < N
        k_tile = load_tile(k_rows, offs_n, CHECK_ROWS=True)
        k_pointers = first_columns(k_rows, offs_n)
        keys = TileKeys(k_pointers, k_rows.stride_column, exists=key_exists, format=shape.format)
        z, fixed = steps(queries.leader_tile, k_tile, offs_m, offs_n, N, qk_scale, PRECISION)
        total, local = sum_steps(fixed)
        remaining_mileage -= total
        whole, rest = split_mileage(remaining_mileage)
        distances = Distances(whole, rest, local)
        scores = tile_scores(queries, keys, distances, frequencies, shape, PRECISION)
        exists = causal_pairs(offs_m, offs_n, N)
        p = tl.where(exists[:, None, :], tl.math.exp2(scores * qk_scale - lse[:, :, None]), 0.0)
        p = tl.reshape(p, (BLOCK_M * HEADS, BLOCK_N))
        v_tile = load_tile(v_rows, offs_n, CHECK_ROWS=True)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        key_mask = key_exists[:, None] & (columns[None, :] < D)
        dv_rows = tile_pointers(dv_base, offs_n, columns, D, 1, IS_LONG)
        tl.atomic_add(dv_rows, dv, mask=key_mask, sem="relaxed")
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        # The scale is applied last, because it would turn small ones into subnormal float16.
        ds = tl.reshape(p * (dp - delta[:, None]), (BLOCK_M, HEADS, BLOCK_N))
        ds_by_head = tl.permute(ds.to(do.dtype), (0, 2, 1))
        ds_by_key = spread_heads(ds, HEAD_SLOTS)
        ddistance = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D // 2, BLOCK_PAIRS):
            pairs = start + tl.arange(0, BLOCK_PAIRS)
            k1, k2 = load_key_pairs(pairs, keys)
            cos, sin = distance_phases(pairs, distances, frequencies, D)
            k1_rot, k2_rot = rotate(k1[None, :, :], k2[None, :, :], cos, sin, CONJUGATE=True)
            dq1 = tl.dot(k1_rot.to(do.dtype), ds_by_head, input_precision=PRECISION) * softmax_scale
            dq2 = tl.dot(k2_rot.to(do.dtype), ds_by_head, input_precision=PRECISION) * softmax_scale
            dq_pairs = dq_rows[:, None, :] + pairs[None, :, None]
            dq_mask = queries.exists[:, None, :] & (pairs < D // 2)[None, :, None]
            tl.atomic_add(dq_pairs, dq1, mask=dq_mask, sem="relaxed")
            tl.atomic_add(dq_pairs + D // 2, dq2, mask=dq_mask, sem="relaxed")

            # The sum of the group's queries weighted by ds is the gradient of the rotated key. Rotated back, it is the
            # key's gradient; its product with the key rotated by 90 degrees, the derivative, is the distance's.
            q1, q2 = load_halves(
                q_slots[:, :, None],
                pairs[None, None, :],
                queries.leader.stride_column,
                q_slots_exist[:, :, None],
                shape.format,
            )
            zeros = tl.zeros((BLOCK_M, BLOCK_PAIRS, BLOCK_N), tl.float32)
            dk1_rot = split_dot(tl.permute(q1, (0, 2, 1)), ds_by_key, zeros, PRECISION)
            dk2_rot = split_dot(tl.permute(q2, (0, 2, 1)), ds_by_key, zeros, PRECISION)
            dk1, dk2 = rotate(dk1_rot, dk2_rot, cos, sin, CONJUGATE=False)
            frequency = revolutions_per_step(pairs, frequencies.revolutions_ptr, D)[:, None]
            ddistance += tl.sum(dk1 * (k2 * frequency)[None, :, :] - dk2 * (k1 * frequency)[None, :, :], 1)
            dk_pairs = tile_pointers(dk_base, pairs, offs_n, 1, D, IS_LONG)
            dk_mask = (pairs < D // 2)[:, None] & key_exists[None, :]
            tl.atomic_add(dk_pairs, tl.sum(dk1, 0) * softmax_scale, mask=dk_mask, sem="relaxed")
            tl.atomic_add(dk_pairs + D // 2, tl.sum(dk2, 0) * softmax_scale, mask=dk_mask, sem="relaxed")

        ddistance *= TWO_PI * softmax_scale  # frequencies are in revolutions
        dz = earlier_ddistance[:, None] + tl.cumsum(ddistance, 1) - ddistance
        earlier_ddistance += tl.sum(ddistance, 1)
        dx = dz * z * (1.0 - z) * softmax_scale
        # Not rounded to the input dtype: dz is a sum of up to N terms, and its rounding would reach every key.
        dq_leader = tl.dot(dx, k_tile.to(tl.float32), dq_leader, input_precision=DISTANCE_PRECISION)
        dk = tl.dot(tl.trans(dx), queries.leader_tile.to(tl.float32), input_precision=DISTANCE_PRECISION)
        dk_rows = tile_pointers(dk_base, offs_n, columns, D, 1, IS_LONG)
        tl.atomic_add(dk_rows, dk, mask=key_mask, sem="relaxed")

    dq_leader_rows = tile_pointers(dq_base, offs_m, columns, D, 1, IS_LONG)
    leader_mask = (offs_m[:, None] < N) & (columns[None, :] < D)
    tl.atomic_add(dq_leader_rows, dq_leader, mask=leader_mask, sem="relaxed")
