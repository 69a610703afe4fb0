"""Attention on CPU tensors: its gate, its rows, and what becomes of providers that fail."""

import contextlib
import dataclasses

import pytest
import torch
from torch.backends import cuda

from bench import report
from bench.attention import cases, providers
from bench.attention.suite import ATTENTION
from bench.report import case_report
from bench.runner import DeviceLost
from bench.suite import forward_or_backward
from tests.support.bench import TINY, right, run, scripted
from tests.support.clocks import WallClock
from verification import testing

PLAIN = providers.table("plain")
HOST = providers.table("host")
FUSED = PLAIN["fused"]


def _run(people, *more, clock=None, **options):
    options = {"passes": ("fwd", "bwd"), "modes": ("eager", "graph")} | options
    return run(ATTENTION, TINY, *more, providers=people, clock=clock, **options)


def test_a_run_times_rivals_and_ours_and_reports_who_is_missing():
    def broken(*arguments):
        raise RuntimeError("kernel exploded\nwith a long trace")

    def wrong(q, k, v, given):
        return right(q, k, v, given) * 2

    def hungry(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    people = [
        *(PLAIN[name] for name in ("fused", "hf_sdpa", "hf_flash_attn", "bare_flash")),
        scripted("broken", broken),
        scripted("hungry", hungry),
        scripted("wrong", wrong),
        scripted("absent", broken, lacks="pip install absent"),
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
        assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / row["ms"] * 1e-9)
    text = case_report(rows)
    assert "FAILED the gate" in text and "pip install absent" in text and "kernel exploded" in text
    assert not measurement.not_run


def test_a_provider_without_a_backward_is_judged_and_timed_forward():
    """Its gate asks for no gradients, and the passes that would say why there is none."""

    def forward_only(q, k, v, given):
        assert not torch.is_grad_enabled()
        return right(q, k, v, given)

    people = [FUSED, scripted("forward", forward_only, "Forward", backward=False)]
    rows, _ = _run(people, passes=("fwd", "bwd", "both"))
    found = {(row["pass"], row["mode"]): row for row in rows if row["provider"] == "forward"}
    assert all(found["fwd", mode]["status"] == "ok" for mode in ("eager", "graph"))
    for part in ("bwd", "both"):
        for mode in ("eager", "graph"):
            row = found[part, mode]
            assert row["status"] == "unsupported" and row["detail"] == "Forward has a forward pass only"
    assert len(report.timed(rows, "bwd")) == 2 and not report.red(rows)
    assert "! Forward (bwd eager): unsupported: Forward has a forward pass only" in case_report(rows)


def test_a_red_gate_of_ours_shows_no_speedup():
    wrong = dataclasses.replace(FUSED, run=lambda q, k, v, given: right(q, k, v, given) * 1.1)
    rows, _ = _run([wrong, PLAIN["hf_sdpa"]], passes=("fwd",), modes=("eager",))
    assert report.red(rows) and "FAILED the gate" in case_report(rows)
    assert not any(line.endswith("x") for line in case_report(rows).splitlines())


def test_a_failed_capture_is_tried_once_and_reported():
    class NoCapture(WallClock):
        attempts = 0

        def capture(self, make):
            self.attempts += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    clock = NoCapture()
    rows, _ = _run([PLAIN["hf_sdpa"]], clock=clock, rounds=1)
    assert clock.attempts == 1
    assert [r["status"] for r in rows if r["mode"] == "graph"] == ["no-graph", "no-graph"]
    assert all("not permitted" in r["detail"] for r in rows if r["mode"] == "graph")


def test_a_lost_gpu_ends_the_run():
    class Lost(WallClock):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLost, match="hf_sdpa.*illegal memory access"):
        _run([PLAIN["hf_sdpa"]], clock=Lost())


def test_in_place_rivals_get_copies_and_leave_the_inputs_alone():
    def rotate_in_place(q, k, v, given):
        with torch.no_grad():
            for x in (q, k):
                x.copy_(testing.reference.rotate(x, *given.tables))
        return PLAIN["bare_flash"].run(q, k, v, given)

    seen = []

    def spy(q, k, v, given):
        seen.append(q.detach().clone())
        return right(q, k, v, given)

    people = [scripted("in_place", rotate_in_place, in_place=True), scripted("spy", spy)]
    _run(people, passes=("fwd",), modes=("eager",))
    assert all(torch.equal(q, seen[0]) for q in seen)


# The gate


def _verdict(provider, **options):
    rows, _ = _run([provider], passes=("fwd", "bwd"), modes=("eager",), **options)
    return rows[0]["status"], rows[0]["detail"]


def test_the_gate_passes_the_truth():
    assert _verdict(scripted("fused", right, role="ours")) == ("ok", "")


@pytest.mark.parametrize("role", ["ours", "rival"])
def test_the_gate_stops_wrong_angles_from_anybody(role):
    def shifted(q, k, v, given):
        cos, sin = (torch.roll(table, 1, 0) for table in given.tables)
        return right(q, k, v, given._replace(tables=(cos, sin.neg())))

    status, detail = _verdict(scripted("shifted", shifted, role=role))
    assert status == "failed" and "rows too far off" in detail


def test_the_gate_stops_nan_and_sees_every_half_of_a_gqa_batch():
    def last_head_wrong(q, k, v, given):
        keep = torch.ones_like(q)
        keep[-1, -1] = 0.5
        return right(q, k, v, given) * keep

    status, detail = _verdict(scripted("nan", lambda *given: right(*given) * float("nan")))
    assert status == "failed" and "not finite" in detail
    assert _verdict(scripted("last", last_head_wrong, role="ours"))[0] == "failed"


