"""``python -m bench energy``: what a call of rope_attention and of its rivals costs in millijoules."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import command, report
from bench.attention import cases, providers
from bench.attention.cases import BenchCase
from bench.attention.providers import Provider
from bench.attention.trial import ProblemTrial
from bench.names import DTYPES, words
from bench.suite import Row, Suite, Times, pick, provider_table
from bench.suites.energy import plots
from bench.suites.energy import report as energy_report
from bench.suites.energy.clock import LoadClock, Loads
from bench.suites.energy.counter import Nvml

# Ours, and whoever is the strongest anywhere: a provider costs some seconds at each case.
USUAL = ("fused", "liger_cudnn", "liger_fa3", "liger_fa4", "bare_cudnn", "bare_fa3", "bare_fa4")


class EnergyTrial(ProblemTrial):
    """One case under load."""

    measurement = Loads

    def fields(self, provider: Provider) -> Row:
        limit = self._clock.counter.limit_watts()
        return super().fields(provider) | {"limit_watts": limit}

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """TFLOP/s, and of ours the plan."""
        by_name = {provider.name: provider for provider in self.providers}
        return {
            name: {"tflops": self.case.flops(part) / found.quantiles()[0] * 1e-9} | self.plan(by_name[name])
            for name, found in measured.items()
        }


@dataclass
class Energy(Suite):
    """``grads``: whether the gate looks at gradients."""

    providers: list[Provider]
    grads: bool = True

    command = "energy"
    description = (
        "Measure what a call costs in energy: CUDA graphs back to back, about a second for each provider in each\n"
        "round, with NVML's energy counter beside the time. Nobody is measured before float64 agrees."
    )
    epilog = "further: python -m bench energy plot FILE..."
    modes = ("load",)
    mode = "load"
    rounds = 4
    round_ms = 1000.0
    round_option = ("--seconds", 1000.0)
    mirrored = True
    draws = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "names of cases, or one of their groups (default: %(default)s)"
        add("--configs", default="table", metavar="NAMES", help=text)
        text = f"names, or ours, rivals, bare (default: {', '.join(USUAL)})"
        add("--providers", default=",".join(USUAL), metavar="NAMES", help=text)
        add("--dtype", choices=tuple(DTYPES), default="bf16")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Energy, list[BenchCase]]:
        measured = pick(providers.PROVIDERS, words(args.providers), groups=providers.GROUPS)
        if args.round_length <= 0:
            raise ValueError(f"--seconds must be above 0, not {args.round_length:g}")
        return cls(measured, words(args.passes) != ["fwd"]), cases.named(words(args.configs), DTYPES[args.dtype])

    @classmethod
    def clock(cls, device: torch.device) -> LoadClock:
        return LoadClock(device, Nvml(device))

    def listing(self, cases: list[BenchCase]) -> str:
        lines = [[case.name, case.shape] for case in cases]
        return f"{report.table(['case', 'shape'], lines, left=2)}\n\n{provider_table(self.providers)}"

    def title(self, case: BenchCase) -> str:
        return case.name

    def open(self, case: BenchCase, clock: LoadClock) -> EnergyTrial:
        return EnergyTrial(self.providers, case, clock, grads=self.grads)

    def case_report(self, rows: list[Row]) -> str:
        return energy_report.case_report(rows)

    def summary(self, rows: list[Row]) -> str:
        return energy_report.summary(rows)

    @staticmethod
    def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
        return plots.draw(rows, directory)


def main(argv: list[str]) -> int:
    return command.main(Energy, argv)
