"""Two checkouts in one process: each has operators of its own, differences are seen, and rounds are interleaved."""

from dataclasses import replace

import pytest
import torch

import fused_rope_attn
from tests.support.bench import WallClock
from tests.support.paths import ROOT
from tools import compare_checkouts as compare
from verification.attention import AttentionCheck
from verification.matrix import step
from verification.rotation import RopeCheck

TINY = AttentionCheck(1, 2, 1, 9, 9, 16, dtype=torch.float32)
PACKED = replace(TINY, seqlens=((4, 4), (5, 5)))
ROTATION = RopeCheck(1, 2, 1, 9, 9, 16, dtype=torch.float32)
STEP = step("step", (2, 1), 1, 40, 16, (37,), variants=(("auto", "auto"),))


@pytest.fixture(scope="module")
def copy():
    return compare.import_checkout(ROOT, "fused_rope_attn_copy")


def test_a_copy_computes_the_same_by_itself(copy):
    assert copy.__name__ == "fused_rope_attn_copy" and copy.rope_attention is not fused_rope_attn.rope_attention
    assert copy.rope_attention.__module__.startswith("fused_rope_attn_copy.")
    for case in (TINY, PACKED, ROTATION, STEP):
        ours, theirs = (compare.parts_of(case, package, device="cpu") for package in (fused_rope_attn, copy))
        assert list(ours) == list(theirs)
        for part, function in ours.items():
            assert compare.largest_difference(function(), theirs[part]()) == 0


def test_a_case_has_a_row_for_each_pass_or_says_that_results_differ(copy, monkeypatch):
    packages = {"before": copy, "after": fused_rope_attn}
    rows = compare.compare(replace(TINY, title="Small-512"), packages, "auto", 2, WallClock())
    parts = ["forward", "forward, saving", "backward"]
    assert [row["part"] for row in rows] == [part for name in parts for part in (name, f"{name}, host")]
    assert all(len(row[name]) == 2 for row in rows for name in packages)
    right = copy.rope_attention
    monkeypatch.setattr(copy, "rope_attention", lambda **given: tuple(2.0 * x for x in right(**given)))
    rows = compare.compare(TINY, packages, "auto", 2, WallClock())
    assert [row["error"] for row in rows] == ["the results differ"] * 3


def test_rows_show_medians():
    row = {"case": "4K", "part": "forward", "unit": "ms", "before": [1.0, 9.0, 2.0], "after": [3.0, 3.0, 3.0]}
    assert compare.shown(row)["after / before"] == "1.500"
