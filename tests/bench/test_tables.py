"""The tables of the documents, and the committed files of their rows: what they say, losses included."""

import json

import pytest

from bench import readme, report, results, tables
from bench.__main__ import main
from bench.attention import cases
from tests.support.bench import attention_row

_TIMES = {"fused": 2.0, "liger_cudnn": 2.2, "liger_fa4": 1.6, "bare_cudnn": 1.5, "bare_fa4": 1.0}


def _measured(factor=1.0, **extra):
    """Every shape of the target: ours 2 ms, Liger's rotation + FlashAttention-4 1.6; backward three times as long."""
    return [
        attention_row(case, name, times * ms * (factor if name == "fused" else 1.0), part, **extra)
        for case in cases.TABLE
        for part, times in (("bwd", 3.0), ("fwd", 1.0))
        for name, ms in _TIMES.items()
    ]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Rows of two cards; on the second one ours takes half the time."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("attention-h200", _measured())
    results.write("attention-h100", _measured(0.5, gpu="NVIDIA H100 80GB HBM3", commit="7654321"))
    return tmp_path


def _cells(text, begin):
    line = next(line for line in text.splitlines() if line.startswith(f"| {begin}"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_losses_are_shown_like_wins_for_both_cards(files):
    text = tables.render(tables.Table("attention", " ".join(cases.TABLE)))
    for case in cases.TABLE:
        assert _cells(text, case) == [
            *("2.00 / 6.00", "**0.80** / **0.80** FA4", "**0.50** / **0.50** FA4"),
            *("1.00 / 3.00", "**1.60** / **1.60** FA4", "**1.00** / **1.00** FA4"),
        ]
    header = text.splitlines()[0]
    assert "H200, ours, ms" in header and "H100, ours, ms" in header
    for fact in ("attention-h200.csv", "0123abc", "7654321", "2026-11-21", "Triton 3.6.0"):
        assert fact in text


def test_passes_with_different_rivals_name_both_and_loose_ones_are_marked(files):
    rows = [row for row in _measured() if (row["provider"], row["pass"]) != ("liger_fa4", "bwd")]
    rows = [row | {"status": "loose"} if row["provider"] == "liger_cudnn" else row for row in rows]
    results.write("attention-h200", rows)
    text = tables.render(tables.Table("attention", "Small-1K"))
    assert _cells(text, "Small-1K")[1] == "**0.80** FA4 / **1.10** ~ cuDNN" and "\n~: outside" in text
    with pytest.raises(ValueError, match="no times of fused at No-1K"):
        tables.render(tables.Table("attention", "Small-1K No-1K"))


def test_columns_of_facts_costs_and_others(files):
    rows = [row for row in _measured() if row["case"] == "Small-1K"]
    rows += [
        row | {"provider": "fused_without", "ms": 1.0, "rounds": [1.0] * 5} for row in rows if row["role"] == "ours"
    ]
    for row in rows:
        row |= {"mj": 2 * row["ms"], "mj_rounds": [9.0 if row["provider"] == "fused" else 3.0] * 5}
    results.write("some-h200", rows)
    table = tables.Table(
        "some",
        cost=("over without", "fused_without"),
        facts={"mJ": ("mj", "{:.0f}")},
        others={"cuDNN": "bare_cudnn"},
        roles=(),
        over="mj_rounds",
    )
    assert _cells(tables.render(table), "Small-1K") == ["2.00 / 6.00", "2.000 / 6.000", "4 / 12", "0.33 / 0.33"]
    assert _cells(tables.render(table._replace(within="D64", shapes=True)), "Small-1K (B4 H8 N1024")[0] == "2.00 / 6.00"
    with pytest.raises(ValueError, match="hold no times"):
        tables.render(table._replace(within="D128"))
    with pytest.raises(FileNotFoundError, match="no rows of other"):
        tables.render(table._replace(suite="other"))


def test_standing_counts_every_shape(files):
    rows = _measured()
    for row in rows:
        if (row["case"], row["provider"], row["pass"]) == ("Small-1K", "liger_cudnn", "fwd"):
            row |= {"rounds": [1.9] * 5}
    results.write("attention-h200", [row for row in rows if (row["provider"], row["pass"]) != ("bare_fa4", "bwd")])
    text = tables.standing("attention", ("liger_cudnn", "bare_fa4"))
    assert _cells(text, "Liger rope + cuDNN")[:2] == ["7 of 8, 0.95 to 1.10", "8 of 8, 1.10 to 1.10"]
    assert _cells(text, "bare FA4") == [
        *("0 of 8, 0.50 to 0.50", "no such pass", "8 of 8, 1.00 to 1.00", "8 of 8, 1.00 to 1.00"),
    ]


def test_readme_has_the_sums_of_one_provider(files):
    for card in ("h200", "h100"):
        rows = results.read(f"attention-{card}")
        load = [row | {"mode": "load"} for row in rows if row["provider"] in ("fused", "bare_fa4")]
        load = [row | {"provider": "bare_fa3_jax"} if row["role"] == "bare" else row for row in load]
        results.write(f"fa3-{card}", load)
    text = readme.attention()
    assert _cells(text, "**`rope_attention`**")[:3] == ["**2.00**", "**6.00**", "**8.00**"]
    assert _cells(text, "best with")[2:4] == ["6.40 (80%) FA4", "1.60 (160%) FA4"]
    assert _cells(text, "FlashAttention-3 for JAX") == ["(50%)"] * 3 + ["(100%)"] * 3
    results.write("attention-h200", [row for row in results.read("attention-h200") if row["provider"] != "fused"])
    with pytest.raises(ValueError, match="no times of fused"):
        readme.attention()


def test_readme_shows_the_gains_with_their_rivals(files, monkeypatch):
    monkeypatch.setattr(readme, "_GAINS", (("heads of 64", "attention", "Small-1K", "D64", "fused", "graph"),))
    assert _cells(readme.gains(), "heads of 64") == ["0.80× / 0.80×", "Liger rope + FA4"]
    monkeypatch.setattr(readme, "_GAINS", (("heads", "attention", "Small-1K", "D64", "other", "graph"),))
    with pytest.raises(ValueError, match="no times of other"):
        readme.gains()


def test_a_file_gives_back_what_was_written(files):
    row = _measured()[0] | {
        "commit": "1234567",
        "stored": False,
        "detail": "left out",
        "ms": 0.123456789,
        "peak_mib": None,
    }
    results.write("attention-h200", [row])
    (back,) = results.read("attention-h200")
    assert (
        back["commit"] == "1234567"
        and back["stored"] is False
        and back["ms"] == 0.12346
        and back["rounds"] == [6.0] * 5
    )
    assert back["packages"] == row["packages"] and "detail" not in back and "peak_mib" not in back
    with pytest.raises(ValueError, match="one GPU, but holds those of NVIDIA B200, NVIDIA H200"):
        results.write("attention-h200", [row, row | {"gpu": "NVIDIA B200"}])


def test_rows_of_a_run_replace_those_of_their_case(files, capsys):
    run = files / "run.jsonl"
    new = [attention_row("Small-1K", "fused", 7.0), attention_row("Small-1K", "liger_fa3", 1.0, status="failed")]
    report.write_lines(run, new)
    assert main(["results", str(run), "--to", "attention-h200"]) == 0
    rows = results.read("attention-h200")
    here = [row for row in rows if (row["case"], row["pass"]) == ("Small-1K", "fwd")]
    assert [(row["provider"], row["ms"]) for row in here] == [("fused", 7.0)]
    assert len(rows) == len(_measured()) - len(_TIMES) + 1
    run.write_text(json.dumps({"case": 1}) + "\n")
    assert main(["results", str(run), "--to", "attention-h200"]) == 2 and "line 1" in capsys.readouterr().err
