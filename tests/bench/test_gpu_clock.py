"""The clock of a GPU with fake CUDA streams, graphs and events."""

import gc
import time

import pytest
import torch

from bench import timing


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


@pytest.mark.parametrize("reads", [True, False])
def test_the_cache_is_flushed_by_reading_or_by_writing(gpu_clock, monkeypatch, reads):
    seen = []
    monkeypatch.setattr(torch, "sum", lambda x, dim, out: seen.append("read"))
    clock = timing.GpuClock(torch.device("cpu"), reads=reads)
    clock._bytes.fill_(1)
    clock.sample(lambda: None, 1)
    assert bool(seen) == reads and clock._bytes.any() == reads


@pytest.mark.parametrize("collects", [True, False])
def test_host_time_is_taken_in_bursts_that_wait_for_nothing(gpu_clock, monkeypatch, collects):
    """The device is waited for between bursts, out of the time that is taken, and no garbage is collected in them."""
    events, now = [], [0]
    monkeypatch.setattr(timing, "_BURST", 3)
    monkeypatch.setattr(gpu_clock, "synchronize", lambda: (events.append("wait"), now.__setitem__(0, now[0] + 10**9)))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def call():
        events.append("collects" if gc.isenabled() else "call")
        now[0] += 2000

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        samples = gpu_clock.host_sample(call, 7)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert samples == pytest.approx([0.002] * 3)  # of 3, 3 and 1 calls of 2 µs
    assert events[1:] == ["wait", *["call"] * 3, "wait", *["call"] * 3, "wait", "call", "wait"]


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
