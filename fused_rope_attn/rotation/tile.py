# mypy: ignore-errors
"""One tile of the rotation alone, in the caller's own layout of memory: where it lies, its positions and its angles.

A program holds one tile of tokens by heads, loads the whole tile before it computes or stores anything, and reads the
angles of its tokens once for all of its heads.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation, load_angles, rotate

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
    begin = tl.load(cu_seqlens_ptr + low)
    tl.device_assert(tokens >= begin, "cu_seqlens must begin with 0 and never fall")
    return tl.where(low < num_sequences, tokens - begin, -1)


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
        norm=rotation.norm,
        R=rotation.R,
        INTERLEAVED=rotation.INTERLEAVED,
    )


@triton.jit
def locate_tile(shape, head_blocks, N):
    """(batch int64, block of tokens, block of heads) of this program; ``head_blocks`` are those of all tensors."""
    token_blocks = tl.cdiv(N, shape.BLOCK_TOKENS)
    pid = tl.program_id(0)
    if shape.HEADS_INNER:
        head_block = pid % head_blocks
        token_block = (pid // head_blocks) % token_blocks
    else:
        token_block = pid % token_blocks
        head_block = (pid // token_blocks) % head_blocks
    return (pid // (token_blocks * head_blocks)).to(tl.int64), token_block, head_block


@triton.jit
def tile_at(shape, columns, first_token, head_block):
    """The ``Tile`` of a block of heads that begins at ``first_token``, and the pairs of a section (BLOCK_PAIRS,)."""
    tokens, heads = tl.arange(0, shape.BLOCK_TOKENS), tl.arange(0, shape.BLOCK_HEADS)
    pairs = tl.arange(0, columns.BLOCK_PAIRS)
    first_head = head_block * shape.BLOCK_HEADS
    return Tile(first_token=first_token, first_head=first_head, tokens=tokens, heads=heads, shape=shape), pairs


@triton.jit
def tile_pointer(ptr, strides, batch, tile):
    """Pointer to column 0 of the first token and head of a tile, in a tensor with strides (B, H, N, D)."""
    head64, token64 = tl.cast(tile.first_head, tl.int64), tl.cast(tile.first_token, tl.int64)
    return ptr + batch * strides[0] + head64 * strides[1] + token64 * strides[2]


@triton.jit
def section_mask(exists, pairs, columns, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Which elements of a section exist, where its ``pairs`` do not fill its tile: ``exists`` are the tile's rows."""
    if 2 * columns.BLOCK_PAIRS == R:
        return exists
    elif INTERLEAVED:
        return exists & (tl.arange(0, 2 * columns.BLOCK_PAIRS) < R)[None, None, :]
    else:
        return exists & (pairs < R // 2)[None, None, :]


@triton.jit
def load_section(ptr, strides, tile, mask, pairs, columns, R: tl.constexpr, INTERLEAVED: tl.constexpr,
                 SECTION: tl.constexpr):  # fmt: skip
    """What ``section_pairs`` takes apart: all columns of a section twice, or the halves of it. ``mask``: its own."""
    if INTERLEAVED:
        offs_d = SECTION * R + tl.arange(0, 2 * columns.BLOCK_PAIRS)
        x = tl.load(ptr + tile_offsets(tile, offs_d, strides), mask=mask, other=0.0)
        return x, x
    else:
        offs_d = SECTION * R + pairs
        x1 = ptr + tile_offsets(tile, offs_d, strides)
        x2 = ptr + tile_offsets(tile, offs_d + R // 2, strides)
        return tl.load(x1, mask=mask, other=0.0), tl.load(x2, mask=mask, other=0.0)


@triton.jit
def section_pairs(x1, x2, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of a section's pairs, float32, of what ``load_section`` gives."""
    if INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(x1, (x1.shape[0], x1.shape[1], BLOCK_PAIRS, 2)))
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def section_angles(angles, positions, columns, HEADS_INNER: tl.constexpr):
    """cos and sin of the first and of the second members of a section's pairs; positions (BLOCK_TOKENS,)."""
    # Both members of a pair have one angle, unless a full-width table has another one for the second member.
    cos1, sin1 = load_token_angles(angles.rotation, positions, columns.BLOCK_PAIRS, angles.POSITIONS, HEADS_INNER)
    cos2, sin2 = cos1, sin1
    if angles.FULL_WIDTH:
        second = second_columns(angles.rotation)
        cos2, sin2 = load_token_angles(second, positions, columns.BLOCK_PAIRS, angles.POSITIONS, HEADS_INNER)
    if angles.CONJUGATE:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1
    return cos1, sin1, cos2, sin2


@triton.jit
def rotate_section(x1, x2, angles, cos1, sin1, cos2, sin2):
    """Pairs of a section rotated by their ``section_angles``, float32."""
    x1_rot, _ = rotate(x1, x2, cos1, sin1, angles.CONJUGATE)
    _, x2_rot = rotate(x1, x2, cos2, sin2, angles.CONJUGATE)
    return x1_rot, x2_rot


@triton.jit
def store_section(ptr, strides, tile, mask, pairs, columns, x1, x2, R: tl.constexpr, INTERLEAVED: tl.constexpr,
                  SECTION: tl.constexpr):  # fmt: skip
    """Write pairs back to their columns, rounded once; inverse of ``load_section`` and ``section_pairs``."""
    dtype = ptr.dtype.element_ty
    if INTERLEAVED:
        offs_d = SECTION * R + tl.arange(0, 2 * columns.BLOCK_PAIRS)
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], x1.shape[1], 2 * columns.BLOCK_PAIRS)).to(dtype)
        tl.store(ptr + tile_offsets(tile, offs_d, strides), x, mask=mask)
    else:
        offs_d = SECTION * R + pairs
        out1 = ptr + tile_offsets(tile, offs_d, strides)
        out2 = ptr + tile_offsets(tile, offs_d + R // 2, strides)
        tl.store(out1, x1.to(dtype), mask=mask)
        tl.store(out2, x2.to(dtype), mask=mask)


@triton.jit
def tail_columns(columns, R: tl.constexpr):
    """The columns behind the sections, (BLOCK_TAIL,)."""
    return columns.SECTIONS * R + tl.arange(0, columns.BLOCK_TAIL)


@triton.jit
def token_positions(positions_ptr, position_strides, cu_seqlens_ptr, num_sequences, search_steps, batch, tokens, N,
                    POSITIONS: tl.constexpr, SECTION: tl.constexpr):  # fmt: skip
    """Rows of the tables by which a section of the ``tokens`` of a batch entry turns."""
    if POSITIONS == _IDS:
        ids = positions_ptr + batch * position_strides[0] + SECTION * position_strides[1]
        return tl.load(ids + tokens.to(tl.int64) * position_strides[2], mask=tokens < N, other=0)
    elif POSITIONS == _PACKED:
        return packed_positions(cu_seqlens_ptr, num_sequences, search_steps, tokens)
    else:
        return tokens


@triton.jit
def rotate_tile(operand, shape, batch, first_token, head_block, columns, angles, positions, SECTION: tl.constexpr):
    """Rotate one section of the tile at (batch, head_block * BLOCK_HEADS, first_token); section 0 also copies the tail.

    positions (BLOCK_TOKENS,) are the rows of the tables; batch is int64.
    """
    R: tl.constexpr = angles.rotation.R
    INTERLEAVED: tl.constexpr = angles.rotation.INTERLEAVED
    HAS_TAIL: tl.constexpr = columns.COPY_TAIL and SECTION == 0
    tile, pairs = tile_at(shape, columns, first_token, head_block)
    x_strides, out_strides = operand.x_strides, operand.out_strides
    x_ptr = tile_pointer(operand.x_ptr, x_strides, batch, tile)
    out_ptr = tile_pointer(operand.out_ptr, out_strides, batch, tile)
    exists = existing_rows(tile, operand.num_tokens, operand.num_heads)

    # All loads of x are issued before anything waits: an angle may have to change threads, which takes a barrier.
    mask = section_mask(exists, pairs, columns, R, INTERLEAVED)
    x1, x2 = load_section(x_ptr, x_strides, tile, mask, pairs, columns, R, INTERLEAVED, SECTION)
    if HAS_TAIL:
        offs_tail = tail_columns(columns, R)
        in_tail = exists & (offs_tail < columns.D)[None, None, :]
        tail = tl.load(x_ptr + tile_offsets(tile, offs_tail, x_strides), mask=in_tail)

    cos1, sin1, cos2, sin2 = section_angles(angles, positions, columns, shape.HEADS_INNER)
    x1, x2 = section_pairs(x1, x2, columns.BLOCK_PAIRS, INTERLEAVED)
    x1, x2 = rotate_section(x1, x2, angles, cos1, sin1, cos2, sin2)
    store_section(out_ptr, out_strides, tile, mask, pairs, columns, x1, x2, R, INTERLEAVED, SECTION)
    if HAS_TAIL:
        tl.store(out_ptr + tile_offsets(tile, offs_tail, out_strides), tail, mask=in_tail)
