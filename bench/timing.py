"""Clocks, and the arithmetic of times.

Providers are interleaved over several rounds in one process, and ratios are taken within a round: a card's clock drifts
by 10 % and more under load, and a drift that both sides share cancels.
"""

from __future__ import annotations

import gc
import math
import random
import time
import timeit
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy
import torch

# Written before every timed call, as in triton.testing.do_bench, so that no call finds its inputs in the L2.
_FLUSH_BYTES = 256 << 20
# Calls of one burst of host time. A device's queue holds about a thousand launches; a call with its backward makes ten
# to thirty.
_BURST = 25


@dataclass
class Measurement:
    """Times of one callable in ms: one list a round, rounds of all callables in the same order."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def samples(self) -> list[float]:
        return [sample for one_round in self.rounds for sample in one_round]

    @property
    def round_medians(self) -> list[float]:
        return [median(one_round) for one_round in self.rounds]

    def quantiles(self, *shares: float) -> list[float]:
        """Return quantiles of all samples; 0.5 is the median."""
        return numpy.quantile(self.samples, shares).tolist()

    def fields(self) -> dict[str, Any]:
        """Return what a result row says of these times."""
        ms, p20, p80 = self.quantiles(0.5, 0.2, 0.8)
        return {"ms": ms, "p20": p20, "p80": p80, "rounds": self.round_medians, "calls": len(self.samples)}


# From here on a ratio counts as "not slower" in every table: less than half a percent is within a run's noise.
EVEN = 0.995


def ratio(of: list[float], to: list[float]) -> float:
    """Return the median of the per-round ratios of two lists of round medians, over the rounds that both have."""
    return median(a / b for a, b in zip(of, to))


def bandwidths(moved: Mapping[str, float], measured: Mapping[str, Measurement], copy: str) -> dict[str, dict[str, Any]]:
    """Return for each measurement its GB/s, and its share of the rate of ``copy``. moved: bytes by provider."""
    rates = {name: [moved[name] / ms * 1e-6 for ms in found.round_medians] for name, found in measured.items()}
    return {
        name: {
            "gb_s": moved[name] / found.quantiles(0.5)[0] * 1e-6,
            "of_copy": ratio(rates[name], rates[copy]) if copy in rates else None,
        }
        for name, found in measured.items()
    }


def interleave(
    fns: dict[str, Callable[[], Any]],
    sample: Callable[[Callable[[], Any], int], Any],
    calls: dict[str, int],
    rounds: int,
    measurement: Callable[[], Any] = Measurement,
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Measure every callable once a round, in another order each round, because the call before sets the card's clock.

    Orders are shuffled, because a mere rotation would keep the neighbours, and the same in every run. A callable that
    raises drops out with its exception. measurement: makes what collects the samples.
    """
    measured = {name: measurement() for name in fns}
    failed: dict[str, Exception] = {}
    for index in range(rounds):
        # Every second round has the reverse order, so that each neighbour runs before as often as after.
        names = random.Random(index // 2).sample(list(fns), len(fns))
        for name in reversed(names) if index % 2 else names:
            if name in failed:
                continue
            try:
                measured[name].rounds.append(sample(fns[name], calls[name]))
            except Exception as error:
                failed[name] = error.with_traceback(None)  # its frames would keep tensors alive
                del measured[name]
    return measured, failed


class DeviceClock:
    """The base of the clocks of a GPU: host time by the wall clock, memory by the allocator, graphs by capture."""

    measurement: Callable[[], Any] = Measurement  # makes what collects the samples of one provider
    most_calls = 100  # of a provider in a round

    def __init__(self, device: torch.device):
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        """Capture a CUDA graph of one call of the function that ``make`` returns, and return its replay.

        ``make`` runs on the capturing stream too, because autograd runs a backward on the stream of its forward. Every
        output is filled with NaN and one replay must overwrite it: work on another stream would be timed as nothing.
        """
        stream = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.stream(stream):
            fn = make()
            fn()
            fn()
            self.synchronize()
            # Not `with torch.cuda.graph(...)`: it leaves its stream current when a capture fails.
            graph.capture_begin()
            try:
                out = fn()
            except BaseException:
                with suppress(Exception):  # the capture is broken already; the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        outputs = [tensor.detach() for tensor in ([out] if isinstance(out, torch.Tensor) else out)]
        for tensor in outputs:
            tensor.fill_(math.nan)
        graph.replay()
        self.synchronize()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
            raise RuntimeError("the captured graph does not write its outputs: work ran on another stream")

        def replay(keep: Any = (fn, out)) -> None:  # the graph's addresses live as long as what it was captured from
            graph.replay()

        return replay

    def peak_mib(self, fn: Callable[[], Any]) -> float:
        """Return the MiB that one call allocates at its peak, beyond what was allocated before it."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        fn()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def host_sample(self, fn: Callable[[], Any], calls: int) -> list[float]:
        """Return the ms of host time of a call, a mean for each burst of at most ``_BURST`` calls.

        A burst does not wait for the device: the queue is empty before it and holds all that a burst launches. The
        garbage collector runs between bursts only: ``timeit`` disables it.
        """
        fn()
        samples = []
        for first in range(0, calls, _BURST):
            count = min(_BURST, calls - first)
            self.synchronize()
            samples.append(1e3 * timeit.timeit(fn, timer=time.perf_counter, number=count) / count)
        self.synchronize()
        return samples

    def calls_for(self, fn: Callable[[], Any], round_ms: float) -> int:
        """Warm ``fn`` up, and return how many calls fill ``round_ms``, from 1 to ``most_calls``."""
        fn()
        self.synchronize()
        begin = time.perf_counter()
        fn()
        self.synchronize()
        return max(1, min(self.most_calls, round(1e-3 * round_ms / (time.perf_counter() - begin))))

    def release(self) -> None:
        """Return unused memory to the driver. Collect the tensors first that only reference cycles keep alive."""
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


class GpuClock(DeviceClock):
    """Device time of single calls by events, each with a cold L2.

    reads: fill the L2 by reading. Filled by writing, it must write as many bytes back to memory during the timed call.
    """

    def __init__(self, device: torch.device, *, reads: bool = False):
        super().__init__(device)
        self._bytes = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._sum = torch.empty((), dtype=torch.int64, device=device)
        self._reads = reads

    def _flush(self) -> None:
        if self._reads:
            torch.sum(self._bytes, 0, out=self._sum)
        else:
            self._bytes.zero_()

    def sample(self, fn: Callable[[], Any], calls: int) -> list[float]:
        """Return the ms of device time of each of ``calls`` calls with a cold L2, waiting for the host included."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        for start, end in zip(starts, ends):
            self._flush()
            start.record()
            fn()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends)]
