"""``python -m bench --mode load``: the clock under load at a machine of arithmetic, and its rows."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from bench import __main__ as command, load, report
from bench.attention import cases, providers, suite as attention
from bench.attention.suite import ATTENTION, LOAD_USUAL
from bench.load import CALLS, Load, LoadClock, Loads, Nvml
from tests.support.bench import FACTS, TINY, right, run, scripted
from tests.support.clocks import WallClock
from tests.support.machine import Machine


def _clock(monkeypatch, **machine):
    machine = Machine(**machine)
    machine.install(monkeypatch, load)
    return machine, LoadClock(torch.device("cpu"), machine)


# The clock


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


def test_a_graph_that_writes_nothing_is_refused(monkeypatch):
    """The check of ``timing.DeviceClock`` holds for graphs of several calls too: the last call loses its output."""
    machine, clock = _clock(monkeypatch)
    calls = []

    def call():
        calls.append(machine.work(torch.zeros(1)))
        return calls[-1] if len(calls) < 3 * CALLS else torch.zeros(1)

    with pytest.raises(RuntimeError, match="does not write its outputs"):
        clock.capture(lambda: call)
    assert len(calls) == 3 * CALLS  # two graphs' calls to warm up and one that is captured


def test_rows_of_energy_hold_every_round():
    loads = Loads()
    for ms, watts in ((1.0, 700.0), (2.0, 650.0), (1.5, 600.0)):
        loads.rounds.append(Load(10, ms, ms * watts))
    row = loads.fields()
    assert row["ms"] == 1.5 and row["rounds"] == [1.0, 2.0, 1.5] and row["calls"] == 30
    assert row["mj_rounds"] == [700.0, 1300.0, 900.0] and row["mj"] == 900.0
    assert row["p20"] < row["ms"] < row["p80"]
    assert loads.round_medians == [1.0, 2.0, 1.5]


# NVML


class _NVMLError(Exception):
    pass


def _pynvml(**functions):
    """Return a pynvml with a card that has used 5 J; ``functions`` replace its own."""
    module = types.SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1234": "card"}[uuid],
        nvmlDeviceGetTotalEnergyConsumption=lambda card: {"card": 5000}[card],
    )
    module.__dict__.update(functions)
    return module


def _raising(*args):
    raise _NVMLError("Not Supported")


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy 9000")
    return torch.device("cuda", 0)


def test_the_card_is_found_by_its_identity(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _pynvml())
    assert Nvml(card).millijoules() == 5000


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "pip install nvidia-ml-py"),
        (_pynvml(nvmlInit=_raising), "Toy 9000 must have an energy counter that NVML reads, but NVML says: Not Supp"),
        (_pynvml(nvmlDeviceGetTotalEnergyConsumption=_raising), "but NVML says: Not Supported"),
    ],
)
def test_a_machine_without_a_counter_is_refused_before_anything_runs(card, monkeypatch, capsys, module, message):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(RuntimeError, match=message):
        Nvml(card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bench.command.environment", lambda: FACTS)
    assert command.main(["--mode", "load"]) == 2
    assert message in capsys.readouterr().err


# The suite


class _LoadWallClock(WallClock):
    """Every provider takes 2 ms at 600 W."""

    measurement = Loads

    def __init__(self):
        self.order = []

    def sample(self, fn, calls):
        self.order.append(fn)
        return Load(calls, 2.0, 1200.0)


def _run(people, clock=None, **options):
    clock = clock or _LoadWallClock()
    options = {"passes": ("fwd", "bwd"), "modes": ("load",)} | options
    return run(ATTENTION, TINY, providers=people, clock=clock, **options)


def test_a_run_measures_who_passed_the_gate():
    people = [
        providers.OURS,
        providers.table("plain")["hf_flash_attn"],
        scripted("wrong", lambda *x: 2 * right(*x)),
        scripted("absent", right, lacks="pip install absent"),
        scripted("forward", right, backward=False),
    ]
    rows, _ = _run(people)
    assert {(row["provider"], row["pass"]) for row in report.timed(rows)} == {
        *((name, part) for name in ("fused", "hf_flash_attn") for part in ("fwd", "bwd")),
        ("forward", "fwd"),
    }
    assert {row["provider"]: row["status"] for row in rows if row["pass"] is None} == {
        "wrong": "failed",
        "absent": "missing",
    }
    (skipped,) = (row for row in rows if (row["provider"], row["pass"]) == ("forward", "bwd"))
    assert skipped["status"] == "unsupported" and skipped["detail"] == "forward has a forward pass only"
    for row in report.timed(rows):
        assert row["mode"] == "load" and row["mj"] == 1200.0
        assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / 2.0 * 1e-9)
        assert {"gpu", "driver", "torch", "triton", "commit", "date"} <= set(row)


def test_every_second_round_goes_backwards():
    """A provider that runs after a hungry neighbour in one round runs before it in the next."""
    clock = _LoadWallClock()
    _run([scripted(name, right, backward=False) for name in "abc"], clock, passes=("fwd",), rounds=4)
    first, second, third, fourth = (clock.order[i : i + 3] for i in range(0, 12, 3))
    assert len(set(first)) == 3 and second == first[::-1] and fourth == third[::-1] and third != first


def test_the_command_line_selects_and_measures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    suite = replace(ATTENTION, cases=(TINY,), clock=lambda device, options: _LoadWallClock())
    monkeypatch.setattr(attention, "ATTENTION", suite)
    monkeypatch.setattr("bench.command.environment", lambda: FACTS)
    file = tmp_path / "rows.jsonl"
    options = ["--mode", "load", "--cases", "tiny-64", "--providers", "fused,hf_sdpa"]
    assert command.main([*options, "--out", str(file), "--rounds", "2"]) == 0
    assert "1.00x" in capsys.readouterr().out
    rows = report.read_file(file)
    assert {(row["provider"], row["pass"], row["mj"]) for row in rows} == {
        (name, part, 1200.0) for name in ("fused", "hf_sdpa") for part in ("fwd", "bwd")
    }


def test_what_can_be_asked_for(capsys):
    assert command.main(["--mode", "load", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*cases.TABLE, *LOAD_USUAL)) and "Host" not in text and "hf_sdpa" not in text
    options = ["--mode", "load", "--dry-run"]
    assert command.main([*options, "--cases", "LLAMA70B+1k,llama7b-2k", "--providers", "liger_fa3"]) == 0
    text = capsys.readouterr().out
    assert "Llama70B-1K" in text and "Llama7B-2K" in text and "Small-512" not in text and "liger_fa3" in text
    for more, message in (
        (["--cases", "Llama9B"], "no case fits 'Llama9B'; groups are nineteen"),
        (["--round-ms", "0"], "--round-ms must be above 0"),
        (["--providers", "nobody"], "unknown provider nobody"),
        (["--passes", "sideways"], "--passes takes fwd, fwd_grad, bwd, both"),
        (["--mode", "load,graph"], "it takes no other mode with it"),
    ):
        assert command.main([*options, *more]) == 2
        assert message in capsys.readouterr().err
