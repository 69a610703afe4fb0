"""``python -m bench masks`` without a GPU: its cases, its gate on every form of the tensors, and what it concludes."""

from dataclasses import replace

import pytest
import torch

from baselines import masked
from baselines.rotations import LIGER
from bench import report
from bench.__main__ import main
from bench.suites.masks import lines, problem, visited
from bench.suites.masks.report import results, summary
from bench.suites.masks.suite import Masks
from fused_rope_attn import apply_rope_qk
from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.runtime import device
from fused_rope_attn.testing import Case
from tests.support.bench import run as run_suite

TINY = Case(1, 4, 2, 24, 24, 16, dtype=torch.float32)
LENGTHS = (5, 12, 1, 7)


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


def forgetful(q, k, v, left):
    return toy_window(q, k, v, left + 1)


@pytest.fixture
def toys(monkeypatch):
    """Rivals that run everywhere: the right one, one whose window is a key too wide, one that is not installed."""

    def rotate(q, k, tables):
        return apply_rope_qk(q, k, *tables)

    rotation = replace(LIGER, missing=lambda: None, rotate=rotate)
    monkeypatch.setattr(lines, "LIGER", rotation)
    monkeypatch.setattr(problem, "LIGER", rotation)
    right = masked.MaskedAttention("right", "right", lambda: None, toy_window, toy_packed)
    wrong = masked.MaskedAttention("wrong", "wrong", lambda: None, forgetful)
    absent = masked.MaskedAttention("absent", "absent", lambda: "pip install absent", toy_window, toy_packed)
    monkeypatch.setattr(lines, "MASKED", (right, wrong, absent))


def run(*figures):
    return run_suite(Masks(), *figures, modes=("eager",))[0]


def test_every_form_agrees_with_float64_and_is_timed(toys):
    rows = run(
        lines.window_lines(TINY, 6), lines.packed_lines(TINY, LENGTHS), lines.overhead_lines(replace(TINY, batch=2))
    )
    found = {(row["case"], row["provider"]): row for row in rows}
    assert found["window", "wrong"]["status"] == "failed"
    assert found["window", "absent"]["status"] == found["packed", "absent"]["status"] == "missing"
    timed = {(row["case"], row["provider"], row["pass"]) for row in report.timed(rows)}
    for part in ("fwd", "bwd"):
        for figure, names in {
            "window": ("causal", "window", "right"),
            "packed": ("packed", "padded", "kv_starts", "right"),
            "overhead": ("causal", "window", "softcap", "sinks", "kv_lens", "kv_starts"),
        }.items():
            assert {(figure, name, part) for name in names} <= timed
    assert not report.red(rows) and all(len(row["rounds"]) == 2 for row in report.timed(rows))
    assert all(row["backend"] == "reference" for row in report.timed(rows) if row["ours"])
    text = summary(rows)
    assert "x the padded batch" in text and "against Liger rope + right" in text
    assert "! window: Liger rope + wrong: failed" in text and "pip install absent" in text
    block = results(rows)
    assert "| ours, sinks | reference |" in block and "commit abc" in block and "Liger rope + right." in block
    with pytest.raises(ValueError, match="no times"):
        results([])


def test_a_padded_batch_that_is_wrong_is_red(toys, monkeypatch):
    """The gate sees one sequence's rows in another's place."""
    right = problem.Problem._rows
    monkeypatch.setattr(problem.Problem, "_rows", lambda self, form: right(self, "right"))
    rows = run(lines.packed_lines(TINY, LENGTHS))
    assert {row["provider"]: row["status"] for row in rows}["kv_starts"] == "failed" and report.red(rows)


def timed(figure, name, part, times, **fields):
    return {
        "case": figure, "provider": name, "label": name, "pass": part, "ms": times[0], "rounds": times, "ours": True,
        "p20": times[0], "p80": times[0], "status": "ok", "mode": "eager", "shape": "", "detail": "",
    } | fields  # fmt: skip


def test_what_it_concludes():
    rows = [
        timed("window", "causal", "fwd", [10.0, 12.0], visited=1000),
        timed("window", "window", "fwd", [1.2, 1.44], visited=100),
        timed("window", "causal", "bwd", [10.0], visited=1000),
        timed("window", "window", "bwd", [1.5], visited=100),
        *(timed("packed", "packed", part, [1.0]) for part in ("fwd", "bwd")),
        *(timed("packed", "padded", part, [2.0]) for part in ("fwd", "bwd")),
        *(timed("packed", "fast", part, [0.5], ours=False) for part in ("fwd", "bwd")),
        *(timed("packed", "slow", part, [1.5], ours=False) for part in ("fwd", "bwd")),
    ]
    text = summary(rows)
    assert "forward: a visited block costs 1.20 of full causal's (at most 1.3: ok)" in text
    assert "backward: a visited block costs 1.50 of full causal's (at most 1.3: MISSED)" in text
    assert "2.00x the padded batch (at least 1.5: ok)" in text and "0.50x LOSS against fast" in text
    assert summary([]) == "nothing was timed"


