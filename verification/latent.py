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
from verification.testing.latent import ROWS, LatentInputs, noise_of_latent_zero, run_latent_reference


@dataclass(frozen=True)
class LatentCheck(AttentionCheck):
    """A call of multi-head latent attention. nope, value: DN and DV; head_dim is R, and heads_kv must be heads_q.

    memory: of the five tensors and of do, in the order of ``ROWS``. It has the names of a ``LatentCase``, too.
    """

    nope: int = 32
    value: int = 32
    wanted: tuple[str, ...] = ROWS
    variants: tuple[tuple[str, str], ...] = (("auto", "auto"),)

    @property
    def function(self) -> str:
        return "rope_attention_mla" if self.seqlens is None else "rope_attention_mla_varlen"

    @property
    def rope(self) -> int:
        return self.head_dim

    @property
    def heads(self) -> int:
        return self.heads_q

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def make(self, device: str) -> Made:
        # Tables, do and dlse are those of a call with DV columns; q_rope and k_rope those of one with R.
        inputs = testing.make_inputs(replace(self, layout="bhnd", heads_kv=1), device)
        generator = torch.Generator(device).manual_seed(self.seed + 3)

        def normal(length: int, columns: int) -> Tensor:
            shape = (self.batch, self.heads, length, columns)
            return torch.randn(shape, generator=generator, device=torch.device(device), dtype=self.dtype)

        rows = {"q_nope": normal(self.len_q, self.nope), "q_rope": inputs.q}
        rows |= {"k_nope": normal(self.len_k, self.nope), "k_rope": inputs.k}
        rows |= {"v": normal(self.len_k, self.value), "do": normal(self.len_q, self.value)}
        rows, tables = self.laid(rows), self.tables_of(inputs)
        if self.seqlens is not None:
            tables = {name: x[..., : self.longest[1] + self.extra_rows, :] for name, x in tables.items()}
        upstream = {"o": rows.pop("do"), "lse": inputs.dlse}
        return self.made(rows | tables, upstream)

    def made(self, tensors: dict[str, Tensor], upstream: dict[str, Tensor | None]) -> Made:
        """Return the data of a call of these rows and tables."""
        device = tensors["v"].device
        masks = {name: x for name, x in testing.masks_of(self, device).items() if name[:3] == "kv_"}
        masks = masks if self.seqlens is None else self._ends(device)
        return Made(tensors | masks, {name: x for name, x in upstream.items() if x is not None})

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        if variant[0] in ("reference", "auto"):
            return None
        dims = {"nope_dim": self.nope, "value_dim": self.value}
        problem = planning.Problem(self.dtype, self.head_dim, **dims, softmax_scale=self.scale)
        return planning.obstacle(variant[0], problem, arch)

    def references(self, made: Made, device: str) -> References:
        given, upstream = made.given, made.upstream
        inputs = LatentInputs(*(given[name] for name in (*ROWS, "cos", "sin")), upstream["o"], upstream.get("lse"))

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            return run_latent_reference(inputs, self, dtype)._asdict()

        return References(run, device, self.judged(given), lambda name: noise_of_latent_zero(name, self, inputs))

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Made) -> dict[str, Tensor]:
        # Not those of ``AttentionCheck``, which leaves out weights' gradients in large cases.
        return super(AttentionCheck, self).results(function, given, made)
