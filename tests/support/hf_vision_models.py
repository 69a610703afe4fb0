"""Tiny random multimodal models, for tests/integrations, and their inputs: text, an image of 2 x 2 tokens, text."""

import inspect

import torch
import transformers

from tests.support.hf_models import SIZES, WINDOW, WINDOWED, class_of, make_ids, with_random_weights

IMAGE, START, END, VIDEO = 90, 91, 92, 93  # token ids that no text has
BEFORE, IMAGE_TOKENS, BEHIND = 6, 4, 7
LENGTH = BEFORE + IMAGE_TOKENS + BEHIND
PROMPT = BEFORE + IMAGE_TOKENS + 3
PIXELS, PATCH = 16, 4
_TEXT = {name: value for name, value in SIZES.items() if name != "initializer_range"}
_QWEN = _TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
_WIDTHS = {"hidden_size": 16, "intermediate_size": 32}
_QWEN3_TOWER = _QWEN_TOWER | _WIDTHS | {"out_hidden_size": 64}
_QWEN3_TOWER |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
_QWEN_TOKENS |= {"vision_end_token_id": END}
_OF_16, _MOE = {"head_dim": 16}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER = _WIDTHS | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": PIXELS, "patch_size": PATCH}
_SCALED_DOWN = {"image_token_id": IMAGE, "scale_factor": 2}
_LLAMA4_WIDTHS = "projector_input_dim", "projector_output_dim", "vision_output_dim"


def _text(model_type: str, **options) -> dict:
    return _TEXT | {"model_type": model_type} | options


def _tower(model_type: str, **options) -> dict:
    return _TOWER | {"model_type": f"{model_type}_vision_model"} | options


# What the config of the text, of the vision tower and of the whole say, by folder of transformers.
MODELS = {
    "qwen2_vl": (_QWEN, _QWEN_TOWER | {"embed_dim": 16, "hidden_size": 64}, _QWEN_TOKENS),
    "qwen2_5_vl": (
        _QWEN | {"use_sliding_window": True, "max_window_layers": 1} | WINDOWED,
        _QWEN_TOWER | _WIDTHS | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
        _QWEN_TOKENS,
    ),
    "qwen3_vl": (_QWEN | _OF_16, _QWEN3_TOWER, _QWEN_TOKENS),
    "qwen3_vl_moe": (_QWEN | _OF_16 | _MOE, _QWEN3_TOWER, _QWEN_TOKENS),
    "gemma3": (
        _text("gemma3_text", head_dim=16, query_pre_attn_scalar=10, **WINDOWED),
        _tower("siglip"),
        {"image_token_index": IMAGE, "mm_tokens_per_image": IMAGE_TOKENS},
    ),
    "paligemma": (
        _text("gemma", head_dim=16),
        _tower("siglip", image_size=PIXELS // 2),
        {"image_token_index": IMAGE, "projection_dim": 64, "hidden_size": 64, "vocab_size": SIZES["vocab_size"]},
    ),
    "llama4": (
        _TEXT | _OF_16 | {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "num_local_experts": 2},
        _TOWER | {"intermediate_size": 64} | dict.fromkeys(_LLAMA4_WIDTHS, 32),
        {"image_token_index": IMAGE},
    ),
    "llava": (_text("llama"), _tower("clip", image_size=PIXELS // 2), {"image_token_index": IMAGE}),
    "mistral3": (
        _text("mistral", sliding_window=WINDOW, head_dim=16),
        _TOWER | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "internvl": (
        _text("qwen2"),
        _TOWER | {"model_type": "internvl_vision", "image_size": [PIXELS] * 2, "patch_size": [PATCH] * 2},
        {"image_token_id": IMAGE, "downsample_ratio": 0.5},
    ),
    "idefics3": (_text("llama"), _TOWER, _SCALED_DOWN),
    "smolvlm": (_text("llama"), _TOWER, _SCALED_DOWN),
}

if transformers.__version__.startswith("5.24."):  # its Llama 4 reads image_outputs of the text's output, and fails
    del MODELS["llama4"]


def make_vision_model(name: str, seed: int = 0, **text) -> transformers.PreTrainedModel:
    """A model of MODELS in float32 on the CPU, in eval mode, with eager attention: every parameter is random.
    text: what the config of the language model says besides."""
    text_config, vision_config, config = MODELS[name]
    cls = class_of(name, "ForConditionalGeneration")
    configs = {"text_config": text_config | text, "vision_config": dict(vision_config)}
    return with_random_weights(cls, cls.config_class(**configs, **config), seed, spread=0.2)


def language_model(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The decoder of a model of MODELS."""
    inner = getattr(model, "model", model)  # Llama 4 has no model between itself and that with the vocabulary
    decoder = getattr(inner, "language_model", None) or inner.text_model
    return getattr(decoder, "model", decoder)


def make_inputs(name: str, rows: int = 2, image: bool = True, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Return a processor's output: (rows, LENGTH) token ids and mask, and the pixels of an image in every row.

    padding: how many tokens on the left of a row, or with a negative sign on the right, are padding. It takes the place
        of text.
    """
    ids, generator = make_ids(rows, LENGTH) % 80 + 2, torch.Generator().manual_seed(2)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, slice(0, count) if count > 0 else slice(LENGTH + count, LENGTH)] = 0
    ids = ids.masked_fill(mask == 0, 0)
    types = torch.zeros_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if image:
        ids[:, BEFORE - 1], ids[:, BEFORE : BEFORE + IMAGE_TOKENS], ids[:, BEFORE + IMAGE_TOKENS] = START, IMAGE, END
        types[:, BEFORE : BEFORE + IMAGE_TOKENS] = 1
        pixels = PIXELS // 2 if name in ("llava", "paligemma") else PIXELS
        shape = (rows, 3, pixels, pixels)
        if name.startswith("qwen"):
            shape = (rows * (PIXELS // PATCH) ** 2, 3 * 2 * PATCH**2)
            inputs["image_grid_thw"] = torch.tensor([[1, PIXELS // PATCH, PIXELS // PATCH]] * rows)
        elif name in ("idefics3", "smolvlm"):
            shape = (rows, 1, *shape[1:])
        elif name == "mistral3":
            inputs["image_sizes"] = torch.tensor([[pixels, pixels]] * rows)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
    if name == "paligemma":  # 0 for the prompt, in which all tokens see each other, and 1 for the answer
        types = (torch.arange(LENGTH) >= PROMPT).long().expand(rows, -1)
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = types
    elif (
        "mm_token_type_ids" in inspect.signature(class_of(name, "ForConditionalGeneration").forward).parameters
    ):  # from 5.3 on
        inputs["mm_token_type_ids"] = types
    return inputs
