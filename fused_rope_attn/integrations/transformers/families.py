"""Which attention modules of transformers are supported, and why others are not: two tables and the questions to them.

A class is written as ``folder.Class`` for ``transformers.models.folder.modeling_folder.Class``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from fused_rope_attn.integrations.transformers.conventions import (
    Convention,
    as_is,
    first_of_four,
    first_row,
    fused,
    fused_by_head,
    heads_normed,
    heads_normed_perhaps,
    mrope_sections,
    pairs,
    rows_normed,
    text_positions,
    window_of_layer,
    window_of_model,
)

_PREFIX = "transformers.models."
_TEXT_OF_QWEN3_VL = text_positions if Version(transformers.__version__) >= Version("5.3") else first_row
# A scale of its own (Gemma, Granite) is each module's `scaling`, partial rotation the width of its tables, so that
# neither is a difference here.
_GROUPS: tuple[tuple[Convention, tuple[str, ...]], ...] = (
    (Convention(), ("llama.LlamaAttention", "granite.GraniteAttention")),
    (
        Convention(window=window_of_model),
        ("mistral.MistralAttention", "mixtral.MixtralAttention"),
    ),
    (Convention(window=window_of_layer), ("qwen2.Qwen2Attention",)),
    (Convention(window=window_of_layer, rotates_perhaps=True), ("smollm3.SmolLM3Attention",)),
    (Convention(window=window_of_layer, softcap=True), ("gemma2.Gemma2Attention",)),
    (Convention(heads_normed, window=window_of_layer), ("gemma3.Gemma3Attention", "qwen3.Qwen3Attention")),
    (Convention(rows_normed), ("olmo2.Olmo2Attention",)),
    (Convention(fused, window=window_of_model), ("phi3.Phi3Attention",)),
    (Convention(fused_by_head, output="dense"), ("gpt_neox.GPTNeoXAttention",)),
    (Convention(heads_normed_perhaps, pairs, interleaved=True), ("cohere.CohereAttention",)),
    # GLM writes its table for halves and reads the first half of it for pairs.
    (Convention(interleaved=True), ("glm4.Glm4Attention",)),
    (Convention(half_width=as_is, window=window_of_layer, sinks=True), ("gpt_oss.GptOssAttention",)),
    # Decoders of multimodal models that have attention modules of their own.
    (
        Convention(window=window_of_layer, sections=mrope_sections, text_positions=first_of_four),
        ("qwen2_vl.Qwen2VLAttention", "qwen2_5_vl.Qwen2_5_VLAttention"),
    ),
    (
        Convention(heads_normed, text_positions=_TEXT_OF_QWEN3_VL),
        ("qwen3_vl.Qwen3VLTextAttention", "qwen3_vl_moe.Qwen3VLMoeTextAttention"),
    ),
)
_REASONS: tuple[tuple[str, tuple[str, ...]], ...] = ()


def _path(row: str) -> str:
    folder, name = row.split(".")
    return f"{folder}.modeling_{folder}.{name}"


# By path below transformers.models, as `name_of` gives it.
SUPPORTED = {_path(row): convention for convention, rows in _GROUPS for row in rows}
# The same of classes that are not served: one sentence that says why.
UNSUPPORTED = {_path(row): reason for reason, rows in _REASONS for row in rows}

# Of a class: its forward when it was looked up, and what came of it.
_found: weakref.WeakKeyDictionary[type, tuple[Callable[..., Any], Convention | None]] = weakref.WeakKeyDictionary()


def convention_of(module: nn.Module) -> Convention | None:
    """The convention of an attention module, None where its class is not supported.

    A class that inherits from a supported one, as FSDP2 and torch's parametrizations make them, is supported while it
    overrides no method of it but ``__init__``.
    """
    cls = type(module)
    entry = _found.get(cls)
    if entry is None or entry[0] is not cls.forward:
        entry = _found[cls] = (cls.forward, _look_up(cls))
    return entry[1]


def _look_up(cls: type) -> Convention | None:
    for base in cls.__mro__:
        name = name_of(base)
        if name in UNSUPPORTED:
            return None
        if name in SUPPORTED:
            methods = {n: member for n, member in vars(base).items() if isinstance(member, FunctionType)}
            methods.pop("__init__", None)
            # What others have put in the place of a method of the class itself is not what the table describes.
            own = all(member.__module__ == base.__module__ for member in methods.values())
            kept = all(getattr(cls, n) is member for n, member in methods.items())
            return SUPPORTED[name] if own and kept else None
    return None


def name_of(cls: type) -> str:
    """A class of transformers as SUPPORTED names it."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(_PREFIX)


def looks_like_attention(module: nn.Module) -> bool:
    """True for what is attention by its name or by what transformers' attention modules have in common."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or hasattr(module, "num_key_value_groups")
