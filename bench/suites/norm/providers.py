"""Who is measured at attention with norms of heads: ours with them and without, and every rival of ``baselines.norms``.

A provider's ``run(q, k, v, norms, tables, causal)`` gives o; shapes as in ``baselines/base.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import fused_rope_attn
from baselines.base import missing_package
from baselines.norms import NORMED, Norms, hf_norm


class Provider(Protocol):
    """``normed``: False for what leaves the norms out."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def normed(self) -> bool: ...
    @property
    def half_tables(self) -> bool: ...
    @property
    def pip(self) -> tuple[str, ...]: ...

    def missing(self) -> str | None: ...
    def unsupported(self, case: Any) -> str | None: ...
    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any: ...
    def run(self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Any, causal: bool) -> Tensor: ...


@dataclass(frozen=True)
class Fused:
    """``rope_attention`` as a user calls it. normed: with norms; apart: the model's modules norm before the call."""

    name: str
    label: str
    normed: bool = True
    apart: bool = False
    half_tables: bool = False
    pip: tuple[str, ...] = ()

    def missing(self) -> str | None:
        if not self.apart:
            return None
        return missing_package("transformers", "transformers.models.gemma3.modeling_gemma3", "Gemma3RMSNorm")

    def unsupported(self, case: Any) -> str | None:
        return None

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos, sin

    def run(self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Any, causal: bool) -> Tensor:
        if self.apart:
            pairs = ((q, norms.q_norm), (k, norms.k_norm))
            q, k = (hf_norm(x.transpose(1, 2), weight, *norms[2:]).transpose(1, 2) for x, weight in pairs)
        return fused_rope_attn.rope_attention(q, k, v, *tables, causal, **self._options(norms))

    def plan(self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Any, causal: bool) -> str:
        """What the call runs, in words, for the result rows."""
        return str(fused_rope_attn.plan(q, k, v, *tables, causal, **self._options(norms)))

    def _options(self, norms: Norms) -> dict[str, Any]:
        if self.apart or not self.normed:
            return {}
        q_norm, k_norm, eps, offset = norms
        return {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": eps, "norm_offset": offset}


OURS, WITHOUT = "fused", "fused_without"
FUSED: dict[str, Fused] = {
    fused.name: fused
    for fused in (
        Fused(OURS, "fused, with norms"),
        Fused(WITHOUT, "fused, without norms", normed=False),
        Fused("norm_hf_fused", "HF norm + fused", apart=True),
    )
}
PROVIDERS: dict[str, Provider] = {**FUSED, **NORMED}


def is_ours(name: str) -> bool:
    """Of the calls whose norms, if any, are inside."""
    return name in (OURS, WITHOUT)
