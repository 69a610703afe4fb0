"""``python -m bench rope``: the rotation alone, beside what a user can install and beside a copy of the same bytes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import command, report
from bench.gate import Compared, Verdict, ends, judge
from bench.names import DTYPES, dtype_name, length_name, short_dtype, words
from bench.suite import Entry, Row, Suite, Times, Trial, matching, pick, provider_table
from bench.suites.rotation import plots
from bench.suites.rotation import report as rotation_report
from bench.suites.rotation.providers import COPY, NORM_EPS, OURS, PROVIDERS, RopeProvider
from bench.timing import bandwidths
from fused_rope_attn import rope_tables, testing
from fused_rope_attn.attention.reference import rotate


@dataclass(frozen=True)
class RopeCase:
    """x, or q and k, of (B, N, H, D) for each H of ``heads``."""

    family: str
    batch: int
    heads: tuple[int, ...]
    length: int
    head_dim: int
    groups: tuple[str, ...]
    dtypes: tuple[str, ...]
    styles: tuple[str, ...]
    norms: bool = False  # q and k are normed first

    @property
    def name(self) -> str:
        return f"{self.family}-{length_name(self.length)}"


_STYLES = ("half", "interleaved")
CASES: tuple[RopeCase, ...] = (
    # The shape of the project that inspired this one, which timed a single tensor.
    *(RopeCase("Wide", 10, (96,), n, 128, ("wide",), ("bf16", "fp32"), _STYLES) for n in range(256, 1025, 128)),
    # q and k of models, in one launch where a provider has one.
    *(RopeCase("Small", 4, (8, 8), n, 64, ("models",), ("bf16",), _STYLES) for n in (512, 1024)),
    *(RopeCase("Llama3-8B", 2, (32, 8), n, 128, ("models",), ("bf16",), _STYLES) for n in (512, 1024, 2048, 4096)),
    RopeCase("Llama3-8B", 1, (32, 8), 16384, 128, ("models",), ("bf16",), _STYLES),
    RopeCase("Llama3-70B", 1, (64, 8), 4096, 128, ("models",), ("bf16",), _STYLES),
    RopeCase("Llama7B", 2, (32, 32), 4096, 128, ("models",), ("bf16",), _STYLES),
    # Models that norm q and k by head.
    *(RopeCase("Qwen3-0.6B", 4, (16, 8), n, 128, ("norms",), ("bf16",), _STYLES[:1], True) for n in (512, 2048, 4096)),
    *(RopeCase("Qwen3-8B", 2, (32, 8), n, 128, ("norms",), ("bf16",), _STYLES[:1], True) for n in (1024, 2048, 4096)),
    RopeCase("Qwen3-8B", 1, (32, 8), 16384, 128, ("norms",), ("bf16",), _STYLES[:1], True),
    RopeCase("Gemma3-4B", 2, (8, 4), 4096, 256, ("norms",), ("bf16",), _STYLES[:1], True),
)
GROUPS = ("all", *dict.fromkeys(group for case in CASES for group in case.groups))


@dataclass(frozen=True)
class Problem:
    """One case in one dtype and style."""

    case: RopeCase
    dtype: torch.dtype
    interleaved: bool

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def style(self) -> str:
        return "interleaved" if self.interleaved else "half"

    @property
    def shape(self) -> str:
        """``B2 H32+8 N4096 D128 bf16 half``."""
        c = self.case
        heads = "+".join(map(str, c.heads))
        norms = " norms" * c.norms
        return f"B{c.batch} H{heads} N{c.length} D{c.head_dim} {short_dtype(self.dtype)} {self.style}{norms}"

    @property
    def bytes(self) -> int:
        """Read and written: twice the tensors. The tables, which stay in the cache, count nothing."""
        c = self.case
        return 2 * c.batch * sum(c.heads) * c.length * c.head_dim * self.dtype.itemsize


class Subject:
    """One provider on one problem's tensors; ``weights`` are its norms', none where it has no norms."""

    def __init__(
        self,
        provider: RopeProvider,
        xs: list[Tensor],
        dos: list[Tensor],
        weights: list[Tensor],
        cos: Tensor,
        sin: Tensor,
        problem: Problem,
    ) -> None:
        # A copy has a ceiling to give, not a gradient for the weights.
        self._weights = [weight.detach().requires_grad_(not provider.copies) for weight in weights]
        self.provider, self.interleaved, self.count = provider, problem.interleaved, len(xs)
        self._xs, self._dos = xs, dos
        self._tables = provider.prepare(cos, sin, xs[0].dtype, problem.interleaved)

    def _tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        # Whoever works in place gets memory of its own.
        return [x.clone() if self.provider.in_place else x for x in self.provider.views(tensors)]

    def _run(self, xs: list[Tensor]) -> list[Tensor]:
        if self._weights:
            assert self.provider.norm is not None  # the trial has asked
            return self.provider.norm(xs, self._weights, self._tables, self.interleaved)
        return self.provider.rotate(xs, self._tables, self.interleaved)

    def _leaves(self, xs: list[Tensor]) -> list[Tensor]:
        return xs + [weight for weight in self._weights if weight.requires_grad]

    def once(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs and gradients (B, N, H, D), and the weights' gradients (D,)."""
        xs = [x.detach().requires_grad_() for x in self._tensors(self._xs)]
        # Not a leaf: what works in place may not overwrite one that wants a gradient.
        outs = self._run([x.view_as(x) for x in xs])
        results = [out.detach().clone() for out in outs]
        gradients = list(torch.autograd.grad(outs, self._leaves(xs), self._tensors(self._dos)))
        of_xs, of_weights = gradients[: len(xs)], gradients[len(xs) :]
        return self.provider.back(results, self.count), self.provider.back(of_xs, self.count), of_weights

    def make(self, part: str) -> Callable[[], list[Tensor]]:
        """``fwd`` runs without gradients, ``bwd`` again and again on one graph; returns what a replay overwrites."""
        xs, given = self._tensors(self._xs), self._tensors(self._dos)

        def fresh(tensors) -> list[Tensor]:
            return [] if self.provider.in_place else list(tensors)

        if part == "fwd":

            def forward() -> list[Tensor]:
                with torch.no_grad():
                    return fresh(self._run(xs))

            return forward
        leaves = [x.detach().requires_grad_() for x in xs]
        outs = self._run([x.view_as(x) for x in leaves])
        return lambda: fresh(torch.autograd.grad(outs, self._leaves(leaves), given, retain_graph=True))


