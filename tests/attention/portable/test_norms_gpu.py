"""The norms of q and k in the portable kernels on a GPU: bfloat16 and every card's tiles, against float64."""

from dataclasses import replace

import pytest

from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import both_strategies, cases
from verification.testing import Case, make_inputs, run_op

pytestmark = pytest.mark.gpu
BASE = Case(2, 8, 2, 500, 700, 128, dtype=BF16, norms=0.0)
CASES = (
    BASE,
    replace(BASE, head_dim=64, interleaved=True, norms=1.0, norm_dtype=BF16),
    replace(BASE, head_dim=80, rotary_dim=40, causal=False, layout="odd", norm_eps=1e-2),
    replace(BASE, head_dim=256, window=(200, 0), softcap=30.0, sinks=True),
    replace(BASE, kv_starts=(5, 600), kv_lens=(650, 640)),
    packed_case(BASE, (16, 333, 0, 1, 700, 64, 129), behind=(30, 50)),
)


@both_strategies
@cases(*CASES)
def test_norms_against_float64(case, strategy):
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    assert_matches_float64(case, inputs, out)
    again = run_op(inputs, case, backend="triton", strategy=strategy)
    assert_equal((*out, out.dq_norm, out.dk_norm), (*again, again.dq_norm, again.dk_norm))


@pytest.mark.parametrize("dtype", [F16, F32])
def test_other_dtypes(dtype):
    case = replace(BASE, dtype=dtype, norm_dtype=dtype)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="triton"))


def test_launch_bound_calls():
    """ "auto" takes the portable kernels for little work, K normed and rotated in the loop."""
    case = replace(BASE, len_q=100, len_k=100, batch=1)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="auto"))
