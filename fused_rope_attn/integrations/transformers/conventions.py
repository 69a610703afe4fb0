"""Differences between the supported attention modules of transformers, which ``families`` lists.

A convention describes the steps of an attention module before and after attention itself. It calls the module's own
projections and norms, so that their replacements (LoRA, quantised layers) stay in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated; for gated attention also the gate, (B, N, HQ * D) or (B, N, HQ).
# In multi-head latent attention q and k have the R columns to rotate, k has one head, and a Latent follows v.
Heads = tuple[Any, ...]
# The norm of the queries' heads and that of the keys'.
Norms = tuple[nn.Module, nn.Module]
# nn.Module declares every attribute to be a tensor or a module; those of transformers are numbers and configs as well.
AttentionModule = Any


class Latent(NamedTuple):
    """The other tensors of multi-head latent attention.

    q_nope, k_nope: (B, H, N, DN), the columns that are not rotated.
    compressed: (B, 1, N, rank), the normed latent vectors from which k_nope and v are projected.
    """

    q_nope: Tensor
    k_nope: Tensor
    compressed: Tensor


def separate(module: AttentionModule, x: Tensor) -> Heads:
    """Project hidden states (B, N, width) to q, k, v (B, H, N, D) by q_proj, k_proj and v_proj."""
    return _split(module, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def rows_normed(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and norm the whole width of q and of k at once (OLMo 2)."""
    return _split(module, module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x))


