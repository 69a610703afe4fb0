"""The reference's mask of a whole packed batch against each sequence by itself."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from tests.support.attention import sequences_of
from tests.support.cases import PACKINGS, packed
from tests.support.dtypes import F32
from tests.support.marks import cases
from verification.testing import make_inputs, run_op, run_reference


@cases(*PACKINGS)
def test_the_packed_reference(case):
    """Its mask of the whole batch against each sequence by itself."""
    case = replace(case, dtype=F32)
    inputs = make_inputs(case)
    out, expected = run_op(inputs, case, backend="reference"), run_reference(inputs, case, torch.float64)
    for x, y in zip((*out, out.dsinks), (*expected, expected.dsinks)):
        if x is not None and x.numel():
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@cases(
    packed(((10, 20), (7, 3), (0, 5), (4, 0), (1, 9), (12, 12)), behind=(3, 6), dtype=F32),
    packed(((10, 20), (7, 3), (0, 5), (4, 0), (1, 9), (12, 12)), behind=(3, 6), causal=False, dtype=torch.float64),
    packed((9, 1, 6), window=(3, 0), softcap=4.0, sinks=True),
)
def test_the_packed_reference_keeps_bad_values_where_they_are(case, bad):
    """In each sequence in turn, and after the last: o and every gradient of the others keep their bits, as do rows of
    the same sequence with a window that does not reach a bad key."""
    inputs = make_inputs(case)
    expected = run_op(inputs, case, backend="reference")
    for first_q, len_q, first_k, len_k in sequences_of(case):
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        if len_k == 0:  # the keys after the last sequence too
            rows_k = slice(first_k, case.len_k if first_q + len_q == case.len_q else first_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, backend="reference")
        if 0 < len_q <= len_k:  # all of them see a key
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any()), "what a row sees must not be hidden"
            assert not bool(torch.isfinite(out.dv[:, :, rows_k]).all())
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
            assert torch.equal(x, y), (name, rows)
    if case.window is not None:
        first, (length, _) = sum(n for n, _ in case.seqlens[:-1]), case.seqlens[-1]
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :, first], v[:, :, first] = bad, bad
        out = run_op(inputs._replace(k=k, v=v), case, backend="reference")
        seeing = slice(first, first + 1 + case.window[0])
        hidden = slice(first + 1 + case.window[0], first + length)
        assert not bool(torch.isfinite(out.o[:, :, seeing]).any())
        for x, y in ((out.o, expected.o), (out.dq, expected.dq)):
            assert torch.equal(x[:, :, hidden], y[:, :, hidden])


@pytest.mark.unpoisoned
def test_the_packed_reference_differentiates_and_compiles():
    """Its products are autograd functions of its own: one graph."""
    case = packed(((2, 3), (3, 1), (0, 2), (3, 4)), behind=(1, 1), dtype=torch.float64, heads_q=4, heads_kv=2)
    inputs = make_inputs(case)
    ends = torch.tensor([[0, 2, 5, 5, 8], [0, 3, 4, 6, 10]], dtype=torch.int32)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def run(q, k, v):
        packed_inputs = (x[0].transpose(0, 1) for x in (q, k, v))
        return rope_attention_varlen(*packed_inputs, inputs.cos, inputs.sin, *ends, 3, 4, True, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)
    torch._dynamo.reset()
    do = torch.randn_like(run(q, k, v))
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        o = function(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)
