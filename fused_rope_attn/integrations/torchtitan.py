"""torchtitan 0.3: an override that replaces its grouped-query attention by ``rope_attention_varlen``.

Name it when you start a training: ``--override.imports fused_rope_attn.integrations.torchtitan.fused_rope``. Nothing
of torchtitan is patched. Weights, their initialisation, checkpoints, FSDP, compilation and activation checkpointing
stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import GQAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from fused_rope_attn import rope_attention_varlen
from fused_rope_attn.attention.ops import forward_operator


class FusedInnerAttention(VarlenAttention):
    """Rotate, and attend within the documents of packed rows. As a ``VarlenAttention`` it makes the decoder describe
    documents by ``VarlenMetadata``, and the parallelisms give it the local heads and refuse context parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # that of VarlenAttention would load FlashAttention
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        **options: Any,
    ) -> torch.Tensor:
        """Return (B, L, HQ, D). q, k, v: (B, L, H, D), unrotated. options: those of ``rope_attention_varlen``."""
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks must be VarlenMetadata, but is {type(attention_masks).__name__}")
        q, k, v = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        options |= {"window": self.window_size}
        o: Any = rope_attention_varlen(q, k, v, options.pop("cos"), options.pop("sin"), *attention_masks[:4], **options)
        return o.unflatten(0, q_BLNH.shape[:2])


class FusedGQAttention(GQAttention):
    """``GQAttention`` with the norms and the rotation inside attention. Tables are read by the position within a
    document, which is what ``positions`` holds in torchtitan's batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: VarlenMetadata, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = self.qkv_linear(x_BLD)
        options: dict[str, Any] = {"softmax_scale": self.scaling}
        if self.q_norm is not None:
            # With tensor parallelism the modules also sum the gradients of their weights over ranks.
            if isinstance(q, DTensor) or q.shape[2] < self.n_heads or self.q_norm.weight is None:
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                norms = {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight, "norm_eps": self.q_norm.eps}
                options |= norms
        cos, sin, interleaved = _tables(self.rope, q.shape[1])
        options |= {"cos": cos, "sin": sin, "interleaved": interleaved}
        o = self.inner_attention(q, k, v, attention_masks=attention_masks, **options)
        return self.wo(o.flatten(2))


def _tables(rope: ComplexRoPE | CosSinRoPE, rows: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return cos and sin (rows, R/2) float32 of a rotary embedding's cache, and whether it rotates adjacent pairs."""
    cache = rope.cache.to_local() if isinstance(rope.cache, DTensor) else rope.cache
    if isinstance(rope, ComplexRoPE):
        cos, sin = torch.view_as_real(cache[:rows]).unbind(-1)
        return cos, sin, True
    # Each angle twice: the cosines, then the sines.
    cos, _, sin, _ = cache[:rows].chunk(4, dim=-1)
    return cos, sin, False


@override(target=GQAttention.Config, exact=True, description="RoPE and the norms of q and k inside attention.")
def fused_rope(cfg: GQAttention.Config) -> FusedGQAttention.Config:
    """Return the config of a layer with fused attention.

    Any inner attention is replaced, FlexAttention too, because torchtitan's language models have the same mask in all:
    causal within documents.

    Raises:
        NotImplementedError: the rotary embedding is neither ``ComplexRoPE`` nor ``CosSinRoPE``.
    """
    if type(cfg.rope) not in (ComplexRoPE.Config, CosSinRoPE.Config):
        raise NotImplementedError(
            f"rope must be ComplexRoPE or CosSinRoPE, but is {type(cfg.rope).__qualname__}: name the layers to fuse by "
            "fqns in an override of your own"
        )
    inner_attention = derive(cfg.inner_attention, FusedInnerAttention.Config)  # keeps the window and the sharding
    return derive(cfg, FusedGQAttention.Config, inner_attention=inner_attention)


class SelectiveACWithAttention(SelectiveAC):
    """``SelectiveAC`` that saves the results of fused attention, as it saves those of torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {forward_operator.overload}


@override(target=SelectiveAC.Config, exact=True, description="Save the results of fused attention.")
def save_attention(cfg: SelectiveAC.Config) -> SelectiveACWithAttention.Config:
    """Return the config of selective checkpointing that does not compute attention again in the backward pass."""
    return derive(cfg, SelectiveACWithAttention.Config)
