"""Rows become files, text for the terminal, and the tables of documents; losses are shown like wins."""

import json

import pytest

from bench import readme, report, results, tables
from bench.__main__ import main
from bench.attention import cases, providers
from bench.report import case_report


def attention_row(case, provider, ms, part="fwd", mode="graph", kind="plain", **extra):
    """Return a row of attention as an H200 would give it, with ``ms`` in every round."""
    found, who = next(c for c in cases.CASES if c.name == case), providers.table(kind)[provider]
    sizes = ("batch", "heads_q", "heads_kv", "len_q", "head_dim", "causal")
    row = {"case": case, "family": found.family, "shape": found.shape, "dtype": "bfloat16", "gpu": "NVIDIA H200"}
    row |= {name: getattr(found.case, name) for name in sizes} | {"triton": "3.6.0", "commit": "0123abcd"}
    row |= {"date": "2026-11-21T10:00:00+00:00", "packages": {"liger-kernel": "0.8.5"}, "peak_mib": 64.0}
    row |= {"provider": provider, "label": who.label, "role": who.role, "pass": part, "mode": mode, "status": "ok"}
    row |= {"detail": "", "ms": ms, "p20": 0.98 * ms, "p80": 1.03 * ms, "rounds": [ms] * 5}
    return row | {"tflops": found.flops(part) / ms * 1e-9} | extra


TIMES = {"fused": 2.0, "liger_cudnn": 2.2, "liger_fa4": 1.6, "bare_cudnn": 1.5, "bare_fa4": 1.0}


def measured(factor=1.0, **extra):
    """Return rows of every shape of the target: ``TIMES``, ours by ``factor``, and backward three times as long."""
    return [
        attention_row(case, name, times * ms * (factor if name == "fused" else 1.0), part, **extra)
        for case in cases.TABLE
        for part, times in (("bwd", 3.0), ("fwd", 1.0))
        for name, ms in TIMES.items()
    ]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Rows of two cards; on the second one ours takes half the time."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("attention-h200", measured())
    results.write("attention-h100", measured(0.5, gpu="NVIDIA H100 80GB HBM3", commit="7654321"))
    return tmp_path


def cells(text, begin):
    line = next(line for line in text.splitlines() if line.startswith(f"| {begin}"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


# Files


def test_a_file_gives_the_rows_of_the_latest_run(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    early = [attention_row("Small-1K", name, 1.0) for name in ("fused", "liger_flash", "liger_fa4")]
    early.append(attention_row("Small-2K", "fused", 9.0))
    late = [row | {"ms": 2.0, "date": "2026-11-22T00:00:00+00:00"} for row in early[:2]]
    report.write_lines(path, early)
    report.write_lines(path, [late[0], late[1] | {"tflops": float("inf")}])
    assert len(path.read_text().splitlines()) == 6 and "Infinity" not in path.read_text()
    found = {(row["case"], row["provider"]): row["ms"] for row in report.read_file(path)}
    late = {("Small-1K", "fused"): 2.0, ("Small-1K", "liger_flash"): 2.0}
    assert found == late | {("Small-2K", "fused"): 9.0}


def test_committed_rows_give_back_what_was_written(files):
    changed = {"commit": "1234567", "stored": False, "detail": "left out", "ms": 0.123456789, "peak_mib": None}
    row = measured()[0] | changed
    results.write("attention-h200", [row])
    (back,) = results.read("attention-h200")
    assert (back["commit"], back["stored"], back["ms"], back["rounds"]) == ("1234567", False, 0.12346, [6.0] * 5)
    assert back["packages"] == row["packages"] and "detail" not in back and "peak_mib" not in back
    with pytest.raises(ValueError, match="one GPU, but holds those of NVIDIA B200, NVIDIA H200"):
        results.write("attention-h200", [row, row | {"gpu": "NVIDIA B200"}])


def test_rows_of_a_run_replace_those_of_their_case(files, capsys):
    """Times of two runs are not compared, and what failed is not committed."""
    run = files / "run.jsonl"
    new = [attention_row("Small-1K", "fused", 7.0), attention_row("Small-1K", "liger_fa3", 1.0, status="failed")]
    report.write_lines(run, new)
    assert main(["results", str(run), "--to", "attention-h200"]) == 0
    rows = results.read("attention-h200")
    here = [row for row in rows if (row["case"], row["pass"]) == ("Small-1K", "fwd")]
    assert [(row["provider"], row["ms"]) for row in here] == [("fused", 7.0)]
    assert len(rows) == len(measured()) - len(TIMES) + 1
    run.write_text(json.dumps({"case": 1}) + "\n")
    assert main(["results", str(run), "--to", "attention-h200"]) == 2 and "line 1" in capsys.readouterr().err


# Text for the terminal


def test_text_marks_losses_and_reservations():
    rows = [row for row in measured() if (row["case"], row["pass"]) == ("Llama7B-4K", "fwd")]
    rows.append(attention_row("Llama7B-4K", "hf_flash_attn", 2.5, status="loose", detail="o: 3 rows too far off"))
    rows.append(attention_row("Llama7B-4K", "compiled_fa4", 0.1, status="failed", detail="dq: 7 rows beyond 2.5x"))
    text = case_report(rows)
    assert "~ HF rope + FA2" in text and "tolerance: o: 3 rows" in text and "0.80x LOSS" in text
    assert "compiled rope + FA4 (fwd graph): FAILED the gate: dq: 7 rows" in text


# Tables of documents


def test_losses_are_shown_like_wins_for_both_cards(files):
    text = tables.render(tables.Table("attention", " ".join(cases.TABLE)))
    for case in cases.TABLE:
        assert cells(text, case) == [
            *("2.00 / 6.00", "**0.80** / **0.80** FA4", "**0.50** / **0.50** FA4"),
            *("1.00 / 3.00", "**1.60** / **1.60** FA4", "**1.00** / **1.00** FA4"),
        ]
    for fact in ("attention-h200.csv", "0123abc", "7654321", "2026-11-21", "Triton 3.6.0", "H100, ours, ms"):
        assert fact in text


def test_passes_with_different_rivals_name_both_and_loose_ones_are_marked(files):
    rows = [row for row in measured() if (row["provider"], row["pass"]) != ("liger_fa4", "bwd")]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_cudnn" else row for row in rows]
    results.write("attention-h200", rows)
    text = tables.render(tables.Table("attention", "Small-1K"))
    assert cells(text, "Small-1K")[1] == "**0.80** FA4 / **1.10** ~ cuDNN" and "\n~: outside" in text


def test_readme_has_the_sums_of_one_provider(files):
    for card in ("h200", "h100"):
        load = [row | {"mode": "load"} for row in results.read(f"attention-{card}")]
        load = [row | {"provider": "bare_fa3_jax"} if row["provider"] == "bare_fa4" else row for row in load]
        results.write(f"fa3-{card}", load)
    text = readme.attention()
    assert cells(text, "**`rope_attention`**")[:3] == ["**2.00**", "**6.00**", "**8.00**"]
    assert cells(text, "best with")[2:4] == ["6.40 (80%) FA4", "1.60 (160%) FA4"]
    assert cells(text, "FlashAttention-3 for JAX") == ["(50%)"] * 3 + ["(100%)"] * 3
    results.write("attention-h200", [row for row in results.read("attention-h200") if row["provider"] != "fused"])
    with pytest.raises(ValueError, match="no times of fused"):
        readme.attention()
