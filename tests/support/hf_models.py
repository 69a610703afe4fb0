"""Tiny random models of every supported class, for tests/integrations: windows of 8 tokens, scales of their own."""

import torch
import transformers

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
# Name, config class, model class, and what the config says besides SIZES.
MODELS = {
    "llama": ("Llama", {}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "sliding_window": WINDOW},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "attention_bias": True}),
    "cohere": ("Cohere", {}),
    "cohere-norm": ("Cohere", {"use_qk_norm": True}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.4}),
    "smollm3": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


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
    return [module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "is_causal")]