def clipped(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and clip all three if the config asks for it (OLMo)."""
    limit = module.config.clip_qkv
    return _split(module, *(_clip(rows, limit) for rows in (module.q_proj(x), module.k_proj(x), module.v_proj(x))))


def rows_normed_clipped(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``rows_normed``, and clip all three if the config asks for it (OLMoE)."""
    q, k, v, limit = module.q_proj(x), module.k_proj(x), module.v_proj(x), module.config.clip_qkv
    return _split(module, *(_clip(rows, limit) for rows in (module.q_norm(q), module.k_norm(k), v)))


def keys_multiplied(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and multiply keys by the module's own factor (Falcon-H1)."""
    return _split(module, module.q_proj(x), module.k_proj(x) * module.key_multiplier, module.v_proj(x))


def fused(module: AttentionModule, x: Tensor) -> Heads:
    """Split the columns of one projection into q, k and v (Phi-3)."""
    config = module.config
    widths = [heads * module.head_dim for heads in (config.num_attention_heads, *2 * (config.num_key_value_heads,))]
    return _split(module, *module.qkv_proj(x).split(widths, dim=-1))


def fused_clipped(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``fused``, and clip if the config asks for it (DBRX)."""
    widths = [module.hidden_size, *2 * (module.num_key_value_heads * module.head_dim,)]
    return _split(module, *_clip(module.Wqkv(x), module.clip_qkv).split(widths, dim=-1))


def fused_by_head(module: AttentionModule, x: Tensor) -> Heads:
    """Split the columns of one projection, which has q, k, v of the first head, then of the second (GPT-NeoX)."""
    heads = module.query_key_value(x).unflatten(-1, (-1, 3 * module.head_size)).transpose(1, 2)
    return heads.chunk(3, dim=-1)


def fused_by_head_layernormed_perhaps(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``fused_by_head``, and norm q and k head by head if the config asks for it (Persimmon)."""
    q, k, v = module.query_key_value(x).unflatten(-1, (-1, 3, module.head_dim)).unbind(3)
    if module.qk_layernorm:
        q, k = module.q_layernorm(q), module.k_layernorm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def gate_in_q_proj(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``; in q_proj each head's columns are followed by those of its gate (Qwen3-Next)."""
    q, gate = module.q_proj(x).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, dim=-1)
    k, v = (_heads(module, rows).transpose(1, 2) for rows in (module.k_proj(x), module.v_proj(x)))
    return q.transpose(1, 2), k, v, gate.flatten(2)


def gate_proj(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and to a gate by gate_proj (AFMoE)."""
    return *separate(module, x), module.gate_proj(x)


def g_proj(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and to a gate by g_proj (Laguna, Step 3.7)."""
    return *separate(module, x), module.g_proj(x)


def latent(module: AttentionModule, x: Tensor) -> Heads:
    """Project to the heads of multi-head latent attention, which are views of the projections' results (DeepSeek)."""
    # Ling 3 lacks the attribute before transformers 5.24, and has q_proj alone.
    has_rank = getattr(module, "q_lora_rank", None) is not None
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))) if has_rank else module.q_proj(x)
    return _latent_heads(module, q, *_compressed(module, x))


def latent_scaled(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``latent``, with factors of the queries and of the latent vectors (LongCat)."""
    q, (compressed, k_rope) = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))), _compressed(module, x)
    return _latent_heads(module, q * module.mla_scale_q_lora, compressed * module.mla_scale_kv_lora, k_rope)


def latent_gated(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``latent``, and to a gate of whole heads by g_proj (Ling 3)."""
    return *latent(module, x), module.g_proj(x)


def _compressed(module: AttentionModule, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normed latent vectors (B, N, rank) and the shared key head (B, N, R)."""
    widths = [module.kv_lora_rank, module.qk_rope_head_dim]
    compressed, k_rope = module.kv_a_proj_with_mqa(x).split(widths, dim=-1)
    return module.kv_a_layernorm(compressed), k_rope


def _latent_heads(module: AttentionModule, q: Tensor, compressed: Tensor, k_rope: Tensor) -> Heads:
    nope, rope, values = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    q_nope, q_rope = q.unflatten(-1, (-1, nope + rope)).transpose(1, 2).split([nope, rope], dim=-1)
    kv = module.kv_b_proj(compressed).unflatten(-1, (-1, nope + values))
    k_nope, v = kv.transpose(1, 2).split([nope, values], dim=-1)
    return q_rope, k_rope.unsqueeze(1), v, Latent(q_nope, k_nope, compressed.unsqueeze(1))


def pairs_kept(k_rope: Tensor, interleaved: bool) -> Tensor:
    return k_rope


def pairs_sorted(k_rope: Tensor, interleaved: bool) -> Tensor:
    """Move the first columns of all pairs before the second ones, as ``apply_rotary_pos_emb_interleave`` does."""
    return k_rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else k_rope


def _split(module: AttentionModule, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return tuple(_heads(module, rows).transpose(1, 2) for rows in (q, k, v))


def _heads(module: AttentionModule, rows: Tensor) -> Tensor:
    """Return rows (B, N, H * D) as (B, N, H, D), a view for any strides."""
    batch, length, width = rows.shape
    return rows.view(batch, length, width // module.head_dim, module.head_dim)


def _clip(rows: Tensor, limit: float | None) -> Tensor:
    return rows if limit is None else rows.clamp(-limit, limit)


def none(module: AttentionModule) -> None:
    """Return None: the module has no such thing."""


def q_and_k_norm(module: AttentionModule) -> Norms:
    return module.q_norm, module.k_norm


def q_and_k_norm_perhaps(module: AttentionModule) -> Norms | None:
    return q_and_k_norm(module) if module.use_qk_norm else None


def q_and_k_layernorm(module: AttentionModule) -> Norms:
    return module.q_layernorm, module.k_layernorm


def q_and_k_layernorm_perhaps(module: AttentionModule) -> Norms | None:
    return q_and_k_layernorm(module) if module.qk_layernorm else None


def halves(table: Tensor) -> Tensor:
    """Return (..., R/2) of a table that has all angles, and then all of them again."""
    return table[..., : table.shape[-1] // 2]


def pairs(table: Tensor) -> Tensor:
    """Return (..., R/2) of a table that has each angle twice in adjacent columns."""
    return table[..., ::2]


def as_is(table: Tensor) -> Tensor:
    return table


def adjacent(module: AttentionModule) -> bool:
    return True


def adjacent_perhaps(module: AttentionModule) -> bool:
    return module.config.rope_interleave


def window_of_layer(module: AttentionModule) -> int | None:
    # Layers of Qwen2-MoE that have no window lack the attribute.
    return getattr(module, "sliding_window", None)


def window_of_sliding_layer(module: AttentionModule) -> int | None:
    """Return the model's window if the module has a window (EXAONE 4)."""
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
    """Return True in all layers of a model without windows, else in the layers with a window (EXAONE 4)."""
    return module.sliding_window is None or module.is_sliding


def query_and_key_layernorm(module: AttentionModule) -> Norms:
    return module.query_layernorm, module.key_layernorm


def qk_norm_perhaps(module: AttentionModule) -> Norms | None:
    """Return the norm of both (Llama 4), which only layers that rotate have, if the config asks for it."""
    return (module.qk_norm, module.qk_norm) if hasattr(module, "qk_norm") else None


def chunk_of_layer(module: AttentionModule) -> int | None:
    chunked = module.config.layer_types[module.layer_idx] == "chunked_attention"
    return module.config.attention_chunk_size if chunked else None


def scaled_by_position(module: AttentionModule, q: Tensor, given: dict[str, Any], past: Any) -> Tensor:
    """Multiply queries by a factor that is 1 up to the trained length, and grows with ``position_ids`` (1|B, N)."""
    return _scaled_by(given["position_ids"], module, q)


def scaled_by_place(module: AttentionModule, q: Tensor, given: dict[str, Any], past: Any) -> Tensor:
    """Multiply queries as ``scaled_by_position``, by ``cache_position`` (N,), which counts padding too."""
    return _scaled_by(given["cache_position"][None], module, q)


def _scaled_by(places: Tensor, module: AttentionModule, q: Tensor) -> Tensor:
    rope = module.config.rope_parameters
    steps = torch.floor(places / rope["original_max_position_embeddings"])
    factors = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps)
    return q * factors[:, None, :, None].to(q.dtype)


def scaled_where_unrotated(module: AttentionModule, q: Tensor, given: dict[str, Any], past: Any) -> Tensor:
    """Multiply queries by a factor that grows with their place, in layers that do not rotate (Llama 4).

    The place counts padding too. transformers 4.57 gives it as ``cache_position`` (N,).
    """
    if module.use_rope or not module.attn_temperature_tuning:
        return q
    places = given.get("cache_position")
    if places is None:
        seen = 0 if past is None else past.get_seq_length(module.layer_idx)
        places = torch.arange(q.shape[2], device=q.device) + seen
    factors = torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return (q * factors[:, None]).to(q.dtype)


def o_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    """Project attention's rows (B, N, HQ * D) to the output (B, N, width)."""
    return module.o_proj(rows)


def out_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    return module.out_proj(rows)


def dense(module: AttentionModule, rows: Tensor) -> Tensor:
    return module.dense(rows)


def normed_o_proj(module: AttentionModule, rows: Tensor) -> Tensor:
    """Norm the rows before the projection (BitNet)."""
    return module.o_proj(module.attn_sub_norm(rows))


def o_proj_with_dropout(module: AttentionModule, rows: Tensor) -> Tensor:
    return nn.functional.dropout(module.o_proj(rows), p=module.residual_dropout, training=module.training)


def gated_o_proj(module: AttentionModule, rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the rows by the sigmoid of a gate (B, N, HQ * D), or (B, N, HQ) for whole heads, and project."""
    return module.o_proj(_by_gate(rows, torch.sigmoid(gate)))


def softplus_gated_o_proj(module: AttentionModule, rows: Tensor, gate: Tensor) -> Tensor:
    """Project like ``gated_o_proj``, with the softplus of the gate (Laguna)."""
    return module.o_proj(_by_gate(rows, nn.functional.softplus(gate.float()).to(rows.dtype)))


def _by_gate(rows: Tensor, factor: Tensor) -> Tensor:
    return (rows.unflatten(-1, (factor.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)


def attention_dropout(module: AttentionModule) -> float:
    """Return the probability with which a module drops attention weights in training."""
    dropout = getattr(module, "attention_dropout", 0.0)
    return dropout.p if isinstance(dropout, nn.Dropout) else dropout


def mrope_sections(module: AttentionModule) -> tuple[int, ...]:
    """Return the columns of a half-width table for positions in time, in height and in width (Qwen2-VL)."""
    # transformers 4.57 reads the module's own parameters, 5 its config's.
    parameters = module.rope_scaling if hasattr(module, "rope_scaling") else module.config.rope_parameters
    return tuple(parameters["mrope_section"])


def by_section(table: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Combine half-width tables (3, B, N, R/2), one for each kind of positions, to (B, N, R/2)."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, dim=-1))], dim=-1)


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the text's positions (B, N), from which transformers finds packed sequences.

    position_ids are (B, N), or (4, B, N) with the text's first. (3, B, N) lacks them, and the result is then None.
    """
    return position_ids if position_ids.ndim == 2 else first_of_four(position_ids)


def first_of_four(position_ids: Tensor) -> Tensor | None:
    """Return ``text_positions`` for decoders that find no packed sequences from (B, N) (Qwen2-VL)."""
    return position_ids[0] if position_ids.ndim == 3 and position_ids.shape[0] == 4 else None


def first_row(position_ids: Tensor) -> Tensor:
    """Return ``text_positions`` for decoders that use positions in time as the text's (Qwen3-VL before 5.3)."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]


@dataclass(frozen=True)
class Convention:
    """The differences of one class of attention modules from Llama's.

    project: function of hidden states (B, N, width) to q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated, and the gate
        if there is one.
    norms: function to the modules that norm each head of q and of k, as (B, N, H, D), between projection and rotation;
        None if there are none, or if ``project`` itself norms.
    latent: in multi-head latent attention, for which ``project`` returns a Latent after v: function of rotated k_rope
        (B, 1, N, R), and whether its pairs are adjacent, to the columns that the module caches. Else None.
    half_width: function of the module's cos or sin (1|B, N, W) to (1|B, N, R/2).
    interleaved: function of the module to whether pairs are adjacent columns; ``none`` if they never are.
    window: function to the number of keys that a query of the module sees, including its own; None for all.
    chunk: function to the length of the chunks of a sequence within which the module attends; None for all of it.
    softcap, sinks: the module has them, as ``attn_logit_softcapping`` and ``sinks``.
    rotates: function of the module and its (cos, sin), or None, to whether it rotates.
    after_rotation: function to the modules that norm each head of rotated q and k, as (B, H, N, D); None without.
    query_scale: function of the module, q (B, HQ, N, D), the call's keywords, and its cache or None, to q with a scale
        that depends on positions; None if there is none.
    finish: function of attention's rows (B, N, HQ * D), and the gate if there is one, to the output (B, N, width).
    sections: function to the columns of half width that the module itself takes from each of the tables (3, B, N, W),
        one table for each kind of positions; None for other modules.
    text_positions: function of the decoder's position_ids to (B, N), from which transformers finds packed sequences;
        None if it finds none from them.
    documents_in_masks: the decoder's masks separate packed documents by position ids.
    """

    project: Callable[[AttentionModule, Tensor], Heads] = separate
    norms: Callable[[AttentionModule], Norms | None] = none
    latent: Callable[[Tensor, bool], Tensor] | None = None
    half_width: Callable[[Tensor], Tensor] = halves
    interleaved: Callable[[AttentionModule], bool | None] = none
    window: Callable[[AttentionModule], int | None] = none
    chunk: Callable[[AttentionModule], int | None] = none
    softcap: bool = False
    sinks: bool = False
    rotates: Callable[[AttentionModule, Any], bool] = always
    after_rotation: Callable[[AttentionModule], Norms | None] = none
    query_scale: Callable[[AttentionModule, Tensor, dict[str, Any], Any], Tensor] | None = None
    finish: Callable[..., Tensor] = o_proj
    sections: Callable[[AttentionModule], tuple[int, ...] | None] = none
    text_positions: Callable[[Tensor], Tensor | None] = text_positions
    documents_in_masks: bool = True
