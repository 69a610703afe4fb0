"""Masks in the portable kernels, in Triton's interpreter, against float64.

Shapes are just large enough that every loop runs: 64 x 32 tiles forward and for dq, 32 x 64 for dk and dv.
"""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import run_and_compare
from tests.support.cases import COMBINED, SQUARE, TWO_BATCHES, packed
from tests.support.dtypes import F32
from tests.support.marks import both_strategies, cases, cases_in_turn, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op


@interpreted
@ignore_overflow
@cases_in_turn(
    *(replace(SQUARE, window=window) for window in ((40, 0), (3, 0), (5000, -1))),
    *(replace(SQUARE, window=window, causal=False) for window in ((33, 7), (-1, 5), (40, -1), (2**40, 2**40))),
    replace(SQUARE, window=(33, 100)),  # causal is the narrower bound
    replace(TWO_BATCHES, window=(33, 0), dtype=F32),
    replace(TWO_BATCHES, window=(20, 10), causal=False, dtype=F32),
    Case(1, 1, 1, 100, 33, 16, window=(10, 0)),  # rows that see nothing
    Case(1, 1, 1, 1, 100, 16, window=(40, 0)),
)
def test_window(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
@ignore_overflow
@cases_in_turn(
    replace(TWO_BATCHES, kv_lens=(100, 3)),
    replace(TWO_BATCHES, kv_lens=(0, 200), causal=False, dtype=F32),
    replace(TWO_BATCHES, kv_starts=(10, 90)),
    replace(TWO_BATCHES, kv_starts=(75, 110), causal=False, dtype=F32),
    replace(TWO_BATCHES, kv_starts=(-4, 30), kv_lens=(70, 101), dtype=F32),
    replace(TWO_BATCHES, kv_starts=(50, 60), kv_lens=(40, 130), causal=False),  # no key is left in the first
    replace(TWO_BATCHES, len_q=110, kv_starts=(64, 33), table_batch=True),  # left-padded prompts
)
def test_bounds_of_the_keys(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
@ignore_overflow
@cases_in_turn(
    replace(SQUARE, len_q=50, len_k=70, softcap=2.0),
    replace(SQUARE, len_q=50, len_k=70, softcap=50.0, dtype=F32, causal=False),
    replace(SQUARE, len_q=50, len_k=70, softcap=0.5, dtype=F32, softmax_scale=-2.0),
    replace(SQUARE, len_q=50, len_k=70, softcap=1.0, dtype=F32, softmax_scale=0.0),
)
def test_softcap(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
@ignore_overflow
@both_strategies
@cases(
    replace(SQUARE, heads_q=2, len_q=70, len_k=50, sinks=True),  # rows that see nothing: not even the sink
    replace(TWO_BATCHES, heads_q=2, heads_kv=2, len_k=70, sinks=True, dtype=F32, causal=False),
)
def test_sinks(case, strategy):
    out = run_and_compare(case, strategy=strategy)
    unseeing = max(0, case.len_q - case.len_k)
    assert bool((out.lse[:, :, :unseeing] == -math.inf).all()) and bool((out.o[:, :, :unseeing] == 0).all())


@interpreted
@both_strategies
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_extreme_sinks(sink, strategy):
    case = Case(1, 2, 1, 20, 40, 16, dtype=F32)
    q, k, v, cos, sin, do = make_inputs(case)
    results = []
    for backend in ("triton", "reference"):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)] + [torch.full((2,), sink, requires_grad=True)]
        chosen = {"backend": backend, "strategy": strategy if backend == "triton" else "auto"}
        o, lse = rope_attention(*tensors[:3], cos, sin, True, sinks=tensors[3], return_lse=True, **chosen)
        results.append((o, lse, *torch.autograd.grad(o, tensors, do)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@interpreted
@ignore_overflow
@cases_in_turn(*COMBINED)
def test_combinations(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
@both_strategies
def test_reruns_are_bitwise_equal(strategy):
    for case in (COMBINED[3], packed((30, 0, 40), sinks=True)):
        inputs = make_inputs(case)
        first, again = (run_op(inputs, case, backend="triton", strategy=strategy) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip((*first, first.dsinks), (*again, again.dsinks)))
