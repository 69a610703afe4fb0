"""NaN and infinity at invisible places change no bit: keys outside the masks, rows that see nothing."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.cases import TWO_BATCHES, packed
from tests.support.dtypes import F32
from tests.support.marks import both_strategies, cases, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op


@interpreted
@ignore_overflow
@both_strategies
@pytest.mark.parametrize("backend", ["triton", "reference"])
@cases(
    replace(TWO_BATCHES, kv_starts=(10, 70), kv_lens=(100, 105), dtype=F32),
    replace(TWO_BATCHES, kv_starts=(10, 70), kv_lens=(100, 105), dtype=F32, causal=False),
    replace(TWO_BATCHES, kv_starts=(105, 70), kv_lens=(100, 105), dtype=F32, causal=False),
    Case(1, 1, 1, 10, 140, 16, window=(50, 0), dtype=F32),
    packed((20, 33), behind=(40, 70), dtype=F32),
)
def test_nan_in_keys_that_nobody_reaches(case, backend, strategy):
    """... and in query rows that see nothing, and their dO: the same numbers, and zero gradients there."""
    inputs = make_inputs(case)
    q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    choice = {"backend": backend, "strategy": strategy if backend == "triton" else "auto"}
    expected = run_op(inputs, case, **choice)
    for b in range(case.batch):
        if case.seqlens is not None:
            k[:, :, 53:], v[:, :, 53:] = math.nan, math.nan
            q[:, :, 53:], do[:, :, 53:] = math.nan, math.nan
        elif case.window is not None:
            k[b, :, : 130 - 50], v[b, :, : 130 - 50] = math.nan, math.inf
        else:
            k[b, :, : case.kv_starts[b]], v[b, :, : case.kv_starts[b]] = math.nan, math.inf
            k[b, :, case.kv_lens[b] :], v[b, :, case.kv_lens[b] :] = math.inf, math.nan
            dead = case.kv_starts[b] - case.kv_lens[b] + case.len_q
            if case.causal or dead > case.len_q:
                q[b, :, : max(0, dead)], do[b, :, : max(0, dead)] = math.nan, math.nan
    out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **choice)
    for name, x, y in zip(out._fields, out, expected):
        assert torch.equal(x, y), name


@interpreted
@ignore_overflow
@both_strategies
@pytest.mark.parametrize("backend", ["triton", "reference"])
@cases(
    Case(2, 4, 2, 70, 33, 16, dtype=F32),
    Case(1, 2, 1, 129, 35, 32, window=(18, -1), interleaved=True, dtype=F32),
    Case(1, 2, 2, 65, 1, 16, softcap=5.0, sinks=True, dtype=F32),
)
def test_nan_in_queries_before_the_first_key(case, backend, strategy):
    """There are more queries than keys, and no lengths: the first rows see nothing, whatever they and their dO hold."""
    inputs = make_inputs(case)
    choice = {"backend": backend, "strategy": strategy if backend == "triton" else "auto"}
    expected = run_op(inputs, case, **choice)
    q, do, dead = inputs.q.clone(), inputs.do.clone(), case.len_q - case.len_k
    q[:, :, :dead], do[:, :, :dead] = math.nan, math.inf
    out = run_op(inputs._replace(q=q, do=do), case, **choice)
    for name, x, y in zip(out._fields, out, expected):
        assert torch.equal(x, y), name
    assert not out.o[:, :, :dead].any() and not out.dq[:, :, :dead].any()
