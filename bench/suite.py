"""The parts of a benchmark: cases, providers, trials and suites.

A **case** is one problem, with ``name``, ``shape`` and ``groups``. A **provider** is one implementation: ours, a rival,
or a ceiling such as a copy. A **trial** is one case with its inputs; it runs each provider once, judges what the
provider computed, and returns an **entry** with the functions that are timed. A **suite** is one command with
its cases and providers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from baselines.base import dtype_name, nothing_missing
from bench import timing
from bench.gate import Verdict
from bench.report import Row

# In shapes and on command lines.
SHORT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Times = Mapping[str, Any]  # by provider: what the clock's ``measurement`` makes


@dataclass(frozen=True)
class Provider:
    """One implementation. Suites add fields for their calls.

    role: "ours", "rival", "bare" (attention without the rotation) or "ceiling" (computes nothing: a copy, one GPU).
    missing: returns why it cannot run on this machine, or None. backward: it has one. active: a context that is entered
    while it runs.
    """

    name: str
    label: str
    role: str = "rival"
    missing: Callable[[], str | None] = nothing_missing
    backward: bool = True
    active: Callable[[], AbstractContextManager] = nullcontext

    @property
    def ours(self) -> bool:
        return self.role == "ours"


def by_name(providers: Iterable[Any]) -> dict[str, Any]:
    """Return providers by their names, in the order of reports."""
    return {provider.name: provider for provider in providers}


def length_name(length: int) -> str:
    """Return ``4K`` for 4096, ``640`` for 640."""
    return f"{length // 1024}K" if length and length % 1024 == 0 else str(length)


def words(text: str) -> list[str]:
    """Return the words of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def keep_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (N, D/2) float32 tables as they are: the form of a provider that needs no other one."""
    return cos, sin


def normal(shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return normally distributed tensors, equal for equal shapes and devices."""
    drawn: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    return [torch.randn(*shape, **drawn) for shape in shapes]


@dataclass
class Entry:
    """A provider that has run once. ``make(part)`` returns the zero-argument function of a pass.

    facts: fields of all its rows. active: a context that is entered while it runs. captures: whether it is captured as
    a CUDA graph; a copy is timed directly.
    """

    provider: Any
    verdict: Verdict
    make: Callable[[str], Callable[[], Any]]
    facts: Row = field(default_factory=dict)
    active: Callable[[], AbstractContextManager] = nullcontext
    captures: bool = True


@dataclass
class Options:
    """The choices of one run. None for ``passes``, ``modes`` and ``round_ms`` leaves them to the trial or the suite.

    round_ms: device time of each provider in each round.
    """

    passes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    rounds: int = 5
    round_ms: float = 20.0


