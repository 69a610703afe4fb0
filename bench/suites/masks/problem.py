"""The tensors of a case in every form that a line wants, and a line on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from baselines.rotations import LIGER
from bench.suite import forward_or_backward
from bench.suites.masks.lines import Line
from fused_rope_attn import testing
from fused_rope_attn.testing import Case


class Problem:
    """One case's tensors in every form, made once.

    dense: as the case says. packed: (T, H, D). right, left: (B, H, longest, D), every sequence a batch entry that is
    padded on that side.
    """

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.inputs = testing.make_inputs(case, device)
        self._forms: dict[str, list[Tensor]] = {}
        self.lengths = [n for n, _ in case.seqlens or ()]
        self.longest = max(self.lengths, default=0)
        counts = torch.tensor(self.lengths, dtype=torch.int64)
        self.ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        self.starts = (self.longest - counts).int().to(device)
        self.position = torch.cat([torch.arange(n) for n in self.lengths] or [torch.arange(case.len_k)]).to(device)

    def _rows(self, form: str) -> Tensor:
        """Where each packed token lies among the rows of the padded batch."""
        index = torch.arange(len(self.lengths), device=self.device)
        counts = torch.tensor(self.lengths, device=self.device)
        begin = index * self.longest + (self.starts if form == "left" else 0)
        return begin.repeat_interleave(counts) + self.position

    def tensors(self, form: str) -> list[Tensor]:
        """q, k, v and do."""
        x = self.inputs
        if form not in self._forms:
            given = [x.q, x.k, x.v, x.do]
            if form != "dense":
                given = [t[0].transpose(0, 1) for t in given]
            if form in ("right", "left"):
                rows, count = self._rows(form), len(self.lengths) * self.longest
                padded = [t.new_zeros(count, *t.shape[1:]).index_copy_(0, rows, t) for t in given]
                given = [t.unflatten(0, (-1, self.longest)).transpose(1, 2) for t in padded]
            self._forms[form] = given
        return self._forms[form]

    def as_case(self, x: Tensor, form: str) -> Tensor:
        """An output or gradient as the case has it: (B, H, N, D)."""
        if form in ("right", "left"):
            x = x.transpose(1, 2).flatten(0, 1)[self._rows(form)]
        return x if form == "dense" else x.transpose(0, 1)[None]


class Subject:
    """One line on its problem; ``make`` gives the zero-argument functions that are timed."""

    def __init__(self, line: Line, problem: Problem, backend: str):
        self.line, self.problem, self._backend = line, problem, backend
        self._masks = testing.masks_of(line.case, problem.device)
        if line.rival is not None:
            x = problem.inputs
            table = [t[problem.position] for t in (x.cos, x.sin)]
            self._tables = LIGER.prepare(*table, line.case.dtype)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        line, problem, x = self.line, self.problem, self.problem.inputs
        if line.rival is not None:
            return self._rival(q, k, v)
        options: dict[str, Any] = {"backend": self._backend}
        if line.form == "packed":
            ends, longest = problem.ends, problem.longest
            return fused_rope_attn.rope_attention_varlen(
                q, k, v, x.cos, x.sin, ends, ends, longest, longest, True, **options
            )  # fmt: skip
        options |= {"kv_starts": problem.starts} if line.form == "left" else {}
        options |= self._masks | {"sinks": sinks} if line.form == "dense" else {}
        return fused_rope_attn.rope_attention(q, k, v, x.cos, x.sin, line.case.causal, **options)

    def _rival(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        line, problem = self.line, self.problem
        if line.form == "packed":
            q4, k4 = LIGER.rotate(*(t.transpose(0, 1)[None] for t in (q, k)), self._tables)
            q, k = (t[0].transpose(0, 1) for t in (q4, k4))
            return line.rival.packed(q, k, v, problem.ends, problem.longest)
        q, k = LIGER.rotate(q, k, self._tables)
        return line.rival.window(q, k, v, line.case.window[0])

    def _leaves(self) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v as leaves, and the sinks. The rivals' rotation works in place and gets copies."""
        q, k, v, _ = self.problem.tensors(self.line.form)
        qk = [x.detach().clone() if self.line.rival is not None else x.detach() for x in (q, k)]
        sinks = self._masks["sinks"]
        sinks = None if sinks is None else sinks.detach().requires_grad_()
        return [x.requires_grad_() for x in (*qk, v.detach())], sinks

    def once(self) -> dict[str, Tensor]:
        """o, dq, dk, dv as the case has them."""
        leaves, sinks = self._leaves()
        o = self._run(*leaves, sinks)
        gradients = torch.autograd.grad(o, leaves, self.problem.tensors(self.line.form)[3])
        names = zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients))
        return {name: self.problem.as_case(x, self.line.form) for name, x in names}

    def make(self, part: str) -> Callable[[], Any]:
        """``fwd`` runs without gradients, ``bwd`` again and again on one graph."""
        leaves, sinks = self._leaves()
        return forward_or_backward(self._run, [*leaves, sinks], self.problem.tensors(self.line.form)[3], part)

    def plan(self) -> Any:
        """What ours runs."""
        line, backend = self.line, self._backend
        q, k, v, _ = self.problem.tensors(line.form)
        if line.form == "packed":
            x, ends, longest = self.problem.inputs, self.problem.ends, self.problem.longest
            return fused_rope_attn.plan_varlen(
                q, k, v, x.cos, x.sin, ends, ends, longest, longest, True, backend=backend
            )  # fmt: skip
        masks = self._masks if line.form == "dense" else {}
        masks = masks | ({"kv_starts": self.problem.starts} if line.form == "left" else {})
        x = self.problem.inputs
        return fused_rope_attn.plan(q, k, v, x.cos, x.sin, line.case.causal, **masks, backend=backend)
