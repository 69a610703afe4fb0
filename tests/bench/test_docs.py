"""``python -m bench docs``: the figures and plots of the documents are those of committed rows."""

import re

import pytest

from bench import docs, results
from bench.__main__ import main
from bench.environment import ROOT
from bench.tables import CARDS, Table

# Every page that a person reads about results; experiments are a record and have figures of their own.
_GUIDES = tuple(f"docs/guides/{name}.md" for name in ("same-bits", "intervals", "latent"))
_PAGES = ("README.md", "docs/benchmarks.md", *_GUIDES)
_END = "<!-- table:end -->\n"
_TOY = f"<!-- table:toy: written -->\n{_END}"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A page with one block, of two committed rows of attention."""
    rows = [row for row in results.read("attention-h200") if row["case"] == "Llama7B-4K" and row["pass"] == "fwd"]
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("rows-h200", [row | {"ms": 0.598} for row in rows])
    monkeypatch.setattr(docs, "BLOCKS", {"page.md": {"toy": Table("rows")}})
    page = tmp_path / "page.md"
    page.write_text(f"# before\n{_TOY}after\n", encoding="utf-8")
    return page


def test_figures_are_those_of_the_committed_rows(capsys):
    assert main(["docs", "--check"]) == 0, capsys.readouterr().err


def test_plots_are_those_that_pages_show(tmp_path, monkeypatch, capsys):
    shown = {path.name for path in (ROOT / "bench" / "results" / "plots").iterdir()}
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    (tmp_path / "plots").mkdir()
    assert main(["docs", "--plots"]) == 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == shown
    assert capsys.readouterr().out.count("wrote ") == len(shown)


def test_all_committed_rows_are_shown():
    suites = {block.suite for blocks in docs.BLOCKS.values() for block in blocks.values() if isinstance(block, Table)}
    suites |= {"attention-oldest"}
    files = {path.stem for path in results.RESULTS.glob("*.csv")}
    assert files == {f"{suite}-{card}" for suite in suites for card in CARDS} - {"attention-oldest-h100", "cp-h100"}
    assert set(docs.BLOCKS) == set(_PAGES)


@pytest.mark.parametrize("page", _PAGES)
def test_there_are_no_figures_beside_the_generated_ones(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table:.*?<!-- table:end -->|```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]*\s?(?:ms|µs|TFLOP/s|GB/s|×|%)", text) == []


def test_the_command_writes_checks_and_complains(toy, capsys):
    assert main(["docs", "--check"]) == 1
    assert "page.md does not match the rows in toy" in capsys.readouterr().err
    assert "Llama7B-4K" not in toy.read_text(encoding="utf-8")
    assert main(["docs"]) == 0 and "rewrote toy" in capsys.readouterr().out
    text = toy.read_text(encoding="utf-8")
    assert text.startswith("# before\n<!-- table:toy: written by `python -m bench docs`")
    assert text.endswith(f"{_END}after\n") and "(bench/results/rows-h200.csv)" in text
    assert main(["docs", "--check"]) == 0
    assert main(["docs"]) == 0 and "matches the rows" in capsys.readouterr().out
    toy.write_text(text.replace("Llama7B-4K | 0.598", "Llama7B-4K | 0.498"), encoding="utf-8")
    assert main(["docs", "--check"]) == 1
    (results.RESULTS / "rows-h200.csv").unlink()
    assert main(["docs"]) == 2 and "no rows of rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "must have the blocks toy"),
        (_TOY.replace("toy", "nonsense"), "but has nonsense"),
        (2 * _TOY, "each once"),
        (_TOY + "<!-- table:toy -->\n", "but has toy and 3 markers"),
    ],
)
def test_bad_markers_are_refused(text, message, toy):
    with pytest.raises(ValueError, match=message):
        docs.rewrite("page.md", text)
