# mypy: ignore-errors
"""Rotation, or norm and rotation, in the caller's own layout of memory: up to three tensors (q, k, v) in one launch.

The attention kernels rotate queries and keys when they load them, in pair order. This kernel serves any layout of
memory, positions of every kind, norms, and the gradient of both with partial sums of the weights' gradients. Memory
bandwidth bounds it: a program holds one tile of tokens by heads, loads the whole tile before it computes or stores
anything, and reads the angles of its tokens once for all of its heads. A norm is over all D columns of a row and needs
every section and the tail before it can rotate any, so a program holds whole rows. A tensor without a weight, v for
example, is only rotated.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import norm as norms, rotation as rotations
from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.kernels.tiles import TensorView


@record
class RotatedTensor:
    """One tensor (B, H, N, D) of a launch and the tensor that receives it rotated; strides are those of B, H, N and D.

    norm: of the rows before they are rotated, or None. With ``normed``, the input of the norm, the launch is backward:
    x holds gradients dy of the results, out receives dx, and partial_ptr (tiles of this tensor, D) float32 each tile's
    part of dweight.
    """

    x: TensorView
    out: TensorView
    norm: norms.Norm | None
    normed: TensorView | None
    partial_ptr: tl.tensor | None


@record
class TileShape:
    """The tokens and heads of one tile, their order in memory, and their columns.

    A tile has shape (BLOCK_TOKENS, BLOCK_HEADS, columns) with HEADS_INNER, if the heads of a token are closer to each
    other in memory than the tokens of a head, and (BLOCK_HEADS, BLOCK_TOKENS, columns) otherwise. The D columns are
    SECTIONS sections, each rotated by positions of its own, and the tail, which COPY_TAIL copies. BLOCK_PAIRS, a power
    of two, is at least the pairs of a section, and BLOCK_TAIL at least the columns of the tail.
    """

    BLOCK_TOKENS: tl.constexpr
    BLOCK_HEADS: tl.constexpr
    HEADS_INNER: tl.constexpr
    USE_INT64_OFFSETS: tl.constexpr  # an offset within one tile can pass 2**31
    D: tl.constexpr
    SECTIONS: tl.constexpr
    BLOCK_PAIRS: tl.constexpr
    BLOCK_TAIL: tl.constexpr
    COPY_TAIL: tl.constexpr


@record
class Angles:
    """The source of angles: the tables, with rows of R columns for each section, and the positions that find a row.

    ids_ptr: position_ids (1|B, SECTIONS, N), int32 or int64. cu_seqlens_ptr: the first tokens of packed sequences,
    found in ``search_steps`` steps. Without both a token's position is its index. FULL_WIDTH tables hold an angle for
    each column, others one for each pair. CONJUGATE rotates by negative angles.
    """

    tables: rotations.RotaryTables
    ids_ptr: tl.tensor | None
    ids_strides: tl.tuple | None
    cu_seqlens_ptr: tl.tensor | None
    num_sequences: tl.tensor | None
    search_steps: tl.tensor | None
    FULL_WIDTH: tl.constexpr
    CONJUGATE: tl.constexpr


@record
class Tile:
    """One tile of a tensor: its first token and head, and tokens (BLOCK_TOKENS,) and heads (BLOCK_HEADS,) from there.

    exists (of rows) has the tile's shape with one column, mask (of elements) with a section's columns; tail_columns and
    tail_exists are (BLOCK_TAIL,); positions holds the rows of the tables (BLOCK_TOKENS,) for each section.
    """

    batch: tl.tensor  # int64
    first_token: tl.tensor
    first_head: tl.tensor
    tokens: tl.tensor
    heads: tl.tensor
    exists: tl.tensor
    mask: tl.tensor
    tail_columns: tl.tensor
    tail_exists: tl.tensor
    positions: tl.tuple
    rotation: rotations.Rotation
    angles: Angles
    shape: TileShape


@triton.jit
def as_rows(of_tokens, of_heads, HEADS_INNER: tl.constexpr):
    """Expand (BLOCK_TOKENS,) and (BLOCK_HEADS,) to the axes of a tile, with one column."""
    if HEADS_INNER:
        return of_tokens[:, None, None], of_heads[None, :, None]
    else:
        return of_tokens[None, :, None], of_heads[:, None, None]


@triton.jit
def token_positions(angles, batch, tokens, N, SECTION: tl.constexpr):
    """Return the table rows of a section of the ``tokens`` of a batch entry, of N tokens.

    Packed tokens have positions in their own sequences, and -1 after the last one.
    """
    if angles.ids_ptr is not None:
        ids = angles.ids_ptr + batch * angles.ids_strides[0] + SECTION * angles.ids_strides[1]
        return tl.load(ids + tokens.to(tl.int64) * angles.ids_strides[2], mask=tokens < N, other=0)
    elif angles.cu_seqlens_ptr is None:
        return tokens
    else:
        low = tl.zeros_like(tokens)
        high = low + angles.num_sequences
        for _ in range(angles.search_steps):
            middle = (low + high + 1) // 2
            begun = tl.load(angles.cu_seqlens_ptr + middle) <= tokens
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, middle - 1)
        begin = tl.load(angles.cu_seqlens_ptr + low)
        tl.device_assert(tokens >= begin, "cu_seqlens must begin with 0 and never fall")
        return tl.where(low < angles.num_sequences, tokens - begin, -1)


@triton.jit
def load_token_angles(tile, rotation, positions):
    """Load cos and sin of every token's pairs, float32, with an axis of one head at the place of the tile's heads.

    A position without a row in the tables gives NaN. A token that belongs to no sequence has angle 0.
    """
    found = rotations.load_angles(rotation, positions, 2 * tile.shape.BLOCK_PAIRS)
    cos, sin = found.cos, found.sin
    if tile.angles.ids_ptr is not None:
        cos = tl.where(((positions < 0) | (positions >= rotation.num_positions))[:, None], float("nan"), cos)
    elif tile.angles.cu_seqlens_ptr is not None:
        cos = tl.where((positions >= rotation.num_positions)[:, None], float("nan"), cos)
    if tile.shape.HEADS_INNER:
        return cos[:, None, :], sin[:, None, :]
    else:
        return cos[None, :, :], sin[None, :, :]


@triton.jit
def section_angles(tile, SECTION: tl.constexpr):
    """Load cos and sin of the first and of the second members of a section's pairs."""
    rotation, positions = tile.rotation, tile.positions[SECTION]
    cos1, sin1 = load_token_angles(tile, rotation, positions)
    # Both members of a pair have one angle, unless a full-width table has another one for the second member.
    cos2, sin2 = cos1, sin1
    if tile.angles.FULL_WIDTH:
        # The column strides of an interleaved table skip every second column already.
        step: tl.constexpr = 1 if rotation.INTERLEAVED else rotation.R
        tables = rotation.tables
        cos_ptr = tables.cos_ptr + step * tables.cos_strides[2] // 2
        sin_ptr = tables.sin_ptr + step * tables.sin_strides[2] // 2
        second = replace(rotation, tables=replace(tables, cos_ptr=cos_ptr, sin_ptr=sin_ptr))
        cos2, sin2 = load_token_angles(tile, second, positions)
    if tile.angles.CONJUGATE:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1
    return cos1, sin1, cos2, sin2


