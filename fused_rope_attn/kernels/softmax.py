# mypy: ignore-errors
"""The running softmax in base 2, sinks, and their gradient."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
def add_sink(row_max, row_sum, sink, seen):
    """Add a key of base-2 logit ``sink`` without a value: (row_max, row_sum, weight of the sums before).

    A row that saw no key (not ``seen``) stays without one: its sum stays 0.
    """
    new_max = tl.maximum(row_max, sink)
    weight = rescale(row_max, new_max)
    return new_max, tl.where(seen, row_sum * weight + rescale(sink, new_max), 0.0), weight


@triton.jit
def lse_in_base_2(lse):
    """The base-2 logarithm, as backward passes take it, of natural ones: +inf where a row saw nothing (lse is -inf), so
    that p = exp2(scores - lse) is 0 there."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def output_delta(o, do, lse, dlse, READS_LENGTHS: tl.constexpr):
    """delta = sum(o * do) - dlse of rows of o and dO (rows, columns), float32, so that dS = P * (dP - delta).

    ``lse`` is ``lse_in_base_2``'s. dlse: the gradient of lse (rows,), or None: the derivative of lse is P, too.
    """
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        delta -= dlse
    if READS_LENGTHS or dlse is not None:
        # Padding may hold anything: nothing of a row that saw nothing may reach a gradient.
        delta = tl.where(lse == float("inf"), 0.0, delta)
    return delta


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
        row_max, row_sum, weight = add_sink(row_max, row_sum, sink, seen)
    return seen, row_max, tl.where(seen, row_sum, 1.0), weight


@triton.jit
def raise_max_logit(ptr, row_max, exists):
    """Raise the float32 at ``ptr`` to the largest natural logit of rows that ``exist``, of base-2 row_max (rows,).

    The bits do not depend on the order in which programs do so. If no row sees a key nothing is written: rows after the
    last packed sequence have no float32 of their own, and ``ptr`` is outside of the tensor.
    """
    highest = tl.max(tl.where(exists, row_max, float("-inf")), 0)
    tl.atomic_max(ptr, highest * LN2, mask=highest != float("-inf"), sem="relaxed")


@triton.jit
def log_sum_exp(seen, row_max, divisor):
    """Return lse (rows,), the natural logarithm, from the results of ``finish_sums``; -inf if a row saw no key."""
    return tl.where(seen, (row_max + tl.math.log2(divisor)) * LN2, float("-inf"))


@triton.jit
def finish_softmax(acc, row_max, row_sum, sink):
    """(o, lse) of the running sums ``acc`` (rows, columns), and of ``row_max``, ``row_sum`` and ``sink``.

    The latter as ``finish_sums`` takes them. A row that saw no key has o = 0 and lse = -inf.
    """
    seen, row_max, divisor, weight = finish_sums(row_max, row_sum, sink)
    if sink is not None:
        acc = acc * weight[:, None]
    # A row that saw nothing has met values with p = 0, which NaN or infinity among them would have turned into NaN.
    o = tl.where(seen[:, None], acc / divisor[:, None], 0.0)
    return o, log_sum_exp(seen, row_max, divisor)
