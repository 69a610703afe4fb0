"""Clocks at a machine of arithmetic, the arithmetic of times, interleaving, and ``--mode load``."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bench import load, timing
from bench.load import CALLS, Load, LoadClock, Loads
from bench.timing import Measurement, interleave, ratio

CPU = torch.device("cpu")


class Machine:
    """A GPU that is arithmetic: a queue of work in its own time, and an energy counter.

    Time passes by sleeping and by waiting for the device, which draws 650 W while it works and 100 W else; the counter
    shows the energy up to the last multiple of ``step`` seconds. ``gaps``: seconds that the device waited between two
    pieces of work. ``streams``: how many streams are entered.
    """

    def __init__(self, call_ms=0.1, step=0.02):
        self.now, self.end, self.call_ms, self.step, self.streams = 0.0, 0.0, call_ms, step, 0
        self.gaps, self.outputs = [], []

    def work(self, out=None):
        begin = max(self.now, self.end)
        self.gaps.append(begin - self.end)
        self.end = begin + self.call_ms * 1e-3
        self.outputs.append(out)
        return out if out is None else out.fill_(1.0)

    def synchronize(self, device=None):
        self.now = max(self.now, self.end)

    def sleep(self, seconds):
        self.now += seconds

    def millijoules(self):
        """Return the energy up to the last step. The device must not have waited after it."""
        at = self.step * int(self.now / self.step + 1e-9)
        idle = at - len(self.gaps) * self.call_ms * 1e-3 + max(0.0, self.end - at)
        return round(1e3 * (650 * (at - idle) + 100 * idle))

    def install(self, monkeypatch):
        machine = self

        class Event:
            def __init__(self, enable_timing=False):
                self.timed = enable_timing

            def record(self):
                self.at = max(machine.now, machine.end)

            def query(self):
                return machine.now >= self.at

            def elapsed_time(self, end):
                assert self.timed and end.timed
                return 1e3 * (end.at - self.at)

        @contextmanager
        def stream(stream):
            machine.streams += 1
            try:
                yield
            finally:
                machine.streams -= 1

        class Graph:
            def capture_begin(self):
                self.before = len(machine.outputs)

            def capture_end(self):
                self.outputs = machine.outputs[self.before :]

            def replay(self):
                for out in self.outputs:
                    machine.work(out)

        clock = SimpleNamespace(perf_counter=lambda: machine.now, sleep=machine.sleep)
        for module in (timing, load):
            monkeypatch.setattr(module, "time", clock)
        replaced = {"Event": Event, "CUDAGraph": Graph, "stream": stream, "Stream": lambda *device: None}
        for name, stand_in in (replaced | {"synchronize": self.synchronize, "empty_cache": lambda: None}).items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)
        return self


@pytest.fixture
def machine(monkeypatch):
    return Machine().install(monkeypatch)


def test_device_time_and_the_calls_of_a_round(machine):
    clock = timing.GpuClock(CPU)
    assert clock.sample(machine.work, 3) == pytest.approx([0.1] * 3)
    assert [clock.calls_for(machine.work, round_ms) for round_ms in (0.05, 1.0, 100.0)] == [1, 10, 100]


@pytest.mark.parametrize("reads", [True, False])
def test_the_cache_is_flushed_by_reading_or_by_writing(machine, reads):
    clock = timing.GpuClock(CPU, reads=reads)
    clock._bytes.fill_(1)
    clock.sample(machine.work, 1)
    assert clock._bytes.any() == reads and (clock._sum == 16 or not reads)


def test_host_time_is_taken_in_bursts_that_wait_for_nothing(machine, monkeypatch):
    """The device is waited for between bursts, out of the time that is taken, and no garbage is collected in them."""
    monkeypatch.setattr(timing, "_BURST", 3)
    clock, collected, collects = timing.GpuClock(CPU), [], gc.isenabled()

    def call():
        collected.append(gc.isenabled())
        machine.work()
        machine.sleep(2e-6)

    assert clock.host_sample(call, 7) == pytest.approx([0.002] * 3)  # of 3, 3 and 1 calls of 2 µs
    assert collected == [collects, *[False] * 7] and machine.now == machine.end and gc.isenabled() == collects


@pytest.mark.parametrize(("clock", "calls"), [(timing.GpuClock, 1), (LoadClock, CALLS)], ids=["single", "load"])
def test_a_graph_that_leaves_its_outputs_unwritten_is_refused(machine, clock, calls):
    """Two graphs' calls warm up, and one graph's are captured; of these the last one's outputs count."""
    out, made = torch.zeros(4), []
    replay = clock(CPU).capture(lambda: lambda: machine.work(out))
    out.zero_()
    replay()
    assert out.tolist() == [1.0] * 4

    def call():
        made.append(machine.work(torch.zeros(1)))
        return (made[-1], made[-1]) if len(made) < 3 * calls else (torch.zeros(1), made[-1])

    with pytest.raises(RuntimeError, match="does not write its outputs: work ran on another stream"):
        clock(CPU).capture(lambda: call)
    assert len(made) == 3 * calls


