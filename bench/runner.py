"""The run that every suite shares: gate, shuffled rounds, rows. An error costs a provider its row, never the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bench.suite import Entry, Row, Suite, Trial
from bench.timing import interleave

# Calls of one round of host time.
_HOST_CALLS = 100
_HOST_WARM_UP = 5
# Modes that run CUDA graphs; in "load" they run back to back, with nothing between them.
_GRAPHS = ("graph", "load")


class Clock(Protocol):
    """What a run needs of a machine; ``timing.GpuClock`` is the one for GPUs."""

    device: torch.device

    def synchronize(self) -> None: ...
    def sample(self, fn: Callable[[], Any], calls: int) -> list[float]: ...
    def calls_for(self, fn: Callable[[], Any], round_ms: float) -> int: ...
    def capture(self, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]: ...
    def peak_mib(self, fn: Callable[[], Any]) -> float: ...
    def host_sample(self, fn: Callable[[], Any], calls: int) -> list[float]: ...
    def release(self) -> None: ...


class DeviceLost(RuntimeError):
    """The GPU answers nothing any more; whatever ran last is named."""


@dataclass
class Options:
    """What to time. ``round_ms`` is device time for each provider in each round, ``deadline`` a time.monotonic()."""

    passes: tuple[str, ...] = ("fwd", "bwd")
    modes: tuple[str, ...] = ("eager", "graph")
    rounds: int = 5
    round_ms: float = 20.0
    mirrored: bool = False  # every second round in the order of the one before it backwards
    deadline: float = float("inf")

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass
class Run:
    """Everything that outlasts a case."""

    suite: Suite
    options: Options
    clock: Clock
    environment: Row
    progress: Callable[[str], None] = lambda message: None
    no_graphs: dict[str, str] = field(default_factory=dict)  # provider -> why its capture failed
    not_run: list[str] = field(default_factory=list)

    def rows(self, cases: list[Any]) -> Iterator[list[Row]]:
        """Rows of one case after the other; at the deadline it stops and notes what is left."""
        for index, case in enumerate(cases):
            title = self.suite.title(case)
            if self.options.out_of_time():
                self.not_run += [self.suite.title(left) for left in cases[index:]]
                return
            if obstacle := self.suite.obstacle(case):
                self.not_run.append(f"{title} ({obstacle})")
                continue
            self.progress(f"[{index + 1}/{len(cases)}] {title}")
            yield self._case(title, self.suite.open(case, self.clock))

    def _case(self, title: str, trial: Trial) -> list[Row]:
        rows, entries = self._enter(title, trial)
        trial.gated()
        for mode in trial.modes(self.options.modes) if entries else ():
            for part in trial.passes(self.options.passes):
                if self.options.out_of_time():
                    self.not_run.append(f"{title} {part} {mode}")
                    continue
                self.progress(f"{title}: {part} {mode}")
                rows += self._timed(trial, entries, part, mode)
        del trial, entries
        self.clock.release()
        return rows

    def _enter(self, title: str, trial: Trial) -> tuple[list[Row], dict[str, Entry]]:
        """Rows of the providers that will not be timed, and the entries of those that will."""
        rows: list[Row] = []
        entries: dict[str, Entry] = {}
        for provider in trial.providers:
            status, reason = "missing", provider.missing()
            if reason is None:
                status, reason = "unsupported", trial.unsupported(provider)
            if reason is None and self.options.out_of_time():
                status, reason = "not-run", "the time budget was spent before its gate"
                self.not_run.append(f"{title} {provider.name}")
            if reason is not None:
                rows.append(self._row(trial, provider, status, reason))
                continue
            self.progress(f"{title}: gate {provider.name}")
            try:
                entry = trial.enter(provider)
            except Exception as error:
                self._check_device(provider, error)
                rows.append(self._row(trial, provider, status_of(error), sentence(error)))
                continue
            if entry.verdict.status == "failed":
                rows.append(self._row(trial, provider, "failed", entry.verdict.detail, entry.facts))
            else:
                entries[provider.name] = entry
        return rows, entries

    def _timed(self, trial: Trial, entries: dict[str, Entry], part: str, mode: str) -> list[Row]:
        """All entries in interleaved rounds; a row for each, also where it failed."""
        fns: dict[str, tuple[Entry, Callable[[], Any]]] = {}
        calls: dict[str, int] = {}
        extra: dict[str, Row] = {name: {} for name in entries}
        rows: list[Row] = []

        def failed(name: str, error: Exception, status: str | None = None) -> None:
            provider, facts = entries[name].provider, entries[name].facts
            self._check_device(provider, error)
            about = (trial, provider, status or status_of(error), sentence(error), facts)
            rows.append(self._row(*about, part=part, mode=mode))

        for name, entry in entries.items():
            if reason := trial.unsupported_pass(entry.provider, part):
                rows.append(self._row(trial, entry.provider, "unsupported", reason, entry.facts, part=part, mode=mode))
                continue
            try:
                with entry.active():
                    fn = self._callable(entry, part, mode)
                    if trial.measures_memory:
                        extra[name]["peak_mib"] = self._peak_mib(fn) if mode == "eager" else None
                    calls[name] = self._calls(fn, mode)
                fns[name] = entry, fn
            except Exception as error:
                failed(name, error, "no-graph" if mode in _GRAPHS else None)
        clock_sample = self.clock.host_sample if mode == "host" else self.clock.sample

        def sample(pair: tuple[Entry, Callable[[], Any]], count: int) -> list[float]:
            entry, fn = pair
            with entry.active():
                return clock_sample(fn, count)

        rounds, out_of_time, mirrored = self.options.rounds, self.options.out_of_time, self.options.mirrored
        measured, errors = interleave(fns, sample, calls, rounds, out_of_time, trial.measurement, mirrored)
        for name, error in errors.items():
            failed(name, error)
        measured = {name: measurement.scaled(entries[name].scale) for name, measurement in measured.items()}
        figures = trial.figures(part, mode, measured)
        for name, measurement in measured.items():
            entry = entries[name]
            about = (trial, entry.provider, entry.verdict.status, entry.verdict.detail, entry.facts)
            row = self._row(*about, part=part, mode=mode)
            rows.append(row | measurement.fields() | extra[name] | figures.get(name, {}))
        return rows

    def _callable(self, entry: Entry, part: str, mode: str) -> Callable[[], Any]:
        """The function of a pass, or the replay of its CUDA graph."""
        if mode not in _GRAPHS or not entry.captures:
            return entry.make(part)
        name = entry.provider.name
        if name in self.no_graphs:
            raise RuntimeError(self.no_graphs[name])
        try:
            return self.clock.capture(lambda: entry.make(part))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A broken capture can leave its traces; the same provider would only break the next one too.
            self.no_graphs[name] = f"capture failed: {sentence(error)}"
            raise

    def _peak_mib(self, fn: Callable[[], Any]) -> float:
        fn()  # what a first call allocates for good is not this call's memory
        return self.clock.peak_mib(fn)

    def _calls(self, fn: Callable[[], Any], mode: str) -> int:
        if mode == "host":
            self.clock.host_sample(fn, _HOST_WARM_UP)
            return _HOST_CALLS
        return self.clock.calls_for(fn, self.options.round_ms)

    def _check_device(self, provider: Any, error: Exception) -> None:
        """Raise DeviceLost when the failure took the GPU's context with it: nothing after it could run."""
        try:
            self.clock.synchronize()
        except Exception as lost:
            reason = f"{provider.name} broke the GPU's context: {sentence(error)}; then {sentence(lost)}"
            raise DeviceLost(reason) from error
        self.clock.release()

    def _row(
        self,
        trial: Trial,
        provider: Any,
        status: str,
        detail: str,
        facts: Row | None = None,
        *,
        part: str | None = None,
        mode: str | None = None,
    ) -> Row:
        row = {"pass": None, "mode": None} | trial.fields(provider)
        if part is not None:
            row |= {"pass": part, "mode": mode}
        return row | {"status": status, "detail": detail} | (facts or {}) | self.environment


def status_of(error: Exception) -> str:
    """ "oom", "unsupported" or "error": what a row says of a provider that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    no_backend = "No available kernel" in str(error) or "No viable backend" in str(error)  # PyTorch's, GPU and CPU
    if isinstance(error, NotImplementedError) or no_backend:
        return "unsupported"
    return "error"


def sentence(error: Exception) -> str:
    """Type and first line; whoever wants the traceback runs that provider alone."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
