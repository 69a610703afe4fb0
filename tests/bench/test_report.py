"""Rows to files and back, and tables of text."""

import pytest

from bench import report
from tests.support.bench import attention_row


def test_columns_are_aligned():
    text = report.table(["name", "ms"], [["a", "1.0"], ["longer name", "12.25"]])
    assert text.splitlines() == ["name            ms", "-----------  -----", "a              1.0", "longer name  12.25"]


def test_json_lines_come_back_and_the_later_run_wins(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    report.write_lines(path, [attention_row("Small-1K", "fused", 1.0), attention_row("Small-1K", "hf_sdpa", 2.0)])
    report.write_lines(path, [attention_row("Small-1K", "fused", 0.5, gate_row_ratio=float("inf"))])
    assert len(path.read_text().splitlines()) == 3 and "Infinity" not in path.read_text()
    rows = report.read_lines([path])
    assert {r["provider"]: r["ms"] for r in rows} == {"hf_sdpa": 2.0, "fused": 0.5}
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        report.read_lines([path])


def test_a_case_comes_from_one_run(tmp_path):
    early = [attention_row("Small-1K", name, 1.0) for name in ("fused", "liger_flash", "liger_fa4")]
    late = [row | {"ms": 2.0, "date": "2026-11-22T00:00:00+00:00"} for row in early[:2]]
    other = [attention_row(case, "fused", 9.0) for case in ("Small-1K", "Small-2K")]
    report.write_lines(tmp_path / "a.jsonl", early + late)
    report.write_lines(tmp_path / "b.jsonl", other)
    rows = report.read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert {(r["case"], r["provider"]): r["ms"] for r in rows} == {
        ("Small-1K", "fused"): 2.0,
        ("Small-1K", "liger_flash"): 2.0,
        ("Small-2K", "fused"): 9.0,
    }
