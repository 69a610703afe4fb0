"""``python -m bench``: rope_attention and every rival on equal inputs, forward and backward."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import command, report
from bench.attention import cases, providers
from bench.attention.cases import HOST_CASE, BenchCase, with_dtype
from bench.attention.providers import Provider, is_ours
from bench.attention.trial import ProblemTrial
from bench.names import DTYPES, words
from bench.suite import Row, Suite, Times, pick, provider_table
from bench.suites import command_list
from bench.suites.attention import plots
from bench.suites.attention import report as attention_report
from bench.timing import ratio


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


class AttentionTrial(ProblemTrial):
    """One case; ``HOST_CASE`` is timed on the host, forward and then forward with backward."""

    measures_memory = True

    def __init__(self, suite: Attention, case: BenchCase, clock: Any) -> None:
        super().__init__(suite.providers, case, clock, grads=suite.grads, strict=suite.strict)
        self._baseline = suite.baseline

    def passes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        if not self.case.is_host:
            return asked
        return ("fwd",) if asked == ("fwd",) else ("fwd", "both")

    def modes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        return ("host",) if self.case.is_host else asked

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """TFLOP/s, the ratios to the reference providers, and of ours the plan."""
        times = {name: measurement.quantiles()[0] for name, measurement in measured.items()}
        rounds = {name: measurement.round_medians for name, measurement in measured.items()}
        by_name = {provider.name: provider for provider in self.providers}
        rotates = {name: by_name[name].rotates for name in measured}
        named = references(times, rotates, self._baseline)
        rows: dict[str, Row] = {}
        for name, ms in times.items():
            rows[name] = {} if mode == "host" else {"tflops": self.case.flops(part) / ms * 1e-9}
            rows[name]["speedup"] = {
                role: {"provider": other, "value": ratio(rounds[other], rounds[name])} for role, other in named.items()
            }
            rows[name] |= self.plan(by_name[name])
        return rows


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
