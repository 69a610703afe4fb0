"""Problems of multi-head latent attention, random inputs for them, and results of the reference and the operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verification.testing.runs import reference_attention
from verification.testing.tolerance import Comparison, compare, largest_norm

ROWS = ("q_nope", "q_rope", "k_nope", "k_rope", "v")


@dataclass(frozen=True)
class LatentCase:
    """One problem. nope, rope, value: the columns DN, R and DV. The fields from causal on are options of the call."""

    batch: int
    heads: int
    len_q: int
    len_k: int
    nope: int = 32
    rope: int = 16
    value: int = 48
    dtype: torch.dtype = torch.float16
    aligned: bool = True  # False: no row begins at a multiple of 16 bytes
    bshd: bool = False  # pass the tensors as (B, N, H, columns)
    seqlens: tuple[tuple[int, int], ...] | None = None  # packed: (queries, keys) of each sequence; batch 1
    lse_gradient: bool = False
    seed: int = 0
    causal: bool = True
    interleaved: bool = False
    softmax_scale: float | None = None
    window: tuple[int, int] | None = None
    kv_starts: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Sizes, then the options that differ from their defaults."""
        sizes = f"B{self.batch} H{self.heads} N{self.len_q}x{self.len_k} D{self.nope}+{self.rope}/{self.value}"
        words = [sizes, str(self.dtype).removeprefix("torch.")]
        changed = [x for x in fields(self)[8:] if getattr(self, x.name) != x.default]
        return " ".join(words + [f"{x.name}={getattr(self, x.name)}".replace(" ", "") for x in changed])

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5 if self.softmax_scale is None else self.softmax_scale


class LatentInputs(NamedTuple):
    """The tensors of a case, (B, H, N, columns), its tables ``(NK, R/2)``, and the gradients of o and of lse."""

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
    """Return normally distributed views, as a model's projections give them, and random tables that are not unit-norm.

    q_nope and q_rope are views of one tensor, k_nope and v of another, and k_rope of a third.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    skip = 0 if case.aligned else 1
    q = normal(case.batch, case.len_q, case.heads, skip + case.nope + case.rope).transpose(1, 2)[..., skip:]
    kv = normal(case.batch, case.len_k, case.heads, skip + case.nope + case.value).transpose(1, 2)[..., skip:]
    shared = normal(case.batch, case.len_k, skip + 64 + case.rope)[..., skip:].unsqueeze(1)
    q_nope, q_rope = q.split([case.nope, case.rope], -1)
    k_nope, v = kv.split([case.nope, case.value], -1)
    angles = 2 * math.pi * torch.rand((case.len_k, case.rope // 2), generator=generator, device=device)
    radius = 0.5 + torch.rand(angles.shape, generator=generator, device=device)
    do = normal(case.batch, case.len_q, case.heads, case.value).transpose(1, 2)
    dlse = normal(case.batch, case.heads, case.len_q, dtype=torch.float32) if case.lse_gradient else None
    k_rope = shared[..., 64:]
    return LatentInputs(q_nope, q_rope, k_nope, k_rope, v, radius * angles.cos(), radius * angles.sin(), do, dlse)


def _masks(case: LatentCase, device: torch.device) -> dict[str, Any]:
    """Return the masks that are tensors: ``kv_starts`` and ``kv_lens``, or ``cu_seqlens``, by name."""
    if case.seqlens is not None:
        ends = torch.tensor([(0, 0), *case.seqlens]).cumsum(0).int().to(device)
        return {"cu_seqlens_q": ends[:, 0].contiguous(), "cu_seqlens_k": ends[:, 1].contiguous()}
    bounds = {"kv_starts": case.kv_starts, "kv_lens": case.kv_lens}
    return {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in bounds.items() if x is not None}


def run_latent_reference(inputs: LatentInputs, case: LatentCase, dtype: torch.dtype | None = None) -> LatentResults:
    """Return the reference's results: `ref64` with dtype=torch.float64, `eager` with None (the inputs' dtype)."""
    dtype = case.dtype if dtype is None else dtype
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:5]]
    q_nope, q_rope, k_nope, k_rope, v = leaves
    cos, sin = (x.double() if dtype == torch.float64 else x for x in (inputs.cos, inputs.sin))
    options: dict[str, Any] = {name: getattr(case, name) for name in ("causal", "interleaved", "window")}
    options |= {"softmax_scale": case.scale, "rotary_dim": case.rope, "q_nope": q_nope, "k_nope": k_nope}
    o, lse = reference_attention(q_rope, k_rope, v, cos, sin, **options, **_masks(case, v.device))
    upstream = [inputs.do.to(o.dtype), *(x.to(lse.dtype) for x in (inputs.dlse,) if x is not None)]
    return LatentResults(o.detach(), lse.detach(), *torch.autograd.grad([o, lse][: len(upstream)], leaves, upstream))


def run_latent_op(
    inputs: LatentInputs, case: LatentCase, *, backend: str, deterministic: bool = False
) -> LatentResults:
    """Return the results of ``rope_attention_mla``, or of ``rope_attention_mla_varlen`` if the case is packed."""
    from verification.latent import LatentCheck  # here, so that inputs and references need the reference only

    sizes = case.batch, case.heads, case.heads, case.len_q, case.len_k, case.rope
    names = ("nope", "value", "dtype", "seqlens", "lse_gradient", *(field.name for field in fields(case)[13:]))
    own = {name: getattr(case, name) for name in names}
    check = LatentCheck(*sizes, form="bshd" if case.bshd else "bhsd", deterministic=deterministic, **own)
    made = check.made(dict(zip(inputs._fields[:7], inputs)), {"o": inputs.do, "lse": inputs.dlse})
    return LatentResults(**check.results(*check.call(made, (backend, "auto")), made))


def noise_of_latent_zero(name: str, case: LatentCase, inputs: LatentInputs) -> float:
    """Return what `noise_of_zero` returns, for a result of latent attention."""
    columns = case.nope + case.rope
    factor = max(1.0, columns / 128)
    if name == "dk_rope":
        factor *= case.heads**0.5
    if name[:2] in ("dq", "dk"):
        factor *= largest_norm(inputs.cos, inputs.sin) * max(1.0, abs(case.scale) * columns**0.5)
    return factor


def compare_latent(inputs: LatentInputs, case: LatentCase, out: LatentResults) -> list[Comparison]:
    """Return the comparison of each result of the operator with float64."""
    ref64, eager = run_latent_reference(inputs, case, torch.float64), run_latent_reference(inputs, case)
    found = []
    for name, actual, exact, rounded in zip(LatentResults._fields, out, ref64, eager):
        zero, grad = noise_of_latent_zero(name, case, inputs), name[0] == "d"
        found.append(compare(name, actual, exact, rounded, grad=grad, dtype=case.dtype, zero=zero))
    return found
