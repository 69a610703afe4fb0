"""`python -m verification --random`: the same calls for the same seed, wrong results found and reproduced, by any
number of processes."""

import json
import multiprocessing
import os
import re
import shlex
import signal

import pytest
import torch

import fused_rope_attn
from fused_rope_attn import testing
from tests.support.marks import interpreted
from verification import __main__ as command
from verification.random.common import Machine
from verification.random.drawing import CALLS_OF_A_SETTING, FAMILIES, draw_call
from verification.random.refusals import MUTATIONS, IllegalCall
from verification.random.running import run_call
from verification.random.workers import run_calls

INTERPRETER = Machine("cpu", "interpreter", ("float16", "float32"), ("reference", "triton"))
REFERENCE = Machine("cpu", "interpreter", ("float16", "float32"), ("reference",))
GPU = Machine("cuda", "sm_90", ("bfloat16", "float16", "float32"), ("reference", "triton", "hopper"))
# The reference alone, which takes milliseconds.
ARGUMENTS = ["--device", "cpu", "--backend", "reference", "--jobs", "0", "--json", ""]


@pytest.mark.parametrize("machine", [INTERPRETER, GPU], ids=lambda machine: machine.device)
def test_a_seed_and_an_index_draw_one_call(machine):
    indices = range(0, 3000, 37)
    texts = [draw_call(5, index, machine).text for index in indices]
    assert texts == [draw_call(5, index, machine).text for index in indices]
    assert len(set(texts)) == len(texts)
    assert texts != [draw_call(6, index, machine).text for index in indices]


def test_everything_is_drawn():
    calls = [draw_call(0, index, GPU) for index in range(0, 20_000, 17)]
    functions = {call.function for call in calls}
    assert functions == {
        "rope_attention", "rope_attention_varlen", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk",
        "corope_attention", "write_kvcache",
    }  # fmt: skip
    assert len(functions) == len(FAMILIES)
    illegal = sum(isinstance(call, IllegalCall) for call in calls) / len(calls)
    assert 0.12 < illegal < 0.22
    variants = {variant for call in calls for variant in getattr(getattr(call, "setting", None), "variants", ())}
    assert {("triton", "inline"), ("triton", "prepass"), ("hopper", "auto"), ("auto", "auto")} <= variants
    text = " ".join(call.text for call in calls)
    for feature in ("bf16", "fp16", "fp32", "window=0,0", "sinks", "softcap", "kv_starts", "kv_lens", "packed", "yarn",
                    "random", "interleaved", "per-batch", "full-width", "columns", "one number", "offset", "scale=0",
                    "deterministic", "grad:none", "grad:q,k,v", "raw", "appends", "in place", "two ids"):  # fmt: skip
        assert feature in text, feature


