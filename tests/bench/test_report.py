"""Rows to files and back, and their text for the terminal."""

import pytest

from bench import report
from bench.report import case_report
from tests.support.bench import attention_row, published


def test_columns_are_aligned():
    text = report.table(["name", "ms"], [["a", "1.0"], ["longer name", "12.25"]])
    assert text.splitlines() == ["name            ms", "-----------  -----", "a              1.0", "longer name  12.25"]


def test_a_file_gives_the_rows_of_the_latest_run(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    early = [attention_row("Small-1K", name, 1.0) for name in ("fused", "liger_flash", "liger_fa4")]
    early.append(attention_row("Small-2K", "fused", 9.0))
    late = [row | {"ms": 2.0, "date": "2026-11-22T00:00:00+00:00"} for row in early[:2]]
    report.write_lines(path, early)
    report.write_lines(path, [late[0], late[1] | {"tflops": float("inf")}])
    assert len(path.read_text().splitlines()) == 6 and "Infinity" not in path.read_text()
    assert {(r["case"], r["provider"]): r["ms"] for r in report.read_file(path)} == {
        ("Small-1K", "fused"): 2.0,
        ("Small-1K", "liger_flash"): 2.0,
        ("Small-2K", "fused"): 9.0,
    }
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        report.read_file(path)


def test_case_report_marks_the_reservations():
    rows = [r for r in published() if r["case"] == "Llama7B-4K"]
    rows.append(attention_row("Llama7B-4K", "hf_flash_attn", 1.9, status="loose", detail="o: 3 rows too far off"))
    failed = {"status": "failed", "detail": "dq: 7 rows beyond 2.5x"}
    rows.append(attention_row("Llama7B-4K", "compiled_fa4", 0.1, **failed))
    text = case_report(rows)
    assert "~ HF rope + FA2" in text and "tolerance: o: 3 rows" in text and "0.91x LOSS" in text
    assert "compiled rope + FA4 (fwd graph): FAILED the gate: dq: 7 rows" in text
    body = [line for line in text.splitlines() if line.startswith(("fused", "HF", "Liger", "bare"))]
    assert len(body) == 7 and "compiled" not in "".join(body)


def test_energies_are_columns():
    def row(provider, ms, mj, **extra):
        load = {"mode": "load", "mj": mj, "mj_rounds": [mj] * 3}
        return attention_row("Llama7B-2K", provider, ms, **load, **extra)

    text = case_report([row("fused", 0.15, 100.0), row("liger_fa4", 0.14, 110.0)])
    assert "under load" in text and "110.0" in text and "0.93x LOSS" in text


def test_to_take_longer_than_a_ceiling_is_no_loss():
    rows = [
        attention_row("Host", name, ms, "fwd", "host", kind="host") for name, ms in (("fused", 1.0), ("nothing", 0.1))
    ]
    assert "0.10x" in case_report(rows) and "LOSS" not in case_report(rows)
