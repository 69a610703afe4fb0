"""The suite of attention on CPU tensors: its gate, its rows, and what becomes of providers that fail."""

import dataclasses
import time

import pytest
import torch

from baselines import BASELINES
from bench import report
from bench.gate import Gate
from bench.runner import DeviceLost
from bench.suites.attention import cases, providers
from bench.suites.attention.report import case_report, summary
from bench.suites.attention.suite import Attention, check, references
from fused_rope_attn import testing
from tests.support.bench import run
from tests.support.clocks import WallClock

_CASE = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))
_HOST = cases.with_dtype(cases.HOST_CASE, torch.float16)


@dataclasses.dataclass
class Scripted:
    """A provider that does what a test wants; ``run`` receives what a baseline receives."""

    name: str
    action: object
    label: str = ""
    rotates: bool = True
    in_place: bool = False
    half_tables: bool = False
    pip: tuple = ("scripted",)
    lacks: str | None = None

    def __post_init__(self):
        self.label = self.label or self.name

    def missing(self):
        return self.lacks

    def unsupported(self, case):
        return None

    def prepare(self, cos, sin, dtype):
        return cos, sin

    def run(self, q, k, v, tables, causal):
        return self.action(q, k, v, tables, causal)


def _run(people, *more, clock=None, **options):
    suite = Attention(people, grads=options.get("passes") != ("fwd",))
    return run(suite, _CASE, *more, clock=clock, **options)


def test_references():
    medians = {"fused": 1.0, "hf_sdpa": 3.0, "liger_fa4": 0.9, "bare_fa4": 0.8, "bare_cudnn": 0.85}
    rotates = {name: not name.startswith("bare") for name in medians}
    assert references(medians, rotates, "hf_sdpa") == {"baseline": "hf_sdpa", "rival": "liger_fa4", "bare": "bare_fa4"}
    assert references({"fused": 1.0}, {"fused": True}, "hf_sdpa") == {}


# Gate


def _gate(provider, **kwargs):
    case = _CASE.case
    return check(provider, Gate(case, testing.make_inputs(case)), lambda: None, grads=True, **kwargs)


def _reference_run(q, k, v, tables, causal):
    return providers.OURS["fused"].run(q, k, v, tables, causal)


def test_gate_passes_the_truth():
    verdict = _gate(Scripted("fused", _reference_run))
    assert verdict.status == "ok" and verdict.detail == "" and verdict.row_ratio <= 2.5


@pytest.mark.parametrize("name", ["fused", "rival"])
def test_gate_stops_wrong_angles_from_anybody(name):
    def shifted(q, k, v, tables, causal):
        cos, sin = (torch.roll(table, 1, 0) for table in tables)
        return _reference_run(q, k, v, (cos, sin.neg()), causal)

    verdict = _gate(Scripted(name, shifted))
    assert verdict.status == "failed" and "rows too far off" in verdict.detail


def test_gate_stops_nan():
    verdict = _gate(Scripted("rival", lambda *a: _reference_run(*a) * float("nan")))
    assert verdict.status == "failed" and "not finite" in verdict.detail


def test_a_rounding_rival_is_loose_but_ours_is_red():
    def coarse(q, k, v, tables, causal):
        o = _reference_run(q, k, v, tables, causal)
        bump = torch.zeros_like(o)
        bump[:, :, 5] = 2e-3  # one row, a few roundings off
        return o + bump

    assert _gate(Scripted("rival", coarse)).status == "loose"
    assert _gate(Scripted("rival", coarse), strict=True).status == "failed"
    assert _gate(Scripted("fused", coarse)).status == "failed"


def test_gate_sees_every_half_of_a_gqa_batch():
    def last_head_wrong(q, k, v, tables, causal):
        o = _reference_run(q, k, v, tables, causal)
        keep = torch.ones_like(o)
        keep[-1, -1] = 0.5
        return o * keep

    assert _gate(Scripted("fused", last_head_wrong)).status == "failed"


# Runs


def test_a_run_times_rivals_and_ours_and_reports_who_is_missing():
    def broken(*arguments):
        raise RuntimeError("kernel exploded\nwith a long trace")

    def wrong(q, k, v, tables, causal):
        return _reference_run(q, k, v, tables, causal) * 2

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
        assert row["tflops"] == pytest.approx(_CASE.flops(row["pass"]) / row["ms"] * 1e-9)
    assert next(r for r in timed if r["provider"] == "fused")["plan"].startswith("Plan(")
    text = case_report(rows)
    assert "FAILED the gate" in text and "pip install absent" in text and "kernel exploded" in text
    assert "wrong" not in summary(rows)
    assert not measurement.not_run


def test_a_red_gate_of_ours_shows_no_speedup():
    wrong = dataclasses.replace(providers.OURS["fused"])
    object.__setattr__(wrong, "run", lambda q, k, v, tables, causal: _reference_run(q, k, v, tables, causal) * 1.1)
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
        return _reference_run(q, k, v, tables, causal)

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
