"""``python -m bench docs``: the figures of the documents are those of committed rows."""

import re

import pytest

from bench import docs, report
from bench.__main__ import main
from bench.environment import ROOT
from tests.support.bench import published

# Every page that a person reads about results; experiments are a record and have figures of their own.
_GUIDES = tuple(f"docs/guides/{name}.md" for name in ("same-bits", "intervals", "latent"))
_PAGES = ("README.md", "docs/benchmarks.md", *_GUIDES)


def _open(name):
    return f"<!-- {name}: written -->\n<!-- {name.split(':')[0]}:end -->\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """One page with one block, of rows of attention."""
    report.write_lines(tmp_path / "rows.jsonl", published())
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    monkeypatch.setattr(docs, "BLOCKS", {"page.md": {"bench:headline": ("rows", "attention.tables.headline")}})
    page = tmp_path / "page.md"
    page.write_text(f"# before\n{_open('bench:headline')}after\n", encoding="utf-8")
    return page


def test_figures_are_those_of_the_committed_rows(capsys):
    assert main(["docs", "--check"]) == 0, capsys.readouterr().err


def test_plots_are_those_that_pages_show(tmp_path, monkeypatch, capsys):
    shown = {path.name for path in (ROOT / "bench" / "results" / "plots").iterdir()}
    rows = docs.read_file
    monkeypatch.setattr(docs, "read_file", lambda path: rows(ROOT / "bench" / "results" / path.name))
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    (tmp_path / "plots").mkdir()
    assert main(["docs", "--plots"]) == 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == shown
    assert capsys.readouterr().out.count("wrote ") == len(shown)


def test_the_files_of_rows_that_pages_show_are_committed():
    files = {file for blocks in docs.BLOCKS.values() for names, _ in blocks.values() for file in names.split()}
    files |= {file for _, file, _ in docs.PLOTS.values()}
    assert files <= {path.stem for path in docs.RESULTS.glob("*.jsonl")}
    assert all(report.read_file(docs.RESULTS / f"{file}.jsonl") for file in files)
    assert set(docs.BLOCKS) == set(_PAGES)
    assert list(docs.BLOCKS["README.md"]) == ["readme:attention", "readme:llama", "readme:qwen", "bench:headline"]


@pytest.mark.parametrize("page", _PAGES)
def test_there_are_no_figures_beside_the_generated_ones(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\w+):\w+.*?<!-- \1:end -->|```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]*\s?(?:ms|µs|TFLOP/s|GB/s|×|%)", text) == []


def test_the_command_writes_checks_and_complains(toy, capsys):
    assert main(["docs", "--check"]) == 1
    assert "page.md does not match the rows in bench:headline" in capsys.readouterr().err
    assert "at 8 of 8 shapes" not in toy.read_text(encoding="utf-8")
    assert main(["docs"]) == 0 and "rewrote bench:headline" in capsys.readouterr().out
    text = toy.read_text(encoding="utf-8")
    assert text.startswith("# before\n<!-- bench:headline: written by `python -m bench docs`")
    assert text.endswith("<!-- bench:end -->\nafter\n") and "at 8 of 8 shapes" in text
    assert main(["docs", "--check"]) == 0
    assert main(["docs"]) == 0 and "matches the rows" in capsys.readouterr().out
    toy.write_text(text.replace("8 of 8", "9 of 8"), encoding="utf-8")
    assert main(["docs", "--check"]) == 1
    (docs.RESULTS / "rows.jsonl").unlink()
    assert main(["docs"]) == 2 and "rows.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "must have the blocks bench:headline"),
        (_open("bench:nonsense"), "but has bench:nonsense"),
        (2 * _open("bench:headline"), "each once"),
        ("<!-- bench:headline -->\n", "closed by"),
        ("<!-- bench:headline -->\n<!-- rope:end -->\n", "closed by .* but has none and 2 markers"),
        (_open("bench:headline") + "<!-- bench:headline -->\n", "but has bench:headline and 3 markers"),
    ],
)
def test_bad_markers_are_refused(text, message, toy):
    with pytest.raises(ValueError, match=message):
        docs.rewrite("page.md", text)


def test_rows_of_two_cards_make_no_table(toy, capsys):
    report.write_lines(docs.RESULTS / "rows.jsonl", [published()[0] | {"gpu": "NVIDIA B200"}])
    assert main(["docs"]) == 2
    assert "one GPU, but holds those of NVIDIA B200, NVIDIA H200" in capsys.readouterr().err
