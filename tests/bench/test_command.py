"""``python -m bench``: its command line, exit statuses, and the table of its commands."""

import dataclasses
import re

import pytest
import torch

from baselines import BASELINES
from bench import __main__ as command, report
from bench.attention import cases, providers, suite as attention
from bench.attention.suite import ATTENTION
from bench.environment import ROOT
from tests.support.bench import FACTS
from tests.support.clocks import WallClock
from verification import testing

TINY = cases.BenchCase("Tiny", "Tiny", ("corope",), testing.Case(1, 2, 1, 9, 9, 8, dtype=torch.float32), "corope")


def test_dry_run_lists_cases_providers_and_what_is_missing(capsys):
    assert command.main(["--dry-run", "--cases", "table"]) == 0
    text = capsys.readouterr().out
    for name in (*cases.TABLE, *providers.table("plain")):
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
        (["--cases", "nowhere"], "no case fits 'nowhere'"),
        (["--providers", "nobody"], "unknown provider"),
        (["--passes", "sideways"], "--passes"),
        (["nonsense"], "no command nonsense; there are attention"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_fits_on_one_screen(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"\n  {name} " in "\n".join(lines) for name in command.COMMANDS)


def test_provider_selection():
    def select(*names, case=cases.PLAIN[0]):
        return [provider.name for provider in ATTENTION.providers(case, names)]

    assert select("hf_sdpa", "fused", "nobody") == ["fused", "hf_sdpa"]
    assert select() == list(providers.table("plain"))
    assert select(case=cases.HOST) == list(providers.table("host"))


def test_the_mode_chooses_cases(capsys):
    assert command.main(["--mode", "host", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "B1 H4 N128 D64 causal bf16" in text and "Small-512" not in text and "bare_cudnn_chosen" in text
    for mode, with_host in (("graph", False), ("graph,host", True)):
        assert command.main(["--mode", mode, "--dry-run"]) == 0
        text = capsys.readouterr().out
        assert "Small-512" in text and ("\nHost " in text) == with_host


def test_every_command_has_help(capsys):
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            command.main([name, "--help"])
        assert stopped.value.code == 0 and name in command.HELP
        assert "usage: python -m bench" in capsys.readouterr().out


def test_a_command_can_be_left_out_for_attention(capsys):
    for arguments in ([], ["attention"]):
        assert command.main([*arguments, "--dry-run", "--cases", "Small-1K"]) == 0
        assert "Small-1K" in capsys.readouterr().out


def test_suites_never_import_one_another():
    """Shared code is in files directly in ``bench``."""
    suites = {"attention", "mla", "rope", "decode", "models", "cp"}
    offenders = []
    for file in (ROOT / "bench").rglob("*.py"):
        imported = set(re.findall(r"(?:from|import) bench\.(\w+)", file.read_text(encoding="utf-8")))
        own = {file.parent.name, file.stem} if file.name != "docs.py" else suites
        offenders += [f"{file}: {name}" for name in (imported & suites) - own]
    assert not offenders


class _LikeAGpu(WallClock):
    pass


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run the command line of attention as on a GPU, at one tiny case of Co-RoPE on the CPU: (exit status, rows)."""

    def measure(*people):
        file = tmp_path / "rows.jsonl"
        table = {provider.name: provider for provider in people} or providers.table("corope")

        def clock(device, options):
            assert device == torch.device("cuda", 0)
            return _LikeAGpu()

        suite = dataclasses.replace(
            ATTENTION,
            cases=(TINY,),
            default_cases="",
            table=lambda case: table,
            clock=clock,
            adapt=lambda cases, options, args: cases,
        )
        monkeypatch.setattr(attention, "ATTENTION", suite)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("bench.command.environment", lambda: FACTS)
        status = command.main(["--out", str(file), "--rounds", "2"])
        return status, report.read_file(file) if file.exists() else []

    return measure


def test_a_measurement_writes_its_rows_and_says_what_it_found(measured, capsys):
    status, rows = measured()
    assert status == 0 and {row["provider"] for row in rows} == {"corope", "dense"}
    assert all(row["triton"] == "3" and row["commit"] == "abc" and row["bench"] == "attention" for row in rows)
    out, err = capsys.readouterr()
    assert "toy, driver 1, torch 2, triton 3" in out and "eager, at once" in out and "4 rows in" in out
    assert "gate corope" in err and "bwd eager" in err and "after 0 s: 1 of 1, Tiny" in err


def test_of_several_ranks_the_first_writes_the_rows(measured, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert measured() == (0, []) and not capsys.readouterr().err


def test_ours_that_is_wrong_makes_the_status_1(measured):
    def wrong(q, k, v, given):
        return 1.1 * providers.corope_attention(q, k, v)

    status, rows = measured(providers.ours("corope", "wrong", run=wrong))
    assert status == 1 and [row["status"] for row in rows] == ["failed"]


def test_an_interrupted_run_says_what_it_has(measured, capsys):
    def interrupted(q, k, v, given):
        raise KeyboardInterrupt

    assert measured(providers.ours("corope", "slow", run=interrupted)) == (130, [])
    assert "0 rows in" in capsys.readouterr().out


def test_a_lost_gpu_makes_the_status_3(measured, monkeypatch, capsys):
    def lost(self):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(_LikeAGpu, "synchronize", lost)
    assert measured() == (3, [])
    assert "illegal memory access" in capsys.readouterr().out
