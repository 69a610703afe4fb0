"""Nobody is timed before float64 agrees: every provider's output and gradients, on sampled heads, by contract.md.

Ours must pass the contract's tolerance, or the benchmark prints FAILED instead of a time. Rivals are held to it as
well, but theirs is not ours to mend: FlashAttention's ``delta`` from a rounded o, or HF's rotation that rounds every
step, leave a row in a thousand outside the row rule. Such a rival is LOOSE: finite, and on each whole tensor within 2.5
times eager's rms error. It is timed, since leaving the strong ones out would flatter us, and marked. Beyond that it
computes something else: FAILED, and not timed. ``strict=True`` holds rivals to the contract too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.providers import Provider, is_ours
from fused_rope_attn import testing

_LOOSE_RMS = 2.5
_LONG = 16384  # from here on one head group is enough: its float64 reference takes a second


@dataclass(frozen=True)
class Verdict:
    """``status`` is "ok", "loose" or "failed"; ``row_ratio`` as in ``testing.Comparison`` (2.5 is the limit), the worst
    row of all tensors; ``rms_ratio`` the rms error over eager's on a whole tensor, the worst of them.

    ``first_call_s`` is the wall time of the provider's first forward and backward at this case, compilation included.
    """

    status: str
    row_ratio: float
    rms_ratio: float
    detail: str
    first_call_s: float = 0.0


class Gate:
    """References of one case, made when first needed and shared by all providers.

    ``heads``: the (batch entry, key-value head) pairs to compare, instead of the first and the last.
    """

    def __init__(
        self,
        case: testing.Case,
        inputs: testing.Inputs,
        *,
        grads: bool,
        strict: bool = False,
        heads: list[tuple[int, int]] | None = None,
    ):
        self.case, self.inputs, self.grads, self.strict = case, inputs, grads, strict
        self._group = case.heads_q // case.heads_kv
        last = (case.batch - 1, case.heads_kv - 1)
        # The last head shows wrong strides and offsets, the first everything else.
        self._heads = [last] if case.len_k >= _LONG or last == (0, 0) else [(0, 0), last]
        if heads is not None:
            self._heads = heads
        self._references: dict[str, list[tuple[testing.Results, testing.Results]]] = {}

    def check(self, provider: Provider, synchronize: Callable[[], None]) -> Verdict:
        """Run the provider once on copies of the inputs and compare. Raises what the provider raises."""
        begin = time.perf_counter()
        outputs = self._run(provider)
        synchronize()
        first_call_s = time.perf_counter() - begin
        tables = "none" if not provider.rotates else "half" if provider.half_tables else "float32"
        forgiving = not is_ours(provider.name) and not self.strict
        return replace(self.judge(outputs, tables, forgiving), first_call_s=first_call_s)

    def judge(self, outputs: dict[str, Tensor], tables: str = "float32", forgiving: bool = False) -> Verdict:
        """Compare whole outputs, named o, dq, dk, dv, on the sampled heads.

        ``tables`` are those that the computation was given: "float32", "half" (rounded to the dtype), "none".
        """
        status, details, row_ratio, rms_ratio = "ok", [], 0.0, 0.0
        for (batch, head), (ref64, eager) in zip(self._heads, self._reference(tables)):
            for name, output in outputs.items():
                expected, tolerated = getattr(ref64, name), getattr(eager, name)
                sampled = self._slice(output, batch, head)
                result = testing.compare(name, sampled, expected, tolerated, grad=name != "o", dtype=self.case.dtype)
                rms = _rms_ratio(sampled, expected, tolerated)
                row_ratio, rms_ratio = max(row_ratio, result.row_ratio), max(rms_ratio, rms)
                if not result.ok:
                    details.append(f"{name}: {result.detail}")
                    loose = forgiving and rms <= _LOOSE_RMS and status != "failed"
                    status = "loose" if loose else "failed"
        return Verdict(status, row_ratio, rms_ratio, "; ".join(details))

    def _run(self, provider: Provider) -> dict[str, Tensor]:
        x = self.inputs
        # Copies: some rivals rotate q and k in place.
        q, k = (t.detach().clone().requires_grad_(self.grads) for t in (x.q, x.k))
        v = x.v.detach().requires_grad_(self.grads)
        tables = provider.prepare(x.cos, x.sin, self.case.dtype)
        with torch.set_grad_enabled(self.grads):
            o = provider.run(q, k, v, tables, self.case.causal)
            grads = torch.autograd.grad(o, (q, k, v), x.do) if self.grads else ()
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads)))

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
