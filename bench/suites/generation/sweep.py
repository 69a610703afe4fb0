"""``python -m bench decode --tune``: configurations of our own generation kernel, all in one process, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from bench import report
from bench.names import words
from bench.suite import Entry, Row
from bench.suites.generation.providers import COPY, OURS, PROVIDERS, RAW
from bench.suites.generation.suite import DecodeCase, DecodeTrial, Generation, choose
from fused_rope_attn.attention.configs import family
from fused_rope_attn.generation import configs, planning
from fused_rope_attn.runtime import device

_TABLE = "(table)"  # the configuration that the committed table holds
# (block_n, warps, stages, programs per multiprocessor) that a tuning run tries where it is not told others.
_CANDIDATES = (
    "64x4x4x2", "64x4x3x2", "64x4x3x3r168", "32x4x4x3r168", "32x4x6x2", "32x4x4x4r128", "128x4x3x1", "128x8x3x1",
    "128x8x2x2r128", "64x8x4x2r128", "64x8x3x2r128", "64x8x6x1", "32x2x6x4", "16x2x6x5r192",
)  # fmt: skip


def candidate(text: str, base: configs.DecodeConfig) -> configs.DecodeConfig:
    """``block_n x warps x stages x programs per multiprocessor[rREGISTERS][lLEAST_TILES]``, as in ``64x4x4x2r168``.

    What the text leaves out is as in ``base``. ValueError for other texts.
    """
    rest, least = text.split("l") if "l" in text else (text, base.least_tiles)
    rest, registers = rest.split("r") if "r" in rest else (rest, None)
    try:
        block_n, warps, stages, programs = map(int, rest.split("x"))
        return replace(
            base, block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs,
            least_tiles=int(least), max_registers=None if registers is None else int(registers),
        )  # fmt: skip
    except ValueError:
        raise ValueError(f"a configuration looks like 64x4x4x2, 64x4x4x3r168 or 64x4x4x2l4, not {text!r}") from None


@dataclass(frozen=True)
class Candidate:
    """A configuration by its text, as a provider; the one of the table is named ``(table)``."""

    name: str
    bare: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return self.name

    def missing(self) -> None:
        return None

    def config(self, base: configs.DecodeConfig) -> configs.DecodeConfig:
        return base if self.name == _TABLE else candidate(self.name, base)


@contextmanager
def _running(config: configs.DecodeConfig) -> Iterator[None]:
    """What is in force while a candidate runs."""
    with torch.no_grad(), planning.configured(config):
        yield


class SweepTrial(DecodeTrial):
    """One case; providers are the candidates, and the copy as the ceiling."""

    def __init__(self, suite: Sweep, case: DecodeCase, clock: Any) -> None:
        super().__init__(suite.providers, case, clock)
        self._ours = PROVIDERS[RAW if suite.raw else OURS]
        arch = family(device.arch(clock.device))
        self._table = configs.decode(arch, case.dtype.itemsize, case.head_dim, not suite.raw)

    def enter(self, provider: Any) -> Entry:
        if not isinstance(provider, Candidate):
            return super().enter(provider)
        config = provider.config(self._table)
        with _running(config):
            entry = super().enter(self._ours)
        facts = entry.facts | {"raw": self._ours.raw, "config": asdict(config)}
        return replace(entry, provider=provider, facts=facts, active=lambda: _running(config))

    def fields(self, provider: Any) -> Row:
        return super().fields(provider) | {"ours": provider.name == _TABLE}


@dataclass
class Sweep(Generation):
    """Its providers are candidates, and the copy. ``raw``: keys are rotated in the loop."""

    raw: bool = False

    command = "decode --tune"
    description = "Time configurations of the generation kernel; none is timed before float64 agrees."
    epilog = ""
    modes = ("graph",)
    mode = "graph"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--cases", default="", help="as without --tune")
        add("--configs", default=",".join(_CANDIDATES), help="default: %(default)s")
        add("--raw", action="store_true", help="keys that are rotated in the loop")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Sweep, list[DecodeCase]]:
        texts = dict.fromkeys((_TABLE, *words(args.configs)))
        candidates = [Candidate(text) for text in texts]
        for each in candidates:
            each.config(configs.decode("sm_90", 2, 128, True))  # any base will do to see whether the text is right
        return cls([*candidates, PROVIDERS[COPY]], raw=args.raw), choose(words(args.cases))

    def open(self, case: DecodeCase, clock: Any) -> SweepTrial:
        return SweepTrial(self, case, clock)

    def summary(self, rows: list[Row]) -> str:
        """A line for each configuration: its time and its share of a copy's bandwidth in each case."""
        cases = list(dict.fromkeys(row["case"] for row in rows))
        cells: dict[str, dict[str, str]] = {p.name: {} for p in self.providers if isinstance(p, Candidate)}
        for row in report.timed(rows):
            if row["provider"] in cells:
                share = "" if row["of_copy"] is None else f" {100 * row['of_copy']:.0f}%"
                cells[row["provider"]][row["case"]] = f"{1e3 * row['ms']:.1f} us{share}"
        lines = [[name, *(found.get(case, "-") for case in cases)] for name, found in cells.items()]
        table = report.table(["block x warps x stages x programs", *cases], lines)
        return "\n".join([table, *report.not_timed(rows)])
