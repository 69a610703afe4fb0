"""Masks in the sm_90 kernels against float64: bounds that cut key and query blocks in every way."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_same_but_dq, capture
from tests.support.hopper import ON_SM_90, PADDED, needs_sm_90
from tests.support.internals import run_operators
from verification.testing import Case, Results, make_inputs, run_op

pytestmark = needs_sm_90
MASKED = (
    replace(ODD_LENGTHS, window=(200, 0)),
    replace(ODD_LENGTHS, window=(128, 0), head_dim=64),
    replace(ODD_LENGTHS, window=(0, 0)),
    replace(ODD_LENGTHS, window=(2**40, -1), causal=False),
    replace(PADDED, window=(100, 50), causal=False),
    replace(PADDED, window=(-1, 5), causal=False, head_dim=64),
    replace(PADDED, window=(33, 0)),
    replace(ODD_LENGTHS, len_q=700, len_k=333, window=(90, 0)),  # rows that see nothing
    replace(ODD_LENGTHS, softcap=20.0),
    replace(ODD_LENGTHS, softcap=2.0, head_dim=64, causal=False),
    replace(ODD_LENGTHS, softcap=0.5, softmax_scale=-2.0),
    replace(ODD_LENGTHS, softcap=5.0, softmax_scale=0.0),
    replace(ODD_LENGTHS, sinks=True),
    replace(ODD_LENGTHS, sinks=True, len_q=700, len_k=333, head_dim=64),
    replace(ODD_LENGTHS, kv_lens=(700, 333), len_q=65, len_k=700),
    replace(PADDED, kv_lens=(0, 900), causal=False),
    replace(PADDED, kv_lens=(129, 640), causal=False, head_dim=64),
    replace(ODD_LENGTHS, kv_starts=(0, 399), len_q=700, len_k=700, table_batch=True),
    replace(PADDED, kv_starts=(5, 600), kv_lens=(0, 650), causal=False),
    replace(PADDED, kv_starts=(-4, 256), kv_lens=(128, 701), rotary_dim=64, interleaved=True),
    replace(ODD_LENGTHS, window=(150, 0), softcap=30.0),
    replace(ODD_LENGTHS, window=(128, 0), sinks=True, head_dim=96),
    replace(PADDED, window=(64, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0), kv_lens=(470, 650)),
    replace(MANY_TILES, window=(300, 0), softcap=50.0, kv_starts=(0, 1, 500, 1111), kv_lens=(1111, 900, 1024, 5)),
    replace(MANY_TILES, len_q=900, window=(511, 0), kv_lens=(1000, 1, 600, 128), head_dim=64),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_masks_against_float64(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, **ON_SM_90)
    assert_matches_float64(case, inputs, out)


# A quarter of the keys at most, and more key blocks than run at a time: dQ is begun by the last key block that sees it,
# for which the others wait, and finished while key blocks of other heads are still at work.
NARROW = (
    Case(2, 40, 8, 2700, 2700, 128, dtype=BF16, window=(256, 0)),
    Case(1, 64, 64, 3000, 3000, 128, dtype=F16, window=(600, 0)),
    Case(1, 64, 32, 2000, 4096, 64, dtype=BF16, window=(1000, 0)),
    Case(2, 24, 24, 2500, 2500, 96, dtype=BF16, window=(300, 200), causal=False, sinks=True),
)


@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_narrow_windows(case):
    """Right, and the same in every run: unwritten memory is poisoned each time."""
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    assert_matches_float64(case, inputs, first)
    for _ in range(30):
        again = run_op(inputs, case, **ON_SM_90)
        assert_equal((first.o, first.dk, first.dv), (again.o, again.dk, again.dv))
        torch.testing.assert_close(again.dq, first.dq, rtol=2e-2, atol=2e-3)


def test_narrow_windows_on_two_streams():
    """Two backward passes run at once, and each has blocks that wait for others of its own."""
    cases = NARROW[0], NARROW[1]
    inputs = [make_inputs(case, "cuda") for case in cases]
    expected = [run_op(x, case, **ON_SM_90) for x, case in zip(inputs, cases)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, x, case in zip(streams, inputs, cases):
            with torch.cuda.stream(stream):
                found.append(run_op(x, case, **ON_SM_90))
        torch.cuda.synchronize()
        for true, out in zip(expected, found):
            assert_equal((true.o, true.dk, true.dv), (out.o, out.dk, out.dv))
            torch.testing.assert_close(out.dq, true.dq, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "case",
    [
        replace(PADDED, kv_starts=(10, 470), kv_lens=(500, 505)),
        replace(PADDED, kv_starts=(10, 470), kv_lens=(500, 505), causal=False, head_dim=64),
        replace(ODD_LENGTHS, len_q=10, len_k=340, window=(150, 0)),
        replace(ODD_LENGTHS, len_q=10, len_k=340, window=(150, 0), softcap=9.0, kv_starts=(0, 200)),
    ],
    ids=lambda case: case.name,
)
def test_nan_in_keys_that_nobody_reaches(case):
    """... and in query rows that see nothing, and their dO: the same numbers, and zero gradients there."""
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **ON_SM_90)
    q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    for b in range(case.batch):
        last = case.len_k if case.kv_lens is None else case.kv_lens[b]
        first = max(
            0 if case.kv_starts is None else case.kv_starts[b], last - case.len_q - (case.window or (10**6,))[0]
        )
        k[b, :, :first], v[b, :, :first] = math.nan, math.inf
        k[b, :, last:], v[b, :, last:] = math.inf, math.nan
        dead = max(0, (first if case.causal and case.window is None else 0) - last + case.len_q)
        q[b, :, :dead], do[b, :, :dead] = math.nan, math.nan
    assert_same_but_dq(run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **ON_SM_90), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_nan_in_queries_before_the_first_key(head_dim):
    """There are more queries than keys, and no lengths: the first rows see nothing, whatever they and their dO hold."""
    case = replace(ODD_LENGTHS, len_q=433, len_k=130, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **ON_SM_90)
    q, do, dead = inputs.q.clone(), inputs.do.clone(), case.len_q - case.len_k
    q[:, :, :dead], do[:, :, :dead] = math.nan, math.inf
    out = run_op(inputs._replace(q=q, do=do), case, **ON_SM_90)
    assert_same_but_dq(out, expected)
    assert not out.o[:, :, :dead].any() and not out.dq[:, :, :dead].any()


def test_masked_passes_of_different_backends_fit_together():
    case = replace(PADDED, window=(150, 0), softcap=30.0, kv_starts=(0, 300), kv_lens=(700, 600), sinks=True)
    inputs = make_inputs(case, "cuda")
    for forward, backward in (("hopper", "triton"), ("triton", "hopper")):
        out = run_operators(inputs, case, forward=forward, backward=backward)
        assert_matches_float64(case, inputs, out)


def test_lengths_change_under_a_graph():
    """They are read on the device: no synchronisation, and a replay sees the new ones."""
    case = replace(PADDED, kv_starts=(0, 0), kv_lens=(700, 700))
    inputs = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (case.kv_starts, case.kv_lens))

    def step():
        o, lse = rope_attention(
            q, k, v, inputs.cos, inputs.sin, True, kv_starts=starts, kv_lens=lens, return_lse=True, **ON_SM_90
        )
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), inputs.do)

    graph, captured = capture(step)
    for new_starts, new_lens in (((0, 0), (700, 333)), ((640, 3), (700, 260)), ((0, 100), (0, 700))):
        starts.copy_(torch.tensor(new_starts))
        lens.copy_(torch.tensor(new_lens))
        graph.replay()
        assert_matches_float64(replace(case, kv_starts=new_starts, kv_lens=new_lens), inputs, Results(*captured))
