# mypy: ignore-errors
"""One tile of the rotation alone, in the caller's own layout of memory: its place, its positions and its angles.

A program holds one tile of tokens by heads, loads the whole tile before it computes or stores anything, and reads the
angles of its tokens once for all of its heads.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import Rotation, load_angles, rotate

# A token's row in the tables: its index, its position_ids, or its index within a packed sequence.
INDEX, IDS, PACKED = 0, 1, 2
_INDEX, _IDS, _PACKED = tl.constexpr(INDEX), tl.constexpr(IDS), tl.constexpr(PACKED)


@record
class RotatedTensor:
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
    """The tokens and heads of one tile, and their order in memory.

    A tile has shape (BLOCK_TOKENS, BLOCK_HEADS, columns) with HEADS_INNER, if the heads of a token are closer to each
    other in memory than the tokens of a head, and (BLOCK_HEADS, BLOCK_TOKENS, columns) otherwise.
    """

    BLOCK_TOKENS: tl.constexpr
    BLOCK_HEADS: tl.constexpr
    HEADS_INNER: tl.constexpr
    USE_INT64_OFFSETS: tl.constexpr  # an offset within one tile can pass 2**31


@record
class TokenTile:
    """One tile: its first token and head, and tokens (BLOCK_TOKENS,) and heads (BLOCK_HEADS,), counted from them."""

    first_token: tl.tensor
    first_head: tl.tensor
    tokens: tl.tensor
    heads: tl.tensor
    shape: TileShape


@record
class Columns:
    """The D columns of a head: SECTIONS sections of R columns, each rotated by positions of its own, and the tail.

    The tail, the columns after the sections, passes through, and COPY_TAIL copies it. BLOCK_PAIRS, a power of two, is
    at least R / 2, and BLOCK_TAIL at least D - SECTIONS * R.
    """

    D: tl.constexpr
    SECTIONS: tl.constexpr
    BLOCK_PAIRS: tl.constexpr
    BLOCK_TAIL: tl.constexpr
    COPY_TAIL: tl.constexpr


@record
class Angles:
    """The source of angles: the tables of one batch entry, and the KIND of positions that finds their rows.

    FULL_WIDTH tables hold an angle for each column, others one for each pair. CONJUGATE rotates by negative angles.
    """

    rotation: Rotation
    KIND: tl.constexpr
    FULL_WIDTH: tl.constexpr
    CONJUGATE: tl.constexpr


@triton.jit
def tile_offsets(tile, columns, strides):
    """Return offsets of ``columns`` (C,) of a tile from column 0 of its first token and head, in its shape."""
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
    """Return whether rows of a tile are among a tensor's tokens and heads, in the tile's shape with one column."""
    if tile.shape.HEADS_INNER:
        token_exists = (tile.tokens < num_tokens - tile.first_token)[:, None, None]
        return token_exists & (tile.heads < num_heads - tile.first_head)[None, :, None]
    else:
        head_exists = (tile.heads < num_heads - tile.first_head)[:, None, None]
        return head_exists & (tile.tokens < num_tokens - tile.first_token)[None, :, None]


@record
class Positions:
    """The positions of a launch's tokens: position_ids, or cu_seqlens and the steps of a binary search in them."""

    ids_ptr: tl.tensor
    strides: tl.tuple
    cu_seqlens_ptr: tl.tensor
    num_sequences: tl.tensor
    search_steps: tl.tensor
    KIND: tl.constexpr


@triton.jit
def packed_positions(positions, tokens):
    """Find the position of every token in its own sequence; -1 after the last sequence."""
    low = tl.zeros_like(tokens)
    high = low + positions.num_sequences
    for _ in range(positions.search_steps):
        middle = (low + high + 1) // 2
        begun = tl.load(positions.cu_seqlens_ptr + middle) <= tokens
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    begin = tl.load(positions.cu_seqlens_ptr + low)
    tl.device_assert(tokens >= begin, "cu_seqlens must begin with 0 and never fall")
    return tl.where(low < positions.num_sequences, tokens - begin, -1)


@triton.jit
def load_token_angles(rotation, positions, BLOCK_PAIRS: tl.constexpr, KIND: tl.constexpr, HEADS_INNER: tl.constexpr):
    """Load cos and sin of every token's pairs, float32, with an axis of one head at the place of the tile's heads.

    A position without a row in the tables gives NaN. A token that belongs to no sequence has angle 0.
    """
    num_positions = rotation.num_positions
    cos, sin = load_angles(rotation, positions, 2 * BLOCK_PAIRS)
    if KIND == _IDS:
        cos = tl.where(((positions < 0) | (positions >= num_positions))[:, None], float("nan"), cos)
    elif KIND == _PACKED:
        cos = tl.where((positions >= num_positions)[:, None], float("nan"), cos)
    if HEADS_INNER:
        return cos[:, None, :], sin[:, None, :]
    else:
        return cos[None, :, :], sin[None, :, :]


