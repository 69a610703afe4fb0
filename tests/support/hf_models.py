"""Tiny random models of every supported class, a row each: two layers, windows of 8 tokens, scales of their own."""

from collections.abc import Callable

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
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), _EXPERTS),
    "num_experts_per_tok": 2,
    **dict.fromkeys("n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group".split(), 1),
    **dict.fromkeys("first_k_dense_replace num_dense_layers".split(), 1),
    **{f"{part}_intermediate_size": 32 for part in ("moe", "shared_expert", "shared")},
}
# Two layers, the first with a window or recurrent.
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA_FIRST = {"layer_types": ["mamba", "attention"]}
_CONVOLUTION_FIRST = {"layer_types": ["conv", "full_attention"]}
_FIRST_ROTATES = {"layer_rope_theta": [1e4, 0.0]}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_LINEAR = {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}
_DELTA_NET = RECURRENT | {f"linear_{name}": value for name, value in _LINEAR.items()}
_OF_16, _OF_24, _SCALE = {"head_dim": 16}, {"head_dim": 24}, {"attention_multiplier": 0.4}
_CHUNKS = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "attn_scale": 0.5, "floor_scale": 5}
_CHUNKED = MOE | _OF_16 | _CHUNKS | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
_SIZES_OF_MAMBA = {"n_heads": 8, "d_head": 16, "d_state": 8, "d_ssm": 128, "chunk_size": 16}
_MAMBA = {f"mamba_{name}": value for name, value in _SIZES_OF_MAMBA.items()} | {"attn_layer_indices": [1]}
_LATENT = {"num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32}
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


def _named(families: str, options: dict) -> dict[str, tuple[str, dict]]:
    """Rows of classes with one set of options. The folder has the class's name."""
    return {family.lower(): (family, options) for family in families.split()}


# Name, the classes' common beginning, and what the config says besides SIZES: every peculiarity is switched on.
_ROWS: dict[str, tuple[str, dict]] = {
    **_named("Apertus Arcee BitNet Cohere Jais2 Llama Olmo2", {}),
    **_named("Dots1", MOE | WINDOWED | _OF_24) | _named("Afmoe Flint Kolibri1 Laguna Mellum", MOE | WINDOWED | _OF_16),
    **_named("Exaone4 Cohere2 Olmo3", WINDOWED) | _named("Ministral", WINDOWED | _OF_16),
    **_named("Helium", _OF_16)
    | _named("GraniteMoe GraniteMoeShared", MOE | _SCALE)
    | _named("Granite HyperCLOVAX", _SCALE),
    **_named("Mistral", {"sliding_window": WINDOW}) | _named("Mixtral Phimoe", MOE | {"sliding_window": WINDOW}),
    **_named("AXK1", MOE | _LATENT) | _named("MiniCPM3 Youtu", _LATENT) | _named("Glm Glm4", _OF_16 | _HALF),
    **_named("Olmo", {"clip_qkv": 0.5}) | _named("Olmoe", MOE | {"clip_qkv": 0.5}) | _named("Qwen2", _QWEN_WINDOWS),
    **_named("Phi Persimmon", {"qk_layernorm": True} | _HALF) | _named("Qwen3", _QWEN_WINDOWS | _OF_24),
    **_named("Gemma", _OF_24) | _named("Gemma2", _CAPPED | {"sliding_window": WINDOW}),
    **_named("Gemma3", WINDOWED | _GEMMA) | _named("VaultGemma", WINDOWED | _CAPPED) | _named("Bamba", _MAMBA),
    "aria": ("AriaText", {"moe_num_experts": _EXPERTS}),
    "bailing_hybrid": ("BailingHybrid", MOE | RECURRENT | _LATENT),
    "cohere-norm": ("Cohere", {"use_qk_norm": True}),
    "cohere2_moe": ("Cohere2Moe", MOE | WINDOWED),
    "cohere2_moe-dense": ("Cohere2Moe", MOE | WINDOWED | {"prefix_dense_sliding_window_pattern": 1}),
    "cwm": ("Cwm", WINDOWED | _OF_24),
    "dbrx": ("Dbrx", _DBRX | {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "deepseek_v2": ("DeepseekV2", MOE | _LATENT),
    "deepseek_v2-yarn": ("DeepseekV2", MOE | _LATENT | {"q_lora_rank": None, "rope_scaling": _YARN}),
    "deepseek_v3": ("DeepseekV3", MOE | _LATENT | {"rope_scaling": _YARN}),
    "deepseek_v3-halves": ("DeepseekV3", MOE | _LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "emu3": ("Emu3", {"attention_dropout": 0.0}),
    "ernie4_5": ("Ernie4_5", _OF_16),
    "ernie4_5_moe": ("Ernie4_5_Moe", MOE),
    "exaone_moe": ("ExaoneMoe", MOE | WINDOWED),
    "falcon_h1": ("FalconH1", _MAMBA | _OF_16 | {"key_multiplier": 0.7}),
    "flex_olmo": ("FlexOlmo", MOE),
    "glm4_moe": ("Glm4Moe", MOE | _OF_16 | _HALF | {"use_qk_norm": True}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "attention_bias": True}),
    "gpt_oss": ("GptOss", MOE | _OF_16 | {"sliding_window": WINDOW}),
    "granite_swa": ("GraniteSWA", WINDOWED | _FIRST_ROTATES | _SCALE),
    "granitemoe_swa": ("GraniteMoeSWA", MOE | WINDOWED | _FIRST_ROTATES | _SCALE),
    "granitemoehybrid": (
        *("GraniteMoeHybrid", MOE | _MAMBA | _MAMBA_FIRST | _SCALE | {"position_embedding_type": "rope"}),
    ),
    "granitemoehybrid-nope": ("GraniteMoeHybrid", MOE | _MAMBA | _MAMBA_FIRST),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _OF_16),
    "hunyuan_v1_moe": ("HunYuanMoEV1", MOE | _OF_16 | {"moe_topk": 2}),
    "hy_v3": ("HYV3", MOE | _OF_16),
    "lfm2": ("Lfm2", _CONVOLUTION_FIRST),
    "lfm2_moe": ("Lfm2Moe", MOE | _CONVOLUTION_FIRST),
    "llama4": ("Llama4", _CHUNKED | {"use_qk_norm": True}),
    "llama4-plain": ("Llama4", _CHUNKED | {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "longcat_flash": ("LongcatFlash", MOE | _LATENT | _LONGCAT),
    "minimax": ("MiniMax", MOE | RECURRENT | _OF_16 | {"block_size": 8, "sliding_window": WINDOW}),
    "minimax_m2": ("MiniMaxM2", MOE | _OF_16 | {"rotary_dim": 8}),
    "ministral3": ("Ministral3", _OF_16 | {"sliding_window": WINDOW, "rope_parameters": _PLAIN | _SCALED}),
    "mistral4": ("Mistral4", MOE | _LATENT | {"head_dim": 48, "rope_parameters": _YARN | _SCALED | _A_THIRD}),
    "olmo_hybrid": ("OlmoHybrid", _DELTA_NET),
    "olmo_hybrid-nope": ("OlmoHybrid", _DELTA_NET | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "phi3": ("Phi3", _HALF | {"sliding_window": WINDOW}),
    "qwen2_moe": ("Qwen2Moe", MOE | _QWEN_WINDOWS),
    "qwen3_5": ("Qwen3_5", _DELTA_NET | _OF_16),
    "qwen3_5_moe": ("Qwen3_5Moe", MOE | _DELTA_NET | _OF_16),
    "qwen3_moe": ("Qwen3Moe", MOE | _OF_24 | {"use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3_next": ("Qwen3Next", MOE | _DELTA_NET | _OF_16),
    "seed_oss": ("SeedOss", _OF_16 | {"residual_dropout": 0.5, "attention_dropout": 0.0}),
    "smollm3": ("SmolLM3", WINDOWED | {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "solar_open": ("SolarOpen", MOE | _OF_16),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW, "residual_dropout": 0.5}),
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
    return with_random_weights(lambda: getattr(transformers, f"{family}ForCausalLM")(config), seed)


def with_random_weights(make: Callable, seed: int, spread: float = 0.1) -> transformers.PreTrainedModel:
    """Return the model that ``make`` returns, with a random number added to each one of every parameter. Norms stay
    near one; projections spread scores enough that attention is not a mean."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
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
