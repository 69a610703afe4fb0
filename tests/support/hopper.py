"""Marks and cases of the tests that run the sm_90 kernels on their GPU."""

from dataclasses import replace
from functools import partial

import pytest

from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, assert_same_but_dq, is_sm_90
from verification.testing import make_inputs, run_op

needs_sm_90 = [pytest.mark.gpu, pytest.mark.skipif(not is_sm_90(), reason="needs an sm_90 GPU")]
ON_SM_90 = {"backend": "hopper"}


def check_in_dtype(case, dtype):
    """Compare the case with float64 in ``dtype``, which its tables have too where they are not float32; the inputs stay
    as they are."""
    case = replace(case, dtype=dtype)
    if case.table_dtype is BF16:
        case = replace(case, table_dtype=dtype)
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, **ON_SM_90)
    assert_equal(before, inputs)
    assert_matches_float64(case, inputs, out)


def check_reruns(case, times):
    """Run after run gives the same bits but for dq, with ``deterministic`` for dq too; both match float64."""
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    fixed = run_op(inputs, case, **ON_SM_90, deterministic=True)
    assert_equal(fixed[:2], first[:2])
    for _ in range(times):
        assert_same_but_dq(run_op(inputs, case, **ON_SM_90), first)
        assert_equal(run_op(inputs, case, **ON_SM_90, deterministic=True), fixed)
    assert_matches_float64(case, inputs, first)
    assert_matches_float64(case, inputs, fixed)


# Key blocks of 128 and query blocks of 64 that begin, end and are cut in every way.
PADDED = replace(ODD_LENGTHS, len_q=300, len_k=700)


packed = partial(packed_case, ODD_LENGTHS)

# Tiles of 128 queries, 64 of a warpgroup, and 128 keys, query blocks of 64: cut by a row, whole, empty, and alone.
UNEVEN = ((10, 700), (400, 7), (0, 20), (20, 0), (1, 333), (129, 129), (65, 191), (128, 256))
EMPTY = (16, 2, 3, 1) * 50 + (0,) * 1000  # mostly tiles without queries; lengths are read in two steps
