"""``python -m bench``: rope_attention and every rival on equal inputs, forward and backward."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import command, report
from bench.gate import Gate, Verdict
from bench.names import DTYPES, words
from bench.suite import Entry, Row, Suite, Times, Trial, case_fields, forward_or_backward, pick, provider_table
from bench.suites import command_list
from bench.suites.attention import cases, plots, providers
from bench.suites.attention import report as attention_report
from bench.suites.attention.cases import HOST_CASE, BenchCase, with_dtype
from bench.suites.attention.providers import Provider, is_ours
from bench.timing import ratio
from fused_rope_attn import testing


@dataclass
class Attention(Suite):
    """``baseline``: the provider whose ratios every row carries too. ``strict``: rivals are held to the tolerance as
    ours are. ``grads``: whether the gate looks at gradients."""

    providers: list[Provider]
    baseline: str = "hf_sdpa"
    strict: bool = False
    grads: bool = True

    description = "Time rope_attention and every rival on equal inputs; nobody is timed before float64 agrees."
    epilog = command_list()
    all_passes = ("fwd", "bwd", "both")
    mode = "both"
    round_ms = 20.0
    draws = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        groups = ", ".join(cases.GROUPS)
        add("--group", help=f"comma-separated: {groups} (default: table; all where --cases is given)")
        add("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
        add("--providers", default="", help="names, or ours, rivals, bare (default: everybody)")
        add("--dtype", choices=tuple(DTYPES), default="bf16")
        text = "provider whose per-round ratios every row also carries"
        add("--baseline", default="hf_sdpa", help=text)
        add("--no-host", action="store_true", help="leave out the host time of tiny calls")
        add("--strict", action="store_true", help="hold rivals to the contract's tolerance too")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Attention, list[BenchCase]]:
        group, dtype = args.group or ("all" if args.cases else "table"), DTYPES[args.dtype]
        chosen = cases.select(words(group), args.cases, dtype)
        measured = pick(providers.PROVIDERS, words(args.providers), groups=providers.GROUPS)
        if args.baseline not in providers.PROVIDERS:
            known = ", ".join(providers.PROVIDERS)
            raise ValueError(f"--baseline {args.baseline!r} is no provider; there are {known}")
        host = [] if args.no_host else [with_dtype(HOST_CASE, dtype)]
        return cls(measured, args.baseline, args.strict, words(args.passes) != ["fwd"]), [*chosen, *host]

    def listing(self, cases: list[BenchCase]) -> str:
        lines = [[case.name, case.shape, " ".join(case.groups), f"{case.flops('fwd') / 1e12:.3f}"] for case in cases]
        table = report.table(["case", "shape", "groups", "TFLOP fwd"], lines, left=3)
        return f"{table}\n\n{provider_table(self.providers)}"

    def title(self, case: BenchCase) -> str:
        return "host times" if case.is_host else case.name

    def open(self, case: BenchCase, clock: Any) -> AttentionTrial:
        return AttentionTrial(self, case, clock)

    def case_report(self, rows: list[Row]) -> str:
        return attention_report.case_report(rows)

    def summary(self, rows: list[Row]) -> str:
        return attention_report.summary(rows)

    @staticmethod
    def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
        return plots.draw_all(rows, directory, mode)


class AttentionTrial(Trial):
    """One case; ``HOST_CASE`` is timed on the host, forward and then forward with backward."""

    measures_memory = True

    def __init__(self, suite: Attention, case: BenchCase, clock: Any) -> None:
        super().__init__(suite.providers)
        self._suite, self._case, self._clock = suite, case, clock
        self._inputs = testing.make_inputs(case.case, clock.device)
        self._gate = Gate(case.case, self._inputs)

    def passes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        if not self._case.is_host:
            return asked
        return ("fwd",) if asked == ("fwd",) else ("fwd", "both")

    def modes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        return ("host",) if self._case.is_host else asked

    def unsupported(self, provider: Provider) -> str | None:
        return provider.unsupported(self._case.case)

    def enter(self, provider: Provider) -> Entry:
        grads, strict = self._suite.grads, self._suite.strict
        verdict = check(provider, self._gate, self._clock.synchronize, grads=grads, strict=strict)
        subject = Subject(provider, self._inputs, self._case.case.causal)
        return Entry(provider, verdict, subject.make, facts=verdict.fields())

    def gated(self) -> None:
        self._gate.release()

    def fields(self, provider: Provider) -> Row:
        c = self._case.case
        return {
            "case": self._case.name,
            "family": self._case.family,
            "groups": self._case.groups,
            "shape": self._case.shape,
            **case_fields(c),
            "causal": c.causal,
            "provider": provider.name,
            "label": provider.label,
            "ours": is_ours(provider.name),
            "rotates": provider.rotates,
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """TFLOP/s, the ratios to the reference providers, and of ours the plan."""
        times = {name: measurement.quantiles()[0] for name, measurement in measured.items()}
        rounds = {name: measurement.round_medians for name, measurement in measured.items()}
        by_name = {provider.name: provider for provider in self.providers}
        rotates = {name: by_name[name].rotates for name in measured}
        named = references(times, rotates, self._suite.baseline)
        rows: dict[str, Row] = {}
        for name, ms in times.items():
            rows[name] = {} if mode == "host" else {"tflops": self._case.flops(part) / ms * 1e-9}
            rows[name]["speedup"] = {
                role: {"provider": other, "value": ratio(rounds[other], rounds[name])} for role, other in named.items()
            }
            if is_ours(name):
                rows[name]["plan"] = self._plan(by_name[name])
        return rows

    def _plan(self, provider: Any) -> str:
        """What ours runs here, in words."""
        x = self._inputs
        try:
            return provider.plan(x.q, x.k, x.v, (x.cos, x.sin), self._case.case.causal)
        except Exception as error:  # an explanation is no reason to lose a measurement
            return f"{type(error).__name__}: {error}"


class Subject:
    """One provider on one case's inputs; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, provider: Provider, inputs: testing.Inputs, causal: bool):
        self._provider, self._inputs, self._causal = provider, inputs, causal
        self._tables = provider.prepare(inputs.cos, inputs.sin, inputs.q.dtype)

    def _leaves(self) -> list[Tensor]:
        """q, k, v as leaves. Whoever rotates in place gets copies, one set for each timed function: its fixed graph has
        saved them."""
        x = self._inputs
        qk = [t.detach().clone() if self._provider.in_place else t.detach() for t in (x.q, x.k)]
        return [t.requires_grad_() for t in (*qk, x.v.detach())]

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd``, ``bwd`` or ``both``, as ``suite.forward_or_backward`` has them."""
        run, tables, causal = self._provider.run, self._tables, self._causal

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return run(q, k, v, tables, causal)

        return forward_or_backward(attend, self._leaves(), self._inputs.do, part)


def check(
    provider: Provider, gate: Gate, synchronize: Callable[[], None], *, grads: bool, strict: bool = False
) -> Verdict:
    """Run the provider once on copies of the inputs and judge it. Raises what the provider raises.

    ``strict`` holds rivals to the tolerance as ours are; otherwise they may be loose.
    """
    x, case = gate.inputs, gate.case
    begin = time.perf_counter()
    # Copies: some rivals rotate q and k in place.
    q, k = (t.detach().clone().requires_grad_(grads) for t in (x.q, x.k))
    v = x.v.detach().requires_grad_(grads)
    tables = provider.prepare(x.cos, x.sin, case.dtype)
    with torch.set_grad_enabled(grads):
        o = provider.run(q, k, v, tables, case.causal)
        gradients = torch.autograd.grad(o, (q, k, v), x.do) if grads else ()
    synchronize()
    seconds = time.perf_counter() - begin
    outputs = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients)))
    kind = "none" if not provider.rotates else "half" if provider.half_tables else "float32"
    verdict = gate.judge(outputs, kind, forgiving=not is_ours(provider.name) and not strict)
    return replace(verdict, first_call_s=seconds)


def references(times: Mapping[str, float], rotates: Mapping[str, bool], baseline: str) -> dict[str, str]:
    """Whom everybody is compared with: ``baseline`` as named, ``rival`` the fastest that rotates separately, ``bare``
    the fastest that does not rotate. Roles that nobody fills are left out."""
    roles = {"baseline": baseline} if baseline in times else {}
    for role, rotating in (("rival", True), ("bare", False)):
        candidates = [name for name in times if not is_ours(name) and rotates[name] == rotating]
        if candidates:
            roles[role] = min(candidates, key=times.__getitem__)
    return roles


def main(argv: list[str]) -> int:
    return command.measure(Attention, argv)


def plot(argv: list[str]) -> int:
    return command.plot(Attention, argv)
