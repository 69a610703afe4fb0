"""``return_max_logit``: the results and their order, the kernels that run, replays on a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, plan_varlen, rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.attention.hopper.forward_kernel import max_logit_kernel
from tests.support.dtypes import BF16, F32
from tests.support.gpu import ODD_LENGTHS, capture
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.places import each_backend
from tests.support.planning import call, kinds, packed_call
from verification.testing import Case, make_inputs

SMALL = Case(1, 4, 2, 70, 150, 16, dtype=F32)


@interpreted
@pytest.mark.parametrize("ends", [None, [0, 3, 3, 10, 37], [0, 3, 10], [0, -5, 12, 90]])
def test_the_maximum_over_rows(ends):
    """The second launch of the sm_90 forward, over batches and packed rows: empty sequences and wrong ends too."""
    highest = torch.randn(2, 3, 37) if ends is None else torch.randn(3, 37)
    cu_q, entries = (None, 2) if ends is None else (torch.tensor(ends, dtype=torch.int32), len(ends) - 1)
    found = torch.full((entries, 3), float("nan"))
    max_logit_kernel[(entries * 3,)](highest, found, cu_q, H=3, NQ=37, BLOCK=8)
    if ends is None:
        assert torch.equal(found, highest.amax(-1))
    else:
        rows = torch.nn.functional.pad(highest, (0, 1), value=float("-inf"))
        for i, (a, b) in enumerate(zip(ends, ends[1:])):
            assert torch.equal(found[i], rows[:, [*range(max(a, 0), min(b, 37)), 37]].amax(-1))


@interpreted
@ignore_overflow
@both_strategies
@pytest.mark.parametrize("largest", [1.0, -1.0])
def test_the_largest_logit_of_one_pair(strategy, largest):
    """In each loop, in the first and the last row, past zero and below. Padding of the last tile of rows has logits of
    0, and must not win where all logits are negative."""
    q, k, v, cos, sin, _ = make_inputs(replace(SMALL, heads_q=1, heads_kv=1))
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
    *given, _ = make_inputs(replace(SMALL, heads_q=136, heads_kv=1, len_q=3, len_k=3))
    _, max_logit = rope_attention(*given, True, **options)
    _, expected = rope_attention(*given, True, return_max_logit=True, backend="reference")
    torch.testing.assert_close(max_logit, expected, rtol=1e-5, atol=1e-5)
    *given, _ = make_inputs(replace(SMALL, len_q=3, len_k=3))
    ends = torch.tensor([0] * 20 + [3] * 20, dtype=torch.int32)
    packed = [*(x[0].transpose(0, 1) for x in given[:3]), *given[3:], ends, ends, 3, 3, True]
    _, max_logit = rope_attention_varlen(*packed, **options)
    assert torch.equal(max_logit[19:20], rope_attention(*given, True, **options)[1])
    assert (max_logit.roll(-19, 0)[1:] == -math.inf).all() and max_logit.shape == (39, 4)


def test_the_kernels_that_serve_it(arch):
    """Those of other calls, except that none are inline by themselves: a launch has to fill it anyway."""
    assert plan(**call(return_max_logit=True)) == plan(**call()) and kinds(plan(**call())) == "HH"
    tiny = call(64, batch=1, return_max_logit=True)
    assert plan(**tiny | {"return_max_logit": False}).strategy == "inline"
    assert plan(**tiny).strategy == "prepass" and plan(**tiny, strategy="inline").strategy == "inline"
    assert plan_varlen(**packed_call(2, 64, 64, return_max_logit=True)).strategy == "prepass"


@each_backend
def test_each_replay_fills_it_again(chosen):
    """Smaller logits after larger ones, as a known call and in a CUDA graph."""
    q, k, v, cos, sin, _ = make_inputs(ODD_LENGTHS, "cuda")

    def run():
        return rope_attention(q, k, v, cos, sin, True, return_max_logit=True, **chosen)[1]

    first = run()
    graph, captured = capture(run)
    for factor in (1.0, 0.25):
        q.mul_(factor)  # a power of two: exact
        assert torch.equal(run(), first * factor)
        graph.replay()
        assert torch.equal(captured, first * factor)


@each_backend
def test_rows_after_the_last_sequence_raise_no_other_memory(chosen):
    """Four times 32 maxima fill a block of the allocator: those of a fifth sequence would be in the next one."""
    q, k, v = (torch.randn(700, heads, 128, device="cuda", dtype=BF16) for heads in (32, 8, 8))
    tables = rope_tables(512, 128, device="cuda")

    def run(sequences):
        ends = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * 128
        return rope_attention_varlen(q, k, v, *tables, ends, ends, 128, 128, True, **chosen, return_max_logit=True)

    for sequences in (4, 0):
        run(sequences)  # compiles
        blocks = [torch.full((128,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
        del blocks[32]
        o, max_logit = run(sequences)
        assert max_logit.shape == (sequences, 32) and bool(max_logit.isfinite().all())
        assert not bool(o[128 * sequences :].any()) and all(bool((block == -1).all()) for block in blocks)
