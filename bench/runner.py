"""The run that every suite shares: gate, shuffled rounds, rows. An error costs a provider its row, never the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.report import Row
from bench.suite import Entry, Options, Suite, Trial
from bench.timing import interleave

# Calls of one round of host time.
_HOST_CALLS = 100
# Modes that run CUDA graphs; in "load" they run back to back, with nothing between them.
_GRAPHS = ("graph", "load")


@dataclass
class Run:
    """Everything that outlasts a case. ``progress`` gets the title of each step before it runs."""

    suite: Suite
    options: Options
    clock: Any  # a ``timing.DeviceClock``
    environment: Row
    providers: Callable[[Any], Sequence[Any]]  # of a case
    progress: Callable[[str], None] = lambda message: None
    no_graphs: dict[str, str] = field(default_factory=dict)  # provider -> why its capture failed
    not_run: list[str] = field(default_factory=list)

    def rows(self, cases: list[Any]) -> Iterator[list[Row]]:
        """Yield the rows of one case after the other, and note the cases that do not fit this machine."""
        for index, case in enumerate(cases, 1):
            block: list[Row] = []
            try:
                block = self._case(case, f"{index} of {len(cases)}, {case.name} {case.shape}")
            except torch.OutOfMemoryError:  # of the inputs: that of a provider is caught where it runs
                self.not_run.append(f"{case.name} {case.shape} (memory)")
            self.clock.release()
            yield block

    def _case(self, case: Any, title: str) -> list[Row]:
        """Return the rows of one case."""
        self.progress(title)
        trial = self.suite.trial(case, self.providers(case), self.clock, self.options)
        rows, entries = self._enter(title, trial)
        trial.gated()
        plan = [(mode, part) for mode in trial.modes() for part in self.options.passes or trial.default_passes]
        for mode, part in plan if entries else ():
            self.progress(f"{title}: {part} {mode}")
            rows += self._timed(trial, entries, part, mode)
        return rows

    def _enter(self, title: str, trial: Trial) -> tuple[list[Row], dict[str, Entry]]:
        """Return rows of the providers that will not be timed, and the entries of those that will."""
        rows: list[Row] = []
        entries: dict[str, Entry] = {}
        for provider in trial.providers:
            status, reason = "missing", provider.missing()
            if reason is None:
                status, reason = "unsupported", trial.unsupported(provider)
            if reason is not None:
                rows.append(self._row(trial, provider, status, reason, {}))
                continue
            self.progress(f"{title}: gate {provider.name}")
            with self._row_of_error(rows, trial, provider, {}):
                entry = trial.enter(provider)
                self.clock.synchronize()  # an error of the device is this provider's
                if entry.verdict.status == "failed":
                    rows.append(self._row(trial, provider, "failed", entry.verdict.detail, entry.facts))
                else:
                    entries[provider.name] = entry
        return rows, entries

    def _timed(self, trial: Trial, entries: dict[str, Entry], part: str, mode: str) -> list[Row]:
        """Time all entries in interleaved rounds; return a row for each, also where it failed."""
        fns: dict[str, tuple[Entry, Callable[[], Any]]] = {}
        calls: dict[str, int] = {}
        rows: list[Row] = []
        facts = {name: {"pass": part, "mode": mode} | entry.facts for name, entry in entries.items()}
        for name, entry in entries.items():
            if reason := trial.unsupported_pass(entry.provider, part):
                rows.append(self._row(trial, entry.provider, "unsupported", reason, facts[name]))
                continue
            failed = {"status": "no-graph"} if mode in _GRAPHS else {}
            with self._row_of_error(rows, trial, entry.provider, facts[name] | failed), entry.active():
                fn = self._callable(entry, part, mode)
                calls[name] = _HOST_CALLS if mode == "host" else self.clock.calls_for(fn, self.options.round_ms)
                fns[name] = entry, fn
        clock_sample = self.clock.host_sample if mode == "host" else self.clock.sample

        def sample(pair: tuple[Entry, Callable[[], Any]], count: int) -> list[float]:
            entry, fn = pair
            with entry.active():
                return clock_sample(fn, count)

        measured, errors = interleave(fns, sample, calls, self.options.rounds, self.clock.measurement)
        for name, error in errors.items():
            with self._row_of_error(rows, trial, entries[name].provider, facts[name]):
                raise error
        figures = trial.figures(part, mode, measured)
        for name, found in measured.items():
            entry, verdict = entries[name], entries[name].verdict
            row = self._row(trial, entry.provider, verdict.status, verdict.detail, facts[name])
            rows.append(row | found.fields() | figures.get(name, {}))
        return rows

    def _callable(self, entry: Entry, part: str, mode: str) -> Callable[[], Any]:
        """Return the function of a pass, or the replay of its CUDA graph."""
        if mode not in _GRAPHS or not entry.captures:
            return entry.make(part)
        name = entry.provider.name
        if name in self.no_graphs:
            raise RuntimeError(self.no_graphs[name])
        try:
            return self.clock.capture(lambda: entry.make(part))
        except Exception as error:
            # A failed capture can leave its stream broken, and the same provider would only break the next one too.
            if not isinstance(error, torch.OutOfMemoryError):
                self.no_graphs[name] = f"capture failed: {sentence(error)}"
            raise

    @contextmanager
    def _row_of_error(self, rows: list[Row], trial: Trial, provider: Any, facts: Row) -> Iterator[None]:
        """Add a row for an error of the provider. If the GPU no longer answers, raise: nothing after it could run."""
        try:
            yield
        except Exception as error:
            self.clock.synchronize()
            self.clock.release()
            rows.append(self._row(trial, provider, status_of(error), sentence(error), facts))

    def _row(self, trial: Trial, provider: Any, status: str, detail: str, facts: Row) -> Row:
        """Return a row without times. ``report`` describes the format."""
        case = trial.case
        row = {"bench": self.suite.name, "case": case.name, "shape": case.shape, "groups": case.groups} | trial.fields()
        row |= {"provider": provider.name, "label": provider.label, "role": provider.role, "pass": None, "mode": None}
        return row | {"status": status, "detail": detail} | facts | self.environment


def status_of(error: Exception) -> str:
    """Return "oom", "unsupported" or "error": what a row says of a provider that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    no_backend = "No available kernel" in str(error) or "No viable backend" in str(error)  # PyTorch's, GPU and CPU
    if isinstance(error, NotImplementedError) or no_backend:
        return "unsupported"
    return "error"


def sentence(error: Exception) -> str:
    """Return the type and the first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
