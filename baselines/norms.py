"""Rivals for norms of heads: a norm of q and k, a rotation and an attention.

Shapes as in ``baselines/base.py``; weights of norms are ``(D,)``. A norm's result is
``x * rsqrt(mean(x**2) + eps) * (offset + weight)`` over the D columns of each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from baselines import attentions, rotations
from baselines.base import Baseline, Norms, NormsAndRotation, Package, Rotation

# The norms of Qwen 3, which multiplies by the weight, and of Gemma 3, which multiplies by 1 + weight.
QWEN_NORM = Package("transformers", "transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm")
GEMMA_NORM = Package("transformers", "transformers.models.gemma3.modeling_gemma3", "Gemma3RMSNorm")
LIGER_NORM = Package("liger-kernel", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")


def hf_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Run the forward of the models' own classes on x (B, N, H, D). ``offset`` is 0 or 1."""
    module = SimpleNamespace(weight=weight, variance_epsilon=eps, eps=eps)
    if not offset:
        return QWEN_NORM.load().forward(module, x)
    module._norm = functools.partial(GEMMA_NORM.load()._norm, module)
    return GEMMA_NORM.load().forward(module, x)


def eager_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Run PyTorch's norm on x (B, N, H, D). ``offset`` must be 0."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def liger_norm(x: Tensor, weight: Tensor, eps: float, offset: float, in_place: bool = True) -> Tensor:
    """Run Liger's kernel as its patches call it, on x (B, N, H, D).

    in_place: overwrite the gradient of the result, which only this norm reads in a model, with that of x. Otherwise
    Liger clears memory for it first.
    """
    return LIGER_NORM.load().apply(x, weight, eps, offset, "gemma" if offset else "llama", in_place)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    apply_rotary_pos_emb = rotations.HF_ROTATION.load()

    def rotate(
        q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        normed = [
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
            for x, weight in ((q, q_norm), (k, k_norm))
        ]
        q_rot, k_rot = apply_rotary_pos_emb(*normed, cos, sin)
        return q_rot.to(q.dtype), k_rot.to(k.dtype)

    return rotations.specialised(rotate)


def by_head(norm: Callable[..., Tensor], rotation: Rotation) -> NormsAndRotation:
    """Return a norm of each head followed by a rotation."""

    def rotate(q: Tensor, k: Tensor, norms: Norms, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pairs = ((q, norms.q_norm), (k, norms.k_norm))
        q, k = (norm(x.transpose(1, 2), weight, norms.eps, norms.offset).transpose(1, 2) for x, weight in pairs)
        return rotation.rotate(q, k, tables)

    return rotate


def _rotate_compiled(q: Tensor, k: Tensor, norms: Norms, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return _compiled()(q, k, norms.q_norm, norms.k_norm, *tables, norms.eps, norms.offset)


_HF = {"norm": "HF norm", "norm_and_rotate": by_head(hf_norm, rotations.HF), "norm_missing": GEMMA_NORM.missing}
_LIGER = {
    "norm": "Liger norm",
    "norm_and_rotate": by_head(liger_norm, rotations.LIGER),
    "norm_missing": LIGER_NORM.missing,
}
_COMPILED = {"norm": "compiled norm", "norm_and_rotate": _rotate_compiled}
# In the order in which reports list them.
NORMED: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        # The code that the models run.
        Baseline("norm_hf_sdpa", rotations.HF, attentions.SDPA, **_HF),
        Baseline("norm_liger_cudnn", rotations.LIGER, attentions.CUDNN, **_LIGER),
        Baseline("norm_liger_fa4", rotations.LIGER, attentions.FA4, **_LIGER),
        # Norm and rotation in one kernel each way.
        Baseline("norm_compiled_cudnn", rotations.COMPILED, attentions.CUDNN, **_COMPILED),
    )
}
