"""``python -m bench``: its command line, exit statuses, cases, and what becomes of providers and cases that fail."""

import contextlib
import importlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

from bench import __main__ as command, decode, report, results
from bench.attention import cases
from bench.attention.providers import OURS, fused
from bench.attention.suite import ATTENTION, LOAD_USUAL, visited
from bench.environment import commit, environment
from bench.models import suite as models
from bench.report import case_report
from bench.rope import PROVIDERS as ROTATIONS, ROPE, RopeCase, RopeProvider
from bench.suite import forward_or_backward
from tests.support.bench import FACTS, SHORT, TINY, WallClock, run, scripted, status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "no command nonsense; there are attention"),
        ("decode --dry-run --cases B3-", "no case fits 'B3-'; groups are b1, b8, b64, mixed, names B1-4K"),
        ("--dry-run --providers nobody", "unknown provider nobody; there are fused"),
        ("--dry-run --passes sideways", "--passes takes fwd, fwd_grad, bwd, both, not 'sideways'"),
        ("--dry-run --mode load,graph", "--mode load has a clock of its own: it takes no other mode with it"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert command.main(arguments.split()) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, (_, entry) in command.COMMANDS.items() if entry != "main"])
def test_a_suite_lists_what_would_run_and_needs_a_gpu(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert name in command.HELP and command.main([name, "--dry-run"]) == 0
    cases_and_people = capsys.readouterr().out.split("\n\n")
    assert all(len(text.splitlines()) > 2 for text in cases_and_people) and len(cases_and_people) == 2
    assert command.main([name]) == 2 and "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "listed", "left_out"),
    [
        ("--cases Llama70B-1K --providers fused", ["Llama70B-1K", " here"], ["Small", "hf_sdpa"]),
        ("--mode host", ["B1 H4 N128 D64 causal bf16", "bare_cudnn_chosen"], ["Small-512"]),
        ("--mode graph,host", ["Small-512", "\nHost "], []),
        ("--mode load", [*cases.TABLE, *LOAD_USUAL], ["\nHost ", "hf_sdpa"]),
    ],
)
def test_cases_and_providers_are_chosen(arguments, listed, left_out, capsys):
    assert command.main([*arguments.split(), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not [word for word in listed if word not in text] and not [word for word in left_out if word in text]


def test_of_several_ranks_the_first_writes_the_rows(measure, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert measure("attention", [TINY], [OURS], "--mode", "eager") == (0, [])
    assert not capsys.readouterr().err


def raising(error):
    return mock.Mock(side_effect=error)


def test_an_error_of_ours_is_an_exit_status_and_that_of_the_gpu_ends_the_run(measure, capsys, tmp_path):
    broken = scripted("fused", raising(RuntimeError("broken")), role="ours")
    assert measure("attention", [TINY], [broken])[0] == 1 and "broken" in capsys.readouterr().out
    assert measure("attention", [TINY], [broken])[0] == 2 and "needs a new file" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").unlink()
    lost = WallClock()
    lost.synchronize = raising(RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure("attention", [TINY], [OURS], clock=lost)


def test_rows_have_facts_and_the_commit_of_a_copied_tree(monkeypatch, tmp_path):
    """FUSED_ROPE_COMMIT names it, because a copied tree may contain an older repository."""
    monkeypatch.setenv("FUSED_ROPE_COMMIT", "0123abcd")
    assert FACTS.keys() <= environment().keys() and commit() == "0123abcd"
    monkeypatch.delenv("FUSED_ROPE_COMMIT")
    assert commit() != "0123abcd"
    monkeypatch.setattr("bench.environment.ROOT", tmp_path)
    assert commit() == "unknown"


def test_shapes_are_those_of_committed_rows():
    """Rows of a run replace committed ones of the same case and shape, so that a new name would leave both."""
    suites = (command.COMMANDS[name] for name in ("attention", "norm", "mla", "decode"))
    suites = [getattr(importlib.import_module(f"bench.{home}"), entry) for home, entry in suites]
    measured = {(case.name, case.shape) for suite in suites for case in suite.cases}
    for name in "attention decode energy fa3 groups host intervals mla norm same-bits".split():
        assert {(row["case"], row["shape"]) for row in results.read(f"{name}-h200")} <= measured, name
    for every in ((*cases.CASES, *cases.NORMED), models.CASES):
        assert len({(case.name, case.shape) for case in every}) == len(every)


def test_cases_are_chosen_by_groups_and_parts_of_names_and_shapes():
    def names(text):
        return [case.name for case in ATTENTION.choose(text)]

    assert names("") == [*(case.name for case in cases.PLAIN if case.name in cases.TABLE), "Host"]
    assert len(names("nineteen")) == 19 and set(names("table")) == set(cases.TABLE)
    assert names("masks") == ["window", "packed"] and names("packed") == ["packed"]
    assert names("gqa+16K, phi3-1k") == ["Llama3-8B-16K", "Phi3-1K"]


def test_flops():
    (case,), (full,) = ATTENTION.choose("table+Llama7B-4K"), ATTENTION.choose("Llama7B-full-4K")
    assert case.flops("fwd") == case.flops("fwd_grad") == 2 * 2 * 32 * 4096**2 * 128
    assert (case.flops("bwd"), case.flops("both")) == (2.5 * case.flops("fwd"), 3.5 * case.flops("fwd"))
    assert full.flops("fwd") == 2 * case.flops("fwd")


def test_visited_blocks_are_those_of_committed_rows():
    counted = {case.name: visited(*case.case.intervals(case.case.len_k)[:2]) for case in cases.BY_INTERVALS}
    assert {row["case"]: row["visited"] for row in results.read("intervals-h200")} == pytest.approx(counted, rel=1e-3)
    assert counted["chunks"] == (4 * 64 * 65) / (256 * 257)


def test_who_does_not_run_is_named_and_the_others_are_timed():
    """A provider without a backward is judged and timed forward: no gradients are asked for."""

    def forward_only(*given):
        assert not torch.is_grad_enabled()
        return fused(*given)

    people = [
        OURS,
        scripted("broken", raising(RuntimeError("kernel exploded\nwith a long trace"))),
        scripted("hungry", raising(torch.OutOfMemoryError("out of memory"))),
        scripted("limited", raising(NotImplementedError("no such mask"))),
        scripted("absent", lacks="pip install absent"),
        scripted("forward", forward_only, backward=False),
    ]
    rows, measurement = run(ATTENTION, TINY, providers=people, modes=("eager",), passes=("fwd", "bwd", "both"))
    found = {(row["provider"], row["pass"]): (row["status"], row["detail"]) for row in rows}
    assert found == {
        ("broken", None): ("error", "RuntimeError: kernel exploded"),
        ("hungry", None): ("oom", "OutOfMemoryError: out of memory"),
        ("limited", None): ("unsupported", "NotImplementedError: no such mask"),
        ("absent", None): ("missing", "pip install absent"),
        **{("fused", part): ("ok", "") for part in ("fwd", "bwd", "both")},
        ("forward", "fwd"): ("ok", ""),
        **{("forward", part): ("unsupported", "forward has a forward pass only") for part in ("bwd", "both")},
    }
    assert len(report.timed(rows)) == 4 and not measurement.not_run
    assert "! forward (bwd eager): unsupported: forward has a forward pass only" in case_report(rows)


def test_a_failed_capture_is_tried_once_and_reported():
    clock = WallClock()
    clock.capture = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    rows, _ = run(ATTENTION, TINY, providers=[OURS], clock=clock, modes=("eager", "graph"), passes=("fwd", "bwd"))
    assert clock.capture.call_count == 1
    found = [row for row in rows if row["mode"] == "graph"]
    assert len(found) == 2 and all(row["status"] == "no-graph" and "not permitted" in row["detail"] for row in found)


def test_a_case_whose_inputs_do_not_fit_is_named():
    full = replace(decode.DECODE, trial=raising(torch.OutOfMemoryError("out of memory")))
    rows, measurement = run(full, decode.DecodeCase(2, 32, 4, 2, 16, torch.float32), providers=[])
    assert rows == [] and measurement.not_run == ["B2-32 B2 H4/2 S32 D16 fp32 (memory)"]


def test_each_case_takes_the_modes_that_are_for_it():
    rows, _ = run(ATTENTION, TINY, SHORT, providers=[OURS], modes=("eager", "host"), passes=("fwd",))
    assert [(row["case"], row["mode"]) for row in rows] == [("Tiny-64", "eager"), ("Host", "host")]
    rows, _ = run(ATTENTION, TINY, providers=[OURS], modes=("host",), passes=("fwd",))
    assert [row["mode"] for row in rows] == ["host"], "asked for alone, host is for every case"


def test_the_option_for_the_same_bits_is_passed():
    """A step in float8 cannot keep that promise and is refused; no other provider's call can raise this."""
    step = decode.in_float8(decode.DecodeCase(1, 32, 2, 1, 32, torch.float16).step(torch.device("cpu")))
    with pytest.raises(NotImplementedError, match="batch_invariant=True does not serve float8"):
        decode.PROVIDERS["fused_same_bits"].make(step._replace(k_scale=None, v_scale=None))()


def test_providers_in_place_get_copies_and_leave_the_inputs_alone():
    def overwriting(q, k, v, given):
        o = fused(q, k, v, given)
        q.data.zero_()
        return o

    def overwriting_rotation(xs, tables, weights):
        outs = ROTATIONS["apply_rope"].run(xs, tables, weights)
        for x, out in zip(xs, outs):
            x.data.copy_(out)
        return outs

    tiny = RopeCase("Tiny", 2, (4, 2), 16, 8, (), torch.float32)
    for suite, case, people in (
        (ATTENTION, TINY, [scripted("in place", overwriting, in_place=True), scripted("other")]),
        (ROPE, tiny, [RopeProvider("in place", "", run=overwriting_rotation, in_place=True), ROTATIONS["apply_rope"]]),
    ):
        found = status(run(suite, case, providers=people, passes=("fwd",), modes=("eager",))[0])
        assert set(found.values()) == {"ok"} and len(found) == 2, found


def test_the_context_of_a_provider_is_entered_around_its_calls_alone():
    """cuDNN's attention is chosen by such a context, once for many calls, because choosing costs host time."""
    seen, people = set(), {"inside": torch.inference_mode, "outside": contextlib.nullcontext}

    def watching(place):
        return lambda *given: (seen.add((place, torch.is_inference_mode_enabled())), fused(*given))[1]

    scripts = [scripted(name, watching(name), active=active) for name, active in people.items()]
    run(ATTENTION, TINY, providers=scripts, modes=("eager",), passes=("fwd",))
    assert seen == {("inside", True), ("outside", False)} and not torch.is_inference_mode_enabled()


def test_forward_with_gradient_builds_a_graph_and_forward_does_not():
    x = torch.randn(3, requires_grad=True)
    forward, fwd_grad = (forward_or_backward(lambda x: 2 * x, [x], None, part) for part in ("fwd", "fwd_grad"))
    assert fwd_grad().requires_grad and not forward().requires_grad
