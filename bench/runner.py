"""One case at a time: inputs, gate, interleaved clocks, rows. An error costs the provider its row, never the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bench import timing
from bench.cases import HOST_CASE, BenchCase, with_dtype
from bench.gate import Gate, Verdict
from bench.providers import Provider, is_ours
from bench.timing import Measurement, interleave, ratio
from fused_rope_attn import testing

_HOST_CALLS = 100
_MODES = {"eager": ("eager",), "graph": ("graph",), "both": ("eager", "graph")}


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
class Options(timing.Options):
    """What to time of attention. ``strict`` as in ``gate.Gate``, ``baseline`` a provider, ``host``: host times too."""

    mode: str = "both"
    round_ms: float = 20.0
    baseline: str = "hf_sdpa"
    strict: bool = False
    host: bool = True


@dataclass
class Run:
    """Everything that outlasts a case."""

    providers: list[Provider]
    options: Options
    clock: Clock
    environment: dict[str, Any]
    progress: Callable[[str], None] = lambda message: None
    no_graphs: dict[str, str] = field(default_factory=dict)  # provider -> why its capture failed
    not_run: list[str] = field(default_factory=list)

    def rows(self, cases: list[BenchCase]) -> Iterator[list[dict[str, Any]]]:
        """Rows of one case after the other, then of the host times; at the deadline it stops and notes what is left."""
        dtype = cases[0].case.dtype
        for index, case in enumerate(cases):
            if self.options.out_of_time():
                self.not_run.extend(left.name for left in cases[index:])
                break
            self.progress(f"[{index + 1}/{len(cases)}] {case.name}")
            yield self._case(case)
        if self.options.host:
            if self.options.out_of_time():
                self.not_run.append("host times")
            else:
                self.progress("host times")
                yield self._host(with_dtype(HOST_CASE, dtype))

    def _case(self, case: BenchCase) -> list[dict[str, Any]]:
        options = self.options
        inputs = testing.make_inputs(case.case, self.clock.device)
        rows, verdicts = self._gate(case, inputs)
        subjects = {
            provider.name: Subject(provider, inputs, case.case.causal)
            for provider in self.providers
            if provider.name in verdicts
        }
        for mode in _MODES[options.mode]:
            for part in options.passes:
                if not subjects:
                    continue
                if options.out_of_time():
                    self.not_run.append(f"{case.name} {part} {mode}")
                    continue
                self.progress(f"{case.name}: {part} {mode}")
                fns, calls, memory = {}, {}, {}
                for name, subject in subjects.items():
                    try:
                        fn = self._callable(subject, part, mode)
                        if mode == "eager":
                            fn()  # what a first call allocates for good is not this call's memory
                            memory[name] = self.clock.peak_mib(fn)
                        calls[name] = self.clock.calls_for(fn, options.round_ms)
                        fns[name] = fn
                    except Exception as error:
                        self._check_device(name, error)
                        status = "no-graph" if mode == "graph" else _status(error)
                        rows.append(self._row(case, subject.provider, part, mode, status, _sentence(error)))
                measured, failed = interleave(fns, self.clock.sample, calls, options.rounds, options.out_of_time)
                for name, error in failed.items():
                    self._check_device(name, error)
                    rows.append(self._row(case, subjects[name].provider, part, mode, _status(error), _sentence(error)))
                rows += self._timed(case, part, mode, measured, subjects, verdicts, memory)
                fns.clear()
        del subjects, inputs
        self.clock.release()
        return rows

    def _callable(self, subject: Subject, part: str, mode: str) -> Callable[[], Any]:
        if mode == "eager":
            return subject.make(part)
        name = subject.provider.name
        if name in self.no_graphs:
            raise RuntimeError(self.no_graphs[name])
        try:
            return self.clock.capture(lambda: subject.make(part))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A broken capture can leave its traces; the same provider would only break the next one too.
            self.no_graphs[name] = f"capture failed: {_sentence(error)}"
            raise

    def _gate(self, case: BenchCase, inputs: testing.Inputs) -> tuple[list[dict[str, Any]], dict[str, Verdict]]:
        """Rows of those that will not be timed, and the verdicts on those that will."""
        rows, verdicts = [], {}
        gate = Gate(case.case, inputs, grads=self.options.passes != ("fwd",), strict=self.options.strict)
        for provider in self.providers:
            reason = provider.missing()
            status = "missing" if reason else "unsupported"
            reason = reason or provider.unsupported(case.case)
            if reason is None and self.options.out_of_time():
                status, reason = "not-run", "the time budget was spent before its gate"
                self.not_run.append(f"{case.name} {provider.name}")
            if reason:
                rows.append(self._row(case, provider, None, None, status, reason))
                continue
            self.progress(f"{case.name}: gate {provider.name}")
            try:
                verdict = gate.check(provider, self.clock.synchronize)
            except Exception as error:
                self._check_device(provider.name, error)
                rows.append(self._row(case, provider, None, None, _status(error), _sentence(error)))
                continue
            if verdict.status == "failed":
                rows.append(self._row(case, provider, None, None, "failed", verdict.detail, verdict))
            else:
                verdicts[provider.name] = verdict
        return rows, verdicts

    def _timed(
        self,
        case: BenchCase,
        part: str,
        mode: str,
        measured: dict[str, Measurement],
        subjects: dict[str, Subject],
        verdicts: dict[str, Verdict],
        memory: dict[str, float | None],
    ) -> list[dict[str, Any]]:
        medians = {name: measurement.round_medians for name, measurement in measured.items()}
        named = references(
            {name: m.quantiles()[0] for name, m in measured.items()},
            {name: subjects[name].provider.rotates for name in measured},
            self.options.baseline,
        )
        rows = []
        for name, measurement in measured.items():
            subject, verdict = subjects[name], verdicts[name]
            median, p20, p80 = measurement.quantiles()
            row = self._row(case, subject.provider, part, mode, verdict.status, verdict.detail, verdict)
            row |= {
                "ms": median,
                "p20": p20,
                "p80": p80,
                "rounds": medians[name],
                "calls": len(measurement.samples),
                "tflops": case.flops(part) / median * 1e-9,
                "peak_mib": memory.get(name),
                "speedup": {
                    role: {"provider": other, "value": ratio(medians[other], medians[name])}
                    for role, other in named.items()
                },
            }
            if is_ours(name):
                row["plan"] = subject.plan()
            rows.append(row)
        return rows

    def _host(self, case: BenchCase) -> list[dict[str, Any]]:
        """Host time of one eager call on tiny tensors, forward without gradients and forward + backward."""
        inputs = testing.make_inputs(case.case, self.clock.device)
        rows, verdicts = self._gate(case, inputs)
        subjects = {p.name: Subject(p, inputs, case.case.causal) for p in self.providers if p.name in verdicts}
        for part in ("fwd", "both") if self.options.passes != ("fwd",) else ("fwd",):
            fns = {name: subject.make(part) for name, subject in subjects.items()}
            warm = interleave(fns, self.clock.host_sample, dict.fromkeys(fns, 5), 1, lambda: False)[1]
            for name in warm:
                del fns[name]
            calls = dict.fromkeys(fns, _HOST_CALLS)
            measured, failed = interleave(fns, self.clock.host_sample, calls, self.options.rounds, lambda: False)
            for name, error in (warm | failed).items():
                self._check_device(name, error)
                rows.append(self._row(case, subjects[name].provider, part, "host", _status(error), _sentence(error)))
            timed = self._timed(case, part, "host", measured, subjects, verdicts, {})
            rows += [{key: value for key, value in row.items() if key != "tflops"} for row in timed]
        return rows

    def _check_device(self, provider: str, error: Exception) -> None:
        """Raise DeviceLost when the failure took the GPU's context with it: nothing after it could run."""
        try:
            self.clock.synchronize()
        except Exception as lost:
            raise DeviceLost(
                f"{provider} broke the GPU's context: {_sentence(error)}; then {_sentence(lost)}"
            ) from error
        self.clock.release()

    def _row(
        self,
        case: BenchCase,
        provider: Provider,
        part: str | None,
        mode: str | None,
        status: str,
        detail: str,
        verdict: Verdict | None = None,
    ) -> dict[str, Any]:
        c = case.case
        row = {
            "case": case.name,
            "family": case.family,
            "groups": case.groups,
            "shape": case.shape,
            "batch": c.batch,
            "heads_q": c.heads_q,
            "heads_kv": c.heads_kv,
            "len_q": c.len_q,
            "len_k": c.len_k,
            "head_dim": c.head_dim,
            "causal": c.causal,
            "dtype": str(c.dtype).removeprefix("torch."),
            "provider": provider.name,
            "label": provider.label,
            "ours": is_ours(provider.name),
            "rotates": provider.rotates,
            "pass": part,
            "mode": mode,
            "status": status,
            "detail": detail,
        }
        if verdict is not None:
            row |= {
                "gate_row_ratio": verdict.row_ratio,
                "gate_rms_ratio": verdict.rms_ratio,
                "first_call_s": verdict.first_call_s,
            }
        return row | self.environment


