"""Arithmetic of times, interleaving, and the clock of a GPU with stand-ins for CUDA."""

import time

import numpy
import pytest
import torch

from bench import timing
from bench.timing import Measurement, interleave, quantile, ratio


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
