"""Masks as cases of attention: every form of the tensors is held to float64."""

from dataclasses import replace

import pytest
import torch

from baselines import masked
from baselines.rotations import LIGER
from bench import report
from bench.attention import cases, providers, suite
from bench.attention.suite import ATTENTION
from bench.report import case_report
from fused_rope_attn import apply_rope_qk, masks as intervals
from tests.support.bench import run
from verification.testing import Case

TINY = Case(1, 4, 2, 24, 24, 16, dtype=torch.float32)
LENGTHS = (5, 12, 1, 7)
WINDOW = replace(cases.MASKED[0], case=replace(TINY, window=(6, 0)))
PACKED = replace(cases.MASKED[1], case=cases.packed(TINY, LENGTHS))


def full_attention(q, k, v, exists):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~exists, float("-inf")).softmax(-1)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def toy_window(q, k, v, left):
    i = torch.arange(q.shape[2])
    return full_attention(q, k, v, (i[None] <= i[:, None]) & (i[:, None] - i[None] <= left))


def toy_packed(q, k, v, ends, longest):
    i = torch.arange(q.shape[0])
    document = torch.searchsorted(ends, i, right=True)
    exists = (i[None] <= i[:, None]) & (document[None] == document[:, None])
    return full_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), exists)[0].transpose(0, 1)


def toy_intervals(q, k, v, starts, ends, shift=0):
    i = torch.arange(q.shape[2])[:, None] + shift
    return full_attention(q, k, v, (starts[0] <= i) & (i < ends[0] + shift))


def late(q, k, v, starts, ends):
    return toy_intervals(q, k, v, starts, ends, shift=1)


def small_documents(length):
    return intervals.documents(torch.tensor((0, *LENGTHS)).cumsum(0), length)


def small_tree(length):
    return intervals.prefix_tree([-1, 0, 1, 1, 0, 4, 4], [4] * 7)


def forgetful(q, k, v, left):
    return toy_window(q, k, v, left + 1)


@pytest.fixture
def toys():
    """Return rivals that run everywhere: a right one, one with too wide a window, one that is not installed."""

    def rotate(q, k, tables):
        cos, sin = (table[..., : table.shape[-1] // 2] for table in tables)
        return apply_rope_qk(q, k, cos, sin)

    rotation = replace(LIGER, missing=lambda: None, rotate=rotate)
    right = masked.MaskedAttention("right", "right", lambda: None, toy_window, toy_packed)
    wrong = masked.MaskedAttention("wrong", "wrong", lambda: None, forgetful)
    absent = masked.MaskedAttention("absent", "absent", lambda: "pip install absent", toy_window, toy_packed)
    window = [providers.masked_rival(each, "window", rotation) for each in (right, wrong, absent)]
    return window, [providers.masked_rival(each, "packed", rotation) for each in (right, absent)], rotation


def mine(case):
    return [provider for provider in providers.table(case.kind).values() if provider.role == "ours"]


def test_every_form_agrees_with_float64_and_is_timed(toys):
    window, packed, _ = toys
    rows = run(ATTENTION, WINDOW, providers=[*mine(WINDOW), *window])[0]
    rows += run(ATTENTION, PACKED, providers=[*mine(PACKED), *packed])[0]
    found = {(row["case"], row["provider"]): row for row in rows}
    assert found["window", "wrong"]["status"] == "failed"
    assert found["window", "absent"]["status"] == found["packed", "absent"]["status"] == "missing"
    timed = report.timed(rows)
    assert {(row["case"], row["provider"], row["pass"]) for row in timed} == {
        (case, name, part)
        for case, names in {
            "window": ("window", "causal", "right"),
            "packed": ("packed", "padded", "right"),
        }.items()
        for name in names
        for part in ("fwd", "bwd")
    }
    assert not report.red(rows) and all(row["mode"] == "eager" and len(row["rounds"]) == 2 for row in timed)
    text = case_report([row for row in rows if row["case"] == "window"])
    assert "! Liger rope + wrong: FAILED the gate" in text and "pip install absent" in text


def test_intervals_are_held_to_float64(toys):
    tiny = replace(TINY, causal=False, len_q=28, len_k=28)
    tree = replace(cases.BY_INTERVALS[2], case=replace(tiny, intervals=small_tree))
    documents = replace(cases.packed(tiny, LENGTHS), intervals=small_documents)
    rows, attentions = [], {"right": toy_intervals, "wrong": late}
    rivals = [masked.MaskedAttention(name, name, lambda: None, intervals=x) for name, x in attentions.items()]
    rivals = [providers.masked_rival(each, "intervals", toys[2]) for each in rivals]
    for case in (tree, replace(cases.BY_INTERVALS[0], case=documents)):
        rows += run(ATTENTION, case, providers=[*mine(case), *rivals])[0]
    timed = {(row["case"], row["provider"], row["pass"]) for row in report.timed(rows)}
    assert {(case, name) for case, name, _ in timed} == {
        (case, name) for case in ("tree", "documents") for name in ("intervals", "right")
    }
    assert {row["provider"] for row in rows if row["status"] == "failed"} == {"wrong"} and not report.red(rows)
    assert len(timed) == 2 * 4


def test_the_cases_of_intervals():
    """Blocks are counted for the cases as they are measured."""
    counted = {}
    for case in cases.BY_INTERVALS:
        starts, ends, *_ = case.case.intervals(case.case.len_k)
        assert starts.shape == ends.shape == (1, case.case.len_k) and case.kind in cases.INTERVALS
        counted[case.name] = suite.visited(starts, ends)
    assert counted["causal-4K"] == counted["causal-16K"] == 1
    assert counted["chunks"] == (4 * 64 * 65) / (256 * 257)
    assert counted["prefix"] == (32 * 33 + 8 * 8 * 9 + 2 * 8 * 8 * 32) / (96 * 97)
    assert counted["image-blocks"] == (64 * 65 + 2 * 16) / (64 * 65)
    assert 0.04 < counted["documents"] < 0.12 and sum(cases._DOCUMENTS) == 32768 and len(cases._DOCUMENTS) == 64


def test_a_padded_batch_that_is_wrong_is_red(monkeypatch):
    """The gate sees one sequence's rows in another's place."""
    right = suite.Problem.as_case

    def shifted(self, x, form):
        return right(self, x, form).roll(int(form == "padded"), 2)

    monkeypatch.setattr(suite.Problem, "as_case", shifted)
    rows, _ = run(ATTENTION, PACKED, providers=mine(PACKED))
    assert {row["provider"]: row["status"] for row in rows}["padded"] == "failed" and report.red(rows)


def test_the_rivals_say_what_they_lack():
    for rival in masked.MASKED:
        assert rival.window or rival.packed or rival.intervals
        assert rival.missing() is None or "pip install" in rival.missing()
    assert masked.TORCH.missing() is None


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning", "ignore::DeprecationWarning")
def test_flex_attention_has_the_window_and_intervals(monkeypatch):
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    monkeypatch.setattr(masked, "compiled_flex", lambda: torch.nn.attention.flex_attention.flex_attention)
    torch.testing.assert_close(masked.FLEX.window(q, k, v, 6), toy_window(q, k, v, 6), rtol=1e-4, atol=1e-5)
    bounds = intervals.chunks(16, 40)
    torch.testing.assert_close(
        masked.FLEX.intervals(q, k, v, *bounds), toy_intervals(q, k, v, *bounds), rtol=1e-4, atol=1e-5
    )