def test_the_reference_is_right_and_refuses(capsys):
    """Also every family's own code, on shapes that are free of the interpreter's price."""
    assert command.main(["--random", "36", "--seed", "0", *ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert re.search(r"36 calls \(\d+ of them refusals\) with seed 0, 0 failed, 0 skipped", out)


@interpreted
def test_kernels_are_right_in_the_interpreter():
    ran = set()
    for number in range(2):
        outcome = run_call(2, number * CALLS_OF_A_SETTING, INTERPRETER)
        assert not outcome.failures, (outcome.text, outcome.failures)
        ran |= {found.backend for found in outcome.findings}
    assert any(backend.startswith("triton") for backend in ran)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_is_some_call(mutation):
    """None is in the list for nothing: each makes at least one of the drawn calls illegal."""
    import random

    for index in range(0, 6000, CALLS_OF_A_SETTING):
        call = draw_call(1, index, REFERENCE)
        legal = call.legal if isinstance(call, IllegalCall) else call
        if mutation.change(legal.arguments(REFERENCE)[1], random.Random(0)) is not None:
            return
    raise AssertionError(f"no call could be made illegal by {mutation.name}")


@pytest.fixture
def wrong_tables(monkeypatch):
    """rope_attention whose last key has the angle of the one before it."""
    right = fused_rope_attn.rope_attention

    def wrong(q, k, v, cos, sin, *args, **options):
        last = k.shape[2] - 1
        if last > 0:
            cos, sin = (torch.cat((t[..., :last, :], t[..., last - 1 : last, :]), -2) for t in (cos, sin))
        return right(q, k, v, cos, sin, *args, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong)


def test_a_wrong_result_is_found_and_its_line_reproduces_it(wrong_tables, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(testing, "DRAWS", 2)  # for time
    file = tmp_path / "out" / "random.json"
    assert command.main(["--random", "12", "--seed", "12", *ARGUMENTS[:-1], str(file)]) == 1
    out = capsys.readouterr().out
    content = json.loads(file.read_text())
    failed = [failure for failure in content["failures"] if failure["function"] == "rope_attention"]
    assert failed and "rows too far off" in str(failed)
    line = next(line for line in out.splitlines() if line.startswith("python -m verification --random 12 --seed 12"))
    words = shlex.split(line.split("#")[0])
    assert words[:3] == ["python", "-m", "verification"] and words[-2] == "--only"
    assert command.main([*words[3:], "--jobs", "0"]) == 1
    again = capsys.readouterr().out
    assert line in again  # the same call, the same tensor, the same error


def test_a_call_that_raises_or_writes_fails(monkeypatch):
    def writes(x, cos, sin, **options):
        with torch.no_grad():
            x.zero_()
        raise ValueError("x is wrong")

    monkeypatch.setattr(fused_rope_attn, "apply_rope", writes)
    index = next(i for i in range(10_000) if draw_call(1, i, REFERENCE).function == "apply_rope"
                 and isinstance(draw_call(1, i, REFERENCE), IllegalCall))  # fmt: skip
    outcome = run_call(1, index, REFERENCE)
    assert any("a refused call wrote x" in found.detail for found in outcome.failures)
    index = next(i for i in range(10_000) if draw_call(1, i, REFERENCE).function == "apply_rope"
                 and not isinstance(draw_call(1, i, REFERENCE), IllegalCall))  # fmt: skip
    (failure,) = run_call(1, index, REFERENCE).failures
    assert "ValueError: x is wrong" in failure.detail


def test_a_worker_that_dies_costs_one_call():
    """What is not said of a call says the worker, and what was left of it another one runs; the numbers are the same
    as without workers."""
    alone, together = [], []
    batches = [list(range(4)), list(range(CALLS_OF_A_SETTING, CALLS_OF_A_SETTING + 2))]
    run_calls(12, batches, REFERENCE, 0, alone.append)
    others = set(multiprocessing.active_children())  # ranks that wait for the next test of several processes

    def on_done(outcome):
        together.append(outcome)
        if len(together) == 2:
            (worker,) = set(multiprocessing.active_children()) - others
            os.kill(worker.pid, signal.SIGSTOP)  # not while it reports
            os.kill(worker.pid, signal.SIGKILL)

    run_calls(12, batches, REFERENCE, 1, on_done)
    assert sorted(outcome.index for outcome in together) == [outcome.index for outcome in alone]
    lost = [outcome for outcome in together if outcome.failures]
    assert len(lost) <= 1 and all("the process died" in outcome.failures[0].detail for outcome in lost)
    for outcome in together:
        if outcome not in lost:
            assert outcome.findings == next(other for other in alone if other.index == outcome.index).findings


@pytest.mark.parametrize(
    "arguments", [["--only", "3"], ["--random", "0"], ["--random", "5", "--small"], ["--random", "5", "--filter", "x"]]
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2 and "error:" in capsys.readouterr().err


def test_the_time_limit_is_told(capsys):
    assert command.main(["--random", "200", "--minutes", "0.001", *ARGUMENTS]) in (0, 2)
    assert "of 200, stopped by --minutes 0.001" in capsys.readouterr().out
