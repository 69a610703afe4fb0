"""``python -m bench corope``: Co-RoPE's kernels beside its definition in eager PyTorch, in chunks and all at once.

Nobody is timed before float64 agrees, rounds are interleaved in one process, and times are of eager calls: the kernels
take milliseconds. Memory is the allocator's peak of one forward and backward pass, o and gradients included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import command, report
from bench.gate import Compared, judge
from bench.names import dtype_name
from bench.report import PASSES, timed
from bench.suite import Entry, Row, Suite, Trial, forward_or_backward, matching
from bench.tables import markdown, milliseconds, provenance
from bench.timing import ratio
from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import reference

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS = "corope"
_BASE = 10000.0


@dataclass(frozen=True)
class CoRopeCase:
    """q of (batch, heads[0], length, head_dim), k and v with heads[1], causal."""

    name: str
    batch: int
    heads: tuple[int, int]
    length: int
    head_dim: int

    @property
    def shape(self) -> str:
        """``B1 H32/8 N1024 D128``."""
        return f"B{self.batch} H{self.heads[0]}/{self.heads[1]} N{self.length} D{self.head_dim}"


CASES = (
    CoRopeCase("CoRoPE-1K", 1, (32, 8), 1024, 128),
    CoRopeCase("CoRoPE-4K", 1, (32, 8), 4096, 128),
    CoRopeCase("CoRoPE-8K", 1, (32, 8), 8192, 128),
    CoRopeCase("CoRoPE-MQA-8K", 1, (16, 1), 8192, 128),
)


@dataclass(frozen=True)
class CoRopeProvider:
    """``attention(q, k, v) -> o``, for at most ``longest`` tokens."""

    name: str
    label: str
    attention: Attend
    longest: int | None = None

    def missing(self) -> None:
        return None


def _definition(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return reference.attention(q, k, v, base=_BASE, softmax_scale=q.shape[3] ** -0.5, **options)


PROVIDERS = (
    CoRopeProvider(OURS, "`corope_attention`", lambda q, k, v: corope_attention(q, k, v, base=_BASE)),
    # Angles grow with N squared: 1024 tokens take about 20 GiB at once, 8192 in chunks a quarter of a minute.
    CoRopeProvider("chunked", "eager, in chunks", _definition, 2048),
    CoRopeProvider("dense", "eager, at once", lambda q, k, v: _definition(q, k, v, chunk_angles=1 << 62), 1024),
)


def _once(attention: Attend, inputs: Sequence[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attention(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


class CoRopeTrial(Trial):
    """One case, in ``dtype``."""

    def __init__(self, providers: Sequence[CoRopeProvider], case: CoRopeCase, clock: Any, dtype: torch.dtype) -> None:
        super().__init__(providers)
        self._case, self._clock, self._dtype = case, clock, dtype
        generator = torch.Generator(clock.device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (case.batch, case.length, heads, case.head_dim)
            return torch.randn(shape, generator=generator, device=clock.device).to(dtype).transpose(1, 2)

        self._inputs = [normal(heads) for heads in (case.heads[0], case.heads[1], case.heads[1])]
        self._do = normal(case.heads[0])

    def unsupported(self, provider: CoRopeProvider) -> str | None:
        if provider.longest and self._case.length > provider.longest:
            return f"for at most {provider.longest} tokens here"
        return None

    def enter(self, provider: CoRopeProvider) -> Entry:
        begin = time.perf_counter()
        out = _once(provider.attention, self._inputs, self._do)
        self._clock.synchronize()
        seconds = time.perf_counter() - begin
        verdict = judge(self._compared(out), self._dtype)
        facts: Row = {"gate_ratio": verdict.ratio, "gate_row_ratio": verdict.row_ratio, "first_call_s": seconds}
        if verdict.status == "ok":
            facts["peak_mib"] = self._clock.peak_mib(lambda: _once(provider.attention, self._inputs, self._do))
        return Entry(provider, verdict, lambda part: self._function(provider, part), facts)

    def _compared(self, out: Sequence[Tensor]) -> Iterator[Compared]:
        """The last group of the last batch entry beside float64 and eager; groups do not mix."""
        group = self._case.heads[0] // self._case.heads[1]
        q, k, v, do = (x[-1:, -heads:] for x, heads in zip((*self._inputs, self._do), (group, 1, 1, group)))
        ref64 = _once(_definition, [x.double() for x in (q, k, v)], do.double())
        eager = _once(_definition, [q, k, v], do)
        for name, got, exact, near in zip(("o", "dq", "dk", "dv"), out, ref64, eager):
            yield name, got[-1:, -exact.shape[1] :], exact, near

    def _function(self, provider: CoRopeProvider, part: str) -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in self._inputs]
        return forward_or_backward(provider.attention, leaves, self._do, part)

    def fields(self, provider: CoRopeProvider) -> Row:
        case = self._case
        return {
            "case": case.name,
            "shape": case.shape,
            "batch": case.batch,
            "heads_q": case.heads[0],
            "heads_kv": case.heads[1],
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": dtype_name(self._dtype),
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name == OURS,
            "mode": "eager",
        }


def _lines(rows: list[Row]) -> list[list[str]]:
    """A line for each case and provider: shape, label, forward, backward (× theirs over ours), MiB; else the reason."""
    lines = []
    for case, shape in dict.fromkeys((row["case"], row["shape"]) for row in rows):
        here = [row for row in rows if (row["case"], row["shape"]) == (case, shape)]
        mine = {row["pass"]: row for row in timed(here) if row["ours"]}
        for name in dict.fromkeys(row["provider"] for row in here):
            found = {row["pass"]: row for row in timed(here) if row["provider"] == name}
            first = next(row for row in here if row["provider"] == name)
            if not found:
                lines.append([shape, first["label"], f"{first['status']}: {first['detail']}", "", ""])
                continue
            cells = []
            for part in PASSES:
                text = milliseconds(found[part]["ms"]) if part in found else "-"
                if part in found and part in mine and not first["ours"]:
                    text += f" ({ratio(found[part]['rounds'], mine[part]['rounds']):.1f}×)"
                cells.append(text)
            lines.append([shape, first["label"], *cells, f"{next(iter(found.values()))['peak_mib']:.0f}"])
    return lines


_HEADER = ["shape", "", "forward, ms", "backward, ms", "peak memory, MiB"]


def results(rows: list[Row]) -> str:
    """The generated table of the documents. ValueError where the rows hold no time of ours, or are of several cards."""
    mine = [row for row in timed(rows) if row["ours"]]
    if not mine or len({row["gpu"] for row in rows}) != 1:
        raise ValueError(f"rows must hold times of {OURS}, on one card")
    return (
        f"{markdown(_HEADER, _lines(rows))}\n\n"
        "×: their time over ours. Memory is beyond the inputs, for forward and backward, o and gradients included. "
        f"{provenance(rows)}"
    )


@dataclass
class CoRope(Suite):
    """``dtype``: of q, k and v."""

    providers: Sequence[CoRopeProvider] = PROVIDERS
    dtype: torch.dtype = torch.bfloat16

    command = "corope"
    description = "Time Co-RoPE beside its definition; nobody is timed before float64 agrees."
    all_passes = ()
    modes = ("eager",)
    mode = "eager"
    round_ms = 20.0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        text = "only cases whose name contains one of these"
        parser.add_argument("--cases", default="", metavar="TEXT", help=text)

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[CoRope, list[CoRopeCase]]:
        return cls(), matching(CASES, args.cases)

    def listing(self, cases: list[CoRopeCase]) -> str:
        return report.table(["case", "shape"], [[case.name, case.shape] for case in cases], left=2)

    def open(self, case: CoRopeCase, clock: Any) -> CoRopeTrial:
        return CoRopeTrial(self.providers, case, clock, self.dtype)

    def summary(self, rows: list[Row]) -> str:
        return report.table(_HEADER, _lines(rows), left=2)


def main(argv: list[str]) -> int:
    return command.main(CoRope, argv)
