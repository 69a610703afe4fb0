"""Supported attention modules of transformers, and the reasons why others are not: two tables and their queries.

A class is written as ``folder.Class`` for ``transformers.models.folder.modeling_folder.Class``.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Container
from types import FunctionType
from typing import Any, cast

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fused_rope_attn.integrations.transformers import conventions as on
from fused_rope_attn.integrations.transformers.conventions import Convention

# The newest release with attention classes that were all read (tests/support/hf_fingerprints.json).
NEWEST = "5.24"
_PREFIX = "transformers.models."
_RELEASE = Version(transformers.__version__)
# The masks of Bamba and Persimmon separate packed documents by their positions from then on.
_MASKS_READ_POSITIONS = _RELEASE >= Version("5.2")
_TEXT_OF_QWEN3_VL = on.text_positions if _RELEASE >= Version("5.3") else on.first_row
_SCALE_OF_MINISTRAL3 = on.scaled_by_position if _RELEASE >= Version("5.4") else on.scaled_by_place
# Scales (Gemma, Granite) are read from each module's `scaling`, and partial rotation from the width of the tables, so
# neither needs a row.
_GROUPS: tuple[tuple[Convention, str], ...] = (
    (Convention(),
        "arcee.ArceeAttention aria.AriaTextAttention emu3.Emu3Attention gemma.GemmaAttention granite.GraniteAttention "
        "granitemoe.GraniteMoeAttention granitemoeshared.GraniteMoeSharedAttention hyperclovax.HyperCLOVAXAttention "
        "jais2.Jais2Attention llama.LlamaAttention solar_open.SolarOpenAttention"),
    (Convention(documents_in_masks=_MASKS_READ_POSITIONS), "bamba.BambaAttention"),
    (Convention(window=on.window_of_model),
        "minimax.MiniMaxAttention mistral.MistralAttention mixtral.MixtralAttention phimoe.PhimoeAttention"),
    (Convention(window=on.window_of_model, query_scale=_SCALE_OF_MINISTRAL3), "ministral3.Ministral3Attention"),
    (Convention(window=on.window_of_model, finish=on.o_proj_with_dropout), "starcoder2.Starcoder2Attention"),
    (Convention(finish=on.o_proj_with_dropout), "seed_oss.SeedOssAttention"),
    (Convention(finish=on.normed_o_proj), "bitnet.BitNetAttention"),
    (Convention(on.keys_multiplied), "falcon_h1.FalconH1Attention"),
    (Convention(on.clipped), "olmo.OlmoAttention"),
    (Convention(rotates=on.where_tables_are_given, documents_in_masks=False),
        "granitemoehybrid.GraniteMoeHybridAttention"),
    (Convention(rotates=on.where_tables_are_given, window=on.window_of_layer, sinks=True),
        "granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention"),
    (Convention(half_width=on.as_is, interleaved=on.adjacent, chunk=on.chunk_of_layer, rotates=on.where_module_says,
        after_rotation=on.qk_norm_perhaps, query_scale=on.scaled_where_unrotated), "llama4.Llama4TextAttention"),
    (Convention(after_rotation=on.query_and_key_layernorm),
        "hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention"),
    (Convention(window=on.window_of_layer),
        "cwm.CwmAttention ministral.MinistralAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention"),
    (Convention(window=on.window_of_layer, rotates=on.where_module_says), "smollm3.SmolLM3Attention"),
    (Convention(window=on.window_of_layer, softcap=True), "gemma2.Gemma2Attention vaultgemma.VaultGemmaAttention"),
    (Convention(norms=on.q_and_k_norm), "apertus.ApertusAttention hy_v3.HYV3Attention"),
    (Convention(norms=on.q_and_k_norm, window=on.window_of_layer),
        "dots1.Dots1Attention gemma3.Gemma3Attention mellum.MellumAttention qwen3.Qwen3Attention "
        "qwen3_moe.Qwen3MoeAttention"),
    (Convention(norms=on.q_and_k_norm, window=on.window_of_sliding_layer, rotates=on.where_sliding_or_all),
        "exaone4.Exaone4Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention"),
    (Convention(norms=on.q_and_k_norm, window=on.window_of_layer, rotates=on.where_windowed, sinks=True),
        "flint.FlintAttention"),
    (Convention(norms=on.q_and_k_norm_perhaps), "glm4_moe.Glm4MoeAttention"),
    (Convention(on.gate_in_q_proj, norms=on.q_and_k_norm, finish=on.gated_o_proj),
        "qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention"),
    (Convention(on.gate_proj, norms=on.q_and_k_norm, window=on.window_of_layer, rotates=on.where_local,
        finish=on.gated_o_proj, documents_in_masks=False), "afmoe.AfmoeAttention"),
    (Convention(on.g_proj, norms=on.q_and_k_norm, window=on.window_of_layer, finish=on.softplus_gated_o_proj),
        "laguna.LagunaAttention"),
    (Convention(norms=on.q_and_k_layernorm, finish=on.out_proj), "lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention"),
    (Convention(norms=on.q_and_k_layernorm_perhaps, finish=on.dense), "phi.PhiAttention"),
    (Convention(on.rows_normed), "flex_olmo.FlexOlmoAttention minimax_m2.MiniMaxM2Attention olmo2.Olmo2Attention"),
    (Convention(on.rows_normed, rotates=on.where_tables_are_given), "olmo_hybrid.OlmoHybridAttention"),
    (Convention(on.rows_normed, window=on.window_of_layer), "olmo3.Olmo3Attention"),
    (Convention(on.rows_normed_clipped), "olmoe.OlmoeAttention"),
    (Convention(on.fused, window=on.window_of_model), "phi3.Phi3Attention"),
    (Convention(on.fused_clipped, finish=on.out_proj), "dbrx.DbrxAttention"),
    (Convention(on.fused_by_head, finish=on.dense), "gpt_neox.GPTNeoXAttention"),
    (Convention(on.fused_by_head_layernormed_perhaps, finish=on.dense, documents_in_masks=_MASKS_READ_POSITIONS),
        "persimmon.PersimmonAttention"),
    (Convention(norms=on.q_and_k_norm_perhaps, half_width=on.pairs, interleaved=on.adjacent), "cohere.CohereAttention"),
    (Convention(half_width=on.pairs, interleaved=on.adjacent, window=on.window_of_layer, rotates=on.where_windowed),
        "cohere2.Cohere2Attention"),
    (Convention(half_width=on.pairs, interleaved=on.adjacent, window=on.window_of_layer,
        rotates=on.where_windowed_or_told), "cohere2_moe.Cohere2MoeAttention"),
    # These make tables for halves, but rotate pairs by the first half of each.
    (Convention(interleaved=on.adjacent),
        "ernie4_5.Ernie4_5Attention ernie4_5_moe.Ernie4_5_MoeAttention glm.GlmAttention glm4.Glm4Attention "
        "helium.HeliumAttention"),
    (Convention(half_width=on.as_is, window=on.window_of_layer, sinks=True, documents_in_masks=False),
        "gpt_oss.GptOssAttention"),
    # Multi-head latent attention. DeepSeek V2's tables are complex numbers, one for each pair.
    (Convention(on.latent, latent=on.pairs_kept, half_width=on.as_is, interleaved=on.adjacent),
        "deepseek_v2.DeepseekV2Attention"),
    (Convention(on.latent, latent=on.pairs_sorted, interleaved=on.adjacent_perhaps),
        "axk1.AXK1Attention deepseek_v3.DeepseekV3Attention youtu.YoutuAttention"),
    (Convention(on.latent, latent=on.pairs_sorted, interleaved=on.adjacent_perhaps, query_scale=on.scaled_by_position),
        "mistral4.Mistral4Attention"),
    (Convention(on.latent, latent=on.pairs_sorted), "minicpm3.MiniCPM3Attention"),
    (Convention(on.latent_scaled, latent=on.pairs_sorted, interleaved=on.adjacent), "longcat_flash.LongcatFlashMLA"),
    (Convention(on.latent_gated, latent=on.pairs_sorted, interleaved=on.adjacent, finish=on.gated_o_proj),
        "bailing_hybrid.BailingHybridAttention"),
    # Decoders of multimodal models with their own attention modules.
    (Convention(window=on.window_of_layer, sections=on.mrope_sections, text_positions=on.first_of_four),
        "qwen2_vl.Qwen2VLAttention qwen2_5_vl.Qwen2_5_VLAttention"),
    (Convention(norms=on.q_and_k_norm, text_positions=_TEXT_OF_QWEN3_VL),
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
if _RELEASE < Version("5"):
    for row in SINCE_5:
        UNSUPPORTED[path_of(row)] = "it is supported from transformers 5 on"
        del SUPPORTED[path_of(row)]

# Class to (its forward when it was looked up, the result).
_found: weakref.WeakKeyDictionary[type, tuple[Callable[..., Any], Convention | None]] = weakref.WeakKeyDictionary()


def convention_of(module: nn.Module) -> Convention | None:
    """Return the convention of an attention module, or None if its class is not supported.

    A class that inherits from a supported one, as FSDP2 and torch's parametrizations make them, is supported while it
    overrides no method of it but ``__init__``.
    """
    return convention_of_class(type(module))


def convention_of_class(cls: type[nn.Module]) -> Convention | None:
    """Return ``convention_of`` a module of this class."""
    entry = _found.get(cls)
    if entry is None or entry[0] is not cls.forward:
        base = unchanged_base(cls, SUPPORTED.keys() | UNSUPPORTED.keys())
        entry = _found[cls] = (cls.forward, None if base is None else SUPPORTED.get(name_of(base)))
    return entry[1]


def unchanged_base(cls: type, names: Container[str]) -> type | None:
    """Return the first of a class and its bases that has one of these names, or None.

    Return None also if one of its methods except ``__init__`` was replaced, or is overridden by a subclass.
    """
    base = _base(cls, names)
    return None if base is None or _changed_method(cls, base) else base


def _base(cls: type, names: Container[str]) -> type | None:
    return next((base for base in cls.__mro__ if name_of(base) in names), None)


def _changed_method(cls: type, base: type) -> str:
    """Return the name of a method that a class overrides, or that was replaced in ``base``, its base class; else ""."""
    for name, member in vars(base).items():
        if isinstance(member, FunctionType) and name != "__init__":
            if not _is_of(member, base.__module__) or getattr(cls, name) is not member:
                return name
    return ""


def _is_of(function: FunctionType, module: str) -> bool:
    """Return True if a module defines the function, perhaps with a decorator of its own library.

    A wrapper has the name of the wrapped function, but its own globals.
    """
    library = function.__globals__.get("__name__", "").partition(".")[0]
    return function.__module__ == module and library == module.partition(".")[0]


def modeling_of(cls: type) -> dict[str, Any]:
    """Return the globals of the file that defines a supported class, or the supported class that it inherits from."""
    base = cast(type, _base(cls, SUPPORTED))
    return vars(sys.modules[base.__module__])


def refusal(cls: type) -> str:
    """Return why a class of attention modules is not supported, as a sentence about it."""
    base = _base(cls, SUPPORTED.keys() | UNSUPPORTED.keys())
    if base is None:
        return _refusal_of_an_unknown(cls)
    changed = _changed_method(cls, base)
    if changed:
        return f"its {changed} was replaced by {described(getattr(cls, changed))}, which may compute anything else"
    return UNSUPPORTED[name_of(base)]


def _refusal_of_an_unknown(cls: type) -> str:
    if not cls.__module__.startswith(_PREFIX):
        return "it is none of transformers' own classes, so that patch_model cannot know what it computes"
    names = vars(sys.modules[cls.__module__])
    if not any("rotary" in name.lower() for name in names):
        return "its model has no rotary embedding, and these kernels are for attention that rotates queries and keys"
    return "it is not in the table of supported classes, docs/howto/model-family.md says how to add one"


def described(function: Any) -> str:
    """Return the name of a function or callable object for a message."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', '')}.{name}"


def name_of(cls: type) -> str:
    """Return the name of a class as SUPPORTED has it."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(_PREFIX)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module is attention by its name, or by an attribute that transformers' attention modules have.

    Only the innermost of nested modules counts: DBRX, for example, also names a block after the attention in it.
    """
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
    for module in {type(module): module for module in decoder.modules()}.values():
        if isinstance(module, (GradientCheckpointingLayer, PreTrainedModel)) or _has_the_name(module):
            continue
        if "attention_mask" in inspect.signature(type(module).forward).parameters:
            return True
    return False


def hands_positions_on(cls: type[nn.Module]) -> bool:
    """Return whether a class of attention modules passes ``position_ids`` on to its attention function.

    Keywords are passed on, but a parameter of that name is lost unless a call in the forward names it (Persimmon).
    """
    code = inspect.unwrap(cls.forward).__code__
    names = (x if isinstance(x, tuple) else (x,) for x in code.co_consts)
    return "position_ids" not in code.co_varnames[: code.co_argcount] or any("position_ids" in x for x in names)
