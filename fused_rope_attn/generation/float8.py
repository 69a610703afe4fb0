"""Caches in float8_e4m3fn: numbers that are multiplied by a scale of the tensor or of the key head when they are used.

Products take the numbers as they are stored. The keys' scale joins that of the scores, and the values' that of the
output, so that a step multiplies by neither in its loop.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.rotation import load_angles, load_pairs, pack_pairs, rotate
from fused_rope_attn.runtime.device import is_interpreted

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it rounds a float32 to the nearest even integer
IS_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def head_scale(scale_ptr, stride, head):
    """The scale of a key head, float32: that of all heads, where its stride is 0, or one of its own. None is 1."""
    if scale_ptr is None:
        return tl.full((), 1.0, tl.float32)
    else:
        return tl.load(scale_ptr + head * stride)


@triton.jit
def scaled(qk_scale, cap_scale, k_scale, PRECISION: tl.constexpr):
    """``ScoreScale`` for keys that are ``k_scale`` > 0 times what products take."""
    if cap_scale is None:
        return ScoreScale(qk_scale=qk_scale * k_scale, cap_scale=None, PRECISION=PRECISION)
    else:
        return ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale * k_scale, PRECISION=PRECISION)


@triton.jit
def nearest_number(x):
    """What makes the conversion of x, |x| <= LARGEST, exact where it would not round to nearest."""
    if IS_INTERPRETED:  # the interpreter's loses the carry into the exponent
        exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        unit = tl.math.exp2((tl.maximum(exponent, -6) - 3).to(tl.float32))
        return ((x / unit + ROUNDER) - ROUNDER) * unit
    else:
        return x


@triton.jit
def quantised(x, scale):
    """x (rows, columns) / scale in float8_e4m3fn: rounded once, what is too large to the largest number. NaN stays."""
    x = tl.math.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + scale)
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return nearest_number(x).to(tl.float8e4nv)


@triton.jit
def load_rotated_quantised(rows, offs, rotation, position_offset, scale, DTYPE: tl.constexpr):
    """``load_rotated`` of rows that are ``quantised`` before: what a cache of raw keys gives when it is read again.

    In units of ``scale``, as everything that is read from such a cache.
    """
    first, second = load_pairs(rows, offs, rotation, CHECK_ROWS=True)
    cos, sin = load_angles(rotation, offs + position_offset, rows.format.BLOCK_D, CHECK_POSITIONS=True)
    first, second = quantised(first, scale).to(tl.float32), quantised(second, scale).to(tl.float32)
    first, second = rotate(first, second, cos, sin, CONJUGATE=False)
    return pack_pairs(first, second).to(DTYPE)
