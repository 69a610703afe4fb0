"""``python -m bench decode``: its cases, its gate, its rows, and the table of a tuning run."""

import math
from dataclasses import replace

import pytest
import torch

from bench import report
from bench.__main__ import main
from bench.suite import pick
from bench.suites.generation import suite as decode
from bench.suites.generation import sweep
from bench.suites.generation.pages import stored_step
from bench.suites.generation.providers import COPY, OURS, PROVIDERS, RAW, READ, DecodeProvider, appending
from bench.suites.generation.report import results, summary
from fused_rope_attn.generation import configs, planning
from fused_rope_attn.runtime.device import is_interpreted
from tests.support.bench import run as run_suite

TINY = decode.DecodeCase(2, 32, 4, 2, 16, torch.float32)


def select(names):
    return pick(PROVIDERS, names, always=(OURS, COPY, READ))


def run(providers, *cases, memory=None, **options):
    return run_suite(decode.Generation(providers, memory), *cases, passes=("decode",), **options)


def scripted(name, make, **changes):
    return replace(DecodeProvider(name, name, lambda: None, make), **changes)


def separate(step):
    return appending(
        step, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    )  # fmt: skip


def test_everybody_agrees_with_float64_and_is_timed(tmp_path):
    bare = scripted("bare", lambda step: lambda: separate(step._replace(
        cos=torch.ones_like(step.cos), sin=torch.zeros_like(step.sin), k=step.k_cache[:, :, -1:].clone(),
        v=step.v_cache[:, :, -1:].clone()))(), bare=True)  # fmt: skip
    people = [*select([OURS, RAW]), scripted("separate", separate), bare]
    rows, _ = run(people, TINY)
    timed = {(row["provider"], row["mode"]) for row in report.timed(rows)}
    assert timed == {(p.name, mode) for p in people for mode in ("eager", "graph")}, rows
    for row in rows:
        assert row["status"] == "ok" and row["bytes"] == 2 * 2 * 2 * 32 * 16 * 4 and len(row["rounds"]) == 2
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] * 1e-6) and row["of_copy"] > 0
        assert row["ours"] == (row["provider"] in (OURS, RAW)) and row["shape"] == "B2 H4/2 S32 D16 fp32"
    text = summary(rows)
    assert "separate" in text and "bare" in text and "%" in text and "B2-32" in text
    block = results(rows)
    assert "| B2-32 | B2 H4/2 S32 D16 fp32 |" in block and "commit abc" in block and "graph |" not in block
    with pytest.raises(ValueError, match="our own"):
        results([row for row in rows if row["provider"] != OURS])
    report.write_lines(tmp_path / "rows.jsonl", rows)
    assert len(report.read_lines([tmp_path / "rows.jsonl"])) == len(rows)


def test_pages_and_float8_are_judged_and_shown_beside_the_contiguous_step():
    names = ["fused_page16", "fused_float8", "fused_page16_float8", "gather_sdpa"]
    rows, _ = run(select([OURS, *names]), TINY, modes=("eager",))
    assert {row["provider"] for row in report.timed(rows)} == {OURS, COPY, READ, *names}, rows
    assert [row["ours"] for row in rows if row["provider"] in names] == [True, True, True, False]
    rates = {row["provider"]: row["gb_s"] * row["ms"] for row in rows}
    assert rates["fused_float8"] == pytest.approx(rates["fused_page16"] / 2)
    header, line = (next(x for x in summary(rows).splitlines() if word in x) for word in ("contiguous ms", "B2-32 "))
    assert header.split()[-4:] == ["page16", "float8", "page16_float8", "gather_sdpa"] and line.startswith("B2-32")
    wrong = scripted("fused_page16", lambda step: stored_step(16, False)(step._replace(cos=step.cos.roll(1, 0))),
                     page_size=16)  # fmt: skip
    assert [row["status"] for row in run([wrong], TINY)[0]] == ["failed"]


def test_mixed_lengths():
    case = replace(TINY, batch=5, length=64, mixed=True)
    assert case.lengths == [64, 32, 21, 16, 1] and case.bytes == 134 * 2 * 2 * 16 * 4 and case.name == "mixed5-64"
    rows, _ = run(select([OURS, "fused_page16", "sdpa_flash"]), case, modes=("eager",))
    status = {row["provider"]: row["status"] for row in rows}
    assert status == {OURS: "ok", COPY: "ok", READ: "ok", "fused_page16": "ok", "sdpa_flash": "unsupported"}, rows


