"""Calls of ``rope_attention_mla`` and ``rope_attention_mla_varlen``: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.attention import planning
from verification import testing
from verification.attention import AttentionCheck
from verification.calls import Made, References
from verification.testing.latent import noise_of_latent_zero

ROWS = ("q_nope", "q_rope", "k_nope", "k_rope", "v")


@dataclass(frozen=True)
class LatentCheck(AttentionCheck):
    """A call of multi-head latent attention. nope, value: DN and DV; head_dim is R, and heads_kv must be heads_q.

    memory: of the five tensors and of do, in the order of ``ROWS``.
    """

    nope: int = 32
    value: int = 32
    wanted: tuple[str, ...] = ROWS
    variants: tuple[tuple[str, str], ...] = (("auto", "auto"),)

    @property
    def function(self) -> str:
        return "rope_attention_mla" if self.seqlens is None else "rope_attention_mla_varlen"

    @property
    def scale(self) -> float:
        return (self.nope + self.head_dim) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def make(self, device: str) -> Made:
        # Tables, do and dlse are those of a call with DV columns; q_rope and k_rope those of one with R.
        inputs = testing.make_inputs(replace(self, layout="bhnd", heads_kv=1), device)
        generator = torch.Generator(device).manual_seed(self.seed + 3)

        def normal(length: int, columns: int) -> Tensor:
            shape = (self.batch, self.heads_q, length, columns)
            return torch.randn(shape, generator=generator, device=torch.device(device), dtype=self.dtype)

        rows = {
            "q_nope": normal(self.len_q, self.nope),
            "q_rope": inputs.q,
            "k_nope": normal(self.len_k, self.nope),
            "k_rope": inputs.k,
            "v": normal(self.len_k, self.value),
            "do": normal(self.len_q, self.value),
        }
        tensors, tables = self.laid(rows), self.tables_of(inputs)
        upstream = {"o": tensors.pop("do")} | ({} if inputs.dlse is None else {"lse": inputs.dlse})
        if self.seqlens is not None:
            tables = {name: x[..., : self.longest[1] + self.extra_rows, :] for name, x in tables.items()}
            return Made(tensors | tables | self._ends(device), upstream)
        masks = {name: x for name, x in testing.masks_of(self, device).items() if name[:3] == "kv_"}
        return Made(tensors | tables | masks, upstream)

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        if variant[0] in ("reference", "auto"):
            return None
        dims = {"nope_dim": self.nope, "value_dim": self.value}
        problem = planning.Problem(self.dtype, self.head_dim, **dims, softmax_scale=self.scale)
        return planning.obstacle(variant[0], problem, arch)

    def references(self, made: Made, device: str) -> References:
        given = made.given
        ends = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if self.seqlens is not None}
        masks = ends or {name: given[name] for name in ("kv_starts", "kv_lens")}
        scores: dict[str, Any] = {"softmax_scale": self.scale, "rotary_dim": self.head_dim, "window": self.window}

        def right(q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, **tables: Tensor) -> Any:
            return testing.reference_attention(
                q_rope, k_rope, v, tables["cos"], tables["sin"], self.causal,
                q_nope=q_nope, k_nope=k_nope, interleaved=self.interleaved, **scores, **masks,
            )  # fmt: skip

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            cast = {name: given[name].detach().to(dtype or self.dtype) for name in ROWS}
            leaves = {name: x.requires_grad_() for name, x in cast.items()}
            wide = dtype == torch.float64
            o, lse = right(**leaves, **{name: given[name].double() if wide else given[name] for name in ("cos", "sin")})
            of = {"o": o, "lse": lse}
            upstream = [x.to(of[name].dtype) for name, x in made.upstream.items()]
            gradients = torch.autograd.grad([of[name] for name in made.upstream], list(leaves.values()), upstream)
            found = of | {f"d{name}": x for name, x in zip(leaves, gradients)}
            return {name: x.detach() for name, x in found.items()}

        def zero(name: str) -> float:
            columns = self.nope + self.head_dim
            return noise_of_latent_zero(name, self.heads_q, columns, self.scale, given["cos"], given["sin"])

        return References(run, device, self.judged(given), zero)

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Made) -> dict[str, Tensor]:
        # Not those of ``AttentionCheck``, which leaves out weights' gradients in large cases.
        return super(AttentionCheck, self).results(function, given, made)
