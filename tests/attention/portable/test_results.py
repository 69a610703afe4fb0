"""Results of the portable kernels in the interpreter: wanted gradients, lse, and the same from run to run."""

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.dtypes import F32
from tests.support.marks import STRATEGIES, both_strategies, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op

pytestmark = [interpreted, ignore_overflow]


@both_strategies
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_some_inputs_require_a_gradient(wanted, strategy):
    case = Case(1, 2, 1, 9, 12, 16)
    inputs = make_inputs(case)
    everything = run_op(inputs, case, backend="triton", strategy=strategy)
    tensors = {name: getattr(inputs, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    o = rope_attention(*tensors.values(), inputs.cos, inputs.sin, True, backend="triton", strategy=strategy)
    o.backward(inputs.do)
    for name, x in tensors.items():
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, getattr(everything, f"d{name}"))


@both_strategies
def test_lse_is_returned_where_it_is_asked_for(strategy):
    case = Case(1, 2, 1, 9, 12, 16, dtype=F32)
    q, k, v, cos, sin, do = make_inputs(case)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = rope_attention(q, k, v, cos, sin, True, return_lse=True, backend="triton", strategy=strategy)
    assert lse.shape == (1, 2, 9) and lse.dtype == F32 and lse.requires_grad and o.requires_grad
    alone = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy=strategy)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)
    with torch.no_grad():
        quiet = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy=strategy)
    assert torch.equal(quiet, o) and not quiet.requires_grad
    # An lse that is returned and not used changes no gradient.
    gradients = torch.autograd.grad(alone, (q, k, v), do)
    assert all(torch.equal(x, y) for x, y in zip(gradients, torch.autograd.grad(o, (q, k, v), do)))


@both_strategies
def test_reruns_are_bitwise_equal(strategy):
    case = Case(2, 4, 2, 33, 40, 16)
    inputs = make_inputs(case)
    first = run_op(inputs, case, backend="triton", strategy=strategy)
    for deterministic in (False, True):
        again = run_op(inputs, case, backend="triton", strategy=strategy, deterministic=deterministic)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_strategies_agree():
    case = Case(2, 4, 2, 33, 40, 24, dtype=F32, rotary_dim=10, tables="random")
    inputs = make_inputs(case)
    inline, prepass = (run_op(inputs, case, backend="triton", strategy=strategy) for strategy in STRATEGIES)
    for x, y in zip(inline, prepass):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert torch.equal(run_op(inputs, case, backend="triton", strategy="auto").o, inline.o) or torch.equal(
        run_op(inputs, case, backend="triton", strategy="auto").o, prepass.o
    )
