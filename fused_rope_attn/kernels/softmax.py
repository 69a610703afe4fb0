# mypy: ignore-errors
"""From products of queries and keys to weights and back: scores, the running softmax in base 2, sinks, gradients."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record, replace

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Return tanh with one exponential and one division, to about 1e-7; exp2 may overflow. PRECISE: relative to x too.

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
    """Return tanh by the instruction of NVIDIA's cards, exact to 2**-11 of its value."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@record
class ScoreScale:
    """The factors from products of queries and keys to scores."""

    qk_scale: tl.tensor  # > 0, in base 2: softmax_scale * log2(e), or with a cap softcap * log2(e)
    cap_scale: tl.tensor | None  # with a cap softmax_scale / softcap
    PRECISION: tl.constexpr  # of products of float32: "ieee" or "tf32"


@triton.jit
def score_product(a, b, scale):
    """Return a b^T of queries and keys, or the reverse, (len(a), len(b)) float32; capped, tanh(cap_scale * a b^T).

    A logit in base 2 is this times ``scale.qk_scale``.
    """
    return capped(tl.dot(a, tl.trans(b), input_precision=scale.PRECISION), scale, PRECISE=a.dtype == tl.float32)


@triton.jit
def capped(product, scale, PRECISE: tl.constexpr):
    """Return a product of queries and keys after the cap, if there is one."""
    if scale.cap_scale is not None:
        product = tanh(product * scale.cap_scale, PRECISE=PRECISE)
    return product


@triton.jit
def scaled(scale, k_scale):
    """Return the ``ScoreScale`` for keys that are ``k_scale`` > 0 times the operands of products."""
    if scale.cap_scale is None:
        return replace(scale, qk_scale=scale.qk_scale * k_scale)
    else:
        return replace(scale, cap_scale=scale.cap_scale * k_scale)


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
def gradient_scale(scale):
    """Return the factor from dS^T Q to dk: softmax_scale without its sign, which is in q."""
    softmax_scale = scale.qk_scale * LN2
    if scale.cap_scale is not None:
        softmax_scale *= scale.cap_scale
    return softmax_scale


@triton.jit
def online_softmax(scores, row_max, row_sum, qk_scale, HAS_EMPTY_ROWS: tl.constexpr):
    """One step of the running softmax in base 2: (p, correction, row_max, row_sum). qk_scale > 0.

    ``row_max`` holds the maximum of ``scores * qk_scale``; a row that has seen no key has -inf. HAS_EMPTY_ROWS: there
    may be such rows after this step too; their subtrahend is 0, so that exp2 gives 0 and never NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    subtrahend = new_max
    if HAS_EMPTY_ROWS:
        subtrahend = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * qk_scale - subtrahend[:, None])
    correction = tl.math.exp2(row_max - subtrahend)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)


@triton.jit
def rescale(row_max, new_max):
    """Return the factor of sums from the base-2 maximum ``row_max`` to ``new_max``; 0 if they saw nothing."""
    return tl.math.exp2(row_max - tl.where(new_max == float("-inf"), 0.0, new_max))


@triton.jit
def sink_gradient(sink, lse, delta):
    """Part of a sink's gradient from some rows: base-2 lse (+inf where a row saw nothing) and delta, float32.

    The sink is a key without a value: dS = P * (0 - delta).
    """
    return -tl.sum(tl.math.exp2(sink.to(tl.float32) * LOG2E - lse) * delta, 0)


@triton.jit
def finish_sums(row_max, row_sum, sink):
    """Return (seen, row_max, divisor, weight), (rows,) each, which turn the running sums of values into the output.

    row_max in base 2 and row_sum (rows,) are those of all keys; sink: base-2 logit of one more key without a value,
    (rows,), a scalar or None. The sums of values are multiplied by ``weight``, which is 1 without a sink, and divided
    by ``divisor``. Only a row that saw no key sums to zero, and stays without one: it is not ``seen``, and its divisor
    is 1. NaN counts as seen and stays NaN.
    """
    seen = row_sum != 0.0
    weight = 1.0
    if sink is not None:
        new_max = tl.maximum(row_max, sink)
        weight = rescale(row_max, new_max)
        row_sum = tl.where(seen, row_sum * weight + rescale(sink, new_max), 0.0)
        row_max = new_max
    return seen, row_max, tl.where(seen, row_sum, 1.0), weight


@triton.jit
def log_sum_exp(seen, row_max, divisor):
    """Return lse (rows,), the natural logarithm, from the results of ``finish_sums``; -inf if a row saw no key."""
    return tl.where(seen, (row_max + tl.math.log2(divisor)) * LN2, float("-inf"))


@triton.jit
def finish_softmax(acc, row_max, row_sum, sink):
    """Return (o, lse) of the running sums ``acc`` (rows, columns), and of ``row_max``, ``row_sum`` and ``sink``.

    The latter as ``finish_sums`` takes them. A row that saw no key has o = 0 and lse = -inf.
    """
    seen, row_max, divisor, weight = finish_sums(row_max, row_sum, sink)
    if sink is not None:
        acc = acc * weight[:, None]
    # A row that saw nothing has met values with p = 0, which NaN or infinity among them would have turned into NaN.
    o = tl.where(seen[:, None], acc / divisor[:, None], 0.0)
    return o, log_sum_exp(seen, row_max, divisor)
