"""``python -m bench cp`` without a GPU: its cases, its table and its plot."""

import json

import pytest

from bench.__main__ import main
from bench.suites.context_parallel.cases import KINDS, Work
from bench.suites.context_parallel.command import table
from bench.suites.context_parallel.plots import draw
from bench.suites.context_parallel.providers import PROVIDERS


def rows():
    found = []
    for ranks, length, part in ((2, 32768, "fwd"), (2, 131072, "fwd"), (4, 32768, "bwd")):
        row = {**Work("plain", length).fields(), "shape": f"P={ranks}", "ranks": ranks, "pass": part, "mode": "eager"}
        row |= {"status": "ok", "gpu": "a card"}
        times = {"ms": 2.0, "mib": 100.0, "detail": ""}
        found.append({**row, **times, "provider": "fused", "label": "ours", "efficiency": 0.975})
        found.append({**row, "provider": "torch", "label": "torch", "status": "missing", "detail": "no such thing"})
    return found


def test_cases(capsys):
    assert main(["cp", "--dry-run", "--ranks", "2", "--lengths", "32K,128K", "--kinds", "packed,plain"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "packed-32K on 2 GPUs", "packed-128K on 2 GPUs", "plain-32K on 2 GPUs",
        "plain-128K on 2 GPUs",
    ]  # fmt: skip


def test_documents_fill_the_sequence():
    limits = Work("packed", 131072).documents
    lengths = [b - a for a, b in zip(limits, limits[1:])]
    assert limits[0] == 0 and limits[-1] == 131072 and max(lengths) <= 32768 and min(lengths) > 0


def test_who_is_measured():
    found = {
        name: {kind for kind in KINDS if provider.is_for(Work(kind, 1024))} for name, provider in PROVIDERS.items()
    }
    assert found.pop("fused-balanced") == {"packed"}
    assert all(kinds == set(KINDS) for kinds in found.values())


def test_table_names_who_was_not_timed():
    text = table(rows())
    assert "97.5 %" in text and "plain-128K" in text
    assert "! plain-32K: torch fwd: missing: no such thing" in text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    (file,) = draw(rows(), tmp_path)
    assert file.stat().st_size > 5000
    assert draw([row for row in rows() if row["status"] == "missing"], tmp_path) == []


def test_plot_of_a_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    assert main(["cp", "plot", str(file), "--plot-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[1] == str(tmp_path / "context_parallel_eager.png")
    assert main(["cp", "plot", str(tmp_path / "none.jsonl")]) == 2
