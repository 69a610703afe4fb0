"""``python -m bench block``: projections, norms, rotation and attention of a layer, forward and backward.

x (1, N, width) becomes q, k and v; causal attention and the output projection follow. "both" is a training step: the
gradients of x and of all weights. Rotation in the epilogue of the projection is compared with rotation elsewhere.
Providers have one weight for q, k and v; those whose rotation would copy slices of its output have three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines import attentions
from baselines.base import Baseline, Norms, Rotation, dtype_name
from baselines.norms import by_head, liger_norm
from baselines.projections import QUACK, Projection, neighbours
from baselines.rotations import LIGER, specialised
from bench.gate import Verdict, judge
from bench.suite import Entry, Provider, Suite, Trial, by_name, forward_or_backward, length_name, normal
from fused_rope_attn import rope_attention, rope_tables
from verification import testing

_BASE = 500000.0


@dataclass(frozen=True)
class BlockCase(testing.Case):
    """One sequence through the attention of a layer, ``width`` columns wide."""

    model: str = ""
    width: int = 0
    groups = ("block",)

    @property
    def name(self) -> str:
        return f"{self.model}-{length_name(self.len_q)}"

    @property
    def shape(self) -> str:
        norms = " norms" * (self.norms is not None)
        heads = f"H{self.heads_q}/{self.heads_kv} N{self.len_q} D{self.head_dim}"
        return f"W{self.width} {heads} {dtype_name(self.dtype)}{norms}"

    @property
    def columns(self) -> list[int]:
        """Return the columns of q, k and v."""
        return [heads * self.head_dim for heads in (self.heads_q, self.heads_kv, self.heads_kv)]

    def heads(self, x: Tensor) -> Tensor:
        """Return (1, H, N, D) of (1, N, H * D)."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class BlockProvider(Provider):
    """What follows the projection: ``plain``, or ``normed`` where heads have norms.

    weights: of q, k and v. epilogue: QuACK's projection has normed and rotated. compiled: the whole block is.
    """

    plain: Baseline
    normed: Baseline
    weights: int = 1
    epilogue: bool = False
    compiled: bool = False


class _Ours(Baseline):
    """``rope_attention``; tables are None after an epilogue that has rotated."""

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos, sin

    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool, norms: Norms | None = None) -> Tensor:
        given = {} if norms is None else {"q_norm": norms.q_norm, "k_norm": norms.k_norm, "norm_eps": norms.eps}
        return rope_attention(q, k, v, *(tables or (None, None)), causal, **given)


