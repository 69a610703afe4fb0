"""Bounds of keys and of packed sequences that cannot be, and that the host cannot read, are harmless."""

import math

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen
from tests.support.dtypes import F32, int32
from tests.support.marks import ignore_overflow
from tests.support.operators import assert_close, kernel_or_reference
from tests.support.paths import python
from tests.support.places import each_place
from verification.testing import Case, make_inputs

pytestmark = ignore_overflow


@each_place
@pytest.mark.parametrize(
    "ends", [(12, 300, 700), (0, 500, 300), (300, 200, 200), (0, 300, 720), (0, -40, 700)], ids=str
)
def test_every_row_is_written(ends, place, monkeypatch):
    """Fresh memory is NaN here, and every row must be 0. The ends of q, of k, and of both are wrong. The host reads
    those of CPU tensors: here it does not."""
    monkeypatch.setattr("fused_rope_attn.runtime.checks.check_ends", lambda *given: None)
    case = place.packed((300, 400))
    inputs = make_inputs(case, place.device)
    leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3]]
    good, bad = (int32(place.smaller(x)).to(place.device) for x in ((0, 300, 700), ends))
    options = {"sinks": torch.ones(case.heads_q, device=place.device), "return_lse": True, "return_max_logit": True}
    for both in ((bad, good), (good, bad), (bad, bad)):
        given = *leaves, *inputs[3:5], *both, case.len_q, case.len_k, True
        o, lse, max_logit = rope_attention_varlen(*given, **options, **place.options)
        assert not any(bool(x.any()) for x in (o, *torch.autograd.grad(o, leaves, torch.randn_like(o))))
        assert bool((lse == -math.inf).all()) and bool((max_logit == -math.inf).all())


@kernel_or_reference("triton", "reference")
def test_lengths_of_keys_that_cannot_be_are_clamped(backend):
    """Negative ones mean no keys, those beyond NK all of them. Random calls have such that are nearer."""
    inputs = make_inputs(Case(4, 2, 1, 5, 9, 16, dtype=F32))

    def run(lens, starts):
        given = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        bounds = {"kv_lens": int32(lens), "kv_starts": int32(starts)}
        o, lse = rope_attention(*given, inputs.cos, inputs.sin, True, **bounds, backend=backend, return_lse=True)
        return lse, o, *torch.autograd.grad(o, given, inputs.do)

    found = run([-1, -(2**31), 9, 2**31 - 1], [-(2**31), 0, 2**31 - 1, 0])
    assert_close(found, run([0, 0, 9, 9], [0, 0, 9, 0]), 0.0)
    assert bool((found[0][:3] == -math.inf).all()) and not any(bool(x[:3].any()) for x in found[1:])


@pytest.mark.gpu
def test_an_assertion_can_be_asked_for():
    """In a process of its own, because the assertion ends the use of the GPU."""
    program = """
import torch
from fused_rope_attn import rope_attention_varlen
q = torch.randn(700, 4, 64, device="cuda", dtype=torch.bfloat16)
table = torch.ones(700, 32, device="cuda")
ends = torch.tensor([0, 500, 300], dtype=torch.int32, device="cuda")
rope_attention_varlen(q, q, q, table, table, ends, ends, 700, 700, True, backend="triton")
torch.cuda.synchronize()
"""
    result = python("-c", program, TRITON_DEBUG="1")
    # The text of the assertion is lost if the process ends before the driver prints it.
    assert result.returncode != 0 and "device-side assert" in result.stderr
