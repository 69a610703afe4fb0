"""The portable kernels in the interpreter take q, k, v and the gradient with any strides."""

import math

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from verification.testing import Case, Inputs, make_inputs, run_op

pytestmark = [interpreted, ignore_overflow]


@both_strategies
@pytest.mark.parametrize("layout", ["bhnd", "odd", "expanded"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts(layout, interleaved, strategy):
    run_and_compare(Case(2, 4, 2, 17, 20, 24, layout=layout, interleaved=interleaved, rotary_dim=16), strategy=strategy)


@both_strategies
def test_the_last_dimension_may_be_strided(strategy):
    case = Case(1, 2, 1, 17, 20, 16, dtype=F32)
    inputs = make_inputs(case)

    def spread(x):
        wide = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]

    strided = Inputs(*(spread(x) for x in inputs[:3]), inputs.cos, inputs.sin, spread(inputs.do))
    out = run_op(strided, case, backend="triton", strategy=strategy)
    assert all(torch.equal(x, y) for x, y in zip(out, run_and_compare(case, inputs, strategy=strategy)))


@both_strategies
def test_transposed_sequence_and_head_dim(strategy):
    case = Case(1, 2, 1, 17, 20, 16, dtype=F32)
    inputs = make_inputs(case)
    turned = Inputs(*(x.mT.contiguous().mT for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do.mT.contiguous().mT)
    assert turned.q.stride(2) == 1
    run_and_compare(case, turned, strategy=strategy)


@both_strategies
@pytest.mark.parametrize("gradient", ["sum", "transposed", "strided", "broadcast over heads"])
def test_gradients_come_in_any_layout(gradient, strategy):
    """`out.sum().backward()` gives an expanded gradient, `out.transpose().reshape()` a permuted one."""
    case = Case(2, 2, 1, 17, 17, 16)
    inputs = make_inputs(case)
    do = {
        "sum": torch.ones((), dtype=F16).expand(2, 2, 17, 16),
        "transposed": inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "strided": inputs.do.repeat_interleave(2, -1)[..., ::2],
        "broadcast over heads": inputs.do[:, :1].expand(2, 2, 17, 16),
    }[gradient]
    out = run_and_compare(case, inputs._replace(do=do), strategy=strategy)
    if gradient == "sum":
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy).sum().backward()
        assert torch.equal(q.grad, out.dq) and torch.equal(k.grad, out.dk) and torch.equal(v.grad, out.dv)


@both_strategies
def test_memory_order_of_outputs_follows_the_inputs(strategy):
    for layout in ("bnhd", "bhnd"):
        case = Case(2, 4, 2, 9, 12, 16, layout=layout)
        inputs = make_inputs(case)
        out = run_op(inputs, case, backend="triton", strategy=strategy)
        for name, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
            assert getattr(out, name).stride() == getattr(inputs, like).stride(), name
