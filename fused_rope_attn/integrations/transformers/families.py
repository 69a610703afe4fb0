"""Supported attention modules of transformers, how they differ, and why others are not supported. A convention
describes the steps of a module before and after attention itself. It calls the module's own projections and norms, so
that their replacements (LoRA, quantised layers) stay in use."""

import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import dropout, softplus
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# q (B, HQ, N, D), k and v (B, HKV, N, D), unrotated; for gated attention also the gate, (B, N, HQ * D) or (B, N, HQ).
# In multi-head latent attention q and k have the R columns to rotate, k has one head, and a Latent follows v.
Heads = tuple[Any, ...]
# nn.Module declares every attribute to be a tensor or a module; those of transformers are numbers and configs as well.
AttentionModule = Any
Row = TypeVar("Row")
RELEASE = Version(transformers.__version__).release


class Latent(NamedTuple):
    """The other tensors of multi-head latent attention."""

    q_nope: Tensor  # (B, H, N, DN), the columns that are not rotated
    k_nope: Tensor
    compressed: Tensor  # (B, 1, N, rank), the normed latent vectors from which k_nope and v are projected


def separate(module: AttentionModule, x: Tensor) -> Heads:
    """Project hidden states (B, N, width) to q, k, v (B, H, N, D) by q_proj, k_proj and v_proj."""
    return _split(module, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def rows_normed(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and norm the whole width of q and of k at once (OLMo 2)."""
    return _split(module, module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x))


def keys_multiplied(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``, and multiply keys by the module's own factor (Falcon-H1)."""
    return _split(module, module.q_proj(x), module.k_proj(x) * module.key_multiplier, module.v_proj(x))


def fused(module: AttentionModule, x: Tensor) -> Heads:
    """Split the columns of one projection into q, k and v (Phi-3, DBRX)."""
    rows = (module.Wqkv if hasattr(module, "Wqkv") else module.qkv_proj)(x)
    keys = module.num_key_value_heads * module.head_dim
    return _split(module, *rows.split([rows.shape[-1] - 2 * keys, keys, keys], dim=-1))


def fused_by_head(module: AttentionModule, x: Tensor) -> Heads:
    """Split the columns of one projection, which has q, k, v of the first head, then of the second (GPT-NeoX)."""
    head_dim = module.head_dim if hasattr(module, "head_dim") else module.head_size
    return module.query_key_value(x).unflatten(-1, (-1, 3, head_dim)).transpose(1, 2).unbind(3)


def gate_in_q_proj(module: AttentionModule, x: Tensor) -> Heads:
    """Project like ``separate``; in q_proj each head's columns are followed by those of its gate (Qwen3-Next)."""
    q, gate = module.q_proj(x).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, dim=-1)
    return q.transpose(1, 2), *_split(module, module.k_proj(x), module.v_proj(x)), gate.flatten(2)


def latent(module: AttentionModule, x: Tensor) -> Heads:
    """Project to the heads of multi-head latent attention, which are views of the projections' results (DeepSeek)."""
    # Ling 3 lacks the attribute before transformers 5.24, and has q_proj alone.
    has_rank = getattr(module, "q_lora_rank", None) is not None
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))) if has_rank else module.q_proj(x)
    nope, rope, values = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    compressed, k_rope = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, rope], dim=-1)
    compressed = module.kv_a_layernorm(compressed)
    if hasattr(module, "mla_scale_q_lora"):  # LongCat
        q, compressed = q * module.mla_scale_q_lora, compressed * module.mla_scale_kv_lora
    q_nope, q_rope = q.unflatten(-1, (-1, nope + rope)).transpose(1, 2).split([nope, rope], dim=-1)
    kv = module.kv_b_proj(compressed).unflatten(-1, (-1, nope + values))
    k_nope, v = kv.transpose(1, 2).split([nope, values], dim=-1)
    return q_rope, k_rope.unsqueeze(1), v, Latent(q_nope, k_nope, compressed.unsqueeze(1))


