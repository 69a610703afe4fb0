# mypy: ignore-errors
"""Norm and rotation in one pass over the heads: forward, and backward with partial sums of the weights' gradients.

The rotation is that of ``kernel.py``. A norm is over all D columns of a row and so needs every section and the tail
before it can rotate any: a program holds whole rows. A tensor without a weight (v, in a call that has one) is rotated
only.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.norm import Norm, inverse_rms, load_norm_weights, norm_gradient, row_sum, tree_sum
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import head_rotation
from fused_rope_attn.rotation.tile import (
    Angles,
    Columns,
    Operand,
    TileShape,
    existing_rows,
    load_section,
    locate_tile,
    rotate_section,
    rotate_tile,
    section_angles,
    section_mask,
    section_pairs,
    store_section,
    tail_columns,
    tile_at,
    tile_offsets,
    tile_pointer,
    token_positions,
)


@record
class Positions:
    """Where the positions of a launch's tokens come from, as ``token_positions`` takes it."""

    positions_ptr: tl.tensor
    strides: tl.tuple
    cu_seqlens_ptr: tl.tensor
    num_sequences: tl.tensor
    search_steps: tl.tensor


@record
class Normed:
    """What a tensor (B, H, N, D) that is normed has beside its ``Operand``.

    weight_ptr: None where it is rotated only. Of a backward launch x_ptr, the input of the norm; of a forward one None.
    partial_ptr: (tiles of the tensor, D) float32 for sums of the weight's gradient; None where it is not wanted.
    """

    weight_ptr: tl.tensor | None
    x_ptr: tl.tensor | None
    x_strides: tl.tuple
    partial_ptr: tl.tensor | None


@triton.jit
def section_columns(columns, R: tl.constexpr, INTERLEAVED: tl.constexpr, SECTION: tl.constexpr):
    """Columns of the first and second members of a section's pairs, and which pairs exist, (BLOCK_PAIRS,) each."""
    pairs = tl.arange(0, columns.BLOCK_PAIRS)
    if INTERLEAVED:
        return SECTION * R + 2 * pairs, SECTION * R + 2 * pairs + 1, pairs < R // 2
    else:
        return SECTION * R + pairs, SECTION * R + pairs + R // 2, pairs < R // 2


@triton.jit
def section_norm_weights(norm, columns, R: tl.constexpr, INTERLEAVED: tl.constexpr, SECTION: tl.constexpr):
    """``load_norm_weights`` of the first and second members of a section's pairs, (1, 1, BLOCK_PAIRS) each."""
    columns1, columns2, exists = section_columns(columns, R, INTERLEAVED, SECTION)
    weight1, weight2 = load_norm_weights(norm, columns1, exists), load_norm_weights(norm, columns2, exists)
    return weight1[None, None, :], weight2[None, None, :]


@triton.jit
def tail_norm_weights(norm, columns, R: tl.constexpr):
    """``load_norm_weights`` of the columns behind the sections, (1, 1, BLOCK_TAIL)."""
    offs_tail = tail_columns(columns, R)
    return load_norm_weights(norm, offs_tail, offs_tail < columns.D)[None, None, :]


@triton.jit
def load_tail(ptr, strides, tile, exists, columns, R: tl.constexpr):
    """The columns behind the sections, as they lie in memory; what does not exist is zero."""
    offs_tail = tail_columns(columns, R)
    mask = exists & (offs_tail < columns.D)[None, None, :]
    return tl.load(ptr + tile_offsets(tile, offs_tail, strides), mask=mask, other=0.0)


