"""The gate: hold the results of every provider to the tolerance of the public contract before anybody is timed.

Ours must pass it, or the benchmark prints FAILED instead of a time. Rivals are held to it as well, but some of them
round more than we allow: FlashAttention computes ``delta`` from a rounded o, and a rotation that rounds every step
leaves a row in a thousand outside the rule on rows. Such a rival is "loose" if it is finite, and on each whole tensor
within 2.5 times the rms error of eager PyTorch. It is timed and marked. A rival further off computes something else: it
has failed, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verification import testing

_LOOSE_RMS = 2.5
# From this length on one group of heads is compared, because its float64 reference takes a second; below it the first
# and the last group.
_LONG = 16384
# (name, result, float64 reference, eager result in the dtype of the case); everything but "o" is a gradient.
Compared = tuple[str, Tensor, Tensor, Tensor]
OF_WEIGHTS = ("dq_norm", "dk_norm")


@dataclass(frozen=True)
class Verdict:
    """The result of a gate: "ok", "loose" or "failed", and why it is not "ok"."""

    status: str = "ok"
    detail: str = ""


def judge(results: Iterable[Compared], dtype: torch.dtype, *, forgiving: bool = False) -> Verdict:
    """Hold results against float64. ``forgiving``: accept a loose result."""
    status, details = "ok", []
    for name, out, ref64, eager in results:
        held = testing.compare(name, out, ref64, eager, grad=name != "o", dtype=dtype)
        if not held.ok:
            details.append(f"{name}: {held.detail}")
            loose = forgiving and status != "failed" and _rms_ratio(out, ref64, eager) <= _LOOSE_RMS
            status = "loose" if loose else "failed"
    return Verdict(status, "; ".join(details))


def ends(batch: int, heads: int) -> list[tuple[int, int]]:
    """Return the first and the last (batch entry, head). Wrong strides and offsets show in the last."""
    return list(dict.fromkeys([(0, 0), (batch - 1, heads - 1)]))


class Gate:
    """The references of one case of attention, made when they are first needed and shared by all providers.

    heads: the (batch entry, key-value head) pairs that are compared; None chooses by the length. reference: computes
    results by name from inputs, a case and float64 or None. ``do`` is the gradient that providers get for the gate.
    With norms it is zero at heads that are not compared, because the weights' gradients are sums over all heads.
    """

    def __init__(
        self,
        case: testing.Case,
        inputs: testing.Inputs,
        *,
        heads: list[tuple[int, int]] | None = None,
        reference: Callable[..., dict[str, Tensor]] = testing.run_reference,
    ) -> None:
        self.case, self.inputs, self._reference = case, inputs, reference
        sampled = ends(case.batch, case.heads_kv)
        self._heads = heads or (sampled[-1:] if case.len_k >= _LONG else sampled)
        self._references: dict[tuple, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self.do = inputs.do
        if case.norms is not None:
            self.do = torch.zeros_like(inputs.do)
            for at in self._heads:
                self._part(self.do, *at).copy_(self._part(inputs.do, *at))

    def judge(self, outputs: dict[str, Tensor], tables: str, *, case: testing.Case, forgiving: bool = False) -> Verdict:
        """Compare whole outputs, named o, dq, dk, dv, dq_norm and dk_norm, on the chosen heads.

        tables: those that the computation was given: "float32", "half" (rounded to the dtype) or "none". case: the
        problem that was computed, which may have another mask than the gate's or no norms.
        """
        exact, near = self._of(case, tables)
        compared = (
            (name, out[None] if name in OF_WEIGHTS else self._chosen(out, self._heads), exact[name], near[name])
            for name, out in outputs.items()
        )
        return judge(compared, self.case.dtype, forgiving=forgiving)

    def release(self) -> None:
        """Free the references: gigabytes at long lengths."""
        self._references.clear()

    def _of(self, case: testing.Case, tables: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (float64, eager) by name, on the chosen heads, for one kind of tables."""
        key = case, tables
        if key not in self._references:
            cos, sin = self.inputs.cos, self.inputs.sin
            if tables == "half":  # a provider is not charged for tables that it was given rounded
                cos, sin = cos.to(case.dtype), sin.to(case.dtype)
            elif tables == "none":
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            # The reference takes packed sequences without a batch: one head after the other.
            parts = [self._heads] if case.seqlens is None else [[head] for head in self._heads]
            found = [
                [self._results(*self._problem(case, heads, cos, sin), dtype) for heads in parts]
                for dtype in (torch.float64, None)
            ]
            exact, near = ({name: torch.cat([p[name] for p in results]) for name in results[0]} for results in found)
            self._references[key] = exact, near
        return self._references[key]

    def _problem(self, case: testing.Case, heads: list, cos: Tensor, sin: Tensor) -> tuple[Any, testing.Case]:
        """Return the inputs and the case of some heads, a batch entry for each group of query heads."""
        q, k, v, do = (self._chosen(x, heads) for x in (self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.do))
        case = replace(case, batch=len(heads), heads_q=q.shape[1], heads_kv=1)
        return testing.Inputs(q, k, v, cos, sin, do), case

    def _results(self, *given: Any) -> dict[str, Tensor]:
        results = self._reference(*given)
        return {name: results[name] for name in ("o", "dq", "dk", "dv", *OF_WEIGHTS) if name in results}

    def _chosen(self, x: Tensor, heads: list[tuple[int, int]]) -> Tensor:
        """Return some heads of (B, H, N, D), a batch entry for each group."""
        return torch.cat([self._part(x, *at) for at in heads]).detach()

    def _part(self, x: Tensor, batch: int, head_kv: int) -> Tensor:
        """Return the query heads of one key-value head, or that head itself."""
        width = x.shape[1] // self.case.heads_kv
        return x[batch : batch + 1, head_kv * width : (head_kv + 1) * width]


def _rms_ratio(out: Tensor, ref64: Tensor, eager: Tensor) -> float:
    """Return rms(out - ref64) over that of eager, on the whole tensor; infinite when something is not finite."""
    error = (out.double() - ref64).square().mean().sqrt().item()
    allowed = (eager.double() - ref64).square().mean().sqrt().item()
    floor = 4e-6 * ref64.square().mean().sqrt().item()  # 2.5 of it are the 1e-5 that float32 is allowed
    value = error / max(allowed, floor, 1e-300)
    return value if value == value else float("inf")
