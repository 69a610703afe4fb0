"""The benchmark without a GPU: cases, clock arithmetic, gate, rows and their failures, tables, plots, command line.

Runs go through the real runner and gate on CPU tensors, with a wall clock in place of the GPU's: times mean nothing.
"""

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy
import pytest
import torch

from baselines import BASELINES
from bench import __main__ as command
from bench import cases, plots, providers, report, timing, tune
from bench.environment import ROOT, commit, environment
from bench.gate import Gate
from bench.runner import DeviceLost, Options, Run, references
from bench.timing import Measurement, interleave, quantile, ratio
from fused_rope_attn import testing
from fused_rope_attn.attention import configs

_CASE = cases.BenchCase("Tiny-64", "Tiny", ("tiny",), testing.Case(2, 4, 2, 64, 64, 32, dtype=torch.float16))


class WallClock:
    """The clock of a machine without a GPU, with the same doors as ``timing.GpuClock``."""

    device = torch.device("cpu")

    def synchronize(self):
        pass

    def sample(self, fn, calls):
        samples = []
        for _ in range(calls):
            begin = time.perf_counter()
            fn()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples

    def calls_for(self, fn, round_ms):
        return 2

    def capture(self, make):
        return make()

    def peak_mib(self, fn):
        return 1.5

    def host_sample(self, fn, calls):
        return [sum(self.sample(fn, 3)) / 3]

    def release(self):
        pass


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


def _run(people, **options):
    run = Run(people, Options(**{"rounds": 2, "host": False} | options), WallClock(), {"gpu": "cpu"})
    return run, [row for block in run.rows([_CASE]) for row in block]


# Cases


def test_the_nineteen_of_the_inspiring_project():
    found = {(c.name, c.case.batch, c.case.heads_q, c.case.len_q, c.case.head_dim) for c in _group("nineteen")}
    small = {(f"Small-{label}", 4, 8, n, 64) for label, n in _lengths("512 1K 2K 4K 8K")}
    llama7b = {(f"Llama7B-{label}", 1 if n == 16384 else 2, 32, n, 128) for label, n in _lengths("512 1K 2K 4K 8K 16K")}
    llama70b = {(f"Llama70B-{label}", 1 if n >= 4096 else 2, 64, n, 128) for label, n in _lengths("512 1K 2K 4K 8K")}
    long = {("Long-32K", 1, 16, 32768, 128), ("Long-64K", 1, 8, 65536, 128), ("Long-128K", 1, 4, 131072, 128)}
    assert found == small | llama7b | llama70b | long
    assert len(found) == 19


def test_the_target_table():
    found = {
        c.name: (c.case.batch, c.case.heads_q, c.case.heads_kv, c.case.len_q, c.case.head_dim) for c in _group("table")
    }
    assert found == {
        "Small-512": (4, 8, 8, 512, 64),
        "Small-1K": (4, 8, 8, 1024, 64),
        "Llama7B-2K": (2, 32, 32, 2048, 128),
        "Llama7B-4K": (2, 32, 32, 4096, 128),
        "Llama70B-1K": (2, 64, 64, 1024, 128),
        "Llama3-8B-4K": (2, 32, 8, 4096, 128),
        "Llama3-8B-16K": (1, 32, 8, 16384, 128),
        "Long-64K": (1, 8, 8, 65536, 128),
    }


def test_the_other_cases_cover_gqa_96_256_and_no_mask():
    everything = _group("all")
    assert len({c.name for c in everything}) == len(everything)
    assert {c.case.head_dim for c in everything} == {64, 96, 128, 256}
    assert any(not c.case.causal for c in everything)
    assert all(c.case.len_q == c.case.len_k for c in everything)


def test_flops_and_selection():
    case = _group("table", "Llama7B-4K")[0]
    assert case.flops("fwd") == 2 * 2 * 32 * 4096**2 * 128
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert case.flops("both") == 3.5 * case.flops("fwd")
    full = _group("full", "Llama7B-full-4K")[0]
    assert full.flops("fwd") == 2 * case.flops("fwd")
    assert cases.select(["all"], ["small-1k"], torch.float32)[0].case.dtype == torch.float32
    with pytest.raises(ValueError, match="unknown group nowhere"):
        _group("nowhere")
    with pytest.raises(ValueError, match="no case"):
        _group("table", "nothing-like-it")


def _group(group, *substrings):
    return cases.select([group], list(substrings), torch.bfloat16)


