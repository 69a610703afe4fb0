"""``python -m bench``: its command line, exit statuses, and the table of its commands."""

import dataclasses
import re

import pytest
import torch

from baselines import BASELINES
from bench import __main__ as command
from bench import report, timing
from bench.attention import cases, providers
from bench.environment import ROOT
from bench.suite import pick
from bench.suites import COMMANDS, corope
from fused_rope_attn import testing
from tests.support.bench import FACTS, published
from tests.support.clocks import WallClock

TINY = corope.CoRopeCase("Tiny", 1, (2, 1), 9, 8)


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
    report.write_lines(tmp_path / "rows.jsonl", published())
    assert command.main(["plot", str(tmp_path / "rows.jsonl"), "--plot-dir", str(tmp_path / "figures")]) == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2
    assert command.main(["plot", str(tmp_path / "none.jsonl")]) == 2


def test_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "bench tune" in text and "bench plot" in text and "--time-budget" in text


def test_provider_selection():
    def select(names):
        return pick(providers.PROVIDERS, names, groups=providers.GROUPS)

    assert [p.name for p in select(["ours"])] == ["fused", "fused_inline", "fused_prepass", "fused_hopper"]
    assert {p.name for p in select(["bare", "hf_sdpa"])} == {n for n in BASELINES if n.startswith("bare")} | {"hf_sdpa"}
    assert [p.name for p in select([])] == list(providers.PROVIDERS)


def test_the_sm_90_backend_says_where_it_does_not_run(monkeypatch):
    from fused_rope_attn.runtime import device

    hopper = providers.OURS["fused_hopper"]
    case = testing.Case(1, 2, 2, 128, 128, 128, dtype=torch.bfloat16)
    assert "sm_90" in hopper.unsupported(case)
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    assert hopper.unsupported(case) is None
    assert hopper.unsupported(dataclasses.replace(case, head_dim=256)) is None
    assert "has 264" in hopper.unsupported(dataclasses.replace(case, head_dim=264))
    assert "float32" in hopper.unsupported(dataclasses.replace(case, dtype=torch.float32))
    assert all(providers.OURS[name].unsupported(case) is None for name in providers.OURS)


def test_every_command_has_help(capsys):
    for name, entry in COMMANDS.items():
        with pytest.raises(SystemExit) as stopped:
            command.main([name, "--help"])
        assert stopped.value.code == 0 and entry.help
        assert "usage: python -m bench" in capsys.readouterr().out


def test_a_command_can_be_left_out_for_attention(capsys):
    for arguments in ([], ["run"]):
        assert command.main([*arguments, "--dry-run", "--cases", "Small-1K"]) == 0
        assert "Small-1K" in capsys.readouterr().out


def test_suites_never_import_one_another():
    """What two of them need lies beside them; only the table of commands knows them all."""
    folder = ROOT / "bench" / "suites"
    for file in folder.rglob("*.py"):
        own = file.relative_to(folder).parts[0].removesuffix(".py")
        imported = re.findall(r"(?:from|import) bench\.suites\.(\w+)", file.read_text(encoding="utf-8"))
        assert set(imported) <= {own}, file
    for file in (ROOT / "bench").glob("*.py"):
        assert not re.search(r"(?:from|import) bench\.suites\.", file.read_text(encoding="utf-8")), file


class _LikeAGpu(WallClock):
    def __init__(self, device):
        assert device == torch.device("cuda", 0)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs the command line of Co-RoPE as on a GPU, at one tiny case on the CPU: (exit status, rows)."""

    def measure(*providers):
        file = tmp_path / "rows.jsonl"
        configured = corope.CoRope(providers or corope.PROVIDERS, torch.float32)
        monkeypatch.setattr(corope.CoRope, "configure", lambda args: (configured, [TINY]))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(timing, "GpuClock", _LikeAGpu)
        monkeypatch.setattr("bench.command.environment", lambda: FACTS | {"cudnn": None})
        status = command.main(["corope", "--out", str(file), "--rounds", "2"])
        return status, report.read_lines([file] if file.exists() else [])

    return measure


def test_a_measurement_writes_its_rows_and_says_what_it_found(measured, capsys):
    status, rows = measured()
    assert status == 0 and {row["provider"] for row in rows} == {"corope", "chunked", "dense"}
    assert all(row["triton"] == "3" and row["commit"] == "abc" for row in rows)
    out, err = capsys.readouterr()
    assert "toy, driver 1, torch 2, triton 3" in out and "eager, in chunks" in out and "6 rows in" in out
    assert "gate corope" in err and "bwd eager" in err


def test_ours_that_is_wrong_makes_the_status_1(measured):
    wrong = corope.CoRopeProvider("corope", "wrong", lambda q, k, v: 1.1 * corope.corope_attention(q, k, v))
    status, rows = measured(wrong)
    assert status == 1 and [row["status"] for row in rows] == ["failed"]


def test_a_lost_gpu_makes_the_status_3(measured, monkeypatch, capsys):
    def lost(self):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(_LikeAGpu, "synchronize", lost)
    assert measured() == (3, [])
    assert "illegal memory access" in capsys.readouterr().out
