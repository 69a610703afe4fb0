"""Every example explains its arguments, and does its work where what it only draws with is not installed."""

import re
import runpy
import sys

import pytest

from tests.support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script that lacks some modules, and returns what it prints."""

    def run_script(path, *arguments, missing):
        for name in missing:  # Python raises ModuleNotFoundError where the entry is None
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_help_needs_no_extra(run, capsys, path):
    with pytest.raises(SystemExit) as ended:
        run(path, "--help", missing=("matplotlib", "transformers"))
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith(f"usage: {path.name}")
    described = dict(re.findall(r"^  (--\w+)(?: [A-Z]+)?\s+([a-z].*)$", text, re.MULTILINE))
    assert set(described) == set(re.findall(r"--\w+", text.partition("\n\n")[0])), text


@pytest.mark.parametrize("missing", [(), ("matplotlib",)], ids=["with matplotlib", "without"])
def test_results_are_printed_with_and_without_the_plot(run, tmp_path, missing):
    out = tmp_path / "plot.png"
    arguments = {"steps": 2, "batch": 2, "length": 6, "seeds": 1, "plot": out, "device": "cpu"}
    given = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    lines = run(ROOT / "examples" / "corope_counting.py", *given, missing=missing).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["RoPE", "Co-RoPE"] and len(lines) == 3
    if missing:
        assert lines[2] == "no plot was written, since matplotlib is not installed" and not out.exists()
    else:
        assert lines[2] == f"plot written to {out}" and out.stat().st_size > 5000


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_package_index_is_named(path):
    """An example asks to install extras of the checkout, because the package is on no index."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"index-url|pip install ['\"]?fused", text)
    for command in re.findall(r"pip install ([^`\n]+)", text):
        assert command.startswith("'.[")
