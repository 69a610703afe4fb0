"""Runs of the benchmark on CPU tensors with a wall clock: every row and every kind of failure. Times mean nothing."""

import dataclasses
import time

import pytest
import torch

from baselines import BASELINES
from bench import providers, report
from bench.runner import DeviceLost, Options, Run
from fused_rope_attn import testing
from tests.support.bench import TINY, Scripted, WallClock, reference_run, run_tiny


def test_a_run_times_rivals_and_ours_and_reports_who_is_missing():
    def broken(*arguments):
        raise RuntimeError("kernel exploded\nwith a long trace")

    def wrong(q, k, v, tables, causal):
        return reference_run(q, k, v, tables, causal) * 2

    def hungry(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    people = [
        providers.OURS["fused"],
        BASELINES["hf_sdpa"],
        BASELINES["hf_flash_attn"],
        BASELINES["bare_flash"],
        Scripted("broken", broken),
        Scripted("hungry", hungry),
        Scripted("wrong", wrong),
        Scripted("absent", broken, lacks="pip install absent"),
    ]
    run, rows = run_tiny(people, passes=("fwd", "bwd", "both"))
    by_status = {row["provider"]: row["status"] for row in rows}
    assert by_status["broken"] == "error" and by_status["hungry"] == "oom"
    assert by_status["wrong"] == "failed" and by_status["absent"] == "missing"
    assert "kernel exploded" in next(r for r in rows if r["provider"] == "broken")["detail"]
    timed = report.timed(rows)
    assert {(r["provider"], r["pass"], r["mode"]) for r in timed} == {
        (name, part, mode)
        for name in ("fused", "hf_sdpa", "hf_flash_attn", "bare_flash")
        for part in ("fwd", "bwd", "both")
        for mode in ("eager", "graph")
    }
    for row in timed:
        assert row["p20"] <= row["ms"] <= row["p80"] and len(row["rounds"]) == 2 and row["calls"] == 4
        assert row["speedup"]["baseline"]["provider"] == "hf_sdpa"
        assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / row["ms"] * 1e-9)
    assert next(r for r in timed if r["provider"] == "fused")["plan"].startswith("Plan(")
    text = report.case_report(rows)
    assert "FAILED the gate" in text and "pip install absent" in text and "kernel exploded" in text
    assert "wrong" not in report.summary(rows)
    assert not run.not_run


def test_a_red_gate_of_ours_shows_no_speedup():
    wrong = dataclasses.replace(providers.OURS["fused"])
    object.__setattr__(wrong, "run", lambda q, k, v, tables, causal: reference_run(q, k, v, tables, causal) * 1.1)
    _, rows = run_tiny([wrong, BASELINES["hf_sdpa"]], passes=("fwd",), mode="eager")
    assert report.red(rows)
    assert "Ours, not measured" in report.summary(rows) and "speedup" not in report.summary(rows)


def test_a_failed_capture_is_tried_once_and_reported():
    class NoCapture(WallClock):
        attempts = 0

        def capture(self, make):
            self.attempts += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    clock = NoCapture()
    run = Run([BASELINES["hf_sdpa"]], Options(rounds=1, host=False), clock, {"gpu": "cpu"})
    rows = [row for block in run.rows([TINY]) for row in block]
    assert clock.attempts == 1
    assert [r["status"] for r in rows if r["mode"] == "graph"] == ["no-graph", "no-graph"]
    assert all("not permitted" in r["detail"] for r in rows if r["mode"] == "graph")


def test_the_deadline_stops_cleanly_and_names_what_is_left():
    options = Options(rounds=1, deadline=time.monotonic() - 1)
    run = Run([BASELINES["hf_sdpa"]], options, WallClock(), {"gpu": "cpu"})
    assert list(run.rows([TINY])) == []
    assert run.not_run == ["Tiny-64", "host times"]


def test_a_lost_gpu_ends_the_run():
    class Lost(WallClock):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    run = Run([BASELINES["hf_sdpa"]], Options(host=False), Lost(), {"gpu": "cpu"})
    with pytest.raises(DeviceLost, match="hf_sdpa.*illegal memory access"):
        list(run.rows([TINY]))


def test_in_place_rivals_get_copies_and_leave_the_inputs_alone():
    def rotate_in_place(q, k, v, tables, causal):
        with torch.no_grad():
            for x in (q, k):
                x.copy_(testing.reference.rotate(x, *tables))
        return BASELINES["bare_flash"].run(q, k, v, None, causal)

    seen = []

    def spy(q, k, v, tables, causal):
        seen.append(q.detach().clone())
        return reference_run(q, k, v, tables, causal)

    people = [Scripted("in_place", rotate_in_place, in_place=True), Scripted("spy", spy)]
    run_tiny(people, passes=("fwd",), mode="eager")
    assert all(torch.equal(q, seen[0]) for q in seen)


def test_host_times_have_no_flops():
    run = Run([BASELINES["hf_sdpa"]], Options(rounds=2, passes=("fwd",), mode="eager"), WallClock(), {"gpu": "cpu"})
    host = list(run.rows([TINY]))[-1]
    assert [r["mode"] for r in host] == ["host"] and "tflops" not in host[0] and host[0]["ms"] > 0
    assert "host time" in report.case_report(host)
