"""torch.use_deterministic_algorithms(True) asks for the same as deterministic=True."""

import pytest
import torch

from fused_rope_attn import plan, plan_varlen, rope_attention
from fused_rope_attn.experimental.corope import CoRopeAttention
from tests.support.attention import assert_equal
from tests.support.internals import described_problems
from tests.support.marks import interpreted
from tests.support.operators import SMALL, differentiated, small_call, small_calls
from tests.support.planning import call, packed_call
from verification.testing import make_inputs


@pytest.fixture
def setting():
    """PyTorch's setting as a function of (on, warn_only); afterwards it is what it was."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield lambda on, warn_only=False: torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("warn_only", [False, True])
def test_plans_have_kernels_that_give_the_same_bits(arch, setting, warn_only):
    for planned, given in ((plan, call(heads=(16, 4))), (plan_varlen, packed_call(2, 8192, 4096, heads=(16, 4)))):
        free, asked = planned(**given), planned(**given, deterministic=True)
        assert asked != free and type(asked.backward) is type(free.backward)
        setting(True, warn_only)
        found = planned(**given)
        setting(False)
        assert found == asked and planned(**given) == free
        assert "torch.use_deterministic_algorithms" in found.reason and "deterministic" not in free.reason


@interpreted
@small_calls
def test_gradients_of_two_runs_are_the_same_bits(setting, name):
    setting(True)
    assert_equal(*(differentiated(*small_call(name, backend="triton")) for _ in range(2)))


@pytest.mark.unpoisoned
@interpreted
def test_a_compiled_function_follows_the_setting(setting, monkeypatch):
    torch._dynamo.reset()
    seen = described_problems(monkeypatch)
    compiled = torch.compile(rope_attention, fullgraph=True, backend="eager")
    for on in (False, True, False):
        setting(on)
        compiled(*make_inputs(SMALL)[:5], True, backend="triton")
        assert seen.pop().deterministic == on


def test_corope_says_that_its_gradients_are_not(setting, monkeypatch):
    """Like PyTorch's own operators: an error of the backward pass, or a warning if that was asked for."""
    launchers = "fused_rope_attn.experimental.corope"
    monkeypatch.setattr(f"{launchers}.corope_forward", lambda q, k, v, **options: (q.clone(), q, q))
    monkeypatch.setattr(f"{launchers}.corope_backward", lambda do, q, k, v, *rest, **options: (do, do, do))
    x = torch.ones(1, 1, 4, 32, requires_grad=True)
    o = CoRopeAttention.apply(x, x, x, 10000.0, 1.0).sum()
    setting(True)
    with pytest.raises(RuntimeError, match="corope_attention has no deterministic kernels"):
        o.backward(retain_graph=True)
    assert x.grad is None
    setting(True, warn_only=True)
    with pytest.warns(UserWarning, match="corope_attention has no deterministic kernels"):
        o.backward()
    assert x.grad is not None
