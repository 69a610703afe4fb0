"""``return_max_logit`` of the portable kernels, in Triton's interpreter, against float64."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen
from tests.support.attention import packed_case, run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import both_strategies, cases_in_turn, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op

pytestmark = [interpreted, ignore_overflow]
# 150 keys: the loop that masks, the one that does not, and a last block that is not whole.
BASE = Case(1, 4, 2, 70, 150, 16, dtype=F32, tables="random")


@cases_in_turn(
    BASE,
    replace(BASE, len_q=150, causal=False, seed=1),
    replace(BASE, dtype=F16, head_dim=24, rotary_dim=10, interleaved=True, seed=2),
    replace(BASE, dtype=F16, softcap=2.0, sinks=True, seed=3),
    replace(BASE, softcap=2.0, sinks=True, lse_gradient=True, seed=4),
    replace(BASE, batch=2, softmax_scale=-0.4, window=(9, 3), causal=False, seed=5),
    replace(BASE, softmax_scale=0.0),
    replace(BASE, batch=3, kv_starts=(0, 90, 150), kv_lens=(150, 97, 150), seed=6),  # the third sees nothing
    replace(BASE, batch=2, heads_q=2, heads_kv=1, len_q=150, causal=False, intervals="random", seed=7),
    replace(BASE, norms=1.0, seed=8),
    packed_case(BASE, [(40, 90), (0, 7), (9, 0), (33, 33), (0, 0)], (5, 3), seed=9),
    packed_case(BASE, [70, 3, 1], causal=False, window=(20, 20), seed=10),
    replace(BASE, len_q=33, len_k=9, kv_lens=(9,)),  # rows at negative positions
)
def test_max_logit(case, strategy):
    inputs = make_inputs(case)
    out = run_and_compare(case, inputs, strategy=strategy, max_logit=True)
    plain = run_op(inputs, case, backend="triton", strategy=strategy)
    assert out.max_logit.dtype == F32 and all(torch.equal(x, y) for x, y in zip(out, plain))


@both_strategies
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_logit_of_one_pair(strategy, sign):
    """One pair in turn has the largest logit of all: in each loop, in the first and the last row, past zero and below.

    Padding of the last tile of rows has logits of 0, and must not win where all logits are negative.
    """
    q, k, v, cos, sin, _ = make_inputs(replace(BASE, heads_q=1, heads_kv=1, tables="rope"))
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    # Not rotated: column 0 turns by an angle of 0 in these tables.
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    for row, key in ((0, 0), (0, 80), (69, 149), (69, 0), (40, 63), (40, 64)):
        q[..., 0], k[..., 0] = -1.0, 1.0
        q[..., 1], k[..., 1] = 0.0, 0.0
        q[0, 0, row, 1], k[0, 0, key, 1] = 1.0, 1.5 if sign > 0 else 0.5
        options = {"return_max_logit": True, "softmax_scale": 2.0, "backend": "triton", "strategy": strategy}
        _, max_logit = rope_attention(q, k, v, cos, sin, True, **options)
        assert max_logit.tolist() == [[pytest.approx(1.0 if sign > 0 else -1.0, rel=1e-6)]]


@both_strategies
def test_calls_without_keys_or_queries(strategy):
    q, k, v, cos, sin, _ = make_inputs(BASE)
    options = {"return_max_logit": True, "return_lse": True, "backend": "triton", "strategy": strategy}
    for some_q, some_k, some_v in ((q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])):
        o, lse, max_logit = rope_attention(some_q, some_k, some_v, cos, sin, True, **options)
        assert o.shape == some_q.shape and lse.shape == o.shape[:3] and max_logit.shape == o.shape[:2]
        assert (max_logit == -math.inf).all()


def test_more_maxima_than_the_programs_that_fill_them():
    """The pre-pass of one key head has one program, which fills the maxima of 136 query heads in two parts."""
    q, k, v, cos, sin, _ = make_inputs(replace(BASE, heads_q=136, heads_kv=1, len_q=3, len_k=3))
    options = {"return_max_logit": True, "return_lse": True, "backend": "triton", "strategy": "prepass"}
    _, _, max_logit = rope_attention(q, k, v, cos, sin, True, **options)
    _, _, exact = rope_attention(
        q.double(), k.double(), v.double(), cos, sin, True, **options | {"backend": "reference", "strategy": "auto"}
    )
    torch.testing.assert_close(max_logit.double(), exact, rtol=1e-5, atol=1e-5)


def test_many_empty_sequences():
    q, k, v, cos, sin, _ = make_inputs(replace(BASE, len_q=3, len_k=3))
    ends = torch.tensor([0] * 20 + [3] * 20, dtype=torch.int32)
    given = [*(x[0].transpose(0, 1) for x in (q, k, v)), cos, sin, ends, ends, 3, 3, True]
    options = {"return_max_logit": True, "backend": "triton", "strategy": "prepass"}
    _, max_logit = rope_attention_varlen(*given, **options)
    _, alone = rope_attention(q, k, v, cos, sin, True, **options)
    assert max_logit.shape == (39, 4)
    assert torch.equal(max_logit[19:20], alone) and (max_logit[20:] == -math.inf).all()
    assert (max_logit[:19] == -math.inf).all()
