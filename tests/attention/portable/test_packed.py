"""Packed sequences in the portable kernels, in Triton's interpreter, against float64."""

import math

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from tests.support.attention import run_and_compare
from tests.support.cases import PACKINGS, packed
from tests.support.dtypes import F32
from tests.support.marks import both_strategies, cases_in_turn, ignore_overflow, interpreted
from tests.support.packed_tables import SEQUENCES, assert_nothing_reads_behind_the_tables
from verification.testing import make_inputs, masks_of, run_op


@interpreted
@ignore_overflow
@cases_in_turn(*PACKINGS)
def test_packed_sequences(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
def test_more_sequences_than_are_counted_at_once():
    """The search for a tile's sequence goes through a second chunk; nearly all sequences are empty."""
    lengths = [0] * 1100
    lengths[3], lengths[1050], lengths[1051] = 5, 40, 1
    case = packed(tuple(lengths), dtype=F32, heads_q=1)
    inputs = make_inputs(case)
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    q, k, v = (x[0].transpose(0, 1) for x in inputs[:3])
    with torch.no_grad():
        out = [
            rope_attention_varlen(q, k, v, inputs.cos, inputs.sin, cu, cu, 40, 40, True, backend=backend)
            for backend in ("triton", "reference")
        ]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_sequences_do_not_see_each_other():
    """NaN in one sequence stays there."""
    case = packed((40, 50, 30), dtype=F32)
    inputs = make_inputs(case)
    changed = inputs._replace(**{n: getattr(inputs, n).clone() for n in ("q", "k", "v", "do")})
    for x in (changed.q, changed.k, changed.v, changed.do):
        x[:, :, 40:90] = math.nan
    expected, out = (run_op(x, case, backend="triton", strategy="prepass") for x in (inputs, changed))
    for x, y in zip(out, expected):
        assert torch.equal(x[:, :, :40], y[:, :, :40]) and torch.equal(x[:, :, 90:], y[:, :, 90:])


@interpreted
@pytest.mark.unpoisoned
def test_packed_sequences_compile():
    torch._dynamo.reset()
    case = packed((5, 9, 3), dtype=F32, sinks=True)
    inputs = make_inputs(case)
    cu = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    sinks = masks_of(case)["sinks"].requires_grad_()

    def run(q, k, v, sinks):
        return rope_attention_varlen(
            q, k, v, inputs.cos, inputs.sin, cu, cu, 9, 9, True, window=(4, 0), sinks=sinks, backend="triton"
        )

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        tensors = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3]] + [sinks]
        o = function(*tensors)
        results.append((o, *torch.autograd.grad(o, tensors, inputs.do[0].transpose(0, 1))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


@interpreted
@ignore_overflow
@both_strategies
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_rows_behind_the_last_sequence_read_no_table_rows(name, causal, strategy):
    options = {"causal": causal, "backend": "triton", "strategy": strategy}
    assert_nothing_reads_behind_the_tables(name, 16, F32, "cpu", **options)
