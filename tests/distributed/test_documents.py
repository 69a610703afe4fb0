"""Packed documents over several ranks, cut wherever the chunks end, against float64."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.testing import Case
from tests.support.context_parallel import judge, refused_plan
from verification.context_parallel import attend, joined

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
]


@pytest.mark.parametrize(("members", "case", "options"), ROWS, ids=[f"{r} {c.name} {o}" for r, c, o in ROWS])
def test_rows(ranks, members, case, options):
    parts = ranks.results(attend, case, members, "cpu", options, ranks=members)
    judge(case, joined(parts, options.get("sharding", "zigzag")))


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "message"),
    [
        ([1, 8], {}, "cu_seqlens must begin with 0"),
        ([0, 8, 4], {}, "never fall"),
        ([0, 7], {}, "total_tokens must be a multiple of 4 for 2 ranks"),
        ([0, 8], {"total_tokens": 4}, "at least the 8 tokens"),
        ([0, 8], {"sharding": "ring"}, "sharding must be"),
    ],
)
def test_refused_plans(ranks, cu_seqlens, options, message):
    for error in ranks.results(refused_plan, (0, 1), cu_seqlens, options, ranks=(0, 1)):
        assert message in error
