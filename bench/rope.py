"""``python -m bench rope``: the rotation alone, its rivals, and a copy of the same bytes as the ceiling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baselines.norms import liger_norm
from baselines.rotations import LIGER, specialised
from bench import suite
from bench.gate import Compared, Verdict, ends, judge
from bench.report import Row
from bench.timing import bandwidths
from fused_rope_attn import apply_rope_qk, rope_tables
from verification import testing

_NORM_EPS = 1e-6


# Cases


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
    norms: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}-{suite.length_name(self.length)}"

    @property
    def shape(self) -> str:
        """Return ``B2 H32+8 N4096 D128 bf16 half``."""
        sizes = f"B{self.batch} H{'+'.join(map(str, self.heads))} N{self.length} D{self.head_dim}"
        return f"{sizes} {suite.SHORT_DTYPES[self.dtype]} half{' norms' * self.norms}"

    @property
    def bytes(self) -> int:
        """Return what is read and written: twice the tensors. The tables stay in the cache and count nothing."""
        return 2 * self.batch * sum(self.heads) * self.length * self.head_dim * self.dtype.itemsize


def _cases() -> Iterator[RopeCase]:
    # The shape of the project that inspired this one: 96 heads in all.
    yield from (RopeCase("Wide", 10, (48, 48), length, 128, ("wide",)) for length in range(256, 1025, 128))
    # q and k of models.
    models = [("Small", 4, (8, 8), n, 64) for n in (512, 1024)]
    models += [("Llama3-8B", 2, (32, 8), n, 128) for n in (512, 1024, 2048, 4096)]
    models += [("Llama3-8B", 1, (32, 8), 16384, 128), ("Llama3-70B", 1, (64, 8), 4096, 128)]
    models += [("Llama7B", 2, (32, 32), 4096, 128)]
    yield from (RopeCase(*sizes, ("models",)) for sizes in models)
    # Models that norm q and k by head.
    normed = [("Qwen3-0.6B", 4, (16, 8), n, 128) for n in (512, 2048, 4096)]
    normed += [("Qwen3-8B", 2, (32, 8), n, 128) for n in (1024, 2048, 4096)]
    normed += [("Qwen3-8B", 1, (32, 8), 16384, 128), ("Gemma3-4B", 2, (8, 4), 4096, 256)]
    yield from (RopeCase(*sizes, ("norms",), norms=True) for sizes in normed)


# Providers: they get q and k, (B, H, N, D) views of (B, N, H, D), and half-width float32 tables.


@dataclass(frozen=True, kw_only=True)
class RopeProvider(suite.Provider):
    """One rotation.

    run: ``run([q, k], tables, weights)`` returns both rotated, differentiable. It norms them first where there are
    ``weights``. in_place: it overwrites its inputs, and its gradients. prepare: brings (N, D/2) float32 tables into its
    form before any clock runs.
    """

    run: Callable[[list[Tensor], Any, list[Tensor]], list[Tensor]]
    in_place: bool = False
    prepare: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]] = suite.keep_tables


def _fused(xs: list[Tensor], tables: Any, weights: list[Tensor]) -> list[Tensor]:
    norms = {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": _NORM_EPS} if weights else {}
    return list(apply_rope_qk(*xs, *tables, **norms))


def _liger(xs: list[Tensor], tables: Any, weights: list[Tensor]) -> list[Tensor]:
    """Call Liger's kernels as its patch of Qwen 3 does: the result of the norm is fresh, and is rotated in place."""
    pairs = zip(xs, weights)
    normed = [liger_norm(x.transpose(1, 2), w, _NORM_EPS, 0.0, in_place=False).transpose(1, 2) for x, w in pairs]
    return list(LIGER.rotate(*(normed or xs), tables))


@functools.cache
def _compiled() -> Callable[..., list[Tensor]]:
    def rotate(xs: list[Tensor], tables: Any, weights: list[Tensor]) -> list[Tensor]:
        # In memory as (B, N, H, D), like q, k and their gradients: a gradient with other strides would be copied.
        outs, (cos, sin) = [], (table[:, None] for table in tables)
        for i, x in enumerate(xs):
            y = x.transpose(1, 2).float()
            if weights:
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + _NORM_EPS) * weights[i].float()
            a, b = y.chunk(2, -1)
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            outs.append(y.to(x.dtype).transpose(1, 2))
        return outs

    return specialised(rotate)


class _Copy(torch.autograd.Function):
    """Reads and writes every byte once, forward and backward."""

    @staticmethod
    def forward(ctx, *xs):
        return tuple(x.clone() for x in xs)

    backward = forward


