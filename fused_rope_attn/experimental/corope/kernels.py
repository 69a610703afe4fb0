# mypy: ignore-errors
"""Co-RoPE's Triton kernels, forward and backward in O(N) memory; docs/design/corope.md has their reasons.

A program has BLOCK_M query rows and up to HEADS heads of one group. The group's leader measures the distances for all
of them. A distance is a fixed-point number with FRACTION_BITS fractional bits, because sums of steps are then exact in
any order: the backward pass visits the keys from the first to the diagonal, and finds the distances that the forward
pass found from the diagonal to the first. Angles are counted in revolutions (1 is a full circle), so that an angle is
reduced by dropping whole numbers.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import rotation, softmax, tiles
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.schedule import scheduled_tile

FRACTION_BITS = tl.constexpr(23)  # a tile's 128 keys then stay below 2**31; a step's rounding is 6e-8
ONE = tl.constexpr(float(1 << 23))
TWO_PI = tl.constexpr(6.283185307179586)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a float32 to the nearest integer
BLOCK_PAIRS = tl.constexpr(16)  # columns of one product: the smallest inner side of one in 16 bits
_NUMBERS = ["num_groups", "head_chunks", "HKV", "GROUP_SIZE", "N"]


@record
class CoRopeInputs:
    """Queries (B, HQ, N, D), keys and values (B, HKV, N, D), and the tables of ``launch.frequency_tables``."""

    q: tiles.TensorView
    k: tiles.TensorView
    v: tiles.TensorView
    multiples_ptr: tl.tensor
    revolutions_ptr: tl.tensor


@record
class Shape:
    """Numbers of a call, and the sizes of a program's tiles."""

    qk_scale: tl.tensor
    HEADS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    PRECISION: tl.constexpr  # of products of float32
    format: tiles.RowFormat  # its USE_INT64_OFFSETS: an offset within one tile or one group can pass 2**31
    N: tl.tensor = None  # these are arguments of their own
    HKV: tl.tensor = None
    GROUP_SIZE: tl.tensor = None


@record
class Program:
    """A program's query rows, of some heads of one group, and the rows of the group's keys and values."""

    group: tl.tensor  # its number in the batch, int64
    leader: tiles.Origin  # the group's first head
    leader_rows: tiles.Rows
    leader_tile: tl.tensor  # (BLOCK_M, BLOCK_D)
    start_m: tl.tensor
    offs_m: tl.tensor  # (BLOCK_M,): positions
    chunk: tl.tensor  # number of its HEADS heads within the group
    heads: tl.tensor  # (HEADS,): within the group
    exists: tl.tensor  # (BLOCK_M, HEADS)
    pointers: tl.tensor  # (BLOCK_M, HEADS): to the rows' first columns
    k_rows: tiles.Rows
    v_rows: tiles.Rows


@record
class TileKeys:
    """A tile of keys, and a program's steps to them in fixed point."""

    offs_n: tl.tensor  # (BLOCK_N,)
    exists: tl.tensor  # (BLOCK_N,)
    visible: tl.tensor  # (BLOCK_M, BLOCK_N): by the causal mask
    pointers: tl.tensor  # (BLOCK_N,): to the first columns
    tile: tl.tensor  # (BLOCK_N, BLOCK_D)
    z: tl.tensor  # (BLOCK_M, BLOCK_N) float32
    total: tl.tensor  # (BLOCK_M,): the sum of the tile's steps
    local: tl.tensor  # (BLOCK_M, BLOCK_N) float32: for each key the sum of the steps after it


@triton.jit
def distances_of(mileage, local):
    """Return a tile's distances ``whole + rest + local``: whole steps (rows,) int32 and the rest in [0, 1) (rows,)
    float32 of a row's mileage after the tile, int64 fixed point, and steps (rows, keys) float32 within the tile."""
    whole = mileage >> FRACTION_BITS
    rest = (mileage - (whole << FRACTION_BITS)).to(tl.float32) / ONE
    return whole.to(tl.int32), rest, local


