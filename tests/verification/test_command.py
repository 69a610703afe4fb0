"""`python -m verification` tells right from wrong, and says so in the table, the JSON and the exit status."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fused_rope_attn
from fused_rope_attn.experimental.corope import launch
from tests.support.corope import NAMES
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import ignore_overflow, interpreted
from tests.support.paths import ROOT
from verification import __main__ as command, attention, report
from verification.attention import AttentionCheck, CoRopeCheck
from verification.calls import Machine
from verification.matrix import ATTENTION, CHECKS, ROTATION, SIZES
from verification.report import rows_of
from verification.table import format_table
from verification.workers import run_check

ONE_CASE = ["--device", "cpu", "--filter", "N63 D32", "--dtype", "float32", "--jobs", "0"]
REFERENCE = ("reference", "auto")


def rows_for(check, *variants):
    changes = {"variants": variants or (REFERENCE,)} if isinstance(check, AttentionCheck) else {}
    return rows_of(run_check(replace(check, dtype=F32, **changes), Machine.of("cpu")))


def verdicts(check, *variants):
    return {row.tensor: row.verdict for row in rows_for(check, *variants)}


def named(name):
    return next(check for check in ATTENTION if check.name == name)


@pytest.fixture
def replaced(monkeypatch):
    """Replace a public function by ``other(right, *arguments, **options)``."""

    def replace_by(other, name="rope_attention"):
        right = getattr(fused_rope_attn, name)
        monkeypatch.setattr(fused_rope_attn, name, lambda *args, **options: other(right, *args, **options))

    return replace_by


def shifted(table):
    """A table that is one position late for the last eight rows."""
    return torch.cat((table[:-8], table[-9:-1]))


def test_a_right_kernel_passes(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert command.main([*ONE_CASE, "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["failures"] == 0 and content.keys() == {"environment", "seconds", "failures", "rows"}
    assert {"commit", "date", "torch", "triton", "python", "device", "fused_rope_attn"} <= set(content["environment"])
    assert {row["backend"] for row in content["rows"]} == {"reference", "triton inline", "triton prepass"}
    for row in content["rows"]:
        assert set(row) == {
            "case", "dtype", "backend", "tensor", "error", "eager", "ratio", "row_ratio", "verdict", "detail",
        }  # fmt: skip
        assert 0 <= row["error"] < 1e-4 and row["verdict"] == "ok" and row["dtype"] == "float32"
    assert "15 of 15 tensors within tolerance, 0 not, 0 skipped" in capsys.readouterr().out


def test_a_wrong_kernel_fails(tmp_path, capsys, replaced):
    def wrong(right, q, k, v, cos, sin, *args, backend="auto", **options):
        tables = (shifted(cos), shifted(sin)) if backend == "triton" else (cos, sin)
        return right(q, k, v, *tables, *args, backend=backend, **options)

    replaced(wrong)
    file = tmp_path / "rows.json"
    assert command.main([*ONE_CASE, "--strategy", "inline", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    found = {(row["backend"], row["tensor"]): row["verdict"] for row in rows}
    # The angles of k touch v's gradient too, through the weights.
    assert [found["triton inline", tensor] for tensor in ("o", "dq", "dk", "dv")] == ["FAIL"] * 4
    assert all(verdict == "ok" for (backend, _), verdict in found.items() if backend == "reference")
    out, err = capsys.readouterr()
    assert "tensors not within tolerance" in err  # at once, before the table
    table_lines = [line for line in out.splitlines() if line.endswith("FAIL")]
    assert len(table_lines) == json.loads(file.read_text())["failures"] >= 4  # losses are printed like wins
    assert "FAIL B1 H2 N63 D32 | float32 | triton inline | dk: " in out


def test_a_case_that_does_not_fit_is_skipped_in_sight(monkeypatch, capsys):
    """A small GPU is no failure, and no silence either."""

    def too_large(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("verification.testing.run_reference", too_large)
    assert command.main([*ONE_CASE, "--json", ""]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 tensors within tolerance, 0 not, 1 skipped" in out
    assert "SKIP B1 H2 N63 D32 | float32 | - | -: does not fit this GPU's memory" in out


def test_a_kernel_that_raises_fails_and_the_others_run(replaced):
    def raises(right, *args, strategy="auto", **options):
        return 1 / 0 if strategy == "inline" else right(*args, strategy=strategy, **options)

    replaced(raises)
    rows = rows_for(named("B1 H2 N1 D32"), ("triton", "inline"), REFERENCE)
    assert rows[0].verdict == "FAIL" and "ZeroDivisionError" in rows[0].detail and len(rows) == 6


def test_an_output_that_nothing_wrote_fails(replaced):
    def forgetful(right, q, *args, **options):
        o, lse = right(q, *args, **options)
        return torch.where(torch.arange(q.shape[2])[:, None] == 0, torch.empty(()), o), lse

    replaced(forgetful)
    assert verdicts(named("B1 H2 N80 D32"))["o"] == "FAIL"


def test_a_large_case_compares_some_heads_and_sees_a_fault_in_the_last(monkeypatch, replaced):
    """A large check in miniature: the first and the last head, by their own bounds, of views of wider tensors."""
    check = replace(named("B1 H6/2 N50 D32"), batch=3, memory=("far", "far", "far", "bnhd"))
    check = replace(check, kv_starts=(9, 0, 3), kv_lens=(40, 17, 30))
    monkeypatch.setattr(attention, "MOST_SCORES", 2 * 3 * check.len_q * check.len_k)
    assert check.compared_heads() == [(0, 0), (2, 1)]
    assert [row.verdict for row in rows_for(check)] == ["ok"] * 5

    def wrong_in_the_last_head(right, q, *args, **options):
        assert q.stride(2) == 130 * q.shape[3]
        o, lse = right(q, *args, **options)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1), lse

    replaced(wrong_in_the_last_head)
    assert verdicts(check)["o"] == "FAIL"


def test_the_rotation_alone_is_checked(replaced, capsys):
    arguments = ["--device", "cpu", "--filter", "interleaved positions=twoids", "--dtype", "float32", "--jobs", "0"]
    assert command.main([*arguments, "--json", ""]) == 0
    assert "4 of 4 tensors within tolerance" in capsys.readouterr().out
    assert command.main([*arguments, "--strategy", "inline"]) == 2  # the rotation alone is without strategies
    replaced(lambda right, q, k, cos, sin, **options: right(q, k, shifted(cos), sin, **options), "apply_rope_qk")
    assert set(verdicts(ROTATION[0]).values()) == {"FAIL"}
    replaced(lambda *args, **options: 1 / 0, "apply_rope_qk")
    (row,) = rows_for(ROTATION[0])
    assert row.verdict == "FAIL" and "ZeroDivisionError" in row.detail


@interpreted
@ignore_overflow
def test_co_rope_is_checked(monkeypatch):
    check = CoRopeCheck(1, 2, 1, 9, 9, 32)
    assert verdicts(check) == dict.fromkeys(NAMES, "ok")
    right = launch.frequency_tables
    # A distance that is one part in a thousand too long.
    monkeypatch.setattr(launch, "frequency_tables", lambda *x: (right(*x)[0], right(*x)[1] * 1.001))
    found = verdicts(check)
    assert found["o"] == found["dq"] == "FAIL"
    monkeypatch.setattr(launch, "frequency_tables", None)
    assert [row.verdict for row in rows_for(check)] == ["FAIL"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--large"], ["--small", "--large"], ["--dtype", "bfloat16"], ["--dtype", "int8"], ["--backend", "cuda"]),
        *(
            ["--backend", "hopper"],
            ["--only", "3"],
            ["--family", "pairs"],
            ["--random", "0"],
            ["--call", "x", "--list"],
        ),
        *(["--random", "5", *more] for more in (["--small"], ["--filter", "x"], ["--family", "x"])),
        ["--random", "0"],
    ],
    ids=" ".join,
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2 and "error:" in capsys.readouterr().err


def test_no_matching_case_is_an_error():
    assert command.main(["--device", "cpu", "--filter", "no such case"]) == 2


def on(monkeypatch, *capability):
    """Let the command believe that it runs on a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)


