"""Rows become files, text for the terminal, and the tables of documents; losses are shown like wins."""

import json

import pytest

from bench import report, results, tables
from bench.__main__ import main
from bench.attention import cases
from bench.report import case_report

COMMITTED = [row for row in results.read("attention-h200") if row["case"] in cases.TABLE]
TIMES = {"fused": 2.0, "liger_cudnn": 2.2, "liger_fa4": 1.6, "bare_cudnn": 1.5, "bare_fa4": 1.0}


def measured(factor=1.0, **extra):
    """Return rows of every shape of the target: ``TIMES``, ours by ``factor``, and backward three times as long."""
    rows = []
    for row in COMMITTED:
        if ms := TIMES.get(row["provider"]):
            ms = round(ms * (factor if row["provider"] == "fused" else 1.0) * (3.0 if row["pass"] == "bwd" else 1.0), 3)
            rows.append(row | {"ms": ms, "rounds": [ms] * 5, "commit": "0123abcd"} | extra)
    return rows


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("attention-h200", measured())
    results.write("attention-h100", measured(0.5, gpu="NVIDIA H100 80GB HBM3", commit="7654321"))
    return tmp_path


def cells(text, begin):
    line = next(line for line in text.splitlines() if line.startswith(f"| {begin}"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_committed_rows_give_back_what_was_written(files):
    changed = {"commit": "1234567", "stored": False, "detail": "left out", "ms": 0.123456789, "peak_mib": None}
    row = COMMITTED[0] | changed
    results.write("attention-h200", [row])
    (back,) = results.read("attention-h200")
    assert back == {key: x for key, x in row.items() if key not in ("detail", "peak_mib")} | {"ms": 0.12346}
    with pytest.raises(ValueError, match="one GPU, but holds those of NVIDIA B200, NVIDIA H200"):
        results.write("attention-h200", [row, row | {"gpu": "NVIDIA B200"}])


def test_rows_of_a_run_replace_those_of_their_case(files, capsys):
    """Times of two runs are not compared, and what failed is not committed."""
    run, old = files / "run.jsonl", measured()
    new = old[0] | {"ms": 7.0}
    report.write_lines(run, [new, old[1] | {"status": "failed"}])
    assert main(["results", str(run), "--to", "attention-h200"]) == 0
    assert results.read("attention-h200") == [row for row in old if report.place(row) != report.place(new)] + [new]
    run.write_text(json.dumps({"case": 1}) + "\n")
    assert main(["results", str(run), "--to", "attention-h200"]) == 2 and "KeyError" in capsys.readouterr().err


def test_text_marks_losses_and_reservations():
    bad = {"liger_cudnn": ("loose", "o: 3 rows too far off"), "bare_cudnn": ("failed", "dq: 7 rows beyond 2.5x")}
    rows = [row for row in measured() if (row["case"], row["pass"]) == ("Llama7B-4K", "fwd")]
    text = case_report([row | dict(zip(("status", "detail"), bad.get(row["provider"], ()))) for row in rows])
    for words in ("~ Liger rope + cuDNN", "tolerance: o: 3 rows", "0.80x LOSS", "FAILED the gate: dq: 7"):
        assert words in text


def test_losses_are_shown_like_wins_for_both_cards(files):
    text = tables.render(tables.Table("attention", " ".join(cases.TABLE)))
    for case in cases.TABLE:
        assert cells(text, case) == [
            *("2.00 / 6.00", "**0.80** / **0.80** FA4", "**0.50** / **0.50** FA4"),
            *("1.00 / 3.00", "**1.60** / **1.60** FA4", "**1.00** / **1.00** FA4"),
        ]
    for fact in ("attention-h200.csv", "0123abc", "7654321", COMMITTED[0]["date"][:10], "Triton 3.9.0"):
        assert fact in text


def test_passes_with_different_rivals_name_both_and_loose_ones_are_marked(files):
    rows = [row for row in measured() if (row["provider"], row["pass"]) != ("liger_fa4", "bwd")]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_cudnn" else row for row in rows]
    results.write("attention-h200", rows)
    text = tables.render(tables.Table("attention", "Small-1K"))
    assert cells(text, "Small-1K")[1] == "**0.80** FA4 / **1.10** ~ cuDNN" and "\n~: outside" in text


def test_the_cost_of_the_rotation_is_shown_with_its_worst_case(files):
    rows = measured()
    for row in [row for row in rows if row["provider"] == "fused"]:
        factor = 0.5 if row["case"] == "Small-1K" else 1.0
        rows.append(row | {"provider": "bare_fused", "rounds": [factor * ms for ms in row["rounds"]]})
    results.write("attention-h200", rows)
    text = tables.rotation("attention")
    assert cells(text, "ours / ours without") == ["1.091 (2.000)"] * 2  # of the card that has them
    assert cells(text, "fastest without rotation / ours without")[0] == "0.545 (0.500)"
    assert cells(text, "strongest with rotation / ours") == ["0.800 (0.800)"] * 2