@triton.jit
def rotate_section(x1, x2, angles, CONJUGATE: tl.constexpr):
    """Rotate pairs of a section by their ``section_angles``, float32."""
    cos1, sin1, cos2, sin2 = angles
    x1_rot, _ = rotations.rotate(x1, x2, cos1, sin1, CONJUGATE)
    _, x2_rot = rotations.rotate(x1, x2, cos2, sin2, CONJUGATE)
    return x1_rot, x2_rot


@triton.jit
def column_pointers(view, tile, columns):
    """Return pointers to ``columns`` (C,) of a tile of a ``TensorView``, in its shape."""
    tokens, heads, strides = tile.tokens, tile.heads, view.strides
    ptr = view.ptr + tile.batch * strides[0]
    ptr += tl.cast(tile.first_head, tl.int64) * strides[1] + tl.cast(tile.first_token, tl.int64) * strides[2]
    if tile.shape.USE_INT64_OFFSETS:
        tokens, heads, columns = tokens.to(tl.int64), heads.to(tl.int64), columns.to(tl.int64)
    tokens, heads = as_rows(tokens, heads, tile.shape.HEADS_INNER)
    return ptr + (tokens * strides[2] + heads * strides[1] + columns[None, None, :] * strides[3])


@triton.jit
def section_columns(tile, SECTION: tl.constexpr):
    """Return the columns of the first and second members of a section's pairs, and which exist, (BLOCK_PAIRS,) each."""
    pairs, R = tl.arange(0, tile.shape.BLOCK_PAIRS), tile.rotation.R
    if tile.rotation.INTERLEAVED:
        return SECTION * R + 2 * pairs, SECTION * R + 2 * pairs + 1, pairs < R // 2
    else:
        return SECTION * R + pairs, SECTION * R + pairs + R // 2, pairs < R // 2


