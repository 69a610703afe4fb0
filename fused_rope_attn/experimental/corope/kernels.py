"""Co-RoPE's Triton kernels, forward and backward in O(N) memory, and their launchers. DESIGN.md says why they are so.

A program has BLOCK_M query rows and up to HEADS heads of one group. Distances are fixed-point numbers with
FRACTION_BITS fractional bits: their sums are exact in any order, so that the backward pass, which goes through the keys
from the first to the diagonal, finds the distances that the forward pass met on its way from the diagonal to the first.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from fused_rope_attn.experimental.corope.configs import backward_config, forward_config
from fused_rope_attn.kernels.arguments import LOG2E, dot_precision
from fused_rope_attn.kernels.masks import Mask, visible
from fused_rope_attn.kernels.rotation import rotate
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.kernels.softmax import online_softmax
from fused_rope_attn.kernels.tiles import RowFormat, Rows, load_tile, tile_pointers
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, PreparedCalls
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides

HEAD_DIMS = (32, 128)
FRACTION_BITS = tl.constexpr(23)  # a tile's 128 keys then stay below 2**31; a step's rounding is 6e-8
ONE = tl.constexpr(float(1 << 23))
TABLE_SIZE = tl.constexpr(1024)
PAIRS = tl.constexpr(16)  # of columns in one product: the smallest inner side of one in 16 bits


@triton.jit
def causal_pairs(offs_m, offs_n, N):
    """Which (query, key) pairs of a sequence of N see each other, (len(offs_m), len(offs_n))."""
    mask = Mask(num_keys=N, first_key=None, left=None, right=None, IS_CAUSAL=True, READS_LENGTHS=False)
    return visible(mask, offs_m[:, None], offs_n[None, :])


@triton.jit
def steps(q_leader, k, positions_q, positions_k, N, qk_scale, PRECISION: tl.constexpr):
    """z (rows, keys) float32, 0 beyond the diagonal and past the end, and z in fixed point."""
    x = tl.dot(q_leader, tl.trans(k), input_precision=PRECISION)
    z = 1.0 / (1.0 + tl.math.exp2(-x * qk_scale))
    z = tl.where(causal_pairs(positions_q, positions_k, N), z, 0.0)
    return z, (z * ONE + 0.5).to(tl.int32)


@triton.jit
def tile_distances(fixed):
    """Of a tile's steps (rows, keys): their sum ``(rows,)``, and for each key the sum over those behind it, float32.

    Both passes take these, so that with tiles of one size they find the same angles to the last bit.
    """
    total = tl.sum(fixed, 1)
    return total, (total[:, None] - tl.cumsum(fixed, 1)).to(tl.float32) / ONE


@triton.jit
def split_mileage(mileage):
    """int64 fixed point -> whole steps (int32) and the rest in [0, 1)."""
    whole = mileage >> FRACTION_BITS
    return whole.to(tl.int32), (mileage - (whole << FRACTION_BITS)).to(tl.float32) / ONE


@triton.jit
def polynomial_cosine_sine(r):
    """cos(2 pi r), sin(2 pi r) for |r| <= 1/2, within 5e-7: least maximum error fits in r**2 (own fit, float64)."""
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
def cosine_sine(turns, table_ptr, METHOD: tl.constexpr):
    """cos and sin of an angle in turns of up to a few dozen.

    poly: arithmetic only. approx: the special-function unit, about 7e-7 off after the reduction (PTX ISA, sin.approx).
    libdevice: CUDA's own. table: 1024 tabulated phases and the rest of the angle to second order, two gathers.
    """
    if METHOD == "table":
        scaled = turns * 1024.0
        nearest = (scaled + 12582912.0) - 12582912.0
        rest = (scaled - nearest) * (6.283185307179586 / 1024.0)
        index = nearest.to(tl.int32) & (TABLE_SIZE - 1)
        cos = tl.load(table_ptr + index)
        sin = tl.load(table_ptr + TABLE_SIZE + index)
        square = 1.0 - 0.5 * rest * rest
        return cos * square - sin * rest, sin * square + cos * rest
    else:
        # 1.5 * 2**23: adding it rounds to the nearest integer, by two additions instead of a conversion.
        r = turns - ((turns + 12582912.0) - 12582912.0)
        if METHOD == "poly":
            return polynomial_cosine_sine(r)
        else:
            angle = r * 6.283185307179586
            if METHOD == "approx":
                cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
                sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
                return cos, sin
            else:
                tl.static_assert(METHOD == "libdevice")
                return tl.math.cos(angle), tl.math.sin(angle)


@triton.jit
def load_halves(rows, pairs, column, mask, D: tl.constexpr, LONG: tl.constexpr):
    """Both members of some pairs, from the pointers to the first column of rows; zero where a pair is past D/2.

    pairs, int32, broadcasts against rows and mask; the result has the memory's dtype.
    """
    mask = mask & (pairs < D // 2)
    if LONG:
        pairs = pairs.to(tl.int64)
    first = tl.load(rows + pairs * column, mask=mask, other=0.0)
    return first, tl.load(rows + (pairs + D // 2) * column, mask=mask, other=0.0)


@triton.jit
def turns_of(pairs, turns_ptr, D: tl.constexpr):
    """Turns of one step at the frequencies of some pairs, float32; 0 from D/2 on."""
    return tl.load(turns_ptr + pairs, mask=pairs < D // 2, other=0.0)


@triton.jit
def distance_phases(pairs, whole, rest, local, frequencies, D: tl.constexpr, METHOD: tl.constexpr):
    """cos and sin (rows, pairs, keys) float32 of every distance at the frequencies of some pairs.

    The distance is ``whole + rest + local``, of which the first two belong to a row. Their phase is reduced to turns
    once a row: a whole number of steps by integer multiplication modulo one turn, so that it stays exact for any N.
    """
    multiples_ptr, turns_ptr = frequencies
    turn = turns_of(pairs, turns_ptr, D)
    low = turns_of(pairs, turns_ptr + D // 2, D)
    multiples = tl.load(multiples_ptr + pairs, mask=pairs < D // 2, other=0)
    phase = (whole[:, None] * multiples[None, :]).to(tl.float32) * 2.3283064365386963e-10
    phase += whole.to(tl.float32)[:, None] * low[None, :] + rest[:, None] * turn[None, :]
    return cosine_sine(phase[:, :, None] + local[:, None, :] * turn[None, :, None], turns_ptr + D, METHOD)


@triton.jit
def load_key_pairs(pairs, k_rows, k_column, keys, D: tl.constexpr, LONG: tl.constexpr):
    """Both members of some pairs of the keys, (pairs, keys) float32."""
    first, second = load_halves(k_rows[None, :], pairs[:, None], k_column, keys[None, :], D, LONG)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def split_dot(x, precise, acc, PRECISION: tl.constexpr):
    """acc + x @ precise, x in the input dtype, ``precise`` float32: as two words of 16 bits where x has 16.

    One word would do for scores. But the distances' gradient sums over all keys what one rounding leaves of each.
    """
    high = precise.to(x.dtype)
    acc = tl.dot(x, high, acc, input_precision=PRECISION)
    if x.dtype != tl.float32:
        low = (precise - high.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, low, acc, input_precision=PRECISION)
    return acc


@triton.jit
def tile_scores(whole, rest, local, q_rows, q_column, q_mask, k_rows, k_column, keys, frequencies, D: tl.constexpr,
                HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, METHOD: tl.constexpr,
                PRECISION: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Unscaled scores (BLOCK_M, HEADS, BLOCK_N): a small product for each row, with keys turned once for all heads."""
    scores = tl.zeros((BLOCK_M, HEADS, BLOCK_N), tl.float32)
    for start in range(0, D // 2, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        q1, q2 = load_halves(q_rows[:, :, None], pairs[None, None, :], q_column, q_mask[:, :, None], D, LONG)
        k1, k2 = load_key_pairs(pairs, k_rows, k_column, keys, D, LONG)
        cos, sin = distance_phases(pairs, whole, rest, local, frequencies, D, METHOD)
        first, second = rotate(k1[None, :, :], k2[None, :, :], cos, sin, True)
        scores = split_dot(q1, first, scores, PRECISION)
        scores = split_dot(q2, second, scores, PRECISION)
    return scores


@triton.jit
def spread_heads(x, HEADS: tl.constexpr, SPREAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, HEADS, keys) -> (rows, SPREAD, keys): head h at ``h * SPREAD // HEADS``, zeros between."""
    if SPREAD == HEADS:
        return x
    else:
        between = tl.arange(0, SPREAD // HEADS)[None, None, :, None]
        return tl.reshape(tl.where(between == 0, x[:, :, None, :], 0.0), (BLOCK_M, SPREAD, BLOCK_N))


@triton.jit
def row_pointers(base, rows, stride, LONG: tl.constexpr):
    """Pointers to the first column of rows."""
    if LONG:
        rows = rows.to(tl.int64)
    return base + rows * stride


@triton.jit
def load_group(base, heads, rows, mask, strides, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_D: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Rows of a group as one tile (BLOCK_M * HEADS, BLOCK_D), row m * HEADS + h."""
    pointers = tl.reshape(tile_pointers(base, rows, heads, strides[2], strides[1], LONG), (BLOCK_M * HEADS,))
    columns = tl.arange(0, BLOCK_D)
    mask = tl.reshape(mask, (BLOCK_M * HEADS,))[:, None] & (columns[None, :] < D)
    return tl.load(pointers[:, None] + columns[None, :] * strides[3], mask=mask, other=0.0)


@triton.jit
def program_place(N, groups, chunks, HKV, BLOCK_M: tl.constexpr):
    """(first query row, batch, key head, chunk of heads) of a program; the longest ones start first."""
    tile, place = scheduled_tile(tl.program_id(0), tl.cdiv(N, BLOCK_M), groups * chunks, groups * chunks, True)
    group = place // chunks
    return tile * BLOCK_M, (group // HKV).to(tl.int64), (group % HKV).to(tl.int64), place % chunks


@triton.jit
def program_inputs(q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, start_m, batch, head_kv, chunk, HKV,
                   GROUP_SIZE, N, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                   LONG: tl.constexpr):  # fmt: skip
    """A program's queries, and where its keys are.

    Heads within the group ``(HEADS,)`` and rows ``(BLOCK_M,)``; mask and pointers ``(BLOCK_M, HEADS)`` of the queries,
    the leader's tile; the group's number in the batch (int64), its bases of k and v.
    """
    rows = tl.arange(0, BLOCK_M)
    offs_m = start_m + rows
    heads = chunk * HEADS + tl.arange(0, HEADS)
    q_base = q_ptr + batch * q_strides[0] + head_kv * GROUP_SIZE * q_strides[1]
    q_mask = (offs_m < N)[:, None] & (heads < GROUP_SIZE)[None, :]
    q_rows = tile_pointers(q_base, offs_m, heads, q_strides[2], q_strides[1], LONG)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG)
    q_leader = load_tile(Rows(q_base, q_strides[2], q_strides[3], N, None, row_format), offs_m, CHECK_ROWS=True)
    group = batch * HKV + head_kv
    k_base = k_ptr + batch * k_strides[0] + head_kv * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + head_kv * v_strides[1]
    return heads, offs_m, q_mask, q_rows, q_leader, group, k_base, v_base


@triton.jit(do_not_specialize=["groups", "chunks", "HKV", "GROUP_SIZE", "N"])
def forward_kernel(q_ptr, k_ptr, v_ptr, multiples_ptr, turns_ptr, o_ptr, lse_ptr, mileage_ptr, q_strides,
                   k_strides, v_strides, o_strides, qk_scale, groups, chunks, HKV, GROUP_SIZE, N, D: tl.constexpr,
                   HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   METHOD: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Rows of up to HEADS heads of one group. Grid: (query blocks * B * HKV * chunks of heads).

    Keys come from the diagonal backwards, so that a row's distances need only its running sum. lse is in base 2.
    """
    start_m, batch, head_kv, chunk = program_place(N, groups, chunks, HKV, BLOCK_M)
    heads, offs_m, q_mask, q_rows, q_leader, group, k_base, v_base = program_inputs(
        q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, start_m, batch, head_kv, chunk, HKV, GROUP_SIZE,
        N, D, HEADS, BLOCK_M, BLOCK_D, LONG,
    )  # fmt: skip
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG)
    k_keys = Rows(k_base, k_strides[2], k_strides[3], N, None, row_format)
    v_keys = Rows(v_base, v_strides[2], v_strides[3], N, None, row_format)

    mileage = tl.zeros((BLOCK_M,), tl.int64)
    acc = tl.zeros((BLOCK_M * HEADS, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M * HEADS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M * HEADS,), tl.float32)
    blocks = tl.cdiv(tl.minimum(N, start_m + BLOCK_M), BLOCK_N)
    for block in range(blocks):
        start_n = (blocks - 1 - block) * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_keys, offs_n, CHECK_ROWS=True)
        k_rows = row_pointers(k_base, offs_n, k_strides[2], LONG)
        z, fixed = steps(q_leader, k, offs_m, offs_n, N, qk_scale, PRECISION)
        whole, rest = split_mileage(mileage)
        total, local = tile_distances(fixed)
        scores = tile_scores(
            whole, rest, local, q_rows, q_strides[3], q_mask, k_rows, k_strides[3], offs_n < N,
            (multiples_ptr, turns_ptr), D, HEADS, BLOCK_M, BLOCK_N, METHOD, PRECISION, LONG,
        )  # fmt: skip
        mileage += total
        exists = causal_pairs(offs_m, offs_n, N)
        scores = tl.where(exists[:, None, :], scores * qk_scale, float("-inf"))
        scores = tl.reshape(scores, (BLOCK_M * HEADS, BLOCK_N))
        p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, 1.0, HAS_EMPTY_ROWS=True)
        v = load_tile(v_keys, offs_n, CHECK_ROWS=True)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)

    # Every stored row has seen itself. Rows past the end have seen all keys, and are not stored.
    o_base = o_ptr + batch * o_strides[0] + head_kv * GROUP_SIZE * o_strides[1]
    o_rows = tl.reshape(tile_pointers(o_base, offs_m, heads, o_strides[2], o_strides[1], LONG), (BLOCK_M * HEADS,))
    columns = tl.arange(0, BLOCK_D)
    mask = tl.reshape(q_mask, (BLOCK_M * HEADS,))
    o = (acc / row_sum[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_rows[:, None] + columns[None, :], o, mask=mask[:, None] & (columns[None, :] < D))
    lse_base = lse_ptr + group * GROUP_SIZE * N
    lse_rows = tl.reshape(tile_pointers(lse_base, offs_m, heads, 1, N, True), (BLOCK_M * HEADS,))
    tl.store(lse_rows, row_max + tl.math.log2(row_sum), mask=mask)
    # Every chunk of a group's heads finds the same mileage, the leader's, and the first chunk's program stores it. The
    # chunk is broadcast before the comparison: in Triton's interpreter `&` of a block and a scalar condition gives
    # integers, which 3.9 refuses as a mask.
    chunk_of_row = tl.zeros((BLOCK_M,), tl.int32) + chunk
    tl.store(mileage_ptr + group * N + offs_m, mileage, mask=(offs_m < N) & (chunk_of_row == 0))


@triton.jit(do_not_specialize=["groups", "chunks", "HKV", "GROUP_SIZE", "N"])
def backward_kernel(q_ptr, k_ptr, v_ptr, multiples_ptr, turns_ptr, do_ptr, o_ptr, lse_ptr, mileage_ptr,
                    dq_ptr, dk_ptr, dv_ptr, q_strides, k_strides, v_strides, do_strides, o_strides, qk_scale,
                    softmax_scale, groups, chunks, HKV, GROUP_SIZE, N, D: tl.constexpr, HEADS: tl.constexpr,
                    SPREAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                    METHOD: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
                    LONG: tl.constexpr):  # fmt: skip
    """Gradients from the rows of up to HEADS heads of one group, added to float32 sums. Grid: as forward.

    Keys come from the first to the diagonal: step m of a row collects the distance gradients of all keys before it, a
    running sum, and distances are what is left of the row's whole mileage. All sums lie as (B, H, N, D) in memory.
    """
    start_m, batch, head_kv, chunk = program_place(N, groups, chunks, HKV, BLOCK_M)
    heads, offs_m, q_mask, q_rows, q_leader, group, k_base, v_base = program_inputs(
        q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, start_m, batch, head_kv, chunk, HKV, GROUP_SIZE,
        N, D, HEADS, BLOCK_M, BLOCK_D, LONG,
    )  # fmt: skip
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG)
    k_keys = Rows(k_base, k_strides[2], k_strides[3], N, None, row_format)
    v_keys = Rows(v_base, v_strides[2], v_strides[3], N, None, row_format)
    dq_base = dq_ptr + group * GROUP_SIZE * D * N
    dk_base = dk_ptr + group * D * N
    dv_base = dv_ptr + group * N * D
    columns = tl.arange(0, BLOCK_D)
    dq_rows = tile_pointers(dq_base, offs_m, heads, D, tl.cast(D, tl.int64) * N, True)
    # The queries once more, spread to the smallest inner side of a product.
    slots = tl.arange(0, SPREAD)
    spread = chunk * HEADS + slots // (SPREAD // HEADS)
    q_base = q_ptr + batch * q_strides[0] + head_kv * GROUP_SIZE * q_strides[1]
    q_spread = tile_pointers(q_base, offs_m, spread, q_strides[2], q_strides[1], LONG)
    spread_mask = (offs_m < N)[:, None] & ((slots % (SPREAD // HEADS) == 0) & (spread < GROUP_SIZE))[None, :]

    do_base = do_ptr + batch * do_strides[0] + head_kv * GROUP_SIZE * do_strides[1]
    o_base = o_ptr + batch * o_strides[0] + head_kv * GROUP_SIZE * o_strides[1]
    do = load_group(do_base, heads, offs_m, q_mask, do_strides, D, HEADS, BLOCK_M, BLOCK_D, LONG)
    o = load_group(o_base, heads, offs_m, q_mask, o_strides, D, HEADS, BLOCK_M, BLOCK_D, LONG)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Rows and heads that do not exist get p = 0 by their lse.
    lse_rows = tile_pointers(lse_ptr + group * GROUP_SIZE * N, offs_m, heads, 1, N, True)
    lse = tl.load(lse_rows, mask=q_mask, other=float("inf"))
    left = tl.load(mileage_ptr + group * N + offs_m, mask=offs_m < N, other=0)

    gradient_before = tl.zeros((BLOCK_M,), tl.float32)  # of the distances of all keys so far
    dq_leader = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start_n in range(0, tl.minimum(N, start_m + BLOCK_M), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        keys = offs_n < N
        k = load_tile(k_keys, offs_n, CHECK_ROWS=True)
        k_rows = row_pointers(k_base, offs_n, k_strides[2], LONG)
        z, fixed = steps(q_leader, k, offs_m, offs_n, N, qk_scale, PRECISION)
        total, local = tile_distances(fixed)
        left -= total
        whole, rest = split_mileage(left)
        scores = tile_scores(
            whole, rest, local, q_rows, q_strides[3], q_mask, k_rows, k_strides[3], keys, (multiples_ptr, turns_ptr),
            D, HEADS, BLOCK_M, BLOCK_N, METHOD, PRECISION, LONG,
        )  # fmt: skip
        exists = causal_pairs(offs_m, offs_n, N)
        p = tl.where(exists[:, None, :], tl.math.exp2(scores * qk_scale - lse[:, :, None]), 0.0)
        p = tl.reshape(p, (BLOCK_M * HEADS, BLOCK_N))
        v = load_tile(v_keys, offs_n, CHECK_ROWS=True)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        dv_mask = keys[:, None] & (columns[None, :] < D)
        tl.atomic_add(tile_pointers(dv_base, offs_n, columns, D, 1, LONG), dv, mask=dv_mask, sem="relaxed")
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        # Without the scale, which comes last: it would take small ones to where float16 has fewer digits.
        ds = tl.reshape(p * (dp - delta[:, None]), (BLOCK_M, HEADS, BLOCK_N))
        by_head = tl.permute(ds.to(do.dtype), (0, 2, 1))
        by_key = spread_heads(ds, HEADS, SPREAD, BLOCK_M, BLOCK_N)
        distance = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # gradient of the distances
        for start in range(0, D // 2, PAIRS):
            pairs = start + tl.arange(0, PAIRS)
            k1, k2 = load_key_pairs(pairs, k_rows, k_strides[3], keys, D, LONG)
            cos, sin = distance_phases(pairs, whole, rest, local, (multiples_ptr, turns_ptr), D, METHOD)
            first, second = rotate(k1[None, :, :], k2[None, :, :], cos, sin, True)
            dq1 = tl.dot(first.to(do.dtype), by_head, input_precision=PRECISION) * softmax_scale
            dq2 = tl.dot(second.to(do.dtype), by_head, input_precision=PRECISION) * softmax_scale
            dq_pairs = dq_rows[:, None, :] + pairs[None, :, None]
            dq_mask = q_mask[:, None, :] & (pairs < D // 2)[None, :, None]
            tl.atomic_add(dq_pairs, dq1, mask=dq_mask, sem="relaxed")
            tl.atomic_add(dq_pairs + D // 2, dq2, mask=dq_mask, sem="relaxed")

            # The group's queries weighted by ds are the gradient of the turned key. Turned back, and multiplied by the
            # key across (the derivative of a turn), they are the distance's.
            q1, q2 = load_halves(
                q_spread[:, :, None], pairs[None, None, :], q_strides[3], spread_mask[:, :, None], D, LONG
            )  # fmt: skip
            nothing = tl.zeros((BLOCK_M, PAIRS, BLOCK_N), tl.float32)
            weighted1 = split_dot(tl.permute(q1, (0, 2, 1)), by_key, nothing, PRECISION)
            weighted2 = split_dot(tl.permute(q2, (0, 2, 1)), by_key, nothing, PRECISION)
            dk1, dk2 = rotate(weighted1, weighted2, cos, sin, False)
            turn = turns_of(pairs, turns_ptr, D)[:, None]
            distance += tl.sum(dk1 * (k2 * turn)[None, :, :] - dk2 * (k1 * turn)[None, :, :], 1)
            dk_pairs = tile_pointers(dk_base, pairs, offs_n, 1, D, LONG)
            dk_mask = (pairs < D // 2)[:, None] & keys[None, :]
            tl.atomic_add(dk_pairs, tl.sum(dk1, 0) * softmax_scale, mask=dk_mask, sem="relaxed")
            tl.atomic_add(dk_pairs + D // 2, tl.sum(dk2, 0) * softmax_scale, mask=dk_mask, sem="relaxed")

        distance *= 6.283185307179586 * softmax_scale  # turns were per step in units of 2 pi
        dz = gradient_before[:, None] + tl.cumsum(distance, 1) - distance
        gradient_before += tl.sum(distance, 1)
        dx = dz * z * (1.0 - z) * softmax_scale
        # Not rounded to the input dtype: dz is a sum of up to N terms, whose rounding would reach every key.
        dq_leader = tl.dot(dx, k.to(tl.float32), dq_leader, input_precision=EXACT)
        dk = tl.dot(tl.trans(dx), q_leader.to(tl.float32), input_precision=EXACT)
        tl.atomic_add(tile_pointers(dk_base, offs_n, columns, D, 1, LONG), dk, mask=dv_mask, sem="relaxed")

    leader_mask = (offs_m[:, None] < N) & (columns[None, :] < D)
    tl.atomic_add(tile_pointers(dq_base, offs_m, columns, D, 1, LONG), dq_leader, mask=leader_mask, sem="relaxed")


@functools.lru_cache(maxsize=64)
def frequency_tables(base: float, head_dim: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiples, turns): what `distance_phases` and `cosine_sine` read, from float64.

    multiples ``(D/2,)`` int32 is a step's turn modulo one, in units of 2**-32. turns float32 holds ``(D/2,)`` turns of
    a step, ``(D/2,)`` what multiples lack, and cosines and sines of 1024 phases.
    """
    half = head_dim // 2
    turn = [base ** -(d / half) / (2 * math.pi) for d in range(half)]
    multiples = [round((t % 1.0) * 2**32) for t in turn]
    low = [t % 1.0 - m / 2**32 for t, m in zip(turn, multiples)]
    size = TABLE_SIZE.value
    phases = [2 * math.pi * n / size for n in range(size)]
    turns = torch.tensor([*turn, *low, *map(math.cos, phases), *map(math.sin, phases)], dtype=torch.float64)
    wrapped = torch.tensor(multiples, dtype=torch.int64).to(torch.int32)
    return wrapped.to(where), turns.float().to(where)


class _Call:
    """What forward and backward share: the grid and the constants of one signature."""

    def prepare(self, kernel, q, k, tensors, scales, constants, config):
        batch, heads_q, length, head_dim = q.shape
        heads_kv = k.shape[1]
        group_size = heads_q // heads_kv
        chunks = triton.cdiv(group_size, config.heads)
        groups = batch * heads_kv
        strides = tuple(x.stride() for x in tensors)
        # Offsets within a group, in addition to those within a tile.
        long = is_long(*strides) or any((s[1] * group_size + s[2] * length) + s[3] * 256 >= 2**31 for s in strides)
        self.launch = Launch(
            kernel,
            triton.cdiv(length, config.block_m) * groups * chunks,
            (*strides, *scales, groups, chunks, heads_kv, group_size, length),
            {
                "D": head_dim,
                "HEADS": config.heads,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_D": block_d(head_dim),
                "METHOD": config.method,
                "PRECISION": dot_precision(q.dtype),
                **constants,
                "LONG": long,
            },
            config.launch_options,
        )


class ForwardCall(_Call):
    """The launch of one forward signature."""

    def __init__(self, q, k, v, softmax_scale, precision, config):
        o = torch.empty_strided(q.shape, output_strides(q), dtype=q.dtype, device="meta")
        self.prepare(forward_kernel, q, k, (q, k, v, o), (softmax_scale * LOG2E,), {}, config)


class BackwardCall(_Call):
    """The launch of one backward signature."""

    def __init__(self, q, k, v, do, o, softmax_scale, precision, config):
        # Three tf32 products are as good as one in float32 where an operand comes from 16 bits, and need no FMA loop.
        exact = "ieee" if q.dtype is torch.float32 or torch.version.hip else "tf32x3"
        scales = (softmax_scale * LOG2E, softmax_scale)
        constants = {"EXACT": exact, "SPREAD": max(16, config.heads)}
        self.prepare(backward_kernel, q, k, (q, k, v, do, o), scales, constants, config)


_forward_calls = PreparedCalls(ForwardCall)
_backward_calls = PreparedCalls(BackwardCall)


def corope_forward(q, k, v, *, base, softmax_scale, config=None):
    """Run the forward pass.

    q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, any strides, D even from 32 to 128; ``config`` a ``CoRopeConfig``
    or None. Returns o (shape of q, its memory order), lse ``(B, HQ, N)`` float32 in base 2, and every row's whole
    mileage ``(B, HKV, N)`` int64, in units of 2**-23.
    """
    config = config or forward_config(q.dtype, q.shape[1] // k.shape[1])
    o = torch.empty_strided(q.shape, output_strides(q), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mileage = torch.empty(k.shape[:3], dtype=torch.int64, device=q.device)
    if q.numel():
        call = _forward_calls((q, k, v), (softmax_scale, dot_precision(q.dtype)), config)
        tables = frequency_tables(base, q.shape[3], q.device)
        call.launch(device.current_stream(q.device), q, k, v, *tables, o, lse, mileage)
    return o, lse, mileage


def corope_backward(do, q, k, v, o, lse, mileage, *, base, softmax_scale, config=None):
    """Gradients (dq, dk, dv) in the inputs' dtype and memory order, from what `corope_forward` took and returned.

    Needs ``4 (HQ + 2 HKV) B N D`` bytes for float32 sums besides the results.
    """
    config = config or backward_config(q.dtype, q.shape[1] // k.shape[1])
    head_dim = q.shape[3]
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v)]
    if q.numel():
        call = _backward_calls((q, k, v, do, o), (softmax_scale, dot_precision(q.dtype)), config)
        tables = frequency_tables(base, head_dim, q.device)
        call.launch(device.current_stream(q.device), q, k, v, *tables, do, o, lse, mileage, *sums)
    results = [torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for result, total in zip(results, sums):
        result.copy_(total)
    return tuple(results)