COPY = "copy"
PROVIDERS: dict[str, RopeProvider] = suite.by_name(
    (
        RopeProvider("apply_rope", "apply_rope (ours)", "ours", run=_fused),
        # One launch for both. It overwrites q and k, which saves it the allocation of outputs but no memory traffic.
        RopeProvider("liger", "Liger", "rival", LIGER.missing, run=_liger, in_place=True, prepare=LIGER.prepare),
        RopeProvider("compiled", "torch.compile", run=lambda *given: _compiled()(*given)),
        RopeProvider(COPY, "copy (ceiling)", "ceiling", run=lambda xs, tables, weights: list(_Copy.apply(*xs))),
    )
)


# The trial


class RopeTrial(suite.Trial):
    """One case."""

    case: RopeCase
    facts = ("family", "batch", "heads", "length", "head_dim", "norms", "bytes", "dtype")

    def open(self) -> None:
        case, device = self.case, self.clock.device
        shapes = [(case.batch, case.length, heads, case.head_dim) for heads in case.heads]
        tensors = suite.normal([*shapes, *shapes, *[(case.head_dim,)] * 2 * case.norms], case.dtype, device)
        views, self._weights = [x.transpose(1, 2) for x in tensors[:4]], tensors[4:]
        self._xs, self._dos = views[:2], views[2:]
        self._tables = rope_tables(case.length, case.head_dim, device=device)

    def call(self, provider: RopeProvider, part: str) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
        tables = provider.prepare(*self._tables, self.case.dtype)
        own = torch.clone if provider.in_place else torch.detach
        xs = [own(x).requires_grad_() for x in self._xs]
        weights = [weight.detach().requires_grad_() for weight in self._weights]

        def run(*leaves: Tensor) -> list[Tensor]:
            # Views, because a provider that works in place may not overwrite a leaf.
            return provider.run([x.view_as(x) for x in leaves[:2]], tables, weights)

        # A copy is a ceiling for bandwidth and computes no gradient for the weights.
        return run, xs + weights * (provider.role != "ceiling"), [own(x) for x in self._dos]

    def enter(self, provider: RopeProvider) -> suite.Entry:
        entry = super().enter(provider)

        def make(part: str) -> Callable[[], Any]:
            fn = entry.make(part)
            return lambda: fn() and []  # the tensors that a replay of the graph overwrites: none that it works on

        return replace(entry, make=make) if provider.in_place else entry

    def judge(self, provider: RopeProvider, out: list[Tensor], grads: Sequence[Tensor]) -> Verdict:
        if provider.role == "ceiling":
            same = all(torch.equal(a, b) for a, b in zip((*out, *grads), (*self._xs, *self._dos)))
            return Verdict() if same else Verdict("failed", detail="is no copy")
        return judge(self._compared(out, grads), self.case.dtype, forgiving=not provider.ours)

    def _compared(self, outs: list[Tensor], grads: Sequence[Tensor]) -> Iterator[Compared]:
        """Yield the first and the last head of q and k, (N, D), and the weights' gradients, (1, D)."""
        options: dict[str, Any] = {"rotary_dim": self.case.head_dim, "interleaved": False}
        for i, (x, dy) in enumerate(zip(self._xs, self._dos)):
            if self._weights:
                options |= {"weight": self._weights[i], "norm_eps": _NORM_EPS, "norm_offset": 0.0}
            dtypes = torch.float64, None
            near = [testing.run_rotation_reference((x, dy, *self._tables), dtype, **options) for dtype in dtypes]
            for at in ends(*x.shape[:2]):
                yield "o", outs[i].detach()[at], *(found[0][at] for found in near)
                if grads:
                    yield "dx", grads[i][at], *(found[1][at] for found in near)
            if grads and self._weights:
                yield "dweight", grads[2 + i][None], *(found[2] for found in near)

    def figures(self, part: str, mode: str, measured: suite.Times) -> dict[str, Row]:
        # The gradient of a norm also reads the normed tensor: three tensors where a copy moves two.
        others = 1.5 * self.case.bytes if part == "bwd" and self._weights else self.case.bytes
        return bandwidths(dict.fromkeys(measured, others) | {COPY: self.case.bytes}, measured, COPY)


ROPE = suite.Suite(
    name="rope",
    description="Time the rotation alone.",
    cases=tuple(_cases()),
    trial=RopeTrial,
    table=lambda case: PROVIDERS,
)
