"""``python -m bench decode``: a step of generation, its rivals, and a copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.decode.pages import FLOAT8_SCALE, Step
from bench.decode.providers import COPY, PROVIDERS, DecodeProvider
from bench.gate import Compared, Verdict, ends, judge
from bench.names import SHORT_DTYPES, length_name
from bench.report import Row
from bench.suite import Entry, Options, Suite, Times, Trial, normal
from fused_rope_attn import rope_tables
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.problem import StepTensors, describe_step
from fused_rope_attn.generation.reference import quantise


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
    def groups(self) -> tuple[str, ...]:
        return (f"b{self.batch}",) if not self.mixed else ("mixed",)

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each sequence after the step."""
        if not self.mixed:
            return [self.length] * self.batch
        return [self.length // i for i in range(1, self.batch)] + [1]

    @property
    def shape(self) -> str:
        """Return ``B8 H32/8 S4096 D128 bf16``."""
        heads = f"{self.heads_q}/{self.heads_kv}"
        return f"B{self.batch} H{heads} S{self.length} D{self.head_dim} {SHORT_DTYPES[self.dtype]}"

    @property
    def bytes(self) -> int:
        """Return the bytes of keys and values: what a step reads."""
        return 2 * sum(self.lengths) * self.heads_kv * self.head_dim * self.dtype.itemsize

    def step(self, device: torch.device) -> Step:
        """Return normally distributed inputs, equal for equal device."""
        keys, caches = [(self.heads_kv, 1)] * 2, [(self.heads_kv, self.length)] * 2
        shapes = [(self.batch, *sizes, self.head_dim) for sizes in ((self.heads_q, 1), *keys, *caches)]
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device) - 1
        tables = rope_tables(self.length, self.head_dim, device=device)
        return Step(*normal(shapes, self.dtype, device), lengths, *tables)


CASES = tuple(DecodeCase(b, n) for b, n in itertools.product((1, 8, 64), (4096, 32768, 131072)))
CASES += (DecodeCase(64, 65536, mixed=True),)
# Caches in pages or float8 are copies, one for each provider.
MOST_POOLED_BYTES = 2 << 30


def compared(o: Tensor, step: Step, provider: DecodeProvider) -> Iterator[Compared]:
    """Yield the group of the first key head of the first sequence, and the last of the last, with float64 and eager."""
    group, head_dim = step.q.shape[1] // step.k.shape[1], step.q.shape[3]
    options = {"causal": True, "softmax_scale": head_dim**-0.5, "rotary_dim": head_dim}
    for b, h in ends(step.q.shape[0], step.k.shape[1]):
        heads, results = slice(h * group, (h + 1) * group), []
        for dtype in (torch.float64, step.q.dtype):
            # Copies, because the reference writes too. It does not read what others wrote into the last row.
            q = step.q[b : b + 1, heads].to(dtype, copy=True)
            k, v, *caches = (x[b : b + 1, h : h + 1].to(dtype, copy=True) for x in step[1:5])
            cos, sin = (table.double() if dtype is torch.float64 else table for table in step[6:])
            scales: dict[str, Tensor] = {}
            if provider.float8:
                scales = dict.fromkeys(("k_scale", "v_scale"), torch.full((1,), FLOAT8_SCALE, device=q.device))
                caches = [quantise(x, scales["k_scale"]) for x in caches]
            tensors = StepTensors(q, *caches, cos, sin, k, v, step.lengths[b : b + 1], **scales)
            problem = describe_step(tensors, cache_is_rotated=not provider.raw, **options)
            results.append(reference.attention_with_kvcache(problem, tensors)[0])
        yield "o", o[b : b + 1, heads], results[0], results[1]


class DecodeTrial(Trial):
    """One case. Every provider runs without gradients. A copy is timed directly."""

    case: DecodeCase
    default_modes = ("eager", "graph")
    default_passes = ("decode",)
    facts = ("batch", "length", "heads_q", "heads_kv", "head_dim", "bytes", "dtype")

    def __init__(self, case: DecodeCase, providers: Sequence[DecodeProvider], clock: Any, options: Options) -> None:
        super().__init__(case, providers, clock, options)
        self._step = case.step(clock.device)

    def unsupported(self, provider: DecodeProvider) -> str | None:
        if provider.even and self.case.mixed:
            return "serves sequences of one length only"
        if provider.stored and self.case.bytes > MOST_POOLED_BYTES:
            return "its caches would be another copy of so many bytes"
        return None

    @torch.no_grad()
    def enter(self, provider: DecodeProvider) -> Entry:
        run = provider.make(self._step)
        out, verdict = run(), Verdict()
        if provider.role != "ceiling":
            verdict = judge(compared(out, self._step, provider), self.case.dtype, forgiving=not provider.ours)
        facts = verdict.fields() | {"stored": provider.stored}
        return Entry(provider, verdict, lambda part: run, facts, torch.no_grad, captures=provider.role != "ceiling")

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        moved = {p.name: self.case.bytes / 2 if p.float8 else self.case.bytes for p in self.providers}
        return timing.bandwidths(moved, measured, COPY)


DECODE = Suite(
    name="decode",
    description="Time one step of generation with a cache.",
    cases=CASES,
    trial=DecodeTrial,
    table=lambda case: PROVIDERS,
    passes=("decode",),
    rounds=3,
    # A step reads and hardly writes. After a flush by writing, the write-back would take a good part of its time.
    clock=lambda device, options: timing.GpuClock(device, reads=True),
)