def _lengths(text):
    return [(word, int(word[:-1]) * 1024 if word.endswith("K") else int(word)) for word in text.split()]


# Clock arithmetic


@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_quantile_is_numpys(n, q):
    values = list(torch.randn(n, generator=torch.Generator().manual_seed(n)).tolist())
    assert quantile(values, q) == pytest.approx(float(numpy.quantile(values, q)))


def test_quantile_refuses_nothing_and_nonsense():
    with pytest.raises(ValueError):
        quantile([], 0.5)
    with pytest.raises(ValueError):
        quantile([1.0], 1.5)


def test_ratios_are_taken_within_rounds():
    # A clock that slows both sides down by half in the last rounds: medians over all rounds would say 1.5.
    assert ratio([1.0, 1.0, 1.5, 1.5, 1.5], [1.0, 1.0, 1.5, 1.5, 1.5]) == 1.0
    measurement = Measurement([[1.0, 3.0, 2.0], [4.0]])
    assert measurement.round_medians == [2.0, 4.0]
    assert measurement.quantiles() == (2.5, pytest.approx(1.6), pytest.approx(3.4))


def test_interleave_changes_the_order_and_drops_who_fails():
    def run(fns, rounds, fail_after=None):
        order = []

        def sample(fn, calls):
            order.append(fn())
            if fn() == "bad" and fail_after is not None and len(order) > fail_after:
                raise RuntimeError("broke")
            return [1.0] * calls

        return order, *interleave(fns, sample, dict.fromkeys(fns, 2), rounds, lambda: False)

    names = ["a", "b", "c", "d", "e"]
    order, _, _ = run({name: lambda name=name: name for name in names}, 6)
    rounds = [order[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(one) == names for one in rounds)
    predecessors = {one[i - 1] for one in rounds for i in range(1, 5) if one[i] == "a"}
    assert len(predecessors) > 1, "a always follows the same neighbour"
    assert order == run({name: lambda name=name: name for name in names}, 6)[0], "a run can be repeated"

    fns = {name: lambda name=name: name for name in ("a", "bad", "c")}
    order, measured, failed = run(fns, 3, fail_after=3)
    assert order.count("bad") == 2  # a sample in the first round, the failure in the second, none after it
    assert list(failed) == ["bad"]
    assert measured["c"].rounds == [[1.0, 1.0]] * 3
    measured, _ = interleave(fns, lambda fn, calls: [1.0], dict.fromkeys(fns, 1), 9, lambda: True)
    assert all(len(m.rounds) == 1 for m in measured.values())  # the round in hand is finished, no other begun


def test_references():
    medians = {"fused": 1.0, "hf_sdpa": 3.0, "liger_fa4": 0.9, "bare_fa4": 0.8, "bare_cudnn": 0.85}
    rotates = {name: not name.startswith("bare") for name in medians}
    assert references(medians, rotates, "hf_sdpa") == {"baseline": "hf_sdpa", "rival": "liger_fa4", "bare": "bare_fa4"}
    assert references({"fused": 1.0}, {"fused": True}, "hf_sdpa") == {}


class _Stream:
    """Stand-in for CUDA's streams, graphs and events: work runs at once, and nothing records it."""

    depth = 0

    def __init__(self, *device):
        pass

    def __enter__(self):
        _Stream.depth += 1

    def __exit__(self, *error):
        _Stream.depth -= 1


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class _Graph:
    work = staticmethod(lambda: None)

    def capture_begin(self):
        assert _Stream.depth == 1

    def capture_end(self):
        assert _Stream.depth == 1

    def replay(self):
        assert _Stream.depth == 0
        self.work()


@pytest.fixture
def gpu_clock(monkeypatch):
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 20)
    return timing.GpuClock(torch.device("cpu"))


def test_gpu_clock_samples_and_counts(gpu_clock):
    assert len(gpu_clock.sample(lambda: time.sleep(0.002), 3)) == 3
    assert min(gpu_clock.sample(lambda: time.sleep(0.002), 3)) >= 2
    assert gpu_clock.calls_for(lambda: time.sleep(0.003), 1.0) == 1
    assert 1 < gpu_clock.calls_for(lambda: time.sleep(0.001), 20.0) <= 20
    assert gpu_clock.peak_mib(lambda: None) == 2.0
    (host,) = gpu_clock.host_sample(lambda: time.sleep(0.001), 4)
    assert host >= 1.0
    gpu_clock.release()


