# mypy: ignore-errors
"""The root-mean-square norm of a row inside kernels, and its gradient (RMSNorm: Zhang and Sennrich 2019, eq. 4).

``y = x * rsqrt(mean(x ** 2) + eps) * (offset + weight)`` over the D columns of a row, in float32. A kernel rarely holds
a row as one tile: rotations take it apart into first and second members of pairs, sections, and columns that pass
through. So these functions take *parts* of rows, tiles ``(..., C)`` with columns as their last axis, and return sums
over columns ``(..., 1)``, which the caller adds up over the parts. Columns that only pad a tile must be zero: they add
nothing, and the mean is that of D columns.

The statistic, ``inverse_rms``, is never saved: a backward pass reads x anyway, and a sum of its squares costs nothing
in addition. With ``n = x * inverse_rms`` and
``g = dy * (offset + weight)`` the gradients are ``dx = inverse_rms * (g - n * mean(g * n))`` and, summed over rows,
``dweight = dy * n``.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.tiles import load_where

# The smallest normal number of float32. GPUs flush smaller ones to zero, and the reciprocal would be infinite.
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@record
class Norm:
    """A norm over rows of D columns."""

    weight_ptr: tl.tensor  # (D,) float32 or the rows' dtype, contiguous
    eps: tl.tensor
    offset: tl.tensor
    D: tl.constexpr


@triton.constexpr_function
def log2(power):
    """Return the exponent of a power of two."""
    return power.bit_length() - 1


@triton.jit
def row_sum(x):
    """Sum over the columns of a part (..., C), as (..., 1)."""
    return tl.sum(x, axis=len(x.shape) - 1, keep_dims=True)


@triton.jit
def tree_sum(x, LAYOUT: tl.constexpr = None):
    """Sum over the columns of a tile (rows, C), C a power of two, as (rows, 1): neighbours, then neighbouring sums.

    Every addition has two operands, so that the order does not depend on how threads share a row, as that of ``tl.sum``
    does. LAYOUT: of the result in Gluon kernels, which is the tile's.
    """
    for _ in tl.static_range(log2(x.shape[1])):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    if LAYOUT is not None:
        x = gl.convert_layout(x, LAYOUT)
    return x


@triton.jit
def inverse_rms(square_sum, norm):
    """Return ``rsqrt(mean(x ** 2) + eps)`` from the rows' sums of squares, any shape.

    It is 0 where the mean and eps are, so that a row of zeros stays one; a row that is not finite stays so.
    """
    mean_square = square_sum / norm.D + norm.eps
    is_zero = mean_square < _SMALLEST_NORMAL
    return tl.where(is_zero, 0.0, tl.rsqrt(tl.where(is_zero, 1.0, mean_square)))


@triton.jit
def load_norm_weights(norm, columns, exists):
    """Load ``offset + weight`` of ``columns`` (C,), float32; 0 where ``exists`` is false, None: all of them exist."""
    weight = load_where(norm.weight_ptr + columns, exists, 0.0).to(tl.float32) + norm.offset
    if exists is not None:
        weight = tl.where(exists, weight, 0.0)
    return weight


@triton.jit
def norm_gradient(g, n, projection, scale, norm):
    """dx of a part: ``g`` is dy times the weights, ``n`` the normed rows, ``projection`` the rows' sums of g * n over
    all D columns, ``scale`` their ``inverse_rms``."""
    return scale * (g - n * (projection / norm.D))


@triton.jit
def pair_inverse_rms(first, second, norm, LAYOUT: tl.constexpr = None):
    """Return ``inverse_rms`` of rows of ``rotation.load_pairs``, (rows, 1) float32: the same bits in every kernel.

    LAYOUT: that of the pairs, which Gluon kernels name.
    """
    return inverse_rms(tree_sum(tl.math.fma(first, first, second * second), LAYOUT), norm)


@triton.jit
def unnorm_pairs(first, second, dy1, dy2, weight1, weight2, norm):
    """Return dx of the first and second members of pairs, and dweight of each row's, all float32.

    It is the gradient of ``(first * weight1, second * weight2)`` times ``pair_inverse_rms``.
    first and second are the rows before the norm, dy1 and dy2 gradients of the rows after it. A row with a gradient of
    zero may be padding that holds NaN, so it gives zeros and adds nothing to a sum of dweight (rows, BLOCK_D / 2) over
    the rows. Rows that do not exist must have a gradient of zero.
    """
    # No sum waits for another.
    squares = row_sum(first * first + second * second)
    products = row_sum(dy1 * weight1 * first + dy2 * weight2 * second)
    counts = row_sum(tl.abs(dy1) + tl.abs(dy2)) != 0.0
    scale = tl.where(counts, inverse_rms(squares, norm), 0.0)
    projection = tl.where(counts, products, 0.0) * scale
    n1, n2 = tl.where(counts, first, 0.0) * scale, tl.where(counts, second, 0.0) * scale
    dx1 = norm_gradient(dy1 * weight1, n1, projection, scale, norm)
    dx2 = norm_gradient(dy2 * weight2, n2, projection, scale, norm)
    return dx1, dx2, dy1 * n1, dy2 * n2
