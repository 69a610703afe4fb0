# mypy: ignore-errors
"""Rotation, or norm and rotation, in the caller's own layout of memory: up to three tensors (q, k, v) in one launch.

The attention kernels rotate queries and keys when they load them, in pair order. This kernel serves any layout of
memory, positions of every kind, norms, and the gradient of both with partial sums of the weights' gradients. Memory
bandwidth bounds it. A norm is over all D columns of a row and needs every section and the tail before it can rotate
any, so a program holds whole rows. A tensor without a weight, v for example, is only rotated.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.norm import inverse_rms, load_norm_weights, norm_gradient, row_sum, tree_sum
from fused_rope_attn.kernels.records import replace, unpack
from fused_rope_attn.kernels.rotation import head_rotation
from fused_rope_attn.rotation.tile import (
    from_tile,
    load_rows,
    locate_tile,
    rotate_section,
    section_angles,
    section_columns,
    section_pairs,
    store_section,
    store_tail,
    tail_columns,
    tile_at,
)


@triton.jit
def section_norm_weights(norm, tile, SECTION: tl.constexpr):
    """Load the norm's weights of the first and second members of a section's pairs, (1, 1, BLOCK_PAIRS) each."""
    columns1, columns2 = section_columns(tile, SECTION)
    exists = tl.arange(0, tile.shape.BLOCK_PAIRS) < tile.rotation.R // 2
    weight1, weight2 = load_norm_weights(norm, columns1, exists), load_norm_weights(norm, columns2, exists)
    return weight1[None, None, :], weight2[None, None, :]


@triton.jit
def tail_norm_weights(norm, tile):
    """Load the norm's weights of the columns after the sections, (1, 1, BLOCK_TAIL)."""
    columns, exists = tail_columns(tile)
    return load_norm_weights(norm, columns, exists)[None, None, :]


@triton.jit
def sum_columns(x):
    """Sum over the columns of a part (tokens, heads, C) as ``tree_sum`` does, (tokens, heads, 1)."""
    sums = tree_sum(tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
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
    return inverse_rms(square_sum, norm)


@triton.jit
def rotate_tile(operand, tile):
    """Norm a tile of a ``RotatedTensor``, if it has a norm, and rotate it."""
    norm = operand.norm
    # All loads of x are issued before anything waits: an angle may have to change threads, which takes a barrier.
    rows = load_rows(operand.x, tile)
    out = from_tile(operand.out, tile)
    if norm is not None:
        scale = inverse_rms_of_rows(rows, norm, tile)
    for section in tl.static_range(tile.shape.SECTIONS):
        angles = section_angles(tile, section)
        if norm is not None:
            weight1, weight2 = section_norm_weights(norm, tile, section)
        x1, x2 = section_pairs(rows, tile, section)
        # The order of ``kernels.rotation.norm_and_rotate``, for the same bits.
        if norm is not None:
            x1, x2 = x1 * weight1, x2 * weight2
        x1, x2 = rotate_section(x1, x2, angles, tile.angles.CONJUGATE)
        if norm is not None:
            x1, x2 = x1 * scale, x2 * scale
        store_section(out, tile, x1, x2, section)
    if tile.shape.COPY_TAIL:
        x = rows[2][0]
        if norm is not None:
            x = x.to(tl.float32) * tail_norm_weights(norm, tile) * scale
        store_tail(out, tile, x)


@triton.jit
def store_weight_gradient(partial_ptr, columns, exists, gradient):
    """Sum dweight (rows, rows, C) of a tile's rows, and write it to ``columns`` (C,) of a row of partial sums."""
    tl.store(partial_ptr + columns, tl.sum(tl.sum(gradient, 0), 0), mask=exists)


@triton.jit
def unrotate_tile(operand, tile, tile_index):
    """Write the gradient of ``rotate_tile`` with a norm; the angles of ``tile`` rotate back.

    The tile writes row ``tile_index`` (int64) of its partial sums.
    """
    norm = operand.norm
    rows, dy_rows = load_rows(operand.normed, tile), load_rows(operand.x, tile)
    scale = inverse_rms_of_rows(rows, norm, tile)
    if operand.partial_ptr is not None:
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
        if operand.partial_ptr is not None:
            columns1, columns2 = section_columns(tile, section)
            is_pair = tl.arange(0, tile.shape.BLOCK_PAIRS) < tile.rotation.R // 2
            store_weight_gradient(partial_ptr, columns1, is_pair, dy1 * n1)
            store_weight_gradient(partial_ptr, columns2, is_pair, dy2 * n2)
        weight1, weight2 = section_norm_weights(norm, tile, section)
        g1, g2 = dy1 * weight1, dy2 * weight2
        projection += row_sum(g1 * n1 + g2 * n2)
        g_firsts, g_seconds = g_firsts + (g1,), g_seconds + (g2,)
        n_firsts, n_seconds = n_firsts + (n1,), n_seconds + (n2,)
    if tile.shape.COPY_TAIL:
        n, dy = rows[2][0].to(tl.float32) * scale, dy_rows[2][0].to(tl.float32)
        if operand.partial_ptr is not None:
            columns, exists = tail_columns(tile)
            store_weight_gradient(partial_ptr, columns, exists, dy * n)
        g = dy * tail_norm_weights(norm, tile)
        projection += row_sum(g * n)

    if operand.out is not None:
        dx = from_tile(operand.out, tile)
        for section in tl.static_range(tile.shape.SECTIONS):
            dx1 = norm_gradient(g_firsts[section], n_firsts[section], projection, scale, norm)
            dx2 = norm_gradient(g_seconds[section], n_seconds[section], projection, scale, norm)
            store_section(dx, tile, dx1, dx2, section)
        if tile.shape.COPY_TAIL:
            store_tail(dx, tile, norm_gradient(g, n, projection, scale, norm))


@triton.jit
def process_tile(operand, batch, token_block, head_block, num_tokens, num_heads, rotation, angles, shape):
    """Rotate one tile of a ``RotatedTensor``, or write the gradient of its norm and rotation."""
    tile = tile_at(batch, token_block, head_block, num_tokens, num_heads, rotation, angles, shape)
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
    batch, token_block, head_block = locate_tile(shape, head_blocks, N)
    rotation = head_rotation(angles.tables, batch, num_positions)
    if H1 is None or head_block < first1:
        process_tile(tensor0, batch, token_block, head_block, N, H0, rotation, angles, shape)
    elif H2 is None or head_block < first2:
        process_tile(tensor1, batch, token_block, head_block - first1, N, H1, rotation, angles, shape)
    else:
        process_tile(tensor2, batch, token_block, head_block - first2, N, H2, rotation, angles, shape)
