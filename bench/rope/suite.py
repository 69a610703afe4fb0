"""``python -m bench rope``: the rotation alone, its rivals, and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gate import Compared, Verdict, ends, judge
from bench.names import SHORT_DTYPES, length_name
from bench.report import Row
from bench.rope.providers import COPY, NORM_EPS, PROVIDERS, RopeProvider
from bench.suite import Entry, Options, Suite, Times, Trial, forward_or_backward, normal
from bench.timing import bandwidths
from fused_rope_attn import rope_tables
from verification import testing


@dataclass(frozen=True)
class RopeCase:
    """q and k of (B, N, H, D) for each H of ``heads``. norms: they are normed first."""

    family: str
    batch: int
    heads: tuple[int, ...]
    length: int
    head_dim: int
    groups: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    norms: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}-{length_name(self.length)}"

    @property
    def style(self) -> str:
        return "interleaved" if self.interleaved else "half"

    @property
    def shape(self) -> str:
        """Return ``B2 H32+8 N4096 D128 bf16 half``."""
        sizes = f"B{self.batch} H{'+'.join(map(str, self.heads))} N{self.length} D{self.head_dim}"
        return f"{sizes} {SHORT_DTYPES[self.dtype]} {self.style}{' norms' * self.norms}"

    @property
    def bytes(self) -> int:
        """Return what is read and written: twice the tensors. The tables stay in the cache and count nothing."""
        return 2 * self.batch * sum(self.heads) * self.length * self.head_dim * self.dtype.itemsize


def _cases() -> Iterator[RopeCase]:
    # The shape of the project that inspired this one: 96 heads in all.
    for length in range(256, 1025, 128):
        yield from (
            RopeCase("Wide", 10, (48, 48), length, 128, ("wide",), dtype, interleaved)
            for dtype in (torch.bfloat16, torch.float32)
            for interleaved in (False, True)
        )
    # q and k of models.
    models = [("Small", 4, (8, 8), n, 64) for n in (512, 1024)]
    models += [("Llama3-8B", 2, (32, 8), n, 128) for n in (512, 1024, 2048, 4096)]
    models += [("Llama3-8B", 1, (32, 8), 16384, 128), ("Llama3-70B", 1, (64, 8), 4096, 128)]
    models += [("Llama7B", 2, (32, 32), 4096, 128)]
    for sizes in models:
        yield from (RopeCase(*sizes, ("models",), interleaved=interleaved) for interleaved in (False, True))
    # Models that norm q and k by head.
    normed = [("Qwen3-0.6B", 4, (16, 8), n, 128) for n in (512, 2048, 4096)]
    normed += [("Qwen3-8B", 2, (32, 8), n, 128) for n in (1024, 2048, 4096)]
    normed += [("Qwen3-8B", 1, (32, 8), 16384, 128), ("Gemma3-4B", 2, (8, 4), 4096, 256)]
    for sizes in normed:
        yield RopeCase(*sizes, ("norms",), norms=True)


class RopeTrial(Trial):
    """One case."""

    case: RopeCase
    facts = ("family", "batch", "heads", "length", "head_dim", "style", "norms", "bytes", "dtype")

    def __init__(self, case: RopeCase, providers: Sequence[RopeProvider], clock: Any, options: Options) -> None:
        super().__init__(case, providers, clock, options)
        shapes = [(case.batch, case.length, heads, case.head_dim) for heads in case.heads]
        tensors = normal([*shapes, *shapes, *[(case.head_dim,)] * 2 * case.norms], case.dtype, clock.device)
        views, self._weights = [x.transpose(1, 2) for x in tensors[:4]], tensors[4:]
        self._xs, self._dos = views[:2], views[2:]
        self._tables = rope_tables(case.length, case.head_dim, device=clock.device)

    def _call(self, provider: RopeProvider) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[Tensor]]:
        """Return the function, its leaves and the gradients of its results, in memory of their own where needed."""
        interleaved = self.case.interleaved
        tables = provider.prepare(*self._tables, self.case.dtype, interleaved)
        own = torch.clone if provider.in_place else torch.detach
        xs = [own(x).requires_grad_() for x in self._xs]
        # A copy is a ceiling for bandwidth and computes no gradient for the weights.
        weights = [weight.detach().requires_grad_(provider.role != "ceiling") for weight in self._weights]

        def run(*leaves: Tensor) -> list[Tensor]:
            # Views, because a provider that works in place may not overwrite a leaf.
            return provider.run([x.view_as(x) for x in leaves[:2]], tables, interleaved, weights)

        return run, xs + [weight for weight in weights if weight.requires_grad], [own(x) for x in self._dos]

    def unsupported(self, provider: RopeProvider) -> str | None:
        return provider.unsupported(self.case.interleaved)

    def enter(self, provider: RopeProvider) -> Entry:
        run, leaves, dos = self._call(provider)
        outs = run(*leaves)
        results = [out.detach().clone() for out in outs]
        gradients = torch.autograd.grad(outs, leaves, dos)
        if provider.role == "ceiling":
            same = all(torch.equal(a, b) for a, b in zip((*results, *gradients), (*self._xs, *self._dos)))
            verdict = Verdict() if same else Verdict("failed", detail="is no copy")
        else:
            compared = self._compared(provider, results, gradients)
            verdict = judge(compared, self.case.dtype, forgiving=not provider.ours)

        def make(part: str) -> Callable[[], Any]:
            fn = forward_or_backward(*self._call(provider), part)
            # Return the tensors that a replay of the graph overwrites: none that the provider works on.
            return (lambda: fn() and []) if provider.in_place else fn

        return Entry(provider, verdict, make, verdict.fields())

    def _compared(
        self, provider: RopeProvider, outs: list[Tensor], gradients: tuple[Tensor, ...]
    ) -> Iterator[Compared]:
        """Yield the first and the last head of q and k, (N, D), and the weights' gradients, (1, D)."""
        options: dict[str, Any] = {"rotary_dim": self.case.head_dim, "interleaved": self.case.interleaved}
        # A provider is not charged for tables that it was given rounded.
        cos, sin = (x.to(self.case.dtype) if provider.rounded_tables else x for x in self._tables)
        for i, (x, dy, y, dx) in enumerate(zip(self._xs, self._dos, outs, gradients)):
            if self._weights:
                options |= {"weight": self._weights[i], "norm_eps": NORM_EPS, "norm_offset": 0.0}
            given = x, dy, cos, sin
            ref64, eager = (testing.run_rotation_reference(*given, dtype, **options) for dtype in (torch.float64, None))
            for batch, head in ends(x.shape[0], x.shape[1]):
                yield "o", y[batch, head], ref64.y[batch, head], eager.y[batch, head]
                yield "dx", dx[batch, head], ref64.dx[batch, head], eager.dx[batch, head]
            if ref64.dweight is not None and eager.dweight is not None:
                yield "dweight", gradients[2 + i][None], ref64.dweight[None], eager.dweight[None]

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        # The gradient of a norm also reads the normed tensor: three tensors where a copy moves two.
        others = 1.5 * self.case.bytes if part == "bwd" and self._weights else self.case.bytes
        return bandwidths(dict.fromkeys(measured, others) | {COPY: self.case.bytes}, measured, COPY)


ROPE = Suite(
    name="rope",
    description="Time the rotation alone.",
    cases=tuple(_cases()),
    trial=RopeTrial,
    table=lambda case: PROVIDERS,
)