class RopeTrial(Trial):
    """One problem."""

    def __init__(self, providers: list[RopeProvider], problem: Problem, clock: Any) -> None:
        super().__init__(providers)
        self._problem, self._clock = problem, clock
        case, generator = problem.case, torch.Generator(clock.device).manual_seed(0)

        def normal() -> list[Tensor]:
            sizes = [(case.batch, case.length, heads, case.head_dim) for heads in case.heads]
            return [torch.randn(s, generator=generator, device=clock.device, dtype=problem.dtype) for s in sizes]

        self._xs, self._dos = normal(), normal()
        options = {"generator": generator, "device": clock.device, "dtype": problem.dtype}
        self._weights = [torch.randn(case.head_dim, **options) for _ in case.heads if case.norms]
        self._cos, self._sin = rope_tables(case.length, case.head_dim, device=clock.device)

    def unsupported(self, provider: RopeProvider) -> str | None:
        return provider.unsupported(self._problem.interleaved, self._problem.case.norms)

    def enter(self, provider: RopeProvider) -> Entry:
        begin = time.perf_counter()
        subject = Subject(provider, self._xs, self._dos, self._weights, self._cos, self._sin, self._problem)
        outs, gradients, of_weights = subject.once()
        self._clock.synchronize()
        seconds = time.perf_counter() - begin
        if provider.copies:
            same = all(torch.equal(a, b) for a, b in zip((*outs, *gradients), (*self._xs, *self._dos)))
            verdict = Verdict() if same else Verdict("failed", detail="is no copy")
        else:
            if self._weights:
                compared = self._compared_with_norms(provider, outs, gradients, of_weights)
            else:
                compared = self._compared(provider, outs, gradients)
            verdict = judge(compared, self._problem.dtype, forgiving=provider.name != OURS)
        verdict = replace(verdict, first_call_s=seconds)
        return Entry(provider, verdict, subject.make, facts=verdict.fields())

    def _compared(self, provider: RopeProvider, outs: list[Tensor], gradients: list[Tensor]) -> Iterator[Compared]:
        """The first and the last head of every tensor, (N, D), beside float64 and eager PyTorch."""
        cos, sin = self._tables(provider)
        for name, results, inputs in (("o", outs, self._xs), ("dx", gradients, self._dos)):
            options = {"interleaved": self._problem.interleaved, "inverse": name == "dx"}
            for result, x in zip(results, inputs):
                for batch, head in ends(x.shape[0], x.shape[2]):
                    part = x[batch, :, head]
                    ref64 = rotate(part.double(), cos.double(), sin.double(), **options)
                    yield name, result[batch, :, head], ref64, rotate(part, cos, sin, **options)

    def _compared_with_norms(
        self, provider: RopeProvider, outs: list[Tensor], gradients: list[Tensor], of_weights: list[Tensor]
    ) -> Iterator[Compared]:
        """The same with norms, and the weights' gradients, (1, D)."""
        tables = self._tables(provider)
        options = {"rotary_dim": self._problem.case.head_dim, "interleaved": self._problem.interleaved}
        options |= {"norm_eps": NORM_EPS, "norm_offset": 0.0}
        for x, dy, weight, y, dx, dweight in zip(self._xs, self._dos, self._weights, outs, gradients, of_weights):
            given = x.transpose(1, 2), dy.transpose(1, 2), *tables
            ref64, eager = (
                testing.run_rotation_reference(*given, dtype, weight=weight, **options)
                for dtype in (torch.float64, None)
            )
            for batch, head in ends(x.shape[0], x.shape[2]):
                yield "o", y[batch, :, head], ref64.y[batch, head], eager.y[batch, head]
                yield "dx", dx[batch, :, head], ref64.dx[batch, head], eager.dx[batch, head]
            if ref64.dweight is not None and eager.dweight is not None:
                yield "dweight", dweight[None], ref64.dweight[None], eager.dweight[None]

    def _tables(self, provider: RopeProvider) -> tuple[Tensor, Tensor]:
        """The tables that the provider is held to."""
        if provider.rounded_tables:  # equal for everybody who gets them, and nobody's error
            return self._cos.to(self._problem.dtype), self._sin.to(self._problem.dtype)
        return self._cos, self._sin

    def fields(self, provider: RopeProvider) -> Row:
        problem, case = self._problem, self._problem.case
        return {
            "case": case.name,
            "family": case.family,
            "groups": case.groups,
            "shape": problem.shape,
            "batch": case.batch,
            "heads": case.heads,
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": dtype_name(problem.dtype),
            "style": problem.style,
            "norms": case.norms,
            "bytes": problem.bytes,
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name == OURS,
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        rows = bandwidths(self._problem.bytes, measured, COPY)
        if part == "bwd" and self._weights:
            # A norm's gradient reads what was normed too: three tensors where a copy moves two.
            for name in (name for name in rows if name != COPY):
                rows[name] = {key: value and 1.5 * value for key, value in rows[name].items()}
        return rows


@dataclass
class Rotation(Suite):
    providers: list[RopeProvider]

    command = "rope"
    description = "Time the rotation alone; nobody is timed before float64 agrees."
    epilog = "further: python -m bench rope plot FILE..."
    draws = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--group", default="", help=f"comma-separated: {', '.join(GROUPS)} (default: all)")
        add("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
        add("--providers", default="", help="names (default: everybody); ours and the copy always run")
        add("--dtype", default="", help="of bf16, fp32 (default: those of the case)")
        add("--style", default="", help="of half, interleaved (default: both)")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Rotation, list[Problem]]:
        measured = pick(PROVIDERS, words(args.providers), always=(OURS, COPY))
        return cls(measured), problems(words(args.group), args.cases, words(args.dtype), words(args.style))

    def listing(self, cases: list[Problem]) -> str:
        lines = [[p.name, p.shape, f"{p.bytes / 2**20:.0f}"] for p in cases]
        return f"{report.table(['case', 'shape', 'MiB moved'], lines, left=2)}\n\n{provider_table(self.providers)}"

    def open(self, case: Problem, clock: Any) -> RopeTrial:
        return RopeTrial(self.providers, case, clock)

    def summary(self, rows: list[Row]) -> str:
        return rotation_report.summary(rows)

    @staticmethod
    def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
        return plots.draw(rows, directory, mode)


def problems(groups: list[str], names: str, dtypes: list[str], styles: list[str]) -> list[Problem]:
    """The selected cases in the selected dtypes and styles; ValueError for an unknown word or an empty selection."""
    for kind, chosen, known in (
        ("group", groups, GROUPS),
        ("dtype", dtypes, tuple(DTYPES)),
        ("style", styles, _STYLES),
    ):
        unknown = [word for word in chosen if word not in known]
        if unknown:
            raise ValueError(f"unknown {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    cases = [case for case in CASES if not groups or "all" in groups or set(groups) & set(case.groups)]
    found = [
        Problem(case, DTYPES[dtype], style == "interleaved")
        for case in matching(cases, names)
        for dtype in case.dtypes
        if not dtypes or dtype in dtypes
        for style in case.styles
        if not styles or style in styles
    ]
    if not found:
        raise ValueError(f"no case of these comes in {', '.join((*dtypes, *styles))}")
    return found


def main(argv: list[str]) -> int:
    return command.main(Rotation, argv)