def test_the_sm_90_backend_is_verified_where_it_runs(monkeypatch):
    on(monkeypatch, 9, 0)

    def checks(*arguments):
        return command.make_checks(command.parse(["--small", "--device", "cuda", *arguments]))

    served = [check for check in checks() if ("hopper", "auto") in getattr(check, "variants", ())]
    assert {check.dtype for check in served} == {F16, BF16}
    names = " ".join(check.name for check in served)
    for words in ("deterministic", "layout=odd", "B0", "N0x40", "D128", "D256", "sinks", "norms", "intervals=random",
                  "window=(20,0) softcap=5.0", "table_batch kv_starts=", "causal=False seqlens="):  # fmt: skip
        assert words in names, words
    assert "N40x0" not in names
    alone = checks("--backend", "hopper")
    assert [replace(check, variants=(("hopper", "auto"),)) for check in served] == alone
    assert not any(("hopper", "auto") in check.variants for check in checks("--strategy", "inline"))


@pytest.mark.parametrize(
    ("capability", "arguments", "reason"),
    [((10, 0), [], "needs an sm_90 GPU"), ((9, 0), ["--strategy", "inline"], "no --strategy inline")],
)
def test_the_sm_90_backend_is_refused_elsewhere(monkeypatch, capsys, capability, arguments, reason):
    on(monkeypatch, *capability)
    with pytest.raises(SystemExit):
        command.parse(["--device", "cuda", "--backend", "hopper", *arguments])
    assert reason in capsys.readouterr().err
    on(monkeypatch, 8, 0)
    assert command.parse(["--device", "cuda"]).backend == ["reference", "triton"]


