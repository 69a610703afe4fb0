"""``python -m bench masks``: what windows, packed sequences, caps, sinks and lengths cost, in three figures.

window: the cost of a visited block beside full causal attention of the same call. packed: sequences of mixed lengths
packed, beside the same batch padded, and beside a separate rotation with a variable-length attention. overhead: every
mask at the shape of a model, beside plain causal attention.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

from bench import command, report
from bench.gate import Gate
from bench.names import words
from bench.suite import Entry, Row, Suite, Times, Trial, case_fields
from bench.suites.masks import report as masks_report
from bench.suites.masks.lines import FIGURES, Line, lines, shape
from bench.suites.masks.problem import Problem, Subject
from bench.suites.masks.visited import ran, visited


class Figure(Trial):
    """The lines of one figure; ``backend`` ours. Calls are eager: they take milliseconds, and the flush of the L2 that
    precedes each hides the host's share."""

    def __init__(self, chosen: list[Line], backend: str, clock: Any) -> None:
        super().__init__(chosen)
        self._backend, self._clock = backend, clock
        self._problems = {case: Problem(case, clock.device) for case in dict.fromkeys(line.case for line in chosen)}
        self._gates = {
            case: Gate(case, problem.inputs, heads=[(0, 0)] if case.sinks else None)
            for case, problem in self._problems.items()
        }
        self._subjects: dict[str, Subject] = {}

    def enter(self, provider: Line) -> Entry:
        begin = time.perf_counter()
        subject = Subject(provider, self._problems[provider.case], self._backend)
        outputs = subject.once()
        self._clock.synchronize()
        seconds = time.perf_counter() - begin
        verdict = self._gates[provider.case].judge(outputs, forgiving=provider.rival is not None)
        verdict = replace(verdict, first_call_s=seconds)
        self._subjects[provider.name] = subject
        return Entry(provider, verdict, subject.make, facts=verdict.fields())

    def gated(self) -> None:
        for gate in self._gates.values():
            gate.release()

    def fields(self, provider: Line) -> Row:
        c = provider.case
        return {
            "case": provider.figure,
            "shape": shape(c),
            **case_fields(c),
            "seqlens": None if c.seqlens is None else [n for n, _ in c.seqlens],
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.rival is None,
            "rotates": True,
            "mode": "eager",
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Of ours the plan, the kernels that ran, and in the figure of windows the scores that they visited."""
        rows: dict[str, Row] = {}
        for line in self.providers:
            if line.name in measured and line.rival is None:
                plan = self._subjects[line.name].plan()
                rows[line.name] = {"plan": str(plan), "backend": ran(plan, part)}
                if line.figure == "window":
                    rows[line.name]["visited"] = visited(line.case, part, plan)
        return rows


@dataclass
class Masks(Suite):
    """A case is a list of lines, those of one figure; ``backend`` ours."""

    backend: str = "auto"

    command = "masks"
    description = "Time masks and packing; nobody is timed before float64 agrees."
    modes = ("eager",)
    mode = "eager"
    round_ms = 40.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--figures", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)} (default: all)")
        add("--backend", default="auto", help="ours (default: auto, what users get)")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Masks, list[list[Line]]]:
        figures = words(args.figures)
        if not figures or set(figures) - set(FIGURES):
            raise ValueError(f"--figures takes {', '.join(FIGURES)}, not {args.figures!r}")
        return cls(args.backend), [lines((figure,)) for figure in figures]

    def listing(self, cases: list[list[Line]]) -> str:
        chosen = [line for figure in cases for line in figure]
        cells = [[line.figure, line.label, shape(line.case), line.missing() or "here"] for line in chosen]
        return report.table(["figure", "provider", "shape", "status"], cells, left=4)

    def title(self, case: list[Line]) -> str:
        return case[0].figure

    def open(self, case: list[Line], clock: Any) -> Figure:
        return Figure(case, self.backend, clock)

    def summary(self, rows: list[Row]) -> str:
        return masks_report.summary(rows)


def main(argv: list[str]) -> int:
    return command.main(Masks, argv)
