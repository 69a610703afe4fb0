"""The norms of q and k in the portable kernels, in the interpreter, against float64: forward and backward."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import prepass
from tests.support.attention import packed_case, run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import ignore_overflow, interpreted
from verification.testing import Case

pytestmark = [interpreted, ignore_overflow]

BASE = Case(1, 4, 2, 20, 20, 16, dtype=F16, norms=0.0)
CASES = [
    (BASE, "prepass"),
    (replace(BASE, dtype=F32, norms=1.0, norm_eps=1e-2, interleaved=True, rotary_dim=6), "inline"),
    (replace(BASE, head_dim=24, rotary_dim=10, norms=1.0, norm_dtype=F16, causal=False, layout="odd"), "prepass"),
    (replace(BASE, batch=2, kv_starts=(0, 5), kv_lens=(20, 13), tables="random", dtype=F32), "prepass"),
    (replace(BASE, window=(4, 0), sinks=True, len_q=7, softmax_scale=-0.3, head_dim=80, dtype=F32), "inline"),
    (packed_case(BASE, [5, 0, (3, 9)], behind=(2, 1)), "prepass"),
    (packed_case(replace(BASE, interleaved=True, dtype=F32), [5, 0, (3, 9)], behind=(2, 1)), "inline"),
]


@pytest.mark.parametrize(("case", "strategy"), CASES, ids=[f"{case.name} {strategy}" for case, strategy in CASES])
def test_against_float64(case, strategy, monkeypatch):
    # Small blocks make more than 32 of them, and the sums of so many are added up in parts.
    monkeypatch.setattr(prepass, "ROWS", 2)
    monkeypatch.setattr(prepass, "HEADS", 1)
    run_and_compare(case, strategy=strategy)