def test_who_is_wrong_broken_or_missing_is_named_and_not_timed():
    def unrotated(step):
        return separate(step._replace(cos=torch.ones_like(step.cos), sin=torch.zeros_like(step.sin)))

    def forgetful(step):
        return appending(step, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k[:, :, 1:], v[:, :, 1:], enable_gqa=True))  # fmt: skip

    def broken(step):
        raise RuntimeError("no such kernel\nand more")

    people = [
        scripted("unrotated", unrotated),
        scripted("forgetful", forgetful),
        scripted("broken", broken),
        scripted("absent", separate, missing=lambda: "pip install absent"),
    ]
    rows, _ = run(people, TINY)
    assert {row["provider"]: row["status"] for row in rows} == {
        "unrotated": "failed", "forgetful": "failed", "broken": "error", "absent": "missing",
    }  # fmt: skip
    text = summary(rows)
    assert "nothing was timed" in text and "pip install absent" in text and "no such kernel" in text


def test_what_is_left_out_is_named():
    rows, measurement = run(select([OURS]), TINY, deadline=-math.inf)
    assert rows == [] and measurement.not_run == ["B2-32 B2 H4/2 S32 D16 fp32"]
    rows, measurement = run(select([OURS]), TINY, memory=1000)
    assert rows == [] and measurement.not_run == ["B2-32 B2 H4/2 S32 D16 fp32 (memory)"]


def test_cases_and_names():
    names = [case.name for case in decode.CASES]
    assert names == [*(f"B{b}-{n}" for b in (1, 8, 64) for n in ("4K", "32K", "128K")), "mixed64-64K"]
    assert [case.name for case in decode.choose(["B8", "B1-4K"])] == ["B1-4K", "B8-4K", "B8-32K", "B8-128K"]
    assert decode.choose([]) == list(decode.CASES)
    assert decode.CASES[0].bytes == 16 << 20
    with pytest.raises(ValueError, match="B1-4K"):
        decode.choose(["B3"])


def test_configurations_by_name():
    base = configs.decode("sm_90", 2, 128, True)
    chosen = sweep.candidate("32x8x5x3r168l4", base)
    assert chosen == replace(
        base, block_n=32, num_warps=8, num_stages=5, programs_per_sm=3, max_registers=168, least_tiles=4
    )
    assert chosen.launch_options == {"num_warps": 8, "num_stages": 5, "maxnreg": 168} and chosen.pdl
    assert sweep.candidate("64x4x4x2", base).launch_options == {"num_warps": 4, "num_stages": 4}
    for text in ("64x4x4", "axbxcxd", "64x4x4x2r", "64x4x4x2l"):
        with pytest.raises(ValueError, match="looks like"):
            sweep.candidate(text, base)


@pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1; on a GPU the command itself is the test")
@pytest.mark.parametrize("raw", [False, True])
def test_tuning_is_one_table(raw):
    texts = ["(table)", "16x1x1x3", "32x1x1x2l2"]
    suite = sweep.Sweep([*map(sweep.Candidate, texts), PROVIDERS[COPY]], raw=raw)
    rows, _ = run_suite(suite, TINY, passes=("decode",), modes=("graph",), rounds=1)
    assert planning.override is None
    assert [row["provider"] for row in rows] == [*texts, COPY]
    assert all(row["ms"] > 0 and row["of_copy"] > 0 for row in rows)
    assert [row["config"]["block_n"] for row in rows[1:3]] == [16, 32] and rows[1]["raw"] == raw
    lines = suite.summary(rows).splitlines()
    assert [line.split()[0] for line in lines[2:]] == texts and "B2-32" in lines[0] and "%" in lines[2]


def test_command_line(capsys):
    assert main(["decode", "--dry-run", "--cases", "B64"]) == 0
    text = capsys.readouterr().out
    assert "B64-128K" in text and "B1-4K" not in text and "flash_attn_with_kvcache" in text
    assert set(PROVIDERS) >= {OURS, RAW, COPY}
    assert main(["decode", "--tune", "--dry-run", "--configs", "16x1x1x3"]) == 0
    assert "16x1x1x3" in capsys.readouterr().out
    for arguments in (["--cases", "no"], ["--providers", "no"], ["--tune", "--configs", "no"]):
        assert main(["decode", "--dry-run", *arguments]) == 2
    if not torch.cuda.is_available():
        assert main(["decode"]) == 2 and "no GPU" in capsys.readouterr().err
