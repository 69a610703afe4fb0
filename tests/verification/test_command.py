"""`python -m verification` tells right from wrong, and says so in the table, the JSON and the exit status."""

import json
import subprocess
import sys

import pytest
import torch

import fused_rope_attn
from tests.support.paths import ROOT
from verification import __main__ as command, report
from verification.table import format_table

ONE_CASE = ["--device", "cpu", "--filter", "33 queries, 100 keys, not causal", "--dtype", "float32", "--jobs", "0"]


@pytest.fixture
def broken_kernels(monkeypatch):
    """rope_attention that shifts the keys' angles by one position for the last eight keys, on the triton backend."""
    right = fused_rope_attn.rope_attention

    def wrong(q, k, v, cos, sin, *args, backend="auto", **options):
        if backend == "triton":
            cos = torch.cat((cos[:-8], cos[-9:-1]))
            sin = torch.cat((sin[:-8], sin[-9:-1]))
        return right(q, k, v, cos, sin, *args, backend=backend, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong)


def test_a_right_kernel_passes(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert command.main([*ONE_CASE, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["failures"] == 0
    assert set(content) == {"environment", "seconds", "failures", "rows"}
    assert {"commit", "date", "torch", "triton", "python", "device", "fused_rope_attn"} <= set(content["environment"])
    backends = {row["backend"] for row in content["rows"]}
    assert backends == {"reference", "triton inline", "triton prepass"}
    assert len(content["rows"]) == len(backends) * 5
    for row in content["rows"]:
        assert set(row) == {
            "case", "dtype", "backend", "tensor", "error", "eager", "ratio", "row_ratio", "verdict", "detail",
        }  # fmt: skip
        assert 0 <= row["error"] < 1e-4 and row["verdict"] == "ok" and row["dtype"] == "float32"
    assert "15 of 15 tensors within tolerance, 0 not, 0 skipped" in out


def test_a_wrong_kernel_fails(tmp_path, capsys, broken_kernels):
    file = tmp_path / "rows.json"
    assert command.main([*ONE_CASE, "--strategy", "inline", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    verdicts = {(row["backend"], row["tensor"]): row["verdict"] for row in rows}
    # The angles of k touch everything but... nothing: v's gradient too, through the weights.
    assert [verdicts["triton inline", tensor] for tensor in ("o", "dq", "dk", "dv")] == ["FAIL"] * 4
    assert all(verdict == "ok" for (backend, _), verdict in verdicts.items() if backend == "reference")
    out, err = capsys.readouterr()
    assert "tensors not within tolerance" in err  # at once, before the table
    table_lines = [line for line in out.splitlines() if line.endswith("FAIL")]
    assert len(table_lines) == json.loads(file.read_text())["failures"] >= 4  # losses are printed like wins
    assert "FAIL 33 queries, 100 keys, not causal | float32 | triton inline | dk: " in out


def test_a_case_that_does_not_fit_is_skipped_in_sight(monkeypatch, capsys):
    """A small GPU is no failure, and no silence either."""

    def too_large(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("verification.testing.run_reference", too_large)
    assert command.main([*ONE_CASE, "--json", ""]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 tensors within tolerance, 0 not, 1 skipped" in out
    assert "SKIP 33 queries, 100 keys, not causal | float32 | - | -: does not fit this GPU's memory" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--large"],
        ["--small", "--large"],
        ["--dtype", "bfloat16"],
        ["--dtype", "int8"],
        ["--backend", "cuda"],
    ],
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_no_matching_case_is_an_error(capsys):
    assert command.main(["--device", "cpu", "--filter", "no such case"]) == 2


def test_json_holds_no_nan(tmp_path):
    rows = [
        report.Row("case", "float32", "triton inline", "o", float("nan"), 0.0, float("inf"), 1.0, "FAIL", "not finite")
    ]
    report.write_json(tmp_path / "deep" / "rows.json", {}, 1.0, rows)
    (row,) = json.loads((tmp_path / "deep" / "rows.json").read_text())["rows"]
    assert row["error"] is None and row["ratio"] is None and row["row_ratio"] == 1.0


def test_table_is_aligned():
    text = format_table(("name", "value"), [{"name": "a", "value": 1.0}, {"name": "longer", "value": 12345.678}])
    assert text.splitlines() == ["name       value", "------  --------", "a              1", "longer  1.23e+04"]


def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    """The command of a user: no environment variable, worker processes, the interpreter switched on by the command."""
    result = subprocess.run(
        [sys.executable, "-m", "verification", "--filter", "one token", "--dtype", "float16", "--device", "cpu",
         "--jobs", "1", "--json", str(tmp_path / "rows.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (tmp_path / "rows.json").exists(), result.stderr
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["environment"]["interpreter"] is True
    assert result.returncode == (1 if content["failures"] else 0)
    assert "triton prepass" in result.stdout
    assert "1/1" in result.stderr  # the progress bar
