"""A clock that loads the card: CUDA graphs back to back, and the power that the card draws meanwhile.

A card under load sits at its power limit or near it, and its clock follows. Only the steady state counts, so that a
sample begins with a stretch that is not measured. The energy of a call is the power of the card times the time of a
call: both are constant in the steady state, and each is measured over the stretch that suits it. Time is taken by CUDA
events around all calls. Power is taken between the first and the last step of the energy counter, because the counter
moves in steps of tens of milliseconds and a reading between two of them is late by an unknown share.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.timing import DeviceClock, Measurement, quantile

_WARM_SHARE = 0.15  # of the replays of a sample: not measured, so that the card's clock settles
_GRAPH_MS = 1.0  # the least duration of a graph, filled with several calls, so that replaying costs nothing
_MOST_CALLS = 64  # in one graph
_BURST_MS = 5.0  # of replays that are queued at once
_AHEAD = 4  # bursts in the queue, so that the device does not wait while NVML answers
_POLL_S = 2e-4


class Nvml:
    """The counter of one CUDA device. It counts the whole card with its memory, and all processes on it.

    RuntimeError says what was missing where NVML, the card or its energy counter cannot be reached.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError:
            raise RuntimeError("energy is read through NVML: pip install nvidia-ml-py") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            # By its identity, because NVML numbers cards without CUDA_VISIBLE_DEVICES.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._card: Any = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self.millijoules()
        except pynvml.NVMLError as error:
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(f"{name} must have an energy counter that NVML reads, but NVML says: {error}") from error

    def millijoules(self) -> int:
        """Return the energy since the driver was loaded. It moves in steps, some tens of milliseconds apart."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)

    def megahertz(self) -> int:
        """Return the present clock of the multiprocessors."""
        return self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM)

    def limit_watts(self) -> float | None:
        """Return the power limit in force, or None where the card does not say."""
        try:
            return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / 1e3
        except self._nvml.NVMLError:
            return None


@dataclass(frozen=True)
class Load:
    """One sample: ``calls`` calls of ``ms`` each, at ``watts`` and ``mhz``; ``mj`` is the energy of a call."""

    calls: int
    ms: float
    watts: float
    mhz: float

    @property
    def mj(self) -> float:
        return self.watts * self.ms


class Loads(Measurement):
    """A ``Load`` for each round."""

    rounds: list[Any]

    @property
    def samples(self) -> list[float]:
        return [load.ms for load in self.rounds]

    round_medians = samples

    def fields(self) -> dict[str, Any]:
        """Return what a result row says: times, then median and rounds of the other figures."""
        row = super().fields() | {"calls": sum(load.calls for load in self.rounds)}
        for figure in ("mj", "watts", "mhz"):
            values = [getattr(load, figure) for load in self.rounds]
            row |= {figure: quantile(values, 0.5), f"{figure}_rounds": values}
        return row


class Graph(NamedTuple):
    """A captured graph of ``calls`` calls; calling it replays it."""

    replay: Callable[[], Any]
    calls: int

    def __call__(self) -> None:
        self.replay()


class LoadClock(DeviceClock):
    """A clock whose samples are a ``Load`` each."""

    measurement = Loads

    def __init__(self, device: torch.device, counter: Any):
        super().__init__(device)
        self.counter = counter

    def capture(self, make: Callable[[], Callable[[], Any]]) -> Graph:
        """Capture a graph of as many calls as last ``_GRAPH_MS``; the outputs of the last call are checked."""
        once = Graph(super().capture(make), 1)
        calls = max(1, min(_MOST_CALLS, math.ceil(_GRAPH_MS / self._replay_ms(once))))
        if calls == 1:
            return once
        del once  # free its memory before the next graph takes as much

        def make_several() -> Callable[[], Any]:
            fn = make()

            def several() -> Any:
                for _ in range(calls - 1):
                    fn()
                return fn()

            return several

        return Graph(super().capture(make_several), calls)

    def calls_for(self, fn: Graph, round_ms: float) -> int:
        """Return how many replays fill ``round_ms`` of device time."""
        return max(1, round(round_ms / self._replay_ms(fn)))

    def sample(self, fn: Graph, calls: int) -> Load:
        """Replay ``calls`` times, after a share that is not measured, and watch the card.

        RuntimeError where the energy counter moves less than twice meanwhile.
        """
        each = max(1, round(_BURST_MS / self._replay_ms(fn)))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._burst_by_burst(fn, math.ceil(_WARM_SHARE * calls), each, lambda: None)
        watch = Watch(self.counter)
        begin.record()
        self._burst_by_burst(fn, calls, each, watch.look)
        end.record()
        self.synchronize()
        ms = begin.elapsed_time(end) / (calls * fn.calls)
        return Load(calls * fn.calls, ms, *watch.watts_and_mhz())

    def _burst_by_burst(self, fn: Graph, replays: int, each: int, look: Callable[[], None]) -> None:
        """Queue replays in bursts of ``each``, at most ``_AHEAD`` of them, and look at the card while waiting."""
        queued: deque[Any] = deque()
        for first in range(0, replays, each):
            for _ in range(min(each, replays - first)):
                fn()
            done = torch.cuda.Event()
            done.record()
            queued.append(done)
            while len(queued) >= _AHEAD:
                look()
                if queued[0].query():
                    queued.popleft()
                else:
                    time.sleep(_POLL_S)

    def _replay_ms(self, fn: Graph, replays: int = 3) -> float:
        """Return the device time of a replay, a mean over a few that follow one another."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        fn()
        begin.record()
        for _ in range(replays):
            fn()
        end.record()
        self.synchronize()
        return max(begin.elapsed_time(end) / replays, 1e-4)


class Watch:
    """The steps of an energy counter, as (seconds, millijoules) right after each, and the clock of the card then."""

    def __init__(self, counter: Any):
        self._counter, self._last = counter, counter.millijoules()
        self._steps: list[tuple[float, int]] = []
        self._mhz: list[float] = []

    def look(self) -> None:
        read = self._counter.millijoules()
        if read != self._last:
            self._last = read
            self._steps.append((time.perf_counter(), read))
            self._mhz.append(self._counter.megahertz())

    def watts_and_mhz(self) -> tuple[float, float]:
        """Return the mean power from the first to the last step, and the median clock. RuntimeError below two steps."""
        if len(self._steps) < 2:
            raise RuntimeError(
                f"the energy counter must move at least twice in a sample, but moved {len(self._steps)} times: give "
                "more --round-ms"
            )
        (begin, low), (end, high) = self._steps[0], self._steps[-1]
        return (high - low) / (end - begin) * 1e-3, quantile(self._mhz, 0.5)
