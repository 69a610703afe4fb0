"""``python -m verification``: cases, drawn calls and context parallelism tell right from wrong, and say so in the
table, the JSON and the exit status. A call that fails is shrunk and repeated."""

import functools
import json
import math
import os
import shlex
import signal
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st

import fused_rope_attn
from fused_rope_attn.experimental.corope import launch
from tests.support.calls import INTERPRETER
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import ignore_overflow, interpreted
from tests.support.paths import python
from verification import __main__ as command, attention, context_parallel, report, run, strategies
from verification.attention import AttentionCheck, CoRopeCheck
from verification.calls import Machine, literal, parse
from verification.context_parallel import CpCheck, compared
from verification.matrix import ATTENTION, CHECKS, ROTATION, SIZES
from verification.refusals import KINDS, MUTATIONS, IllegalCheck, nothing_comes_of
from verification.rotation import RopeCheck
from verification.strategies import FAMILIES, draw, drawn_call
from verification.testing import Case, Finding, make_inputs, run_reference
from verification.workers import Outcome, Worker, run_check, run_checks

REFERENCE = replace(INTERPRETER, backends=("reference",))
GPU = Machine("cuda", "sm_90", ("bfloat16", "float16", "float32"), ("reference", "triton", "hopper"))
ONE_CASE = ["--device", "cpu", "--filter", "H2 N63 D32", "--dtype", "float32", "--jobs", "0"]
# The reference alone, which takes milliseconds.
ARGUMENTS = ["--device", "cpu", "--backend", "reference", "--jobs", "0", "--json", ""]


def rows_for(check):
    check = replace(check, variants=(("reference", "auto"),)) if isinstance(check, AttentionCheck) else check
    return report.rows_of(run_check(replace(check, dtype=F32), INTERPRETER))


def named(name):
    return next(check for check in ATTENTION if check.name == name)


@pytest.fixture
def replaced(monkeypatch):
    """Replace a function, public by default, by ``other(right, *arguments, **options)``."""

    def replace_by(other, name="rope_attention", home=fused_rope_attn):
        right = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args, **options: other(right, *args, **options))

    return replace_by


def test_the_command_of_a_user(tmp_path):
    """No environment variable, worker processes, the interpreter switched on by the command."""
    result = python("-m", "verification", *ONE_CASE[:-1], "1", "--json", str(tmp_path / "rows.json"))
    assert result.returncode == 0 and "1/1" in result.stderr, result.stderr  # the progress bar
    assert "15 of 15 tensors within tolerance, 0 not, 0 skipped" in result.stdout
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["failures"] == 0 and content["environment"]["interpreter"] is True
    assert {row["backend"] for row in content["rows"]} == {"reference", "triton inline", "triton prepass"}
    assert all(0 <= row["error"] < 1e-4 and row["verdict"] == "ok" for row in content["rows"])


def shifted(table):
    """A table that is one position late for the last eight rows."""
    return torch.cat((table[:-8], table[-9:-1]))


def test_a_wrong_kernel_fails(tmp_path, capsys, replaced):
    def wrong(right, q, k, v, cos, sin, *args, backend="auto", **options):
        tables = (shifted(cos), shifted(sin)) if backend == "triton" else (cos, sin)
        return right(q, k, v, *tables, *args, backend=backend, **options)

    replaced(wrong)
    file = tmp_path / "rows.json"
    assert command.main([*ONE_CASE, "--strategy", "inline", "--json", str(file)]) == 1
    content, out = json.loads(file.read_text()), capsys.readouterr().out
    found = {(row["backend"], row["tensor"]): row["verdict"] for row in content["rows"]}
    # The angles of k touch v's gradient too, through the weights.
    assert [found["triton inline", tensor] for tensor in ("o", "dq", "dk", "dv")] == ["FAIL"] * 4
    assert all(verdict == "ok" for (backend, _), verdict in found.items() if backend == "reference")
    assert "B1 H2 N63 D32 float32 failed: rope_attention triton inline dv" in out  # at once, before the table
    table_lines = [line for line in out.splitlines() if line.endswith("FAIL")]
    assert len(table_lines) == content["failures"] >= 4 and "FAIL B1 H2 N63 D32 | float32 | triton inline | dk: " in out


