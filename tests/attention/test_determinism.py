"""torch.use_deterministic_algorithms(True) asks for the same as deterministic=True."""

import pytest
import torch

from fused_rope_attn import apply_rope_qk, plan, plan_varlen, rope_attention, rope_attention_varlen
from fused_rope_attn.experimental.corope import CoRopeAttention
from tests.support.attention import assert_equal, gradients
from tests.support.internals import described_problems
from tests.support.marks import interpreted
from tests.support.operators import SMALL
from verification.testing import Case, make_inputs


@pytest.fixture
def setting():
    """PyTorch's setting as a function of (on, warn_only); afterwards it is what it was."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield lambda on, warn_only=False: torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def sm_90_call():
    """Return arguments of a call with a backward pass for the sm_90 kernels."""
    q = torch.empty(2, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4, 4096, 128, dtype=torch.bfloat16, device="meta")
    return q, k, k, *(torch.empty(4096, 64, device="meta") for _ in range(2))


def as_packed(q, k, v, cos, sin):
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = torch.empty(3, dtype=torch.int32, device=q.device)
    return *tokens, cos, sin, ends, ends, 4096, 4096


@pytest.mark.parametrize("warn_only", [False, True])
def test_plans_have_kernels_that_give_the_same_bits(arch, setting, monkeypatch, warn_only):
    arch("sm_90")
    call = sm_90_call()
    for planned, arguments in ((plan, call), (plan_varlen, as_packed(*call))):
        free = planned(*arguments, True)
        asked = planned(*arguments, True, deterministic=True)
        assert asked != free and type(asked.backward) is type(free.backward)
        setting(True, warn_only)
        given = planned(*arguments, True)
        setting(False)
        assert given == asked and planned(*arguments, True) == free
        assert "torch.use_deterministic_algorithms" in given.reason and "deterministic" not in free.reason


@interpreted
def test_gradients_of_two_runs_are_the_same_bits(setting):
    setting(True)
    inputs = make_inputs(Case(2, 2, 1, 9, 9, 16, dtype=torch.float32))
    tables = inputs.cos, inputs.sin
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)

    def packed(q, k, v):
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = rope_attention_varlen(*tokens, *tables, ends, ends, 9, 9, True, backend="triton")
        return o.unflatten(0, (2, 9)).transpose(1, 2)

    for function in (
        lambda q, k, v: rope_attention(q, k, v, *tables, True, backend="triton"),
        packed,
        lambda q, k, v: torch.cat(apply_rope_qk(q, k, *tables), 1)[:, :2] + v,
    ):
        assert_equal(gradients(function, inputs), gradients(function, inputs))


@pytest.mark.unpoisoned
@interpreted
def test_a_compiled_function_follows_the_setting(setting, monkeypatch):
    torch._dynamo.reset()
    seen = described_problems(monkeypatch)
    inputs = make_inputs(SMALL)[:5]
    compiled = torch.compile(rope_attention, fullgraph=True, backend="eager")
    for on in (False, True, False):
        setting(on)
        compiled(*inputs, True, backend="triton")
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
