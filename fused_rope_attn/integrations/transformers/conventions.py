"""What differs between the attention modules of transformers that are supported; ``families`` says which they are.

A convention is what an attention module does before and after attention proper. It only calls the module's own
projections and norms: whatever stands in their place (LoRA, quantised layers) stays in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated; of gated attention also the gate, (B, N, HQ * D) or (B, N, HQ).
Heads = tuple[Tensor, ...]
# Those of the queries' heads and of the keys'.
Norms = tuple[nn.Module, nn.Module]
# nn.Module declares every attribute to be a tensor or a module; those of transformers are numbers and configs as well.
AttentionModule = Any


def separate(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v (B, H, N, D) of hidden states (B, N, width) by q_proj, k_proj and v_proj."""
    return _split(module, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def rows_normed(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, the whole width of q and of k normed at once (OLMo 2)."""
    return _split(module, module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x))


def clipped(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, all three clipped where the config asks for it (OLMo)."""
    limit = module.config.clip_qkv
    return _split(module, *(_clip(rows, limit) for rows in (module.q_proj(x), module.k_proj(x), module.v_proj(x))))


def rows_normed_clipped(module: AttentionModule, x: Tensor) -> Heads:
    """As ``rows_normed``, all three clipped where the config asks for it (OLMoE)."""
    q, k, v, limit = module.q_proj(x), module.k_proj(x), module.v_proj(x), module.config.clip_qkv
    return _split(module, *(_clip(rows, limit) for rows in (module.q_norm(q), module.k_norm(k), v)))


def keys_multiplied(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, keys times the module's own factor (Falcon-H1)."""
    return _split(module, module.q_proj(x), module.k_proj(x) * module.key_multiplier, module.v_proj(x))


def fused(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v one after another in the columns of one projection (Phi-3)."""
    config = module.config
    widths = [heads * module.head_dim for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))]
    return _split(module, *module.qkv_proj(x).split(widths, dim=-1))


def fused_clipped(module: AttentionModule, x: Tensor) -> Heads:
    """As ``fused``, clipped where the config asks for it (DBRX)."""
    widths = [module.hidden_size, *2 * (module.num_key_value_heads * module.head_dim,)]
    return _split(module, *_clip(module.Wqkv(x), module.clip_qkv).split(widths, dim=-1))


def fused_by_head(module: AttentionModule, x: Tensor) -> Heads:
    """q, k, v of the first head, then of the second, and so on (GPT-NeoX)."""
    heads = module.query_key_value(x).unflatten(-1, (-1, 3 * module.head_size)).transpose(1, 2)
    return heads.chunk(3, dim=-1)


def fused_by_head_layernormed_perhaps(module: AttentionModule, x: Tensor) -> Heads:
    """As ``fused_by_head``, q and k normed head by head where the config asks for it (Persimmon)."""
    q, k, v = module.query_key_value(x).unflatten(-1, (-1, 3, module.head_dim)).unbind(3)
    if module.qk_layernorm:
        q, k = module.q_layernorm(q), module.k_layernorm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def gate_beside_q(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, every head of q followed by its gate in the columns of q_proj (Qwen3-Next)."""
    q, gate = module.q_proj(x).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, dim=-1)
    k, v = (_heads(module, rows).transpose(1, 2) for rows in (module.k_proj(x), module.v_proj(x)))
    return q.transpose(1, 2), k, v, gate.flatten(2)


def gate_proj(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, with a gate by gate_proj (AFMoE)."""
    return *separate(module, x), module.gate_proj(x)


def g_proj(module: AttentionModule, x: Tensor) -> Heads:
    """As ``separate``, with a gate by g_proj (Laguna, Step 3.7)."""
    return *separate(module, x), module.g_proj(x)


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


def _clip(rows: Tensor, limit: float | None) -> Tensor:
    return rows if limit is None else rows.clamp(-limit, limit)


def no_norms(module: AttentionModule) -> None:
    return None


def q_and_k_norm(module: AttentionModule) -> Norms:
    return module.q_norm, module.k_norm


def q_and_k_norm_perhaps(module: AttentionModule) -> Norms | None:
    return q_and_k_norm(module) if module.use_qk_norm else None


def q_and_k_layernorm(module: AttentionModule) -> Norms:
    return module.q_layernorm, module.k_layernorm


def q_and_k_layernorm_perhaps(module: AttentionModule) -> Norms | None:
    return q_and_k_layernorm(module) if module.qk_layernorm else None


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
    # Layers of Qwen2-MoE that have no window lack the attribute.
    return getattr(module, "sliding_window", None)


def window_of_sliding_layer(module: AttentionModule) -> int | None:
    """Of modules that know the model's window, and apart from it whether they have it (EXAONE 4)."""
    return module.sliding_window if module.is_sliding else None


def window_of_model(module: AttentionModule) -> int | None:
    return getattr(module.config, "sliding_window", None)


def always(module: AttentionModule, embeddings: Any) -> bool:
    return True


def where_module_says(module: AttentionModule, embeddings: Any) -> bool:
    return module.use_rope


def where_tables_are_given(module: AttentionModule, embeddings: Any) -> bool:
    return embeddings is not None


def where_windowed(module: AttentionModule, embeddings: Any) -> bool:
    return module.sliding_window is not None


def where_windowed_or_told(module: AttentionModule, embeddings: Any) -> bool:
    return module.sliding_window is not None or module.force_rope


def where_local(module: AttentionModule, embeddings: Any) -> bool:
    return module.is_local_attention


def where_sliding_or_all(module: AttentionModule, embeddings: Any) -> bool:
    """In all layers of a model without windows, in those with a window of a model that has some (EXAONE 4)."""
    return module.sliding_window is None or module.is_sliding


def query_key_layernorms(module: AttentionModule, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of heads (B, H, N, D) that are rotated already (Hunyuan)."""
    return module.query_layernorm(q), module.key_layernorm(k)


def llama4_scale(module: AttentionModule, position_ids: Tensor) -> Tensor:
    """(1|B, 1, N, 1): Llama 4's factor of queries at position_ids (1|B, N), which grows beyond the trained length."""
    rope = module.config.rope_parameters
    steps = torch.floor(position_ids / rope["original_max_position_embeddings"])
    return (1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps))[:, None, :, None]


def o_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    """Output (B, N, width) of attention's rows (B, N, HQ * D)."""
    return module.o_proj(rows)


def out_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    return module.out_proj(rows)


def dense(module: AttentionModule, rows: Tensor) -> Tensor:
    return module.dense(rows)


def normed_o_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    """The rows normed before the projection (BitNet)."""
    return module.o_proj(module.attn_sub_norm(rows))


def o_proj_with_dropout(module: AttentionModule, rows: Tensor) -> Tensor:
    return nn.functional.dropout(module.o_proj(rows), p=module.residual_dropout, training=module.training)


def gated_o_proj(module: AttentionModule, rows: Tensor, gate: Tensor) -> Tensor:
    """The rows times the sigmoid of a gate (B, N, HQ * D), or (B, N, HQ) for whole heads."""
    return module.o_proj(_by_gate(rows, torch.sigmoid(gate)))


def softplus_gated_o_proj(module: AttentionModule, rows: Tensor, gate: Tensor) -> Tensor:
    """As ``gated_o_proj`` by the softplus (Laguna)."""
    return module.o_proj(_by_gate(rows, nn.functional.softplus(gate.float()).to(rows.dtype)))


def _by_gate(rows: Tensor, factor: Tensor) -> Tensor:
    return (rows.unflatten(-1, (factor.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)


def attention_dropout(module: AttentionModule) -> float:
    """Probability by which a module drops attention weights in training."""
    dropout = getattr(module, "attention_dropout", 0.0)
    return dropout.p if isinstance(dropout, nn.Dropout) else dropout


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

    project: hidden states (B, N, width) to q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated, and perhaps a gate.
    norms: the modules that norm each head of q and of k, given as (B, N, H, D), between projection and rotation; None
        where there are none, or where ``project`` itself norms.
    half_width: the module's cos or sin (1|B, N, W) to (1|B, N, R/2).
    interleaved: pairs are neighbouring columns.
    window: keys that a query of the module sees, itself included; None for all.
    softcap, sinks: the module has them, as ``attn_logit_softcapping`` and ``sinks``.
    rotates: whether the module rotates, by itself and by the (cos, sin) or None that it is given.
    after_rotation: rotated q and k (B, H, N, D) to what attention takes; None where that is themselves.
    query_scale: position_ids (1|B, N) to factors (1|B, 1, N, 1) of the queries; None where there are none.
    finish: rows (B, N, HQ * D) of attention, and the gate where there is one, to the output (B, N, width).
    sections: of modules that choose among tables (3, B, N, W), one for each kind of positions, themselves: columns of
        half width that are chosen from each; None for all others.
    text_positions: (B, N) of the decoder's position_ids, by which transformers finds packed sequences; None where they
        say nothing of them.
    documents_in_masks: the decoder makes masks of position ids, so that packed documents do not see each other.
    """

    project: Callable[[AttentionModule, Tensor], Heads] = separate
    norms: Callable[[AttentionModule], Norms | None] = no_norms
    half_width: Callable[[Tensor], Tensor] = halves
    interleaved: bool = False
    window: Callable[[AttentionModule], int | None] = no_window
    softcap: bool = False
    sinks: bool = False
    rotates: Callable[[AttentionModule, Any], bool] = always
    after_rotation: Callable[[AttentionModule, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    query_scale: Callable[[AttentionModule, Tensor], Tensor] | None = None
    finish: Callable[..., Tensor] = o_proj
    sections: Callable[[AttentionModule], tuple[int, ...] | None] = no_sections
    text_positions: Callable[[Tensor], Tensor | None] = text_positions
    documents_in_masks: bool = True
