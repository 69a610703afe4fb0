"""`python -m verification` tells right from wrong, and says so in the table, the JSON and the exit status."""

import json
import subprocess
import sys

import pytest
import torch

import fused_rope_attn
from fused_rope_attn.testing import Case
from tests.support.paths import ROOT
from verification import __main__ as command
from verification import report
from verification.matrix import CHECKS, SCALES, Check
from verification.runner import Row, Task, run_task
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


def test_bounds_of_the_compared_heads():
    """Of a large case some batch entries are compared: each by its own bounds."""
    case = Case(2, 2, 1, 30, 40, 16, dtype=torch.float32, kv_starts=(9, 0), kv_lens=(40, 17))
    rows = run_task(Task(Check("bounds", case, scale="large"), torch.float32, (("reference", "auto"),), "cpu"))
    assert [row.verdict for row in rows] == ["ok"] * 5, rows


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


def test_a_kernel_that_raises_fails_and_the_others_run(monkeypatch):
    right = fused_rope_attn.rope_attention

    def raises(*args, strategy="auto", **options):
        if strategy == "inline":
            raise RuntimeError("no such tile")
        return right(*args, strategy=strategy, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", raises)
    check = next(check for check in CHECKS if check.name == "one token")
    rows = run_task(Task(check, torch.float32, (("triton", "inline"), ("reference", "auto")), "cpu"))
    assert rows[0].verdict == "FAIL" and "no such tile" in rows[0].detail
    assert len(rows) == 6


def test_a_case_that_does_not_fit_is_skipped_in_sight(monkeypatch, capsys):
    """A small GPU is no failure, and no silence either."""

    def too_large(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fused_rope_attn.testing.run_reference", too_large)
    assert command.main([*ONE_CASE, "--json", ""]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 tensors within tolerance, 0 not, 1 skipped" in out
    assert "SKIP 33 queries, 100 keys, not causal | float32 | reference | -: inputs and float64 reference" in out


def test_an_output_that_nothing_wrote_fails(monkeypatch):
    right = fused_rope_attn.rope_attention

    def forgetful(q, *args, **options):
        o, lse = right(q, *args, **options)
        return torch.where(torch.arange(q.shape[2])[:, None] == 0, torch.empty(()), o), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", forgetful)
    check = next(check for check in CHECKS if check.name == "causal")
    rows = run_task(Task(check, torch.float32, (("reference", "auto"),), "cpu"))
    assert {row.tensor: row.verdict for row in rows}["o"] == "FAIL"


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


def test_the_matrix_names_every_feature_once():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {check.scale for check in CHECKS} == set(SCALES)
    cases = [check.case for check in CHECKS]
    features: dict[str, set] = {
        "causal": {True, False}, "interleaved": {True, False}, "table_batch": {True, False},
        "full_width": {True, False}, "tables": {"rope", "yarn", "random"},
        "layout": {"bnhd", "bhnd", "odd", "expanded"},
        "table_dtype": {torch.float32, torch.float16, torch.bfloat16},
    }  # fmt: skip
    for field, values in features.items():
        assert {getattr(case, field) for case in cases} == values, field
    assert any(case.rotary < case.head_dim for case in cases)
    assert any(case.heads_q > case.heads_kv > 1 for case in cases) and any(case.heads_kv == 1 for case in cases)
    assert any(case.len_q > case.len_k for case in cases) and any(0 < case.len_q < case.len_k for case in cases)
    assert any(check.rerun for check in CHECKS)
    huge = [check for check in CHECKS if check.scale == "huge"]
    for check in huge:
        heads = check.packed_heads or check.case.heads_q
        assert check.case.batch * check.case.len_q * heads * check.case.head_dim > 2**31


def test_large_shapes_are_those_of_the_performance_table():
    shapes = {
        (c.case.batch, c.case.heads_q, c.case.heads_kv, c.case.len_q, c.case.head_dim)
        for c in CHECKS
        if c.scale == "large"
    }
    assert shapes >= {
        (4, 8, 8, 512, 64), (4, 8, 8, 1024, 64), (2, 32, 32, 2048, 128), (2, 32, 32, 4096, 128),
        (2, 64, 64, 1024, 128), (2, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (1, 8, 8, 65536, 128),
        (1, 4, 4, 131072, 128),
    }  # fmt: skip


def test_a_large_case_compares_some_heads_and_sees_a_fault_in_the_last(monkeypatch):
    """A large check in miniature: sampled heads, the first and the last among them, of views of a packed tensor."""
    small = next(check for check in CHECKS if check.name == "GQA 6 over 2").case
    check = Check("miniature", small, scale="large", packed_heads=24)
    task = Task(check, torch.float32, (("reference", "auto"),), "cpu")
    assert [row.verdict for row in run_task(task)] == ["ok"] * 5
    right = fused_rope_attn.rope_attention

    def wrong_in_the_last_head(q, *args, **options):
        assert q.stride(2) == 24 * q.shape[3]
        o, lse = right(q, *args, **options)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong_in_the_last_head)
    assert {row.tensor: row.verdict for row in run_task(task)}["o"] == "FAIL"


def test_json_holds_no_nan(tmp_path):
    rows = [Row("case", "float32", "triton inline", "o", float("nan"), 0.0, float("inf"), 1.0, "FAIL", "not finite")]
    report.write_json(tmp_path / "deep" / "rows.json", {}, 1.0, rows)
    (row,) = json.loads((tmp_path / "deep" / "rows.json").read_text())["rows"]
    assert row["error"] is None and row["ratio"] is None and row["row_ratio"] == 1.0


def test_table_is_aligned():
    text = format_table(("name", "value"), [{"name": "a", "value": 1.0}, {"name": "longer", "value": 12345.678}])
    assert text.splitlines() == ["name       value", "------  --------", "a              1", "longer  1.23e+04"]


def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    """As a user types it: no environment variable, worker processes, the interpreter switched on by the command."""
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


def test_the_rotation_alone_is_checked(monkeypatch, tmp_path, capsys):
    from verification.rotation import CHECKS as ROPE_CHECKS
    from verification.runner import CheckTask

    arguments = ["--device", "cpu", "--filter", "rotation with two ids", "--dtype", "float32", "--jobs", "0"]
    assert command.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    assert "4 of 4 tensors within tolerance" in capsys.readouterr().out
    assert command.main([*arguments, "--strategy", "inline"]) == 2  # the rotation alone has none

    right = fused_rope_attn.apply_rope_qk

    def wrong(q, k, cos, sin, **options):
        return right(q, k, torch.cat((cos[:-8], cos[-9:-1])), sin, **options)

    task = CheckTask(ROPE_CHECKS[0], torch.float32, "cpu")
    monkeypatch.setattr(fused_rope_attn, "apply_rope_qk", wrong)
    assert {row.verdict for row in task.run()} == {"FAIL"}
    monkeypatch.setattr(fused_rope_attn, "apply_rope_qk", lambda *args, **options: 1 / 0)
    (row,) = task.run()
    assert row.verdict == "FAIL" and "ZeroDivisionError" in row.detail


def tasks(*arguments):
    return command.make_tasks(command.parse(["--small", *arguments]))


@pytest.fixture
def on_an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def test_the_sm_90_backend_is_verified_where_it_runs(on_an_h100):
    served = [task for task in tasks("--device", "cuda") if ("hopper", "auto") in getattr(task, "variants", ())]
    assert {task.dtype for task in served} == {torch.float16, torch.bfloat16}
    names = {task.check.name for task in served}
    assert {"causal", "identical reruns", "odd strides, unaligned", "empty batch", "no queries"} <= names
    assert {"D 128", "D 192", "D 256"} <= names and "no keys" not in names
    # Every mask, and the pairs of them that models combine.
    assert {"window + softcap + GQA", "sinks + window", "packed + window", "packed, a short one behind a long one",
            "kv_starts + causal + per-batch tables", "packed, NQ and NK differ, not causal"} <= names  # fmt: skip
    alone = tasks("--device", "cuda", "--backend", "hopper")
    assert {task.variants for task in alone} == {(("hopper", "auto"),)}
    assert {(task.check.name, task.dtype) for task in alone} == {(task.check.name, task.dtype) for task in served}
    inline = tasks("--device", "cuda", "--strategy", "inline")
    assert not any(("hopper", "auto") in task.variants for task in inline)


def test_the_sm_90_backend_is_refused_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, arguments, reason in (
        ((10, 0), (), "needs an sm_90 GPU"),
        ((9, 0), ("--strategy", "inline"), "no --strategy inline"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device, found=capability: found)
        with pytest.raises(SystemExit) as stopped:
            command.parse(["--device", "cuda", "--backend", "hopper", *arguments])
        assert stopped.value.code == 2 and reason in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert command.parse(["--device", "cuda"]).backend == ["reference", "triton"]
    with pytest.raises(SystemExit):
        command.parse(["--device", "cpu", "--backend", "hopper"])


def test_the_sm_90_backend_gets_a_v_that_it_can_address(monkeypatch):
    """The other tensors keep their odd layout."""
    seen = {}

    def run(q, k, v, *args, backend="auto", deterministic=False, **options):
        seen.update(q=q, k=k, v=v, backend=backend, deterministic=deterministic)
        return right(q, k, v, *args, backend="reference", **options)

    right = fused_rope_attn.rope_attention
    monkeypatch.setattr(fused_rope_attn, "rope_attention", run)
    check = next(check for check in CHECKS if check.name == "odd strides, unaligned")
    rows = run_task(Task(check, torch.float16, (("hopper", "auto"),), "cpu"))
    assert all(row.verdict == "ok" and row.backend == "hopper" for row in rows)
    assert seen["backend"] == "hopper" and not seen["deterministic"]
    assert seen["v"].is_contiguous() and not seen["q"].is_contiguous() and not seen["k"].is_contiguous()
