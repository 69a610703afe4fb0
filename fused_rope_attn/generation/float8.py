# mypy: ignore-errors
"""Caches in float8_e4m3fn: numbers that are multiplied by a scale of the tensor or of the key head when they are used.

Products use the stored numbers. The keys' scale is part of that of the scores, and the values' of that of the output,
so that a step multiplies by neither in its loop. For q of two bytes the products are of float16, because a GPU converts
two numbers of float8 to it in one instruction (bfloat16 takes one more for each number), and the queries are divided by
a power of two for each row, so that they fit.

Tiles are ``Halves``, the columns of even and those of odd number, because two neighbours are one number of 16 bits, for
which there is a way from memory to the tensor cores' layout. Single bytes have no such way.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import rotation, softmax, tiles
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.device import is_interpreted

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it rounds a float32 to the nearest even integer
IS_INTERPRETED = tl.constexpr(is_interpreted())


@record
class Halves:
    """A tile (rows, 2P) as its columns of even and of odd number, (rows, P) each."""

    even: tl.tensor
    odd: tl.tensor


@record
class Float8:
    """The properties of float8 caches: scales of the keys and of the values of one head, float32.

    DTYPE: of the products; None: the caches are not float8. IS_ALIGNED: rows begin at multiples of 16 bytes, and
    columns are adjacent.
    """

    k_scale: tl.tensor
    v_scale: tl.tensor
    DTYPE: tl.constexpr
    IS_ALIGNED: tl.constexpr


@triton.jit
def head_scale(scales, head):
    """Load the scale of a key head, float32, from the ``TensorView`` of (HKV,), stride 0 for one scale; None: 1."""
    if scales is None:
        return tl.full((), 1.0, tl.float32)
    else:
        return tl.load(scales.ptr + head * scales.strides[0])


@triton.jit
def split_columns(x, DTYPE: tl.constexpr):
    """Return the ``Halves`` of a tile, in DTYPE."""
    even, odd = rotation.unpack_pairs(x.to(DTYPE))
    return Halves(even=even, odd=odd)


@triton.jit
def scaled_queries(q, DTYPE: tl.constexpr):
    """Return (``Halves`` of q in DTYPE, a factor for scores) of rotated queries (rows, columns) in float32.

    Rows are divided by the power of two below their largest number.
    """
    largest = tl.max(tl.abs(q), 1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > 0.0, power, 1.0)
    return split_columns(q / power[:, None], DTYPE), power[:, None]


@triton.jit
def score_halves(q, q_scale, k, scale):
    """Multiply ``Halves`` of queries and keys as ``score_product`` does, times ``q_scale``."""
    product = tl.dot(q.even, tl.trans(k.even), input_precision=scale.PRECISION)
    product = tl.dot(q.odd, tl.trans(k.odd), product, input_precision=scale.PRECISION) * q_scale
    return softmax.capped(product, scale, PRECISE=False)


@triton.jit
def load_halves(rows, offs, float8, CHECK_ROWS: tl.constexpr):
    """Load float8 rows as ``Halves`` in the dtype of products; rows that do not exist are zero."""
    if IS_INTERPRETED or not float8.IS_ALIGNED or float8.DTYPE != tl.float16:
        return split_columns(tiles.load_tile(rows, offs, CHECK_ROWS), float8.DTYPE)
    else:
        columns = tl.arange(0, rows.format.BLOCK_D // 2)
        pointers = tiles.row_pointers(rows, offs, tl.arange(0, 1)).to(tl.pointer_type(tl.int16), bitcast=True)
        mask = None
        if CHECK_ROWS:
            mask = tiles.row_mask(rows, offs)
        if rows.format.D != rows.format.BLOCK_D:
            exists = columns[None, :] < rows.format.D // 2
            if CHECK_ROWS:
                exists = mask & exists
            mask = exists
        pairs = tiles.load_where(pointers + columns[None, :], mask, 0)
        CONVERT: tl.constexpr = (
            "{ .reg .b32 first, second; .reg .b16 lower, upper, rest; "
            "prmt.b32 first, $2, 0, 0x4420; prmt.b32 second, $2, 0, 0x4431; "
            "mov.b32 {lower, rest}, first; mov.b32 {upper, rest}, second; "
            "cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
        )
        even, odd = tl.inline_asm_elementwise(
            CONVERT, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
        )
        return Halves(even=even, odd=odd)


@triton.jit
def as_stored(x, float8, scale):
    """Return x (rows, columns) as a cache holds it: in float8 x / scale, rounded once, and saturated; NaN stays."""
    if float8.DTYPE is None:
        return x
    else:
        x = tl.math.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + scale)
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        nearest = x
        if IS_INTERPRETED:  # the interpreter's conversion loses the carry into the exponent
            exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
            unit = tl.math.exp2((tl.maximum(exponent, -6) - 3).to(tl.float32))
            nearest = ((x / unit + ROUNDER) - ROUNDER) * unit
        number = nearest.to(tl.float8e4nv)
        if IS_INTERPRETED:  # it makes 384 of NaN and 0 of -0
            sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
            number = number.to(tl.uint8, bitcast=True) | sign.to(tl.uint8)
            number = tl.where(x == x, number, 0x7F).to(tl.float8e4nv, bitcast=True)
        return number
