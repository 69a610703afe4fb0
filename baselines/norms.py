"""Rivals for norms of heads: a norm of q and k, a rotation and an attention of their own, behind one signature.

Shapes as in ``baselines/base.py``; weights of norms are ``(D,)``. A norm's result is
``x * rsqrt(mean(x**2) + eps) * (offset + weight)`` over the D columns of each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baselines import attentions, rotations
from baselines.base import Baseline, Rotation, missing_package


class Norms(NamedTuple):
    """Of the heads of q and of k."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float
    offset: float


@functools.cache
def _rms_norm_of_models() -> tuple[type, type]:
    """Qwen 3's norm, whose weight is the factor, and Gemma 3's, whose weight is its distance from one."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    return Qwen3RMSNorm, Gemma3RMSNorm


def hf_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """The forward of the models' own classes, of x (B, N, H, D) as they give it. ``offset`` 0 or 1."""
    qwen, gemma = _rms_norm_of_models()
    module = SimpleNamespace(weight=weight, variance_epsilon=eps, eps=eps)
    if not offset:
        return qwen.forward(module, x)
    module._norm = functools.partial(gemma._norm, module)
    return gemma.forward(module, x)


@functools.cache
def _liger_function() -> type[torch.autograd.Function]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction


def liger_norm(x: Tensor, weight: Tensor, eps: float, offset: float, in_place: bool = True) -> Tensor:
    """Liger's kernel as its patches call it, of x (B, N, H, D). ``in_place``: the gradient of the result, which nobody
    else has in a model, becomes that of x; otherwise Liger clears memory for it first."""
    return _liger_function().apply(x, weight, eps, offset, "gemma" if offset else "llama", in_place)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    apply_rotary_pos_emb = rotations.hf_function()

    def turn(
        q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        normed = [
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
            for x, weight in ((q, q_norm), (k, k_norm))
        ]
        q_rot, k_rot = apply_rotary_pos_emb(*normed, cos, sin)
        return q_rot.to(q.dtype), k_rot.to(k.dtype)

    return rotations.specialised(turn)


def _by_head(norm: Callable[..., Tensor], rotation: Rotation) -> Callable[..., tuple[Tensor, Tensor]]:
    def turn(q: Tensor, k: Tensor, norms: Norms, tables: Any) -> tuple[Tensor, Tensor]:
        pairs = ((q, norms.q_norm), (k, norms.k_norm))
        q, k = (norm(x.transpose(1, 2), weight, norms.eps, norms.offset).transpose(1, 2) for x, weight in pairs)
        return rotation.rotate(q, k, tables)

    return turn


def _turn_compiled(q: Tensor, k: Tensor, norms: Norms, tables: Any) -> tuple[Tensor, Tensor]:
    return _compiled()(q, k, norms.q_norm, norms.k_norm, *tables, norms.eps, norms.offset)


@dataclass(frozen=True)
class NormedBaseline:
    """One rival: ``turn(q, k, norms, tables)`` norms and rotates, ``base`` attends, and knows everything else.

    ``norm_missing``: what the norm lacks on this machine, or None.
    """

    name: str
    norm_label: str
    turn: Callable[[Tensor, Tensor, Norms, Any], tuple[Tensor, Tensor]]
    base: Baseline
    norm_missing: Callable[[], str | None]
    normed = True

    @property
    def label(self) -> str:
        """What a table prints."""
        return f"{self.norm_label} + {self.base.label}"

    @property
    def pip(self) -> tuple[str, ...]:
        return self.base.pip

    @property
    def half_tables(self) -> bool:
        return self.base.half_tables

    def missing(self) -> str | None:
        return self.norm_missing() or self.base.missing()

    def unsupported(self, case: Any) -> str | None:
        return self.base.unsupported(case)

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        return self.base.prepare(cos, sin, dtype)

    def run(self, q: Tensor, k: Tensor, v: Tensor, norms: Norms, tables: Any, causal: bool) -> Tensor:
        """Norm and rotate q and k, and attend. q and k stay as they are."""
        return self.base.attention.attend(*self.turn(q, k, norms, tables), v, causal)


def _missing_transformers() -> str | None:
    return missing_package("transformers", "transformers.models.gemma3.modeling_gemma3", "Gemma3RMSNorm")


def _missing_liger() -> str | None:
    return missing_package("liger-kernel", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")


_HF = "HF norm", _by_head(hf_norm, rotations.HF)
_LIGER = "Liger norm", _by_head(liger_norm, rotations.LIGER)
_COMPILED = "compiled norm", _turn_compiled
_HF_SDPA = Baseline("hf_sdpa", rotations.HF, attentions.SDPA)
_LIGER_CUDNN = Baseline("liger_cudnn", rotations.LIGER, attentions.CUDNN)
_LIGER_FA4 = Baseline("liger_fa4", rotations.LIGER, attentions.FA4)
_COMPILED_CUDNN = Baseline("compiled_cudnn", rotations.COMPILED, attentions.CUDNN)

# In the order in which reports list them.
NORMED: dict[str, NormedBaseline] = {
    baseline.name: baseline
    for baseline in (
        # What the models run today.
        NormedBaseline("norm_hf_sdpa", *_HF, _HF_SDPA, _missing_transformers),
        NormedBaseline("norm_liger_cudnn", *_LIGER, _LIGER_CUDNN, _missing_liger),
        NormedBaseline("norm_liger_fa4", *_LIGER, _LIGER_FA4, _missing_liger),
        # Norm and rotation in one kernel each way.
        NormedBaseline("norm_compiled_cudnn", *_COMPILED, _COMPILED_CUDNN, lambda: None),
    )
}
