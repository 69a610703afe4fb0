"""``python -m bench mla``: multi-head latent attention, and rivals that build queries and keys in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.latent import LATENT
from bench.gate import Verdict, judge
from bench.names import length_name
from bench.report import Row
from bench.suite import Entry, Provider, Suite, Times, Trial, by_name, forward_or_backward
from fused_rope_attn import plan_mla, rope_attention_mla
from verification.testing import LatentCase, LatentInputs, LatentResults, make_latent_inputs, run_latent_reference

OURS = Provider("fused", "rope_attention_mla (ours)", "ours")
PROVIDERS = by_name((OURS, *(Provider(b.name, b.label, b.role, b.missing, b.pip) for b in LATENT.values())))


@dataclass(frozen=True)
class MlaCase(LatentCase):
    """A causal problem."""

    groups = ("mla",)
    shape = LatentCase.name

    @property
    def name(self) -> str:
        return f"H{self.heads}-{length_name(self.len_q)}"


class MlaTrial(Trial):
    """One case. A build alone has no gate, because the same build is judged with an attention."""

    facts = ("batch", "heads", "len_q", "causal", "dtype")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._inputs, self._heads = make_latent_inputs(self.case, self.clock.device), [0, self.case.heads - 1]
        self._do = torch.zeros_like(self._inputs.do)  # 0 at other heads, because k_rope's gradient sums over all
        self._do[-1, self._heads] = self._inputs.do[-1, self._heads]
        self._references: dict[bool, list[LatentResults]] = {}

    def unsupported_pass(self, provider: Provider, part: str) -> str | None:
        has_it = part == "fwd" or provider.ours or LATENT[provider.name].backward
        return None if has_it else f"{provider.label} has a forward pass only"

    def _call(self, provider: Provider) -> tuple[Callable[..., Any], list[Tensor], Any]:
        """Return the function, its leaves and the gradient of its result."""
        rows, tables, b = list(self._inputs[:5]), self._inputs[5:7], LATENT.get(provider.name)
        prepared = b.prepare(*tables, self.case.dtype) if b else None

        def run(*x: Tensor) -> Any:
            return b.run(list(x), prepared) if b else rope_attention_mla(*x, *tables, True, interleaved=True)

        leaves = [x.detach().requires_grad_() for x in (b.leaves(rows) if b else rows)]
        with torch.no_grad():
            return run, leaves, run(*leaves) if provider.role == "ceiling" else self._inputs.do

    def enter(self, provider: Provider) -> Entry:
        grads = self.options.passes != ("fwd",) and self.unsupported_pass(provider, "bwd") is None
        run, leaves, given = self._call(provider)

        def once(given: Any) -> list[Tensor]:
            with torch.set_grad_enabled(grads):
                out = run(*leaves)
            return [out, *(torch.autograd.grad(out, leaves, given) if grads else ())]

        def make(part: str) -> Callable[[], Any]:
            run, leaves, given = self._call(provider)
            fn = forward_or_backward(run, leaves, given, part)
            return fn if provider.role != "ceiling" else lambda: _written(fn(), given)

        verdict = Verdict() if provider.role == "ceiling" else self._judge(provider, *once(self._do))
        facts = verdict.fields() | {"peak_mib": self.clock.peak_mib(lambda: once(given))}
        return Entry(provider, verdict, make, facts)

    def _judge(self, provider: Provider, o: Tensor, *grads: Tensor) -> Verdict:
        """Compare the first and the last head of the last batch entry."""
        b, x, bare = LATENT.get(provider.name), self._inputs, provider.role == "bare"

        def chosen(x: Tensor) -> Tensor:
            return (x[-1:] if x.shape[1] == 1 else x[-1:, self._heads]).detach()

        if bare not in self._references:  # in float64 and in eager PyTorch; a bare attention rotates by the angle 0
            tables = (torch.ones_like(x.cos), torch.zeros_like(x.sin)) if bare else (x.cos, x.sin)
            inputs = LatentInputs(*map(chosen, x[:5]), *tables, chosen(self._do), None)
            self._references[bare] = [run_latent_reference(inputs, self.case, dtype) for dtype in (torch.float64, None)]
        outs = zip(("o", *LatentResults._fields[2:]), (o, *(b.gradients(list(grads), self.case.nope) if b else grads)))
        compared = [(name, chosen(out), *(getattr(y, name) for y in self._references[bare])) for name, out in outs]
        return judge(compared, self.case.dtype, forgiving=not provider.ours)

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        plan = str(plan_mla(*self._call(OURS)[1], *self._inputs[5:7], True, interleaved=True))
        return {OURS.name: {"plan": plan}} if OURS.name in measured else {}


def _written(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the results that are not views of ``given``.

    The gradient of a concatenation is such a view. No launch writes it, so that the check of a graph would fail.
    """
    memory = {x.untyped_storage().data_ptr() for x in given}
    return [x for x in results if x.untyped_storage().data_ptr() not in memory]


_MODEL: dict[str, Any] = {"nope": 128, "rope": 64, "value": 128, "dtype": torch.bfloat16, "interleaved": True}
MLA = Suite(
    name="mla",
    description="Time multi-head latent attention and every rival on equal inputs.",
    cases=[MlaCase(*bhn, bhn[2], **_MODEL) for bhn in ((1, 128, 1024), (1, 128, 4096), (4, 16, 4096), (1, 32, 16384))],
    trial=MlaTrial,
    table=lambda case: PROVIDERS,
)
