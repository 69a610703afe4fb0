# mypy: ignore-errors
"""Rotation, or norm and rotation, in the caller's own layout of memory: up to three tensors (q, k, v) in one launch.

The attention kernels rotate queries and keys when they load them, in pair order. This kernel serves any layout of
memory, positions of every kind, norms, and the gradient of both with partial sums of the weights' gradients. Memory
bandwidth bounds it. A norm is over all D columns of a row and needs every section and the tail before it can rotate
any, so a program holds whole rows then. A tensor without a weight, v for example, is only rotated.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.norm import Norm, inverse_rms, load_norm_weights, norm_gradient, row_sum, tree_sum
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation
from fused_rope_attn.kernels.tiles import TensorView
from fused_rope_attn.rotation.tile import (
    Angles,
    Columns,
    Positions,
    RotatedTensor,
    TileShape,
    TokenBlock,
    block_positions,
    load_section,
    locate_tile,
    rotate_section,
    rotate_tile,
    section_angles,
    section_pairs,
    sections_of,
    store_section,
    tail_columns,
    tile_at,
    tile_offsets,
    tile_pointer,
)


@record
class Normed:
    """The norm of a ``RotatedTensor``.

    norm: None: it is only rotated. x: the input of the norm in a backward launch; its pointer is None in a forward one.
    partial_ptr: (tiles of the tensor, D) float32 for sums of the weight's gradient; None if that is not wanted.
    """

    norm: Norm | None
    x: TensorView
    partial_ptr: tl.tensor | None


@triton.jit
def section_columns(columns, pairing, SECTION: tl.constexpr):
    """Return columns of the first and second members of a section's pairs, and which pairs exist, (BLOCK_PAIRS,)."""
    R: tl.constexpr = pairing.R
    pairs = tl.arange(0, columns.BLOCK_PAIRS)
    if pairing.INTERLEAVED:
        return SECTION * R + 2 * pairs, SECTION * R + 2 * pairs + 1, pairs < R // 2
    else:
        return SECTION * R + pairs, SECTION * R + pairs + R // 2, pairs < R // 2


@triton.jit
def section_norm_weights(norm, columns, pairing, SECTION: tl.constexpr):
    """Load the norm's weights of the first and second members of a section's pairs, (1, 1, BLOCK_PAIRS) each."""
    columns1, columns2, exists = section_columns(columns, pairing, SECTION)
    weight1, weight2 = load_norm_weights(norm, columns1, exists), load_norm_weights(norm, columns2, exists)
    return weight1[None, None, :], weight2[None, None, :]


@triton.jit
def tail_norm_weights(norm, columns, R: tl.constexpr):
    """Load the norm's weights of the columns after the sections, (1, 1, BLOCK_TAIL)."""
    offs_tail = tail_columns(columns, R)
    return load_norm_weights(norm, offs_tail, offs_tail < columns.D)[None, None, :]


@triton.jit
def tail_pointers(sections):
    """Return pointers to the columns after the sections, and which of them exist."""
    offs_tail = tail_columns(sections.columns, sections.R)
    mask = sections.exists & (offs_tail < sections.columns.D)[None, None, :]
    return sections.ptr + tile_offsets(sections.tile, offs_tail, sections.strides), mask


