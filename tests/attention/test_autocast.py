"""Attention under autocast: what is cast, and what the plan sees."""

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.attention import gradients, leaves
from tests.support.operators import SMALL, assert_close, kernel_or_reference
from verification.testing import make_inputs


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(backend, mixed):
    """q, k and v are cast to autocast's dtype, tables stay float32, gradients have the inputs' dtypes."""
    inputs = make_inputs(SMALL)
    inputs = inputs._replace(q=inputs.q.half().float(), k=inputs.k.half().float(), v=inputs.v.half().float())
    k = inputs.k.half() if mixed else inputs.k
    q, k, v = leaves(inputs._replace(k=k))
    with torch.autocast("cpu", torch.float16):
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend)
    assert o.dtype == torch.float16
    half = inputs._replace(q=inputs.q.half(), k=inputs.k.half(), v=inputs.v.half())
    expected = gradients(lambda q, k, v: rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend), half)
    got = torch.autograd.grad(o, (q, k, v), inputs.do.half())
    assert [x.dtype for x in got] == [q.dtype, k.dtype, v.dtype]
    assert_close([o.detach(), *(x.half() for x in got)], expected, 1e-3)


def test_plan_under_autocast_sees_the_cast_inputs():
    q = torch.randn(1, 2, 8, 32)
    k, v = torch.randn(1, 2, 8, 32, dtype=torch.float16), torch.randn(1, 2, 8, 32)
    cos, sin = torch.randn(8, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.float16):
        assert plan(q, k, v, cos, sin, True, backend="triton").forward is not None
    with pytest.raises(TypeError, match="^k must have q's dtype"):
        plan(q, k, v, cos, sin, True, backend="triton")


def test_autocast_bfloat16_takes_the_reference():
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        o = rope_attention(q, k, v, cos, sin, True)
        assert plan(q, k, v, cos, sin, True).backend == "reference"
    assert o.dtype == torch.bfloat16


def test_autocast_leaves_float64_alone():
    inputs = make_inputs(SMALL)
    q, k, v = (x.double() for x in inputs[:3])
    with torch.autocast("cpu", torch.bfloat16):
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True)
    assert o.dtype == torch.float64 and torch.equal(o, rope_attention(q, k, v, inputs.cos, inputs.sin, True))
