"""``python -m bench rope``: the rotation alone against what a user can install, and against a copy of the same bytes.

As everywhere here: equal inputs and tables, prepared before the clock runs; nobody is timed before float64 agrees;
rounds are interleaved in one process and compared round by round; losses are printed like wins.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import readme, report, rope_report
from bench.cases import DTYPES
from bench.environment import ROOT, card, environment
from bench.gate import _LOOSE_RMS, _rms_ratio
from bench.rope_providers import COPY, OURS, RopeProvider, select
from bench.timing import Options, interleave, ratio
from fused_rope_attn import rope_tables, testing
from fused_rope_attn.attention.reference import rotate

RESULTS = ROOT / "bench" / "results"
_MODES = {"eager": ("eager",), "graph": ("graph",), "both": ("graph", "eager")}


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

    @property
    def name(self) -> str:
        return f"{self.family}-{self.length // 1024}K" if self.length % 1024 == 0 else f"{self.family}-{self.length}"


_BOTH = ("half", "interleaved")
CASES: tuple[RopeCase, ...] = (
    # The shape of the project that inspired this one, which timed a single tensor.
    *(RopeCase("Wide", 10, (96,), n, 128, ("wide",), ("bf16", "fp32"), _BOTH) for n in range(256, 1025, 128)),
    # q and k of models, in one launch where a provider has one.
    *(RopeCase("Small", 4, (8, 8), n, 64, ("models",), ("bf16",), _BOTH) for n in (512, 1024)),
    *(RopeCase("Llama3-8B", 2, (32, 8), n, 128, ("models",), ("bf16",), _BOTH) for n in (512, 1024, 2048, 4096)),
    RopeCase("Llama3-8B", 1, (32, 8), 16384, 128, ("models",), ("bf16",), _BOTH),
    RopeCase("Llama3-70B", 1, (64, 8), 4096, 128, ("models",), ("bf16",), _BOTH),
    RopeCase("Llama7B", 2, (32, 32), 4096, 128, ("models",), ("bf16",), _BOTH),
)
GROUPS = ("all", *dict.fromkeys(group for case in CASES for group in case.groups))


@dataclass(frozen=True)
class Problem:
    """One case in one dtype and style."""

    case: RopeCase
    dtype: torch.dtype
    interleaved: bool

    @property
    def style(self) -> str:
        return "interleaved" if self.interleaved else "half"

    @property
    def shape(self) -> str:
        """``B2 H32+8 N4096 D128 bf16 half``."""
        c = self.case
        dtype = next(name for name, dtype in DTYPES.items() if dtype is self.dtype)
        return f"B{c.batch} H{'+'.join(map(str, c.heads))} N{c.length} D{c.head_dim} {dtype} {self.style}"

    @property
    def bytes(self) -> int:
        """Read and written: twice the tensors. The tables, which stay in the cache, count nothing."""
        c = self.case
        return 2 * c.batch * sum(c.heads) * c.length * c.head_dim * self.dtype.itemsize


class Subject:
    """One provider on one problem's tensors."""

    def __init__(self, provider: RopeProvider, xs: list[Tensor], dos: list[Tensor], cos: Tensor, sin: Tensor, problem):
        self.provider, self.interleaved, self.count = provider, problem.interleaved, len(xs)
        self._xs, self._dos = xs, dos
        self._tables = provider.prepare(cos, sin, xs[0].dtype, problem.interleaved)

    def _tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        # Whoever works in place gets memory of its own.
        return [x.clone() if self.provider.in_place else x for x in self.provider.views(tensors)]

    def _run(self, xs: list[Tensor]) -> list[Tensor]:
        return self.provider.rotate(xs, self._tables, self.interleaved)

    def once(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients (B, N, H, D)."""
        xs = [x.detach().requires_grad_() for x in self._tensors(self._xs)]
        # Not a leaf: what works in place may not overwrite one that wants a gradient.
        outs = self._run([x.view_as(x) for x in xs])
        results = [out.detach().clone() for out in outs]
        gradients = torch.autograd.grad(outs, xs, self._tensors(self._dos))
        return self.provider.back(results, self.count), self.provider.back(list(gradients), self.count)

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
        return lambda: fresh(torch.autograd.grad(outs, leaves, given, retain_graph=True))


@dataclass
class Run:
    """Everything that outlasts a problem; ``clock`` as in ``runner.Clock``."""

    providers: list[RopeProvider]
    options: Options
    clock: Any
    environment: dict[str, Any]
    progress: Callable[[str], None] = lambda message: None
    not_run: list[str] = field(default_factory=list)

    def rows(self, problems: list[Problem]) -> Iterator[list[dict[str, Any]]]:
        """Rows of one problem after the other; at the deadline it stops and notes what is left."""
        for index, problem in enumerate(problems):
            if self.options.out_of_time():
                self.not_run += [f"{left.case.name} {left.shape}" for left in problems[index:]]
                return
            self.progress(f"[{index + 1}/{len(problems)}] {problem.case.name} {problem.shape}")
            yield self._problem(problem)

    def _problem(self, problem: Problem) -> list[dict[str, Any]]:
        case, device = problem.case, self.clock.device
        generator = torch.Generator(device).manual_seed(0)

        def normal() -> list[Tensor]:
            sizes = [(case.batch, case.length, heads, case.head_dim) for heads in case.heads]
            return [torch.randn(s, generator=generator, device=device, dtype=problem.dtype) for s in sizes]

        xs, dos = normal(), normal()
        cos, sin = rope_tables(case.length, case.head_dim, device=device)
        rows, subjects, facts = [], {}, {}
        for provider in self.providers:
            reason = provider.missing()
            status = "missing" if reason else "unsupported"
            reason = reason or provider.unsupported(problem.interleaved)
            if reason is None:
                try:
                    subject = Subject(provider, xs, dos, cos, sin, problem)
                    facts[provider.name] = self._gate(subject, xs, dos, cos, sin, problem)
                    status, reason = facts[provider.name]["status"], facts[provider.name]["detail"]
                    if status != "failed":
                        subjects[provider.name] = subject
                        continue
                except Exception as error:
                    status, reason = "error", _sentence(error)
                    self.clock.synchronize()
            rows.append(self._row(problem, provider, None, None, status, reason, facts.get(provider.name, {})))
        for mode in _MODES[self.options.mode]:
            for part in self.options.passes:
                rows += self._timed(problem, part, mode, subjects, facts)
        del subjects, xs, dos
        self.clock.release()
        return rows

    def _gate(self, subject: Subject, xs, dos, cos, sin, problem: Problem) -> dict[str, Any]:
        """The first and the last head of every tensor against float64; rivals may be off as far as in ``gate``."""
        provider, begin = subject.provider, time.perf_counter()
        outs, gradients = subject.once()
        self.clock.synchronize()
        verdict = {"first_call_s": time.perf_counter() - begin, "status": "ok", "detail": ""}
        verdict |= {"gate_row_ratio": 0.0, "gate_rms_ratio": 0.0}
        if provider.copies:
            same = all(torch.equal(a, b) for a, b in zip((*outs, *gradients), (*xs, *dos)))
            return verdict if same else verdict | {"status": "failed", "detail": "is no copy"}
        if provider.rounded_tables:  # equal for everybody who gets them, and nobody's error
            cos, sin = cos.to(problem.dtype), sin.to(problem.dtype)
        for name, results, inputs, inverse in (("o", outs, xs, False), ("dx", gradients, dos, True)):
            for result, x in zip(results, inputs):
                for batch, head in {(0, 0), (x.shape[0] - 1, x.shape[2] - 1)}:
                    part, got = x[batch, :, head], result[batch, :, head]
                    options = {"interleaved": problem.interleaved, "inverse": inverse}
                    ref64 = rotate(part.double(), cos.double(), sin.double(), **options)
                    eager = rotate(part, cos, sin, **options)
                    held = testing.compare(name, got, ref64, eager, grad=inverse, dtype=problem.dtype)
                    rms = _rms_ratio(got, ref64, eager)
                    verdict["gate_row_ratio"] = max(verdict["gate_row_ratio"], held.row_ratio)
                    verdict["gate_rms_ratio"] = max(verdict["gate_rms_ratio"], rms)
                    if not held.ok:
                        loose = provider.name != OURS and rms <= _LOOSE_RMS and verdict["status"] != "failed"
                        verdict |= {"status": "loose" if loose else "failed", "detail": f"{name}: {held.detail}"}
        return verdict

    def _timed(self, problem, part, mode, subjects, facts) -> list[dict[str, Any]]:
        fns, calls, rows = {}, {}, []
        for name, subject in subjects.items():
            try:
                make = subject.make
                fn = self.clock.capture(lambda: make(part)) if mode == "graph" else make(part)  # noqa: B023
                calls[name] = self.clock.calls_for(fn, self.options.round_ms)
                fns[name] = fn
            except Exception as error:
                self.clock.synchronize()
                status = "no-graph" if mode == "graph" else "error"
                rows.append(self._row(problem, subject.provider, part, mode, status, _sentence(error), facts[name]))
        measured, failed = interleave(
            fns, self.clock.sample, calls, self.options.rounds, self.options.out_of_time
        )  # fmt: skip
        for name, error in failed.items():
            rows.append(self._row(problem, subjects[name].provider, part, mode, "error", _sentence(error), facts[name]))
        medians = {name: measurement.round_medians for name, measurement in measured.items()}
        for name, measurement in measured.items():
            fact = facts[name]
            row = self._row(problem, subjects[name].provider, part, mode, fact["status"], fact["detail"], fact)
            median, p20, p80 = measurement.quantiles()
            row |= {"ms": median, "p20": p20, "p80": p80, "rounds": medians[name], "calls": len(measurement.samples)}
            row |= {"gb_s": problem.bytes / median * 1e-6}
            row["of_copy"] = ratio(medians[COPY], medians[name]) if COPY in medians else None
            rows.append(row)
        return rows

    def _row(self, problem: Problem, provider: RopeProvider, part, mode, status, detail, facts) -> dict[str, Any]:
        case = problem.case
        row = {
            "case": case.name,
            "family": case.family,
            "groups": case.groups,
            "shape": problem.shape,
            "batch": case.batch,
            "heads": case.heads,
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": str(problem.dtype).removeprefix("torch."),
            "style": problem.style,
            "bytes": problem.bytes,
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name == OURS,
            "pass": part,
            "mode": mode,
            "status": status,
            "detail": detail,
        }
        return row | {k: v for k, v in facts.items() if k not in ("status", "detail")} | self.environment


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def problems(groups: list[str], substrings: list[str], dtypes: list[str], styles: list[str]) -> list[Problem]:
    """The selected cases; ValueError for an unknown word or an empty selection."""
    for kind, words, known in (("group", groups, GROUPS), ("dtype", dtypes, tuple(DTYPES)), ("style", styles, _BOTH)):
        unknown = [word for word in words if word not in known]
        if unknown:
            raise ValueError(f"unknown {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [
        Problem(case, DTYPES[dtype], style == "interleaved")
        for case in CASES
        if (not groups or "all" in groups or set(groups) & set(case.groups))
        and (not substrings or any(text.lower() in case.name.lower() for text in substrings))
        for dtype in case.dtypes
        if not dtypes or dtype in dtypes
        for style in case.styles
        if not styles or style in styles
    ]
    if not chosen:
        raise ValueError("no case is left")
    return chosen


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 1 ours is red (or, with ``--check``, README is stale), 2 cannot run here."""
    if argv[:1] == ["plot"]:
        return rope_report.plot_main(argv[1:], RESULTS / "plots")
    if argv[:1] == ["readme"]:
        return readme.block_main(argv[1:], "rope", rope_report.block, ROOT / "README.md")
    args = _parser().parse_args(argv)
    try:
        chosen = problems(*(_words(text) for text in (args.group, args.cases, args.dtype, args.style)))
        rivals = select(_words(args.providers))
        passes = tuple(part for part in ("fwd", "bwd") if part in _words(args.passes))
        if not passes or set(_words(args.passes)) - set(passes):
            raise ValueError(f"--passes takes fwd and bwd, not {args.passes!r}")
    except ValueError as error:
        print(f"bench rope: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        people = [[p.name, p.label, ", ".join(p.pip) or "-", p.missing() or "here"] for p in rivals]
        lines = [[p.case.name, p.shape, f"{p.bytes / 2**20:.0f}"] for p in chosen]
        print(report.table(["case", "shape", "MiB moved"], lines, left=2), end="\n\n")
        print(report.table(["provider", "label", "pip", "status"], people, left=4))
        return 0
    if not torch.cuda.is_available():
        print("bench rope: no GPU here; --dry-run lists what would run.", file=sys.stderr)
        return 2
    from bench.timing import GpuClock

    begin, facts = time.monotonic(), environment()
    gpu = card(facts["gpu"])
    out = args.out or RESULTS / f"rope-{gpu}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.jsonl"
    deadline = begin + args.time_budget if args.time_budget else float("inf")
    options = Options(passes, args.mode, args.rounds, args.round_ms, deadline)
    clock = GpuClock(torch.device("cuda", torch.cuda.current_device()))
    measurement = Run(rivals, options, clock, facts, lambda text: print(text, file=sys.stderr, flush=True))
    rows: list[dict[str, Any]] = []
    for block in measurement.rows(chosen):
        rows += block
        report.write_lines(out, block)
    print(rope_report.summary(rows))
    if measurement.not_run:
        print(f"\nNot run, the time budget of {args.time_budget:g} s was spent: {'; '.join(measurement.not_run)}")
    print(f"\n{len(rows)} rows in {out} after {time.monotonic() - begin:.0f} s")
    if args.plot_dir != "none":
        rope_report.draw(rows, Path(args.plot_dir))
    return int(report.red(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench rope",
        description="Time the rotation alone; nobody is timed before float64 agrees.",
        epilog="further: python -m bench rope plot FILE..., python -m bench rope readme FILE... [--check]",
    )
    parser.add_argument("--group", default="", help=f"comma-separated: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
    parser.add_argument("--providers", default="", help="names (default: everybody); ours and the copy always run")
    parser.add_argument("--dtype", default="", help="of bf16, fp32 (default: those of the case)")
    parser.add_argument("--style", default="", help="of half, interleaved (default: both)")
    parser.add_argument("--passes", default="fwd,bwd", help="of fwd, bwd (default: both)")
    parser.add_argument("--mode", choices=tuple(_MODES), default="graph", help="CUDA graphs, eager calls, or both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=10.0, help="GPU time for each provider in each round")
    parser.add_argument("--out", type=Path, help="JSON lines, appended (default: bench/results/rope-GPU-DATE.jsonl)")
    parser.add_argument("--plot-dir", default=str(RESULTS / "plots"), help="or none (default: bench/results/plots)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="list cases and providers; no GPU needed")
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