def test_a_failed_capture_restores_the_stream(machine):
    streams = []

    def third_call_fails():
        streams.append(machine.streams)
        return machine.work(torch.zeros(1)) if len(streams) < 3 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        timing.GpuClock(CPU).capture(lambda: third_call_fails)
    assert streams == [1, 1, 1] and machine.streams == 0


def test_ratios_are_taken_within_rounds():
    """A clock that slows both sides down by half in the last rounds leaves their ratio as it is."""
    assert ratio([1.0, 1.0, 1.5, 1.5, 1.5], [1.0, 1.0, 1.5, 1.5, 1.5]) == 1.0
    assert ratio([2.0, 1.0, 9.0], [1.0, 1.0, 3.0]) == 2.0
    measurement = Measurement([[1.0, 3.0, 2.0], [4.0]])
    assert measurement.round_medians == [2.0, 4.0]
    assert measurement.quantiles(0.5, 0.2, 0.8) == pytest.approx([2.5, 1.6, 3.4])


def interleaved(names, rounds):
    order = []

    def sample(fn, calls):
        order.append(fn())
        return [1.0 if fn() != "bad" or len(order) <= 3 else 1 / 0] * calls

    return order, *interleave({name: lambda name=name: name for name in names}, sample, dict.fromkeys(names, 2), rounds)


def test_rounds_go_there_and_back_in_changing_orders():
    order, _, _ = interleaved("abcde", 6)
    rounds = [order[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(one) == [*"abcde"] for one in rounds)
    assert all(rounds[i + 1] == rounds[i][::-1] for i in (0, 2, 4)) and rounds[0] != rounds[2]
    predecessors = {one[i - 1] for one in rounds for i in range(1, 5) if one[i] == "a"}
    assert len(predecessors) > 1, "a always follows the same neighbour"
    assert order == interleaved("abcde", 6)[0], "a run can be repeated"


def test_who_fails_drops_out():
    order, measured, failed = interleaved(["a", "bad", "c"], 3)
    assert order.count("bad") == 2 and list(failed) == ["bad"] and list(measured) == ["a", "c"]
    assert measured["c"].rounds == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(("call_ms", "step"), [(0.02, 0.02), (0.02, 0.1), (12.0, 0.1)])
def test_energy_is_power_times_time_whatever_the_steps_of_the_counter(monkeypatch, call_ms, step):
    """650 W for every call, while a reading at the ends of the sample would be late by up to a step."""
    machine = Machine(call_ms, step).install(monkeypatch)
    clock, out = LoadClock(CPU, machine), torch.zeros(1)
    graph = clock.capture(lambda: lambda: machine.work(out))
    replays = clock.calls_for(graph, 700.0)
    assert replays * CALLS * call_ms == pytest.approx(700.0, rel=0.1)
    machine.synchronize()
    machine.sleep(0.5 * step + 3e-3)
    machine.gaps.clear()
    found = clock.sample(graph, replays)
    assert found.calls == replays * CALLS and found.ms == pytest.approx(call_ms)
    assert found.mj == pytest.approx(650.0 * call_ms, rel=0.01)
    assert machine.gaps[0] > 0 and not any(machine.gaps[1:]), "nothing waits between the calls of a sample"


def test_calls_that_are_not_measured_come_first(machine):
    """The card draws less during the first 45 of 345 replays; what it draws afterwards is what counts."""
    warm = 45 * CALLS * 1e-4  # seconds

    def millijoules():
        at = 0.02 * int(machine.now / 0.02)
        return round(1e3 * (400 * min(at, warm) + 650 * max(0, at - warm)))

    clock = LoadClock(CPU, SimpleNamespace(millijoules=millijoules))
    found = clock.sample(lambda: [machine.work() for _ in range(CALLS)], 300)
    assert len(machine.gaps) == (45 + 300) * CALLS and found.calls == 300 * CALLS
    assert found.ms == pytest.approx(0.1) and found.mj == pytest.approx(65, rel=0.005)


def test_a_counter_that_does_not_move_is_an_error_and_no_figure(monkeypatch):
    machine = Machine(1.0, 10.0).install(monkeypatch)
    with pytest.raises(RuntimeError, match="must move twice a sample, not 0 times: give more --round-ms"):
        LoadClock(CPU, machine).sample(machine.work, 100)


def test_energies_of_a_row_are_medians_over_rounds():
    fields = Loads([Load(10, ms, ms * watts) for ms, watts in ((1.0, 700.0), (2.0, 650.0), (1.5, 600.0))]).fields()
    assert (fields["ms"], fields["calls"], fields["mj"]) == (1.5, 30, 900.0)
    assert fields["mj_rounds"] == [700.0, 1300.0, 900.0] and fields["p20"] < 1.5 < fields["p80"]
