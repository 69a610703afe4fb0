# mypy: ignore-errors
"""Rotation alone, in the caller's own layout of memory: up to three tensors (q, k, v) in one launch.

The attention kernels rotate queries and keys when they load them, in pair order. This kernel serves any layout of
memory, positions of every kind, and several tensors. Memory bandwidth bounds it.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation
from fused_rope_attn.rotation.tile import (
    Angles,
    Columns,
    Positions,
    RotatedTensor,
    TileShape,
    TokenBlock,
    locate_tile,
    rotate_tile,
    token_positions,
)


@triton.jit(do_not_specialize=["H0", "H1", "H2", "N", "S", "num_sequences", "search_steps"])
def rotation_kernel(
    x0_ptr, x1_ptr, x2_ptr, out0_ptr, out1_ptr, out2_ptr, cos_ptr, sin_ptr, positions_ptr, cu_seqlens_ptr, x0_strides,
    x1_strides, x2_strides, out0_strides, out1_strides, out2_strides, cos_strides, sin_strides, position_strides, H0,
    H1, H2, N, S, num_sequences, search_steps, NUM_TENSORS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    SECTIONS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS_INNER: tl.constexpr, COPY_TAIL: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Rotate NUM_TENSORS tensors (B, H0 | H1 | H2, N, D) of one dtype. Grid: (blocks of tokens * blocks of heads of all
    tensors * B,), neighbours in memory next to each other.

    cos and sin are ``([1|B,] S, R / 2 | R)`` with strides (B, S, column); positions int32 or int64 ``(1|B, SECTIONS,
    N)``; cu_seqlens int32 ``(num_sequences + 1,)``, searched in ``search_steps`` steps. R is the width of one of
    SECTIONS sections, each with positions of its own (two sections for tokens on a plane).
    """
    tensor0 = RotatedTensor(x0_ptr, out0_ptr, x0_strides, out0_strides, num_heads=H0, num_tokens=N)
    tensor1 = RotatedTensor(x1_ptr, out1_ptr, x1_strides, out1_strides, num_heads=H1, num_tokens=N)
    tensor2 = RotatedTensor(x2_ptr, out2_ptr, x2_strides, out2_strides, num_heads=H2, num_tokens=N)
    shape = TileShape(BLOCK_TOKENS, BLOCK_HEADS, HEADS_INNER=HEADS_INNER, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    columns = Columns(D, SECTIONS, BLOCK_PAIRS=BLOCK_PAIRS, BLOCK_TAIL=BLOCK_TAIL, COPY_TAIL=COPY_TAIL)
    head_blocks0 = tl.cdiv(H0, BLOCK_HEADS)
    head_blocks1 = tl.cdiv(H1, BLOCK_HEADS) if NUM_TENSORS > 1 else 0
    head_blocks = head_blocks0 + head_blocks1 + (tl.cdiv(H2, BLOCK_HEADS) if NUM_TENSORS > 2 else 0)
    batch, token_block, head_block = locate_tile(shape, head_blocks, N)
    first_token = token_block * BLOCK_TOKENS
    tokens = first_token + tl.arange(0, BLOCK_TOKENS)
    rotation = head_rotation(RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED), batch, S)
    angles = Angles(rotation, POSITIONS, FULL_WIDTH=FULL_WIDTH, CONJUGATE=CONJUGATE)
    positions = Positions(positions_ptr, position_strides, cu_seqlens_ptr, num_sequences, search_steps, POSITIONS)
    block = TokenBlock(shape, columns, angles, positions, batch, first_token)

    for section in tl.static_range(SECTIONS):
        rows = token_positions(positions, batch, tokens, N, section)
        if NUM_TENSORS == 1 or head_block < head_blocks0:
            rotate_tile(tensor0, block, head_block, rows, section)
        elif NUM_TENSORS == 2 or head_block < head_blocks0 + head_blocks1:
            rotate_tile(tensor1, block, head_block - head_blocks0, rows, section)
        else:
            rotate_tile(tensor2, block, head_block - head_blocks0 - head_blocks1, rows, section)
