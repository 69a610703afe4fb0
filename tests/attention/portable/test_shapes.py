"""The portable kernels in Triton's interpreter: lengths, heads and head dims, against float64.

No case is in bfloat16, because the interpreter multiplies its raw bits; the *_gpu.py files have those. Shapes are tiny,
because a 64x64 tile of one head costs about 0.2 s, and odd, because kernels go wrong where a tile is cut.
"""

import math

import pytest

from tests.support.attention import run_and_compare
from tests.support.dtypes import F32
from tests.support.marks import both_strategies, cases, ignore_overflow, interpreted
from verification.testing import Case

pytestmark = [interpreted, ignore_overflow]


@both_strategies
@cases(
    *(Case(1, 1, 1, n, n, 32, causal=causal) for n in (1, 17, 63, 100) for causal in (False, True)),
    Case(1, 1, 1, 128, 128, 16),  # whole tiles only
    Case(1, 1, 1, 65, 65, 16, dtype=F32),
    Case(1, 1, 1, 100, 100, 32, dtype=F32, causal=False),
)
def test_lengths(case, strategy):
    run_and_compare(case, strategy=strategy)


@both_strategies
@cases(
    *(Case(1, 1, 1, *lengths, 16) for lengths in ((1, 70), (33, 100), (64, 65), (70, 1), (100, 33), (97, 64))),
    *(Case(1, 1, 1, *lengths, 16, causal=False) for lengths in ((1, 70), (33, 100), (64, 65))),
    Case(2, 2, 1, 37, 50, 16, dtype=F32),
    Case(2, 2, 1, 50, 37, 16, dtype=F32),
)
def test_different_lengths_of_q_and_k(case, strategy):
    out = run_and_compare(case, strategy=strategy)
    unseeing = max(0, case.len_q - case.len_k)
    if case.causal and unseeing:
        assert bool((out.o[:, :, :unseeing] == 0).all()) and bool((out.dq[:, :, :unseeing] == 0).all())
        assert bool((out.lse[:, :, :unseeing] == -math.inf).all())


@both_strategies
@cases(
    Case(2, 6, 2, 17, 17, 16),
    Case(2, 3, 1, 17, 17, 16, causal=False),
    Case(1, 5, 5, 17, 17, 16),
    Case(3, 7, 1, 9, 20, 16, dtype=F32),
    Case(1, 8, 2, 40, 40, 16, dtype=F32),
)
def test_heads(case, strategy):
    run_and_compare(case, strategy=strategy)


@both_strategies
@cases(
    *(Case(1, 1, 1, 37, 37, d) for d in (16, 24, 40, 64, 72, 80, 96)),
    Case(1, 1, 1, 20, 33, 128),
    Case(1, 1, 1, 17, 17, 256),
    Case(1, 2, 1, 20, 20, 24, dtype=F32, causal=False),
    Case(1, 2, 1, 20, 20, 96, dtype=F32),
    Case(1, 1, 1, 9, 9, 200, dtype=F32, interleaved=True),
)
def test_head_dims(case, strategy):
    run_and_compare(case, strategy=strategy)


@both_strategies
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 0, 0), (2, 5, 0)])
def test_empty(batch, len_q, len_k, strategy):
    case = Case(batch, 2, 1, len_q, len_k, 16)
    out = run_and_compare(case, strategy=strategy)
    assert bool((out.lse == -math.inf).all()) or len_k > 0
    for x in (out.o, out.dq, out.dk, out.dv):
        assert bool((x == 0).all())