def test_a_graph_that_leaves_its_outputs_unwritten_is_refused(gpu_clock, monkeypatch):
    out = torch.zeros(4)
    monkeypatch.setattr(_Graph, "work", staticmethod(lambda: out.fill_(1.0)))
    replay = gpu_clock.capture(lambda: lambda: out)
    out.zero_()
    replay()
    assert out.tolist() == [1.0] * 4
    monkeypatch.setattr(_Graph, "work", staticmethod(lambda: None))
    with pytest.raises(RuntimeError, match="another stream"):
        gpu_clock.capture(lambda: lambda: (out, out))


def test_a_failed_capture_restores_the_stream(gpu_clock):
    calls = []

    def third_call_fails():
        calls.append(_Stream.depth)
        if len(calls) == 3:
            raise RuntimeError("not while capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not while capturing"):
        gpu_clock.capture(lambda: third_call_fails)
    assert calls == [1, 1, 1] and _Stream.depth == 0


# Gate


def _gate(provider, **kwargs):
    case = _CASE.case
    return Gate(case, testing.make_inputs(case), grads=True, **kwargs).check(provider, lambda: None)


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
    run, rows = _run(people, passes=("fwd", "bwd", "both"))
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
    text = report.case_report(rows)
    assert "FAILED the gate" in text and "pip install absent" in text and "kernel exploded" in text
    assert "wrong" not in report.summary(rows)
    assert not run.not_run


def test_a_red_gate_of_ours_shows_no_speedup():
    wrong = dataclasses.replace(providers.OURS["fused"])
    object.__setattr__(wrong, "run", lambda q, k, v, tables, causal: _reference_run(q, k, v, tables, causal) * 1.1)
    _, rows = _run([wrong, BASELINES["hf_sdpa"]], passes=("fwd",), mode="eager")
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
    rows = [row for block in run.rows([_CASE]) for row in block]
    assert clock.attempts == 1
    assert [r["status"] for r in rows if r["mode"] == "graph"] == ["no-graph", "no-graph"]
    assert all("not permitted" in r["detail"] for r in rows if r["mode"] == "graph")


def test_the_deadline_stops_cleanly_and_names_what_is_left():
    options = Options(rounds=1, deadline=time.monotonic() - 1)
    run = Run([BASELINES["hf_sdpa"]], options, WallClock(), {"gpu": "cpu"})
    assert list(run.rows([_CASE])) == []
    assert run.not_run == ["Tiny-64", "host times"]


def test_a_lost_gpu_ends_the_run():
    class Lost(WallClock):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    run = Run([BASELINES["hf_sdpa"]], Options(host=False), Lost(), {"gpu": "cpu"})
    with pytest.raises(DeviceLost, match="hf_sdpa.*illegal memory access"):
        list(run.rows([_CASE]))


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
    _run(people, passes=("fwd",), mode="eager")
    assert all(torch.equal(q, seen[0]) for q in seen)


def test_host_times_have_no_flops():
    run = Run([BASELINES["hf_sdpa"]], Options(rounds=2, passes=("fwd",), mode="eager"), WallClock(), {"gpu": "cpu"})
    host = list(run.rows([_CASE]))[-1]
    assert [r["mode"] for r in host] == ["host"] and "tflops" not in host[0] and host[0]["ms"] > 0
    assert "host time" in report.case_report(host)


# Reports


def _row(case, provider, ms, part="fwd", mode="graph", status="ok", **extra):
    bench_case = next(c for c in cases.CASES if c.name == case)
    c = bench_case.case
    label = providers.PROVIDERS[provider].label
    return {
        "case": case,
        "family": bench_case.family,
        "groups": bench_case.groups,
        "shape": bench_case.shape,
        "heads_q": c.heads_q,
        "heads_kv": c.heads_kv,
        "len_q": c.len_q,
        "head_dim": c.head_dim,
        "causal": c.causal,
        "dtype": "bfloat16",
        "gpu": "NVIDIA H200",
        "provider": provider,
        "label": label,
        "ours": providers.is_ours(provider),
        "rotates": providers.PROVIDERS[provider].rotates,
        "pass": part,
        "mode": mode,
        "status": status,
        "detail": "",
        "ms": ms,
        "p20": 0.98 * ms,
        "p80": 1.03 * ms,
        "rounds": [ms] * 5,
        "calls": 100,
        "tflops": bench_case.flops(part) / ms * 1e-9,
        "peak_mib": 64.0,
        "gate_row_ratio": 3.3,
        "gate_rms_ratio": 1.4,
    } | extra


