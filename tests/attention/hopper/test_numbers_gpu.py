"""The sm_90 backend on its GPU against float64: shapes, extreme logits, unseen rows, the verification's matrix."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import FEW_HEADS, FEW_KEY_HEADS, MANY_TILES, ODD_LENGTHS, SOME_TILES, check_extreme_logits
from tests.support.hopper import ON_SM_90, needs_sm_90
from tests.support.paths import ROOT
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90


@pytest.mark.parametrize(
    "case",
    [
        ODD_LENGTHS,
        replace(ODD_LENGTHS, len_q=1),
        replace(ODD_LENGTHS, len_q=700, len_k=333),  # rows that see nothing
        replace(ODD_LENGTHS, batch=1, heads_q=6, heads_kv=3, len_q=1000, len_k=1000),
        replace(ODD_LENGTHS, len_q=1024, len_k=1024),
        replace(ODD_LENGTHS, tables="yarn", extra_rows=100, table_batch=True),
        replace(ODD_LENGTHS, softmax_scale=-0.3),
        replace(ODD_LENGTHS, softmax_scale=0.0),
        replace(ODD_LENGTHS, causal=False),
        replace(ODD_LENGTHS, causal=False, len_q=1, len_k=1),
        replace(ODD_LENGTHS, rotary_dim=64, full_width=True, interleaved=True, tables="random"),
        replace(ODD_LENGTHS, table_dtype=BF16, full_width=True),
        MANY_TILES,
        *SOME_TILES,
        replace(SOME_TILES[0], len_q=2000, len_k=2600, kv_lens=(2500,)),
        *(replace(case, head_dim=head_dim) for case in (FEW_KEY_HEADS, FEW_HEADS) for head_dim in (64, 96, 128, 256)),
        replace(FEW_KEY_HEADS, window=(600, 0), causal=False, softcap=30.0, head_dim=64),
        Case(2, 4, 4, 1000, 1000, 64, dtype=F16),
        Case(2, 4, 2, 1000, 1000, 64, dtype=F16, causal=False),
        Case(2, 4, 1, 600, 600, 96, dtype=BF16),
    ],
    ids=lambda case: case.name,
)
def test_against_float64(case):
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, **ON_SM_90)
    assert_equal(before, inputs)
    assert_matches_float64(case, inputs, out)


@pytest.mark.timeout(1200)
def test_the_verification_matrix():
    """Every small case that the backend serves, compiled by many processes."""
    jobs = str(min(16, os.cpu_count() or 1))
    command = [sys.executable, "-m", "verification", "--backend", "hopper", "--small", "--json", "", "--jobs", jobs]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit):
    check_extreme_logits(logit, **ON_SM_90)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(bad):
    case = replace(ODD_LENGTHS, len_q=700, len_k=333)
    inputs = make_inputs(case, "cuda")
    inputs.v[:, :, 0] = bad
    out = run_op(inputs, case, **ON_SM_90, grads=False)
    hidden = 700 - 333
    assert bool((out.o[:, :, :hidden] == 0).all()) and bool((out.lse[:, :, :hidden] == -math.inf).all())
    assert bool(torch.isfinite(out.lse[:, :, hidden:]).all())
    assert not bool(torch.isfinite(out.o[:, :, hidden:]).any()), "a visible NaN or infinity must not be hidden"


@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5)])
def test_empty(batch, len_q, len_k):
    case = replace(ODD_LENGTHS, batch=batch, len_q=len_q, len_k=len_k)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, **ON_SM_90))


def test_no_keys_are_refused():
    case = replace(ODD_LENGTHS, len_q=5, len_k=0)
    inputs = make_inputs(case, "cuda")
    with pytest.raises(NotImplementedError, match="^k must have at least one position"):
        run_op(inputs, case, **ON_SM_90)
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="auto"))
