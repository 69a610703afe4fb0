"""The sm_90 backward with the heads of a group divided among programs that add up dk and dv."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper import backward
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_same_but_dq
from tests.support.hopper import ON_SM_90, PADDED, UNEVEN, check_in_dtype, needs_sm_90, packed
from tests.support.internals import forget_calls
from tests.support.marks import cases
from verification.testing import make_inputs, run_op

pytestmark = needs_sm_90
# Seven query heads to a key head.
SEVEN = replace(ODD_LENGTHS, heads_q=14, heads_kv=2)


@pytest.fixture(params=["chosen", "two", "heads"], autouse=True)
def parts(request, monkeypatch):
    """Divide groups in the way that the package chooses, into two parts, and into one for each query head."""

    def divided(problem, *sizes):
        group = problem.group_size
        parts = {"two": min(2, group), "heads": group}[request.param]
        return 1 if problem.has_intervals or problem.is_deterministic else parts

    if request.param != "chosen":
        monkeypatch.setattr(backward, "parts_of_group", divided)
    forget_calls()
    yield
    forget_calls()


@cases(
    SEVEN,
    replace(SEVEN, head_dim=64, causal=False, interleaved=True),
    replace(SEVEN, head_dim=96, rotary_dim=40, softcap=4.0, sinks=True),
    replace(SEVEN, head_dim=256, heads_q=10),
    replace(SEVEN, heads_q=16, heads_kv=1, len_q=1101, len_k=1101),
    replace(SEVEN, window=(90, 0), len_q=700, len_k=333),
    replace(SEVEN, window=(400, 100), len_q=700, len_k=700, causal=False),
    replace(SEVEN, norms=1.0, softmax_scale=-0.2, tables="random"),
    replace(SEVEN, norms=0.0, head_dim=256, len_q=300, len_k=556),
    replace(PADDED, heads_q=14, heads_kv=2, kv_starts=(40, 690), kv_lens=(650, 700)),
    replace(PADDED, heads_q=12, heads_kv=2, kv_lens=(100, 0), head_dim=64, norms=0.0),
    packed(UNEVEN, heads_q=14, heads_kv=2),
    packed(UNEVEN, heads_q=10, heads_kv=2, causal=False, norms=1.0),
    packed((20, 333), behind=(400, 700), heads_q=14, heads_kv=2, window=(33, 0), norms=0.0, head_dim=256),
    replace(MANY_TILES, heads_q=1, heads_kv=1, norms=1.0),
    packed(UNEVEN, heads_q=2, heads_kv=2, window=(300, 0)),
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_against_float64(case, dtype):
    check_in_dtype(case, dtype)


@cases(SEVEN, replace(MANY_TILES, heads_q=48, heads_kv=6), packed(UNEVEN, heads_q=14, heads_kv=2, norms=1.0))
def test_reruns(case):
    """Run after run gives the same bits but for dq, because the order of the sums is fixed."""
    case = replace(case, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    for _ in range(20):
        assert_same_but_dq(run_op(inputs, case, **ON_SM_90), first)
    assert_matches_float64(case, inputs, first)
