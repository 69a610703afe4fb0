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
# All configs of texts, of vision towers and of whole models get these, whether their classes read them or not.
_TEXT = {name: value for name, value in SIZES.items() if name != "initializer_range"} | {"head_dim": 16}
_TEXT |= {"num_experts": 4, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOWER |= {"image_size": PIXELS, "patch_size": PATCH, "depth": 2, "num_heads": 2, "temporal_patch_size": 2}
_TOWER |= {"spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
_TOWER |= {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
_WHOLE = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
_WHOLE |= {"vision_end_token_id": END, "mm_tokens_per_image": IMAGE_TOKENS, "spatial_merge_size": 2, "scale_factor": 2}
_WHOLE |= {"projection_dim": 64, "hidden_size": 64, "vocab_size": SIZES["vocab_size"]}
_SIGLIP = "siglip_vision_model"
_QWEN = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_SMALL = {"image_size": PIXELS // 2}
_INTERN = {"model_type": "internvl_vision", "image_size": [PIXELS] * 2, "patch_size": [PATCH] * 2}
_CHUNKED = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0]}
_LLAMA4_WIDTHS = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32)
# Folder of transformers to options of the text's config, and of the tower's.
MODELS: dict[str, tuple[dict, dict]] = {
    "qwen2_vl": (_QWEN, {"embed_dim": 16, "hidden_size": 64}),
    "qwen2_5_vl": (_QWEN | {"use_sliding_window": True, "max_window_layers": 1} | WINDOWED, {}),
    "qwen3_vl": (_QWEN, {}),
    "qwen3_vl_moe": (_QWEN, {}),
    "gemma3": ({"model_type": "gemma3_text", "query_pre_attn_scalar": 10} | WINDOWED, {"model_type": _SIGLIP}),
    "paligemma": ({"model_type": "gemma"}, {"model_type": _SIGLIP} | _SMALL),
    "llama4": (_CHUNKED, _LLAMA4_WIDTHS | {"intermediate_size": 64}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"} | _SMALL),
    "mistral3": ({"model_type": "mistral", "sliding_window": WINDOW}, {"model_type": "pixtral", "head_dim": 8}),
    "internvl": ({"model_type": "qwen2"}, _INTERN),
    "idefics3": ({"model_type": "llama"}, {}),
    "smolvlm": ({"model_type": "llama"}, {}),
}

if transformers.__version__.startswith("5.24."):  # its Llama 4 reads image_outputs of the text's output, and fails
    del MODELS["llama4"]


def make_vision_model(name: str, seed: int = 0, **text) -> transformers.PreTrainedModel:
    """A model of MODELS in float32 on the CPU, in eval mode, with eager attention: every parameter is random.
    text: what the config of the language model says besides."""
    text_config, vision_config = MODELS[name]
    cls = class_of(name, "ForConditionalGeneration")
    configs = {"text_config": _TEXT | text_config | text, "vision_config": _TOWER | vision_config}
    return with_random_weights(cls, cls.config_class(**configs, **_WHOLE), seed, spread=0.2)


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
