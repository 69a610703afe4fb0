"""The softmax of the portable kernels in the interpreter: scales, extreme logits, rows and keys that do not count."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from verification.testing import Case, Inputs, Results, make_inputs, run_op, run_reference

pytestmark = [interpreted, ignore_overflow]


@both_strategies
@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, -1.0, 2.0, 1])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_softmax_scale(softmax_scale, dtype, strategy):
    run_and_compare(Case(1, 2, 1, 20, 40, 16, dtype=dtype, softmax_scale=softmax_scale), strategy=strategy)


@both_strategies
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4, 2.45e5])
def test_extreme_logits(logit, causal, strategy):
    """All scores of a head far from zero: a finite mask sentinel or a maximum clamped at 0 would silence it.

    Scores and lse are float32, so that the weights, exp(score - lse), are known to an ulp of the logit only, here and
    in any other program that saves lse; the tolerance is four of them.
    """
    case = Case(1, 2, 1, 20, 40, 16, dtype=F32, causal=causal, rotary_dim=8)
    inputs = make_inputs(case)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 15], k[..., 15] = 4.0 * logit, 1.0
    inputs = inputs._replace(q=q, k=k)
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    ref64 = run_reference(inputs, case, torch.float64)
    tolerance = 1e-5 + 4 * abs(logit) * torch.finfo(F32).eps
    for name in Results._fields:
        expected = getattr(ref64, name)
        error = (getattr(out, name) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert float(error) <= tolerance, (name, float(error), tolerance)


@both_strategies
def test_hot_future_keys_are_invisible(strategy):
    """Keys that a row may not see carry scores that a finite mask value would lose against."""
    case = Case(1, 1, 1, 40, 40, 16, dtype=F32)
    inputs = make_inputs(case)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0] = q[..., 0].abs() + 1
    k[:, :, 20:] *= 1e5
    out = run_op(inputs._replace(q=q, k=k), case, backend="triton", strategy=strategy)
    short = replace(case, len_q=20, len_k=20)
    first = Inputs(q[:, :, :20], k[:, :, :20], inputs.v[:, :, :20], inputs.cos, inputs.sin, inputs.do[:, :, :20])
    expected = run_op(first, short, backend="triton", strategy=strategy)
    assert torch.equal(out.o[:, :, :20], expected.o) and torch.equal(out.dq[:, :, :20], expected.dq)


@both_strategies
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(strategy, bad):
    """100 queries over 33 keys, causal: the first 67 rows see no key, whatever v holds."""
    inputs = make_inputs(Case(1, 1, 1, 100, 33, 16))
    v = inputs.v.clone()
    v[:, :, 0] = bad
    o, lse = rope_attention(
        inputs.q, inputs.k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy, return_lse=True
    )
    assert torch.equal(o[:, :, :67], torch.zeros_like(o[:, :, :67]))
    assert bool((lse[:, :, :67] == -math.inf).all()) and bool(torch.isfinite(lse[:, :, 67:]).all())
    assert not bool(torch.isfinite(o[:, :, 67:]).any()), "a visible NaN or infinity must not be hidden"
