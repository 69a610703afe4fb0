"""Problems of multi-head latent attention, random inputs for them, and results of the reference and the operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verification.testing.cases import Case, ends_of, make_inputs, masks_of
from verification.testing.runs import reference_attention

ROWS = ("q_nope", "q_rope", "k_nope", "k_rope", "v")


@dataclass(frozen=True)
class LatentCase(Case):
    """One problem: head_dim is R, nope and value are DN and DV. heads_kv is heads_q, that of k_nope and of v."""

    nope: int = 32
    value: int = 32

    @property
    def score_dim(self) -> int:
        return self.nope + self.head_dim


class LatentInputs(NamedTuple):
    """The tensors of a case, (B, H, N, columns), its tables, and the gradients of o and of lse."""

    q_nope: Tensor
    q_rope: Tensor
    k_nope: Tensor
    k_rope: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    do: Tensor
    dlse: Tensor | None


class LatentResults(NamedTuple):
    """The outputs of a call and its gradients."""

    o: Tensor
    lse: Tensor
    dq_nope: Tensor
    dq_rope: Tensor
    dk_nope: Tensor
    dk_rope: Tensor
    dv: Tensor


def make_latent_inputs(case: LatentCase, device: torch.device | str = "cpu") -> LatentInputs:
    """Return normally distributed views, as a model's projections give them, and the tables of the case.

    q_nope and q_rope are views of one tensor, k_nope and v of another, and k_rope of a third.
    """
    generator = torch.Generator(device).manual_seed(case.seed + 3)
    others = make_inputs(replace(case, heads_kv=1, layout="bhnd"), device)

    def normal(length: int, heads: int, *columns: int) -> tuple[Tensor, ...]:
        shape = (case.batch, length, heads, sum(columns))
        x = torch.randn(shape, generator=generator, device=generator.device, dtype=case.dtype)
        return x.transpose(1, 2).split(columns, -1)

    q_nope, q_rope = normal(case.len_q, case.heads_q, case.nope, case.head_dim)
    k_nope, v = normal(case.len_k, case.heads_q, case.nope, case.value)
    _, k_rope = normal(case.len_k, 1, 64, case.head_dim)
    (do,) = normal(case.len_q, case.heads_q, case.value)
    return LatentInputs(q_nope, q_rope, k_nope, k_rope, v, others.cos, others.sin, do, others.dlse)


def latent_masks(case: LatentCase, device: torch.device | str) -> dict[str, Any]:
    """Return the masks that are tensors: ``kv_starts`` and ``kv_lens``, or ``cu_seqlens``, by name."""
    bounds = {name: x for name, x in masks_of(case, device).items() if name.startswith("kv_")}
    return bounds if case.seqlens is None else ends_of(case, device)


def run_latent_reference(inputs: LatentInputs, case: LatentCase, dtype: torch.dtype | None = None) -> LatentResults:
    """Return the reference's results: `ref64` with dtype=torch.float64, `eager` with None (the inputs' dtype)."""
    dtype = case.dtype if dtype is None else dtype
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:5]]
    q_nope, q_rope, k_nope, k_rope, v = leaves
    cos, sin = (x.double() if dtype == torch.float64 else x for x in (inputs.cos, inputs.sin))
    options: dict[str, Any] = {name: getattr(case, name) for name in ("causal", "interleaved", "window")}
    options |= {"softmax_scale": case.scale, "rotary_dim": case.head_dim, "q_nope": q_nope, "k_nope": k_nope}
    o, lse = reference_attention(q_rope, k_rope, v, cos, sin, **options, **latent_masks(case, v.device))
    upstream = [inputs.do.to(o.dtype), *(x.to(lse.dtype) for x in (inputs.dlse,) if x is not None)]
    return LatentResults(o.detach(), lse.detach(), *torch.autograd.grad([o, lse][: len(upstream)], leaves, upstream))


def run_latent_op(
    inputs: LatentInputs, case: LatentCase, *, backend: str, deterministic: bool = False
) -> LatentResults:
    """Return the results of ``rope_attention_mla``, or of ``rope_attention_mla_varlen`` if the case is packed."""
    from verification.latent import LatentCheck  # here, so that inputs and references need the reference only

    check = LatentCheck.of(case, deterministic=deterministic)
    made = check.made(inputs)
    return LatentResults(**check.results(*check.call(made, (backend, "auto")), made))
