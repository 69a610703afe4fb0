"""``python -m bench corope``: Co-RoPE's kernels beside its definition in eager PyTorch, in chunks and all at once.

Nobody is timed before float64 agrees, rounds are interleaved in one process, and times are of eager calls: the kernels
take milliseconds. Memory is the allocator's peak of one forward and backward pass, o and gradients included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import readme, report
from bench.environment import ROOT, environment
from bench.timing import Options, interleave, ratio
from fused_rope_attn import testing
from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import reference

Row = dict[str, Any]
OURS = "corope"
_BASE = 10000.0
_PASSES = ("fwd", "bwd")


@dataclass(frozen=True)
class CoRopeCase:
    """q of (batch, heads_q, length, head_dim), k and v with heads_kv, causal."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int

    @property
    def shape(self) -> str:
        """``B1 H32/8 N1024 D128``."""
        return f"B{self.batch} H{self.heads_q}/{self.heads_kv} N{self.length} D{self.head_dim}"


CASES = (
    CoRopeCase("CoRoPE-1K", 1, 32, 8, 1024, 128),
    CoRopeCase("CoRoPE-4K", 1, 32, 8, 4096, 128),
    CoRopeCase("CoRoPE-8K", 1, 32, 8, 8192, 128),
    CoRopeCase("CoRoPE-MQA-8K", 1, 16, 1, 8192, 128),
)


@dataclass(frozen=True)
class CoRopeProvider:
    """``attention(q, k, v) -> o``, for at most ``longest`` tokens."""

    name: str
    label: str
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    longest: int | None = None


