"""`plan` against the kernels that really run: it explains and launches nothing."""

import pytest

import fused_rope_attn
from fused_rope_attn import plan, rope_attention
from tests.support.dtypes import F16
from tests.support.marks import interpreted
from tests.support.operators import SMALL, Record
from verification.testing import Case, make_inputs


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
        assert chosen.forward.strategy == chosen.backward.strategy == chosen.strategy == choice["strategy"]
    with Record() as record:
        rope_attention(q, k, v, cos, sin, True, **choice)
    assert any("attention_forward" in operator for operator in record.operators)


@interpreted
def test_plans_ignore_the_exact_length():
    def chosen(n):
        q, k, v, cos, sin, _ = make_inputs(Case(1, 1, 1, n, n, 16))
        return plan(q, k, v, cos, sin, True, backend="triton")

    assert chosen(100).forward is not None and chosen(100) == chosen(101)
