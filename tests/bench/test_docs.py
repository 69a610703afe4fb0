"""``python -m bench docs``: the figures and plots of the documents are those of committed rows."""

import re

import pytest

from bench import docs, results
from bench.__main__ import main
from bench.environment import ROOT
from bench.tables import CARDS, Table

# Every page that a person reads about results; experiments are a record and have figures of their own.
_GUIDES = tuple(f"docs/guides/{name}.md" for name in ("same-bits", "intervals", "latent"))
_NO_ROWS = {f"{suite}-h100" for suite in ("attention-oldest", "block", "cp")}
_PAGES = ("README.md", "docs/benchmarks.md", *_GUIDES)


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
    assert files == {f"{suite}-{card}" for suite in suites for card in CARDS} - _NO_ROWS
    assert set(docs.BLOCKS) == set(_PAGES)


@pytest.mark.parametrize("page", _PAGES)
def test_there_are_no_figures_beside_the_generated_ones(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table:.*?<!-- table:end -->|```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]*\s?(?:ms|µs|TFLOP/s|GB/s|×|%)", text) == []


def test_the_command_checks_rewrites_and_complains(tmp_path, monkeypatch, capsys):
    name = "docs/guides/latent.md"
    right, page = (ROOT / name).read_text(encoding="utf-8"), tmp_path / name
    page.parent.mkdir(parents=True)
    page.write_text(right.replace("H128-1K | 0.", "H128-1K | 1."), encoding="utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "BLOCKS", {name: docs.BLOCKS[name]})
    assert main(["docs", "--check"]) == 1 and f"{name} does not match the rows in mla" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") != right
    assert main(["docs"]) == 0 and page.read_text(encoding="utf-8") == right
    for wrong in ("nothing", right.replace("table:mla", "table:nonsense"), 2 * right, right + "<!-- table:mla -->\n"):
        with pytest.raises(ValueError, match="must have the blocks mla, each once"):
            docs.rewrite(name, wrong)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert main(["docs"]) == 2 and "no rows of mla" in capsys.readouterr().err
