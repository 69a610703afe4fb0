"""A shape of attention with norms: its tensors, its float64 reference with both weights' gradients, and a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baselines.norms import Norms
from bench.attention.cases import BenchCase
from bench.gate import Compared, Verdict, ends, judge
from bench.suite import forward_or_backward
from bench.suites.norm.providers import Provider, is_ours
from fused_rope_attn import testing
from fused_rope_attn.rotation import reference

# Up to this length all heads are compared, which takes a moment; beyond it the first and the last.
_WHOLE = 1024
_NAMES = ("o", "dq", "dk", "dv", "dq_norm", "dk_norm")
Found = tuple[Tensor, ...]  # in the order of _NAMES; without norms the first four


class Problem:
    """The tensors of a case, and its references, made when they are first needed.

    q, k, v, do as ``testing.make_inputs`` gives them. The gradient ``do`` of the gate is zero at heads that are not
    compared, so that the weights' gradients, which are sums over all heads, are those of the compared ones.
    """

    def __init__(self, case: BenchCase, offset: float, eps: float, device: torch.device) -> None:
        self.case, self.inputs = case.case, testing.make_inputs(case.case, device)
        generator = torch.Generator(device).manual_seed(1)
        # Weights near one, as trained ones are, whichever way they are stored.
        q_norm, k_norm = (
            (1 - offset + 0.2 * torch.randn(self.case.head_dim, generator=generator, device=device)).to(self.case.dtype)
            for _ in range(2)
        )
        self.norms = Norms(q_norm, k_norm, eps, offset)
        c = self.case
        every = [(b, h) for b in range(c.batch) for h in range(c.heads_kv)]
        self._heads = every if c.len_q <= _WHOLE else ends(c.batch, c.heads_kv)
        self.do = self._only_compared(self.inputs.do)
        self._references: dict[tuple[str, bool], tuple[list[Found], list[Found]]] = {}

    def release(self) -> None:
        """Free the references: gigabytes at long lengths."""
        self._references.clear()

    def leaves(self, wanted: bool = True) -> list[Tensor]:
        """q, k, v and both weights, which ask for gradients where they are ``wanted``."""
        x = self.inputs
        return [t.detach().requires_grad_(wanted) for t in (x.q, x.k, x.v, self.norms.q_norm, self.norms.k_norm)]

    def judge(self, provider: Provider, found: Found) -> Verdict:
        """o, the gradients of q, k, v and those of both weights, the latter where the provider norms."""
        return judge(self._compared(provider, found), self.case.dtype, forgiving=not is_ours(provider.name))

    def _compared(self, provider: Provider, found: Found) -> Iterator[Compared]:
        ref64, eager = self._reference("half" if provider.half_tables else "float32", provider.normed)
        for name, out, exact, near in zip(_NAMES[:4], found, zip(*ref64), zip(*eager)):
            for (batch, head), exact_part, near_part in zip(self._heads, exact, near):
                yield name, self._part(out, batch, head), exact_part, near_part
        for i in range(4, len(found)):
            # Of eager PyTorch's sum, too, only the result is rounded.
            exact_sum, near_sum = (sum(part[i] for part in parts) for parts in (ref64, eager))
            yield _NAMES[i], found[i][None], exact_sum[None], near_sum[None].to(self.case.dtype)

    def _reference(self, tables: str, normed: bool) -> tuple[list[Found], list[Found]]:
        """(float64, eager) of each compared group of heads."""
        key = tables, normed
        if key not in self._references:
            self._references[key] = (
                [self._group(*at, tables, normed, torch.float64) for at in self._heads],
                [self._group(*at, tables, normed, None) for at in self._heads],
            )
        return self._references[key]

    def _group(self, batch: int, head: int, tables: str, normed: bool, dtype: torch.dtype | None) -> Found:
        x, c = self.inputs, self.case
        cos, sin = (t.to(c.dtype) if tables == "half" else t for t in (x.cos, x.sin))
        wide = dtype or torch.float32
        q, k = (self._part(t, batch, head).to(dtype or c.dtype).requires_grad_() for t in (x.q, x.k))
        v, do = self._part(x.v, batch, head), self._part(x.do, batch, head)
        weights = [w.detach().to(wide).requires_grad_() for w in self.norms[:2]] if normed else []
        options: dict[str, Any] = {"rotary_dim": c.head_dim, "interleaved": False, "inverse": False}
        options |= {"norm_eps": self.norms.eps, "norm_offset": self.norms.offset}
        given = [t.to(wide) for t in (cos, sin)]
        with torch.enable_grad():
            turned = [
                reference.rotation(t, *given, weight=weight, **options)
                for t, weight in zip((q, k), weights or (None, None))
            ]
        still = torch.ones_like(x.cos), torch.zeros_like(x.sin)
        one = replace(c, batch=1, heads_q=q.shape[1], heads_kv=1)
        inputs = testing.Inputs(turned[0].detach(), turned[1].detach(), v, *still, do)
        results = testing.run_reference(inputs, one, dtype)
        gradients = torch.autograd.grad(turned, (q, k, *weights), (results.dq, results.dk))
        return results.o, *gradients[:2], results.dv, *gradients[2:]

    def _part(self, x: Tensor, batch: int, head_kv: int) -> Tensor:
        """The query heads of one key-value head, or that head itself."""
        width = x.shape[1] // self.case.heads_kv
        return x[batch : batch + 1, head_kv * width : (head_kv + 1) * width].detach()

    def _only_compared(self, do: Tensor) -> Tensor:
        kept = torch.zeros_like(do)
        for batch, head in self._heads:
            self._part(kept, batch, head).copy_(self._part(do, batch, head))
        return kept


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

    def once(self, grads: bool) -> Found:
        """o, and with ``grads`` the gradients that the gate compares."""
        leaves = self._leaves()
        if not grads:
            with torch.no_grad():
                return (self._run(*leaves),)
        o = self._run(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return o.detach(), *torch.autograd.grad(o, wanted, self._problem.do)

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd`` runs without gradients, ``bwd`` again and again on one graph."""
        return forward_or_backward(self._run, self._leaves(), self._problem.inputs.do, part)

    def plan(self) -> str:
        """What ours runs, in words."""
        x, problem = self._problem.inputs, self._problem
        return self._provider.plan(x.q, x.k, x.v, problem.norms, self._tables, problem.case.causal)
