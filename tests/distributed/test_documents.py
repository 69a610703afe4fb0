"""Packed documents over several ranks, cut wherever the chunks end, against float64."""

from dataclasses import replace

import pytest
import torch

from tests.support.context_parallel import balanced, judge, refused_plan
from verification.context_parallel import attend, joined
from verification.testing import Case

# Documents of one token, empty ones, one over several chunks, and ends that are those of chunks; 6 tokens of no one.
LENGTHS = (1, 17, 0, 6, 12, 3, 21)
PACKED = Case(1, 4, 2, 66, 66, 16, dtype=torch.float32, seqlens=tuple((n, n) for n in LENGTHS))
WHOLE = replace(PACKED, len_q=60, len_k=60)
ROWS = [
    ((0, 1, 2), WHOLE, {}),
    ((0, 1, 2), PACKED, {}),
    ((0, 2, 3), replace(PACKED, sinks=True, window=(4, 0)), {"sharding": "contiguous"}),
    ((0, 1), replace(WHOLE, dtype=torch.float16, softcap=4.0, sinks=True), {"method": "all_to_all"}),
    ((0, 1, 2), replace(PACKED, causal=False), {}),
    ((0, 1, 2), replace(WHOLE, causal=False, window=(3, 2), tables="random"), {}),
    ((0, 1, 2), replace(PACKED, seqlens=((66, 66),)), {}),
    # Chunks that are adjacent, that have no document in common, and three of one document.
    ((0, 1), PACKED, {"sharding": "dealt:0,1,1,0,0,1"}),
    ((0, 1), replace(PACKED, seqlens=((66, 66),)), {"sharding": "dealt:0,1,0,1,0,1"}),
    ((0, 2, 3), replace(WHOLE, causal=False, window=(9, 4)), {"sharding": "dealt:2,0,0,1,1,0,2,1,2,0,1,2"}),
    ((0, 1), replace(WHOLE, sinks=True), {"sharding": "dealt:1,1,0,0,1,0", "method": "all_to_all"}),
]


@pytest.mark.parametrize(("members", "case", "options"), ROWS, ids=[f"{r} {c.name} {o}" for r, c, o in ROWS])
def test_rows(ranks, members, case, options):
    parts = ranks.results(attend, case, members, "cpu", options, ranks=members)
    judge(case, joined(parts, options.get("sharding", "zigzag")))


def test_a_balanced_plan_says_how_to_cut(ranks):
    for sharding, own in ranks.results(balanced, (0, 1), [0, 2000, 3000, 40000, 65536], ranks=(0, 1)):
        assert sharding.startswith("dealt:")
        assert own > 0.95


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "message"),
    [
        ([1, 8], {}, "cu_seqlens must begin with 0"),
        ([0, 8, 4], {}, "never fall"),
        ([0, 7], {}, "total_tokens must be a multiple of 4 for 2 ranks"),
        ([0, 8], {"total_tokens": 4}, "at least the 8 tokens"),
        ([0, 8], {"sharding": "ring"}, "sharding must be"),
        ([0, 8], {"sharding": "dealt:0,0,0,1"}, "each rank equally often"),
    ],
)
def test_refused_plans(ranks, cu_seqlens, options, message):
    for error in ranks.results(refused_plan, (0, 1), cu_seqlens, options, ranks=(0, 1)):
        assert message in error
