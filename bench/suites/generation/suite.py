"""``python -m bench decode``: a step of generation, beside what a user can install and a copy of as many bytes."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench import report, timing
from bench.gate import Compared, Verdict, ends, judge
from bench.names import dtype_name, length_name, short_dtype, words
from bench.suite import Entry, Row, Suite, Times, Trial, pick, provider_table
from bench.suites.generation import report as generation_report
from bench.suites.generation.pages import FLOAT8_SCALE
from bench.suites.generation.providers import COPY, COPY_BYTES, OURS, PROVIDERS, RAW, READ, DecodeProvider
from bench.suites.generation.step import Step
from fused_rope_attn import rope_tables
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.cache_reference import quantise


@dataclass(frozen=True)
class DecodeCase:
    """One step of ``batch`` sequences with caches of ``length`` rows, all but the last in use before it.

    mixed: sequence i of 1 to batch has length / i tokens instead (Zipf's law), and the last one has 1.
    """

    batch: int
    length: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    mixed: bool = False

    @property
    def name(self) -> str:
        return f"{'mixed' if self.mixed else 'B'}{self.batch}-{length_name(self.length)}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence after the step."""
        if not self.mixed:
            return [self.length] * self.batch
        return [self.length // i for i in range(1, self.batch)] + [1]

    @property
    def shape(self) -> str:
        """``B8 H32/8 S4096 D128 bf16``."""
        heads = f"{self.heads_q}/{self.heads_kv}"
        return f"B{self.batch} H{heads} S{self.length} D{self.head_dim} {short_dtype(self.dtype)}"

    @property
    def bytes(self) -> int:
        """Of keys and values: what a step reads."""
        return 2 * sum(self.lengths) * self.heads_kv * self.head_dim * self.dtype.itemsize

    def step(self, device: torch.device) -> Step:
        """Normally distributed inputs, equal for equal device."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            x = torch.empty(self.batch, heads, length, self.head_dim, dtype=self.dtype, device=device)
            return x.normal_(generator=generator)

        new = normal(self.heads_q, 1), normal(self.heads_kv, 1), normal(self.heads_kv, 1)
        caches = normal(self.heads_kv, self.length), normal(self.heads_kv, self.length)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device) - 1
        return Step(*new, *caches, lengths, *rope_tables(self.length, self.head_dim, device=device))


CASES = tuple(DecodeCase(b, n) for b, n in itertools.product((1, 8, 64), (4096, 32768, 131072)))
CASES += (DecodeCase(64, 65536, mixed=True),)
# Pools are copies of the caches, one for each provider.
MOST_POOLED_BYTES = 2 << 30


def compared(o: Tensor, step: Step, *, raw: bool, rounded_tables: bool = False, float8: bool = False
) -> Iterator[Compared]:  # fmt: skip
    """The group of the first key head of the first sequence, and the last of the last, beside float64 and eager.

    ``raw``: the caches hold keys as they came. ``rounded_tables``: rotated by tables in q's dtype. ``float8``: the
    caches are quantised.
    """
    group = step.q.shape[1] // step.k.shape[1]
    tables = [table.to(step.q.dtype) if rounded_tables else table for table in step[6:]]
    for b, h in ends(step.q.shape[0], step.k.shape[1]):
        heads = slice(h * group, (h + 1) * group)

        def reference_in(dtype: torch.dtype) -> Tensor:
            # Copies: the reference writes too. What others wrote into the last row is not read.
            q, k, v, k_cache, v_cache = (
                x[b : b + 1, heads if x is step.q else slice(h, h + 1)].to(dtype, copy=True)  # noqa: B023
                for x in step[:5]
            )
            cos, sin = (table.double() for table in tables) if dtype is torch.float64 else tables
            scales: dict[str, Tensor] = {}
            if float8:
                scales = dict.fromkeys(("k_scale", "v_scale"), torch.full((1,), FLOAT8_SCALE, device=q.device))
                k_cache, v_cache = (quantise(x, scales["k_scale"]) for x in (k_cache, v_cache))
            return reference.attention_with_kvcache(
                q, k_cache, v_cache, cos, sin, k, v, step.lengths[b : b + 1],  # noqa: B023
                cache_is_rotated=not raw, causal=True, softmax_scale=q.shape[3] ** -0.5, rotary_dim=q.shape[3],
                **scales,
            )[0]  # fmt: skip

        yield "o", o[b : b + 1, heads], reference_in(torch.float64), reference_in(step.q.dtype)


class DecodeTrial(Trial):
    """One case. Every provider runs without gradients; a copy is timed as it is, and in proportion to the cache."""

    def __init__(self, providers: list[DecodeProvider], case: DecodeCase, clock: Any) -> None:
        super().__init__(providers)
        self._case, self._clock, self._step = case, clock, case.step(clock.device)

    @torch.no_grad()
    def enter(self, provider: DecodeProvider) -> Entry:
        begin = time.perf_counter()
        run = provider.make(self._step)
        out = run()
        self._clock.synchronize()
        seconds = time.perf_counter() - begin
        verdict = replace(self._judge(provider, out), first_call_s=seconds)
        scale = max(1.0, self._case.bytes / COPY_BYTES) if provider.copies else 1.0
        facts, captures = verdict.fields(), not provider.copies
        return Entry(provider, verdict, lambda part: run, facts, torch.no_grad, scale, captures)

    def _judge(self, provider: DecodeProvider, out: Tensor) -> Verdict:
        step = self._step
        if provider.copies:
            return Verdict()
        if provider.bare:  # attends to the caches as they are, with the query as it is
            last = {"k": step.k_cache[:, :, -1:].clone(), "v": step.v_cache[:, :, -1:].clone()}
            step = step._replace(cos=torch.ones_like(step.cos), sin=torch.zeros_like(step.sin), **last)
        results = compared(out, step, raw=provider.raw, rounded_tables=provider.rounded_tables, float8=provider.float8)
        return judge(results, self._case.dtype, forgiving=not _is_ours(provider))

    def fields(self, provider: DecodeProvider) -> Row:
        case = self._case
        return {
            "case": case.name,
            "shape": case.shape,
            "batch": case.batch,
            "heads": (case.heads_q, case.heads_kv),
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": dtype_name(case.dtype),
            "bytes": case.bytes,
            "provider": provider.name,
            "label": provider.label,
            "ours": _is_ours(provider),
            "bare": provider.bare,
            "stored": bool(getattr(provider, "page_size", None) or getattr(provider, "float8", False)),
            "pass": "decode",
            "flush": "read",
        }

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        rows = timing.bandwidths(self._case.bytes, measured, COPY)
        for name in rows:
            if PROVIDERS[name].float8 if name in PROVIDERS else False:  # reads half as many bytes
                rows[name]["gb_s"] /= 2
                rows[name]["of_copy"] = rows[name]["of_copy"] and rows[name]["of_copy"] / 2
        return rows

    def unsupported(self, provider: Any) -> str | None:
        if getattr(provider, "even", False) and self._case.mixed:
            return "serves sequences of one length only"
        if (getattr(provider, "page_size", None) or getattr(provider, "float8", False)) and (
            self._case.bytes > MOST_POOLED_BYTES
        ):
            return "its caches would be another copy of so many bytes"
        return None


def _is_ours(provider: DecodeProvider) -> bool:
    return provider.name in (OURS, RAW) or provider.name.startswith(f"{OURS}_")


@dataclass
class Generation(Suite):
    """``memory``: bytes that a case may take; None: what the GPU has left."""

    providers: list[DecodeProvider]
    memory: int | None = None

    command = "decode"
    description = "Time a step of generation; nobody is timed before float64 agrees."
    epilog = "further: python -m bench decode --tune [--help]"
    all_passes = ()
    passes = ("decode",)
    mode = "both"

    @classmethod
    def clock(cls, device: torch.device) -> Any:
        """A step reads and hardly writes: what a flush left to be written back would be a good part of its time."""
        return timing.GpuClock(device, reads=True)

    rounds = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--cases", default="", help=f"of {', '.join(case.name for case in CASES)}, or B1, B8, B64")
        add("--providers", default="", help="names (default: everybody); ours, the copy and the read always run")

    @classmethod
    def configure(cls, args: argparse.Namespace) -> tuple[Generation, list[DecodeCase]]:
        return cls(pick(PROVIDERS, words(args.providers), always=(OURS, COPY, READ))), choose(words(args.cases))

    def listing(self, cases: list[DecodeCase]) -> str:
        lines = [[case.name, case.shape, f"{case.bytes >> 20}"] for case in cases]
        return f"{report.table(['case', 'shape', 'MiB'], lines, left=2)}\n\n{provider_table(self.providers)}"

    def obstacle(self, case: DecodeCase) -> str | None:
        memory = self.memory
        if memory is None and torch.cuda.is_available():
            memory = int(0.95 * torch.cuda.mem_get_info()[0])
        held = 2 * case.batch * case.heads_kv * case.length * case.head_dim * case.dtype.itemsize
        return "memory" if memory is not None and held + 2 * COPY_BYTES > memory else None

    def open(self, case: DecodeCase, clock: Any) -> DecodeTrial:
        return DecodeTrial(self.providers, case, clock)

    def summary(self, rows: list[Row]) -> str:
        return generation_report.summary(rows)


def choose(names: list[str]) -> list[DecodeCase]:
    """Cases whose name is one of ``names`` or begins with it and a dash, all without names. ValueError for none."""
    chosen = [c for c in CASES if not names or any(c.name == n or c.name.startswith(f"{n}-") for n in names)]
    if not chosen:
        raise ValueError(f"no case has that name; there are {', '.join(case.name for case in CASES)}")
    return chosen