def test_a_rounding_rival_is_loose_but_ours_is_red():
    def coarse(q, k, v, given):
        bump = torch.zeros_like(q)
        bump[:, :, 5] = 2e-3  # one row, a few roundings off
        return right(q, k, v, given) + bump

    assert _verdict(scripted("rival", coarse))[0] == "loose"
    assert _verdict(scripted("fused", coarse, role="ours"))[0] == "failed"


# Host time


class _Bursts(WallClock):
    """Every burst of every provider takes 20 µs a call, then 30, 40 and 50."""

    def host_sample(self, fn, calls):
        fn()
        return [0.02, 0.03, 0.04, 0.05]


SHORT = dataclasses.replace(cases.HOST, case=testing.Case(1, 2, 2, 16, 16, 32, dtype=torch.float16))


def _host(*people, clock=None):
    return run(ATTENTION, SHORT, providers=people, clock=clock or _Bursts())[0]


def test_host_time_of_three_passes_of_everybody_who_is_right():
    rows = _host(*HOST.values())
    timed = report.timed(rows)
    here = ("fused", "bare_sdpa", "nothing")  # a machine without cuDNN runs these
    assert {(row["provider"], row["pass"]) for row in timed} == {
        (name, part) for name in here for part in ("fwd", "fwd_grad", "both")
    }
    for row in timed:
        assert row["mode"] == "host" and row["ms"] == pytest.approx(0.035) and "tflops" not in row
        assert {"gpu", "driver", "torch", "triton", "commit", "date"} <= set(row)
    assert {row["status"] for row in rows if row["provider"].startswith("bare_cudnn")} == {"unsupported"}
    text = case_report(rows)
    assert "B1 H2 N16 D32 causal fp16" in text and "! bare cuDNN, chosen once: unsupported" in text


def test_each_case_takes_the_modes_that_are_for_it():
    rows, _ = run(ATTENTION, TINY, SHORT, providers=[FUSED], modes=("eager", "host"), passes=("fwd",))
    assert [(row["case"], row["mode"]) for row in rows] == [("Tiny-64", "eager"), ("Host", "host")]
    rows, _ = run(ATTENTION, TINY, providers=[FUSED], modes=("host",), passes=("fwd",))
    assert [row["mode"] for row in rows] == ["host"]


def test_the_function_that_does_nothing_does_nothing():
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    o = HOST["nothing"].run(q, k, v, None)
    do = torch.randn_like(o)
    assert torch.equal(o, q) and all(torch.equal(x, do) for x in torch.autograd.grad(o, (q, k, v), do))


def test_a_function_that_does_something_else_is_not_timed():
    doubles = dataclasses.replace(HOST["nothing"], run=lambda q, k, v, given: 2 * q + 0 * (k + v))
    (row,) = _host(doubles)
    assert row["status"] == "failed" and row["detail"] == "must return q, and do as every gradient"


def test_the_backend_is_chosen_once_outside_of_what_is_timed():
    """Within the samples cuDNN's attention is the only one allowed, and outside of them all are, as before."""
    seen = []

    class Watching(_Bursts):
        def host_sample(self, fn, calls):
            seen.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
            return super().host_sample(fn, calls)

    @contextlib.contextmanager
    def cudnn_and_math():  # cuDNN runs nothing here
        with providers.sdpa_kernel([providers.SDPBackend.CUDNN_ATTENTION, providers.SDPBackend.MATH]):
            yield

    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    rows = _host(dataclasses.replace(HOST["bare_cudnn_chosen"], active=cudnn_and_math), clock=Watching())
    assert [row["status"] for row in rows] == ["ok"] * 3 and set(seen) == {(True, False, True)}
    assert (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()) == before


def test_forward_with_gradient_builds_a_graph_and_forward_does_not():
    x = torch.randn(3, requires_grad=True)
    assert forward_or_backward(lambda x: 2 * x, [x], None, "fwd_grad")().requires_grad
    assert not forward_or_backward(lambda x: 2 * x, [x], None, "fwd")().requires_grad
    with pytest.raises(ValueError, match="a pass must be fwd, fwd_grad, bwd or both, not 'up'"):
        forward_or_backward(lambda x: 2 * x, [x], None, "up")


# Co-RoPE

COROPE = cases.BenchCase("Tiny", "Tiny", ("corope",), testing.Case(2, 4, 2, 9, 9, 8, dtype=torch.float32), "corope")


def test_corope_is_held_to_its_definition():
    rows, _ = run(ATTENTION, COROPE, providers=list(providers.table("corope").values()))
    timed = {(row["provider"], row["pass"]) for row in report.timed(rows)}
    assert timed == {(name, part) for name in ("corope", "dense") for part in ("fwd", "bwd")}
    assert all(row["peak_mib"] == 1.5 and row["mode"] == "eager" and "tflops" not in row for row in rows)

    def wrong(q, k, v, given):  # in one head of the last group
        o = providers.corope_attention(q, k, v)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), 1)

    rows, _ = run(ATTENTION, COROPE, providers=[providers.ours("wrong", "wrong", run=wrong)])
    assert rows[0]["status"] == "failed"
    assert "1024 tokens" in providers.table("corope")["dense"].unsupported(cases.COROPE[1].case)
