# mypy: ignore-errors
"""Rows of q and k, and of their gradients, in one part or two: multi-head latent attention has two.

The rope part holds the columns of ``q`` and ``k``, in pair order. The nope part holds columns that another tensor has
and no call rotates; it is None in every other call, and then these functions compile to those of the rope part alone.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import load_rotated_tile
from fused_rope_attn.kernels.softmax import add_product, score_product
from fused_rope_attn.kernels.tiles import RowFormat, TensorView, head_tiles, load_head_tile


@record
class NopeViews:
    """The nope parts of a call's q and k, and of their gradients; None in a kernel that does not use one."""

    q: TensorView | None
    k: TensorView | None
    dq: TensorView | None
    dk: TensorView | None
    sign: tl.tensor | None  # of the scale, which the caller's q lacks; None: 1
    format: RowFormat


@record
class Parts:
    """A tile of rows of q or k, or of their gradients."""

    rope: tl.tensor  # (rows, BLOCK_D)
    nope: tl.tensor | None  # (rows, BLOCK_DN)


@triton.jit
def nope_tiles(view, nope, origin, num_rows, first_row, READS_LENGTHS: tl.constexpr):
    """Return the ``HeadTiles`` of one head of a view of ``NopeViews``."""
    return head_tiles(view, origin, num_rows, nope.format, first_row, READS_LENGTHS, USE_TMA=False)


@triton.jit
def signed(x, sign):
    """Return a tile of q times the sign of the scale; None: 1."""
    if sign is None:
        return x
    else:
        return (x.to(tl.float32) * sign).to(x.dtype)


@triton.jit
def load_parts(
    rope, nope, rotation, start, offs, position_offset, sign=1.0, nope_sign=None, CHECK_ROWS: tl.constexpr = True
):
    """Load the rows ``start + offs`` of two ``HeadTiles`` as ``Parts``; nope may be None.

    rotation, position_offset and sign as ``load_rotated_tile`` takes them; nope_sign as ``signed`` does.
    """
    rope_tile = load_rotated_tile(rope, rotation, start, offs, position_offset, sign, CHECK_ROWS)
    if nope is None:
        return Parts(rope=rope_tile, nope=None)
    else:
        return Parts(rope=rope_tile, nope=signed(load_head_tile(nope, start, offs, CHECK_ROWS), nope_sign))


@triton.jit
def zero_tile(ROWS: tl.constexpr, format):
    """Return zeros (ROWS, BLOCK_D) float32 with the columns of a ``RowFormat``."""
    return tl.zeros((ROWS, format.BLOCK_D), tl.float32)


@triton.jit
def zero_parts(ROWS: tl.constexpr, format, nope):
    """Return ``Parts`` of zeros, float32. nope: ``NopeViews``, or None without a nope part."""
    rope = zero_tile(ROWS, format)
    if nope is None:
        return Parts(rope=rope, nope=None)
    else:
        return Parts(rope=rope, nope=zero_tile(ROWS, nope.format))


@triton.jit
def parts_product(a, b, scale):
    """Return ``score_product`` of ``Parts`` a and b: the sum over the columns of both parts."""
    if a.nope is None:
        return score_product(a.rope, b.rope, scale)
    else:
        product = tl.dot(a.nope, tl.trans(b.nope), input_precision=scale.PRECISION)
        return tl.dot(a.rope, tl.trans(b.rope), product, input_precision=scale.PRECISION)


@triton.jit
def add_to_parts(weights, x, sums, PRECISION: tl.constexpr):
    """Return ``sums`` plus weights times x, both ``Parts``, by ``add_product``."""
    rope = add_product(weights, x.rope, sums.rope, PRECISION)
    if x.nope is None:
        return Parts(rope=rope, nope=None)
    else:
        return Parts(rope=rope, nope=add_product(weights, x.nope, sums.nope, PRECISION))


@triton.jit
def accumulate_parts(weights, x, sums, PRECISION: tl.constexpr):
    """Return ``sums`` plus weights times x, both ``Parts``, in one chain of sums."""
    rope = tl.dot(weights, x.rope, sums.rope, input_precision=PRECISION)
    if x.nope is None:
        return Parts(rope=rope, nope=None)
    else:
        return Parts(rope=rope, nope=tl.dot(weights, x.nope, sums.nope, input_precision=PRECISION))
