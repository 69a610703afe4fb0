"""``python -m bench norm``: what norms of heads cost inside attention, and what norms, rotations and attentions of
others take at the shapes of models that have them."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import command, report
from bench.attention.cases import BenchCase
from bench.names import DTYPES, length_name, words
from bench.suite import Entry, Row, Suite, Times, Trial, case_fields, matching, pick, provider_table
from bench.suites.norm import plots
from bench.suites.norm import report as norm_report
from bench.suites.norm.problem import Problem, Subject
from bench.suites.norm.providers import FUSED, OURS, PROVIDERS, WITHOUT, Provider, is_ours
from bench.timing import ratio
from fused_rope_attn.testing import Case


def _case(family: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int) -> BenchCase:
    offset = float(family.startswith("Gemma3"))  # what the model adds to the weights
    case = Case(batch, heads_q, heads_kv, length, length, head_dim, causal=True, norms=offset)
    return BenchCase(f"{family}-{length_name(length)}", family, ("norm",), case)


# Qwen3-8B has the heads of Llama3-8B. Those of which targets are stated come first, for time budgets that run out.
CASES = (
    *(_case("Qwen3-0.6B", 4, 16, 8, n, 128) for n in (2048, 4096)),
    *(_case("Qwen3-8B", 2, 32, 8, n, 128) for n in (2048, 4096)),
    _case("Qwen3-0.6B", 4, 16, 8, 1024, 128),
    _case("Qwen3-8B", 2, 32, 8, 1024, 128),
    _case("Gemma3-1B", 4, 4, 1, 4096, 256),
    _case("Gemma3-4B", 2, 8, 4, 4096, 256),
    _case("Gemma3-1B", 4, 4, 1, 1024, 256),
    _case("Gemma3-4B", 2, 8, 4, 1024, 256),
    _case("Qwen3-8B", 1, 32, 8, 16384, 128),
)


class NormTrial(Trial):
    """One case. ``grads``: whether gradients are judged, and are part of the calls whose peak of memory rows hold."""

    def __init__(self, providers: list[Provider], case: BenchCase, clock: Any, grads: bool) -> None:
        super().__init__(providers)
        self._case, self._clock, self._grads = case, clock, grads
        self._problem = Problem(case.case, clock.device)

    def unsupported(self, provider: Provider) -> str | None:
        return provider.unsupported(self._case.case)

    def enter(self, provider: Provider) -> Entry:
        begin = time.perf_counter()
        subject = Subject(provider, self._problem)
        found = subject.once(self._grads)
        self._clock.synchronize()
        seconds = time.perf_counter() - begin
        verdict = replace(self._problem.judge(provider, found), first_call_s=seconds)
        facts = verdict.fields() | self._plan(provider, subject)
        facts["peak_mib"] = self._clock.peak_mib(lambda: subject.once(self._grads))
        return Entry(provider, verdict, subject.make, facts=facts)

    def _plan(self, provider: Provider, subject: Subject) -> Row:
        if provider.name not in FUSED:
            return {}
        try:
            return {"plan": subject.plan()}
        except Exception as error:  # an explanation is no reason to lose a measurement
            return {"plan": f"{type(error).__name__}: {error}"}

    def gated(self) -> None:
        self._problem.release()

    def fields(self, provider: Provider) -> Row:
        return {
            "bench": "norm",
            "case": self._case.name,
            "family": self._case.family,
            "shape": self._case.shape,
            **case_fields(self._case.case),
            "norm_offset": self._case.case.norms,
            "provider": provider.name,
            "label": provider.label,
            "ours": is_ours(provider.name),
            "rotates": True,
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """TFLOP/s of the products, and of ours with norms the time over that without."""
        rounds = {name: measurement.round_medians for name, measurement in measured.items()}
        rows: dict[str, Row] = {
            name: {"tflops": self._case.flops(part) / measurement.quantiles()[0] * 1e-9}
            for name, measurement in measured.items()
        }
        if OURS in rounds and WITHOUT in rounds:
            rows[OURS]["over_without"] = ratio(rounds[OURS], rounds[WITHOUT])
        return rows


@dataclass
class Norm(Suite):
    """``grads``: whether the gate looks at gradients."""

    providers: list[Provider]
    grads: bool = True

    command = "norm"
    description = "Time attention with norms of q and k; nobody is timed before float64 agrees."
    epilog = "further: python -m bench norm plot FILE..."
    draws = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
        add("--providers", default="", help=f"of {', '.join(PROVIDERS)} (default: all); ours always run")
        add("--dtype", choices=tuple(DTYPES), default="bf16")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Norm, list[BenchCase]]:
        dtype = DTYPES[args.dtype]
        chosen = [
            replace(case, case=replace(case.case, dtype=dtype, norm_dtype=dtype))
            for case in matching(CASES, args.cases)
        ]
        measured = pick(PROVIDERS, words(args.providers), always=(OURS, WITHOUT))
        return cls(measured, words(args.passes) != ["fwd"]), chosen

    def listing(self, cases: list[BenchCase]) -> str:
        lines = [[case.name, case.shape, f"{case.flops('fwd') / 1e12:.3f}"] for case in cases]
        return f"{report.table(['case', 'shape', 'TFLOP fwd'], lines, left=2)}\n\n{provider_table(self.providers)}"

    def title(self, case: BenchCase) -> str:
        return case.name

    def open(self, case: BenchCase, clock: Any) -> NormTrial:
        return NormTrial(self.providers, case, clock, self.grads)

    def summary(self, rows: list[Row]) -> str:
        return norm_report.summary(rows)

    @staticmethod
    def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
        return plots.draw(rows, directory, mode)


def main(argv: list[str]) -> int:
    return command.main(Norm, argv)