@triton.jit
def load_rows(view, tile):
    """Load whole rows of a tile in the memory's dtype; elements that do not exist are zero.

    Return a tuple of each section's first members, and one of its second members: of all its columns twice if they are
    interleaved, which ``section_pairs`` splits. A third tuple holds the tail, if COPY_TAIL.
    """
    firsts, seconds, tail = (), (), ()
    for section in tl.static_range(tile.shape.SECTIONS):
        if tile.rotation.INTERLEAVED:
            columns = section * tile.rotation.R + tl.arange(0, 2 * tile.shape.BLOCK_PAIRS)
            first = tl.load(column_pointers(view, tile, columns), mask=tile.mask, other=0.0)
            second = first
        else:
            columns1, columns2, _ = section_columns(tile, section)
            first = tl.load(column_pointers(view, tile, columns1), mask=tile.mask, other=0.0)
            second = tl.load(column_pointers(view, tile, columns2), mask=tile.mask, other=0.0)
        firsts, seconds = firsts + (first,), seconds + (second,)
    if tile.shape.COPY_TAIL:
        mask = tile.exists & tile.tail_exists[None, None, :]
        tail = (tl.load(column_pointers(view, tile, tile.tail_columns), mask=mask, other=0.0),)
    return firsts, seconds, tail


@triton.jit
def section_pairs(rows, tile, SECTION: tl.constexpr):
    """Return first and second members of a section's pairs, float32, from the result of ``load_rows``."""
    x1, x2 = rows[0][SECTION], rows[1][SECTION]
    if tile.rotation.INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(x1, (x1.shape[0], x1.shape[1], tile.shape.BLOCK_PAIRS, 2)))
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def store_section(view, tile, x1, x2, SECTION: tl.constexpr):
    """Write pairs back to their columns, rounded once."""
    dtype = view.ptr.dtype.element_ty
    if tile.rotation.INTERLEAVED:
        columns = SECTION * tile.rotation.R + tl.arange(0, 2 * tile.shape.BLOCK_PAIRS)
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], x1.shape[1], 2 * tile.shape.BLOCK_PAIRS)).to(dtype)
        tl.store(column_pointers(view, tile, columns), x, mask=tile.mask)
    else:
        columns1, columns2, _ = section_columns(tile, SECTION)
        tl.store(column_pointers(view, tile, columns1), x1.to(dtype), mask=tile.mask)
        tl.store(column_pointers(view, tile, columns2), x2.to(dtype), mask=tile.mask)


