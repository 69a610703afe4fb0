"""Who is measured at attention: this project with each backend and strategy, then every rival of ``baselines``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from baselines import BASELINES


class Provider(Protocol):
    """What the benchmark needs; see ``baselines/base.py`` for shapes and meanings."""

    name: str
    label: str
    rotates: bool
    in_place: bool
    half_tables: bool
    backward: bool
    pip: tuple[str, ...]

    def missing(self) -> str | None: ...
    def unsupported(self, case: Any) -> str | None: ...
    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any: ...
    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool) -> Tensor: ...


@dataclass(frozen=True)
class Fused:
    """``fused_rope_attn.rope_attention`` as a user calls it, with one choice of backend and strategy."""

    name: str
    label: str
    backend: str = "auto"
    strategy: str = "auto"
    rotates: bool = True
    in_place: bool = False
    half_tables: bool = False
    backward: bool = True
    pip: tuple[str, ...] = ()

    def missing(self) -> str | None:
        return None

    def unsupported(self, case: Any) -> str | None:
        if self.backend != "hopper":
            return None
        from fused_rope_attn.attention import planning
        from fused_rope_attn.runtime import device

        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        needs = planning.Needs(
            device.arch(where), case.dtype, case.head_dim, self.strategy, no_keys=case.len_k == 0
        )  # fmt: skip
        obstacle = planning.obstacle("hopper", needs)
        return None if obstacle is None else obstacle[1]

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos, sin

    def run(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool) -> Tensor:
        import fused_rope_attn

        return fused_rope_attn.rope_attention(q, k, v, *tables, causal, backend=self.backend, strategy=self.strategy)

    def plan(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, causal: bool) -> str:
        """What the call runs, in words, for the result rows."""
        import fused_rope_attn

        return str(
            fused_rope_attn.plan(q, k, v, *tables, causal, backend=self.backend, strategy=self.strategy),
        )


OURS: dict[str, Fused] = {
    fused.name: fused
    for fused in (
        Fused("fused", "fused (auto)"),
        Fused("fused_inline", "fused, inline", "triton", "inline"),
        Fused("fused_prepass", "fused, prepass", "triton", "prepass"),
        Fused("fused_hopper", "fused, hopper", "hopper"),
    )
}

PROVIDERS: dict[str, Provider] = {**OURS, **BASELINES}


def is_ours(name: str) -> bool:
    return name in OURS


# What ``--providers`` takes beside names; "rivals" are those that rotate.
GROUPS = {
    "ours": list(OURS),
    "rivals": [name for name, provider in BASELINES.items() if provider.rotates],
    "bare": [name for name, provider in BASELINES.items() if not provider.rotates],
}