def unwritten(right, q, *args, **options):
    o, lse = right(q, *args, **options)
    return torch.where(torch.arange(q.shape[2])[:, None] == 0, torch.empty(()), o), lse


def too_far(right, *args):
    multiples, revolutions = right(*args)
    return multiples, revolutions * 1.001


FAULTS = {
    "an output that nothing wrote": (named("B1 H2 N80 D32"), {"other": unwritten}, "o"),
    "an error": (named("B1 H2 N1 D32"), {"other": lambda *args, **options: 1 / 0}, "ZeroDivisionError"),
    "the rotation alone": (ROTATION[0], {"name": "apply_rope_qk",
        "other": lambda right, q, k, cos, sin, **options: right(q, k, shifted(cos), sin, **options)}, "dk"),
    "Co-RoPE": (CoRopeCheck(1, 2, 1, 9, 9, 32), {"name": "frequency_tables", "home": launch, "other": too_far}, "dq"),
}  # fmt: skip


@interpreted
@ignore_overflow
@pytest.mark.parametrize(("check", "fault", "tensor"), FAULTS.values(), ids=FAULTS)
def test_faults_are_seen(replaced, check, fault, tensor):
    assert all(row["verdict"] == "ok" for row in rows_for(check))
    replaced(**fault)
    assert tensor in [row["tensor"] for row in rows_for(check) if row["verdict"] == "FAIL"]