@triton.jit
def store_tail(ptr, strides, tile, exists, columns, x, R: tl.constexpr):
    """Inverse of ``load_tail``, rounding once."""
    offs_tail = tail_columns(columns, R)
    mask = exists & (offs_tail < columns.D)[None, None, :]
    tl.store(ptr + tile_offsets(tile, offs_tail, strides), x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def positions_of(positions, batch, first_token, num_tokens, shape, POSITIONS: tl.constexpr, SECTION: tl.constexpr):
    """``token_positions`` of a tile's tokens."""
    return token_positions(
        positions.positions_ptr, positions.strides, positions.cu_seqlens_ptr, positions.num_sequences,
        positions.search_steps, batch, first_token + tl.arange(0, shape.BLOCK_TOKENS), num_tokens, POSITIONS, SECTION,
    )  # fmt: skip


@triton.jit
def load_row_parts(ptr, strides, tile, exists, mask, pairs, columns, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Whole rows of a tile as they lie in memory: ``load_section`` of all sections, as two tuples, and a third
    with the tail, where there is one."""
    firsts, seconds = (), ()
    for section in tl.static_range(columns.SECTIONS):
        first, second = load_section(ptr, strides, tile, mask, pairs, columns, R, INTERLEAVED, section)
        firsts, seconds = firsts + (first,), seconds + (second,)
    if columns.COPY_TAIL:
        return firsts, seconds, (load_tail(ptr, strides, tile, exists, columns, R),)
    else:
        return firsts, seconds, ()


@triton.jit
def sum_columns(x):
    """``tree_sum`` over the columns of a part (tokens, heads, C), as (tokens, heads, 1)."""
    sums = tree_sum(tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
    return tl.reshape(sums, (x.shape[0], x.shape[1], 1))


@triton.jit
def inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED: tl.constexpr):
    """``inverse_rms`` of whole rows, of what ``load_row_parts`` gives, with one column."""
    square_sum = 0.0
    for section in tl.static_range(columns.SECTIONS):
        x1, x2 = section_pairs(firsts[section], seconds[section], columns.BLOCK_PAIRS, INTERLEAVED)
        square_sum += sum_columns(tl.math.fma(x1, x1, x2 * x2))
    if columns.COPY_TAIL:
        x = tail[0].to(tl.float32)
        square_sum += sum_columns(x * x)
    return inverse_rms(square_sum, norm)


@triton.jit
def norm_rotate_tile(operand, norm, shape, batch, first_token, head_block, columns, angles, positions):
    """Norm and rotate the tile at (batch, head_block * BLOCK_HEADS, first_token)."""
    R: tl.constexpr = angles.rotation.R
    INTERLEAVED: tl.constexpr = angles.rotation.INTERLEAVED
    tile, pairs = tile_at(shape, columns, first_token, head_block)
    x_ptr = tile_pointer(operand.x_ptr, operand.x_strides, batch, tile)
    out_ptr = tile_pointer(operand.out_ptr, operand.out_strides, batch, tile)
    exists = existing_rows(tile, operand.num_tokens, operand.num_heads)
    mask = section_mask(exists, pairs, columns, R, INTERLEAVED)
    firsts, seconds, tail = load_row_parts(x_ptr, operand.x_strides, tile, exists, mask, pairs, columns, R, INTERLEAVED)
    scale = inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED)

    for section in tl.static_range(columns.SECTIONS):
        rows = positions_of(positions, batch, first_token, operand.num_tokens, shape, angles.POSITIONS, section)
        cos1, sin1, cos2, sin2 = section_angles(angles, rows, columns, shape.HEADS_INNER)
        weight1, weight2 = section_norm_weights(norm, columns, R, INTERLEAVED, section)
        x1, x2 = section_pairs(firsts[section], seconds[section], columns.BLOCK_PAIRS, INTERLEAVED)
        # The order of ``kernels.rotation.norm_and_rotate``, for the same bits.
        x1, x2 = rotate_section(x1 * weight1, x2 * weight2, angles, cos1, sin1, cos2, sin2)
        x1, x2 = x1 * scale, x2 * scale
        store_section(out_ptr, operand.out_strides, tile, mask, pairs, columns, x1, x2, R, INTERLEAVED, section)
    if columns.COPY_TAIL:
        x = tail[0].to(tl.float32) * tail_norm_weights(norm, columns, R) * scale
        store_tail(out_ptr, operand.out_strides, tile, exists, columns, x, R)


@triton.jit
def store_weight_gradient(partial_ptr, columns, exists, gradient):
    """Sum dweight (rows, rows, C) of a tile's rows, and write it to ``columns`` (C,) of a row of partial sums."""
    tl.store(partial_ptr + columns, tl.sum(tl.sum(gradient, 0), 0), mask=exists)


@triton.jit
def norm_unrotate_tile(operand, norm, normed, tile_index, shape, batch, first_token, head_block, columns, angles,
                       positions):  # fmt: skip
    """The gradient of ``norm_rotate_tile``: ``operand`` holds dy, and dx as its out; ``angles`` turn back.

    normed: the ``Normed`` of this tensor, of whose partial sums the tile writes row ``tile_index`` (int64).
    """
    R: tl.constexpr = angles.rotation.R
    INTERLEAVED: tl.constexpr = angles.rotation.INTERLEAVED
    BLOCK_PAIRS: tl.constexpr = columns.BLOCK_PAIRS
    tile, pairs = tile_at(shape, columns, first_token, head_block)
    x_ptr = tile_pointer(normed.x_ptr, normed.x_strides, batch, tile)
    dy_ptr = tile_pointer(operand.x_ptr, operand.x_strides, batch, tile)
    exists = existing_rows(tile, operand.num_tokens, operand.num_heads)
    mask = section_mask(exists, pairs, columns, R, INTERLEAVED)
    firsts, seconds, tail = load_row_parts(x_ptr, normed.x_strides, tile, exists, mask, pairs, columns, R, INTERLEAVED)
    dy_firsts, dy_seconds, dy_tail = load_row_parts(
        dy_ptr, operand.x_strides, tile, exists, mask, pairs, columns, R, INTERLEAVED
    )
    scale = inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED)
    if normed.partial_ptr is not None:
        partial_ptr = normed.partial_ptr + tile_index * columns.D

    # dy times the weights, and the normed rows: their projection needs all columns.
    g_firsts, g_seconds, n_firsts, n_seconds = (), (), (), ()
    projection = 0.0
    for section in tl.static_range(columns.SECTIONS):
        rows = positions_of(positions, batch, first_token, operand.num_tokens, shape, angles.POSITIONS, section)
        cos1, sin1, cos2, sin2 = section_angles(angles, rows, columns, shape.HEADS_INNER)
        dy1, dy2 = section_pairs(dy_firsts[section], dy_seconds[section], BLOCK_PAIRS, INTERLEAVED)
        dy1, dy2 = rotate_section(dy1, dy2, angles, cos1, sin1, cos2, sin2)
        # A token that does not exist may have an angle that is NaN.
        dy1, dy2 = tl.where(exists, dy1, 0.0), tl.where(exists, dy2, 0.0)
        x1, x2 = section_pairs(firsts[section], seconds[section], BLOCK_PAIRS, INTERLEAVED)
        n1, n2 = x1 * scale, x2 * scale
        if normed.partial_ptr is not None:
            columns1, columns2, is_pair = section_columns(columns, R, INTERLEAVED, section)
            store_weight_gradient(partial_ptr, columns1, is_pair, dy1 * n1)
            store_weight_gradient(partial_ptr, columns2, is_pair, dy2 * n2)
        weight1, weight2 = section_norm_weights(norm, columns, R, INTERLEAVED, section)
        g1, g2 = dy1 * weight1, dy2 * weight2
        projection += row_sum(g1 * n1 + g2 * n2)
        g_firsts, g_seconds = g_firsts + (g1,), g_seconds + (g2,)
        n_firsts, n_seconds = n_firsts + (n1,), n_seconds + (n2,)
    if columns.COPY_TAIL:
        n = tail[0].to(tl.float32) * scale
        dy = dy_tail[0].to(tl.float32)
        if normed.partial_ptr is not None:
            offs_tail = tail_columns(columns, R)
            store_weight_gradient(partial_ptr, offs_tail, offs_tail < columns.D, dy * n)
        g = dy * tail_norm_weights(norm, columns, R)
        projection += row_sum(g * n)

    if operand.out_ptr is not None:
        dx_ptr = tile_pointer(operand.out_ptr, operand.out_strides, batch, tile)
        for section in tl.static_range(columns.SECTIONS):
            dx1 = norm_gradient(g_firsts[section], n_firsts[section], projection, scale, norm)
            dx2 = norm_gradient(g_seconds[section], n_seconds[section], projection, scale, norm)
            store_section(dx_ptr, operand.out_strides, tile, mask, pairs, columns, dx1, dx2, R, INTERLEAVED, section)
        if columns.COPY_TAIL:
            dx = norm_gradient(g, n, projection, scale, norm)
            store_tail(dx_ptr, operand.out_strides, tile, exists, columns, dx, R)


@triton.jit
def turn_tile(operand, normed, eps, offset, tile_index, shape, batch, first_token, head_block, columns, angles,
              positions):  # fmt: skip
    """Norm and rotate a tile, or its gradient, or rotate it only: ``normed`` says which."""
    if normed.weight_ptr is None:
        for section in tl.static_range(columns.SECTIONS):
            rows = positions_of(positions, batch, first_token, operand.num_tokens, shape, angles.POSITIONS, section)
            rotate_tile(operand, shape, batch, first_token, head_block, columns, angles, rows, section)
    else:
        norm = Norm(weight_ptr=normed.weight_ptr, eps=eps, offset=offset, D=columns.D)
        if normed.x_ptr is None:
            norm_rotate_tile(operand, norm, shape, batch, first_token, head_block, columns, angles, positions)
        else:
            norm_unrotate_tile(
                operand, norm, normed, tile_index, shape, batch, first_token, head_block, columns, angles, positions
            )


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "S", "num_sequences", "search_steps"])
def norm_rotation_kernel(x0_ptr, x1_ptr, x2_ptr, out0_ptr, out1_ptr, out2_ptr, weight0_ptr, weight1_ptr, normed0_ptr,
                         normed1_ptr, partial0_ptr, partial1_ptr, cos_ptr, sin_ptr, positions_ptr, cu_seqlens_ptr,
                         x0_strides, x1_strides, x2_strides, out0_strides, out1_strides, out2_strides, normed0_strides,
                         normed1_strides, cos_strides, sin_strides, position_strides, eps, offset, H0, H1, H2, N, S,
                         num_sequences, search_steps, NUM_TENSORS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                         SECTIONS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                         BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
                         CONJUGATE: tl.constexpr, FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
                         HEADS_INNER: tl.constexpr, COPY_TAIL: tl.constexpr,
                         USE_INT64_OFFSETS: tl.constexpr):  # fmt: skip
    """Norm and rotate NUM_TENSORS tensors, as ``rotation_kernel`` rotates them; a weight that is None: no norm.

    With ``normed`` pointers the gradient: x are gradients dy of what was normed and rotated, ``normed`` what was, out
    (None where it is not wanted) receives dx, and ``partial`` (None likewise), float32 (tiles of this tensor, D), the
    sum of each tile's part of dweight. CONJUGATE is then the opposite of the forward call's.
    """
    shape = TileShape(BLOCK_TOKENS, BLOCK_HEADS, HEADS_INNER=HEADS_INNER, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    columns = Columns(D, SECTIONS, BLOCK_PAIRS=BLOCK_PAIRS, BLOCK_TAIL=BLOCK_TAIL, COPY_TAIL=COPY_TAIL)
    head_blocks0 = tl.cdiv(H0, BLOCK_HEADS)
    head_blocks1 = tl.cdiv(H1, BLOCK_HEADS) if NUM_TENSORS > 1 else 0
    head_blocks = head_blocks0 + head_blocks1 + (tl.cdiv(H2, BLOCK_HEADS) if NUM_TENSORS > 2 else 0)
    batch, token_block, head_block = locate_tile(shape, head_blocks, N)
    first_token = token_block * BLOCK_TOKENS
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, S, R, INTERLEAVED)
    angles = Angles(rotation=rotation, POSITIONS=POSITIONS, FULL_WIDTH=FULL_WIDTH, CONJUGATE=CONJUGATE)
    positions = Positions(
        positions_ptr=positions_ptr, strides=position_strides, cu_seqlens_ptr=cu_seqlens_ptr,
        num_sequences=num_sequences, search_steps=search_steps,
    )  # fmt: skip
    token_blocks = batch * tl.cdiv(N, BLOCK_TOKENS) + token_block  # those before this one

    if NUM_TENSORS == 1 or head_block < head_blocks0:
        turn_tile(
            Operand(x0_ptr, out0_ptr, x0_strides, out0_strides, num_heads=H0, num_tokens=N),
            Normed(weight0_ptr, normed0_ptr, normed0_strides, partial0_ptr),
            eps, offset, token_blocks * head_blocks0 + head_block, shape, batch, first_token, head_block, columns,
            angles, positions,
        )  # fmt: skip
    elif NUM_TENSORS == 2 or head_block < head_blocks0 + head_blocks1:
        head_block1 = head_block - head_blocks0
        turn_tile(
            Operand(x1_ptr, out1_ptr, x1_strides, out1_strides, num_heads=H1, num_tokens=N),
            Normed(weight1_ptr, normed1_ptr, normed1_strides, partial1_ptr),
            eps, offset, token_blocks * head_blocks1 + head_block1, shape, batch, first_token, head_block1, columns,
            angles, positions,
        )  # fmt: skip
    else:
        turn_tile(
            Operand(x2_ptr, out2_ptr, x2_strides, out2_strides, num_heads=H2, num_tokens=N),
            Normed(None, None, x2_strides, None),
            eps, offset, 0, shape, batch, first_token, head_block - head_blocks0 - head_blocks1, columns, angles,
            positions,
        )  # fmt: skip
