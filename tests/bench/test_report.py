"""What is written from rows: tables that print losses like wins, and lines of JSON."""

import pytest

from bench import cases, report
from tests.support.bench import make_row, published_rows


def test_losses_are_printed_like_wins():
    text = report.summary(published_rows())
    # Small-512, Small-1K, Llama7B-2K, Llama70B-1K beat the strongest separate pair; the other four lose.
    assert "4 not slower, 4 slower" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in cases.TABLE}
    assert set(lines) == set(cases.TABLE)
    assert "0.91x LOSS" in lines["Llama7B-4K"] and "Liger rope + FA4" in lines["Llama7B-4K"]
    assert "0.80x LOSS" in lines["Llama7B-4K"] and "bare FA4" in lines["Llama7B-4K"]
    assert "1.93x" in lines["Small-512"] and "0.83x LOSS" in lines["Small-512"]
    assert len({len(line.rstrip()) for line in text.splitlines()}) > 1


def test_case_report_marks_the_strongest_and_the_reservations():
    rows = [r for r in published_rows() if r["case"] == "Llama7B-4K"]
    rows.append(make_row("Llama7B-4K", "hf_flash_attn", 1.9, status="loose"))
    rows.append(
        make_row("Llama7B-4K", "compiled_fa4", 1.0, status="failed", detail="dq: 7 rows beyond 2.5x") | {"ms": 0.1}
    )
    text = report.case_report(rows)
    marked = {line.rsplit("  ", 1)[0].strip(): line for line in text.splitlines() if " * " in f"{line} "}
    assert any("Liger rope + FA4" in line for line in marked.values())
    assert any("bare FA4" in line and "°" in line for line in text.splitlines())
    assert "~ HF rope + FA2" in text and "1.32 times" in text
    assert "compiled rope + FA4 (fwd graph): FAILED the gate: dq: 7 rows" in text
    body = [line for line in text.splitlines() if line.startswith(("fused", "HF", "Liger", "bare"))]
    assert len(body) == 7 and "compiled" not in "".join(body)


def test_columns_are_aligned():
    text = report.table(["name", "ms"], [["a", "1.0"], ["longer name", "12.25"]])
    assert text.splitlines() == ["name            ms", "-----------  -----", "a              1.0", "longer name  12.25"]


def test_json_lines_come_back_and_the_later_run_wins(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    report.write_lines(path, [make_row("Small-1K", "fused", 1.0), make_row("Small-1K", "hf_sdpa", 2.0)])
    report.write_lines(path, [make_row("Small-1K", "fused", 0.5, gate_row_ratio=float("inf"))])
    assert len(path.read_text().splitlines()) == 3 and "Infinity" not in path.read_text()
    rows = report.read_lines([path])
    assert {r["provider"]: r["ms"] for r in rows} == {"hf_sdpa": 2.0, "fused": 0.5}
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        report.read_lines([path])
