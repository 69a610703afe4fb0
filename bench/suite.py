"""What a suite is to the shared run and to the shared command line.

A **suite** is one benchmark: its cases, its providers, its options. A **trial** is one of its cases with inputs, at
which all providers are compared. A **provider** is whoever is measured (ours, a rival, a copy as the ceiling): an
object with ``name``, ``label`` and ``missing()``, the reason why it cannot run on this machine, or None. An **entry**
is a provider that has run once at a trial, with the verdict of its gate and with the functions that are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from bench import report, timing
from bench.gate import Verdict
from bench.names import dtype_name, words
from bench.timing import Measurement
from fused_rope_attn import testing

Row = dict[str, Any]
Times = Mapping[str, Measurement]  # by the names of providers
T = TypeVar("T")


@dataclass
class Entry:
    """``make(part)`` gives the zero-argument function of a pass that is timed.

    facts: fields of all of its rows. active: what is in force while it runs. scale: factor on its times, for a copy
    that moves only a share of the bytes. captures: whether CUDA-graph times are of a graph; a copy is timed as it is.
    """

    provider: Any
    verdict: Verdict
    make: Callable[[str], Callable[[], Any]]
    facts: Row = field(default_factory=dict)
    active: Callable[[], AbstractContextManager] = nullcontext
    scale: float = 1.0
    captures: bool = True


class Trial:
    """One case and its inputs. A subclass says how a provider enters it and what its rows hold."""

    measurement: Callable[[], Any] = Measurement  # what collects the samples of one provider
    measures_memory = False  # whether eager calls of each pass also get a peak of memory

    def __init__(self, providers: Sequence[Any]) -> None:
        self.providers = providers

    def passes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The passes that are timed here."""
        return asked

    def modes(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The modes that they are timed in: "eager", "graph", "host"."""
        return asked

    def unsupported(self, provider: Any) -> str | None:
        """Why a provider does not serve this case, or None."""
        return None

    def unsupported_pass(self, provider: Any, part: str) -> str | None:
        """Why a provider that serves this case has no such pass, or None."""
        return None

    def enter(self, provider: Any) -> Entry:
        """Run the provider once and judge what it computes. Raises what the provider raises."""
        raise NotImplementedError

    def gated(self) -> None:
        """Called when every provider has entered: what only the gate needed can be freed."""

    def fields(self, provider: Any) -> Row:
        """What a row says of the case and of its provider."""
        raise NotImplementedError

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Further fields of the timed rows, by provider: rates, ratios, plans."""
        return {}


class Suite:
    """A benchmark. Class attributes are the defaults of the options that all suites share.

    command: what follows ``python -m bench``, "" for attention. all_passes: what ``--passes`` chooses from, () where
    there is no choice. modes: what ``--mode`` chooses from, likewise. round_option: the option that sets how long each
    provider runs in each round, and its unit in ms; None where there is no choice. mirrored: whether every second round
    has the order of the one before it backwards.
    """

    command: ClassVar[str] = ""
    description: ClassVar[str] = ""
    epilog: ClassVar[str] = ""
    all_passes: ClassVar[tuple[str, ...]] = ("fwd", "bwd")
    passes: ClassVar[tuple[str, ...]] = ("fwd", "bwd")
    modes: ClassVar[tuple[str, ...]] = ("eager", "graph")
    mode: ClassVar[str] = "graph"
    rounds: ClassVar[int] = 5
    round_ms: ClassVar[float] = 10.0
    round_option: ClassVar[tuple[str, float] | None] = ("--round-ms", 1.0)
    mirrored: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # whether there are plots of its rows

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Options beyond the shared ones."""

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Suite, list[Any]]:
        """(the suite, the chosen cases). ValueError where the options name something unknown, or leave nothing."""
        raise NotImplementedError

    def listing(self, cases: list[Any]) -> str:
        """What ``--dry-run`` prints. Needs no GPU."""
        raise NotImplementedError

    def title(self, case: Any) -> str:
        """How messages name a case."""
        return f"{case.name} {case.shape}"

    def obstacle(self, case: Any) -> str | None:
        """Why a case cannot be measured on this machine at all, or None."""
        return None

    @classmethod
    def clock(cls, device: torch.device) -> Any:
        """What measures, a ``runner.Clock``. RuntimeError where this machine lacks what that needs."""
        return timing.GpuClock(device)

    def open(self, case: Any, clock: Any) -> Trial:
        """The case with inputs, on the device of ``clock`` (a ``runner.Clock``)."""
        raise NotImplementedError

    def case_report(self, rows: list[Row]) -> str:
        """What is printed after one case; nothing by default."""
        return ""

    def summary(self, rows: list[Row]) -> str:
        """What is printed at the end."""
        raise NotImplementedError

    @staticmethod
    def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
        """Write every plot that the rows allow and return the files. RuntimeError without matplotlib."""
        return []


def pick(
    table: Mapping[str, T],
    names: Iterable[str],
    *,
    always: Iterable[str] = (),
    groups: Mapping[str, list[str]] | None = None,
) -> list[T]:
    """Providers by name or by the name of a group, in the table's order; all without names.

    ``always``: those that are there whatever the names. ValueError for an unknown name.
    """
    groups = groups or {}
    wanted = [found for name in names for found in groups.get(name, [name])]
    unknown = [name for name in wanted if name not in table]
    if unknown:
        raise ValueError(f"unknown provider {', '.join(unknown)}; there are {', '.join((*groups, *table))}")
    chosen = {*wanted, *always} if wanted else set(table)
    return [provider for name, provider in table.items() if name in chosen]


def matching(cases: Iterable[T], text: str) -> list[T]:
    """Cases whose name contains one of the comma-separated words, all without words.

    ValueError that lists the names where none does.
    """
    cases, wanted = list(cases), [word.lower() for word in words(text)]
    chosen = [case for case in cases if not wanted or any(word in case.name.lower() for word in wanted)]
    if not chosen:
        names = dict.fromkeys(case.name for case in cases)
        raise ValueError(f"no name contains {' or '.join(wanted)}; there are {', '.join(names)}")
    return chosen


def provider_table(providers: Iterable[Any]) -> str:
    """Names, labels, pip names, and what each provider lacks here."""
    lines = [[p.name, p.label, ", ".join(getattr(p, "pip", ())) or "-", p.missing() or "here"] for p in providers]
    return report.table(["provider", "label", "pip", "status"], lines, left=4)


def case_fields(case: testing.Case) -> Row:
    """What a row says of a case of attention."""
    names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim")
    return {name: getattr(case, name) for name in names} | {"dtype": dtype_name(case.dtype)}


def never_missing() -> None:
    """``missing`` of a provider that needs no package beyond PyTorch."""


def forward_or_backward(run: Callable[..., Any], leaves: list[Any], given: Any, part: str) -> Callable[[], Any]:
    """The function of a pass that is timed: "fwd" calls ``run(*leaves)`` without gradients, "fwd_grad" builds the graph
    and drops it, "bwd" runs the backward of one graph again and again, "both" builds the graph every time. ``leaves``
    that want gradients get them."""
    if part == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return run(*leaves)

        return forward
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if part == "bwd":
        out = run(*leaves)
        return lambda: torch.autograd.grad(out, wanted, given, retain_graph=True)
    if part == "fwd_grad":
        return lambda: run(*leaves)
    if part == "both":
        return lambda: torch.autograd.grad(run(*leaves), wanted, given)
    raise ValueError(f"a pass is fwd, fwd_grad, bwd or both, not {part!r}")
