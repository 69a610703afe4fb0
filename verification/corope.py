"""Checks of ``experimental.corope_attention``: on a GPU the public function, else its kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_rope_attn.experimental.corope import api, corope_attention, reference
from verification.calls import Check, References, normal
from verification.memory import lay

NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class CoRopeCheck(Check):
    """q of (batch, heads_q, length, head_dim), k and v with heads_kv."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int
    size: str = "small"
    dtype: torch.dtype = torch.float16
    base: float = 10000.0
    softmax_scale: float | None = None
    memory: tuple[str, str, str, str] = ("bnhd", "bnhd", "bnhd", "bnhd")  # of q, k, v and do
    wanted: tuple[str, ...] = NAMES
    public: bool = False  # the public function, which takes the reference for CPU tensors
    seed: int = 0
    backend: ClassVar[str] = "corope"
    function: ClassVar[str] = "corope_attention"
    variants: ClassVar[tuple[tuple[str, str], ...]] = (("corope", "auto"),)

    def make(self, device: str) -> dict[str, Tensor]:
        generator, found = torch.Generator(device).manual_seed(self.seed), {}
        for name, layout in zip((*NAMES, "do"), self.memory):
            heads = self.heads_kv if name in ("k", "v") else self.heads_q
            x = normal(generator, self.batch, heads, self.length, self.head_dim, dtype=self.dtype)
            found[name] = lay(x, layout)
        return found

    def _options(self) -> dict[str, Any]:
        return {"base": self.base, "softmax_scale": self.softmax_scale}

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        made = self.make(device)
        return corope_attention, {name: made[name] for name in NAMES} | self._options()

    def call(self, made: dict[str, Tensor], variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        def kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.is_cuda or self.public:
                return corope_attention(q, k, v, **self._options())
            return api.CoRopeAttention.apply(q, k, v, float(self.base), self._scale)

        return kernels, {name: made[name] for name in NAMES}

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    def references(self, made: dict[str, Tensor], device: str) -> References:
        def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return reference.attention(q, k, v, base=float(self.base), softmax_scale=self._scale)

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            return self.results(right, {name: made[name].to(dtype or self.dtype) for name in NAMES}, made)

        return References(run, device, lambda name: self.dtype)

    def results(
        self, function: Callable[..., Any], given: dict[str, Any], made: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        leaves = {name: given[name].detach().requires_grad_() for name in self.wanted}
        o = function(**(given | leaves))
        gradients = torch.autograd.grad(o, list(leaves.values()), made["do"].to(o.dtype)) if leaves else ()
        return {"o": o.detach()} | {f"d{name}": x for name, x in zip(leaves, gradients)}
