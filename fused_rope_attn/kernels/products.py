# mypy: ignore-errors
"""Products of tiles: scores, capped where a call asks for it, and long sums."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.softmax import LOG2E


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh with one exponential and one division, to about 1e-7; exp2 may overflow. PRECISE: relative to x too.

    Capped scores are small against their cap, which multiplies the error: float32 needs the series near 0.
    """
    result = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
    if PRECISE:
        # Up to |x| = 1/4 the first term left out, 1382 x**11 / 155925, is 1e-8 of x.
        y = x * x
        series = 1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
        result = tl.where(y < 0.0625, x * series, result)
    return result


@triton.jit
def approximate_tanh(x):
    """tanh by the instruction of NVIDIA's cards, exact to 2**-11 of its value."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@record
class ScoreScale:
    """The factors from products of queries and keys to scores."""

    qk_scale: tl.tensor  # > 0, in base 2: softmax_scale * log2(e), or with a cap softcap * log2(e)
    cap_scale: tl.tensor | None  # with a cap softmax_scale / softcap
    PRECISION: tl.constexpr  # of products of float32: "ieee" or "tf32"


@triton.jit
def score_product(a, b, scale):
    """a b^T of queries and keys, or of keys and queries, (len(a), len(b)) float32; capped, tanh(cap_scale * a b^T).

    A logit in base 2 is this times ``scale.qk_scale``.
    """
    product = tl.dot(a, tl.trans(b), input_precision=scale.PRECISION)
    if scale.cap_scale is not None:
        product = tanh(product * scale.cap_scale, PRECISE=a.dtype == tl.float32)
    return product


@triton.jit
def score_gradient(p, dp, delta, scores, scale):
    """Return dS = P * (dP - delta) (float32), with a cap times the tanh's derivative, 1 - tanh^2.

    ``delta`` broadcasts against p; p are the weights of ``score_product``'s ``scores``.
    """
    ds = p * (dp - delta)
    if scale.cap_scale is not None:
        ds *= 1.0 - scores * scores
    return ds


@triton.jit
def add_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b for long sums. In float32 the block's product is summed first and added whole.

    A chain of one addition per key or query loses up to sqrt(N) units in the last place: 4e-5 of dv's rms at 128K. The
    multiplication by one keeps Triton from folding the sum back into the product.
    """
    if a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.math.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b, acc)