def _published(mode="graph"):
    """Rows with the published times of the rivals, and ours winning at some shapes and losing at others."""
    rows = []
    figures = {
        "Small-512": (0.0161, 0.076, 0.031, 0.076, 0.0133, 0.030),
        "Small-1K": (0.0290, 0.123, 0.034, 0.076, 0.0258, 0.0258),
        "Llama7B-2K": (0.158, 0.760, 0.186, 0.169, 0.151, 0.135),
        "Llama7B-4K": (0.598, 1.86, 0.594, 0.547, 0.535, 0.478),
        "Llama70B-1K": (0.101, 0.654, 0.125, 0.125, 0.0893, 0.0896),
        "Llama3-8B-4K": (0.571, 1.50, 0.568, 0.513, 0.530, 0.478),
        "Llama3-8B-16K": (3.95, 7.64, 3.92, 3.47, 3.89, 3.39),
        "Long-64K": (15.2, 28.0, 15.0, 13.6, 15.0, 13.3),
    }
    names = ("fused", "hf_sdpa", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")
    for case, times in figures.items():
        rows += [_row(case, name, ms, mode=mode) for name, ms in zip(names, times)]
    return rows


def test_losses_are_printed_like_wins():
    text = report.summary(_published())
    # Small-512, Small-1K, Llama7B-2K, Llama70B-1K beat the strongest separate pair; the other four lose.
    assert "4 not slower, 4 slower" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in cases.TABLE}
    assert set(lines) == set(cases.TABLE)
    assert "0.91x LOSS" in lines["Llama7B-4K"] and "Liger rope + FA4" in lines["Llama7B-4K"]
    assert "0.80x LOSS" in lines["Llama7B-4K"] and "bare FA4" in lines["Llama7B-4K"]
    assert "1.93x" in lines["Small-512"] and "0.83x LOSS" in lines["Small-512"]
    assert len({len(line.rstrip()) for line in text.splitlines()}) > 1


def test_case_report_marks_the_strongest_and_the_reservations():
    rows = [r for r in _published() if r["case"] == "Llama7B-4K"]
    rows.append(_row("Llama7B-4K", "hf_flash_attn", 1.9, status="loose"))
    rows.append(_row("Llama7B-4K", "compiled_fa4", 1.0, status="failed", detail="dq: 7 rows beyond 2.5x") | {"ms": 0.1})
    text = report.case_report(rows)
    marked = {line.rsplit("  ", 1)[0].strip(): line for line in text.splitlines() if " * " in f"{line} "}
    assert any("Liger rope + FA4" in line for line in marked.values())
    assert any("bare FA4" in line and "°" in line for line in text.splitlines())
    assert "~ HF rope + FA2" in text and "1.32 times" in text
    assert "compiled rope + FA4 (fwd graph): FAILED the gate: dq: 7 rows" in text
    body = [line for line in text.splitlines() if line.startswith(("fused", "HF", "Liger", "bare"))]
    assert len(body) == 7 and "compiled" not in "".join(body)


def test_columns_are_aligned():
    text = report.table(["name", "ms"], [["a", "1.0"], ["longer name", "12.25"]])
    assert text.splitlines() == ["name            ms", "-----------  -----", "a              1.0", "longer name  12.25"]