@triton.jit
def second_columns(rotation):
    """Return full-width tables for the second members of pairs: they begin at its column."""
    # The column strides of an interleaved table skip every second column already.
    step: tl.constexpr = 1 if rotation.INTERLEAVED else rotation.R
    tables = rotation.tables
    cos_ptr = tables.cos_ptr + step * tables.cos_strides[2] // 2
    sin_ptr = tables.sin_ptr + step * tables.sin_strides[2] // 2
    return replace(rotation, tables=replace(tables, cos_ptr=cos_ptr, sin_ptr=sin_ptr))


@triton.jit
def locate_tile(shape, head_blocks, N):
    """Return (batch int64, block of tokens, block of heads) of this program; ``head_blocks``: of all tensors."""
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
    """Return the ``TokenTile`` of a block of heads from ``first_token`` on, and a section's pairs (BLOCK_PAIRS,)."""
    tokens, heads = tl.arange(0, shape.BLOCK_TOKENS), tl.arange(0, shape.BLOCK_HEADS)
    pairs = tl.arange(0, columns.BLOCK_PAIRS)
    first_head = head_block * shape.BLOCK_HEADS
    return TokenTile(first_token=first_token, first_head=first_head, tokens=tokens, heads=heads, shape=shape), pairs


@triton.jit
def tile_pointer(ptr, strides, batch, tile):
    """Return a pointer to column 0 of the first token and head of a tile, in a tensor with strides (B, H, N, D)."""
    head64, token64 = tl.cast(tile.first_head, tl.int64), tl.cast(tile.first_token, tl.int64)
    return ptr + batch * strides[0] + head64 * strides[1] + token64 * strides[2]


