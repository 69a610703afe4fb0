"""Plans that mix the sm_90 kernels with the portable ones, and inputs that the sm_90 kernels cannot address."""

from dataclasses import replace

import pytest

from fused_rope_attn import plan
from fused_rope_attn.attention import configs
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_same_but_dq, misaligned
from tests.support.hopper import ON_SM_90, needs_sm_90
from tests.support.internals import run_operators
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90


def test_v_at_an_odd_address():
    """It is copied, and the results are those of an aligned one."""
    case = replace(MANY_TILES, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **ON_SM_90)
    assert_same_but_dq(run_op(inputs._replace(v=misaligned(inputs.v)), case, **ON_SM_90), expected)


def test_passes_of_different_backends_fit_together():
    """o and lse mean the same to both."""
    case, inputs = ODD_LENGTHS, make_inputs(ODD_LENGTHS, "cuda")
    for forward, backward in (("hopper", "triton"), ("triton", "hopper")):
        out = run_operators(inputs, case, forward=forward, backward=backward)
        assert_matches_float64(case, inputs, out)


@pytest.mark.parametrize("forward", [True, False])
def test_auto_runs_mixed_plans(preferred, forward):
    preferred(forward, not forward)
    inputs = make_inputs(MANY_TILES, "cuda")
    chosen = plan(*inputs[:5], True)
    assert isinstance(chosen.forward, configs.HopperForwardConfig) == forward
    assert isinstance(chosen.backward, configs.HopperBackwardConfig) != forward
    assert_matches_float64(MANY_TILES, inputs, run_op(inputs, MANY_TILES, backend="auto"))


# Short calls that have just as many tiles as "auto" asks for.
SHORT = [
    Case(4, 34, 17, 509, 509, 64, dtype=BF16),
    Case(2, 36, 12, 1000, 1000, 64, dtype=BF16),
    Case(1, 9, 3, 2001, 2001, 64, dtype=BF16),
    Case(2, 17, 17, 1000, 1000, 64, causal=False, dtype=BF16),
    Case(8, 34, 34, 509, 509, 128, dtype=BF16),
    Case(4, 34, 34, 509, 509, 128, causal=False, dtype=BF16),
    Case(1, 34, 34, 1000, 1000, 128, causal=False, dtype=BF16),
]


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_short_calls_with_many_tiles(case):
    inputs = make_inputs(case, "cuda")
    assert plan(*inputs[:5], case.causal).backend == "hopper"
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="auto"))
