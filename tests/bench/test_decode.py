"""``python -m bench decode``: its cases, its gate and its rows."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baselines.base import Attention
from bench import decode, report
from bench.__main__ import main
from bench.decode import COPY, DECODE, OURS, PROVIDERS, DecodeProvider, rival
from bench.report import case_report
from tests.support.bench import run as run_suite

TINY = decode.DecodeCase(2, 32, 4, 2, 16, torch.float32)


def select(names):
    return DECODE.providers(TINY, names)


def run(providers, *cases, **options):
    return run_suite(DECODE, *cases, providers=providers, **options)


def scripted(name, make, **changes):
    return DecodeProvider(name, name, make=make, **changes)


def separate(step, first=0):
    def attend(q, k, v, causal):
        return F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:], enable_gqa=True)

    return rival("separate", Attention("separate", attend)).make(step)


def test_everybody_agrees_with_float64_and_is_timed(tmp_path):
    people = [*select([OURS, COPY]), scripted("separate", separate)]
    rows, _ = run(people, TINY)
    timed = {(row["provider"], row["mode"]) for row in report.timed(rows)}
    assert timed == {(p.name, mode) for p in people for mode in ("eager", "graph")}, rows
    for row in rows:
        assert row["status"] == "ok" and row["bytes"] == 2 * 2 * 2 * 32 * 16 * 4 and len(row["rounds"]) == 2
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] * 1e-6) and row["of_copy"] > 0
        assert (row["role"] == "ours") == (row["provider"] == OURS) and row["shape"] == "B2 H4/2 S32 D16 fp32"
    text = case_report(rows)
    assert "separate" in text and "B2-32" in text and "%" in text
    report.write_lines(tmp_path / "rows.jsonl", rows)
    assert len(report.read_file(tmp_path / "rows.jsonl")) == len(rows)


def test_pages_and_float8_are_judged_and_shown_beside_the_contiguous_step():
    names = ["fused_page16", "fused_float8"]
    rows, _ = run(select([OURS, COPY, *names]), TINY, modes=("eager",))
    assert {row["provider"] for row in report.timed(rows)} == {OURS, COPY, *names}, rows
    rates = {row["provider"]: row["gb_s"] * row["ms"] for row in rows}
    assert rates["fused_float8"] == pytest.approx(rates["fused_page16"] / 2)

    def wrong_angles(step):
        return PROVIDERS["fused_page16"].make(step._replace(cos=step.cos.roll(1, 0)))

    wrong = scripted("fused_page16", wrong_angles, role="ours")
    assert [row["status"] for row in run([wrong], TINY)[0]] == ["failed"]


def test_mixed_lengths():
    case = replace(TINY, batch=5, length=64, mixed=True)
    assert case.lengths == [64, 32, 21, 16, 1] and case.bytes == 134 * 2 * 2 * 16 * 4 and case.name == "mixed5-64"
    rows, _ = run(select([OURS, COPY, "fused_page16", "sdpa_flash"]), case, modes=("eager",))
    status = {row["provider"]: row["status"] for row in rows}
    assert status == {OURS: "ok", COPY: "ok", "fused_page16": "ok", "sdpa_flash": "unsupported"}, rows


def test_who_is_wrong_broken_or_missing_is_named_and_not_timed():
    def unrotated(step):
        return separate(step._replace(cos=torch.ones_like(step.cos), sin=torch.zeros_like(step.sin)))

    def forgetful(step):
        return separate(step, first=1)

    def broken(step):
        raise RuntimeError("no such kernel\nand more")

    people = [
        scripted("unrotated", unrotated),
        scripted("forgetful", forgetful),
        scripted("broken", broken),
        scripted("absent", separate, missing=lambda: "pip install absent"),
    ]
    rows, _ = run(people, TINY)
    statuses = {"unrotated": "failed", "forgetful": "failed", "broken": "error", "absent": "missing"}
    assert {row["provider"]: row["status"] for row in rows} == statuses
    text = case_report(rows)
    assert "pip install absent" in text and "no such kernel" in text


def test_a_case_whose_inputs_do_not_fit_is_named():
    def full(*given):
        raise torch.OutOfMemoryError("out of memory")

    rows, measurement = run_suite(replace(DECODE, trial=full), TINY, providers=select([OURS]))
    assert rows == [] and measurement.not_run == ["B2-32 B2 H4/2 S32 D16 fp32 (memory)"]


def test_cases_and_names():
    names = [case.name for case in decode.CASES]
    assert names == [*(f"B{b}-{n}" for b in (1, 8, 64) for n in ("4K", "32K", "128K")), "mixed64-64K"]
    assert [case.name for case in DECODE.choose("B8,B1-4K")] == ["B1-4K", "B8-4K", "B8-32K", "B8-128K"]
    assert DECODE.choose("") == list(decode.CASES)
    assert decode.CASES[0].bytes == 16 << 20
    with pytest.raises(ValueError, match="B1-4K"):
        DECODE.choose("B3-")


def test_command_line(capsys):
    assert main(["decode", "--dry-run", "--cases", "B64"]) == 0
    text = capsys.readouterr().out
    assert "B64-128K" in text and "B1-4K" not in text and "rotate + write + FlashAttention-4" in text
    for arguments in (["decode", "--cases", "no"], ["decode", "--providers", "no"]):
        assert main([*arguments, "--dry-run"]) == 2
    if not torch.cuda.is_available():
        assert main(["decode"]) == 2 and "no GPU" in capsys.readouterr().err
