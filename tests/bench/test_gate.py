"""The gate of attention: it lets the truth pass, calls rounding loose, and stops what computes something else."""

import pytest
import torch

from bench.attention.subject import check
from bench.gate import Gate
from fused_rope_attn import testing
from tests.support.bench import TINY, Scripted, right


def _gate(provider, **kwargs):
    case = TINY.case
    return check(provider, Gate(case, testing.make_inputs(case)), lambda: None, grads=True, **kwargs)


def test_gate_passes_the_truth():
    verdict = _gate(Scripted("fused", right))
    assert verdict.status == "ok" and verdict.detail == "" and verdict.row_ratio <= 2.5


@pytest.mark.parametrize("name", ["fused", "rival"])
def test_gate_stops_wrong_angles_from_anybody(name):
    def shifted(q, k, v, tables, causal):
        cos, sin = (torch.roll(table, 1, 0) for table in tables)
        return right(q, k, v, (cos, sin.neg()), causal)

    verdict = _gate(Scripted(name, shifted))
    assert verdict.status == "failed" and "rows too far off" in verdict.detail


def test_gate_stops_nan():
    verdict = _gate(Scripted("rival", lambda *a: right(*a) * float("nan")))
    assert verdict.status == "failed" and "not finite" in verdict.detail


def test_a_rounding_rival_is_loose_but_ours_is_red():
    def coarse(q, k, v, tables, causal):
        o = right(q, k, v, tables, causal)
        bump = torch.zeros_like(o)
        bump[:, :, 5] = 2e-3  # one row, a few roundings off
        return o + bump

    assert _gate(Scripted("rival", coarse)).status == "loose"
    assert _gate(Scripted("rival", coarse), strict=True).status == "failed"
    assert _gate(Scripted("fused", coarse)).status == "failed"


def test_gate_sees_every_half_of_a_gqa_batch():
    def last_head_wrong(q, k, v, tables, causal):
        o = right(q, k, v, tables, causal)
        keep = torch.ones_like(o)
        keep[-1, -1] = 0.5
        return o * keep

    assert _gate(Scripted("fused", last_head_wrong)).status == "failed"
