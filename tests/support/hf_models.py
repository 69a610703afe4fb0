"""Tiny random models of every supported class, a row each: two layers, windows of 8 tokens, scales of their own."""

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
# The same numbers under the names that the configs have for them.
MOE = {
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
}
# Two layers, the first with a window or recurrent.
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA_FIRST = {"layer_types": ["mamba", "attention"]}
_FIRST_ROTATES = {"layer_rope_theta": [1e4, 0.0]}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_DELTA_NET = RECURRENT | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_CHUNKED = MOE | {
    "head_dim": 16,
    "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "attn_scale": 0.5,
    "floor_scale": 5,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "attn_layer_indices": [1],
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_SCALED = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 6}
_A_THIRD = {"partial_rotary_factor": 1 / 3}
_DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
# Name, the classes' common beginning, and what the config says besides SIZES: every peculiarity is switched on.
_ROWS: dict[str, tuple[str, dict]] = {
    "afmoe": ("Afmoe", MOE | WINDOWED | {"head_dim": 16}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "aria": ("AriaText", {"moe_num_experts": _EXPERTS}),
    "axk1": ("AXK1", MOE | _LATENT),
    "bailing_hybrid": ("BailingHybrid", MOE | RECURRENT | _LATENT),
    "bamba": ("Bamba", _MAMBA),
    "bitnet": ("BitNet", {}),
    "cohere": ("Cohere", {}),
    "cohere-norm": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", WINDOWED),
    "cohere2_moe": ("Cohere2Moe", MOE | WINDOWED),
    "cohere2_moe-dense": ("Cohere2Moe", MOE | WINDOWED | {"prefix_dense_sliding_window_pattern": 1}),
    "cwm": ("Cwm", WINDOWED | {"head_dim": 24}),
    "dbrx": ("Dbrx", _DBRX | {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "deepseek_v2": ("DeepseekV2", MOE | _LATENT),
    "deepseek_v2-yarn": ("DeepseekV2", MOE | _LATENT | {"q_lora_rank": None, "rope_scaling": _YARN}),
    "deepseek_v3": ("DeepseekV3", MOE | _LATENT | {"rope_scaling": _YARN}),
    "deepseek_v3-halves": ("DeepseekV3", MOE | _LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "dots1": ("Dots1", MOE | WINDOWED | {"head_dim": 24}),
    "emu3": ("Emu3", {"attention_dropout": 0.0}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": ("Ernie4_5_Moe", MOE),
    "exaone4": ("Exaone4", WINDOWED),
    "exaone_moe": ("ExaoneMoe", MOE | WINDOWED),
    "falcon_h1": ("FalconH1", _MAMBA | {"key_multiplier": 0.7, "head_dim": 16}),
    "flex_olmo": ("FlexOlmo", MOE),
    "flint": ("Flint", MOE | WINDOWED | {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "sliding_window": WINDOW},
    ),
    "gemma3": ("Gemma3", WINDOWED | {"head_dim": 24, "query_pre_attn_scalar": 10}),
    "glm": ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4_moe": ("Glm4Moe", MOE | {"head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "attention_bias": True}),
    "gpt_oss": ("GptOss", MOE | {"head_dim": 16, "sliding_window": WINDOW}),
    "granite": ("Granite", {"attention_multiplier": 0.4}),
    "granite_swa": ("GraniteSWA", WINDOWED | _FIRST_ROTATES | {"attention_multiplier": 0.4}),
    "granitemoe": ("GraniteMoe", MOE | {"attention_multiplier": 0.4}),
    "granitemoe_swa": ("GraniteMoeSWA", MOE | WINDOWED | _FIRST_ROTATES | {"attention_multiplier": 0.4}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MOE | _MAMBA | _MAMBA_FIRST | {"attention_multiplier": 0.4, "position_embedding_type": "rope"},
    ),
    "granitemoehybrid-nope": ("GraniteMoeHybrid", MOE | _MAMBA | _MAMBA_FIRST),
    "granitemoeshared": ("GraniteMoeShared", MOE | {"attention_multiplier": 0.4}),
    "helium": ("Helium", {"head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", MOE | {"head_dim": 16, "moe_topk": 2}),
    "hy_v3": ("HYV3", MOE | {"head_dim": 16}),
    "hyperclovax": ("HyperCLOVAX", {"attention_multiplier": 0.4}),
    "jais2": ("Jais2", {}),
    "kolibri1": ("Kolibri1", MOE | WINDOWED | {"head_dim": 16}),
    "laguna": ("Laguna", MOE | WINDOWED | {"head_dim": 16}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2Moe", MOE | {"layer_types": ["conv", "full_attention"]}),
    "llama": ("Llama", {}),
    "llama4": ("Llama4", _CHUNKED | {"use_qk_norm": True}),
    "llama4-plain": ("Llama4", _CHUNKED | {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "longcat_flash": (
        "LongcatFlash",
        MOE
        | _LATENT
        | {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 1},
    ),
    "mellum": ("Mellum", MOE | WINDOWED | {"head_dim": 16}),
    "minicpm3": ("MiniCPM3", _LATENT),
    "minimax": ("MiniMax", MOE | RECURRENT | {"head_dim": 16, "block_size": 8, "sliding_window": WINDOW}),
    "minimax_m2": ("MiniMaxM2", MOE | {"head_dim": 16, "rotary_dim": 8}),
    "ministral": ("Ministral", WINDOWED | {"head_dim": 16}),
    "ministral3": ("Ministral3", {"head_dim": 16, "sliding_window": WINDOW, "rope_parameters": _PLAIN | _SCALED}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral4": ("Mistral4", MOE | _LATENT | {"head_dim": 48, "rope_parameters": _YARN | _SCALED | _A_THIRD}),
    "mixtral": ("Mixtral", MOE | {"sliding_window": WINDOW}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOWED),
    "olmo_hybrid": ("OlmoHybrid", _DELTA_NET),
    "olmo_hybrid-nope": ("OlmoHybrid", _DELTA_NET | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmoe": ("Olmoe", MOE | {"clip_qkv": 0.5}),
    "persimmon": ("Persimmon", {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi": ("Phi", {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "phimoe": ("Phimoe", MOE | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _QWEN_WINDOWS),
    "qwen2_moe": ("Qwen2Moe", MOE | _QWEN_WINDOWS),
    "qwen3": ("Qwen3", _QWEN_WINDOWS | {"head_dim": 24}),
    "qwen3_5": ("Qwen3_5", _DELTA_NET | {"head_dim": 16}),
    "qwen3_5_moe": ("Qwen3_5Moe", MOE | _DELTA_NET | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 24, "use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3_next": ("Qwen3Next", MOE | _DELTA_NET | {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "residual_dropout": 0.5, "attention_dropout": 0.0}),
    "smollm3": ("SmolLM3", WINDOWED | {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "solar_open": ("SolarOpen", MOE | {"head_dim": 16}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW, "residual_dropout": 0.5}),
    "vaultgemma": (
        "VaultGemma",
        WINDOWED | {"head_dim": 24, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0},
    ),
    "youtu": ("Youtu", _LATENT),
}
_CONFIGS = {name: f"{name}TextConfig" for name in ("Emu3", "Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe")}
_NAMES = set(dir(transformers))  # which takes a quarter of a second to list
# Those that the installed transformers has and that are supported with it.
MODELS = {
    name: row
    for name, row in _ROWS.items()
    if f"{row[0]}ForCausalLM" in _NAMES and not any(path.startswith(f"{name}.") for path in UNSUPPORTED)
}
# One of each peculiarity.
THOROUGH = (
    "llama llama-yarn mistral mixtral qwen2 qwen3 phi3 gemma2 gemma3 gpt_neox cohere cohere-norm glm4 olmo2 granite "
    "smollm3 gpt_oss"
).split()


def make_model(name: str, seed: int = 0, **options) -> transformers.PreTrainedModel:
    """A model of MODELS in float32 on the CPU, in eval mode, with eager attention: every parameter is random."""
    family, special = MODELS[name]
    config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**SIZES | special | options)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms stay near one, projections spread scores enough that attention is not a mean.
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = None
    return model.float().eval()


def make_ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids (rows, length), none of them the padding token."""
    return torch.randint(2, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def attentions_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if convention_of(module) is not None]
