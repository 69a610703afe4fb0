"""Random calls on 2, 3 and 4 ranks against float64, the bits of one call, and PyTorch's features."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, seed, settings
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fused_rope_attn.distributed import methods, plan_cp, plan_varlen_cp
from tests.support.calls import SHRINKING
from tests.support.context_parallel import Shard, judge
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import assert_close
from verification.attention import AttentionCheck
from verification.context_parallel import attend, cp_calls, joined
from verification.pairs import products_in_float64
from verification.ranks import group_of
from verification.testing import Case

SMALL = Case(1, 4, 2, 24, 24, 16, dtype=F32, window=(9, 0))


def attend_in_sections(*given):
    usual, methods.SECTION_BYTES = methods.SECTION_BYTES, 1
    try:
        return attend(*given)
    finally:
        methods.SECTION_BYTES = usual


def attend_invariantly(case, ranks, options):
    with products_in_float64():
        return attend(case, ranks, "cpu", {"backend": "triton", "batch_invariant": True} | options)


@pytest.mark.parametrize("part", range(12))
def test_calls(ranks, request, part):
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


FEATURES = {
    "checkpoint": lambda shard: partial(checkpoint, shard, use_reentrant=False),
    "compile": lambda shard: torch.compile(lambda *qkv: shard(*qkv), fullgraph=True, backend="aot_eager"),
    "interpreter": lambda shard: partial(shard, backend="triton"),
    "layout": lambda shard: lambda *qkv: shard(*(x.transpose(1, 2) for x in qkv), layout="bshd").transpose(1, 2),
    "mesh": lambda shard: partial(shard, group=DeviceMesh.from_group(shard.group, "cpu", mesh_dim_names=("cp",))),
    "two calls in flight": lambda shard: lambda *qkv: (shard(*qkv) + shard(*qkv)) / 2,
}


def under(ranks, feature):
    shard = Shard(SMALL, ranks)
    found = shard.both(FEATURES[feature](shard))  # first, because the eager call adds plans to the cache
    assert_close(found, shard.both())


def compiled_documents(ranks):
    shard = Shard(SMALL, ranks)
    usual = partial(shard.packed, plan_varlen_cp([0, 7, 24], group=shard.group))
    found = shard.both(torch.compile(lambda *qkv: usual(*qkv), fullgraph=True, backend="aot_eager"))
    assert_close(found, shard.both(usual))


def autocast(ranks):
    shard = Shard(SMALL, ranks)
    with torch.autocast("cpu", dtype=BF16):
        o = shard(*shard.qkv)
    o.sum().backward()
    assert (o.dtype, shard.qkv[1].grad.dtype) == (BF16, F32)


def used_by_some(ranks, method):
    """Gradients are those of losses in which unused outputs are times zero. Rank 0 uses no o, the others no lse."""
    shard, found = Shard(SMALL, ranks), []
    for times_zero in (True, False):
        outputs = shard(*shard.qkv, method=method, return_lse=True)
        unused, used = outputs if shard.group.rank() == 0 else reversed(outputs)
        loss = used.square().sum() + (0 * unused).sum() if times_zero else used.square().sum()
        found.append(torch.autograd.grad(loss, shard.qkv))
    assert_close(*found)


PROGRAMS = [
    *((under, (0, 1, 2), name) for name in FEATURES if name != "interpreter"),
    pytest.param((under, (0, 1, 2), "interpreter"), marks=interpreted),
    *((program, (0, 1, 2)) for program in (compiled_documents, autocast)),
    *((used_by_some, (0, 1), method) for method in ("all_gather", "all_to_all")),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda row: " ".join([row[0].__name__, *map(str, row[2:])]))
def test_features(ranks, program):
    ranks.results(*program, ranks=program[1])


def planned(ranks, heads_kv, length, options):
    q, k = (torch.empty(1, heads, length, 128, dtype=BF16, device="meta") for heads in (32, heads_kv))
    table = torch.empty(length * len(ranks), 64, device="meta")
    plan = plan_cp(q, k, k, table, table, group=group_of(ranks), **options)
    return plan.method, plan.reason


def test_plans(ranks):
    def plan(*arguments):
        return ranks.results(planned, (0, 1), *arguments, ranks=(1,))[0]

    method, reason = plan(8, 65536, {})
    assert method == "all_gather" and "TFLOP" in reason
    assert plan(1, 1024, {}) == ("all_gather", "k's 1 heads are no multiple of 2 ranks")
    # All ranks' work is the last rank's where a causal sequence is cut in two.
    assert plan(8, 65536, {"sharding": "contiguous"})[0] == "all_to_all"
    assert plan(8, 1024, {"method": "all_to_all"}) == ("all_to_all", "asked for")