@triton.jit
def section_mask(exists, pairs, columns, pairing):
    """Return whether elements of a section exist. Its ``pairs`` may not fill its tile; exists: of the tile's rows."""
    R: tl.constexpr = pairing.R
    if 2 * columns.BLOCK_PAIRS == R:
        return exists
    elif pairing.INTERLEAVED:
        return exists & (tl.arange(0, 2 * columns.BLOCK_PAIRS) < R)[None, None, :]
    else:
        return exists & (pairs < R // 2)[None, None, :]


@record
class Sections:
    """A tensor's sections of the columns of one tile: ``ptr`` to column 0 of its first token and head."""

    ptr: tl.tensor
    strides: tl.tuple
    tile: TokenTile
    mask: tl.tensor  # of the elements of a section
    exists: tl.tensor  # of the tile's rows
    pairs: tl.tensor
    columns: Columns
    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@triton.jit
def load_section(sections, SECTION: tl.constexpr):
    """Load the operands of ``section_pairs``: all columns of a section twice, or its halves."""
    R: tl.constexpr = sections.R
    tile, strides, mask = sections.tile, sections.strides, sections.mask
    if sections.INTERLEAVED:
        offs_d = SECTION * R + tl.arange(0, 2 * sections.columns.BLOCK_PAIRS)
        x = tl.load(sections.ptr + tile_offsets(tile, offs_d, strides), mask=mask, other=0.0)
        return x, x
    else:
        offs_d = SECTION * R + sections.pairs
        x1 = sections.ptr + tile_offsets(tile, offs_d, strides)
        x2 = sections.ptr + tile_offsets(tile, offs_d + R // 2, strides)
        return tl.load(x1, mask=mask, other=0.0), tl.load(x2, mask=mask, other=0.0)


@triton.jit
def section_pairs(x1, x2, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return first and second members of a section's pairs, float32, from the results of ``load_section``."""
    if INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(x1, (x1.shape[0], x1.shape[1], BLOCK_PAIRS, 2)))
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def section_angles(angles, positions, columns, HEADS_INNER: tl.constexpr):
    """Load cos and sin of the first and of the second members of a section's pairs; positions (BLOCK_TOKENS,)."""
    # Both members of a pair have one angle, unless a full-width table has another one for the second member.
    cos1, sin1 = load_token_angles(angles.rotation, positions, columns.BLOCK_PAIRS, angles.KIND, HEADS_INNER)
    cos2, sin2 = cos1, sin1
    if angles.FULL_WIDTH:
        second = second_columns(angles.rotation)
        cos2, sin2 = load_token_angles(second, positions, columns.BLOCK_PAIRS, angles.KIND, HEADS_INNER)
    if angles.CONJUGATE:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1
    return cos1, sin1, cos2, sin2


@triton.jit
def rotate_section(x1, x2, angles, cos1, sin1, cos2, sin2):
    """Rotate pairs of a section by their ``section_angles``, float32."""
    x1_rot, _ = rotate(x1, x2, cos1, sin1, angles.CONJUGATE)
    _, x2_rot = rotate(x1, x2, cos2, sin2, angles.CONJUGATE)
    return x1_rot, x2_rot


@triton.jit
def store_section(sections, x1, x2, SECTION: tl.constexpr):
    """Write pairs back to their columns, rounded once; inverse of ``load_section`` and ``section_pairs``."""
    R: tl.constexpr = sections.R
    dtype = sections.ptr.dtype.element_ty
    tile, strides, mask = sections.tile, sections.strides, sections.mask
    if sections.INTERLEAVED:
        offs_d = SECTION * R + tl.arange(0, 2 * sections.columns.BLOCK_PAIRS)
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], x1.shape[1], 2 * sections.columns.BLOCK_PAIRS)).to(dtype)
        tl.store(sections.ptr + tile_offsets(tile, offs_d, strides), x, mask=mask)
    else:
        offs_d = SECTION * R + sections.pairs
        out1 = sections.ptr + tile_offsets(tile, offs_d, strides)
        out2 = sections.ptr + tile_offsets(tile, offs_d + R // 2, strides)
        tl.store(out1, x1.to(dtype), mask=mask)
        tl.store(out2, x2.to(dtype), mask=mask)


@triton.jit
def tail_columns(columns, R: tl.constexpr):
    """Return the columns after the sections, (BLOCK_TAIL,)."""
    return columns.SECTIONS * R + tl.arange(0, columns.BLOCK_TAIL)


@triton.jit
def token_positions(positions, batch, tokens, N, SECTION: tl.constexpr):
    """Return the table rows of a section of the ``tokens`` of a batch entry, of N tokens."""
    if positions.KIND == _IDS:
        ids = positions.ids_ptr + batch * positions.strides[0] + SECTION * positions.strides[1]
        return tl.load(ids + tokens.to(tl.int64) * positions.strides[2], mask=tokens < N, other=0)
    elif positions.KIND == _PACKED:
        return packed_positions(positions, tokens)
    else:
        return tokens


@record
class TokenBlock:
    """A program's block of tokens of one batch entry (int64), and how their heads are rotated."""

    shape: TileShape
    columns: Columns
    angles: Angles
    positions: Positions
    batch: tl.tensor
    first_token: tl.tensor


@triton.jit
def block_positions(block, num_tokens, SECTION: tl.constexpr):
    """Return the table rows of a section of a block's tokens, (BLOCK_TOKENS,)."""
    tokens = block.first_token + tl.arange(0, block.shape.BLOCK_TOKENS)
    return token_positions(block.positions, block.batch, tokens, num_tokens, SECTION)


@triton.jit
def sections_of(ptr, strides, tile, pairs, operand, block):
    """Return the ``Sections`` of a tile, with its ``pairs``, of a tensor of an ``operand``'s shape."""
    rotation = block.angles.rotation
    exists = existing_rows(tile, operand.num_tokens, operand.num_heads)
    mask = section_mask(exists, pairs, block.columns, rotation)
    return Sections(ptr, strides, tile, mask, exists, pairs, block.columns, rotation.R, rotation.INTERLEAVED)


@triton.jit
def rotate_tile(operand, block, head_block, positions, SECTION: tl.constexpr):
    """Rotate one section of heads number head_block of a ``TokenBlock``; section 0 also copies the tail.

    positions (BLOCK_TOKENS,) are the rows of the tables.
    """
    columns, angles = block.columns, block.angles
    HAS_TAIL: tl.constexpr = columns.COPY_TAIL and SECTION == 0
    tile, pairs = tile_at(block.shape, columns, block.first_token, head_block)
    x_ptr = tile_pointer(operand.x_ptr, operand.x_strides, block.batch, tile)
    out_ptr = tile_pointer(operand.out_ptr, operand.out_strides, block.batch, tile)
    x = sections_of(x_ptr, operand.x_strides, tile, pairs, operand, block)

    # All loads of x are issued before anything waits: an angle may have to change threads, which takes a barrier.
    x1, x2 = load_section(x, SECTION)
    if HAS_TAIL:
        offs_tail = tail_columns(columns, x.R)
        in_tail = x.exists & (offs_tail < columns.D)[None, None, :]
        tail = tl.load(x.ptr + tile_offsets(x.tile, offs_tail, x.strides), mask=in_tail)

    cos1, sin1, cos2, sin2 = section_angles(angles, positions, columns, block.shape.HEADS_INNER)
    x1, x2 = section_pairs(x1, x2, columns.BLOCK_PAIRS, x.INTERLEAVED)
    x1, x2 = rotate_section(x1, x2, angles, cos1, sin1, cos2, sin2)
    store_section(replace(x, ptr=out_ptr, strides=operand.out_strides), x1, x2, SECTION)
    if HAS_TAIL:
        tl.store(out_ptr + tile_offsets(x.tile, offs_tail, operand.out_strides), tail, mask=in_tail)
