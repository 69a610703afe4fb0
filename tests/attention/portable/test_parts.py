"""Sizes at which the portable kernels divide work that is whole elsewhere, in the interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen
from fused_rope_attn.attention import prepass
from tests.support.attention import run_and_compare
from tests.support.dtypes import F32
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from verification.testing import Case, make_inputs

BASE = Case(1, 4, 2, 70, 150, 16, dtype=F32)


@interpreted
@ignore_overflow
@both_strategies
def test_sums_of_many_blocks_of_normed_rows(strategy, monkeypatch):
    """Small blocks make more than 32 of them, and the sums of so many are added up in parts."""
    monkeypatch.setattr(prepass, "ROWS", 2)
    monkeypatch.setattr(prepass, "HEADS", 1)
    case = Case(2, 4, 2, 20, 20, 16, norms=1.0, norm_dtype=torch.float16, kv_starts=(0, 5), kv_lens=(20, 13))
    run_and_compare(case, strategy=strategy)


@interpreted
def test_more_sequences_than_are_counted_at_once():
    """The search for a tile's sequence goes through a second chunk; nearly all sequences are empty."""
    lengths = torch.zeros(1040, dtype=torch.int32)
    lengths[3], lengths[1030], lengths[1031] = 5, 40, 1
    q, k, v, cos, sin, _ = make_inputs(replace(BASE, heads_q=1, heads_kv=1, len_q=46, len_k=46))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    given = [*(x[0].transpose(0, 1) for x in (q, k, v)), cos, sin, ends, ends, 40, 40, True]
    out = [rope_attention_varlen(*given, backend=backend) for backend in ("triton", "reference")]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)


@interpreted
@ignore_overflow
@both_strategies
@pytest.mark.parametrize("largest", [1.0, -1.0])
def test_the_largest_logit_of_one_pair(strategy, largest):
    """One pair in turn has the largest logit of all: in each loop, in the first and the last row, past zero and below.

    Padding of the last tile of rows has logits of 0, and must not win where all logits are negative.
    """
    q, k, v, cos, sin, _ = make_inputs(replace(BASE, heads_q=1, heads_kv=1))
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    for row, key in ((0, 0), (0, 80), (69, 149), (69, 0), (40, 63), (40, 64)):
        q[..., :2], k[..., :2] = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.0])
        q[0, 0, row, 1], k[0, 0, key, 1] = 1.0, 1.5 if largest > 0 else 0.5
        options = {"return_max_logit": True, "softmax_scale": 2.0, "backend": "triton", "strategy": strategy}
        _, max_logit = rope_attention(q, k, v, cos, sin, True, **options)
        assert max_logit.tolist() == [[pytest.approx(largest, rel=1e-6)]]


@interpreted
def test_more_maxima_than_the_programs_that_fill_them():
    """The pre-pass of one key head has one program, which fills the maxima of 136 query heads in two parts. In a pack
    of 39 sequences only one has rows, which makes few programs, too."""
    options = {"return_max_logit": True, "backend": "triton", "strategy": "prepass"}
    *given, _ = make_inputs(replace(BASE, heads_q=136, heads_kv=1, len_q=3, len_k=3))
    _, max_logit = rope_attention(*given, True, **options)
    _, expected = rope_attention(*given, True, return_max_logit=True, backend="reference")
    torch.testing.assert_close(max_logit, expected, rtol=1e-5, atol=1e-5)
    *given, _ = make_inputs(replace(BASE, len_q=3, len_k=3))
    ends = torch.tensor([0] * 20 + [3] * 20, dtype=torch.int32)
    packed = [*(x[0].transpose(0, 1) for x in given[:3]), *given[3:], ends, ends, 3, 3, True]
    _, max_logit = rope_attention_varlen(*packed, **options)
    assert torch.equal(max_logit[19:20], rope_attention(*given, True, **options)[1])
    assert (max_logit.roll(-19, 0)[1:] == -math.inf).all() and max_logit.shape == (39, 4)
