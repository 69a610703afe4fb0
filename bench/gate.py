"""Nobody is timed before float64 agrees: every provider's results are held to the tolerance of the public contract.

Ours must pass it, or the benchmark prints FAILED instead of a time. Rivals are held to it as well, but theirs is not
ours to mend: FlashAttention's ``delta`` from a rounded o, or a rotation that rounds every step, leave a row in a
thousand outside the rule on rows. Such a rival is "loose": finite, and on each whole tensor within 2.5 times the rms
error of eager PyTorch. It is timed, since leaving the strong ones out would flatter us, and it is marked. Beyond that a
rival computes something else: it has failed, and is not timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn import testing

_LOOSE_RMS = 2.5
_LONG = 16384  # from here on one head group is enough: its float64 reference takes a second
# (name, result, float64 reference, eager result in the dtype of the case); everything but "o" is a gradient.
Compared = tuple[str, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Verdict:
    """``status`` is "ok", "loose" or "failed". Ratios are the worst of all tensors: ``ratio`` and ``row_ratio`` as in
    ``testing.Comparison`` (2.5 is the limit of the latter), ``rms_ratio`` the rms error over eager's on a whole tensor.

    ``first_call_s`` is the wall time of the provider's first call at this case, compilation included.
    """

    status: str = "ok"
    row_ratio: float = 0.0
    rms_ratio: float = 0.0
    detail: str = ""
    ratio: float = 0.0
    first_call_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        """What a result row says of the gate."""
        return {
            "gate_row_ratio": self.row_ratio,
            "gate_rms_ratio": self.rms_ratio,
            "first_call_s": self.first_call_s,
        }


def judge(results: Iterable[Compared], dtype: torch.dtype, *, forgiving: bool = False) -> Verdict:
    """Hold results against float64. ``forgiving``: what is only loose, as the module says, has not failed."""
    status, details, ratio, row_ratio, rms_ratio = "ok", [], 0.0, 0.0, 0.0
    for name, out, ref64, eager in results:
        held = testing.compare(name, out, ref64, eager, grad=name != "o", dtype=dtype)
        rms = _rms_ratio(out, ref64, eager)
        ratio, row_ratio, rms_ratio = max(ratio, held.ratio), max(row_ratio, held.row_ratio), max(rms_ratio, rms)
        if not held.ok:
            details.append(f"{name}: {held.detail}")
            status = "loose" if forgiving and rms <= _LOOSE_RMS and status != "failed" else "failed"
    return Verdict(status, row_ratio, rms_ratio, "; ".join(details), ratio)


def ends(batch: int, heads: int) -> list[tuple[int, int]]:
    """The first and the last (batch entry, head): the last shows wrong strides and offsets, the first all else."""
    return list(dict.fromkeys([(0, 0), (batch - 1, heads - 1)]))


class Gate:
    """Attention's references of one case, made when they are first needed and shared by all providers.

    ``heads``: the (batch entry, key-value head) pairs to compare, instead of the first and the last.
    """

    def __init__(
        self, case: testing.Case, inputs: testing.Inputs, *, heads: list[tuple[int, int]] | None = None
    ) -> None:
        self.case, self.inputs = case, inputs
        self._group = case.heads_q // case.heads_kv
        sampled = ends(case.batch, case.heads_kv)
        self._heads = heads or (sampled[-1:] if case.len_k >= _LONG else sampled)
        self._references: dict[str, list[tuple[testing.Results, testing.Results]]] = {}

    def judge(self, outputs: dict[str, Tensor], tables: str = "float32", forgiving: bool = False) -> Verdict:
        """Compare whole outputs, named o, dq, dk, dv, on the sampled heads.

        ``tables`` are those that the computation was given: "float32", "half" (rounded to the dtype), "none".
        """
        compared = (
            (name, self._slice(output, batch, head), getattr(ref64, name), getattr(eager, name))
            for (batch, head), (ref64, eager) in zip(self._heads, self._reference(tables))
            for name, output in outputs.items()
        )
        return judge(compared, self.case.dtype, forgiving=forgiving)

    def release(self) -> None:
        """Free the references: gigabytes at long lengths."""
        self._references.clear()

    def _reference(self, kind: str) -> list[tuple[testing.Results, testing.Results]]:
        """(float64, eager) for each sampled head, from one kind of tables."""
        if kind not in self._references:
            x = self.inputs
            cos, sin = x.cos, x.sin
            if kind == "half":  # rounded tables are equal for everybody who gets them, and nobody's error
                cos, sin = cos.to(self.case.dtype), sin.to(self.case.dtype)
            elif kind == "none":
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            case = replace(self.case, batch=1, heads_q=self._group, heads_kv=1)
            references = []
            for batch, head in self._heads:
                part = testing.Inputs(
                    *(self._slice(t, batch, head) for t in x[:3]), cos, sin, self._slice(x.do, batch, head)
                )
                references.append((testing.run_reference(part, case, torch.float64), testing.run_reference(part, case)))
            self._references[kind] = references
        return self._references[kind]

    def _slice(self, x: Tensor, batch: int, head_kv: int) -> Tensor:
        """The query heads of one key-value head, or that head itself."""
        width = self._group if x.shape[1] == self.case.heads_q else 1
        return x[batch : batch + 1, head_kv * width : (head_kv + 1) * width].detach()


def _rms_ratio(out: Tensor, ref64: Tensor, eager: Tensor) -> float:
    """rms(out - ref64) over eager's, on the whole tensor; infinite when something is not finite."""
    error = (out.double() - ref64).square().mean().sqrt().item()
    allowed = (eager.double() - ref64).square().mean().sqrt().item()
    floor = 4e-6 * ref64.square().mean().sqrt().item()  # 2.5 of it are the 1e-5 that float32 is allowed
    value = error / max(allowed, floor, 1e-300)
    return value if value == value else float("inf")
