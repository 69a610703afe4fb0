"""The supported attention modules of transformers, and what differs between them: all in one table.

A convention is what an attention module does before and after attention proper. It only calls the module's own
projections and norms: whatever stands in their place (LoRA, quantised layers) stays in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Heads = tuple[Tensor, Tensor, Tensor]
# nn.Module declares every attribute to be a tensor or a module; those of transformers are numbers and configs as well.
AttentionModule = Any


def _separate(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v (B, H, N, D) of hidden states (B, N, width) by q_proj, k_proj and v_proj."""
    return _split(module, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def _heads_normed(module: AttentionModule, x: Tensor) -> Heads:
    """As ``_separate``, q and k normed head by head before the rotation (Qwen 3, Gemma 3)."""
    # The norm is given (B, N, H, D): Cohere's has a weight for every head.
    q = module.q_norm(_heads(module, module.q_proj(x)))
    k = module.k_norm(_heads(module, module.k_proj(x)))
    return q.transpose(1, 2), k.transpose(1, 2), _heads(module, module.v_proj(x)).transpose(1, 2)


def _heads_normed_perhaps(module: AttentionModule, x: Tensor) -> Heads:
    return _heads_normed(module, x) if module.use_qk_norm else _separate(module, x)


def _rows_normed(module: AttentionModule, x: Tensor) -> Heads:
    """As ``_separate``, the whole width of q and of k normed at once (OLMo 2)."""
    return _split(module, module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x))


def _fused(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v one after another in the columns of one projection (Phi-3)."""
    config = module.config
    widths = [heads * module.head_dim for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))]
    return _split(module, *module.qkv_proj(x).split(widths, dim=-1))


def _fused_by_head(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v of the first head, then of the second, and so on (GPT-NeoX)."""
    heads = module.query_key_value(x).unflatten(-1, (-1, 3 * module.head_size)).transpose(1, 2)
    return heads.chunk(3, dim=-1)


def _split(module: AttentionModule, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return (
        _heads(module, q).transpose(1, 2),
        _heads(module, k).transpose(1, 2),
        _heads(module, v).transpose(1, 2),
    )


def _heads(module: AttentionModule, rows: Tensor) -> Tensor:
    """(B, N, H, D) of rows (B, N, H * D), a view whatever their strides."""
    batch, length, width = rows.shape
    return rows.view(batch, length, width // module.head_dim, module.head_dim)


def _halves(table: Tensor) -> Tensor:
    """(..., R/2) of a table that holds its angles twice, one copy behind the other."""
    return table[..., : table.shape[-1] // 2]


def _pairs(table: Tensor) -> Tensor:
    """(..., R/2) of a table that holds each angle twice, side by side."""
    return table[..., ::2]


def _as_is(table: Tensor) -> Tensor:
    return table


def _no_window(module: AttentionModule) -> None:
    return None


def _window_of_layer(module: AttentionModule) -> int | None:
    return module.sliding_window


def _window_of_model(module: AttentionModule) -> int | None:
    return getattr(module.config, "sliding_window", None)


@dataclass(frozen=True)
class Convention:
    """How one class of attention modules differs from Llama's.

    project: hidden states (B, N, width) to q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated.
    half_width: the module's cos or sin (1|B, N, W) to (1|B, N, R/2).
    interleaved: pairs are neighbouring columns.
    window: keys that a query of the module sees, itself included; None for all.
    softcap, sinks: the module has them, as ``attn_logit_softcapping`` and ``sinks``.
    rotates_perhaps: ``module.use_rope`` says whether this layer rotates.
    output: name of the output projection.
    """

    project: Callable[[AttentionModule, Tensor], Heads] = _separate
    half_width: Callable[[Tensor], Tensor] = _halves
    interleaved: bool = False
    window: Callable[[AttentionModule], int | None] = _no_window
    softcap: bool = False
    sinks: bool = False
    rotates_perhaps: bool = False
    output: str = "o_proj"


# By module and name below transformers.models. A scale of its own (Gemma, Granite) is each module's `scaling`, partial
# rotation the width of its tables, so that neither is a difference here.
SUPPORTED = {
    "cohere.modeling_cohere.CohereAttention": Convention(_heads_normed_perhaps, _pairs, interleaved=True),
    "gemma2.modeling_gemma2.Gemma2Attention": Convention(window=_window_of_layer, softcap=True),
    "gemma3.modeling_gemma3.Gemma3Attention": Convention(_heads_normed, window=_window_of_layer),
    # GLM writes its table for halves and reads the first half of it for pairs.
    "glm4.modeling_glm4.Glm4Attention": Convention(interleaved=True),
    "gpt_neox.modeling_gpt_neox.GPTNeoXAttention": Convention(_fused_by_head, output="dense"),
    "gpt_oss.modeling_gpt_oss.GptOssAttention": Convention(half_width=_as_is, window=_window_of_layer, sinks=True),
    "granite.modeling_granite.GraniteAttention": Convention(),
    "llama.modeling_llama.LlamaAttention": Convention(),
    "mistral.modeling_mistral.MistralAttention": Convention(window=_window_of_model),
    "mixtral.modeling_mixtral.MixtralAttention": Convention(window=_window_of_model),
    "olmo2.modeling_olmo2.Olmo2Attention": Convention(_rows_normed),
    "phi3.modeling_phi3.Phi3Attention": Convention(_fused, window=_window_of_model),
    "qwen2.modeling_qwen2.Qwen2Attention": Convention(window=_window_of_layer),
    "qwen3.modeling_qwen3.Qwen3Attention": Convention(_heads_normed, window=_window_of_layer),
    "smollm3.modeling_smollm3.SmolLM3Attention": Convention(window=_window_of_layer, rotates_perhaps=True),
}
_PREFIX = "transformers.models."


def convention_of(module: nn.Module) -> Convention | None:
    """The convention of an attention module, None where its class (this very class, no subclass) is not supported."""
    return SUPPORTED.get(name_of(type(module)))


def name_of(cls: type) -> str:
    """A class of transformers as SUPPORTED names it."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(_PREFIX)


def looks_like_attention(module: nn.Module) -> bool:
    """True for what is attention by its name or by what transformers' attention modules have in common."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or hasattr(module, "num_key_value_groups")