def _definition(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return reference.attention(q, k, v, base=_BASE, softmax_scale=q.shape[3] ** -0.5, **options)


PROVIDERS = (
    CoRopeProvider(OURS, "`corope_attention`", lambda q, k, v: corope_attention(q, k, v, base=_BASE)),
    # Angles grow with N squared: 1024 tokens take about 20 GiB at once, 8192 in chunks a quarter of a minute.
    CoRopeProvider("chunked", "eager, in chunks", _definition, 2048),
    CoRopeProvider("dense", "eager, at once", lambda q, k, v: _definition(q, k, v, chunk_angles=1 << 62), 1024),
)


class CoRopeRun:
    """Times one case after the other; ``clock`` as in ``runner.Clock``, on whose device everything lies."""

    def __init__(self, providers, options: Options, clock: Any, facts: Row, dtype: torch.dtype = torch.bfloat16):
        self.providers, self.options, self.clock, self.facts, self.dtype = providers, options, clock, facts, dtype

    def rows(self, cases: list[CoRopeCase]) -> Iterator[list[Row]]:
        """Rows of one case after the other; cases past the deadline are left out."""
        for case in cases:
            if not self.options.out_of_time():
                yield self._case(case)

    def _case(self, case: CoRopeCase) -> list[Row]:
        generator = torch.Generator(self.clock.device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = (case.batch, case.length, heads, case.head_dim)
            x = torch.randn(shape, generator=generator, device=self.clock.device)
            return x.to(self.dtype).transpose(1, 2)

        inputs, do = [normal(h) for h in (case.heads_q, case.heads_kv, case.heads_kv)], normal(case.heads_q)
        rows, facts, able = [], {}, {}
        for provider in self.providers:
            if provider.longest and case.length > provider.longest:
                detail = f"for at most {provider.longest} tokens here"
                rows.append(self._row(case, provider, None, status="unsupported", detail=detail))
                continue
            try:
                facts[provider.name] = self._gate(provider, inputs, do)
                if facts[provider.name]["status"] == "ok":
                    facts[provider.name]["peak_mib"] = self.clock.peak_mib(lambda: _once(provider, inputs, do))  # noqa: B023
                    able[provider.name] = provider
                else:
                    rows.append(self._row(case, provider, None, **facts[provider.name]))
            except Exception as error:  # out of memory, and whatever else befalls a provider, is its result
                rows.append(self._row(case, provider, None, status="error", detail=_sentence(error)))
                self.clock.release()
        for part in self.options.passes:
            fns = {name: _callable(provider, inputs, do, part) for name, provider in able.items()}
            calls = {name: self.clock.calls_for(fn, self.options.round_ms) for name, fn in fns.items()}
            measured, failed = interleave(
                fns, self.clock.sample, calls, self.options.rounds, self.options.out_of_time
            )  # fmt: skip
            for name, error in failed.items():
                rows.append(self._row(case, able[name], part, status="error", detail=_sentence(error)))
            for name, measurement in measured.items():
                median, p20, p80 = measurement.quantiles()
                times = {"ms": median, "p20": p20, "p80": p80, "rounds": measurement.round_medians}
                calls_made = len(measurement.samples)
                rows.append(self._row(case, able[name], part, calls=calls_made, **times, **facts[name]))
            del fns
            self.clock.release()
        return rows

    def _gate(self, provider: CoRopeProvider, inputs: list[Tensor], do: Tensor) -> Row:
        """The last group of the last batch against float64, by the contract's tolerance; groups do not mix."""
        begin = time.perf_counter()
        out = _once(provider, inputs, do)
        self.clock.synchronize()
        seconds = time.perf_counter() - begin
        group = do.shape[1] // inputs[1].shape[1]
        part = [x[-1:, -heads:] for x, heads in zip((*inputs, do), (group, 1, 1, group))]
        right = CoRopeProvider("right", "", _definition)
        ref64 = _once(right, [x.double() for x in part[:3]], part[3].double())
        eager = _once(right, part[:3], part[3])
        verdict = {"first_call_s": seconds, "gate_ratio": 0.0, "gate_row_ratio": 0.0, "status": "ok", "detail": ""}
        for name, got, *others in zip(("o", "dq", "dk", "dv"), out, ref64, eager):
            got = got[-1:, -others[0].shape[1] :]
            held = testing.compare(name, got, *others, grad=name != "o", dtype=self.dtype)
            verdict["gate_ratio"] = max(verdict["gate_ratio"], held.ratio)
            verdict["gate_row_ratio"] = max(verdict["gate_row_ratio"], held.row_ratio)
            if not held.ok:
                verdict |= {"status": "failed", "detail": f"{name}: {held.detail}"}
        return verdict

    def _row(self, case: CoRopeCase, provider: CoRopeProvider, part: str | None, **fields) -> Row:
        row = {
            "case": case.name,
            "shape": case.shape,
            "batch": case.batch,
            "heads_q": case.heads_q,
            "heads_kv": case.heads_kv,
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "provider": provider.name,
            "label": provider.label,
            "ours": provider.name == OURS,
            "pass": part,
            "mode": "eager",
        }
        return row | fields | self.facts


def _once(provider: CoRopeProvider, inputs: list[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = provider.attention(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def _callable(provider: CoRopeProvider, inputs: list[Tensor], do: Tensor, part: str) -> Callable[[], Any]:
    """``fwd`` runs without gradients, ``bwd`` again and again on one graph."""
    if part == "fwd":
        return torch.no_grad()(lambda: provider.attention(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = provider.attention(*leaves)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _lines(rows: list[Row]) -> list[list[str]]:
    """A line for each case and provider: shape, label, forward, backward (× theirs over ours), MiB; else the reason."""
    lines = []
    for case, shape in dict.fromkeys((row["case"], row["shape"]) for row in rows):
        here = [row for row in rows if (row["case"], row["shape"]) == (case, shape)]
        mine = {row["pass"]: row for row in report.timed(here) if row["ours"]}
        for name in dict.fromkeys(row["provider"] for row in here):
            found = {row["pass"]: row for row in report.timed(here) if row["provider"] == name}
            first = next(row for row in here if row["provider"] == name)
            if not found:
                lines.append([shape, first["label"], f"{first['status']}: {first['detail']}", "", ""])
                continue
            cells = []
            for part in _PASSES:
                text = f"{found[part]['ms']:#.3g}".rstrip(".") if part in found else "-"
                if part in found and part in mine and not first["ours"]:
                    text += f" ({ratio(found[part]['rounds'], mine[part]['rounds']):.1f}×)"
                cells.append(text)
            lines.append([shape, first["label"], *cells, f"{next(iter(found.values()))['peak_mib']:.0f}"])
    return lines


_HEADER = ["shape", "", "forward, ms", "backward, ms", "peak memory, MiB"]


def block(rows: list[Row]) -> str:
    """README's block. ValueError where the rows hold no time of ours, or are of several cards."""
    mine = [row for row in report.timed(rows) if row["ours"]]
    if not mine or len({row["gpu"] for row in rows}) != 1:
        raise ValueError(f"rows must hold times of {OURS}, on one card")
    return (
        f"{readme.markdown(_HEADER, _lines(rows))}\n\n"
        "×: their time over ours. Memory is beyond the inputs, for forward and backward, o and gradients included. "
        f"{readme.provenance(rows)}"
    )


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 1 ours is red (or, with ``readme --check``, README is stale), 2 cannot run here."""
    if argv[:1] == ["readme"]:
        return readme.block_main(argv[1:], "corope", block, ROOT / "README.md")
    args = _parser().parse_args(argv)
    words = [word.strip().lower() for word in args.cases.split(",") if word.strip()]
    cases = [case for case in CASES if not words or any(word in case.name.lower() for word in words)]
    if not cases:
        print(f"bench corope: no case is left; there are {', '.join(c.name for c in CASES)}", file=sys.stderr)
        return 2
    if args.dry_run:
        print(report.table(["case", "shape"], [[case.name, case.shape] for case in cases], left=2))
        return 0
    if not torch.cuda.is_available():
        print("bench corope: no GPU here; --dry-run lists what would run.", file=sys.stderr)
        return 2
    from bench.timing import GpuClock

    begin, facts = time.monotonic(), environment()
    deadline = begin + args.time_budget if args.time_budget else float("inf")
    options = Options(_PASSES, "eager", args.rounds, args.round_ms, deadline)
    clock = GpuClock(torch.device("cuda", torch.cuda.current_device()))
    rows: list[Row] = []
    for some in CoRopeRun(PROVIDERS, options, clock, facts).rows(cases):
        rows += some
        report.write_lines(args.out, some)
    print(report.table(_HEADER, _lines(rows), left=2))
    print(f"\n{len(rows)} rows in {args.out} after {time.monotonic() - begin:.0f} s")
    return int(report.red(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench corope",
        description="Time Co-RoPE; nobody is timed before float64 agrees.",
        epilog="further: python -m bench corope readme FILE... [--check]",
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=20.0, help="GPU time for each provider in each round")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "corope.jsonl", help="appended")
    parser.add_argument("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="list cases; no GPU needed")
    return parser