class Trial:
    """One case with its inputs. A subclass runs and judges providers and says what their rows hold."""

    default_modes: tuple[str, ...] = ("graph",)
    default_passes: tuple[str, ...] = ("fwd", "bwd")
    facts: tuple[str, ...] = ()  # attributes of the case that rows hold

    def __init__(self, case: Any, providers: Sequence[Any], clock: Any, options: Options) -> None:
        self.case, self.providers, self.clock, self.options = case, providers, clock, options
        self.open()

    def open(self) -> None:
        """Make the inputs of the case."""

    def modes(self) -> tuple[str, ...]:
        """Return the modes of this case: those that were asked for, or the default ones."""
        return self.options.modes or self.default_modes

    def unsupported(self, provider: Any) -> str | None:
        """Return why a provider does not serve this case, or None."""
        return None

    def unsupported_pass(self, provider: Any, part: str) -> str | None:
        """Return why a provider that serves this case has no such pass, or None."""
        return None if provider.backward or part == "fwd" else f"{provider.label} has a forward pass only"

    def call(self, provider: Any, part: str) -> tuple[Callable[..., Any], list[Tensor], Any]:
        """Return ``run``, the tensors that it takes and the gradient of its result, for a pass or for the "gate"."""
        raise NotImplementedError

    def judge(self, provider: Any, out: Any, grads: Sequence[Tensor]) -> Verdict:
        """Compare the result with float64, and the gradients; ``grads`` may be empty."""
        raise NotImplementedError

    def enter(self, provider: Any) -> Entry:
        """Run the provider once and judge what it computes. Raises what the provider raises."""
        needs_grads = provider.backward and self.options.passes != ("fwd",)
        run, leaves, given = self.call(provider, "gate")

        def once() -> tuple[Any, Sequence[Tensor]]:
            with provider.active():
                with torch.set_grad_enabled(needs_grads):
                    out = run(*leaves)
                return out, torch.autograd.grad(out, leaves, given) if needs_grads else ()

        def make(part: str) -> Callable[[], Any]:
            return forward_or_backward(*self.call(provider, part), part)

        verdict = self.judge(provider, *once())
        return Entry(provider, verdict, make, {"peak_mib": self.clock.peak_mib(once)}, provider.active)

    def gated(self) -> None:
        """Free what only the gate needed; called after every provider has entered."""

    def fields(self) -> Row:
        """Return what a row says of the case, in addition to its name, shape and groups."""
        found = {name: getattr(self.case, name) for name in self.facts}
        return found | ({"dtype": dtype_name(found["dtype"])} if "dtype" in found else {})

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Return further fields of the timed rows by provider: rates, ratios, plans."""
        return {}


@dataclass(frozen=True)
class Suite:
    """One benchmark and its command.

    cases: all of them. default_cases: what runs without ``--cases``; "" is everything. trial: opens a case. table: the
    providers of a case. passes, modes: what ``--passes`` and ``--mode`` choose from. adapt: changes the chosen cases
    and the options by the arguments. clock: makes the clock of a device and a mode.
    """

    name: str
    description: str
    cases: Sequence[Any]
    trial: Callable[[Any, Sequence[Any], Any, Options], Trial]
    table: Callable[[Any], Mapping[str, Any]]
    default_cases: str = ""
    passes: tuple[str, ...] = ("fwd", "bwd")
    modes: tuple[str, ...] = ("eager", "graph")
    rounds: int = 5
    round_ms: float = 10.0
    adapt: Callable[[list[Any], Options, argparse.Namespace], list[Any]] = lambda cases, options, args: cases
    clock: Callable[[torch.device, Options], Any] = lambda device, options: timing.GpuClock(device)

    def choose(self, text: str) -> list[Any]:
        """Return the cases that any of the comma-separated words names; the default ones without words.

        A word is a group or a part of a case's name or shape. Words joined by + must all fit: ``table+4K``. ValueError
        lists what there is where a word fits nothing.
        """

        def fits(case: Any, part: str) -> bool:
            return part in case.groups or part in f"{case.name} {case.shape}".lower()

        asked, chosen = words(text or self.default_cases), []
        for word in asked:
            found = [case for case in self.cases if all(fits(case, part) for part in word.lower().split("+"))]
            if not found:
                groups = ", ".join(dict.fromkeys(group for case in self.cases for group in case.groups))
                names = ", ".join(dict.fromkeys(case.name for case in self.cases))
                raise ValueError(f"no case fits {word!r}; groups are {groups}, names {names}")
            chosen += found
        return [case for case in self.cases if case in chosen or not asked]

    def providers(self, case: Any, names: Sequence[str]) -> list[Any]:
        """Return the providers of a case by name, in the order of its table; unknown names are left out."""
        table = self.table(case)
        return [provider for name, provider in table.items() if not names or name in names]

    def check_providers(self, cases: Iterable[Any], names: Sequence[str]) -> None:
        """Raise ValueError for a name that no case has."""
        known = dict.fromkeys(name for case in cases for name in self.table(case))
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown provider {', '.join(unknown)}; there are {', '.join(known)}")


def forward_or_backward(run: Callable[..., Any], leaves: list[Any], given: Any, part: str) -> Callable[[], Any]:
    """Return the function of a pass that is timed.

    part: "fwd" calls ``run(*leaves)`` without gradients, "fwd_grad" builds the graph and drops it, "bwd" runs the
    backward of one graph again and again, "both" builds the graph every time. given: the gradient of the output.
    """
    if part == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return run(*leaves)

        return forward
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if part == "bwd":
        out = run(*leaves)
        return lambda: torch.autograd.grad(out, wanted, given, retain_graph=True)
    if part == "fwd_grad":
        return lambda: run(*leaves)
    if part == "both":
        return lambda: torch.autograd.grad(run(*leaves), wanted, given)
    raise ValueError(f"a pass must be fwd, fwd_grad, bwd or both, not {part!r}")