@triton.jit
def store_tail(view, tile, x):
    """Write the columns after the sections, rounded once."""
    mask = tile.exists & tile.tail_exists[None, None, :]
    tl.store(column_pointers(view, tile, tile.tail_columns), x.to(view.ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_columns(x):
    """Sum over the columns of a part (tokens, heads, C) as ``tree_sum`` does, (tokens, heads, 1)."""
    sums = norms.tree_sum(tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
    return tl.reshape(sums, (x.shape[0], x.shape[1], 1))


@triton.jit
def inverse_rms_of_rows(rows, norm, tile):
    """Return ``inverse_rms`` of the result of ``load_rows``, with one column."""
    square_sum = 0.0
    for section in tl.static_range(tile.shape.SECTIONS):
        x1, x2 = section_pairs(rows, tile, section)
        square_sum += sum_columns(tl.math.fma(x1, x1, x2 * x2))
    if tile.shape.COPY_TAIL:
        x = rows[2][0].to(tl.float32)
        square_sum += sum_columns(x * x)
    return norms.inverse_rms(square_sum, norm)


@triton.jit
def rotate_tile(operand, tile):
    """Norm a tile of a ``RotatedTensor``, if it has a norm, and rotate it."""
    norm = operand.norm
    # All loads of x are issued before anything waits: an angle may have to change threads, which takes a barrier.
    rows = load_rows(operand.x, tile)
    if norm is not None:
        scale = inverse_rms_of_rows(rows, norm, tile)
    for section in tl.static_range(tile.shape.SECTIONS):
        angles = section_angles(tile, section)
        if norm is not None:
            columns1, columns2, exists = section_columns(tile, section)
            weight1 = norms.load_norm_weights(norm, columns1, exists)[None, None, :]
            weight2 = norms.load_norm_weights(norm, columns2, exists)[None, None, :]
        x1, x2 = section_pairs(rows, tile, section)
        # The order of ``kernels.rotation.norm_and_rotate``, for the same bits.
        if norm is not None:
            x1, x2 = x1 * weight1, x2 * weight2
        x1, x2 = rotate_section(x1, x2, angles, tile.angles.CONJUGATE)
        if norm is not None:
            x1, x2 = x1 * scale, x2 * scale
        store_section(operand.out, tile, x1, x2, section)
    if tile.shape.COPY_TAIL:
        x = rows[2][0]
        if norm is not None:
            weight = norms.load_norm_weights(norm, tile.tail_columns, tile.tail_exists)
            x = x.to(tl.float32) * weight[None, None, :] * scale
        store_tail(operand.out, tile, x)


@triton.jit
def unrotate_tile(operand, tile, tile_index):
    """Write the gradient of ``rotate_tile`` with a norm; the angles of ``tile`` rotate back.

    The tile writes row ``tile_index`` (int64) of its partial sums.
    """
    norm = operand.norm
    rows, dy_rows = load_rows(operand.normed, tile), load_rows(operand.x, tile)
    scale = inverse_rms_of_rows(rows, norm, tile)
    partial_ptr = operand.partial_ptr + tile_index * tile.shape.D

    # dy times the weights, and the normed rows: their projection needs all columns.
    g_firsts, g_seconds, n_firsts, n_seconds = (), (), (), ()
    projection = 0.0
    for section in tl.static_range(tile.shape.SECTIONS):
        angles = section_angles(tile, section)
        dy1, dy2 = section_pairs(dy_rows, tile, section)
        dy1, dy2 = rotate_section(dy1, dy2, angles, tile.angles.CONJUGATE)
        # A token that does not exist may have an angle that is NaN.
        dy1, dy2 = tl.where(tile.exists, dy1, 0.0), tl.where(tile.exists, dy2, 0.0)
        x1, x2 = section_pairs(rows, tile, section)
        n1, n2 = x1 * scale, x2 * scale
        columns1, columns2, exists = section_columns(tile, section)
        tl.store(partial_ptr + columns1, tl.sum(tl.sum(dy1 * n1, 0), 0), mask=exists)
        tl.store(partial_ptr + columns2, tl.sum(tl.sum(dy2 * n2, 0), 0), mask=exists)
        g1 = dy1 * norms.load_norm_weights(norm, columns1, exists)[None, None, :]
        g2 = dy2 * norms.load_norm_weights(norm, columns2, exists)[None, None, :]
        projection += norms.row_sum(g1 * n1 + g2 * n2)
        g_firsts, g_seconds = g_firsts + (g1,), g_seconds + (g2,)
        n_firsts, n_seconds = n_firsts + (n1,), n_seconds + (n2,)
    if tile.shape.COPY_TAIL:
        n, dy = rows[2][0].to(tl.float32) * scale, dy_rows[2][0].to(tl.float32)
        tl.store(partial_ptr + tile.tail_columns, tl.sum(tl.sum(dy * n, 0), 0), mask=tile.tail_exists)
        g = dy * norms.load_norm_weights(norm, tile.tail_columns, tile.tail_exists)[None, None, :]
        projection += norms.row_sum(g * n)

    for section in tl.static_range(tile.shape.SECTIONS):
        dx1 = norms.norm_gradient(g_firsts[section], n_firsts[section], projection, scale, norm)
        dx2 = norms.norm_gradient(g_seconds[section], n_seconds[section], projection, scale, norm)
        store_section(operand.out, tile, dx1, dx2, section)
    if tile.shape.COPY_TAIL:
        store_tail(operand.out, tile, norms.norm_gradient(g, n, projection, scale, norm))


@triton.jit
def process_tile(operand, batch, token_block, head_block, num_tokens, num_heads, rotation, angles, shape):
    """Rotate one tile of a ``RotatedTensor`` (num_tokens, num_heads), or write the gradient of its norm and rotation.

    It is the tile of these blocks in the batch entry.
    """
    first_token, first_head = token_block * shape.BLOCK_TOKENS, head_block * shape.BLOCK_HEADS
    tokens, heads = tl.arange(0, shape.BLOCK_TOKENS), tl.arange(0, shape.BLOCK_HEADS)
    rows_exist = as_rows(tokens < num_tokens - first_token, heads < num_heads - first_head, shape.HEADS_INNER)
    exists = rows_exist[0] & rows_exist[1]
    mask = exists
    if 2 * shape.BLOCK_PAIRS != rotation.R:
        MEMBERS: tl.constexpr = 2 if rotation.INTERLEAVED else 1
        mask = exists & (tl.arange(0, MEMBERS * shape.BLOCK_PAIRS) < MEMBERS * rotation.R // 2)[None, None, :]
    positions = ()
    for section in tl.static_range(shape.SECTIONS):
        positions = positions + (token_positions(angles, batch, first_token + tokens, num_tokens, section),)
    tail = shape.SECTIONS * rotation.R + tl.arange(0, shape.BLOCK_TAIL)
    of_rows = batch, first_token, first_head, tokens, heads, exists
    tile = Tile(*of_rows, mask, tail, tail < shape.D, positions, rotation, angles, shape)
    if operand.normed is None:
        rotate_tile(operand, tile)
    else:
        blocks_before = batch * tl.cdiv(num_tokens, shape.BLOCK_TOKENS) + token_block
        unrotate_tile(operand, tile, blocks_before * tl.cdiv(num_heads, shape.BLOCK_HEADS) + head_block)


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "num_positions", "num_sequences", "search_steps"])
def rotation_kernel(
    tensor0, tensor1, tensor2, angles, H0, H1, H2, N, num_positions, num_sequences, search_steps, shape
):  # fmt: skip
    """Rotate up to three ``RotatedTensor``s of one dtype, with H0, H1 and H2 heads; None: the call has fewer. Grid:
    (blocks of tokens * blocks of heads of all tensors * B,), neighbours in memory next to each other.

    angles: ``Angles`` without their numbers, with tables of num_positions rows; in a backward launch CONJUGATE is the
    opposite of the forward call's. shape: ``TileShape``.
    """
    tensor0, tensor1, tensor2, angles, shape = unpack((tensor0, tensor1, tensor2, angles, shape))
    angles = replace(angles, num_sequences=num_sequences, search_steps=search_steps)
    first1 = tl.cdiv(H0, shape.BLOCK_HEADS)
    first2 = first1 + (tl.cdiv(H1, shape.BLOCK_HEADS) if H1 is not None else 0)
    head_blocks = first2 + (tl.cdiv(H2, shape.BLOCK_HEADS) if H2 is not None else 0)
    token_blocks = tl.cdiv(N, shape.BLOCK_TOKENS)
    pid = tl.program_id(0)
    if shape.HEADS_INNER:
        head_block = pid % head_blocks
        token_block = (pid // head_blocks) % token_blocks
    else:
        token_block = pid % token_blocks
        head_block = (pid // token_blocks) % head_blocks
    batch = (pid // (token_blocks * head_blocks)).to(tl.int64)
    rotation = rotations.head_rotation(angles.tables, batch, num_positions)
    if H1 is None or head_block < first1:
        process_tile(tensor0, batch, token_block, head_block, N, H0, rotation, angles, shape)
    elif H2 is None or head_block < first2:
        process_tile(tensor1, batch, token_block, head_block - first1, N, H1, rotation, angles, shape)
    else:
        process_tile(tensor2, batch, token_block, head_block - first2, N, H2, rotation, angles, shape)
