"""``python -m bench block``: projections, norms, rotation and attention of a layer, forward and backward.

x (1, N, width) becomes q, k and v; causal attention and the output projection follow. "both" is a training step: the
gradients of x and of all weights. Rotation in the epilogue of the projection is compared with rotation elsewhere.
Providers have one weight for q, k and v. Some have three, because their rotation would copy slices of one output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines import attentions, norms, rotations
from baselines.base import Baseline, Norms, dtype_name
from baselines.projections import QUACK, Projection, neighbours
from bench import gate
from bench.gate import Verdict
from bench.suite import Provider, Suite, Trial, by_name, length_name, normal
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
    """Attention after the projection: ``plain``, or ``normed`` if heads have norms.

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
        given = dict(zip(("q_norm", "k_norm", "norm_eps", "norm_offset"), norms or ()))
        return rope_attention(q, k, v, *(tables or (None, None)), causal, **given)


def _provider(name: str, label: str, b: Baseline, role: str = "rival", norm: Any = None, **fields: Any) -> Any:
    missing = b.missing
    if fields.get("epilogue"):
        label, missing = f"QuACK's epilogue + {label}", lambda: QUACK.missing() or b.missing()
    normed = replace(b, norm_and_rotate=norms.by_head(norm, b.rotation)) if norm and b.rotation else b
    return BlockProvider(name, label, role, missing, b.backward, plain=b, normed=normed, **fields)


_FLASH = {"fa4": attentions.FA4, "fa3": attentions.FA3}
_LIGER, _EAGER_NORM = norms.liger_norm, norms.eager_norm
_OURS = _Ours("", None, attentions.SDPA)
_EAGER = Baseline("", rotations.EAGER, attentions.SDPA)
PROVIDERS: dict[str, BlockProvider] = by_name(
    (
        _provider("fused", "rope_attention", _OURS, "ours"),
        _provider("quack_fused", "rope_attention, bare", _OURS, "ours", epilogue=True),
        *(_provider(f"quack_{n}", a.label, Baseline("", None, a), epilogue=True) for n, a in _FLASH.items()),
        *(
            _provider(f"liger_{n}", f"Liger + {a.label}", Baseline("", rotations.LIGER, a), norm=_LIGER, weights=3)
            for n, a in _FLASH.items()
        ),
        _provider("compiled", "SDPA, all compiled", _EAGER, norm=_EAGER_NORM, compiled=True),
        _provider("eager", "SDPA, eager", _EAGER, norm=_EAGER_NORM, weights=3),
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
        self._references: list[dict[str, Tensor]] = []
        self._calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {}

    def _reordered(self, x: Tensor, back: bool = False) -> Tensor:
        """Return the weight of QuACK's projection, in which the rows of v stay, or ``back``."""
        turned = sum(self.case.columns[:2])
        return torch.cat((neighbours(x[:turned], self.case.head_dim, back), x[turned:]))

    @functools.cached_property
    def _projection(self) -> Projection:
        """Return QuACK's projection, which chooses a tile once for all providers."""
        case, of_norms = self.case, [neighbours(x, self.case.head_dim) for x in self._norms]
        return Projection((case.heads_q, case.heads_kv), *self._tables, _BASE, of_norms, case.norm_eps)

    def _call(self, provider: BlockProvider) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """Return ``run(x, of_o, *norms, *of_qkv)`` and its leaves."""
        case, of_norms, b = self.case, self._norms, provider.normed if self._norms else provider.plain
        tables = None if provider.epilogue else b.prepare(*self._tables, case.dtype)
        weights = [self._of_qkv] if provider.weights == 1 else list(self._of_qkv.split(case.columns))
        project = self._projection if provider.epilogue else None
        if project:
            weights, of_norms = [self._reordered(self._of_qkv)], project.norms

        def run(x: Tensor, of_o: Tensor, *others: Tensor) -> Tensor:
            of_heads, of_qkv = others[: len(of_norms)], others[len(of_norms) :]
            given = Norms(*of_heads, case.norm_eps, case.norms) if of_heads else None
            if project:
                (q, k, v), given = project(x, *of_qkv, *of_heads), None
            elif provider.weights == 1:
                q, k, v = map(case.heads, F.linear(x, *of_qkv).split(case.columns, 2))
            else:
                q, k, v = (case.heads(F.linear(x, weight)) for weight in of_qkv)
            return F.linear(b.run(q, k, v, tables, True, given).transpose(1, 2).flatten(2), of_o)

        leaves = [x.detach().requires_grad_() for x in (self._x, self._of_o, *of_norms, *weights)]
        return rotations.specialised(run) if provider.compiled else run, leaves

    def call(self, provider: BlockProvider, part: str) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
        """Return the same function for all passes, because it may be compiled."""
        if provider.name not in self._calls:
            self._calls[provider.name] = self._call(provider)
        return *self._calls[provider.name], self._dy

    def judge(self, provider: BlockProvider, out: Tensor, grads: Sequence[Tensor]) -> Verdict:
        """Compare with the same block in float64 and in eager PyTorch."""
        if not self._references:
            self._references = [self._reference(dtype) for dtype in (torch.float64, self.case.dtype)]
        found = {"o": out.detach()}
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
        return gate.judge(compared, self.case.dtype, forgiving=provider is not PROVIDERS["fused"])

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        case = self.case
        x, dy, of_qkv, of_o = (each.to(dtype) for each in (self._x, self._dy, self._of_qkv, self._of_o))
        q, k, v = map(case.heads, F.linear(x, of_qkv).split(case.columns, 2))
        inputs = testing.Inputs(q, k, v, *self._tables, case.heads(dy @ of_o))
        found = testing.run_reference(inputs, case, dtype if dtype == torch.float64 else None)
        o, *grads = (each.transpose(1, 2).flatten(2) for each in (found[x] for x in ("o", "dq", "dk", "dv")))
        grad = torch.cat(grads, 2)
        made = {"o": F.linear(o, of_o), "dx": grad @ of_qkv, "d of_o": dy[0].T @ o[0], "d of_qkv": grad[0].T @ x[0]}
        return made | {name: found[name] for name in ("dq_norm", "dk_norm") if self._norms}

    def gated(self) -> None:
        self._references.clear()


_HALF: dict[str, Any] = {"dtype": torch.bfloat16, "norm_dtype": torch.bfloat16}
# Name, width, heads of q and k, D, offset of norms.
_MODELS = (
    ("Llama3-8B", 4096, 32, 8, 128, None),
    ("Qwen3-8B", 4096, 32, 8, 128, 0.0),
    ("Llama3-70B-TP8", 8192, 8, 1, 128, None),  # one of eight GPUs
    ("SmolLM2-360M", 960, 15, 5, 64, None),
)
BLOCK = Suite(
    name="block",
    description="Time the attention of a layer with its projections, rotated in attention, before it or in a GEMM.",
    # The most important lengths first, because a run may be interrupted.
    cases=[
        BlockCase(1, heads, heads_kv, n, n, head_dim, norms=offset, model=model, width=width, **_HALF)
        for n in (4096, 16384, 2048)
        for model, width, heads, heads_kv, head_dim, offset in _MODELS
    ],
    trial=BlockTrial,
    table=lambda case: PROVIDERS,
    passes=("fwd", "both"),
    round_ms=20.0,
)
