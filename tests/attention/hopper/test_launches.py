"""The launches of the sm_90 backward around its main kernel, which only a GPU runs: the interpreter runs the others."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.attention.configs import HopperBackwardConfig
from fused_rope_attn.attention.hopper import backward
from fused_rope_attn.runtime import device
from tests.support.attention import assert_equal
from tests.support.cases import TWO_BATCHES
from tests.support.internals import described
from tests.support.marks import interpreted
from verification.testing import make_inputs

pytestmark = interpreted


def run(case, parts, monkeypatch):
    """Return the gradients of a call with groups in so many parts. Its main kernel leaves random sums, of a seed."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    monkeypatch.setattr(backward, "parts_of_group", lambda *given: parts)
    inputs = make_inputs(case)
    problem, tensors = described(inputs, case)
    o, do = (torch.randn(inputs.do.shape).to(inputs.do.dtype) for _ in range(2))
    lse = torch.randn(inputs.q.shape[:3])
    given = (do, o, lse, *tensors)
    call = backward.BackwardCall(problem.for_launch(), given, HopperBackwardConfig(pdl=False))
    heads = case.batch * case.heads_kv * -(-case.len_k // 128)

    def main(stream, gradients, dq_accumulator, **more):
        assert call.main_programs == heads * parts
        if parts > 1:
            counters = gradients.counters_ptr[: 2 * gradients.slots_ptr.shape[0]]
            assert gradients.slots_ptr.shape[0] == heads * (parts - 1) and (counters == 0).all()
            counters.fill_(4)
        torch.manual_seed(1)
        for x in (getattr(dq_accumulator, "base", dq_accumulator), gradients.dk.ptr, gradients.dv.ptr):
            x.normal_()

    call.main_programs, call.main = call.main.grid[0], main
    return call(given)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("norms", [None, 1.0])
def test_parts_of_groups_change_nothing_around_the_main_kernel(parts, norms, monkeypatch):
    case = replace(TWO_BATCHES, heads_q=6, heads_kv=2, len_q=70, len_k=150, head_dim=64, dtype=torch.float16)
    case = replace(case, norms=norms, norm_dtype=torch.float32)
    torch.manual_seed(0)
    expected = run(case, 1, monkeypatch)
    torch.manual_seed(0)
    found = run(case, parts, monkeypatch)
    assert all((x is None) == (y is None) for x, y in zip(found, expected))
    assert (found.dk_norm is None) == (norms is None)
    assert_equal(*([x for x in each if x is not None] for each in (found, expected)))
    assert all(x.isfinite().all() for x in found if x is not None)