class Subject:
    """One provider on one case's inputs; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, provider: Provider, inputs: testing.Inputs, causal: bool):
        self.provider, self.causal = provider, causal
        self._inputs = inputs
        self._tables = provider.prepare(inputs.cos, inputs.sin, inputs.q.dtype)

    def _tensors(self) -> list[torch.Tensor]:
        """q, k, v as leaves. Whoever rotates in place gets copies, one set for each timed function: its fixed graph has
        saved them."""
        x = self._inputs
        qk = [t.detach().clone() if self.provider.in_place else t.detach() for t in (x.q, x.k)]
        return [t.requires_grad_() for t in (*qk, x.v.detach())]

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd`` runs without gradients; ``bwd`` runs again and again on one graph; ``both`` builds it every time."""
        tensors = self._tensors()
        run, tables, causal, do = self.provider.run, self._tables, self.causal, self._inputs.do
        if part == "fwd":

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return run(*tensors, tables, causal)

            return forward
        if part == "bwd":
            o = run(*tensors, tables, causal)
            return lambda: torch.autograd.grad(o, tensors, do, retain_graph=True)
        if part == "both":
            return lambda: torch.autograd.grad(run(*tensors, tables, causal), tensors, do)
        raise ValueError(f"a pass is fwd, bwd or both, not {part!r}")

    def plan(self) -> str:
        """What ours runs here, in words."""
        x = self._inputs
        try:
            return self.provider.plan(x.q, x.k, x.v, self._tables, self.causal)
        except Exception as error:  # an explanation is no reason to lose a measurement
            return _sentence(error)


def references(medians: dict[str, float], rotates: dict[str, bool], baseline: str) -> dict[str, str]:
    """Whom everybody is compared with: ``baseline`` as named, ``rival`` the fastest that rotates separately, ``bare``
    the fastest that does not rotate. Roles that nobody fills are left out."""
    roles = {"baseline": baseline} if baseline in medians else {}
    for role, rotating in (("rival", True), ("bare", False)):
        candidates = [name for name in medians if not is_ours(name) and rotates[name] == rotating]
        if candidates:
            roles[role] = min(candidates, key=medians.__getitem__)
    return roles


def _status(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    no_backend = "No available kernel" in str(error) or "No viable backend" in str(error)  # PyTorch's, GPU and CPU
    if isinstance(error, NotImplementedError) or no_backend:
        return "unsupported"
    return "error"


def _sentence(error: Exception) -> str:
    """Type and first line; tracebacks are for whoever runs that provider alone."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
