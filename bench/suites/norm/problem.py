"""A shape of attention with norms: its tensors, its float64 reference with both weights' gradients, and a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from baselines.norms import Norms
from bench.gate import Compared, Verdict, ends, judge
from bench.suite import forward_or_backward
from bench.suites.norm.providers import Provider, is_ours
from fused_rope_attn import testing

# Up to the first length all heads are compared, which takes a moment, and up to the second the first and the last.
_WHOLE, _LONG = 1024, 16384
_OF_HEADS, _OF_WEIGHTS = ("o", "dq", "dk", "dv"), ("dq_norm", "dk_norm")


class Problem:
    """The tensors of a case that has norms, and its references, made when they are first needed.

    The gradient ``do`` of the gate is zero at heads that are not compared, so that the weights' gradients, which are
    sums over all heads, are those of the compared ones.
    """

    def __init__(self, case: testing.Case, device: torch.device) -> None:
        self.case, self.inputs = case, testing.make_inputs(case, device)
        self.norms = Norms(*testing.norms_of(case, device).values())
        every = [(batch, head) for batch in range(case.batch) for head in range(case.heads_kv)]
        sampled = ends(case.batch, case.heads_kv)
        self._heads = every if case.len_q <= _WHOLE else sampled if case.len_q < _LONG else sampled[-1:]
        self.do = torch.zeros_like(self.inputs.do)
        for at in self._heads:
            self._part(self.do, *at).copy_(self._part(self.inputs.do, *at))
        self._references: dict[tuple[bool, bool], tuple[testing.Results, testing.Results]] = {}

    def release(self) -> None:
        """Free the references: gigabytes at long lengths."""
        self._references.clear()

    def leaves(self) -> list[Tensor]:
        """q, k, v and both weights, which ask for gradients."""
        x = self.inputs
        return [t.detach().requires_grad_() for t in (x.q, x.k, x.v, self.norms.q_norm, self.norms.k_norm)]

    def judge(self, provider: Provider, found: dict[str, Tensor]) -> Verdict:
        """o, the gradients of q, k, v and those of both weights, as far as they were ``found``."""
        return judge(self._compared(provider, found), self.case.dtype, forgiving=not is_ours(provider.name))

    def _compared(self, provider: Provider, found: dict[str, Tensor]) -> Iterator[Compared]:
        ref64, eager = self._reference(provider.half_tables, provider.normed)
        for name, out in found.items():
            exact, near = getattr(ref64, name), getattr(eager, name)
            if name in _OF_WEIGHTS:
                yield name, out[None], exact[None], near[None]
            else:
                yield name, self._chosen(out), exact, near

    def _reference(self, half_tables: bool, normed: bool) -> tuple[testing.Results, testing.Results]:
        """(float64, eager) of the compared heads, a batch entry for each group of them."""
        key = half_tables, normed
        if key not in self._references:
            x, c = self.inputs, self.case
            tables = [t.to(c.dtype) if half_tables else t for t in (x.cos, x.sin)]
            q, k, v, do = (self._chosen(t) for t in (x.q, x.k, x.v, x.do))
            case = replace(c, batch=len(self._heads), heads_q=q.shape[1], heads_kv=1, norms=c.norms if normed else None)
            given = testing.Inputs(q, k, v, *tables, do)
            self._references[key] = (
                testing.run_reference(given, case, torch.float64),
                testing.run_reference(given, case),
            )
        return self._references[key]

    def _chosen(self, x: Tensor) -> Tensor:
        """The compared heads of (B, H, N, D), a batch entry for each group."""
        return torch.cat([self._part(x, *at) for at in self._heads]).detach()

    def _part(self, x: Tensor, batch: int, head_kv: int) -> Tensor:
        """The query heads of one key-value head, or that head itself."""
        width = x.shape[1] // self.case.heads_kv
        return x[batch : batch + 1, head_kv * width : (head_kv + 1) * width]


class Subject:
    """One provider on a problem; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, provider: Provider, problem: Problem) -> None:
        self._provider, self._problem = provider, problem
        x = problem.inputs
        self._tables = provider.prepare(x.cos, x.sin, problem.case.dtype)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        norms = self._problem.norms._replace(q_norm=q_norm, k_norm=k_norm)
        return self._provider.run(q, k, v, norms, self._tables, self._problem.case.causal)

    def _leaves(self) -> list[Tensor]:
        leaves = self._problem.leaves()
        if not self._provider.normed:
            for weight in leaves[3:]:
                weight.requires_grad_(False)
        return leaves

    def once(self, grads: bool) -> dict[str, Tensor]:
        """o, and with ``grads`` the gradients that the gate compares."""
        leaves = self._leaves()
        with torch.set_grad_enabled(grads):
            o = self._run(*leaves)
        if not grads:
            return {"o": o}
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(o, wanted, self._problem.do)
        return dict(zip((*_OF_HEADS, *_OF_WEIGHTS), (o.detach(), *gradients)))

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd`` runs without gradients, ``bwd`` again and again on one graph."""
        return forward_or_backward(self._run, self._leaves(), self._problem.inputs.do, part)

    def plan(self) -> str:
        """What ours runs, in words."""
        x, problem = self._problem.inputs, self._problem
        return cast(Any, self._provider).plan(x.q, x.k, x.v, problem.norms, self._tables, problem.case.causal)
