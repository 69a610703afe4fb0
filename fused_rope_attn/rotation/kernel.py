"""Rotation alone, in the caller's own layout of memory: up to three tensors (q, k, v) in one launch.

The attention kernels rotate queries and keys where they load them, in pair order. This kernel does what they have no
use for: any layout of memory, positions of every kind, several tensors. Memory bandwidth bounds it, so that a program
holds one tile of tokens by heads, loads the whole tile before it computes or stores anything, and reads the angles of
its tokens once for all of its heads.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, head_rotation, load_angles, rotate

# Where a token's row in the tables comes from: its index, position_ids, or its index within a packed sequence.
INDEX, IDS, PACKED = 0, 1, 2
_INDEX, _IDS, _PACKED = tl.constexpr(INDEX), tl.constexpr(IDS), tl.constexpr(PACKED)


@record
class Operand:
    """One tensor (B, num_heads, num_tokens, D) of the launch and the tensor that receives it rotated.

    Strides are those of B, H, N and D, in elements.
    """

    x_ptr: tl.tensor
    out_ptr: tl.tensor
    x_strides: tl.tuple
    out_strides: tl.tuple
    num_heads: tl.tensor
    num_tokens: tl.tensor


@record
class TileShape:
    """The tokens and heads of one tile, and how they lie in memory.

    A tile has shape (BLOCK_TOKENS, BLOCK_HEADS, columns) where HEADS_INNER says that the heads of a token are closer to
    each other in memory than the tokens of a head, and (BLOCK_HEADS, BLOCK_TOKENS, columns) otherwise.
    """

    BLOCK_TOKENS: tl.constexpr
    BLOCK_HEADS: tl.constexpr
    HEADS_INNER: tl.constexpr
    USE_INT64_OFFSETS: tl.constexpr  # an offset within one tile can pass 2**31


@record
class Tile:
    """One tile: where it begins, and its tokens (BLOCK_TOKENS,) and heads (BLOCK_HEADS,) int32, counted from there."""

    first_token: tl.tensor
    first_head: tl.tensor
    tokens: tl.tensor
    heads: tl.tensor
    shape: TileShape


@record
class Columns:
    """The D columns of a head: SECTIONS sections of R columns, each rotated by positions of its own, and the tail.

    The tail, the columns behind the sections, passes through, and COPY_TAIL copies it. BLOCK_PAIRS, a power of two, is
    at least R / 2, and BLOCK_TAIL at least D - SECTIONS * R.
    """

    D: tl.constexpr
    SECTIONS: tl.constexpr
    BLOCK_PAIRS: tl.constexpr
    BLOCK_TAIL: tl.constexpr
    COPY_TAIL: tl.constexpr


@record
class Angles:
    """Where angles come from: the tables of one batch entry, whose rows are found as POSITIONS says.

    FULL_WIDTH tables hold an angle for each column, others one for each pair. CONJUGATE rotates by negative angles.
    """

    rotation: Rotation
    POSITIONS: tl.constexpr
    FULL_WIDTH: tl.constexpr
    CONJUGATE: tl.constexpr


@triton.jit
def tile_offsets(tile, columns, strides):
    """Offsets of ``columns`` (C,) of a tile from column 0 of its first token and head, in elements, in its shape."""
    tokens, heads = tile.tokens, tile.heads
    if tile.shape.USE_INT64_OFFSETS:
        tokens = tokens.to(tl.int64)
        heads = heads.to(tl.int64)
        columns = columns.to(tl.int64)
    if tile.shape.HEADS_INNER:
        offsets = tokens[:, None, None] * strides[2] + heads[None, :, None] * strides[1]
    else:
        offsets = heads[:, None, None] * strides[1] + tokens[None, :, None] * strides[2]
    return offsets + columns[None, None, :] * strides[3]


@triton.jit
def existing_rows(tile, num_tokens, num_heads):
    """Which rows of a tile are among a tensor's tokens and heads, in the tile's shape with one column."""
    if tile.shape.HEADS_INNER:
        token_exists = (tile.tokens < num_tokens - tile.first_token)[:, None, None]
        return token_exists & (tile.heads < num_heads - tile.first_head)[None, :, None]
    else:
        head_exists = (tile.heads < num_heads - tile.first_head)[:, None, None]
        return head_exists & (tile.tokens < num_tokens - tile.first_token)[None, :, None]


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
def load_token_angles(rotation, positions, BLOCK_PAIRS: tl.constexpr, POSITIONS: tl.constexpr,
                      HEADS_INNER: tl.constexpr):  # fmt: skip
    """cos and sin of every token's pairs, float32, with an axis of one head where the tile has its heads.

    A position without a row in the tables gives NaN. A token that belongs to no sequence has angle 0.
    """
    num_positions = rotation.num_positions
    cos, sin = load_angles(rotation, positions, 2 * BLOCK_PAIRS, CHECK_POSITIONS=True)
    if POSITIONS == _IDS:
        cos = tl.where(((positions < 0) | (positions >= num_positions))[:, None], float("nan"), cos)
    elif POSITIONS == _PACKED:
        cos = tl.where((positions >= num_positions)[:, None], float("nan"), cos)
    if HEADS_INNER:
        return cos[:, None, :], sin[:, None, :]
    else:
        return cos[None, :, :], sin[None, :, :]


@triton.jit
def second_columns(rotation):
    """Full-width tables as seen from the second member of each pair: they begin at its column."""
    # The column strides of an interleaved table skip every second column already.
    step: tl.constexpr = 1 if rotation.INTERLEAVED else rotation.R
    return Rotation(
        cos_ptr=rotation.cos_ptr + step * rotation.cos_strides[2] // 2,
        sin_ptr=rotation.sin_ptr + step * rotation.sin_strides[2] // 2,
        cos_strides=rotation.cos_strides,
        sin_strides=rotation.sin_strides,
        num_positions=rotation.num_positions,
        R=rotation.R,
        INTERLEAVED=rotation.INTERLEAVED,
    )


@triton.jit
def rotate_tile(operand, shape, batch, first_token, head_block, columns, angles, positions, SECTION: tl.constexpr):
    """Rotate one section of the tile at (batch, head_block * BLOCK_HEADS, first_token); section 0 also copies the tail.

    positions (BLOCK_TOKENS,) are the rows of the tables; batch is int64.
    """
    R: tl.constexpr = angles.rotation.R
    INTERLEAVED: tl.constexpr = angles.rotation.INTERLEAVED
    BLOCK_PAIRS: tl.constexpr = columns.BLOCK_PAIRS
    HAS_TAIL: tl.constexpr = columns.COPY_TAIL and SECTION == 0
    tokens, heads, pairs = tl.arange(0, shape.BLOCK_TOKENS), tl.arange(0, shape.BLOCK_HEADS), tl.arange(0, BLOCK_PAIRS)
    first_head = head_block * shape.BLOCK_HEADS
    tile = Tile(first_token=first_token, first_head=first_head, tokens=tokens, heads=heads, shape=shape)
    head64, token64 = tl.cast(first_head, tl.int64), tl.cast(first_token, tl.int64)
    x_strides, out_strides = operand.x_strides, operand.out_strides
    x_ptr = operand.x_ptr + batch * x_strides[0] + head64 * x_strides[1] + token64 * x_strides[2]
    out_ptr = operand.out_ptr + batch * out_strides[0] + head64 * out_strides[1] + token64 * out_strides[2]
    dtype = out_ptr.dtype.element_ty
    exists = existing_rows(tile, operand.num_tokens, operand.num_heads)

    # All loads of x are issued before anything waits: an angle may have to change threads, which takes a barrier.
    rotated = exists
    if INTERLEAVED:
        offs_d = SECTION * R + tl.arange(0, 2 * BLOCK_PAIRS)
        if 2 * BLOCK_PAIRS != R:
            rotated = exists & (offs_d < SECTION * R + R)[None, None, :]
        x = tl.load(x_ptr + tile_offsets(tile, offs_d, x_strides), mask=rotated, other=0.0)
    else:
        offs_d = SECTION * R + pairs
        if 2 * BLOCK_PAIRS != R:
            rotated = exists & (pairs < R // 2)[None, None, :]
        x1 = x_ptr + tile_offsets(tile, offs_d, x_strides)
        x2 = x_ptr + tile_offsets(tile, offs_d + R // 2, x_strides)
        x1, x2 = tl.load(x1, mask=rotated, other=0.0), tl.load(x2, mask=rotated, other=0.0)
    if HAS_TAIL:
        tail_columns = columns.SECTIONS * R + tl.arange(0, columns.BLOCK_TAIL)
        in_tail = exists & (tail_columns < columns.D)[None, None, :]
        tail = tl.load(x_ptr + tile_offsets(tile, tail_columns, x_strides), mask=in_tail)

    # Both members of a pair have one angle, unless a full-width table has another one for the second member.
    cos1, sin1 = load_token_angles(angles.rotation, positions, BLOCK_PAIRS, angles.POSITIONS, shape.HEADS_INNER)
    cos2, sin2 = cos1, sin1
    if angles.FULL_WIDTH:
        second = second_columns(angles.rotation)
        cos2, sin2 = load_token_angles(second, positions, BLOCK_PAIRS, angles.POSITIONS, shape.HEADS_INNER)
    if angles.CONJUGATE:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1

    if INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_PAIRS, 2)))
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    x1_rot, _ = rotate(x1, x2, cos1, sin1, angles.CONJUGATE)
    _, x2_rot = rotate(x1, x2, cos2, sin2, angles.CONJUGATE)
    if INTERLEAVED:
        x_rot = tl.reshape(tl.join(x1_rot, x2_rot), (x1.shape[0], x1.shape[1], 2 * BLOCK_PAIRS)).to(dtype)
        tl.store(out_ptr + tile_offsets(tile, offs_d, out_strides), x_rot, mask=rotated)
    else:
        out1 = out_ptr + tile_offsets(tile, offs_d, out_strides)
        out2 = out_ptr + tile_offsets(tile, offs_d + R // 2, out_strides)
        tl.store(out1, x1_rot.to(dtype), mask=rotated)
        tl.store(out2, x2_rot.to(dtype), mask=rotated)
    if HAS_TAIL:
        tl.store(out_ptr + tile_offsets(tile, tail_columns, out_strides), tail, mask=in_tail)


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "S", "num_sequences", "search_steps"])
def rotation_kernel(x0_ptr, x1_ptr, x2_ptr, out0_ptr, out1_ptr, out2_ptr, cos_ptr, sin_ptr, positions_ptr,
                    cu_seqlens_ptr, x0_strides, x1_strides, x2_strides, out0_strides, out1_strides, out2_strides,
                    cos_strides, sin_strides, position_strides, H0, H1, H2, N, S, num_sequences, search_steps,
                    NUM_TENSORS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SECTIONS: tl.constexpr,
                    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
                    BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
                    FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr,
                    COPY_TAIL: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """Rotate NUM_TENSORS tensors (B, H0 | H1 | H2, N, D) of one dtype. Grid: (blocks of tokens * blocks of heads of all
    tensors * B,), neighbours in memory next to each other.

    cos and sin are ``([1|B,] S, R / 2 | R)`` with strides (B, S, column); positions int32 or int64 ``(1|B, SECTIONS,
    N)``; cu_seqlens int32 ``(num_sequences + 1,)``, whose binary search takes ``search_steps`` steps. R is the width of
    one of SECTIONS sections, each with positions of its own (two sections for tokens on a plane).
    """
    tensor0 = Operand(x0_ptr, out0_ptr, x0_strides, out0_strides, num_heads=H0, num_tokens=N)
    tensor1 = Operand(x1_ptr, out1_ptr, x1_strides, out1_strides, num_heads=H1, num_tokens=N)
    tensor2 = Operand(x2_ptr, out2_ptr, x2_strides, out2_strides, num_heads=H2, num_tokens=N)
    shape = TileShape(BLOCK_TOKENS, BLOCK_HEADS, HEADS_INNER=HEADS_INNER, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    columns = Columns(D, SECTIONS, BLOCK_PAIRS=BLOCK_PAIRS, BLOCK_TAIL=BLOCK_TAIL, COPY_TAIL=COPY_TAIL)
    head_blocks0 = tl.cdiv(H0, BLOCK_HEADS)
    head_blocks1 = tl.cdiv(H1, BLOCK_HEADS) if NUM_TENSORS > 1 else 0
    head_blocks = head_blocks0 + head_blocks1 + (tl.cdiv(H2, BLOCK_HEADS) if NUM_TENSORS > 2 else 0)
    token_blocks = tl.cdiv(N, BLOCK_TOKENS)
    pid = tl.program_id(0)
    if HEADS_INNER:
        head_block = pid % head_blocks
        token_block = (pid // head_blocks) % token_blocks
    else:
        token_block = pid % token_blocks
        head_block = (pid // token_blocks) % head_blocks
    batch = (pid // (token_blocks * head_blocks)).to(tl.int64)
    first_token = token_block * BLOCK_TOKENS
    tokens = first_token + tl.arange(0, BLOCK_TOKENS)
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, S, R, INTERLEAVED)
    angles = Angles(rotation=rotation, POSITIONS=POSITIONS, FULL_WIDTH=FULL_WIDTH, CONJUGATE=CONJUGATE)

    for section in tl.static_range(SECTIONS):
        if POSITIONS == _IDS:
            ids = positions_ptr + batch * position_strides[0] + section * position_strides[1]
            positions = tl.load(ids + tokens.to(tl.int64) * position_strides[2], mask=tokens < N, other=0)
        elif POSITIONS == _PACKED:
            positions = packed_positions(cu_seqlens_ptr, num_sequences, search_steps, tokens)
        else:
            positions = tokens

        if NUM_TENSORS == 1 or head_block < head_blocks0:
            rotate_tile(tensor0, shape, batch, first_token, head_block, columns, angles, positions, section)
        elif NUM_TENSORS == 2 or head_block < head_blocks0 + head_blocks1:
            head_block1 = head_block - head_blocks0
            rotate_tile(tensor1, shape, batch, first_token, head_block1, columns, angles, positions, section)
        else:
            head_block2 = head_block - head_blocks0 - head_blocks1
            rotate_tile(tensor2, shape, batch, first_token, head_block2, columns, angles, positions, section)
