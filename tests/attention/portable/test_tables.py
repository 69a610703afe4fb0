"""The rotation inside the portable kernels: partial, interleaved, by every kind of table. In the interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.attention import run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import both_strategies, cases, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op

pytestmark = [interpreted, ignore_overflow]


@both_strategies
@pytest.mark.parametrize("interleaved", [False, True])
@cases(
    *(Case(1, 2, 1, 20, 37, d, rotary_dim=r) for d, r in ((16, 2), (16, 6), (24, 10), (40, 38), (32, 16), (64, 32))),
    Case(1, 1, 1, 37, 37, 80, rotary_dim=64, dtype=F32),
    Case(1, 1, 1, 20, 20, 24, rotary_dim=14, dtype=F32),
)
def test_partial_rotation(case, interleaved, strategy):
    run_and_compare(replace(case, interleaved=interleaved), strategy=strategy)


@both_strategies
@pytest.mark.parametrize("interleaved", [False, True])
@cases(
    Case(1, 1, 1, 37, 37, 32),
    Case(1, 1, 1, 37, 37, 32, full_width=True),
    Case(1, 1, 1, 37, 37, 40, full_width=True, rotary_dim=24),
    Case(1, 1, 1, 37, 37, 40, full_width=True, rotary_dim=10),  # W <= D/2: only rotary_dim tells it is full-width
    Case(3, 2, 1, 17, 20, 16, table_batch=True),
    Case(2, 1, 1, 17, 20, 16, table_batch=True, full_width=True, extra_rows=3, dtype=F32),
    Case(2, 1, 1, 17, 20, 16, extra_rows=7),
    Case(1, 1, 1, 37, 37, 16, table_dtype=F16),
    Case(1, 1, 1, 37, 37, 16, table_dtype=F16, full_width=True),
    Case(1, 1, 1, 37, 37, 16, tables="random"),
    Case(2, 2, 1, 20, 33, 24, tables="random", dtype=F32, rotary_dim=20, table_batch=True),
    Case(1, 1, 1, 37, 37, 16, tables="yarn", dtype=F32),
)
def test_tables(case, interleaved, strategy):
    run_and_compare(replace(case, interleaved=interleaved), strategy=strategy)


@both_strategies
def test_tables_with_a_leading_one_and_odd_strides(strategy):
    case = Case(2, 2, 1, 17, 17, 16)
    inputs = make_inputs(case)
    plain = run_and_compare(case, inputs, strategy=strategy)

    def strided(table):
        wide = torch.full((1, 2 * table.shape[0], 3 * table.shape[1] + 1), math.nan)
        wide[:, ::2, 1::3] = table
        return wide[:, ::2, 1::3]

    for cos, sin in ((strided(inputs.cos), inputs.sin[None]), (inputs.cos[None], strided(inputs.sin))):
        again = run_op(inputs._replace(cos=cos, sin=sin), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(plain, again))