def test_a_case_that_does_not_fit_is_skipped_in_sight(monkeypatch, capsys):
    """A small GPU is no failure, and no silence either."""

    def too_large(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("verification.testing.run_reference", too_large)
    assert command.main([*ONE_CASE, "--json", ""]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 tensors within tolerance, 0 not, 1 skipped" in out
    assert "SKIP B1 H2 N63 D32 | float32 | - | -: does not fit this GPU's memory" in out


def test_a_large_case_compares_some_heads_and_sees_a_fault_in_the_last(monkeypatch, replaced):
    """A large check in miniature: the first and the last head, by their own bounds, of views of wider tensors."""
    check = replace(named("B1 H6/2 N50 D32"), batch=3, memory=("far", "far", "far", "bnhd"))
    check = replace(check, kv_starts=(9, 0, 3), kv_lens=(40, 17, 30))
    monkeypatch.setattr(attention, "MOST_SCORES", 2 * 3 * check.len_q * check.len_k)
    assert check.compared_heads() == [(0, 0), (2, 1)]
    assert [row["verdict"] for row in rows_for(check)] == ["ok"] * 5

    def wrong_in_the_last_head(right, q, *args, **options):
        assert q.stride(2) == 130 * q.shape[3]
        o, lse = right(q, *args, **options)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1), lse

    replaced(wrong_in_the_last_head)
    assert "o" in [row["tensor"] for row in rows_for(check) if row["verdict"] == "FAIL"]


USAGE_ERRORS = """--device cpu --large | --device cpu --dtype bfloat16 | --device cpu --backend hopper | --device cuda
    | --only 3 | --random 0 | --random 5 --small"""


@pytest.mark.parametrize("arguments", USAGE_ERRORS.split("|"), ids=str.strip)
def test_usage_errors(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert "error:" in capsys.readouterr().err


def test_the_sm_90_backend_is_verified_where_it_runs(monkeypatch):
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: tuple(capability))
    monkeypatch.setattr(run, "drawn_cases", functools.cache(run.drawn_cases))  # for time

    def checks(*arguments):
        return run.make_checks(command.parse(["--small", "--device", "cuda", *arguments]))

    served = [check for check in checks() if ("hopper", "auto") in getattr(check, "variants", ())]
    assert {check.dtype for check in served} == {F16, BF16} and not any("N40x0" in check.name for check in served)
    assert [replace(check, variants=(("hopper", "auto"),)) for check in served] == checks("--backend", "hopper")
    assert not any(("hopper", "auto") in check.variants for check in checks("--strategy", "inline"))
    with pytest.raises(SystemExit):
        checks("--backend", "hopper", "--strategy", "inline")
    capability[0] = 10
    assert command.parse(["--device", "cuda"]).backend == ["reference", "triton"]


def test_cases_have_names_of_their_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and {check.size for check in CHECKS} == set(SIZES)
    for check in CHECKS:
        heads = 130 if check.memory == ("far", "far", "far", "bnhd") else check.heads_q
        assert check.size != "huge" or check.batch * check.len_q * heads * check.head_dim > 2**31


def test_json_holds_no_nan(tmp_path):
    row = {"case": "case", "error": math.nan, "ratio": math.inf, "row_ratio": 1.0, "verdict": "FAIL"}
    report.write_json(tmp_path / "deep" / "rows.json", {}, 1.0, [row])
    (found,) = json.loads((tmp_path / "deep" / "rows.json").read_text())["rows"]
    assert found == row | {"error": None, "ratio": None}


def test_calls_of_ranks_and_an_error(ranks, capsys, monkeypatch):
    asked = ["--cp", "--device", "cpu", "--dtype", "float32", "--jobs", "0", "--json", "", "--filter"]
    monkeypatch.setattr(context_parallel, "pool_of", lambda device: ranks)
    monkeypatch.setattr(context_parallel, "DRAWN", 20)
    assert command.main([*asked, "softcap=5.0", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names) > 1 and all("softcap=5.0" in name for name in names)
    assert command.main([*asked, "softcap=5.0"]) == 0
    assert f" not, 0 skipped; {len(names)} cases" in capsys.readouterr().out
    wrong = CpCheck(Case(1, 2, 1, 24, 24, 16), (0, 1), {"sharding": "ring"})
    monkeypatch.setattr(context_parallel, "cp_calls", lambda *_: st.just(wrong))
    assert command.main([*asked, "no such case"]) == 2
    assert command.main([*asked, ""]) == 1
    assert "sharding must be" in capsys.readouterr().out


def test_a_wrong_rank_is_seen():
    case = Case(1, 2, 1, 24, 24, 16, dtype=F32)
    right = run_reference(make_inputs(case), case)
    found = {"o": right["o"], "dk": right["dk"]}
    assert all(comparison.ok for comparison in compared(case, found))
    found["o"] = right["o"].roll(1, dims=2)
    assert [comparison.ok for comparison in compared(case, found)] == [False, True]
    assert not compared(replace(case, window=(3, 0)), {"dk": right["dk"]})[0].ok
    # Rows after the first 20 are padding: they must be zero.
    assert not compared(case, {"o": right["o"]}, total=20)[0].ok


INDICES = range(0, 1000, 67)


def test_a_seed_and_an_index_draw_one_call():
    """Earlier imports and draws make no difference: another process draws the same calls."""
    drawn = [drawn_call(5, index, machine) for machine in (INTERPRETER, GPU) for index in INDICES]
    assert len(set(drawn)) == len(drawn) and drawn[0] != drawn_call(6, 0, INTERPRETER)
    assert [parse(literal(call), KINDS) for call in drawn] == drawn
    program = (
        "from verification.calls import Machine, literal\n"
        "from verification.strategies import drawn_call\n"
        f"for machine in {INTERPRETER, GPU}:\n"
        f"    print(*(literal(drawn_call(5, index, machine)) for index in {INDICES}), sep='\\n')"
    )
    result = python("-c", program, TRITON_INTERPRET="1")
    assert result.stdout.splitlines() == [literal(call) for call in drawn], result.stderr


def test_everything_is_drawn():
    drawn = [drawn_call(0, index, GPU) for index in range(0, 30_000, 62)]
    assert {call.function for call in drawn} == {
        "rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk",
        "corope_attention", "write_kvcache", "rope_attention_mla", "rope_attention_mla_varlen", "batch_invariant",
    }  # fmt: skip
    assert 0.12 < sum(isinstance(call, IllegalCheck) for call in drawn) / len(drawn) < 0.22
    variants = {variant for call in drawn for variant in getattr(call, "variants", ())}
    assert {("triton", "inline"), ("triton", "prepass"), ("hopper", "auto"), ("auto", "auto")} <= variants
    text = " ".join(map(literal, drawn))
    for feature in ("bfloat16", "float16", "float32", "window=(0, 0)", "sinks=True", "softcap", "kv_starts", "kv_lens",
                    "seqlens", "yarn", "random", "interleaved", "table_batch", "full_width", "columns", "one number",
                    "offset", "softmax_scale=0.0", "deterministic", "rotated=False", "append=False", "in place",
                    "two ids", "page_size=16", 'float8="head"', "norms=1.0", "hides_nan", "packed=True",
                    "intervals", 'Way("pages"', 'Way("pack"', "appends=False"):  # fmt: skip
        assert feature in text, feature


def test_what_kernels_branch_on_comes_together():
    """Norms, interleaved pairs, a narrow head, one strategy and a mask: one of 200 prototypes of attention, or more."""
    family = FAMILIES["attention"]
    drawn = [draw(family.prototypes(GPU), "together", i) for i in range(600)]
    together = [p for p in drawn if p.norms is not None and p.interleaved and p.head_dim <= 64]
    together = [p for p in together if p.window or p.softcap or p.sinks or p.kv_starts is not None]
    for strategy in ("inline", "prepass"):
        assert sum(("triton", strategy) in p.variants for p in together) >= 3


def test_a_run_of_the_reference(capsys):
    assert command.main(["--random", "90", "--seed", "1", *ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert "of them refusals) with seed 1, 0 failed, 0 skipped" in out
    for function in ("rope_attention", "rope_attention_varlen", "apply_rope_qk", "rope_attention_with_kvcache"):
        assert f"\n{function} " in out
    # The reference cannot keep this promise and says so, for both calls of a pair.
    assert tuple(FAMILIES) == command.FAMILIES
    assert command.main(["--random", "3", "--family", "pairs", *ARGUMENTS]) == 0
    assert "3 calls (0 of them refusals) with seed 0, 0 failed" in capsys.readouterr().out
    assert command.main(["--random", "99", "--minutes", "0.001", *ARGUMENTS]) in (0, 2)
    assert "of 99, stopped by --minutes 0.001" in capsys.readouterr().out
    assert command.main(["--random", "24", "--seed", "12", "--only", "7", *ARGUMENTS]) == 0
    assert shlex.quote(literal(drawn_call(12, 7, REFERENCE))) in capsys.readouterr().out


@pytest.fixture(scope="module")
def legal_calls():
    drawn = [drawn_call(1, index, REFERENCE) for index in range(0, 600, 3)]
    legal = [call.legal if isinstance(call, IllegalCheck) else call for call in drawn]
    return [(x, x.arguments("cpu")[1]) for x in legal if x.function not in ("write_kvcache", "batch_invariant")]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_makes_some_drawn_call_illegal(mutation, legal_calls):
    legal = next(call for call, arguments in legal_calls if mutation.applies(arguments))
    outcome = run_check(IllegalCheck(legal, mutation.name), REFERENCE)
    assert outcome.findings[0].tensor == f"refusal of {mutation.name}" and not outcome.failures, outcome.failures


def test_nothing_may_come_of_wrong_ends_on_a_gpu():
    arguments = {name: torch.randn(4, 2, 16) for name in "qkv"}

    def zero(q, k, v, *, return_lse):
        return (q + k + v) * 0.0, torch.full((2, 4), -math.inf)

    def stale(**given):
        o, lse = zero(**given)
        return torch.cat((o[:-1], o[-1:] + torch.empty_like(o[-1:]))), lse.index_fill(1, torch.tensor(3), 0.0)

    (right,) = nothing_comes_of("nothing", zero, arguments)
    (wrong,) = nothing_comes_of("nothing", stale, arguments)
    assert right.ok and not wrong.ok and wrong.detail.startswith("o, lse must be 0")


def test_a_wrong_result_is_found_shrunk_and_repeated(replaced, capsys, tmp_path, monkeypatch):
    """The angle of the last key is the one of the key before it."""

    def wrong(right, q, k, v, cos, sin, *args, layout="bhsd", **options):
        last = k.shape[2 if layout == "bhsd" else 1] - 1
        if last > 2 and cos is not None:
            cos, sin = (torch.cat((t[..., :last, :], t[..., last - 1 : last, :]), -2) for t in (cos, sin))
        return right(q, k, v, cos, sin, *args, layout=layout, **options)

    replaced(wrong)
    monkeypatch.setattr("verification.testing.DRAWS", 2)  # for time
    monkeypatch.setattr(run, "MOST_SHRUNK", 1)
    file = tmp_path / "out" / "random.json"
    assert command.main(["--random", "24", "--seed", "12", *ARGUMENTS[:-1], str(file)]) == 1
    failures = json.loads(file.read_text())["failures"]
    assert failures and all(failure["function"] == "rope_attention" for failure in failures)
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if " shrunk: " in line)
    words = shlex.split(lines[at + 1])
    assert words[:3] == ["python", "-m", "verification"] and lines[at + 1].strip() == failures[0]["shrunk"]
    call = parse(words[-1], KINDS)
    # One query sees the least keys for which the fault is there; nothing else differs from the plainest call.
    assert (call.batch, call.heads_q, call.heads_kv, call.len_k) == (1, 1, 1, 4)
    assert (call.dtype, call.head_dim, call.window, call.kv_starts, call.norms) == (torch.float32, 16, None, None, None)
    assert command.main(words[3:]) == 1
    assert lines[at].partition(" shrunk: ")[2] in capsys.readouterr().out  # the same tensor, the same error
    monkeypatch.undo()
    assert command.main(words[3:]) == 0


FOUND = {
    # Scores of 30 in float32: the backward pass sums them in another order than the forward pass.
    "dv beyond its limit": "AttentionCheck(1, 1, 1, 86, 86, 40, rotary_dim=40, dtype=float32, softmax_scale=1, "
    'tables="yarn", table_batch=True, seed=115, kv_starts=(23,), memory=("skipped", "odd", "one head", "bnhd"), '
    'hides_nan=True, variants=(("triton", "prepass"),))',
    # Its scores are products of float32, and its weights have 16 bits.
    "a second opinion of Co-RoPE": 'CoRopeCheck(2, 1, 1, 2, 2, 32, seed=54166, memory=("odd", "bhnd", "bhnd", "bnhd"))',
    # A gradient of 16-bit sinks is rounded to 16 bits, and eager PyTorch's was not.
    "the dtype of sinks": "AttentionCheck(1, 4, 1, 1, 1, 16, rotary_dim=16, softmax_scale=1, seed=517, sinks=True, "
    'tables="random", sinks_dtype=float16, norms=0.0, seqlens=((1, 1), (0, 0)), lse_gradient=True, '
    'memory=("bnhd", "bnhd", "bnhd", "bnhd"), variants=(("triton", "inline"),), max_seqlens=(1, 1))',
    # A position before 0, less a left bound of 2**31 - 1, is no int32: NaN was put into keys that are seen.
    "the widest window of a step": "DecodeCheck(2, 2, 1, 8, 23, 16, rotary_dim=16, window=(2147483647, -1), seed=1, "
    "lengths=(2, 20), append=False)",
    # Three scales would be legal for three heads.
    **{
        f"scales of a {kind}": f'IllegalCheck(DecodeCheck(1, 3, 3, 1, 16, 16, lengths=(7,), float8="{kind}"), '
        '"k_scale too long")'
        for kind in ("tensor", "head")
    },
    # It does not apply, and the next one does: a tangent.
    "a mutation that does not apply": 'IllegalCheck(CoRopeCheck(1, 1, 1, 5, 5, 32), "v is left out")',
    # The interpreter's conversion turned -0 into 0.
    "small negative values in float8": "WriteCheck(3, 1, 1, 88, 37, 24, rotary_dim=24, dtype=float32, extra_rows=8, "
    'seed=3134, form="bshd", lengths=(10, 0, 0), float8="head", new=(11, 42, 35), packed=True)',
}


@pytest.mark.parametrize("call", FOUND.values(), ids=FOUND)
def test_calls_that_failed_once(call):
    assert not run_check(parse(call, KINDS), INTERPRETER).failures


def test_a_call_that_writes_or_raises_fails(replaced):
    def writes(right, x, cos, sin, **options):
        with torch.no_grad():
            x.zero_()
        raise ValueError("x is wrong")

    legal = RopeCheck(1, 1, 1, 5, 5, 16, names=("x",), dtype=torch.float32)
    replaced(writes, "apply_rope")
    outcome = run_check(IllegalCheck(legal, "inverse=1"), REFERENCE)
    assert any("x changed" in finding.detail for finding in outcome.failures)
    (failure,) = run_check(legal, REFERENCE).failures
    assert "ValueError: x is wrong" in failure.detail


@dataclass(frozen=True)
class Fatal:
    size_of_it: int
    hangs: bool = False
    function, backend = "rope_attention", "reference"

    def run(self, machine):
        if self.size_of_it >= 3:
            os.kill(os.getpid(), signal.SIGSTOP if self.hangs else signal.SIGKILL)
        yield Finding("size", self.size_of_it >= 0, "negative")


def test_a_worker_that_dies_or_hangs_costs_one_check():
    batches = [[(0, Fatal(1)), (1, Fatal(7)), (2, Fatal(2))], [(3, Fatal(0)), (4, Fatal(-1))]]
    outcomes = dict(run_checks(batches, REFERENCE, 1))
    assert sorted(outcomes) == [0, 1, 2, 3, 4]
    failures = {i: outcome.failures[0] for i, outcome in outcomes.items() if outcome.failures}
    assert failures.keys() == {1, 4} and failures[4].detail == "negative"
    assert failures[1].tensor == "process" and "the process died, exit status -9" in failures[1].detail
    (lost,) = Worker(REFERENCE).run(Fatal(4, hangs=True), longest=1.0).failures
    assert "the process hung for 1 s" in lost.detail


def test_a_crash_is_shrunk_by_new_processes_and_in_time(monkeypatch):
    def ask(seed, index, machine, fails):
        assert [fails(Fatal(size)) for size in (4, 2, 4)] == [True, False, True]
        return Fatal(4)

    monkeypatch.setattr(strategies, "shrunk_call", ask)
    lost = Outcome(Fatal(9), (Finding("process", False, "died"),))
    small = run.shrink(0, 0, lost, REFERENCE, jobs=1)
    assert small.check == Fatal(4) and small.failures[0].tensor == "process"
    monkeypatch.setattr(run, "SHRINK_SECONDS", -1.0)
    monkeypatch.setattr(strategies, "shrunk_call", lambda *_: None if _[-1](Fatal(-1)) is False else Fatal(-1))
    assert run.shrink(0, 0, Outcome(Fatal(9), (Finding("size", False),)), REFERENCE, jobs=0) is None