@triton.jit
def cosine_sine(revolutions):
    """Return cos and sin of an angle of up to a few dozen revolutions.

    Reduced to |r| <= 1/2 they are within 5e-7: least maximum error fits in r**2 (own fit, float64).
    """
    # Two additions round faster than a conversion to an integer and back.
    r = revolutions - ((revolutions + ROUND) - ROUND)
    u = r * r
    cos = 6.529609897139805 * u - 25.968312914335307
    cos = cos * u + 60.167831622680204
    cos = cos * u - 85.45016553629576
    cos = cos * u + 64.93911898307789
    cos = cos * u - 19.73920453207721
    cos = cos * u + 0.9999999891722234
    sin = 3.1996934822934513 * u - 14.868610852650487
    sin = sin * u + 42.016165777547236
    sin = sin * u - 76.70155116966916
    sin = sin * u + 81.60502462209978
    sin = sin * u - 41.341697068941265
    sin = sin * u + 6.283185272722304
    return cos, sin * r


@triton.jit
def distance_phases(pairs, distances, inputs, D: tl.constexpr):
    """Return cos and sin (rows, pairs, keys) float32 of ``distances_of`` a tile at the frequencies of some pairs.

    A row's whole steps are reduced to one revolution once a row, by integer multiplication modulo one revolution, so
    that the angle stays exact for any N. Pairs from D/2 on have frequency 0.
    """
    whole, rest, local = distances
    exists = pairs < D // 2
    high = tl.load(inputs.revolutions_ptr + pairs, mask=exists, other=0.0)
    low = tl.load(inputs.revolutions_ptr + D // 2 + pairs, mask=exists, other=0.0)
    multiples = tl.load(inputs.multiples_ptr + pairs, mask=exists, other=0)
    phase = tl.mul(whole[:, None], multiples[None, :], sanitize_overflow=False)  # modulo 2**32
    phase = phase.to(tl.float32) * 2.3283064365386963e-10  # 2**-32
    phase += whole.to(tl.float32)[:, None] * low[None, :] + rest[:, None] * high[None, :]
    return cosine_sine(phase[:, :, None] + local[:, None, :] * high[None, :, None])


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
def rotated_keys(pairs, keys, program, distances, inputs):
    """Load some pairs of the keys, and rotate them against the queries.

    Return both members (pairs, keys), both rotated (rows, pairs, keys), and their cos and sin, all float32.
    """
    rows = program.k_rows
    k1, k2 = load_halves(keys.pointers[None, :], pairs[:, None], rows.stride_column, keys.exists[None, :], rows.format)
    k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
    cos, sin = distance_phases(pairs, distances, inputs, rows.format.D)
    k1_rot, k2_rot = rotation.rotate(k1[None, :, :], k2[None, :, :], cos, sin, CONJUGATE=True)
    return k1, k2, k1_rot, k2_rot, cos, sin


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
def tile_scores(keys, program, distances, inputs, shape):
    """Return unscaled scores (BLOCK_M, HEADS, BLOCK_N): a small product a row, of keys rotated once for all heads."""
    scores = tl.zeros((shape.BLOCK_M, shape.HEADS, shape.BLOCK_N), tl.float32)
    for start in range(0, shape.format.D // 2, BLOCK_PAIRS):
        pairs = start + tl.arange(0, BLOCK_PAIRS)
        exists, stride = program.exists[:, :, None], program.leader_rows.stride_column
        q1, q2 = load_halves(program.pointers[:, :, None], pairs[None, None, :], stride, exists, shape.format)
        _, _, k1_rot, k2_rot, _, _ = rotated_keys(pairs, keys, program, distances, inputs)
        scores = split_dot(q1, k1_rot, scores, shape.PRECISION)
        scores = split_dot(q2, k2_rot, scores, shape.PRECISION)
    return scores


@triton.jit
def group_pointers(rows, stride_head, offs_m, heads):
    """Return pointers to the first columns of rows offs_m of ``heads`` of a group, from the leader's ``Rows``."""
    IS_LONG: tl.constexpr = rows.format.USE_INT64_OFFSETS
    return tiles.tile_pointers(rows.ptr, offs_m, heads, rows.stride_row, stride_head, IS_LONG)


@triton.jit
def program_pointers(view, program, shape):
    """Return pointers to a program's rows of a ``TensorView``, (BLOCK_M * HEADS, BLOCK_D) with row m * HEADS + h, and
    which elements exist."""
    ROWS: tl.constexpr = shape.BLOCK_M * shape.HEADS
    rows = tiles.head_rows(view, program.leader, shape.N, shape.format)
    pointers = tl.reshape(group_pointers(rows, view.strides[1], program.offs_m, program.heads), (ROWS,))
    columns = tl.arange(0, shape.format.BLOCK_D)
    mask = tl.reshape(program.exists, (ROWS,))[:, None] & (columns[None, :] < shape.format.D)
    return pointers[:, None] + columns[None, :] * rows.stride_column, mask


@triton.jit
def find_program(inputs, num_groups, head_chunks, shape):
    """Return this ``Program``; the longest ones start first. num_groups is B * HKV."""
    num_heads = num_groups * head_chunks
    num_tiles = tl.cdiv(shape.N, shape.BLOCK_M)
    tile, head = scheduled_tile(tl.program_id(0), num_tiles, num_heads, num_heads, LAST_TILE_FIRST=True)
    group, chunk, start_m = head // head_chunks, head % head_chunks, tile * shape.BLOCK_M
    batch, head_kv = (group // shape.HKV).to(tl.int64), (group % shape.HKV).to(tl.int64)
    offs_m = start_m + tl.arange(0, shape.BLOCK_M)
    heads = chunk * shape.HEADS + tl.arange(0, shape.HEADS)
    leader = tiles.Origin(batch=batch, head=head_kv * shape.GROUP_SIZE, row=0)
    leader_rows = tiles.head_rows(inputs.q, leader, shape.N, shape.format)
    of_keys = tiles.Origin(batch=batch, head=head_kv, row=0)
    return Program(
        group=batch * shape.HKV + head_kv,
        leader=leader,
        leader_rows=leader_rows,
        leader_tile=tiles.load_tile(leader_rows, offs_m, CHECK_ROWS=True),
        start_m=start_m,
        offs_m=offs_m,
        chunk=chunk,
        heads=heads,
        exists=(offs_m < shape.N)[:, None] & (heads < shape.GROUP_SIZE)[None, :],
        pointers=group_pointers(leader_rows, inputs.q.strides[1], offs_m, heads),
        k_rows=tiles.head_rows(inputs.k, of_keys, shape.N, shape.format),
        v_rows=tiles.head_rows(inputs.v, of_keys, shape.N, shape.format),
    )


@triton.jit
def find_keys(program, start_n, shape):
    """Load the keys from ``start_n`` on and measure the steps to them: 0 beyond the diagonal and past the end.

    Both passes use this, so that with tiles of one size they find the same angles to the last bit.
    """
    rows = program.k_rows
    offs_n = start_n + tl.arange(0, shape.BLOCK_N)
    tile = tiles.load_tile(rows, offs_n, CHECK_ROWS=True)
    offsets = offs_n.to(tl.int64) if rows.format.USE_INT64_OFFSETS else offs_n
    x = tl.dot(program.leader_tile, tl.trans(tile), input_precision=shape.PRECISION)
    z = 1.0 / (1.0 + tl.math.exp2(-x * shape.qk_scale))
    visible = (offs_n[None, :] <= program.offs_m[:, None]) & (offs_n < shape.N)[None, :]
    z = tl.where(visible, z, 0.0)
    fixed = (z * ONE + 0.5).to(tl.int32)
    total = tl.sum(fixed, 1)
    local = (total[:, None] - tl.cumsum(fixed, 1)).to(tl.float32) / ONE
    return TileKeys(offs_n, offs_n < shape.N, visible, rows.ptr + offsets * rows.stride_row, tile, z, total, local)


@triton.jit(do_not_specialize=_NUMBERS)
def corope_forward_kernel(
    inputs, o_view, lse_ptr, mileage_ptr, num_groups, head_chunks, HKV, GROUP_SIZE, N, shape
):  # fmt: skip
    """Write o, lse (B, HQ, N) in base 2 and mileage (B, HKV, N) of BLOCK_M query rows of up to HEADS heads of a group.

    Grid: (query blocks * num_groups * head_chunks,). Keys are visited from the diagonal backwards, so that a row's
    distances need only its running sum. shape: ``Shape`` without the numbers that are arguments.
    """
    inputs, o_view, shape = unpack((inputs, o_view, shape))
    shape = replace(shape, N=N, HKV=HKV, GROUP_SIZE=GROUP_SIZE)
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    ROWS: tl.constexpr = BLOCK_M * shape.HEADS
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.format.BLOCK_D
    program = find_program(inputs, num_groups, head_chunks, shape)
    offs_m, group = program.offs_m, program.group

    mileage = tl.zeros((BLOCK_M,), tl.int64)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    blocks = tl.cdiv(tl.minimum(N, program.start_m + BLOCK_M), BLOCK_N)
    for block in range(blocks):
        keys = find_keys(program, (blocks - 1 - block) * BLOCK_N, shape)
        distances = distances_of(mileage, keys.local)
        scores = tile_scores(keys, program, distances, inputs, shape)
        mileage += keys.total
        scores = tl.where(keys.visible[:, None, :], scores * shape.qk_scale, float("-inf"))
        scores = tl.reshape(scores, (ROWS, BLOCK_N))
        p, correction, row_max, row_sum = softmax.online_softmax(scores, row_max, row_sum, 1.0, HAS_EMPTY_ROWS=True)
        v_tile = tiles.load_tile(program.v_rows, keys.offs_n, CHECK_ROWS=True)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], input_precision=shape.PRECISION)

    # Every stored row has seen itself. Rows past the end have seen all keys and are not stored.
    o_rows, o_exists = program_pointers(o_view, program, shape)
    tl.store(o_rows, (acc / row_sum[:, None]).to(o_view.ptr.dtype.element_ty), mask=o_exists)
    lse_base = lse_ptr + group * GROUP_SIZE * N
    lse_rows = tiles.tile_pointers(lse_base, offs_m, program.heads, 1, N, USE_INT64_OFFSETS=True)
    lse = row_max + tl.math.log2(row_sum)
    tl.store(tl.reshape(lse_rows, (ROWS,)), lse, mask=tl.reshape(program.exists, (ROWS,)))
    # Every chunk of a group's heads finds the leader's mileage, and the first chunk's program stores it. The
    # chunk is broadcast before the comparison: in Triton's interpreter `&` of a block and a scalar condition gives
    # integers, which 3.9 refuses as a mask.
    chunk_of_row = tl.zeros((BLOCK_M,), tl.int32) + program.chunk
    tl.store(mileage_ptr + group * N + offs_m, mileage, mask=(offs_m < N) & (chunk_of_row == 0))


@triton.jit(do_not_specialize=_NUMBERS)
def corope_backward_kernel(
    inputs, do_view, o_view, lse_ptr, mileage_ptr, dq_ptr, dk_ptr, dv_ptr, softmax_scale, num_groups, head_chunks, HKV,
    GROUP_SIZE, N, shape, HEAD_SLOTS: tl.constexpr, DISTANCE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add gradients from the rows of up to HEADS heads of one group to float32 sums (B, H, N, D). Grid: as forward.

    Keys are visited from the first to the diagonal: step m of a row collects the distance gradients of all keys before
    it, a running sum, and distances are the rest of the row's whole mileage.
    """
    inputs, do_view, o_view, shape = unpack((inputs, do_view, o_view, shape))
    shape = replace(shape, N=N, HKV=HKV, GROUP_SIZE=GROUP_SIZE)
    HEADS: tl.constexpr = shape.HEADS
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    PRECISION: tl.constexpr = shape.PRECISION
    D: tl.constexpr = shape.format.D
    BLOCK_D: tl.constexpr = shape.format.BLOCK_D
    IS_LONG: tl.constexpr = shape.format.USE_INT64_OFFSETS
    program = find_program(inputs, num_groups, head_chunks, shape)
    offs_m, heads, group = program.offs_m, program.heads, program.group
    dq_base = dq_ptr + group * GROUP_SIZE * D * N
    dk_base = dk_ptr + group * D * N
    dv_base = dv_ptr + group * N * D
    columns = tl.arange(0, BLOCK_D)
    dq_rows = tiles.tile_pointers(dq_base, offs_m, heads, D, tl.cast(D, tl.int64) * N, USE_INT64_OFFSETS=True)
    # The queries once more, their heads spread over the smallest inner side of a product.
    slots = tl.arange(0, HEAD_SLOTS)
    slot_heads = program.chunk * HEADS + slots // (HEAD_SLOTS // HEADS)
    q_slots = group_pointers(program.leader_rows, inputs.q.strides[1], offs_m, slot_heads)
    slot_exists = (slots % (HEAD_SLOTS // HEADS) == 0) & (slot_heads < GROUP_SIZE)
    q_slots_exist = (offs_m < N)[:, None] & slot_exists[None, :]

    do_rows, do_exists = program_pointers(do_view, program, shape)
    o_rows, o_exists = program_pointers(o_view, program, shape)
    do, o = tl.load(do_rows, mask=do_exists, other=0.0), tl.load(o_rows, mask=o_exists, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Rows and heads that do not exist get p = 0 by their lse.
    lse_rows = tiles.tile_pointers(lse_ptr + group * GROUP_SIZE * N, offs_m, heads, 1, N, USE_INT64_OFFSETS=True)
    lse = tl.load(lse_rows, mask=program.exists, other=float("inf"))
    remaining_mileage = tl.load(mileage_ptr + group * N + offs_m, mask=offs_m < N, other=0)

    earlier_ddistance = tl.zeros((BLOCK_M,), tl.float32)  # the sum of the distances' gradients of all keys so far
    dq_leader = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start_n in range(0, tl.minimum(N, program.start_m + BLOCK_M), BLOCK_N):
        keys = find_keys(program, start_n, shape)
        remaining_mileage -= keys.total
        distances = distances_of(remaining_mileage, keys.local)
        scores = tile_scores(keys, program, distances, inputs, shape)
        p = tl.where(keys.visible[:, None, :], tl.math.exp2(scores * shape.qk_scale - lse[:, :, None]), 0.0)
        p = tl.reshape(p, (BLOCK_M * HEADS, BLOCK_N))
        v_tile = tiles.load_tile(program.v_rows, keys.offs_n, CHECK_ROWS=True)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        key_mask = keys.exists[:, None] & (columns[None, :] < D)
        dv_rows = tiles.tile_pointers(dv_base, keys.offs_n, columns, D, 1, IS_LONG)
        tl.atomic_add(dv_rows, dv, mask=key_mask, sem="relaxed")
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        # The scale is applied last, because it would turn small ones into subnormal float16.
        ds = tl.reshape(p * (dp - delta[:, None]), (BLOCK_M, HEADS, BLOCK_N))
        ds_by_head = tl.permute(ds.to(do.dtype), (0, 2, 1))
        ds_by_key = ds
        if HEAD_SLOTS > HEADS:  # head h is in slot h * HEAD_SLOTS // HEADS, with zeros between
            between = tl.arange(0, HEAD_SLOTS // HEADS)[None, None, :, None]
            ds_by_key = tl.where(between == 0, ds[:, :, None, :], 0.0)
            ds_by_key = tl.reshape(ds_by_key, (BLOCK_M, HEAD_SLOTS, BLOCK_N))
        ddistance = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D // 2, BLOCK_PAIRS):
            pairs = start + tl.arange(0, BLOCK_PAIRS)
            k1, k2, k1_rot, k2_rot, cos, sin = rotated_keys(pairs, keys, program, distances, inputs)
            dq1 = tl.dot(k1_rot.to(do.dtype), ds_by_head, input_precision=PRECISION) * softmax_scale
            dq2 = tl.dot(k2_rot.to(do.dtype), ds_by_head, input_precision=PRECISION) * softmax_scale
            dq_pairs = dq_rows[:, None, :] + pairs[None, :, None]
            dq_mask = program.exists[:, None, :] & (pairs < D // 2)[None, :, None]
            tl.atomic_add(dq_pairs, dq1, mask=dq_mask, sem="relaxed")
            tl.atomic_add(dq_pairs + D // 2, dq2, mask=dq_mask, sem="relaxed")

            # The sum of the group's queries weighted by ds is the gradient of the rotated key. Rotated back, it is the
            # key's gradient; its product with the key rotated by 90 degrees, the derivative, is the distance's.
            slots_exist, stride = q_slots_exist[:, :, None], program.leader_rows.stride_column
            q1, q2 = load_halves(q_slots[:, :, None], pairs[None, None, :], stride, slots_exist, shape.format)
            zeros = tl.zeros((BLOCK_M, BLOCK_PAIRS, BLOCK_N), tl.float32)
            dk1_rot = split_dot(tl.permute(q1, (0, 2, 1)), ds_by_key, zeros, PRECISION)
            dk2_rot = split_dot(tl.permute(q2, (0, 2, 1)), ds_by_key, zeros, PRECISION)
            dk1, dk2 = rotation.rotate(dk1_rot, dk2_rot, cos, sin, CONJUGATE=False)
            frequency = tl.load(inputs.revolutions_ptr + pairs, mask=pairs < D // 2, other=0.0)[:, None]
            ddistance += tl.sum(dk1 * (k2 * frequency)[None, :, :] - dk2 * (k1 * frequency)[None, :, :], 1)
            dk_pairs = tiles.tile_pointers(dk_base, pairs, keys.offs_n, 1, D, IS_LONG)
            dk_mask = (pairs < D // 2)[:, None] & keys.exists[None, :]
            tl.atomic_add(dk_pairs, tl.sum(dk1, 0) * softmax_scale, mask=dk_mask, sem="relaxed")
            tl.atomic_add(dk_pairs + D // 2, tl.sum(dk2, 0) * softmax_scale, mask=dk_mask, sem="relaxed")

        ddistance *= TWO_PI * softmax_scale  # frequencies are in revolutions
        dz = earlier_ddistance[:, None] + tl.cumsum(ddistance, 1) - ddistance
        earlier_ddistance += tl.sum(ddistance, 1)
        dx = dz * keys.z * (1.0 - keys.z) * softmax_scale
        # Not rounded to the input dtype: dz is a sum of up to N terms, and its rounding would reach every key.
        dq_leader = tl.dot(dx, keys.tile.to(tl.float32), dq_leader, input_precision=DISTANCE_PRECISION)
        dk = tl.dot(tl.trans(dx), program.leader_tile.to(tl.float32), input_precision=DISTANCE_PRECISION)
        dk_rows = tiles.tile_pointers(dk_base, keys.offs_n, columns, D, 1, IS_LONG)
        tl.atomic_add(dk_rows, dk, mask=key_mask, sem="relaxed")

    dq_leader_rows = tiles.tile_pointers(dq_base, offs_m, columns, D, 1, IS_LONG)
    leader_mask = (offs_m[:, None] < N) & (columns[None, :] < D)
    tl.atomic_add(dq_leader_rows, dq_leader, mask=leader_mask, sem="relaxed")
