"""The suite of attention on CPU tensors: its gate, its rows, and what becomes of providers that fail."""

import dataclasses
import time

import pytest
import torch

from baselines import BASELINES
from bench import report
from bench.attention import cases, providers
from bench.runner import DeviceLost
from bench.suites.attention.report import case_report, summary
from bench.suites.attention.suite import Attention, references
from fused_rope_attn import testing
from tests.support.bench import TINY, Scripted, right, run
from tests.support.clocks import WallClock

_HOST = cases.with_dtype(cases.HOST_CASE, torch.float16)


def _run(people, *more, clock=None, **options):
    suite = Attention(people, grads=options.get("passes") != ("fwd",))
    return run(suite, TINY, *more, clock=clock, **options)


def test_references():
    medians = {"fused": 1.0, "hf_sdpa": 3.0, "liger_fa4": 0.9, "bare_fa4": 0.8, "bare_cudnn": 0.85}
    rotates = {name: not name.startswith("bare") for name in medians}
    assert references(medians, rotates, "hf_sdpa") == {"baseline": "hf_sdpa", "rival": "liger_fa4", "bare": "bare_fa4"}
    assert references({"fused": 1.0}, {"fused": True}, "hf_sdpa") == {}


def test_a_run_times_rivals_and_ours_and_reports_who_is_missing():
    def broken(*arguments):
        raise RuntimeError("kernel exploded\nwith a long trace")

    def wrong(q, k, v, tables, causal):
        return right(q, k, v, tables, causal) * 2

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
    rows, measurement = _run(people, passes=("fwd", "bwd", "both"))
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
    text = case_report(rows)
    assert "FAILED the gate" in text and "pip install absent" in text and "kernel exploded" in text
    assert "wrong" not in summary(rows)
    assert not measurement.not_run


def test_a_provider_without_a_backward_is_judged_and_timed_forward():
    """Its gate asks for no gradients, and the passes that would say why there is none."""

    def forward_only(q, k, v, tables, causal):
        assert not torch.is_grad_enabled()
        return right(q, k, v, tables, causal)

    people = [providers.OURS["fused"], Scripted("forward", forward_only, "Forward", backward=False)]
    rows, _ = _run(people, passes=("fwd", "bwd", "both"))
    found = {(row["pass"], row["mode"]): row for row in rows if row["provider"] == "forward"}
    assert all(found["fwd", mode]["status"] == "ok" for mode in ("eager", "graph"))
    for part in ("bwd", "both"):
        for mode in ("eager", "graph"):
            row = found[part, mode]
            assert row["status"] == "unsupported" and row["detail"] == "Forward has a forward pass only"
    assert len(report.timed(rows, "bwd")) == 2 and not report.red(rows)
    assert "Forward (bwd eager): unsupported: Forward has a forward pass only" in case_report(rows)


def test_a_red_gate_of_ours_shows_no_speedup():
    wrong = dataclasses.replace(providers.OURS["fused"])
    object.__setattr__(wrong, "run", lambda q, k, v, tables, causal: right(q, k, v, tables, causal) * 1.1)
    rows, _ = _run([wrong, BASELINES["hf_sdpa"]], passes=("fwd",), modes=("eager",))
    assert report.red(rows)
    assert "Ours, not measured" in summary(rows) and "speedup" not in summary(rows)


def test_a_failed_capture_is_tried_once_and_reported():
    class NoCapture(WallClock):
        attempts = 0

        def capture(self, make):
            self.attempts += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    clock = NoCapture()
    rows, _ = _run([BASELINES["hf_sdpa"]], clock=clock, rounds=1)
    assert clock.attempts == 1
    assert [r["status"] for r in rows if r["mode"] == "graph"] == ["no-graph", "no-graph"]
    assert all("not permitted" in r["detail"] for r in rows if r["mode"] == "graph")


def test_the_deadline_stops_cleanly_and_names_what_is_left():
    rows, measurement = _run([BASELINES["hf_sdpa"]], _HOST, rounds=1, deadline=time.monotonic() - 1)
    assert rows == [] and measurement.not_run == ["Tiny-64", "host times"]


def test_a_lost_gpu_ends_the_run():
    class Lost(WallClock):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLost, match="hf_sdpa.*illegal memory access"):
        _run([BASELINES["hf_sdpa"]], clock=Lost())


def test_in_place_rivals_get_copies_and_leave_the_inputs_alone():
    def rotate_in_place(q, k, v, tables, causal):
        with torch.no_grad():
            for x in (q, k):
                x.copy_(testing.reference.rotate(x, *tables))
        return BASELINES["bare_flash"].run(q, k, v, None, causal)

    seen = []

    def spy(q, k, v, tables, causal):
        seen.append(q.detach().clone())
        return right(q, k, v, tables, causal)

    people = [Scripted("in_place", rotate_in_place, in_place=True), Scripted("spy", spy)]
    _run(people, passes=("fwd",), modes=("eager",))
    assert all(torch.equal(q, seen[0]) for q in seen)


def test_host_times_have_no_flops():
    rows, _ = _run([providers.OURS["fused"], BASELINES["hf_sdpa"]], _HOST, passes=("fwd",), modes=("eager",))
    host = [row for row in rows if row["case"] == "Host"]
    assert [(row["pass"], row["mode"]) for row in host] == [("fwd", "host")] * 2
    assert all("tflops" not in row and row["ms"] > 0 for row in host) and "plan" in host[0]
    assert "host time" in case_report(host)


def test_host_times_of_both_passes():
    rows, _ = _run([BASELINES["hf_sdpa"]], _HOST, modes=("eager",))
    assert [row["pass"] for row in rows if row["mode"] == "host"] == ["fwd", "both"]
