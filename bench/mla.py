"""``python -m bench mla``: multi-head latent attention, and rivals that build queries and keys in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.latent import LATENT
from bench.gate import Verdict, judge
from bench.suite import Provider, Suite, Trial, by_name, length_name
from fused_rope_attn import rope_attention_mla
from verification.calls import dtype_name
from verification.testing import ROWS, LatentCase, LatentInputs, make_latent_inputs, run_latent_reference

OURS = Provider("fused", "rope_attention_mla (ours)", "ours")
PROVIDERS = by_name((OURS, *(Provider(b.name, b.label, b.role, b.missing, b.backward) for b in LATENT.values())))


@dataclass(frozen=True)
class MlaCase(LatentCase):
    """A causal problem."""

    groups = ("mla",)
    heads = property(lambda case: case.heads_q)  # rows have this name

    @property
    def name(self) -> str:
        return f"H{self.heads}-{length_name(self.len_q)}"

    @property
    def shape(self) -> str:
        sizes = f"B{self.batch} H{self.heads} N{self.len_q}x{self.len_k} D{self.nope}+{self.head_dim}/{self.value}"
        return f"{sizes} {dtype_name(self.dtype)} interleaved={self.interleaved}"


class MlaTrial(Trial):
    """One case."""

    facts = ("batch", "heads", "len_q", "causal", "dtype")

    def open(self) -> None:
        self._inputs, self._heads = make_latent_inputs(self.case, self.clock.device), [0, self.case.heads - 1]
        self._do = torch.zeros_like(self._inputs.do)  # 0 at other heads, because k_rope's gradient sums over all
        self._do[-1, self._heads] = self._inputs.do[-1, self._heads]
        self._references: dict[bool, list[dict[str, Tensor]]] = {}

    def call(self, provider: Provider, part: str) -> tuple[Callable[..., Any], list[Tensor], Tensor]:
        rows, tables, b = list(self._inputs[:5]), self._inputs[5:7], LATENT.get(provider.name)
        prepared = b.prepare(*tables, self.case.dtype) if b else None

        def run(*x: Tensor) -> Any:
            return b.run(list(x), prepared) if b else rope_attention_mla(*x, *tables, True, interleaved=True)

        leaves = [x.detach().requires_grad_() for x in (b.leaves(rows) if b else rows)]
        return run, leaves, self._do if part == "gate" else self._inputs.do

    def judge(self, provider: Provider, out: Tensor, grads: Sequence[Tensor]) -> Verdict:
        """Compare the first and the last head of the last batch entry."""
        b, x, bare = LATENT.get(provider.name), self._inputs, provider.role == "bare"

        def chosen(x: Tensor) -> Tensor:
            return (x[-1:] if x.shape[1] == 1 else x[-1:, self._heads]).detach()

        if bare not in self._references:  # in float64 and in eager PyTorch; a bare attention rotates by the angle 0
            tables = (torch.ones_like(x.cos), torch.zeros_like(x.sin)) if bare else (x.cos, x.sin)
            inputs = LatentInputs(*map(chosen, x[:5]), *tables, chosen(self._do), None)
            self._references[bare] = [run_latent_reference(inputs, self.case, dtype) for dtype in (torch.float64, None)]
        outs = [out, *(b.gradients(list(grads), self.case.nope) if b else grads)]
        names = zip(("o", *(f"d{x}" for x in ROWS)), outs)
        compared = [(name, chosen(x), *(y[name] for y in self._references[bare])) for name, x in names]
        return judge(compared, self.case.dtype, forgiving=not provider.ours)


_MODEL: dict[str, Any] = {"nope": 128, "value": 128, "dtype": torch.bfloat16, "interleaved": True, "tables": "random"}
MLA = Suite(
    name="mla",
    description="Time multi-head latent attention and every rival on equal inputs.",
    cases=[
        MlaCase(b, h, h, n, n, 64, **_MODEL)
        for b, h, n in ((1, 128, 1024), (1, 128, 4096), (4, 16, 4096), (1, 32, 16384))
    ],
    trial=MlaTrial,
    table=lambda case: PROVIDERS,
)
