"""One provider at one problem of attention: judged once, then timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.attention.providers import Provider, is_ours
from bench.gate import Gate, Verdict
from bench.suite import forward_or_backward
from fused_rope_attn import testing


class Subject:
    """One provider on one case's inputs; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, provider: Provider, inputs: testing.Inputs, causal: bool):
        self._provider, self._inputs, self._causal = provider, inputs, causal
        self._tables = provider.prepare(inputs.cos, inputs.sin, inputs.q.dtype)

    def _leaves(self) -> list[Tensor]:
        """q, k, v as leaves. Whoever rotates in place gets copies, one set for each timed function: its fixed graph has
        saved them."""
        x = self._inputs
        qk = [t.detach().clone() if self._provider.in_place else t.detach() for t in (x.q, x.k)]
        return [t.requires_grad_() for t in (*qk, x.v.detach())]

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd``, ``fwd_grad``, ``bwd`` or ``both``, as ``suite.forward_or_backward`` has them."""
        run, tables, causal = self._provider.run, self._tables, self._causal

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return run(q, k, v, tables, causal)

        return forward_or_backward(attend, self._leaves(), self._inputs.do, part)


def no_backward(provider: Provider, part: str) -> str | None:
    """Why a provider cannot run a pass: it has no gradients, and every pass but "fwd" is about them."""
    return None if provider.backward or part == "fwd" else f"{provider.label} has a forward pass only"


def check(
    provider: Provider, gate: Gate, synchronize: Callable[[], None], *, grads: bool, strict: bool = False
) -> Verdict:
    """Run the provider once on copies of the inputs and judge it. Raises what the provider raises.

    ``grads``: whether gradients are judged too, where the provider has any. ``strict`` holds rivals to the tolerance as
    ours are; otherwise they may be loose.
    """
    grads = grads and provider.backward
    x, case = gate.inputs, gate.case
    begin = time.perf_counter()
    # Copies: some rivals rotate q and k in place.
    q, k = (t.detach().clone().requires_grad_(grads) for t in (x.q, x.k))
    v = x.v.detach().requires_grad_(grads)
    tables = provider.prepare(x.cos, x.sin, case.dtype)
    with torch.set_grad_enabled(grads):
        o = provider.run(q, k, v, tables, case.causal)
        gradients = torch.autograd.grad(o, (q, k, v), x.do) if grads else ()
    synchronize()
    seconds = time.perf_counter() - begin
    outputs = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients)))
    kind = "none" if not provider.rotates else "half" if provider.half_tables else "float32"
    verdict = gate.judge(outputs, kind, forgiving=not is_ours(provider.name) and not strict)
    return replace(verdict, first_call_s=seconds)
