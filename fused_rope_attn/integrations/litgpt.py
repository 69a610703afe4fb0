"""LitGPT 0.5: ``patch_model`` replaces the attention of a ``litgpt.GPT``, and a command does so for LitGPT's own.

    python -m fused_rope_attn.integrations.litgpt pretrain pythia-14m ...    # litgpt pretrain pythia-14m ...

Training, prefill and the steps of generation run on these kernels, with LitGPT's own KV cache.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from litgpt.model import CausalSelfAttention, MultiheadLatentAttention, RMSNorm
from torch import Tensor, nn

from fused_rope_attn import apply_rope_qk, rope_attention, rope_attention_with_kvcache

Model = TypeVar("Model", bound=nn.Module)
# nn.Module declares every attribute to be a tensor or a module; a CausalSelfAttention also has numbers and a config.
Attention = Any

_own_forward = CausalSelfAttention.forward


def patch_model(model: Model) -> Model:
    """Replace the attention of a model by ``rope_attention``, in place and for this model only.

    Call it before ``fabric.setup`` and ``torch.compile``. LoRA's attention is served too. Weights and checkpoints stay
    as they are. LitGPT's own forward runs for a chunk of several tokens onto a cache that holds others, for a step onto
    the ring of a sliding window, and with a cache where scores are soft-capped (Gemma 2).

    Args:
        model: a ``litgpt.GPT``, or a module that contains one.

    Returns:
        the same model.

    Raises:
        NotImplementedError: a layer's attention computes something else (the adapters', latent attention), or there is
            none; nothing has been changed then.
    """
    found = [m for m in model.modules() if isinstance(m, (CausalSelfAttention, MultiheadLatentAttention))]
    reasons = {reason for module in found if (reason := _obstacle(module))}
    if reasons or not found:
        raise NotImplementedError("; ".join(sorted(reasons)) or "model has no attention module of LitGPT")
    for module in found:
        module.forward = MethodType(_attend, module)
    return model


def unpatch_model(model: Model) -> Model:
    """Undo ``patch_model``; return the same model."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _attend:
            del module.forward
    return model


def _obstacle(module: Attention) -> str:
    """Return why a module's attention cannot be replaced, or ""."""
    cls: Any = type(module)
    name = f"{cls.__module__}.{cls.__name__}"
    if cls.forward not in (_own_forward, _forward_or_refuse):
        return f"{name} has a forward of its own"
    if cls.scaled_dot_product_attention is not CausalSelfAttention.scaled_dot_product_attention:
        return f"{name} has a scaled_dot_product_attention of its own"
    return f"{name} sorts the columns that it rotates" if module.config.rope_interleave else ""


def _forward_or_refuse(self: Attention, *args: Any, **kwargs: Any) -> Tensor:
    """Attend as ``_attend`` does in every model of the process, which is the command's way."""
    reason = _obstacle(self)
    if reason:
        raise NotImplementedError(reason)
    return _attend(self, *args, **kwargs)


def _attend(
    self: Attention,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
    input_pos: Any = None,
    input_pos_maxp1: int | None = None,
) -> Tensor:
    """Attend, with the arguments of ``CausalSelfAttention.forward``: x (B, T, width), tables (1|B, T, R). A cache holds
    normed and rotated keys, in the columns that LitGPT's own forward writes."""
    length = x.shape[1]
    # With input_pos, LitGPT's mask is causal. A prompt starts at position 0 if its last position is its length less 1.
    training, prompt = input_pos is None and mask is None, input_pos is not None and input_pos_maxp1 == length
    step = input_pos is not None and length == 1 and not torch.is_grad_enabled()
    # LitGPT adds its boolean mask to capped scores, which hides nothing: such prompts and steps stay as they are.
    capped = self.config.attention_logit_softcapping is not None
    ring = step and not prompt and self.kv_cache.is_sliding_window
    if not (training or (prompt or step) and not (capped or ring)):
        return _own_forward(self, x, cos, sin, mask, input_pos, input_pos_maxp1)
    q, k, v, norms = _heads(self, x)
    tables = {"rotary_dim": self.config.rope_n_elem, **norms}
    scalar = self.config.attention_scores_scalar or self.config.head_size
    options: dict[str, Any] = {
        "softmax_scale": self.mscale**2 / math.sqrt(scalar),
        "softcap": float(self.config.attention_logit_softcapping or 0.0),
        "window": (self.config.sliding_window_size - 1, 0) if self.apply_sliding_window_attention else None,
    }
    if step and not prompt:
        lengths = input_pos.flatten().expand(len(x)).int()
        self.kv_cache.to(k.dtype)  # as LitGPT's cache does under autocast
        keys, values = self.kv_cache.k[: len(x)], self.kv_cache.v[: len(x)]
        cos, sin = (table.expand(-1, keys.shape[2], -1) for table in (cos, sin))  # the new token's row, for all
        step_options = {**options, **tables, "cache_seqlens": lengths}
        o = cast(Tensor, rope_attention_with_kvcache(q, keys, values, cos, sin, k, v, **step_options))
    else:
        if prompt:
            self.kv_cache(input_pos, apply_rope_qk(q, k, cos, sin, **tables)[1], v)
        o = rope_attention(q, k, v, cos, sin, causal=True, **options, **tables)
    return self.proj(o.transpose(1, 2).flatten(2))


def _heads(module: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return q, k, v (B, H, T, D), and the norms that the kernels compute. Other norms have been applied."""
    config = module.config
    numbers = config.n_head, config.n_query_groups, config.n_query_groups
    rows = module.qkv(x).split([n * config.head_size for n in numbers], dim=-1)
    q_norm, k_norm = module.norm_q, module.norm_k
    if config.norm_qk and config.norm_qk_type == "olmo2":  # over all heads at once
        rows = q_norm(rows[0]), k_norm(rows[1]), rows[2]
    q, k, v = (y.unflatten(-1, (n, config.head_size)).transpose(1, 2) for y, n in zip(rows, numbers))
    if not config.norm_qk or config.norm_qk_type != "default":
        return q, k, v, {}
    if type(q_norm) is not RMSNorm or type(k_norm) is not RMSNorm:
        return q_norm(q), k_norm(k), v, {}
    offset = float(q_norm.add_unit_offset)
    return q, k, v, {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "norm_eps": q_norm.eps, "norm_offset": offset}


if __name__ == "__main__":
    from litgpt.__main__ import main

    CausalSelfAttention.forward = _forward_or_refuse
    main()