def test_visited_scores():
    """Of each block of queries the whole blocks of keys that hold a visible one."""
    for length, left, block_m, block_n in ((200, 37, 64, 32), (256, 64, 64, 64), (100, 5, 32, 64), (130, 129, 16, 16)):
        case = replace(TINY, len_q=length, len_k=length, window=(left, 0))
        for c in (case, replace(case, window=None)):
            i = torch.arange(length)
            exists = i[None] <= i[:, None]
            if c.window:
                exists &= i[:, None] - i[None] <= left
            blocks = 0
            for start in range(0, length, block_m):
                keys = exists[start : start + block_m].any(0).nonzero().flatten() // block_n
                blocks += len(keys.unique())
            assert visited.visited_scores(c, block_m, block_n) == blocks * block_m * block_n
    dkdv, dq = configs.Tile(32, 64, 4, 3), configs.Tile(128, 64, 8, 3)
    plan = Plan("triton", "prepass", "", configs.ForwardConfig("prepass", dq), configs.BackwardConfig("", dkdv, dq))
    assert visited.visited(case, "fwd", plan) == visited.visited_scores(case, 128, 64)
    both = visited.visited_by_keys(case, 32, 64) + visited.visited_scores(case, 128, 64)
    assert visited.visited(case, "bwd", plan) == both
    assert visited.ran(plan, "fwd") == visited.ran(plan, "bwd") == "triton"
    assert visited.visited(case, "fwd", Plan("reference", None, "")) is None


@pytest.mark.parametrize("shape", [(200, 200, 37), (256, 256, 64), (130, 130, 129), (64, 300, 100), (300, 200, 20)])
def test_visited_by_keys(shape):
    """Of each block of keys the query blocks from the first to the last that hold a query which sees one of them."""
    len_q, len_k, left = shape
    for block_m, block_n in ((64, 128), (32, 64), (16, 16)):
        for window in ((left, 0), None):
            case = replace(TINY, len_q=len_q, len_k=len_k, window=window)
            position = torch.arange(len_q)[:, None] + len_k - len_q
            exists = torch.arange(len_k)[None] <= position
            if window:
                exists &= torch.arange(len_k)[None] >= position - left
            blocks = 0
            for start in range(0, len_k, block_n):
                blocks += len((exists[:, start : start + block_n].any(1).nonzero().flatten() // block_m).unique())
            assert visited.visited_by_keys(case, block_m, block_n) == blocks * block_m * block_n


def test_visited_by_the_sm_90_kernels():
    """Forward 128 queries by the plan's keys, backward 64 queries by 128 keys, once: at 32K, 1024 keys before each."""
    forward, backward = configs.HopperForwardConfig(128), configs.HopperBackwardConfig()
    plan = Plan("hopper", "prepass", "", forward, backward)
    full = replace(TINY, len_q=32768, len_k=32768)
    window = replace(full, window=(1024, 0))
    count = {(name, part): visited.visited(c, part, plan) for name, c in (("full", full), ("window", window))
             for part in ("fwd", "bwd")}  # fmt: skip
    assert count["full", "fwd"] == 256 * 257 // 2 * 128 * 128
    # Nine blocks for each but the first tiles, which have 1, 2, ... 8.
    assert count["window", "fwd"] == (256 * 9 - 36) * 128 * 128
    # 18 query blocks for each key block but the last ones, which have 16, 14, ... 2.
    assert count["full", "bwd"] == sum(512 - 2 * i for i in range(256)) * 64 * 128
    assert count["window", "bwd"] == (256 * 18 - 72) * 64 * 128
    assert visited.ran(plan, "fwd") == visited.ran(plan, "bwd") == "hopper"
    mixed = Plan("hopper", "prepass", "", forward, configs.BackwardConfig("", *[configs.Tile(64, 64, 4, 2)] * 2))
    assert visited.ran(mixed, "bwd") == "triton"


def test_packed_lines_name_the_kernels_that_ran(monkeypatch):
    """By the plan of the call itself, which looks at the number of sequences and the longest."""
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    case = replace(TINY, dtype=torch.bfloat16)
    for backend, expected in (("hopper", "hopper"), ("triton", "triton"), ("auto", "reference")):
        line = lines.packed_lines(case, LENGTHS)[0]
        plan = problem.Subject(line, problem.Problem(line.case, torch.device("cpu")), backend).plan()
        assert {visited.ran(plan, part) for part in ("fwd", "bwd")} == {expected}
    asked = []
    monkeypatch.setattr(
        planning, "plan_for", lambda problem: asked.append(problem) or planning.Plan("triton", None, "")
    )
    problem.Subject(line, problem.Problem(line.case, torch.device("cpu")), "triton").plan()
    assert [(x.max_seqlen, x.sequences) for x in asked] == [(max(LENGTHS), len(LENGTHS))]


def test_the_lines_that_are_run():
    chosen = lines.lines()
    assert {line.figure for line in chosen} == set(lines.FIGURES)
    packed = next(line.case for line in chosen if line.name == "packed")
    lengths = [n for n, _ in packed.seqlens]
    assert len(lengths) == 64 and min(lengths) == 16 and max(lengths) == 4096 and sum(lengths) == packed.len_q
    assert lines.mixed_lengths(64, 16, 4096) == tuple(lengths) != lines.mixed_lengths(64, 16, 4096, seed=1)
    assert "packed=64x16..4096" in lines.shape(packed)
    window = next(line.case for line in chosen if line.name == "window")
    assert window.window == (1024, 0) and window.len_q == 32768


def test_the_rivals_say_what_they_lack():
    for rival in masked.MASKED:
        assert rival.window or rival.packed
        assert rival.missing() is None or "pip install" in rival.missing()
    assert masked.TORCH.missing() is None


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning", "ignore::DeprecationWarning")
def test_flex_attention_has_the_window():
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    attend, block_mask = masked._flex()
    flex = torch.nn.attention.flex_attention.flex_attention
    out = flex(q, k, v, block_mask=block_mask(40, 6, "cpu"), enable_gqa=True)
    torch.testing.assert_close(out, toy_window(q, k, v, 6), rtol=1e-4, atol=1e-5)


def test_the_command(capsys):
    assert main(["masks", "--dry-run"]) == 0
    assert "FlexAttention" in capsys.readouterr().out
    assert main(["masks", "--figures", "walls"]) == 2
    if not torch.cuda.is_available():
        assert main(["masks"]) == 2
