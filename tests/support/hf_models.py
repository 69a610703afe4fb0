"""Tiny random models of every supported class, a row each: two layers, windows of 8 tokens, scales of their own."""

import importlib
from pathlib import Path

import torch
import transformers

from fused_rope_attn.integrations.transformers.families import UNSUPPORTED, convention_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
WINDOW = 8
_EXPERTS = 4
# All configs are given these, whether their classes read them or not: the same numbers under several names.
_COMMON = SIZES | {
    "head_dim": 16,
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), _EXPERTS),
    "num_experts_per_tok": 2,
    **dict.fromkeys("n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group".split(), 1),
    **dict.fromkeys("first_k_dense_replace num_dense_layers".split(), 1),
    **{f"{part}_intermediate_size": 32 for part in ("moe", "shared_expert", "shared")},
}
# Two layers, the first with a window or recurrent.
_WINDOW = {"sliding_window": WINDOW}
WINDOWED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_QWEN_WINDOWS = _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
_LINEAR = {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}
_DELTA_NET = RECURRENT | {f"linear_{name}": value for name, value in _LINEAR.items()}
_OF_24, _SCALE = {"head_dim": 24}, {"attention_multiplier": 0.4}
_ROTATES_FIRST = WINDOWED | _SCALE | {"layer_rope_theta": [1e4, 0.0]}
_CHUNKED = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "attn_scale": 0.5, "floor_scale": 5}
_CHUNKED |= {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
_SIZES_OF_MAMBA = {"n_heads": 8, "d_head": 16, "d_state": 8, "d_ssm": 128, "chunk_size": 16}
_MAMBA = {f"mamba_{name}": value for name, value in _SIZES_OF_MAMBA.items()} | {"attn_layer_indices": [1]}
_MAMBA_FIRST = _MAMBA | {"layer_types": ["mamba", "attention"]}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32}
_LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
_YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_SCALED = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 6}
_A_THIRD, _HALF = {"partial_rotary_factor": 1 / 3}, {"partial_rotary_factor": 0.5}
_DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
_LONGCAT = {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 1}
_GEMMA = _OF_24 | {"query_pre_attn_scalar": 10}
_CAPPED = _GEMMA | {"attn_logit_softcapping": 2.0}
# Folders of transformers, each with another name after "-" where there are several models, and what their configs say
# besides _COMMON: every peculiarity is switched on.
_ROWS: dict[str, dict] = {
    "apertus arcee aria bitnet cohere ernie4_5 ernie4_5_moe flex_olmo helium hunyuan_v1_dense hy_v3 jais2": {},
    "llama olmo2 solar_open": {},
    "afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 laguna mellum ministral olmo3": WINDOWED,
    "cwm dots1": WINDOWED | _OF_24,
    "granite granitemoe granitemoeshared hyperclovax": _SCALE,
    "granite_swa granitemoe_swa": _ROTATES_FIRST,
    "gpt_oss mistral mixtral phimoe": _WINDOW,
    "qwen2 qwen2_moe": _QWEN_WINDOWS,
    "qwen3": _QWEN_WINDOWS | _OF_24,
    "qwen3_moe": _WINDOW | _OF_24 | {"use_sliding_window": True},
    "qwen3_5 qwen3_5_moe qwen3_next olmo_hybrid": _DELTA_NET,
    "olmo_hybrid-nope": _DELTA_NET | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "axk1 deepseek_v2 minicpm3 youtu": _LATENT,
    "deepseek_v2-yarn": _LATENT | {"q_lora_rank": None, "rope_scaling": _YARN},
    "deepseek_v3": _LATENT | {"rope_scaling": _YARN},
    "deepseek_v3-halves": _LATENT | {"q_lora_rank": None, "rope_interleave": False},
    "bailing_hybrid": RECURRENT | _LATENT,
    "longcat_flash": _LATENT | _LONGCAT,
    "mistral4": _LATENT | {"head_dim": 48, "rope_parameters": _YARN | _SCALED | _A_THIRD},
    "ministral3": _WINDOW | {"rope_parameters": _PLAIN | _SCALED},
    "glm glm4": _HALF,
    "glm4_moe": _HALF | {"use_qk_norm": True},
    "persimmon phi": _HALF | {"qk_layernorm": True},
    "phi3": _HALF | _WINDOW,
    "gemma": _OF_24,
    "gemma2": _CAPPED | _WINDOW,
    "gemma3": WINDOWED | _GEMMA,
    "vaultgemma": WINDOWED | _CAPPED,
    "olmo olmoe": {"clip_qkv": 0.5},
    "lfm2 lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA | {"key_multiplier": 0.7},
    "granitemoehybrid": _MAMBA_FIRST | _SCALE | {"position_embedding_type": "rope"},
    "granitemoehybrid-nope": _MAMBA_FIRST,
    "llama4": _CHUNKED | {"use_qk_norm": True},
    "llama4-plain": _CHUNKED | {"use_qk_norm": False, "attn_temperature_tuning": False},
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    "cohere-norm": {"use_qk_norm": True},
    "cohere2_moe-dense": WINDOWED | {"prefix_dense_sliding_window_pattern": 1},
    "dbrx": _DBRX | {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "emu3": {"attention_dropout": 0.0},
    "gpt_neox": {"rotary_pct": 0.25, "attention_bias": True},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "minimax": RECURRENT | _WINDOW | {"block_size": 8},
    "minimax_m2": {"rotary_dim": 8},
    "seed_oss": {"residual_dropout": 0.5, "attention_dropout": 0.0},
    "smollm3": WINDOWED | {"no_rope_layers": [1, 0], "use_sliding_window": True},
    "starcoder2": _WINDOW | {"residual_dropout": 0.5},
}
_FOLDERS = {path.name for path in (Path(transformers.__file__).parent / "models").iterdir()}
_FOLDERS -= {path.split(".")[0] for path in UNSUPPORTED}
# Those that the installed transformers has and that are supported with it.
MODELS = {name: row for names, row in _ROWS.items() for name in names.split() if name.split("-")[0] in _FOLDERS}


def class_of(folder: str, end: str) -> type[transformers.PreTrainedModel]:
    """Return the class of a folder of transformers by the end of its name."""
    file = vars(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"))
    return next(file[name] for name in file if name.endswith(end))


def make_model(name: str, seed: int = 0, **options) -> transformers.PreTrainedModel:
    """A model of MODELS in float32 on the CPU, in eval mode, with eager attention: every parameter is random."""
    cls = class_of(name.split("-")[0], "ForCausalLM")
    return with_random_weights(cls, cls.config_class(**_COMMON | MODELS[name] | options), seed)


def with_random_weights(cls: type, config, seed: int, spread: float = 0.1) -> transformers.PreTrainedModel:
    """Return a model with a random number added to each one of every parameter. Norms stay near one; projections
    spread scores enough that attention is not a mean."""
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            width = spread if parameter.ndim > 1 else 0.1
            parameter.add_(width * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = None
    return model.float().eval()


def make_ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids (rows, length), none of them the padding token."""
    return torch.randint(2, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def attentions_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if convention_of(module) is not None]
