"""`python -m verification --random`: the same calls for the same seed, and failures found, shrunk and repeated, by any
number of processes."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

import fused_rope_attn
from tests.support.calls import INTERPRETER
from tests.support.paths import ROOT
from verification import __main__ as command, search, strategies
from verification.attention import CoRopeCheck
from verification.calls import Finding, Machine, literal, parse
from verification.decode import DecodeCheck
from verification.refusals import KINDS, MUTATIONS, IllegalCheck, nothing_comes_of
from verification.rotation import RopeCheck
from verification.strategies import FAMILIES, draw, drawn_call
from verification.workers import Outcome, Worker, run_check, run_checks

REFERENCE = replace(INTERPRETER, backends=("reference",))
GPU = Machine("cuda", "sm_90", ("bfloat16", "float16", "float32"), ("reference", "triton", "hopper"))
# The reference alone, which takes milliseconds.
ARGUMENTS = ["--device", "cpu", "--backend", "reference", "--jobs", "0", "--json", ""]


@pytest.mark.parametrize("machine", [INTERPRETER, GPU], ids=lambda machine: machine.device)
def test_a_seed_and_an_index_draw_one_call(machine):
    """Earlier imports and draws make no difference: another process draws the same calls."""
    indices = range(0, 1000, 37)
    drawn = [drawn_call(5, index, machine) for index in indices]
    assert len(set(drawn)) == len(drawn)
    assert drawn != [drawn_call(6, index, machine) for index in indices]
    assert [parse(literal(call), KINDS) for call in drawn] == drawn
    program = (
        "from verification.calls import Machine, literal\n"
        "from verification.strategies import drawn_call\n"
        f"print(*(literal(drawn_call(5, index, {machine})) for index in {indices}), sep='\\n')"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [literal(call) for call in drawn]


def test_everything_is_drawn():
    drawn = [drawn_call(0, index, GPU) for index in range(0, 30_000, 31)]
    assert {call.function for call in drawn} == {
        "rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk",
        "corope_attention", "write_kvcache", "rope_attention_mla", "rope_attention_mla_varlen", "batch_invariant",
    }  # fmt: skip
    illegal = sum(isinstance(call, IllegalCheck) for call in drawn) / len(drawn)
    assert 0.12 < illegal < 0.22
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
    drawn = [draw(family.prototypes(GPU), "together", i) for i in range(1000)]
    for strategy in ("inline", "prepass"):
        together = [p for p in drawn if p.norms is not None and p.interleaved and p.head_dim <= 64]
        together = [p for p in together if p.window or p.softcap or p.sinks or p.kv_starts is not None]
        assert sum(("triton", strategy) in p.variants for p in together) >= 5


def test_a_run_of_the_reference(capsys):
    """Each family's own code, on shapes that do not pay for the interpreter; what is chosen, and what is told."""
    assert command.main(["--random", "90", "--seed", "1", *ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert "of them refusals) with seed 1, 0 failed, 0 skipped" in out
    for function in ("rope_attention", "rope_attention_varlen", "apply_rope_qk", "rope_attention_with_kvcache"):
        assert f"\n{function} " in out
    # The reference cannot keep this promise and says so, for both calls of a pair.
    assert tuple(FAMILIES) == command.FAMILIES
    assert command.main(["--random", "3", "--family", "pairs", *ARGUMENTS]) == 0
    assert "3 calls (0 of them refusals) with seed 0, 0 failed" in capsys.readouterr().out
    assert command.main(["--random", "200", "--minutes", "0.001", *ARGUMENTS]) in (0, 2)
    assert "of 200, stopped by --minutes 0.001" in capsys.readouterr().out
    assert command.main(["--random", "24", "--seed", "12", "--only", "7", *ARGUMENTS]) == 0
    assert shlex.quote(literal(drawn_call(12, 7, REFERENCE))) in capsys.readouterr().out


@pytest.fixture(scope="module")
def legal_calls():
    """One legal call of each of many prototypes, with its arguments."""
    drawn = [drawn_call(1, index, REFERENCE) for index in range(0, 600, 3)]
    legal = [call.legal if isinstance(call, IllegalCheck) else call for call in drawn]
    return [(x, x.arguments("cpu")[1]) for x in legal if x.function not in ("write_kvcache", "batch_invariant")]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_makes_some_drawn_call_illegal(mutation, legal_calls):
    legal = next(call for call, arguments in legal_calls if mutation.applies(arguments))
    outcome = run_check(IllegalCheck(legal, mutation.name), REFERENCE)
    assert outcome.findings[0].found.tensor == f"refusal of {mutation.name}" and not outcome.failures, outcome.failures


@pytest.mark.parametrize("mutation", ["k_scale too long", "v_scale too long"])
@pytest.mark.parametrize("kind", ["tensor", "head"])
def test_more_scales_than_heads_are_refused(kind, mutation):
    """Three scales would be legal for three heads."""
    legal = DecodeCheck(1, 3, 3, 1, 16, 16, lengths=(7,), float8=kind)
    outcome = run_check(IllegalCheck(legal, mutation), REFERENCE)
    assert not outcome.failures and outcome.findings[0].found.tensor == f"refusal of {mutation}"


def test_a_mutation_that_does_not_apply_is_replaced():
    """By the next one, for example by a tangent."""
    outcome = run_check(IllegalCheck(CoRopeCheck(1, 1, 1, 5, 5, 32), "v is left out"), INTERPRETER)
    assert not outcome.failures and outcome.findings[0].found.tensor == "refusal of a tangent of q"


def test_nothing_may_come_of_wrong_ends_on_a_gpu():
    arguments = {name: torch.randn(4, 2, 16) for name in "qkv"}

    def zero(q, k, v, *, return_lse):
        return (q + k + v) * 0.0, torch.full((2, 4), -math.inf)

    def stale(**given):
        o, lse = zero(**given)
        return torch.cat((o[:-1], o[-1:] + torch.empty_like(o[-1:]))), lse.index_fill(1, torch.tensor(3), 0.0)

    (right,) = nothing_comes_of("nothing", zero, arguments)
    (wrong,) = nothing_comes_of("nothing", stale, arguments)
    assert right.found.ok and not wrong.found.ok and wrong.found.detail.startswith("o, lse must be 0")


@pytest.fixture
def wrong_tables(monkeypatch):
    """rope_attention with the wrong angle for the last key: the one of the key before it."""
    right = fused_rope_attn.rope_attention

    def wrong(q, k, v, cos, sin, *args, layout="bhsd", **options):
        last = k.shape[2 if layout == "bhsd" else 1] - 1
        if last > 2:
            cos, sin = (torch.cat((t[..., :last, :], t[..., last - 1 : last, :]), -2) for t in (cos, sin))
        return right(q, k, v, cos, sin, *args, layout=layout, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong)


def test_a_wrong_result_is_found_shrunk_and_repeated(wrong_tables, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("verification.testing.DRAWS", 2)  # for time
    monkeypatch.setattr(search, "MOST_SHRUNK", 1)
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
    # The interpreter's conversion turned -0 into 0.
    "small negative values in float8": "WriteCheck(3, 1, 1, 88, 37, 24, rotary_dim=24, dtype=float32, extra_rows=8, "
    'seed=3134, form="bshd", lengths=(10, 0, 0), float8="head", new=(11, 42, 35), packed=True)',
}


@pytest.mark.parametrize("call", FOUND.values(), ids=FOUND)
def test_calls_that_failed_once(call):
    assert not run_check(parse(call, KINDS), INTERPRETER).failures


def test_a_call_that_writes_or_raises_fails(monkeypatch):
    def writes(x, cos, sin, **options):
        with torch.no_grad():
            x.zero_()
        raise ValueError("x is wrong")

    legal = RopeCheck(1, 1, 1, 5, 5, 16, names=("x",), dtype=torch.float32)
    monkeypatch.setattr(fused_rope_attn, "apply_rope", writes)
    outcome = run_check(IllegalCheck(legal, "inverse=1"), REFERENCE)
    assert any("x changed" in finding.found.detail for finding in outcome.failures)
    (failure,) = run_check(legal, REFERENCE).failures
    assert "ValueError: x is wrong" in failure.found.detail


@dataclass(frozen=True)
class Fatal:
    """A check that kills or stops its process, from a certain size on."""

    size_of_it: int
    hangs: bool = False
    function, backend = "rope_attention", "reference"

    def run(self, machine):
        if self.size_of_it >= 3:
            os.kill(os.getpid(), signal.SIGSTOP if self.hangs else signal.SIGKILL)
        yield Finding.that("reference", "size", self.size_of_it >= 0, "negative")


def test_a_worker_that_dies_or_hangs_costs_one_check():
    batches = [[(0, Fatal(1)), (1, Fatal(7)), (2, Fatal(2))], [(3, Fatal(0)), (4, Fatal(-1))]]
    outcomes = dict(run_checks(batches, REFERENCE, 1))
    assert sorted(outcomes) == [0, 1, 2, 3, 4]
    failures = {i: outcome.failures[0].found for i, outcome in outcomes.items() if outcome.failures}
    assert failures.keys() == {1, 4} and failures[4].detail == "negative"
    assert failures[1].tensor == "process" and "the process died, exit status -9" in failures[1].detail
    worker = Worker(REFERENCE)
    try:
        (lost,) = worker.run(Fatal(4, hangs=True), longest=1.0).failures
        assert "the process hung for 1 s" in lost.found.detail
        assert not worker.run(Fatal(1)).failures
    finally:
        worker.stop()


def test_a_crash_is_shrunk_by_new_processes_and_in_time(monkeypatch):
    def ask(seed, index, machine, fails):
        assert [fails(Fatal(size)) for size in (7, 2, 4, 0, 7)] == [True, False, True, False, True]
        return Fatal(4)

    monkeypatch.setattr(strategies, "shrunk_call", ask)
    lost = Outcome(Fatal(9), (Finding.that("?", "process", False, "died"),))
    small = search.shrink(0, 0, lost, REFERENCE, jobs=1)
    assert small.check == Fatal(4) and small.failures[0].found.tensor == "process"
    monkeypatch.setattr(search, "SHRINK_SECONDS", -1.0)
    monkeypatch.setattr(strategies, "shrunk_call", lambda *_: None if _[-1](Fatal(-1)) is False else Fatal(-1))
    assert search.shrink(0, 0, Outcome(Fatal(9), (Finding.that("?", "size", False, ""),)), REFERENCE, jobs=0) is None