@triton.jit
def load_tail(sections):
    """Load the columns after the sections in the memory's dtype; those that do not exist are zero."""
    pointers, mask = tail_pointers(sections)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tail(sections, x):
    """Write the columns after the sections, rounded once."""
    pointers, mask = tail_pointers(sections)
    tl.store(pointers, x.to(sections.ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row_parts(sections):
    """Load whole rows of a tile in the memory's dtype: the results of ``load_section`` for all sections, as two tuples,
    and a third with the tail, if there is one."""
    firsts, seconds = (), ()
    for section in tl.static_range(sections.columns.SECTIONS):
        first, second = load_section(sections, section)
        firsts, seconds = firsts + (first,), seconds + (second,)
    if sections.columns.COPY_TAIL:
        return firsts, seconds, (load_tail(sections),)
    else:
        return firsts, seconds, ()


@triton.jit
def sum_columns(x):
    """Sum over the columns of a part (tokens, heads, C) as ``tree_sum`` does, (tokens, heads, 1)."""
    sums = tree_sum(tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
    return tl.reshape(sums, (x.shape[0], x.shape[1], 1))


@triton.jit
def inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED: tl.constexpr):
    """Return ``inverse_rms`` of whole rows, from the results of ``load_row_parts``, with one column."""
    square_sum = 0.0
    for section in tl.static_range(columns.SECTIONS):
        x1, x2 = section_pairs(firsts[section], seconds[section], columns.BLOCK_PAIRS, INTERLEAVED)
        square_sum += sum_columns(tl.math.fma(x1, x1, x2 * x2))
    if columns.COPY_TAIL:
        x = tail[0].to(tl.float32)
        square_sum += sum_columns(x * x)
    return inverse_rms(square_sum, norm)


@triton.jit
def norm_rotate_tile(operand, norm, block, head_block):
    """Norm and rotate heads number head_block of a ``TokenBlock``."""
    columns, angles = block.columns, block.angles
    rotation = angles.rotation
    INTERLEAVED: tl.constexpr = rotation.INTERLEAVED
    tile, pairs = tile_at(block.shape, columns, block.first_token, head_block)
    x_ptr = tile_pointer(operand.x_ptr, operand.x_strides, block.batch, tile)
    out_ptr = tile_pointer(operand.out_ptr, operand.out_strides, block.batch, tile)
    x = sections_of(x_ptr, operand.x_strides, tile, pairs, operand, block)
    out = replace(x, ptr=out_ptr, strides=operand.out_strides)
    firsts, seconds, tail = load_row_parts(x)
    scale = inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED)

    for section in tl.static_range(columns.SECTIONS):
        rows = block_positions(block, operand.num_tokens, section)
        cos1, sin1, cos2, sin2 = section_angles(angles, rows, columns, block.shape.HEADS_INNER)
        weight1, weight2 = section_norm_weights(norm, columns, rotation, section)
        x1, x2 = section_pairs(firsts[section], seconds[section], columns.BLOCK_PAIRS, INTERLEAVED)
        # The order of ``kernels.rotation.norm_and_rotate``, for the same bits.
        x1, x2 = rotate_section(x1 * weight1, x2 * weight2, angles, cos1, sin1, cos2, sin2)
        store_section(out, x1 * scale, x2 * scale, section)
    if columns.COPY_TAIL:
        store_tail(out, tail[0].to(tl.float32) * tail_norm_weights(norm, columns, rotation.R) * scale)


@triton.jit
def store_weight_gradient(partial_ptr, columns, exists, gradient):
    """Sum dweight (rows, rows, C) of a tile's rows, and write it to ``columns`` (C,) of a row of partial sums."""
    tl.store(partial_ptr + columns, tl.sum(tl.sum(gradient, 0), 0), mask=exists)


@triton.jit
def norm_unrotate_tile(operand, normed, tile_index, block, head_block):
    """Write the gradient of ``norm_rotate_tile``: ``operand`` holds dy, and dx as its out; ``angles`` rotate back.

    normed: the ``Normed`` of this tensor; the tile writes row ``tile_index`` (int64) of its partial sums.
    """
    columns, angles, norm = block.columns, block.angles, normed.norm
    rotation = angles.rotation
    R: tl.constexpr = rotation.R
    INTERLEAVED: tl.constexpr = rotation.INTERLEAVED
    BLOCK_PAIRS: tl.constexpr = columns.BLOCK_PAIRS
    tile, pairs = tile_at(block.shape, columns, block.first_token, head_block)
    x_ptr = tile_pointer(normed.x.ptr, normed.x.strides, block.batch, tile)
    dy_ptr = tile_pointer(operand.x_ptr, operand.x_strides, block.batch, tile)
    x = sections_of(x_ptr, normed.x.strides, tile, pairs, operand, block)
    exists = x.exists
    firsts, seconds, tail = load_row_parts(x)
    dy_firsts, dy_seconds, dy_tail = load_row_parts(replace(x, ptr=dy_ptr, strides=operand.x_strides))
    scale = inverse_rms_of_parts(firsts, seconds, tail, norm, columns, INTERLEAVED)
    if normed.partial_ptr is not None:
        partial_ptr = normed.partial_ptr + tile_index * columns.D

    # dy times the weights, and the normed rows: their projection needs all columns.
    g_firsts, g_seconds, n_firsts, n_seconds = (), (), (), ()
    projection = 0.0
    for section in tl.static_range(columns.SECTIONS):
        rows = block_positions(block, operand.num_tokens, section)
        cos1, sin1, cos2, sin2 = section_angles(angles, rows, columns, block.shape.HEADS_INNER)
        dy1, dy2 = section_pairs(dy_firsts[section], dy_seconds[section], BLOCK_PAIRS, INTERLEAVED)
        dy1, dy2 = rotate_section(dy1, dy2, angles, cos1, sin1, cos2, sin2)
        # A token that does not exist may have an angle that is NaN.
        dy1, dy2 = tl.where(exists, dy1, 0.0), tl.where(exists, dy2, 0.0)
        x1, x2 = section_pairs(firsts[section], seconds[section], BLOCK_PAIRS, INTERLEAVED)
        n1, n2 = x1 * scale, x2 * scale
        if normed.partial_ptr is not None:
            columns1, columns2, is_pair = section_columns(columns, rotation, section)
            store_weight_gradient(partial_ptr, columns1, is_pair, dy1 * n1)
            store_weight_gradient(partial_ptr, columns2, is_pair, dy2 * n2)
        weight1, weight2 = section_norm_weights(norm, columns, rotation, section)
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
        dx_ptr = tile_pointer(operand.out_ptr, operand.out_strides, block.batch, tile)
        dx = replace(x, ptr=dx_ptr, strides=operand.out_strides)
        for section in tl.static_range(columns.SECTIONS):
            dx1 = norm_gradient(g_firsts[section], n_firsts[section], projection, scale, norm)
            dx2 = norm_gradient(g_seconds[section], n_seconds[section], projection, scale, norm)
            store_section(dx, dx1, dx2, section)
        if columns.COPY_TAIL:
            store_tail(dx, norm_gradient(g, n, projection, scale, norm))


@triton.jit
def process_tile(operand, normed, tile_index, block, head_block):
    """Norm and rotate a tile, or write its gradient, or only rotate it, as ``normed`` asks for."""
    if normed.norm is None:
        for section in tl.static_range(block.columns.SECTIONS):
            rows = block_positions(block, operand.num_tokens, section)
            rotate_tile(operand, block, head_block, rows, section)
    else:
        if normed.x.ptr is None:
            norm_rotate_tile(operand, normed.norm, block, head_block)
        else:
            norm_unrotate_tile(operand, normed, tile_index, block, head_block)


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "S", "num_sequences", "search_steps"])
def rotation_kernel(
    x0_ptr, x1_ptr, x2_ptr, out0_ptr, out1_ptr, out2_ptr, weight0_ptr, weight1_ptr, normed0_ptr, normed1_ptr,
    partial0_ptr, partial1_ptr, cos_ptr, sin_ptr, positions_ptr, cu_seqlens_ptr, x0_strides, x1_strides, x2_strides,
    out0_strides, out1_strides, out2_strides, normed0_strides, normed1_strides, cos_strides, sin_strides,
    position_strides, eps, offset, H0, H1, H2, N, S, num_sequences, search_steps, NUM_TENSORS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, SECTIONS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr, COPY_TAIL: tl.constexpr,
    USE_INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Rotate NUM_TENSORS tensors (B, H0 | H1 | H2, N, D) of one dtype. Grid: (blocks of tokens * blocks of heads of all
    tensors * B,), neighbours in memory next to each other.

    cos and sin are ``([1|B,] S, R / 2 | R)`` with strides (B, S, column); positions int32 or int64 ``(1|B, SECTIONS,
    N)``; cu_seqlens int32 ``(num_sequences + 1,)``, searched in ``search_steps`` steps. R is the width of one of
    SECTIONS sections, each with positions of its own (two sections for tokens on a plane). Arguments that a call does
    not use are None.

    weight0 and weight1 (D,): norm the first and the second tensor before they are rotated. With ``normed`` pointers,
    the inputs of the norms, write the gradient: x are gradients dy of the results, out (None if it is not wanted)
    receives dx, and ``partial`` (None likewise), float32 (tiles of this tensor, D), the sum of each tile's part of
    dweight. CONJUGATE is then the opposite of the forward call's.
    """
    shape = TileShape(BLOCK_TOKENS, BLOCK_HEADS, HEADS_INNER=HEADS_INNER, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    columns = Columns(D, SECTIONS, BLOCK_PAIRS=BLOCK_PAIRS, BLOCK_TAIL=BLOCK_TAIL, COPY_TAIL=COPY_TAIL)
    head_blocks0 = tl.cdiv(H0, BLOCK_HEADS)
    head_blocks1 = tl.cdiv(H1, BLOCK_HEADS) if NUM_TENSORS > 1 else 0
    head_blocks = head_blocks0 + head_blocks1 + (tl.cdiv(H2, BLOCK_HEADS) if NUM_TENSORS > 2 else 0)
    batch, token_block, head_block = locate_tile(shape, head_blocks, N)
    first_token = token_block * BLOCK_TOKENS
    rotation = head_rotation(RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED), batch, S)
    angles = Angles(rotation, POSITIONS, FULL_WIDTH=FULL_WIDTH, CONJUGATE=CONJUGATE)
    positions = Positions(positions_ptr, position_strides, cu_seqlens_ptr, num_sequences, search_steps, POSITIONS)
    block = TokenBlock(shape, columns, angles, positions, batch, first_token)
    token_blocks = batch * tl.cdiv(N, BLOCK_TOKENS) + token_block  # those before this one
    norm0 = Norm(weight0_ptr, eps, offset, D) if weight0_ptr is not None else None
    norm1 = Norm(weight1_ptr, eps, offset, D) if weight1_ptr is not None else None

    if NUM_TENSORS == 1 or head_block < head_blocks0:
        tensor0 = RotatedTensor(x0_ptr, out0_ptr, x0_strides, out0_strides, num_heads=H0, num_tokens=N)
        normed0 = Normed(norm0, TensorView(normed0_ptr, normed0_strides), partial0_ptr)
        process_tile(tensor0, normed0, token_blocks * head_blocks0 + head_block, block, head_block)
    elif NUM_TENSORS == 2 or head_block < head_blocks0 + head_blocks1:
        tensor1 = RotatedTensor(x1_ptr, out1_ptr, x1_strides, out1_strides, num_heads=H1, num_tokens=N)
        normed1 = Normed(norm1, TensorView(normed1_ptr, normed1_strides), partial1_ptr)
        head_block1 = head_block - head_blocks0
        process_tile(tensor1, normed1, token_blocks * head_blocks1 + head_block1, block, head_block1)
    else:
        tensor2 = RotatedTensor(x2_ptr, out2_ptr, x2_strides, out2_strides, num_heads=H2, num_tokens=N)
        only_rotated = Normed(None, TensorView(None, x2_strides), None)
        process_tile(tensor2, only_rotated, 0, block, head_block - head_blocks0 - head_blocks1)