def _split(module: AttentionModule, *rows: Tensor) -> Heads:
    """Return rows (B, N, H * D) as (B, H, N, D), views for any strides."""
    return tuple(x.view(*x.shape[:2], x.shape[2] // module.head_dim, module.head_dim).transpose(1, 2) for x in rows)


def scaled_by_position(module: AttentionModule, q: Tensor, given: dict[str, Any], past: Any) -> Tensor:
    """Multiply queries by a factor that is 1 up to the trained length, and grows with ``position_ids`` (1|B, N).
    transformers before 5.4 reads ``cache_position`` (N,), which counts padding too."""
    places = given["position_ids"] if RELEASE >= (5, 4) else given["cache_position"][None]
    rope = module.config.rope_parameters
    steps = torch.floor(places / rope["original_max_position_embeddings"])
    factors = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps)
    return q * factors[:, None, :, None].to(q.dtype)


def scaled_where_unrotated(module: AttentionModule, q: Tensor, given: dict[str, Any], past: Any) -> Tensor:
    """Multiply queries by a factor that grows with their place, in layers that do not rotate (Llama 4). The place
    counts padding too. transformers 4.57 gives it as ``cache_position`` (N,)."""
    if module.use_rope or not module.attn_temperature_tuning:
        return q
    places = given.get("cache_position")
    if places is None:
        seen = 0 if past is None else past.get_seq_length(module.layer_idx)
        places = torch.arange(q.shape[2], device=q.device) + seen
    factors = torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return (q * factors[:, None]).to(q.dtype)


def attention_dropout(module: AttentionModule) -> float:
    """Return the probability with which a module drops attention weights in training."""
    rate = getattr(module, "attention_dropout", 0.0)
    return rate.p if isinstance(rate, nn.Dropout) else rate


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the text's positions (B, N), from which transformers finds packed sequences, of position_ids (B, N) or (4,
    B, N), which has the text's first. Return None for (3, B, N), which lacks them."""
    return position_ids if position_ids.ndim == 2 else first_of_four(position_ids)


def first_of_four(position_ids: Tensor) -> Tensor | None:
    """Return ``text_positions`` for decoders that find no packed sequences from (B, N) (Qwen2-VL)."""
    return position_ids[0] if position_ids.ndim == 3 and position_ids.shape[0] == 4 else None


def first_row(position_ids: Tensor) -> Tensor:
    """Return ``text_positions`` for decoders that use positions in time as the text's (Qwen3-VL before 5.3)."""
    return position_ids if position_ids.ndim == 2 else position_ids[0]


# The values of fields of Convention by name. Half-width tables (..., R/2) of a module's tables:
_HALF_WIDTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda table: table[..., : table.shape[-1] // 2],  # all angles, and then all of them again
    "pairs": lambda table: table[..., ::2],  # each angle twice in adjacent columns
    "whole": lambda table: table,
}
# The number of keys that a query sees, including its own; None for all.
_WINDOWS: dict[str, Callable[[AttentionModule], int | None]] = {
    "none": lambda module: None,
    # Layers of Qwen2-MoE that have no window lack the attribute.
    "of layer": lambda module: getattr(module, "sliding_window", None),
    "of sliding layer": lambda module: module.sliding_window if module.is_sliding else None,
    "of model": lambda module: getattr(module.config, "sliding_window", None),
}
# Rules for the layers that rotate. tables: the (cos, sin) that the module gets, or None.
_ROTATES: dict[str, Callable[[AttentionModule, Any], bool]] = {
    "always": lambda module, tables: True,
    "where told": lambda module, tables: module.use_rope,
    "with tables": lambda module, tables: tables is not None,
    "windowed": lambda module, tables: module.sliding_window is not None,
    "windowed or told": lambda module, tables: module.sliding_window is not None or module.force_rope,
    "local": lambda module, tables: module.is_local_attention,
    # All layers of a model without windows, else the layers with a window (EXAONE 4).
    "sliding or all": lambda module, tables: module.sliding_window is None or module.is_sliding,
}


