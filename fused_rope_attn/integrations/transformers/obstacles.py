"""Why a forward pass takes the modules' own attention, or is refused: everything that the host can see beforehand."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils, modeling_utils
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from fused_rope_attn.integrations.transformers.conventions import attention_dropout
from fused_rope_attn.runtime.context_parallel import in_context_parallel
from fused_rope_attn.runtime.device import is_capturing

# Since 5.6 the masks and the attention functions of transformers both read `is_causal`, of the config or of the call.
# Before, each of them read something else or nothing.
_READS_IS_CAUSAL = Version(transformers.__version__) >= Version("5.6")
# The name of a patched model's attention while a manager of continuous batching is in use that makes no masks
# (``serving``). No function is registered under it: whatever would take a module's own forward is refused.
PAGES = "paged|fused_rope_flash"
# The attention functions of transformers that compute what the fused kernels do, under whatever name they are
# registered; kernels of its hub are arguments of the second. Not among them are its block-sparse ones.
_ATTENTION = {
    "sdpa_attention_forward", "flash_attention_forward", "flex_attention_forward",
    # Over the paged caches of continuous batching, where it has functions of its own.
    "eager_paged_attention_forward", "sdpa_attention_paged_forward", "paged_attention_forward",
}  # fmt: skip


def refuse_what_nobody_computes(attentions: list[nn.Module], given: dict[str, Any], *, on_shards: bool = False) -> None:
    """Raise where neither the fused kernels nor the modules' own forward would compute what the caller means.

    on_shards: the model knows the ranks with which it shares its sequences.
    """
    if in_context_parallel() and not on_shards:
        raise NotImplementedError(
            "a patched model was called under torch's context_parallel, where every rank holds a shard of the sequence "
            "and fused attention would attend to nothing but the shard: tell it the ranks by patch_model(model, "
            "cp_group=...), call unpatch_model(model) before, with attn_implementation='sdpa', or run the patched "
            "model on whole sequences outside of the context manager"
        )
    mask = given.get("attention_mask")
    if isinstance(mask, BlockMask):
        implementation = implementation_of(attentions[0].config)
        if implementation.removeprefix("paged|") != "flex_attention":
            raise ValueError(
                "attention_mask is a BlockMask, which attn_implementation='flex_attention' takes, but the model's is "
                f"{implementation!r}: call model.set_attn_implementation('flex_attention')"
            )


def obstacle(attentions: list[nn.Module], config: Any, given: dict[str, Any], causal: bool | None) -> str:
    """Why a call needs the modules' own forward, "" where it does not.

    Args:
        attentions: the patched attention modules of a decoder.
        config: the decoder's.
        given: the arguments of the decoder's forward by their names.
        causal: as ``is_causal`` says of these.
    """
    implementation = implementation_of(attentions[0].config)
    if given.get("cache") is not None:
        return "a paged cache (continuous batching)"
    if "paged" in implementation and implementation != PAGES:
        return f"attn_implementation={implementation!r} without the paged cache that it takes (continuous batching)"
    reason = obstacle_of_any_kind(attentions, config, given, causal)
    if reason:
        return reason
    if not causal and not _READS_IS_CAUSAL and all(module.is_causal for module in attentions):
        return f"is_causal=False with transformers {transformers.__version__} (from 5.6 on it is served)"
    if given.get("head_mask") is not None:
        return "head_mask"
    mask = given.get("attention_mask")
    if isinstance(mask, BlockMask):
        return "a BlockMask"
    if isinstance(mask, dict):
        return "a mask for each type of layer, made outside of what is patched,"
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "an attention_mask that is not (B, keys)"
    past = given.get("past_key_values")
    if past is not None and not _is_known(past, attentions):
        return f"a cache of type {type(past).__name__}"
    return ""


def obstacle_of_any_kind(attentions: list[nn.Module], config: Any, given: dict[str, Any], causal: bool | None) -> str:
    """As ``obstacle``: what neither asks for the mask nor for the cache."""
    foreign = _foreign_function(attentions[0], implementation_of(attentions[0].config))
    if foreign:
        return foreign
    wanted = given.get("output_attentions")
    if getattr(config, "output_attentions", False) if wanted is None else wanted:
        return "output_attentions=True"
    if any(module.training and attention_dropout(module) for module in attentions):
        return "attention dropout in training"
    if causal is None:
        return "attention that is causal in some modules and not in others"
    return ""


def blocks_of_images(given: dict[str, Any]) -> str:
    """Why a call of a model like Gemma 3's needs the modules' own forward, "" where it does not.

    Attention is bidirectional among the tokens of an image, which ``token_type_ids`` marks by 1.
    """
    types = given.get("token_type_ids")
    # A single token is the last one of all: attention to the rest of its image is causal.
    if types is None or types.shape[-1] == 1:
        return ""
    if is_blind(types):
        return "token_type_ids in a graph, which nobody can look through for the tokens of images,"
    return "bidirectional attention among the tokens of an image (token_type_ids)" if (types == 1).any() else ""


def is_causal(attentions: list[nn.Module], config: Any, given: dict[str, Any]) -> bool | None:
    """Whether the modules attend causally, in this call; None where they are not of one mind.

    A call's ``is_causal`` comes before the config's, and the config's before the modules' own (Gemma 3's
    ``use_bidirectional_attention``).
    """
    wanted = getattr(config, "is_causal", None)
    if given.get("cache") is None:  # continuous batching says by it whether it has put the causal mask into the mask
        wanted = given.get("is_causal", wanted)
    own = {bool(module.is_causal) for module in attentions}
    if len(own) > 1 or wanted is True and own == {False}:
        return None
    return bool(own.pop() if wanted is None else wanted)


def _foreign_function(module: nn.Module, name: str) -> str:
    """What the implementation of that name is to a module, where it is not transformers' own; "" where it is.

    Users and libraries register functions with ``AttentionInterface``, under new names or in the place of known ones
    (sequence parallelism wraps what it finds there). They may compute anything, so that nothing takes their place.
    """
    modeling = sys.modules.get(type(module).__module__)
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", modeling_utils.ALL_ATTENTION_FUNCTIONS)
    function = _unwrapped(functions.get(name))
    if function is not None:
        origin = str(getattr(function, "__module__", ""))
        if not origin.startswith("transformers.") or getattr(function, "__name__", "") not in _ATTENTION:
            return f"the attention function {_described(function)}, registered as {name!r},"
    function = _unwrapped(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name))
    if function is not None and getattr(function, "__module__", "") != masking_utils.__name__:
        return f"the mask function {_described(function)}, registered as {name!r},"
    return ""


def is_blind(x: Tensor) -> bool:
    """Whether the host cannot look into a tensor: while a graph of either kind is made, and where there is no data."""
    return torch.compiler.is_compiling() or is_capturing(x.device) or x.is_meta or isinstance(x, FakeTensor)


def uses_flash(config: Any) -> bool:
    """Whether the modules' own attention would be one of the flash-attention implementations."""
    return "flash" in implementation_of(config)


def uses_masks_by_default(config: Any) -> bool:
    """Whether the modules' own attention is causal where no mask is given: flash-attention and SDPA are."""
    return implementation_of(config) not in ("eager", "flex_attention")


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _described(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', '')}.{name}"


def implementation_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", None) or "eager")


def layer_of(module: nn.Module) -> int:
    """The place of a module's keys and values in a cache."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else 0


def _is_known(past: Any, attentions: list[nn.Module]) -> bool:
    """Whether a cache is one of transformers' that hold keys and values. Layers of other modules may hold anything."""
    # A model's own type (MiniMax's) may count its tokens in a way of its own.
    if not isinstance(past, Cache) or type(past).__module__.startswith("transformers.models."):
        return False
    places = [place for place in map(layer_of, attentions) if place < len(past.layers)]
    if not all(isinstance(past.layers[place], (DynamicLayer, StaticLayer)) for place in places):
        return False
    # Of transformers 5: caches whose queries do not stand at the end of the keys.
    return getattr(type(past), "get_query_offset", None) is getattr(Cache, "get_query_offset", None)
