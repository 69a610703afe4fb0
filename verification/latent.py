"""Calls of ``rope_attention_mla`` and ``rope_attention_mla_varlen``: outputs and gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verification import testing
from verification.attention import AttentionCheck
from verification.calls import Made, References
from verification.testing.latent import ROWS, latent_masks, run_latent_reference


@dataclass(frozen=True)
class LatentCheck(testing.LatentCase, AttentionCheck):
    """A call of multi-head latent attention. memory: of the five tensors and of do, in the order of ``ROWS``."""

    wanted: tuple[str, ...] = ROWS
    variants: tuple[tuple[str, str], ...] = (("auto", "auto"),)

    @property
    def function(self) -> str:
        return "rope_attention_mla" if self.seqlens is None else "rope_attention_mla_varlen"

    def make(self, device: str) -> Made:
        inputs = testing.make_latent_inputs(self, device)
        return self.made(inputs._replace(**self.laid({name: getattr(inputs, name) for name in (*ROWS, "do")})))

    def made(self, inputs: testing.LatentInputs) -> Made:
        given, device = inputs._asdict() | self.tables_of(inputs), inputs.v.device
        upstream = {"o": given.pop("do"), "lse": given.pop("dlse")}
        masks = latent_masks(self, device) if self.seqlens is None else self._ends(device)
        return Made(given | masks, {name: x for name, x in upstream.items() if x is not None})

    def planned(self) -> dict[str, Any]:
        own = {"nope_dim": self.nope, "value_dim": self.value, "softmax_scale": self.scale}
        return super().planned() | own

    def references(self, made: Made, device: str) -> References:
        given, upstream = made.given, made.upstream
        inputs = testing.LatentInputs(*(given[x] for x in (*ROWS, "cos", "sin")), upstream["o"], upstream.get("lse"))

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            return run_latent_reference(inputs, self, dtype)._asdict()

        zero = functools.partial(testing.noise_of_zero, case=self, inputs=inputs)
        return References(run, device, self.judged(given), zero)
