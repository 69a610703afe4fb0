"""`python -m bench` and `bench plot`: arguments, dry runs, exit statuses."""

from pathlib import Path

import pytest
import torch

from baselines import BASELINES
from bench import __main__ as command
from bench import cases, providers, report
from bench.environment import ROOT
from tests.support.bench import published_rows


def test_dry_run_lists_cases_providers_and_what_is_missing(capsys):
    assert command.main(["--dry-run", "--group", "table"]) == 0
    text = capsys.readouterr().out
    for name in (*cases.TABLE, *providers.PROVIDERS):
        assert name in text
    for name, baseline in BASELINES.items():
        if reason := baseline.missing():
            assert reason in text and "pip install" in reason, name


def test_without_a_gpu_the_exit_status_is_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "nowhere"], "unknown group"),
        (["--providers", "nobody"], "unknown provider"),
        (["--passes", "sideways"], "--passes"),
        (["--baseline", "nobody"], "--baseline"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_plot_command(tmp_path, capsys):
    report.write_lines(tmp_path / "rows.jsonl", published_rows())
    assert command.main(["plot", str(tmp_path / "rows.jsonl"), "--plot-dir", str(tmp_path / "figures")]) == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2
    assert command.main(["plot", str(tmp_path / "none.jsonl")]) == 2


def test_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "bench tune" in text and "bench plot" in text and "--time-budget" in text


def test_results_folder_is_inside_the_repository():
    assert Path(command.RESULTS).is_relative_to(ROOT)
