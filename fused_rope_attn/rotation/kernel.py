"""Rotation alone, in the caller's own layout: up to three tensors (q, k, v) in one launch.

A file of its own beside rotary.py, which writes keys in pair order for the attention kernels and knows none of this:
layouts of memory, positions, several tensors. Everything here is bandwidth: a program holds one tile of tokens by
heads, loads all of it before it computes or stores anything, and reads its angles once for all of its heads.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.rotation import Rotation, head_rotation, load_angles, rotate

# Where the rows of the tables come from: the token's index, position_ids, or its place in a packed sequence.
INDEX, IDS, PACKED = 0, 1, 2
_INDEX, _IDS, _PACKED = tl.constexpr(INDEX), tl.constexpr(IDS), tl.constexpr(PACKED)


@triton.jit
def tile_of(tokens, heads, columns, strides, HEADS_INNER: tl.constexpr, LONG: tl.constexpr):
    """Offsets (outer, inner, columns); of tokens and heads the neighbours in memory are the inner ones."""
    if LONG:
        tokens = tokens.to(tl.int64)
        heads = heads.to(tl.int64)
        columns = columns.to(tl.int64)
    if HEADS_INNER:
        offsets = tokens[:, None, None] * strides[2] + heads[None, :, None] * strides[1]
    else:
        offsets = heads[:, None, None] * strides[1] + tokens[None, :, None] * strides[2]
    return offsets + columns[None, None, :] * strides[3]


@triton.jit
def packed_positions(cu_seqlens_ptr, num_sequences, search_steps, tokens):
    """Position of every token in its own sequence, by binary search in cu_seqlens; -1 behind the last sequence."""
    low = tl.zeros_like(tokens)
    high = low + num_sequences
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        begun = tl.load(cu_seqlens_ptr + middle) <= tokens
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return tl.where(low < num_sequences, tokens - tl.load(cu_seqlens_ptr + low), -1)


@triton.jit
def load_turns(rotation, positions, BLOCK_P: tl.constexpr, POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr):
    """cos and sin of every token's pairs, as tiles that broadcast over heads.

    A position that the tables do not have gives NaN, a token in no sequence angle 0.
    """
    S = rotation.num_positions
    cos, sin = load_angles(rotation, positions, 2 * BLOCK_P, CHECK_POSITIONS=True)
    if POSITIONS == _IDS:
        cos = tl.where(((positions < 0) | (positions >= S))[:, None], float("nan"), cos)
    elif POSITIONS == _PACKED:
        cos = tl.where((positions >= S)[:, None], float("nan"), cos)
    if HEADS_INNER:
        return cos[:, None, :], sin[:, None, :]
    else:
        return cos[None, :, :], sin[None, :, :]


@triton.jit
def turn_heads(x_ptr, out_ptr, x_strides, out_strides, rotation, positions, H, N, batch, chunk, start,
               SECTION: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SECTIONS: tl.constexpr, ROWS: tl.constexpr,
               HEADS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
               CONJUGATE: tl.constexpr, WIDE: tl.constexpr, POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr,
               COPY_TAIL: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Rotate ROWS tokens of HEADS heads of one tensor; R columns in each of SECTIONS, and copy what is behind them."""
    tokens, heads, pairs = tl.arange(0, ROWS), tl.arange(0, HEADS), tl.arange(0, BLOCK_P)
    first_head = tl.cast(chunk * HEADS, tl.int64)
    start64 = tl.cast(start, tl.int64)
    x_ptr += batch * x_strides[0] + first_head * x_strides[1] + start64 * x_strides[2]
    out_ptr += batch * out_strides[0] + first_head * out_strides[1] + start64 * out_strides[2]
    dtype = out_ptr.dtype.element_ty
    if HEADS_INNER:
        exists = (tokens < N - start)[:, None, None] & (heads < H - chunk * HEADS)[None, :, None]
    else:
        exists = (heads < H - chunk * HEADS)[:, None, None] & (tokens < N - start)[None, :, None]

    # All of x is on its way before anything waits: an angle may have to change threads, at a barrier.
    if INTERLEAVED:
        columns = SECTION * R + tl.arange(0, 2 * BLOCK_P)
        turning = exists
        if 2 * BLOCK_P != R:
            turning = exists & (columns < SECTION * R + R)[None, None, :]
        x = tl.load(x_ptr + tile_of(tokens, heads, columns, x_strides, HEADS_INNER, LONG), mask=turning, other=0.0)
    else:
        columns = SECTION * R + pairs
        turning = exists
        if 2 * BLOCK_P != R:
            turning = exists & (pairs < R // 2)[None, None, :]
        x1 = x_ptr + tile_of(tokens, heads, columns, x_strides, HEADS_INNER, LONG)
        x2 = x_ptr + tile_of(tokens, heads, columns + R // 2, x_strides, HEADS_INNER, LONG)
        first, second = tl.load(x1, mask=turning, other=0.0), tl.load(x2, mask=turning, other=0.0)
    if COPY_TAIL and SECTION == 0:
        tail = SECTIONS * R + tl.arange(0, BLOCK_TAIL)
        passing = exists & (tail < D)[None, None, :]
        rest = tl.load(x_ptr + tile_of(tokens, heads, tail, x_strides, HEADS_INNER, LONG), mask=passing)

    # The outputs of a pair have one angle, unless a full-width table has another for the second.
    cos1, sin1 = load_turns(rotation, positions, BLOCK_P, POSITIONS, HEADS_INNER)
    cos2, sin2 = cos1, sin1
    if WIDE:
        # The column strides of an interleaved table skip every second column already.
        step: tl.constexpr = 1 if INTERLEAVED else R
        others = Rotation(
            cos_ptr=rotation.cos_ptr + step * rotation.cos_strides[2] // 2,
            sin_ptr=rotation.sin_ptr + step * rotation.sin_strides[2] // 2,
            cos_strides=rotation.cos_strides,
            sin_strides=rotation.sin_strides,
            num_positions=rotation.num_positions,
            R=R,
            INTERLEAVED=INTERLEAVED,
        )
        cos2, sin2 = load_turns(others, positions, BLOCK_P, POSITIONS, HEADS_INNER)
    if CONJUGATE:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1

    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_P, 2)))
    first, second = first.to(tl.float32), second.to(tl.float32)
    first_rot, _ = rotate(first, second, cos1, sin1, CONJUGATE)
    _, second_rot = rotate(first, second, cos2, sin2, CONJUGATE)
    if INTERLEAVED:
        turned = tl.reshape(tl.join(first_rot, second_rot), (first.shape[0], first.shape[1], 2 * BLOCK_P)).to(dtype)
        tl.store(out_ptr + tile_of(tokens, heads, columns, out_strides, HEADS_INNER, LONG), turned, mask=turning)
    else:
        out1 = out_ptr + tile_of(tokens, heads, columns, out_strides, HEADS_INNER, LONG)
        out2 = out_ptr + tile_of(tokens, heads, columns + R // 2, out_strides, HEADS_INNER, LONG)
        tl.store(out1, first_rot.to(dtype), mask=turning)
        tl.store(out2, second_rot.to(dtype), mask=turning)
    if COPY_TAIL and SECTION == 0:
        tl.store(out_ptr + tile_of(tokens, heads, tail, out_strides, HEADS_INNER, LONG), rest, mask=passing)


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "S", "num_sequences", "search_steps"])
def rope_kernel(x0_ptr, x1_ptr, x2_ptr, out0_ptr, out1_ptr, out2_ptr, cos_ptr, sin_ptr, positions_ptr, cu_seqlens_ptr,
                x0_strides, x1_strides, x2_strides, out0_strides, out1_strides, out2_strides, cos_strides, sin_strides,
                position_strides, H0, H1, H2, N, S, num_sequences, search_steps, COUNT: tl.constexpr, D: tl.constexpr,
                R: tl.constexpr, SECTIONS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
                BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
                WIDE: tl.constexpr, POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr, COPY_TAIL: tl.constexpr,
                LONG: tl.constexpr):  # fmt: skip
    """Grid: (token blocks * head chunks of all COUNT tensors * batch), neighbours in memory next to each other.

    R is the width of one of SECTIONS sections, each with positions of its own (two for tokens on a plane).
    """
    chunks0 = tl.cdiv(H0, HEADS)
    chunks1 = tl.cdiv(H1, HEADS) if COUNT > 1 else 0
    chunks = chunks0 + chunks1 + (tl.cdiv(H2, HEADS) if COUNT > 2 else 0)
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    if HEADS_INNER:
        chunk = pid % chunks
        block = (pid // chunks) % blocks
    else:
        block = pid % blocks
        chunk = (pid // blocks) % chunks
    batch = (pid // (blocks * chunks)).to(tl.int64)
    start = block * ROWS
    tokens = start + tl.arange(0, ROWS)
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, S, R, INTERLEAVED)

    for section in tl.static_range(SECTIONS):
        if POSITIONS == _IDS:
            ids = positions_ptr + batch * position_strides[0] + section * position_strides[1]
            positions = tl.load(ids + tokens.to(tl.int64) * position_strides[2], mask=tokens < N, other=0)
        elif POSITIONS == _PACKED:
            positions = packed_positions(cu_seqlens_ptr, num_sequences, search_steps, tokens)
        else:
            positions = tokens

        if COUNT == 1 or chunk < chunks0:
            turn_heads(
                x0_ptr, out0_ptr, x0_strides, out0_strides, rotation, positions, H0, N, batch, chunk, start, section,
                D, R, SECTIONS, ROWS, HEADS, BLOCK_P, BLOCK_TAIL, INTERLEAVED, CONJUGATE, WIDE, POSITIONS, HEADS_INNER,
                COPY_TAIL, LONG,
            )  # fmt: skip
        elif COUNT == 2 or chunk < chunks0 + chunks1:
            turn_heads(
                x1_ptr, out1_ptr, x1_strides, out1_strides, rotation, positions, H1, N, batch, chunk - chunks0, start,
                section, D, R, SECTIONS, ROWS, HEADS, BLOCK_P, BLOCK_TAIL, INTERLEAVED, CONJUGATE, WIDE, POSITIONS,
                HEADS_INNER, COPY_TAIL, LONG,
            )  # fmt: skip
        else:
            turn_heads(
                x2_ptr, out2_ptr, x2_strides, out2_strides, rotation, positions, H2, N, batch,
                chunk - chunks0 - chunks1, start, section, D, R, SECTIONS, ROWS, HEADS, BLOCK_P, BLOCK_TAIL,
                INTERLEAVED, CONJUGATE, WIDE, POSITIONS, HEADS_INNER, COPY_TAIL, LONG,
            )  # fmt: skip
