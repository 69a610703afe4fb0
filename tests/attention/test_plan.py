"""`plan` against the kernels that really run: it explains and launches nothing."""

import math

import pytest
import torch

import fused_rope_attn
from fused_rope_attn import (
    apply_rope,
    plan,
    plan_mla,
    plan_mla_varlen,
    plan_varlen,
    plan_with_kvcache,
    rope_attention,
    rope_attention_mla,
    rope_attention_mla_varlen,
    rope_attention_varlen,
    rope_attention_with_kvcache,
)
from tests.support.dtypes import F16, F32
from tests.support.marks import interpreted
from tests.support.operators import SMALL, Record
from verification.testing import Case, make_inputs
from verification.testing.latent import LatentCase, make_latent_inputs


@interpreted
def test_plans_of_masked_calls():
    q, k, v, cos, sin, _ = make_inputs(Case(2, 2, 1, 8, 8, 16, dtype=F16))
    chosen = plan(q, k, v, cos, sin, True, window=(3, 0), strategy="prepass")
    assert chosen.backend == "triton" and chosen.strategy == "prepass"


@interpreted
@pytest.mark.parametrize(
    "choice", [{}, {"backend": "triton"}, {"strategy": "inline"}, {"strategy": "prepass"}], ids=str
)
def test_plan_explains_and_launches_nothing(choice):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    with Record() as record:
        chosen = plan(q, k, v, cos, sin, True, **choice)
    assert record.operators == []
    assert isinstance(chosen, fused_rope_attn.Plan) and isinstance(chosen.reason, str) and chosen.reason
    if not choice:
        assert chosen.backend == "reference" and chosen.strategy is None and "CPU" in chosen.reason
        return
    assert chosen.backend == "triton" and chosen.forward is not None and chosen.backward is not None
    if "strategy" in choice:
        assert chosen.forward.strategy == chosen.strategy == choice["strategy"]
    with Record() as record:
        rope_attention(q, k, v, cos, sin, True, **choice)
    assert any("attention_forward" in operator for operator in record.operators)


@interpreted
def test_plans_ignore_the_exact_length():
    def chosen(n):
        q, k, v, cos, sin, _ = make_inputs(Case(1, 1, 1, n, n, 16))
        return plan(q, k, v, cos, sin, True, backend="triton")

    assert chosen(100).forward is not None and chosen(100) == chosen(101)


def arguments(function):
    """Return arguments of a call of a function of attention, (positional, keywords), all of them tiny."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    ends = torch.tensor([0, 7], dtype=torch.int32)
    if function is rope_attention:
        return (q, k, v, cos, sin), {}
    if function is rope_attention_with_kvcache:
        return (q, k, v, cos, sin), {"cache_seqlens": ends[1:].repeat(2)}
    if function is rope_attention_varlen:
        return (*(x[0, :, :7].transpose(0, 1) for x in (q, k, v)), cos, sin, ends, ends, 7, 7), {}
    rows = make_latent_inputs(LatentCase(1, 2, 7, 7, dtype=F32))[:7]
    if function is rope_attention_mla:
        return rows, {}
    return (*(x[0].transpose(0, 1) for x in rows[:5]), *rows[5:], ends, ends, 7, 7), {}


ALIASES = {
    rope_attention: plan,
    rope_attention_varlen: plan_varlen,
    rope_attention_mla: plan_mla,
    rope_attention_mla_varlen: plan_mla_varlen,
    rope_attention_with_kvcache: plan_with_kvcache,
}


@interpreted
@pytest.mark.parametrize("function", ALIASES, ids=lambda x: x.__name__)
def test_one_plan_for_every_function(function):
    """The plan of a call that is known too, and the call after the plan runs."""
    positional, options = arguments(function)
    function(*positional, **options, backend="triton")
    with Record() as record:
        found = plan(function, *positional, **options, backend="triton")
    assert all(x.startswith(("aten.transpose", "aten.unsqueeze")) for x in record.operators)
    assert found.backend == "triton" and found.forward is not None
    assert plan(function, *positional, **options, backend="triton") == found
    assert ALIASES[function](*positional, **options, backend="triton") == found
    assert isinstance(function(*positional, **options, backend="triton"), torch.Tensor)


def test_a_plan_that_raises_leaves_calls_as_they_are():
    positional, _ = arguments(rope_attention)
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        plan(*positional, softmax_scale=math.inf)
    assert isinstance(rope_attention(*positional), torch.Tensor)


def test_other_functions_have_no_plan():
    """They do not run either."""
    x, table = torch.ones(1, 1, 4, 8), torch.zeros(4, 4)
    with pytest.raises(TypeError, match="^function must be one of rope_attention, .*, but is apply_rope$"):
        plan(apply_rope, x, table, table, out=x)
    assert bool((x == 1).all())
