"""Clocks at a machine of arithmetic, the arithmetic of times, and interleaving."""

import gc

import pytest
import torch

from bench import load, timing
from bench.timing import Measurement, interleave, ratio
from tests.support.machine import Machine


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    machine.install(monkeypatch, timing, load)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)
    return machine


def gpu_clock(**options):
    return timing.GpuClock(torch.device("cpu"), **options)


def load_clock():
    return load.LoadClock(torch.device("cpu"))


def test_device_time_and_the_calls_of_a_round(machine):
    clock = gpu_clock()
    assert clock.sample(machine.work, 3) == pytest.approx([0.1] * 3)
    assert [clock.calls_for(machine.work, round_ms) for round_ms in (0.05, 1.0, 100.0)] == [1, 10, 100]


def test_memory_of_a_call(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 20)
    assert gpu_clock().peak_mib(machine.work) == 2.0


@pytest.mark.parametrize("reads", [True, False])
def test_the_cache_is_flushed_by_reading_or_by_writing(machine, reads):
    clock = gpu_clock(reads=reads)
    clock._bytes.fill_(1)
    clock.sample(machine.work, 1)
    assert clock._bytes.any() == reads and (clock._sum == 16 or not reads)


@pytest.mark.parametrize("collects", [True, False])
def test_host_time_is_taken_in_bursts_that_wait_for_nothing(machine, monkeypatch, collects):
    """The device is waited for between bursts, out of the time that is taken, and no garbage is collected in them."""
    monkeypatch.setattr(timing, "_BURST", 3)
    clock, collected = gpu_clock(), []

    def call():
        collected.append(gc.isenabled())
        machine.work()
        machine.sleep(2e-6)

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        samples = clock.host_sample(call, 7)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert samples == pytest.approx([0.002] * 3)  # of 3, 3 and 1 calls of 2 µs
    assert collected == [collects, *[False] * 7] and machine.now == machine.end


@pytest.mark.parametrize(("clock", "calls"), [(gpu_clock, 1), (load_clock, load.CALLS)])
def test_a_graph_that_leaves_its_outputs_unwritten_is_refused(machine, clock, calls):
    """Two graphs' calls warm up, and one graph's are captured; of these the last one's outputs count."""
    out, made = torch.zeros(4), []
    replay = clock().capture(lambda: lambda: machine.work(out))
    out.zero_()
    replay()
    assert out.tolist() == [1.0] * 4

    def call():
        made.append(machine.work(torch.zeros(1)))
        return (made[-1], made[-1]) if len(made) < 3 * calls else (torch.zeros(1), made[-1])

    with pytest.raises(RuntimeError, match="does not write its outputs: work ran on another stream"):
        clock().capture(lambda: call)
    assert len(made) == 3 * calls


def test_a_failed_capture_restores_the_stream(machine):
    streams = []

    def third_call_fails():
        streams.append(machine.streams)
        if len(streams) == 3:
            raise RuntimeError("not while capturing")
        return machine.work(torch.zeros(1))

    with pytest.raises(RuntimeError, match="not while capturing"):
        gpu_clock().capture(lambda: third_call_fails)
    assert streams == [1, 1, 1] and machine.streams == 0


def test_ratios_are_taken_within_rounds():
    """A clock that slows both sides down by half in the last rounds leaves their ratio as it is."""
    assert ratio([1.0, 1.0, 1.5, 1.5, 1.5], [1.0, 1.0, 1.5, 1.5, 1.5]) == 1.0
    assert ratio([2.0, 1.0, 9.0], [1.0, 1.0, 3.0]) == 2.0
    measurement = Measurement([[1.0, 3.0, 2.0], [4.0]])
    assert measurement.round_medians == [2.0, 4.0]
    assert measurement.quantiles(0.5, 0.2, 0.8) == pytest.approx([2.5, 1.6, 3.4])


def interleaved(names, rounds, fails_after=100):
    """Return the order of all samples, the measurements, and who failed; "bad" fails after some samples."""
    order = []

    def sample(fn, calls):
        order.append(fn())
        if fn() == "bad" and len(order) > fails_after:
            raise RuntimeError("broke")
        return [1.0] * calls

    return order, *interleave({name: lambda name=name: name for name in names}, sample, dict.fromkeys(names, 2), rounds)


def test_rounds_go_there_and_back_in_changing_orders():
    names = ["a", "b", "c", "d", "e"]
    order, _, _ = interleaved(names, 6)
    rounds = [order[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(one) == names for one in rounds)
    assert all(rounds[i + 1] == rounds[i][::-1] for i in (0, 2, 4)) and rounds[0] != rounds[2]
    predecessors = {one[i - 1] for one in rounds for i in range(1, 5) if one[i] == "a"}
    assert len(predecessors) > 1, "a always follows the same neighbour"
    assert order == interleaved(names, 6)[0], "a run can be repeated"


def test_who_fails_drops_out():
    """A sample in the first round, the failure in the second, none after it."""
    order, measured, failed = interleaved(["a", "bad", "c"], 3, fails_after=3)
    assert order.count("bad") == 2 and list(failed) == ["bad"] and list(measured) == ["a", "c"]
    assert measured["c"].rounds == [[1.0, 1.0]] * 3
