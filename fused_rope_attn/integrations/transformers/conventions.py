"""What differs between the attention modules of transformers that are supported; ``families`` says which they are.

A convention is what an attention module does before and after attention proper. It only calls the module's own
projections and norms: whatever stands in their place (LoRA, quantised layers) stays in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
# nn.Module declares every attribute to be a tensor or a module; those of transformers are numbers and configs as well.
AttentionModule = Any


def separate(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v (B, H, N, D) of hidden states (B, N, width) by q_proj, k_proj and v_proj."""
    return _split(module, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def heads_normed(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, q and k normed head by head before the rotation (Qwen 3, Gemma 3)."""
    # The norm is given (B, N, H, D): Cohere's has a weight for every head.
    q = module.q_norm(_heads(module, module.q_proj(x)))
    k = module.k_norm(_heads(module, module.k_proj(x)))
    return q.transpose(1, 2), k.transpose(1, 2), _heads(module, module.v_proj(x)).transpose(1, 2)


def heads_normed_perhaps(module: AttentionModule, x: Tensor) -> Heads:
    return heads_normed(module, x) if module.use_qk_norm else separate(module, x)


def rows_normed(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, the whole width of q and of k normed at once (OLMo 2)."""
    return _split(module, module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x))


def fused(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v one after another in the columns of one projection (Phi-3)."""
    config = module.config
    widths = [heads * module.head_dim for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))]
    return _split(module, *module.qkv_proj(x).split(widths, dim=-1))


def fused_by_head(module: AttentionModule, x: Tensor) -> Heads:
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


def halves(table: Tensor) -> Tensor:
    """(..., R/2) of a table that holds its angles twice, one copy behind the other."""
    return table[..., : table.shape[-1] // 2]


def pairs(table: Tensor) -> Tensor:
    """(..., R/2) of a table that holds each angle twice, side by side."""
    return table[..., ::2]


def as_is(table: Tensor) -> Tensor:
    return table


def no_window(module: AttentionModule) -> None:
    return None


def window_of_layer(module: AttentionModule) -> int | None:
    return module.sliding_window


def window_of_model(module: AttentionModule) -> int | None:
    return getattr(module.config, "sliding_window", None)


def no_sections(module: AttentionModule) -> None:
    return None


def mrope_sections(module: AttentionModule) -> tuple[int, ...]:
    """How many columns of a half-width table go by the position in time, in height and in width (Qwen2-VL)."""
    # transformers 4.57 reads the module's own parameters, 5 its config's.
    parameters = module.rope_scaling if hasattr(module, "rope_scaling") else module.config.rope_parameters
    return tuple(parameters["mrope_section"])


def by_section(table: Tensor, sections: tuple[int, ...]) -> Tensor:
    """(B, N, R/2) of one half-width table (3, B, N, R/2) for each of the three kinds of positions."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, dim=-1))], dim=-1)


def text_positions(position_ids: Tensor) -> Tensor | None:
    """(B, N) of position_ids that are that, or (4, B, N) and begin with it; three dimensions are none of the text's.

    transformers finds packed sequences by them.
    """
    return position_ids if position_ids.ndim == 2 else first_of_four(position_ids)


def first_of_four(position_ids: Tensor) -> Tensor | None:
    """As ``text_positions``, for decoders to which (B, N) say nothing of packed sequences (Qwen2-VL)."""
    return position_ids[0] if position_ids.ndim == 3 and position_ids.shape[0] == 4 else None


def first_row(position_ids: Tensor) -> Tensor:
    """As ``text_positions``, for decoders that take positions in time for the text's (Qwen3-VL before 5.3)."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]


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
    sections: of modules that choose among tables (3, B, N, W), one for each kind of positions, themselves: columns of
        half width that are chosen from each; None for all others.
    text_positions: (B, N) of the decoder's position_ids, by which transformers finds packed sequences; None where they
        say nothing of them.
    """

    project: Callable[[AttentionModule, Tensor], Heads] = separate
    half_width: Callable[[Tensor], Tensor] = halves
    interleaved: bool = False
    window: Callable[[AttentionModule], int | None] = no_window
    softcap: bool = False
    sinks: bool = False
    rotates_perhaps: bool = False
    output: str = "o_proj"
    sections: Callable[[AttentionModule], tuple[int, ...] | None] = no_sections
    text_positions: Callable[[Tensor], Tensor | None] = text_positions