def _rotate(q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
    """Rotate by the formula of Hugging Face, which a compiler can trace."""
    cos, sin = tables
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return q * cos + torch.cat((-q2, q1), -1) * sin, k * cos + torch.cat((-k2, k1), -1) * sin


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _provider(name: str, label: str, b: Baseline, role: str = "rival", norm: Any = None, **fields: Any) -> Any:
    needs, pip = [b.missing], b.pip
    if fields.get("epilogue"):
        needs, label, pip = [QUACK.missing, b.missing], f"QuACK's epilogue + {label}", (QUACK.pip, *pip)
    normed = replace(b, norm_and_rotate=by_head(norm, b.rotation)) if norm and b.rotation else b
    found: dict[str, Any] = {"backward": b.backward, "plain": b, "normed": normed} | fields
    return BlockProvider(name, label, role, lambda: next(filter(None, (need() for need in needs)), None), pip, **found)


_OURS = _Ours("", None, attentions.SDPA)
_EAGER = Baseline("", Rotation("", _rotate, half_tables=True), attentions.SDPA)
PROVIDERS: dict[str, BlockProvider] = by_name(
    (
        _provider("fused", "rope_attention", _OURS, "ours"),
        _provider("quack_fused", "rope_attention, bare", _OURS, "ours", epilogue=True),
        _provider("quack_fa4", "FA4", Baseline("", None, attentions.FA4), epilogue=True),
        _provider("quack_fa3", "FA3", Baseline("", None, attentions.FA3), epilogue=True),
        _provider("liger_fa4", "Liger + FA4", Baseline("", LIGER, attentions.FA4), norm=liger_norm, weights=3),
        _provider("liger_fa3", "Liger + FA3", Baseline("", LIGER, attentions.FA3), norm=liger_norm, weights=3),
        _provider("compiled", "SDPA, all compiled", _EAGER, norm=_norm, compiled=True),
        _provider("eager", "SDPA, eager", _EAGER, norm=_norm, weights=3),
    )
)


class BlockTrial(Trial):
    """One case."""

    default_passes = ("fwd", "both")
    facts = ("len_q", "width", "heads_q", "heads_kv", "head_dim", "dtype")

    def open(self) -> None:
        case, device = self.case, self.clock.device
        rows, flat, wide = sum(case.columns), case.columns[0], (1, case.len_q, case.width)
        shapes = (wide, wide, (rows, case.width), (case.width, flat))
        self._x, self._dy, self._of_qkv, self._of_o = normal(shapes, case.dtype, device)
        self._of_qkv *= case.width**-0.5
        self._of_o *= flat**-0.5
        self._norms = [x for name, x in testing.norms_of(case, device).items() if name in ("q_norm", "k_norm")]
        self._tables = rope_tables(case.len_q, case.head_dim, base=_BASE, device=device)
        frequencies = _BASE ** (-torch.arange(0, case.head_dim, 2, dtype=torch.float64, device=device) / case.head_dim)
        self._angles = torch.outer(torch.arange(case.len_q, dtype=torch.float64, device=device), frequencies)
        self._references: list[dict[str, Tensor]] = []

    def _reordered(self, x: Tensor, back: bool = False) -> Tensor:
        """Return the weight of QuACK's projection, in which the rows of v stay, or ``back``."""
        turned = sum(self.case.columns[:2])
        return torch.cat((neighbours(x[:turned], self.case.head_dim, back), x[turned:]))

    def _call(self, provider: BlockProvider) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """Return ``run(x, of_o, *norms, *of_qkv)`` and its leaves."""
        case, norms, b = self.case, self._norms, provider.normed if self._norms else provider.plain
        tables = None if provider.epilogue else b.prepare(*self._tables, case.dtype)
        weights = [self._of_qkv] if provider.weights == 1 else list(self._of_qkv.split(case.columns))
        project: Any = None
        if provider.epilogue:
            weights, norms = [self._reordered(self._of_qkv)], [neighbours(x, case.head_dim) for x in norms]
            project = Projection((case.heads_q, case.heads_kv), self._angles, norms, case.norm_eps)

        def run(x: Tensor, of_o: Tensor, *others: Tensor) -> Tensor:
            of_heads, of_qkv = others[: len(norms)], others[len(norms) :]
            given = Norms(*of_heads, case.norm_eps, case.norms) if of_heads else None
            if provider.epilogue:
                (q, k, v), given = project(x, *of_qkv, *of_heads), None
            elif provider.weights == 1:
                q, k, v = map(case.heads, F.linear(x, *of_qkv).split(case.columns, 2))
            else:
                q, k, v = (case.heads(F.linear(x, weight)) for weight in of_qkv)
            return F.linear(b.run(q, k, v, tables, True, given).transpose(1, 2).flatten(2), of_o)

        leaves = [x.detach().requires_grad_() for x in (self._x, self._of_o, *norms, *weights)]
        return specialised(run) if provider.compiled else run, leaves

    def enter(self, provider: BlockProvider) -> Entry:
        run, leaves = self._call(provider)
        grads = provider.backward and self.options.passes != ("fwd",)

        def once() -> list[Tensor]:
            with torch.set_grad_enabled(grads):
                y = run(*leaves)
            return [y.detach(), *(torch.autograd.grad(y, leaves, self._dy) if grads else ())]

        verdict = self._judge(provider, *once())
        facts = {"peak_mib": self.clock.peak_mib(once)}
        return Entry(provider, verdict, lambda part: forward_or_backward(run, leaves, self._dy, part), facts)

    def _judge(self, provider: BlockProvider, y: Tensor, *grads: Tensor) -> Verdict:
        """Compare y, and the gradients where there are some, with the same block in float64 and in eager PyTorch."""
        if not self._references:
            self._references = [self._reference(dtype) for dtype in (torch.float64, self.case.dtype)]
        found = {"o": y}
        if grads:
            dx, of_o, *rest = grads
            of_norms, of_qkv = rest[: len(self._norms)], torch.cat(rest[len(self._norms) :])
            if provider.epilogue:
                of_norms = [neighbours(x, self.case.head_dim, back=True) for x in of_norms]
                of_qkv = self._reordered(of_qkv, back=True)
            found |= {"dx": dx, "d of_o": of_o, "d of_qkv": of_qkv}
            found |= {name: x[None] for name, x in zip(("dq_norm", "dk_norm"), of_norms)}
        exact, near = self._references
        compared = ((name, x, exact[name], near[name]) for name, x in found.items())
        return judge(compared, self.case.dtype, forgiving=provider is not PROVIDERS["fused"])

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        case = self.case
        x, dy, of_qkv, of_o = (each.to(dtype) for each in (self._x, self._dy, self._of_qkv, self._of_o))
        q, k, v = map(case.heads, F.linear(x, of_qkv).split(case.columns, 2))
        inputs = testing.Inputs(q, k, v, *self._tables, case.heads(dy @ of_o))
        found = testing.run_reference(inputs, case, dtype if dtype == torch.float64 else None)
        o, *grads = (each.transpose(1, 2).flatten(2) for each in (found.o, found.dq, found.dk, found.dv))
        grad = torch.cat(grads, 2)
        made = {"o": F.linear(o, of_o), "dx": grad @ of_qkv, "d of_o": dy[0].T @ o[0], "d of_qkv": grad[0].T @ x[0]}
        weights = {"dq_norm": found.dq_norm, "dk_norm": found.dk_norm} if self._norms else {}
        return made | {name: each[None] for name, each in weights.items()}

    def gated(self) -> None:
        self._references.clear()


def _case(model: str, width: int, heads_q: int, heads_kv: int, head_dim: int, length: int, **options: Any) -> BlockCase:
    options = {"dtype": torch.bfloat16, "norm_dtype": torch.bfloat16, "model": model, "width": width} | options
    return BlockCase(1, heads_q, heads_kv, length, length, head_dim, **options)


_MODELS = (
    (("Llama3-8B", 4096, 32, 8, 128), {}),
    (("Qwen3-8B", 4096, 32, 8, 128), {"norms": 0.0}),
    (("Llama3-70B-TP8", 8192, 8, 1, 128), {}),  # one of eight GPUs
    (("SmolLM2-360M", 960, 15, 5, 64), {}),
)
BLOCK = Suite(
    name="block",
    description="Time the attention of a layer with its projections, rotated in attention, before it or in a GEMM.",
    # A run that is interrupted has then covered the most important ones.
    cases=[_case(*sizes, length, **more) for length in (4096, 16384, 2048) for sizes, more in _MODELS],
    trial=BlockTrial,
    table=lambda case: PROVIDERS,
    passes=("fwd", "both"),
    modes=("eager", "graph"),
    round_ms=20.0,
)