def test_the_matrix_names_every_feature_once():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and {check.size for check in CHECKS} == set(SIZES)
    features = ("interleaved", "table_batch", "full_width", "tables=yarn", "tables=random", "layout=odd", "H5/1",
                "layout=expanded", "table_dtype=float16", "deterministic", "causal=False", "H6/2", "rotary_dim=2",
                "N100x33", "N33x100", "page_size", "float8", "positions=ids", "seqlens", "softmax_scale=")  # fmt: skip
    for feature in features:
        assert any(feature in name for name in names), feature
    for check in CHECKS:
        heads = 130 if check.memory == ("far", "far", "far", "bnhd") else check.heads_q
        assert check.size != "huge" or check.batch * check.len_q * heads * check.head_dim > 2**31
    shapes = {c.name: (c.batch, c.heads_q, c.heads_kv, c.len_q, c.head_dim) for c in ATTENTION if c.size == "large"}
    assert shapes.items() >= {  # of the performance table
        ("Small-512", (4, 8, 8, 512, 64)), ("Llama7B-2K", (2, 32, 32, 2048, 128)),
        ("Llama70B-1K", (2, 64, 64, 1024, 128)), ("Llama3-8B-16K", (1, 32, 8, 16384, 128)),
        ("Long-64K", (1, 8, 8, 65536, 128)),
    }  # fmt: skip


def test_json_holds_no_nan(tmp_path):
    figures = (float("nan"), 0.0, float("inf"), 1.0)
    row = report.Row("case", "float32", "triton inline", "o", *figures, "FAIL", "not finite")
    report.write_json(tmp_path / "deep" / "rows.json", {}, 1.0, [row])
    (row,) = json.loads((tmp_path / "deep" / "rows.json").read_text())["rows"]
    assert row["error"] is None and row["ratio"] is None and row["row_ratio"] == 1.0


def test_table_is_aligned():
    text = format_table(("name", "value"), [{"name": "a", "value": 1.0}, {"name": "longer", "value": 12345.678}])
    assert text.splitlines() == ["name       value", "------  --------", "a              1", "longer  1.23e+04"]


def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    """The command of a user: no environment variable, worker processes, the interpreter switched on by the command."""
    result = subprocess.run(
        [sys.executable, "-m", "verification", "--filter", "H2 N1 D32", "--dtype", "float16", "--device", "cpu",
         "--jobs", "1", "--json", str(tmp_path / "rows.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (tmp_path / "rows.json").exists(), result.stderr
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["environment"]["interpreter"] is True
    assert result.returncode == (1 if content["failures"] else 0)
    assert "triton prepass" in result.stdout and "1/1" in result.stderr  # the progress bar
