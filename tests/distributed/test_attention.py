"""Every rank's rows of ``rope_attention_cp`` against float64, on 2, 3 and 4 ranks, and against one call's bits."""

from dataclasses import replace

import pytest
import torch

from tests.support.context_parallel import attend_invariantly, judge
from tests.support.dtypes import F16
from tests.support.marks import ignore_overflow, interpreted
from verification.attention import AttentionCheck
from verification.context_parallel import attend, joined
from verification.interpreter import products_in_float64
from verification.testing import Case

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


# Chunks of 15 rows, which end within tiles; the window is that of the second chunk of 140 rows and of those after it.
UNEVEN = replace(PLAIN, batch=1, len_q=90, len_k=90, dtype=F16)
LENGTHS = ((31, 31), (2, 2), (57, 57))
INVARIANT = [
    ((0, 1, 2), UNEVEN, {}),
    ((0, 1, 2), replace(UNEVEN, norms=0.0), {"sharding": "contiguous", "total_len": 77}),
    ((1, 3), replace(UNEVEN, len_q=92, len_k=92, sinks=True, softcap=5.0), {"method": "all_to_all"}),
    ((0, 1), replace(UNEVEN, heads_q=1, heads_kv=1, len_q=560, len_k=560, window=(20, 0)), {}),
    ((0, 1, 2), replace(UNEVEN, seqlens=LENGTHS), {}),
]


@interpreted
@ignore_overflow
@pytest.mark.parametrize(("members", "case", "options"), INVARIANT, ids=[f"{r} {c.name} {o}" for r, c, o in INVARIANT])
def test_rows_have_the_bits_of_one_call(ranks, members, case, options):
    parts = ranks.results(attend_invariantly, case, members, options, ranks=members)
    found = joined(parts, options.get("sharding", "zigzag"))
    one = AttentionCheck(**vars(case), max_seqlens=None if case.seqlens is None else (90, 90))
    made = one.make("cpu")
    function, given = one.call(made, ("triton", "auto"))
    with products_in_float64():
        expected = one.results(function, given | {"batch_invariant": True}, made)
    exists = slice(0, options.get("total_len", case.len_q))
    assert all(torch.equal(found[name][:, :, exists], expected[name][:, :, exists]) for name in ("o", "lse"))