@dataclass(frozen=True)
class Convention:
    """The differences of one class of attention modules from Llama's. Equal in all copies of a pickled model."""

    project: Callable[[AttentionModule, Tensor], Heads] = separate  # of the module and hidden states (B, N, width)
    gate: str = ""  # attribute that projects hidden states to a gate, if ``project`` returns none
    clip: str = ""  # attribute with the limit to which q, k and v are clipped, if it is not None
    # Attributes with the norms of each head of q and of k, as (B, N, H, D), between projection and rotation. A third
    # one says whether the module has them, by its value, or, if it is a norm itself, by its presence.
    norms: tuple[str, ...] = ()
    # In multi-head latent attention the order of the rotated columns of k_rope in the cache, "kept", or "sorted" with
    # the first columns of all adjacent pairs before the second ones.
    latent: str = ""
    half_width: str = "halves"  # key of ``_HALF_WIDTHS``
    interleaved: bool | str = False  # pairs are adjacent columns, or the attribute that says so
    window: str = "none"  # key of ``_WINDOWS``
    chunks: bool = False  # layers of the type "chunked_attention" attend within chunks of a sequence
    softcap: bool = False  # the module has ``attn_logit_softcapping``
    sinks: bool = False  # the module has ``sinks``
    rotates: str = "always"  # key of ``_ROTATES``
    after_rotation: tuple[str, ...] = ()  # as ``norms``, of rotated q and k, as (B, H, N, D)
    # Scales queries by position. Its arguments: the module, q (B, HQ, N, D), the call's keywords, its cache or None.
    query_scale: Callable[[AttentionModule, Tensor, dict[str, Any], Any], Tensor] | None = None
    # Steps from attention's rows to the output: attributes with a module, "residual_dropout", or a gate's function.
    finish: tuple[str, ...] = ("o_proj",)
    sections: bool = False  # the module itself combines tables (3, B, N, W), one for each kind of positions
    # Makes the (B, N) from which transformers finds packed sequences from the decoder's position_ids; None without.
    text_positions: Callable[[Tensor], Tensor | None] = text_positions
    documents_in_masks: bool = True  # the decoder's masks separate packed documents by position ids

    def heads_of(self, module: AttentionModule, x: Tensor) -> Heads:
        """Project hidden states (B, N, width) to the module's Heads."""
        heads = self.project(module, x)
        limit = operator.attrgetter(self.clip)(module) if self.clip else None
        heads = heads if limit is None else tuple(rows.clamp(-limit, limit) for rows in heads)
        return (*heads, getattr(module, self.gate)(x)) if self.gate else heads

    def norms_of(self, module: AttentionModule, after_rotation: bool = False) -> tuple[nn.Module, nn.Module] | None:
        """Return the norms of q and of k before the rotation, or those after it; None without."""
        names = self.after_rotation if after_rotation else self.norms
        if not names:
            return None
        q_norm, k_norm, condition = (*names, "")[:3]
        if condition and not (hasattr(module, condition) if condition == q_norm else getattr(module, condition)):
            return None
        return getattr(module, q_norm), getattr(module, k_norm)

    def is_interleaved(self, module: AttentionModule) -> bool:
        value = self.interleaved
        return bool(operator.attrgetter(value)(module)) if isinstance(value, str) else value

    def window_of(self, module: AttentionModule) -> int | None:
        return _WINDOWS[self.window](module)

    def chunk_of(self, module: AttentionModule) -> int | None:
        """Return the length of the chunks within which a module attends; None if they are whole sequences."""
        chunked = self.chunks and module.config.layer_types[module.layer_idx] == "chunked_attention"
        return module.config.attention_chunk_size if chunked else None

    def cap_of(self, module: AttentionModule) -> float:
        """Return the softcap of a module's scores, 0 for none."""
        return float(module.attn_logit_softcapping or 0.0) if self.softcap else 0.0

    def of_scores(self, module: AttentionModule, q: Tensor) -> dict[str, Any]:
        """Return the cap and the sinks of a module's scores as options of the operators."""
        sinks = module.sinks if self.sinks else None
        if sinks is not None and sinks.dtype not in (torch.float32, q.dtype):
            sinks = sinks.float()
        return {"softcap": self.cap_of(module), "sinks": sinks}

    def rotates_in(self, module: AttentionModule, embeddings: Any) -> bool:
        return _ROTATES[self.rotates](module, embeddings)

    def sections_of(self, module: AttentionModule, table: Tensor) -> tuple[int, ...]:
        """Return the sections by which a module combines tables (3, B, N, W) of three positions; () for other tables.

        The rotary embedding combines them in transformers 5, and each attention module in 4.57, which also reads its
        own parameters instead of the config's.
        """
        if not self.sections or table.ndim != 4:
            return ()
        parameters = module.rope_scaling if hasattr(module, "rope_scaling") else module.config.rope_parameters
        return tuple(parameters["mrope_section"])

    def half_widths(self, tables: tuple[Tensor, Tensor], sections: tuple[int, ...]) -> list[Tensor]:
        """Return cos and sin (1|B, N, R/2) of those that a module gets, (1|B, N, W) or (3, B, N, W)."""
        narrow = [_HALF_WIDTHS[self.half_width](table) for table in tables]
        return [by_section(table, sections) for table in narrow] if sections else narrow

    def latent_rows(self, module: AttentionModule, latent: Latent, k_rope: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two tensors that a module of multi-head latent attention gives to its cache: the latent vectors
        and the rotated k_rope (B, 1, N, R) if it expands the cache in each step, else the keys and values of all
        heads."""
        if self.latent == "sorted" and self.is_interleaved(module):  # as by ``apply_rotary_pos_emb_interleave``
            k_rope = k_rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if hasattr(module, "expand_kv"):
            return latent.compressed, k_rope
        return torch.cat((latent.k_nope, k_rope.expand(-1, v.shape[1], -1, -1)), dim=-1), v

    def output(self, module: AttentionModule, rows: Tensor, *gate: Tensor) -> Tensor:
        """Return the output (B, N, width) of attention's rows (B, N, HQ * D), and of the gate if there is one. A gate
        (B, N, HQ * D) multiplies columns, and a gate (B, N, HQ) whole heads."""
        for step in self.finish:
            if step == "residual_dropout":
                rows = dropout(rows, p=module.residual_dropout, training=module.training)
            elif step in ("sigmoid", "softplus"):
                (x,) = gate
                x = torch.sigmoid(x) if step == "sigmoid" else softplus(x.float()).to(rows.dtype)
                rows = (rows.unflatten(-1, (x.shape[-1], -1)) * x.unsqueeze(-1)).flatten(-2)
            else:
                rows = getattr(module, step)(rows)
        return rows


def by_section(table: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Combine half-width tables (3, B, N, R/2), one for each kind of positions, to (B, N, R/2)."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, dim=-1))], dim=-1)


# The newest release with attention classes that were all read (tests/support/hf_fingerprints.json).
NEWEST = "5.24"
_PREFIX = "transformers.models."
# The masks of Bamba and Persimmon separate packed documents by their positions from then on.
_MASKS_READ_POSITIONS = RELEASE >= (5, 2)
_TEXT_OF_QWEN3_VL = text_positions if RELEASE >= (5, 3) else first_row
_BY_HEAD, _LAYERNORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")
_GATED = ("sigmoid", "o_proj")
# A class is written as ``folder.Class`` for ``transformers.models.folder.modeling_folder.Class``.
# Scales (Gemma, Granite) are read from each module's `scaling`, and partial rotation from the width of the tables, so
# neither needs a row.
_GROUPS: tuple[tuple[Convention, str], ...] = (
    (Convention(),
        "arcee.ArceeAttention aria.AriaTextAttention emu3.Emu3Attention gemma.GemmaAttention granite.GraniteAttention "
        "granitemoe.GraniteMoeAttention granitemoeshared.GraniteMoeSharedAttention hyperclovax.HyperCLOVAXAttention "
        "jais2.Jais2Attention llama.LlamaAttention solar_open.SolarOpenAttention"),
    (Convention(documents_in_masks=_MASKS_READ_POSITIONS), "bamba.BambaAttention"),
    (Convention(window="of model"),
        "minimax.MiniMaxAttention mistral.MistralAttention mixtral.MixtralAttention phimoe.PhimoeAttention"),
    (Convention(window="of model", query_scale=scaled_by_position), "ministral3.Ministral3Attention"),
    (Convention(window="of model", finish=("o_proj", "residual_dropout")), "starcoder2.Starcoder2Attention"),
    (Convention(finish=("o_proj", "residual_dropout")), "seed_oss.SeedOssAttention"),
    (Convention(finish=("attn_sub_norm", "o_proj")), "bitnet.BitNetAttention"),
    (Convention(keys_multiplied), "falcon_h1.FalconH1Attention"),
    (Convention(clip="config.clip_qkv"), "olmo.OlmoAttention"),
    (Convention(rotates="with tables", documents_in_masks=False), "granitemoehybrid.GraniteMoeHybridAttention"),
    (Convention(rotates="with tables", window="of layer", sinks=True),
        "granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention"),
    (Convention(half_width="whole", interleaved=True, chunks=True, rotates="where told",
        after_rotation=("qk_norm", "qk_norm", "qk_norm"), query_scale=scaled_where_unrotated),
        "llama4.Llama4TextAttention"),
    (Convention(after_rotation=("query_layernorm", "key_layernorm")),
        "hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention"),
    (Convention(window="of layer"),
        "cwm.CwmAttention ministral.MinistralAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention"),
    (Convention(window="of layer", rotates="where told"), "smollm3.SmolLM3Attention"),
    (Convention(window="of layer", softcap=True), "gemma2.Gemma2Attention vaultgemma.VaultGemmaAttention"),
    (Convention(norms=_BY_HEAD), "apertus.ApertusAttention hy_v3.HYV3Attention"),
    (Convention(norms=_BY_HEAD, window="of layer"),
        "dots1.Dots1Attention gemma3.Gemma3Attention mellum.MellumAttention qwen3.Qwen3Attention "
        "qwen3_moe.Qwen3MoeAttention"),
    (Convention(norms=_BY_HEAD, window="of sliding layer", rotates="sliding or all"),
        "exaone4.Exaone4Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention"),
    (Convention(norms=_BY_HEAD, window="of layer", rotates="windowed", sinks=True), "flint.FlintAttention"),
    (Convention(norms=(*_BY_HEAD, "use_qk_norm")), "glm4_moe.Glm4MoeAttention"),
    (Convention(gate_in_q_proj, norms=_BY_HEAD, finish=_GATED),
        "qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention"),
    (Convention(gate="gate_proj", norms=_BY_HEAD, window="of layer", rotates="local",
        finish=_GATED, documents_in_masks=False), "afmoe.AfmoeAttention"),
    (Convention(gate="g_proj", norms=_BY_HEAD, window="of layer", finish=("softplus", "o_proj")),
        "laguna.LagunaAttention"),
    (Convention(norms=_LAYERNORMS, finish=("out_proj",)), "lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention"),
    (Convention(norms=(*_LAYERNORMS, "qk_layernorm"), finish=("dense",)), "phi.PhiAttention"),
    (Convention(rows_normed), "flex_olmo.FlexOlmoAttention minimax_m2.MiniMaxM2Attention olmo2.Olmo2Attention"),
    (Convention(rows_normed, rotates="with tables"), "olmo_hybrid.OlmoHybridAttention"),
    (Convention(rows_normed, window="of layer"), "olmo3.Olmo3Attention"),
    (Convention(rows_normed, clip="config.clip_qkv"), "olmoe.OlmoeAttention"),
    (Convention(fused, window="of model"), "phi3.Phi3Attention"),
    (Convention(fused, clip="clip_qkv", finish=("out_proj",)), "dbrx.DbrxAttention"),
    (Convention(fused_by_head, finish=("dense",)), "gpt_neox.GPTNeoXAttention"),
    (Convention(fused_by_head, norms=(*_LAYERNORMS, "qk_layernorm"), finish=("dense",),
        documents_in_masks=_MASKS_READ_POSITIONS), "persimmon.PersimmonAttention"),
    (Convention(norms=(*_BY_HEAD, "use_qk_norm"), half_width="pairs", interleaved=True), "cohere.CohereAttention"),
    (Convention(half_width="pairs", interleaved=True, window="of layer", rotates="windowed"),
        "cohere2.Cohere2Attention"),
    (Convention(half_width="pairs", interleaved=True, window="of layer",
        rotates="windowed or told"), "cohere2_moe.Cohere2MoeAttention"),
    # These make tables for halves, but rotate pairs by the first half of each.
    (Convention(interleaved=True),
        "ernie4_5.Ernie4_5Attention ernie4_5_moe.Ernie4_5_MoeAttention glm.GlmAttention glm4.Glm4Attention "
        "helium.HeliumAttention"),
    (Convention(half_width="whole", window="of layer", sinks=True, documents_in_masks=False),
        "gpt_oss.GptOssAttention"),
    # Multi-head latent attention. DeepSeek V2's tables are complex numbers, one for each pair.
    (Convention(latent, latent="kept", half_width="whole", interleaved=True), "deepseek_v2.DeepseekV2Attention"),
    (Convention(latent, latent="sorted", interleaved="config.rope_interleave"),
        "axk1.AXK1Attention deepseek_v3.DeepseekV3Attention youtu.YoutuAttention"),
    (Convention(latent, latent="sorted", interleaved="config.rope_interleave", query_scale=scaled_by_position),
        "mistral4.Mistral4Attention"),
    (Convention(latent, latent="sorted"), "minicpm3.MiniCPM3Attention"),
    (Convention(latent, latent="sorted", interleaved=True), "longcat_flash.LongcatFlashMLA"),
    (Convention(latent, gate="g_proj", latent="sorted", interleaved=True, finish=_GATED),
        "bailing_hybrid.BailingHybridAttention"),
    # Decoders of multimodal models with their own attention modules.
    (Convention(window="of layer", sections=True, text_positions=first_of_four),
        "qwen2_vl.Qwen2VLAttention qwen2_5_vl.Qwen2_5_VLAttention"),
    (Convention(norms=_BY_HEAD, text_positions=_TEXT_OF_QWEN3_VL),
        "qwen3_vl.Qwen3VLTextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention"),
)  # fmt: skip
# Recurrences that are attention by their name only. They stay as they are.
_RECURRENT = {
    "bailing_hybrid.modeling_bailing_hybrid.BailingHybridDeltaAttention",
    "minimax.modeling_minimax.MiniMaxLightningAttention",
}
_REASONS: tuple[tuple[str, str], ...] = (
    ("its decoder layer passes no additional keyword arguments on to it, so that it cannot be told which tokens "
     "are padding", "nemotron.NemotronAttention stablelm.StableLmAttention"),
    ("its latent attention reads the keys that an indexer selects",
        "axk2.AXK2Attention deepseek_v32.DeepseekV32Attention dots3_note.Dots3NoteTextAttention "
        "glm5_next.Glm5NextTextAttention glm_moe_dsa.GlmMoeDsaAttention hy_v4.HYV4Attention hy_v4_vl.HYV4VLAttention "
        "mistral_large4.MistralLarge4TextAttention"),
    ("its heads are wider (192, 64 and 256 columns) than the kernels of latent attention take",
        "glm4_moe_lite.Glm4MoeLiteAttention"),
    ("its values have another head dimension than its queries and keys", "mimo_v2_flash.MiMoV2FlashAttention"),
    ("its keys and values are compressed, and are one and the same", "deepseek_v4.DeepseekV4Attention"),
    ("some of its layers attend to the keys and values of others",
        "gemma3n.Gemma3nTextAttention gemma4.Gemma4TextAttention gemma4_unified.Gemma4UnifiedTextAttention"),
    ("it looks its angles up by position in a table of its own", "codegen.CodeGenAttention gptj.GPTJAttention"),
    ("it makes its tables by itself, from positions",
        "kyutai_speech_to_text.KyutaiSpeechToTextAttention moshi.MoshiAttention "
        "recurrent_gemma.RecurrentGemmaAttention"),
    ("it does not rotate", "jamba.JambaAttention kimi_linear.KimiLinearAttention nemotron_h.NemotronHAttention"),
    ("it rotates in the opposite direction", "nanochat.NanoChatAttention"),
    ("its output is the difference of two attentions", "diffllama.DiffLlamaAttention"),
    ("it masks keys by their values", "doge.DogeAttention"),
    ("its queries are projected by experts, several for each token", "jetmoe.JetMoeAttention"),
    ("it adds ALiBi's bias where the config asks for it", "falcon.FalconAttention"),
    ("it returns a bias for its layer to add", "gpt_neox_japanese.GPTNeoXJapaneseAttention"),
    ("one module serves several layers, with a place in the cache for each",
        "hrm_text.HrmTextAttention zamba2.Zamba2Attention"),
    ("it has convolutions between its projections and the rotation", "zaya.ZayaAttention"),
    ("queries of its layers without rotation are scaled by position", "beam.BeamAttention"),
    ("its model decodes patches of bytes, by several decoders", "blt.BltSelfAttention"),
    ("its model has an encoder with an unsupported attention",
        "t5gemma.T5GemmaSelfAttention t5gemma2.T5Gemma2SelfAttention"),
    ("it computes the same as a supported class, but in a model of images or of speech that no test here covers",
        "apertus1p5.Apertus1p5TextAttention cosmos3_edge.Cosmos3EdgeTextAttention csm.CsmAttention "
        "deepseek_ocr2.DeepseekOcr2TextAttention gradium_phonon_tts.GradiumPhononTTSAttention "
        "granite4_vision.Granite4VisionTextAttention granite_docling.GraniteDoclingTextAttention "
        "higgs_audio_v2.HiggsAudioV2Attention phi4_multimodal.Phi4MultimodalAttention pocket_tts.PocketTTSAttention "
        "qwen2_5_omni.Qwen2_5OmniAttention qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention "
        "qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention "
        "voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention"),
)  # fmt: skip
# Before transformers 5 the decoders of these drop further keywords, or make caches of their own types.
SINCE_5 = (
    "dbrx.DbrxAttention falcon_h1.FalconH1Attention flex_olmo.FlexOlmoAttention granitemoe.GraniteMoeAttention "
    "granitemoeshared.GraniteMoeSharedAttention lfm2.Lfm2Attention olmoe.OlmoeAttention phimoe.PhimoeAttention "
    "qwen2_moe.Qwen2MoeAttention qwen3_next.Qwen3NextAttention"
).split()


def path_of(row: str) -> str:
    """Return the path below transformers.models of a row ``folder.Class``."""
    folder, name = row.split(".")
    return f"{folder}.modeling_{folder}.{name}"


# By path below transformers.models, as `name_of` gives it.
SUPPORTED = {path_of(row): convention for convention, rows in _GROUPS for row in rows.split()}
# Class to the reason why it is not served: a sentence about the class.
UNSUPPORTED = {path_of(row): reason for reason, rows in _REASONS for row in rows.split()}
if RELEASE < (5,):
    for row in SINCE_5:
        UNSUPPORTED[path_of(row)] = "it is supported from transformers 5 on"
        del SUPPORTED[path_of(row)]
ROWS: dict[str, Convention | None] = {**SUPPORTED, **dict.fromkeys(UNSUPPORTED)}
# Class to (its forward when it was looked up, its row) of each table by id.
_found: weakref.WeakKeyDictionary[type, dict[int, tuple[Callable[..., Any] | None, Any]]] = weakref.WeakKeyDictionary()


def convention_of(module: nn.Module) -> Convention | None:
    """Return the convention of an attention module, or None if its class is not supported."""
    return row_of(type(module), ROWS)


def row_of(cls: type[nn.Module], table: Mapping[str, Row]) -> Row | None:
    """Return the row of a class in a table by ``name_of``, or None. A class that inherits from one in the table, as
    FSDP2 and torch's parametrizations make them, has its row if no method but ``__init__`` is overridden or
    replaced."""
    known = _found.setdefault(cls, {})
    forward, row = known.get(id(table), (None, None))
    if forward is not cls.forward:
        base = base_of(cls, table)
        row = None if base is None or _changed_method(cls, base) else table[name_of(base)]
        known[id(table)] = cls.forward, row
    return row


def base_of(cls: type, table: Mapping[str, Any]) -> type | None:
    """Return a class, or the first one from which it inherits, that a table has."""
    return next((base for base in cls.__mro__ if name_of(base) in table), None)


def _changed_method(cls: type, base: type) -> str:
    """Return the name of a method that a class overrides, or that was replaced in ``base``, its base class; else ""."""
    for name, member in vars(base).items():
        if isinstance(member, FunctionType) and name != "__init__":
            # A wrapper has the wrapped function's name, but its own globals. Decorators of the same library are fine.
            library = member.__globals__.get("__name__", "").partition(".")[0]
            is_own = member.__module__ == base.__module__ and library == base.__module__.partition(".")[0]
            if not is_own or getattr(cls, name) is not member:
                return name
    return ""


def refusal(cls: type) -> str:
    """Return why a class of attention modules is not supported, as a sentence about it."""
    base = base_of(cls, ROWS)
    if base is None and not cls.__module__.startswith(_PREFIX):
        return "it is none of transformers' own classes, so that patch_model cannot know what it computes"
    if base is None and not any("rotary" in name.lower() for name in vars(sys.modules[cls.__module__])):
        return "its model has no rotary embedding, and these kernels are for attention that rotates queries and keys"
    if base is None:
        return "it is not in the table of supported classes, docs/howto/model-family.md says how to add one"
    changed = _changed_method(cls, base)
    if changed:
        return f"its {changed} was replaced by {described(getattr(cls, changed))}, which may compute anything else"
    return UNSUPPORTED[name_of(base)]


def described(function: Any) -> str:
    """Return the name of a function or callable object for a message."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', '')}.{name}"


def name_of(cls: type) -> str:
    """Return the name of a class as SUPPORTED has it."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(_PREFIX)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module is attention by its name, or by an attribute that transformers' attention modules have.
    Only the innermost of nested modules counts: DBRX also names a block after the attention in it."""
    if convention_of(module) is not None:
        return True
    return _has_the_name(module) and not any(_has_the_name(m) for m in module.modules() if m is not module)


def _has_the_name(module: nn.Module) -> bool:
    if isinstance(module, GradientCheckpointingLayer) or name_of(type(module)) in _RECURRENT:
        return False
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or hasattr(module, "num_key_value_groups")


def hands_padding_on(decoder: nn.Module) -> bool:
    """Return whether other modules than attention read the padding mask, as recurrences of hybrid models do."""
    layers = GradientCheckpointingLayer, PreTrainedModel
    others = {type(m) for m in decoder.modules() if not isinstance(m, layers) and not _has_the_name(m)}
    return any("attention_mask" in inspect.signature(cls.forward).parameters for cls in others)


def hands_positions_on(cls: type[nn.Module]) -> bool:
    """Return whether a class of attention modules passes ``position_ids`` on to its attention function. A parameter of
    that name is lost unless a call in the forward names it (Persimmon)."""
    code = inspect.unwrap(cls.forward).__code__
    names = (x if isinstance(x, tuple) else (x,) for x in code.co_consts)
    return "position_ids" not in code.co_varnames[: code.co_argcount] or any("position_ids" in x for x in names)