def test_json_lines_come_back_and_the_later_run_wins(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    report.write_lines(path, [_row("Small-1K", "fused", 1.0), _row("Small-1K", "hf_sdpa", 2.0)])
    report.write_lines(path, [_row("Small-1K", "fused", 0.5, gate_row_ratio=float("inf"))])
    assert len(path.read_text().splitlines()) == 3 and "Infinity" not in path.read_text()
    rows = report.read_lines([path])
    assert {r["provider"]: r["ms"] for r in rows} == {"hf_sdpa": 2.0, "fused": 0.5}
    path.write_text('{"case": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        report.read_lines([path])


def test_plots_are_written_with_one_colour_each(tmp_path):
    import matplotlib.image

    files = plots.draw_all(_published(), tmp_path)
    assert {f.name for f in files} == {"tflops_fwd_graph.png", "speedup_fwd_graph.png"}
    for file in files:
        image = matplotlib.image.imread(file)
        assert image.shape[:2] == (1095, 1950) and image[..., :3].std() > 0.05
    assert set(plots.COLOURS) == set(providers.PROVIDERS)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    assert plots.draw_all([], tmp_path / "empty") == []


def test_speedup_bars_go_below_one():
    figure = plots.speedup_bars(_published(), "fwd", "graph")
    bars = figure.axes[0].patches
    heights = [bar.get_height() for bar in bars]
    assert len(bars) == 8 * 3 and min(heights) < 0 < max(heights)
    assert all((bar.get_hatch() == "//") == (bar.get_height() < -0.005) for bar in bars)
    plots._pyplot().close(figure)


# Environment and command line


def test_environment_is_complete():
    facts = environment()
    assert {"gpu", "driver", "torch", "cuda", "cudnn", "triton", "packages", "commit", "date"} == set(facts)
    json.dumps(facts)


def test_commit_comes_from_the_environment_where_it_is_said_there(monkeypatch, tmp_path):
    """Also in a repository: a tree copied to another machine may bring an older one along."""
    monkeypatch.setenv("FUSED_ROPE_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
    monkeypatch.delenv("FUSED_ROPE_COMMIT")
    assert commit() != "0123abcd"
    monkeypatch.setattr("bench.environment.ROOT", tmp_path)
    assert commit() == "unknown"


def test_dry_run_lists_cases_providers_and_what_is_missing(capsys):
    assert command.main(["--dry-run", "--group", "table"]) == 0
    text = capsys.readouterr().out
    for name in (*cases.TABLE, *providers.PROVIDERS):
        assert name in text
    for name, baseline in BASELINES.items():
        if reason := baseline.missing():
            assert reason in text and "pip install" in reason, name


def test_without_a_gpu_the_exit_status_is_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "nowhere"], "unknown group"),
        (["--providers", "nobody"], "unknown provider"),
        (["--passes", "sideways"], "--passes"),
        (["--baseline", "nobody"], "--baseline"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_plot_command(tmp_path, capsys):
    report.write_lines(tmp_path / "rows.jsonl", _published())
    assert command.main(["plot", str(tmp_path / "rows.jsonl"), "--plot-dir", str(tmp_path / "figures")]) == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2
    assert command.main(["plot", str(tmp_path / "none.jsonl")]) == 2


def test_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "bench tune" in text and "bench plot" in text and "--time-budget" in text


def test_provider_selection():
    assert [p.name for p in providers.select(["ours"])] == ["fused", "fused_inline", "fused_prepass", "fused_hopper"]
    assert {p.name for p in providers.select(["bare", "hf_sdpa"])} == {n for n in BASELINES if n.startswith("bare")} | {
        "hf_sdpa"
    }
    assert [p.name for p in providers.select([])] == list(providers.PROVIDERS)


def test_the_sm_90_backend_says_where_it_does_not_run(monkeypatch):
    from fused_rope_attn.runtime import device

    hopper = providers.OURS["fused_hopper"]
    case = testing.Case(1, 2, 2, 128, 128, 128, dtype=torch.bfloat16)
    assert "sm_90" in hopper.unsupported(case)
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    assert hopper.unsupported(case) is None
    assert hopper.unsupported(dataclasses.replace(case, head_dim=256)) is None
    assert "has 264" in hopper.unsupported(dataclasses.replace(case, head_dim=264))
    assert "float32" in hopper.unsupported(dataclasses.replace(case, dtype=torch.float32))
    assert all(providers.OURS[name].unsupported(case) is None for name in providers.OURS)


def test_results_folder_is_inside_the_repository():
    assert Path(command.RESULTS).is_relative_to(ROOT)


# Tuning


def _point(part="fwd", **other):
    point = tune.Point(part, 32, True, "tiny", True, "prepass", torch.float16)
    return dataclasses.replace(point, **other)


def test_proposed_rows_are_what_they_say():
    tile = configs.Tile(128, 64, 8, 2, 128)
    forward = configs.ForwardConfig("prepass", tile, section_bytes=8 << 20, pdl=True, tma=True)
    facts = {"gpu": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-21T10:00:00+00:00"}
    current = tune.Timed(configs.ForwardConfig("prepass", configs.Tile(64, 64, 4, 3)), 0.7, 0.69, 0.71)
    text = tune.proposal(_point(head_dim=128), "sm_90", tune.Timed(forward, 0.6, 0.59, 0.61), current, facts)
    assert "H200, triton 3.6.0, 2026-11-21: 0.6000 ms" in text and "was 0.7000 (64x64 w4 s3)" in text
    (row,) = eval(f"[{text}]", {"Row": configs.Row, "Tile": configs.Tile})
    assert row.config("sm_90", "prepass") == forward
    assert row.matches("sm_90", 2, 128, "prepass", True, "tiny", True)
    for other in (
        ("sm_80", 2, 128, "prepass", True, "tiny", True),
        ("sm_90", 2, 128, "inline", True, "tiny", True),
        ("sm_90", 2, 128, "prepass", False, "tiny", True),
        ("sm_90", 2, 128, "prepass", True, "long", True),
        ("sm_90", 2, 128, "prepass", True, "tiny", False),
    ):
        assert not row.matches(*other)


@pytest.mark.parametrize("kernel", ["tile", "dkdv", "dq"])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_there_are_tiles_to_try(head_dim, element_size, kernel):
    tiles = list(tune.tile_grid(head_dim, element_size, kernel))
    assert 4 <= len(tiles) <= 60 and len(set(tiles)) == len(tiles)


def test_candidates_begin_with_the_current_configuration():
    for part, kernel in (("fwd", "tile"), ("bwd", "dkdv"), ("bwd", "dq")):
        point = _point(part, head_dim=128, bucket="medium")
        tried = tune.candidates(point, "sm_90", kernel)
        assert tried[0] == point.current("sm_90") and len(set(tried)) == len(tried)
        assert {config.tma for config in tried} == {False, True}
        inline = dataclasses.replace(point, strategy="inline")
        assert not any(config.tma for config in tune.candidates(inline, "sm_90", kernel)[1:])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_a_search_gates_times_and_ranks(part, monkeypatch):
    monkeypatch.setitem(tune._SHAPES, "tiny", (1, 4, 33))
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    point = _point(part)

    def grid(point, arch, kernel):
        current = point.current(arch)
        return [current, dataclasses.replace(current, **{kernel: configs.Tile(32, 32, 1, 1)})]

    finalists, refused = tune.search(point, WallClock(), "interpreter", grid=grid, sections=(0,), rounds=1)
    assert refused == [] and len(finalists) == 2 if part == "fwd" else len(finalists) in (3, 4)
    assert [timed.ms for timed in finalists] == sorted(timed.ms for timed in finalists)
    assert point.current("interpreter") in [timed.config for timed in finalists]
    current = next(timed for timed in finalists if timed.config == point.current("interpreter"))
    text = tune._finalists(finalists, current)
    assert "(current)" in text and "1.00x" in text


def test_a_candidate_that_breaks_or_lies_is_refused(monkeypatch):
    monkeypatch.setitem(tune._SHAPES, "tiny", (1, 4, 64))
    point = _point()
    reference = testing.run_reference(testing.make_inputs(point.case), point.case)

    def call(self, config):
        if config.tile.num_stages == 3:
            raise_it = RuntimeError("out of resource: shared memory, Required: 300000")
            return lambda: (_ for _ in ()).throw(raise_it)
        factor = 2.0 if config.tile.num_stages == 2 else 1.0
        return lambda: (reference.o * factor, reference.lse)

    monkeypatch.setattr(tune.Bench, "call", call)

    def grid(point, arch, kernel):
        current = point.current(arch)
        return [current, *(dataclasses.replace(current, tile=configs.Tile(32, 32, 1, stages)) for stages in (1, 2, 3))]

    finalists, refused = tune.search(point, WallClock(), "interpreter", grid=grid, sections=(0,), rounds=1)
    assert len(finalists) == 2 and len(refused) == 2
    text = tune._refusals(refused)
    assert "1 RuntimeError" in text and "! 32x32 w1 s2: FAILED the gate" in text


def test_tune_command_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["tune"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_tune_points():
    arguments = tune._parser().parse_args(["--head-dims", "128", "--gqa", "both", "--buckets", "medium,long"])
    points = tune._points(arguments)
    assert len(points) == len(set(points)) == 2 * 2 * 2 * 2
    assert {p.case.len_q for p in points} == {4096, 16384}
    assert {(p.case.heads_q, p.case.heads_kv) for p in points} == {(32, 32), (32, 8)}
    for point in points:
        assert configs.bucket(point.case.len_q) == point.bucket
