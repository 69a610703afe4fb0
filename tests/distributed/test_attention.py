"""Random calls on 2, 3 and 4 ranks against float64, the bits of one call, and PyTorch's features."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, seed, settings

from tests.support import context_parallel as programs
from tests.support.calls import SHRINKING
from tests.support.context_parallel import attend_in_sections, attend_invariantly, judge
from tests.support.dtypes import F16
from tests.support.marks import ignore_overflow, interpreted
from verification.attention import AttentionCheck
from verification.context_parallel import attend, cp_calls, joined
from verification.interpreter import products_in_float64
from verification.testing import Case


@pytest.mark.parametrize("part", range(12))
def test_calls(ranks, request, part):
    """Calls as hypothesis draws them; in every third part heads travel one after the other."""
    program = attend if part % 3 else attend_in_sections

    def check(call):
        parts = ranks.results(program, call.case, call.members, "cpu", call.given, ranks=call.members)
        judge(call.case, joined(parts, call.given["sharding"]), call.given.get("total_len"))

    key = request.config.getoption("hypothesis_seed") or 0
    seed(f"cp {part} {key}")(settings(SHRINKING, max_examples=12)(given(call=cp_calls())(lambda call: check(call))))()


# Chunks of 15 rows, which end within tiles; the window is that of the second chunk of 140 rows and of those after it.
UNEVEN = Case(1, 4, 2, 90, 90, 16, dtype=F16)
INVARIANT = [
    ((0, 1, 2), replace(UNEVEN, norms=0.0), {"sharding": "contiguous", "total_len": 77}),
    ((1, 3), replace(UNEVEN, len_q=92, len_k=92, sinks=True, softcap=5.0), {"method": "all_to_all"}),
    ((0, 1), replace(UNEVEN, heads_q=1, heads_kv=1, len_q=560, len_k=560, window=(20, 0)), {}),
    ((0, 1, 2), replace(UNEVEN, seqlens=((31, 31), (2, 2), (57, 57))), {}),
]


@interpreted
@ignore_overflow
@pytest.mark.parametrize(("members", "case", "options"), INVARIANT, ids=[f"{r} {c.name} {o}" for r, c, o in INVARIANT])
def test_rows_have_the_bits_of_one_call(ranks, members, case, options):
    parts = ranks.results(attend_invariantly, case, members, options, ranks=members)
    found = joined(parts, options.get("sharding", "zigzag"))
    one = AttentionCheck(**vars(case), max_seqlens=None if case.seqlens is None else (90, 90))
    made = one.make("cpu")
    function, arguments = one.call(made, ("triton", "auto"))
    with products_in_float64():
        expected = one.results(function, arguments | {"batch_invariant": True}, made)
    exists = slice(0, options.get("total_len", case.len_q))
    assert all(torch.equal(found[name][:, :, exists], expected[name][:, :, exists]) for name in ("o", "lse"))


MEMBERS = (0, 1, 2)


def run(ranks, program, *given, members=MEMBERS):
    return ranks.results(program, members, *given, ranks=members)


def assert_pairs_close(found):
    for pair in found:
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


FEATURES = ["checkpoint", "layout", "mesh", "two calls in flight", "compile", "compile varlen"]


@pytest.mark.parametrize("feature", [*FEATURES, pytest.param("interpreter", marks=interpreted)])
def test_features_of_pytorch(ranks, feature):
    assert_pairs_close(run(ranks, programs.under, feature))


def test_autocast(ranks):
    assert run(ranks, programs.autocast) == [(torch.bfloat16, torch.float32)] * 3


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
def test_outputs_that_some_ranks_do_not_use(ranks, method):
    assert_pairs_close(run(ranks, programs.used_by_some, method, members=(0, 1)))


def test_only_values_need_gradients(ranks):
    for dv in run(ranks, programs.only_values_need_gradients):
        assert dv.isfinite().all() and dv.abs().sum() > 0


@pytest.mark.parametrize("total", [23, 13, 8, 0])
def test_rows_that_do_not_exist_hold_anything(ranks, total):
    for found in run(ranks, programs.poisoned, total):
        assert all(x.isfinite().all() for x in found)


def test_plans(ranks):
    def plan(*arguments):
        return ranks.results(programs.planned, (0, 1), *arguments, ranks=(1,))[0]

    method, reason = plan(8, 65536, {})
    assert method == "all_gather" and "TFLOP" in reason
    assert plan(1, 1024, {}) == ("all_gather", "k's 1 heads are no multiple of 2 ranks")
    # All ranks' work is the last rank's where a causal sequence is cut in two.
    assert plan(8, 65536, {"sharding": "contiguous"})[0] == "all_to_all"
    assert plan(8, 1024, {"method": "all_to_all"}) == ("all_to_all", "asked for")
