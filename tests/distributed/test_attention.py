"""Every rank's rows of ``rope_attention_cp`` against float64, on 2, 3 and 4 ranks."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.testing import Case
from tests.support.context_parallel import judge
from verification.context_parallel import attend, joined

# P = 2, 3, 4, because two ranks cannot see a reversed order; and groups with other numbers than the global ranks.
PLAIN = Case(2, 4, 2, 48, 48, 16, dtype=torch.float32)
ROWS = [
    ((0, 1), PLAIN, {}),
    ((0, 1, 2), PLAIN, {"local_tables": True}),
    ((0, 1, 2, 3), PLAIN, {"sharding": "contiguous"}),
    ((0, 2, 3), PLAIN, {}),
    ((1, 3), replace(PLAIN, sinks=True, softcap=5.0), {"method": "all_to_all"}),
    ((0, 1, 2), replace(PLAIN, window=(10, 0), sinks=True), {}),
    ((0, 1, 2, 3), replace(PLAIN, window=(3, 0), dtype=torch.float16), {}),
    ((0, 1, 2, 3), replace(PLAIN, dtype=torch.float16, tables="random", table_batch=True), {"local_tables": True}),
    ((0, 1, 2), replace(PLAIN, causal=False, tables="random"), {}),
    ((0, 1, 2), replace(PLAIN, causal=False), {"total_len": 21, "sharding": "contiguous"}),
    ((1, 3), replace(PLAIN, causal=False), {"total_len": 40, "local_tables": True}),
    ((0, 1, 2), replace(PLAIN, causal=False, window=(9, 5)), {}),
    ((0, 1, 2), replace(PLAIN, causal=False, window=(-1, 3)), {"total_len": 33}),
    ((0, 1), replace(PLAIN, causal=False, window=(4, -1)), {}),
    ((0, 1, 2), PLAIN, {"total_len": 19}),
    ((0, 1), PLAIN, {"total_len": 43, "sharding": "dealt:0,1,0,0,1,1", "local_tables": True}),
    ((0, 1, 2), replace(PLAIN, norms=1.0, window=(9, 0)), {"total_len": 40}),
    ((0, 1), replace(PLAIN, norms=0.0, causal=False), {"method": "all_to_all"}),
    ((0, 1), PLAIN, {"total_len": 13, "method": "all_to_all"}),
    ((0, 1, 2), replace(PLAIN, lse_gradient=True, window=(10, 0), sinks=True), {}),
    ((1, 3), replace(PLAIN, lse_gradient=True, norms=1.0), {"method": "all_to_all"}),
    ((0, 1), replace(PLAIN, rotary_dim=8, interleaved=True, layout="odd", extra_rows=5), {"deterministic": True}),
]


@pytest.mark.parametrize(("members", "case", "options"), ROWS, ids=[f"{r} {c.name} {o}" for r, c, o in ROWS])
def test_rows(ranks, members, case, options):
    parts = ranks.results(attend, case, members, "cpu", options, ranks=members)
    judge(case, joined(parts, options.get("sharding", "zigzag")), options.get("total_len"))
