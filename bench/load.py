"""A clock that loads the card: CUDA graphs back to back, and the power that the card draws meanwhile.

Only the steady state counts, in which a card sits at its power limit or near it, so that a sample begins with a stretch
that is not measured. The energy of a call is the power of the card times the time of a call. Power is taken between two
steps of the energy counter, because it moves every tens of milliseconds: a reading between its steps would be late.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.timing import DeviceClock, Measurement

_WARM_SHARE = 0.15  # of the replays of a sample: not measured, so that the card's clock settles
CALLS = 32  # of one graph, so that replaying costs nothing
_AHEAD = 64  # replays in the queue, so that the device does not wait while NVML answers
_POLL_S = 2e-4


class Nvml:
    """The energy counter of a card, of all processes on it: ``millijoules()`` since the driver was loaded."""

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # NVML ignores CUDA_VISIBLE_DEVICES
            card: Any = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self.millijoules = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, card)
            self.millijoules()
        except Exception as error:
            raise RuntimeError(f"needs nvidia-ml-py, and a card with an energy counter: {error}") from error


class Load(NamedTuple):
    """One sample: ``calls`` calls, the milliseconds and millijoules of each."""

    calls: int
    ms: float
    mj: float


class Loads(Measurement):
    """A ``Load`` for each round."""

    rounds: list[Any]

    @property
    def samples(self) -> list[float]:
        return [load.ms for load in self.rounds]

    round_medians = samples

    def fields(self) -> dict[str, Any]:
        """Return what a result row says: times, then the median and the rounds of energies."""
        energies = [load.mj for load in self.rounds]
        calls = sum(load.calls for load in self.rounds)
        return super().fields() | {"calls": calls, "mj": median(energies), "mj_rounds": energies}


class LoadClock(DeviceClock):
    """A clock that returns a ``Load`` for each sample."""

    measurement, most_calls = Loads, 1 << 30

    def __init__(self, device: torch.device, counter: Any = None):
        super().__init__(device)
        self.counter = counter

    def capture(self, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        """Capture a graph of ``CALLS`` calls; the outputs of the last call are checked."""

        def several(fn: Callable[[], Any]) -> Any:
            for _ in range(CALLS - 1):
                fn()  # its outputs are freed at once
            return fn()

        return super().capture(lambda: partial(several, make()))

    def sample(self, fn: Callable[[], Any], calls: int) -> Load:
        """Replay ``calls`` times, after a share that is not measured, and watch the card while waiting.

        RuntimeError where the energy counter moves less than twice meanwhile.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        steps: list[tuple[float, int]] = []  # seconds and millijoules right after each step
        last = self.counter.millijoules()
        queued: deque[Any] = deque()
        for number in range(-math.ceil(_WARM_SHARE * calls), calls):
            if number == 0:
                begin.record()
            fn()
            queued.append(end if number == calls - 1 else torch.cuda.Event())
            queued[-1].record()
            while queued and (len(queued) >= _AHEAD or number == calls - 1):
                read = self.counter.millijoules()
                if read != last and number >= 0 and begin.query():
                    steps.append((time.perf_counter(), read))
                last = read
                time.sleep(_POLL_S)
                while queued and queued[0].query():
                    queued.popleft()
        ms = begin.elapsed_time(end) / (calls * CALLS)
        if (moved := len(steps)) < 2:
            raise RuntimeError(f"the energy counter must move twice a sample, not {moved} times: give more --round-ms")
        (since, low), (until, high) = steps[0], steps[-1]
        watts = (high - low) / (until - since) * 1e-3
        return Load(calls * CALLS, ms, watts * ms)
