"""Clocks at a machine of arithmetic, the arithmetic of times, interleaving, and ``--mode load``."""

import gc
import sys
import types

import pytest
import torch

from bench import load, timing
from bench.attention import providers
from bench.load import CALLS, Load, LoadClock, Loads, Nvml
from bench.timing import Measurement, interleave, ratio
from tests.support.bench import TINY, WallClock, scripted, status
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
    return LoadClock(torch.device("cpu"))


def test_device_time_and_the_calls_of_a_round(machine):
    clock = gpu_clock()
    assert clock.sample(machine.work, 3) == pytest.approx([0.1] * 3)
    assert [clock.calls_for(machine.work, round_ms) for round_ms in (0.05, 1.0, 100.0)] == [1, 10, 100]


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


@pytest.mark.parametrize(("clock", "calls"), [(gpu_clock, 1), (load_clock, CALLS)])
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


# Energy


def _clock(monkeypatch, **machine):
    machine = Machine(**machine)
    machine.install(monkeypatch, load)
    return machine, LoadClock(torch.device("cpu"), machine)


@pytest.mark.parametrize("call_ms", [0.02, 12.0])
@pytest.mark.parametrize("step", [0.02, 0.1])
def test_energy_is_power_times_time_whatever_the_steps_of_the_counter(monkeypatch, call_ms, step):
    """650 W for every call, while a reading at the ends of the sample would be late by up to a step."""
    machine, clock = _clock(monkeypatch, call_ms=call_ms, step=step)
    out = torch.zeros(1)
    graph = clock.capture(lambda: lambda: machine.work(out))
    replays = clock.calls_for(graph, 700.0)
    assert replays * CALLS * call_ms == pytest.approx(700.0, rel=0.1)
    machine.synchronize()
    machine.sleep(0.5 * step + 3e-3)
    machine.gaps.clear()
    found = clock.sample(graph, replays)
    assert found.calls == replays * CALLS
    assert found.ms == pytest.approx(call_ms)
    assert found.mj == pytest.approx(650.0 * call_ms, rel=0.01)
    assert machine.gaps[0] > 0 and not any(machine.gaps[1:]), "nothing waits between the calls of a sample"


def test_calls_that_are_not_measured_come_first(monkeypatch):
    """The card draws less during the first 45 of 345 replays; what it draws afterwards is what counts."""
    machine, clock = _clock(monkeypatch)
    warm = 45 * CALLS * 1e-4  # seconds

    class Counter:
        def millijoules(self):
            at = 0.02 * int(machine.now / 0.02)
            return round(1e3 * (400 * min(at, warm) + 650 * max(0, at - warm)))

    def replay():
        for _ in range(CALLS):
            machine.work()

    clock.counter = Counter()
    found = clock.sample(replay, 300)
    assert len(machine.gaps) == (45 + 300) * CALLS and found.calls == 300 * CALLS
    assert found.ms == pytest.approx(0.1) and found.mj == pytest.approx(65, rel=0.005)


def test_a_counter_that_does_not_move_is_an_error_and_no_figure(monkeypatch):
    machine, clock = _clock(monkeypatch, call_ms=1.0, step=10.0)
    with pytest.raises(RuntimeError, match="must move twice a sample, not 0 times: give more --round-ms"):
        clock.sample(machine.work, 100)


class NVMLError(Exception):
    pass


def refusing(*given):
    raise NVMLError("Not Supported")


LACKS = "Toy 9000 must have an energy counter that NVML reads, but NVML says: Not Supported"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        (None, "pip install nvidia-ml-py"),
        ({"nvmlInit": refusing}, LACKS),
        ({"nvmlDeviceGetTotalEnergyConsumption": refusing}, LACKS),
    ],
)
def test_the_counter_of_the_card_is_found_or_said_to_be_missing(monkeypatch, changed, message):
    """The card has used 5 J."""
    nvml = {"NVMLError": NVMLError, "nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": {"GPU-1234": "card"}.get}
    nvml["nvmlDeviceGetTotalEnergyConsumption"] = {"card": 5000}.get
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy 9000")
    module = None if changed is None else types.SimpleNamespace(**nvml | changed)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    if message is None:
        assert Nvml(torch.device("cuda", 0)).millijoules() == 5000
    else:
        with pytest.raises(RuntimeError, match=message):
            Nvml(torch.device("cuda", 0))


class Steady(WallClock):
    """Every provider takes 1, 2 and 1.5 ms at 700, 650 and 600 W."""

    measurement = Loads

    def __init__(self):
        super().__init__()
        self.rounds = {}

    def sample(self, fn, calls):
        index = self.rounds[fn] = self.rounds.get(fn, -1) + 1
        ms = (1.0, 2.0, 1.5)[index]
        return Load(10, ms, ms * (700.0, 650.0, 600.0)[index])


OPTIONS = "--mode load --rounds 3 --providers fused,rival,wrong"


def test_rows_of_energy(measure, capsys):
    """Times and energies are medians over rounds, of providers that have passed the gate."""
    people = [providers.OURS, scripted("rival"), scripted("wrong", lambda *given: 2 * providers.fused(*given))]
    exit_status, rows = measure("attention", [TINY], people, *OPTIONS.split(), clock=Steady())
    assert exit_status == 0 and status(rows) == {"fused": "ok", "rival": "ok", "wrong": "failed"}
    assert {(row["provider"], row["pass"]) for row in rows if row["status"] == "ok"} == {
        (name, part) for name in ("fused", "rival") for part in ("fwd", "bwd")
    }
    for row in rows[1:]:
        assert (row["mode"], row["ms"], row["rounds"], row["calls"]) == ("load", 1.5, [1.0, 2.0, 1.5], 30)
        assert row["mj_rounds"] == [700.0, 1300.0, 900.0] and row["mj"] == 900.0 and row["p20"] < 1.5 < row["p80"]
        assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / 1.5 * 1e-9)
    assert "under load" in (text := capsys.readouterr().out) and "900.0" in text and "1.00x" in text
