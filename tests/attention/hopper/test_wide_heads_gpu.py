"""The sm_90 kernels for head dims beyond 128."""

from dataclasses import replace

import pytest

from fused_rope_attn import plan
from fused_rope_attn.attention import configs
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import ODD_LENGTHS, assert_alike
from tests.support.hopper import EMPTY, ON_SM_90, UNEVEN, check_in_dtype, needs_sm_90, packed
from verification.testing import make_inputs, run_op

pytestmark = needs_sm_90
SQUARE = replace(ODD_LENGTHS, head_dim=256, heads_q=4, len_q=700)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "case",
    [
        SQUARE,
        replace(SQUARE, causal=False),
        replace(SQUARE, causal=False, len_q=1, len_k=1),
        replace(SQUARE, len_q=700, len_k=333),  # rows that see nothing
        replace(SQUARE, len_q=300, len_k=1111),
        replace(SQUARE, batch=4, heads_q=16, heads_kv=8, len_q=1024, len_k=1024),
        replace(SQUARE, heads_q=8, heads_kv=1, layout="bhnd", softmax_scale=-0.3),
        replace(SQUARE, softmax_scale=0.0),
        replace(SQUARE, head_dim=192),
        replace(SQUARE, head_dim=136, causal=False, len_q=333),
        replace(SQUARE, rotary_dim=64, len_q=90),
        replace(SQUARE, head_dim=192, rotary_dim=160, interleaved=True, full_width=True, tables="random"),
        replace(SQUARE, window=(200, 0), softcap=30.0),
        replace(SQUARE, window=(100, 50), causal=False),
        replace(SQUARE, window=(0, 0), len_q=300),
        replace(SQUARE, softcap=2.0, causal=False),
        replace(SQUARE, sinks=True, len_q=700, len_k=333),
        replace(SQUARE, kv_starts=(0, 399)),
        replace(SQUARE, kv_lens=(700, 333), len_q=65),
        replace(SQUARE, window=(64, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0), kv_lens=(470, 650)),
    ],
    ids=lambda case: case.name,
)
def test_wide_heads_backward(case, dtype):
    """Against float64, and all but dq the same from run to run."""
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    assert_matches_float64(case, inputs, first)
    for _ in range(5):
        again = run_op(inputs, case, **ON_SM_90)
        assert_equal((first.o, first.dk, first.dv), (again.o, again.dk, again.dv))
        assert_alike([again.dq], [first.dq])


def test_wide_heads_take_the_sm_90_backward():
    q, k, v, cos, sin, _ = make_inputs(SQUARE, "cuda")
    assert type(plan(q, k, v, cos, sin, True, **ON_SM_90).backward) is configs.HopperBackwardConfig
    assert type(plan(q, k, v, cos, sin, True, deterministic=True, **ON_SM_90).backward) is configs.HopperBackwardConfig


# Head dims beyond 128: the pre-pass rotates Q, with one buffer for each warpgroup, and O leaves in two halves.
GEMMA = replace(ODD_LENGTHS, head_dim=256)
WIDE = (
    GEMMA,
    replace(GEMMA, causal=False),
    replace(GEMMA, head_dim=192),
    replace(GEMMA, head_dim=136, causal=False, heads_q=4, heads_kv=4),
    replace(GEMMA, len_q=1),
    replace(GEMMA, len_q=1, len_k=1, causal=False),
    replace(GEMMA, len_q=700, len_k=333),  # rows that see nothing
    replace(GEMMA, batch=1, len_q=1024, len_k=1024, layout="bhnd"),
    replace(GEMMA, len_q=65, len_k=64),
    replace(GEMMA, rotary_dim=64, full_width=True, interleaved=True, tables="random"),
    replace(GEMMA, rotary_dim=128, tables="yarn", extra_rows=100, table_batch=True),
    replace(GEMMA, softmax_scale=-0.3),
    replace(GEMMA, softmax_scale=0.0, table_dtype=BF16),
    replace(GEMMA, batch=4, heads_q=16, heads_kv=8, len_q=1111, len_k=1111),  # several tiles a multiprocessor
    replace(GEMMA, len_q=1111, len_k=1111, window=(300, 0), softcap=50.0),  # Gemma 2
    replace(GEMMA, window=(0, 0)),
    replace(GEMMA, len_q=300, len_k=700, window=(100, 50), causal=False, softcap=3.0, sinks=True),
    replace(GEMMA, sinks=True, len_q=700, len_k=333, head_dim=192),
    replace(GEMMA, kv_lens=(129, 640), causal=False, len_q=300, len_k=700),
    replace(GEMMA, kv_starts=(5, 600), kv_lens=(0, 650), len_q=300, len_k=700, rotary_dim=128, interleaved=True),
    packed((700, 1, 333, 64, 128, 129, 63), head_dim=256),
    packed(UNEVEN, head_dim=256, causal=False),
    packed(UNEVEN, behind=(90, 150), head_dim=192, window=(90, 0), sinks=True, softcap=20.0),
    packed(EMPTY, head_dim=256),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("number", range(len(WIDE)))
def test_wide_heads_against_float64(number, dtype):
    check_in_dtype(WIDE[number], dtype)


def test_wide_heads_again_and_again():
    """Tiles are taken in any order and unwritten memory is poisoned: the same bits each time."""
    case = replace(GEMMA, batch=4, heads_q=16, heads_kv=8, len_q=1111, len_k=1111)
    inputs = make_inputs(case, "cuda")
    assert type(plan(*inputs[:5], True, **ON_SM_90).forward) is configs.HopperForwardConfig
    first = run_op(inputs, case, **ON_SM_90)
    for _ in range(30):
        again = run_op(inputs, case, **ON_SM_90)
        assert_equal((first.o, first.lse), (again.o, again.lse))
