"""Hooks that describe each forward pass of a patched model for its attention modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fused_rope_attn.integrations.transformers.attention import BATCH
from fused_rope_attn.integrations.transformers.batch import Batch, Kept, describe
from fused_rope_attn.integrations.transformers.caches import cache_of
from fused_rope_attn.integrations.transformers.families import name_of
from fused_rope_attn.integrations.transformers.obstacles import is_causal, may_have_a_prefix, may_have_images
from fused_rope_attn.integrations.transformers.serving import refuse_what_lacks_masks
from fused_rope_attn.integrations.transformers.shards import PLAN, describe_shard
from fused_rope_attn.integrations.transformers.state import (
    DECODER,
    MASK_MAKER,
    Decoder,
    MaskMaker,
    Method,
    state_of,
    warn_of,
)

# Models that make the masks of their decoder, and functions that return whether these may be other than causal.
_MASK_MAKERS: dict[str, Callable[[nn.Module, dict[str, Any]], bool]] = {
    "gemma3.modeling_gemma3.Gemma3Model": may_have_images,
    "paligemma.modeling_paligemma.PaliGemmaModel": may_have_a_prefix,
}


def describe_batch(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Add the Batch to a decoder's keywords, for its attention modules. A forward pre-hook."""
    if getattr(decoder, "_is_replica", False):
        raise NotImplementedError(
            "a patched model was called by torch.nn.DataParallel, but all of its replicas would compute with the "
            "attention modules of the first: use torch.nn.parallel.DistributedDataParallel"
        )
    state: Decoder = getattr(decoder, DECODER)
    given = dict(zip(state.names, args)) | kwargs
    batch = given.get(BATCH)
    if state.shards is not None:
        if batch is None:
            shared = describe_shard(state.attentions, decoder.config, given, state.shards)
            kept = None if torch.compiler.is_compiling() else Kept()
            batch = Batch(shared=shared, causal=shared.causal, kept=kept)
        given.pop(PLAN, None)
        # A cache would hold this rank's shard only, so make none.
        return (), given | {BATCH: batch, "attention_mask": _no_mask(given), "use_cache": False}
    if given.get(PLAN) is not None:
        raise ValueError(f"{PLAN} must be given to a model whose ranks patch_model knows, but this one has no cp_group")
    if batch is None:
        batch = describe(state.attentions, decoder.config, given)
        if not batch.original and state.own_cache and _makes_cache(decoder, given):
            batch = Batch(f"a cache of type {state.own_cache}, which the decoder makes,")
    if batch.original:
        refuse_what_lacks_masks(decoder.config, given, batch)
        warn_of(state.passes, batch.original)
        return args, kwargs | {BATCH: batch}
    if state.reads_masks:
        return args, kwargs | {BATCH: batch}
    return (), given | {BATCH: batch, "attention_mask": _no_mask(given)}


def _makes_cache(decoder: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether a decoder makes a cache in a call, because it is given none and asked to use one."""
    wanted = given.get("use_cache")
    config: Any = decoder.config
    return cache_of(given) is None and bool(getattr(config, "use_cache", False) if wanted is None else wanted)


def describe_before_masks(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Add the decoder's Batch to a model's keywords. A forward pre-hook of models that make their decoder's masks.

    Such a decoder gets the masks only. If they may be other than causal, leave them to its own hook.
    """
    maker: MaskMaker = getattr(model, MASK_MAKER)
    given = dict(zip(maker.names, args)) | kwargs
    if given.get(BATCH) is not None or _sees_later_tokens(model, given):
        return args, kwargs
    decoder = maker.decoder
    wanted = given.get("output_attentions")
    if wanted is None:  # with transformers 4.57 the model's config decides, with 5 the decoder's
        wanted = any(getattr(config, "output_attentions", False) for config in (model.config, decoder.config))
    batch = _describe_before_masks(decoder, given | {"output_attentions": wanted})
    if batch.original or getattr(decoder, DECODER).reads_masks:
        return args, kwargs | {BATCH: batch}
    return (), given | {BATCH: batch, "attention_mask": _no_mask(given)}


def makes_masks(model: nn.Module) -> bool:
    """Return whether a model makes its decoder's masks in a way that ``describe_before_masks`` knows."""
    return _rule_of(model) is not None


def _rule_of(model: nn.Module) -> Callable[[nn.Module, dict[str, Any]], bool] | None:
    """Return a model's entry of _MASK_MAKERS; None if its class lacks one, or has another forward."""
    own = type(model).forward
    bases = (base for base in type(model).__mro__ if name_of(base) in _MASK_MAKERS and vars(base)["forward"] is own)
    return next((_MASK_MAKERS[name_of(base)] for base in bases), None)


def _sees_later_tokens(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether the masks that a model makes of its inputs may be other than causal."""
    rule = _rule_of(model)
    return rule is None or rule(model, given)


def _describe_before_masks(decoder: nn.Module, given: dict[str, Any]) -> Batch:
    """Return a decoder's Batch from the inputs from which ``generate``, or a model like Gemma 3's, makes its masks.

    Those masks are causal even if the modules are not.
    """
    attentions = getattr(decoder, DECODER).attentions
    if not is_causal(attentions, decoder.config, given):
        return Batch("bidirectional attention with masks that are made outside of the decoder")
    return describe(attentions, decoder.config, given, made=True)


def _no_mask(given: dict[str, Any]) -> torch.Tensor:
    """Return (B, 1, 0, 0). transformers passes on a mask of four dimensions, and then builds no other."""
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    return torch.empty((tokens.shape[0], 1, 0, 0), dtype=torch.bool, device=tokens.device)


class Preparation(Method):
    """``prepare_inputs_for_generation`` of a patched model: it adds the Batch of the step to the method's result."""

    name = "prepare_inputs_for_generation"

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own signature, which ``generate`` reads to check its arguments."""
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self.own(*args, **kwargs)
        given, mask = kwargs.get("attention_mask"), inputs.get("attention_mask")
        decoder, maker = decoder_in(self.model)
        # With a static cache the method replaces the 2-D mask by one of four dimensions, which cannot be described.
        made = mask is not given and (given is None or getattr(given, "ndim", 0) == 2)
        if decoder is None or cache_of(inputs) is None or not made:
            return inputs
        if inputs.get("token_type_ids") is not None and (maker is None or _sees_later_tokens(maker, inputs)):
            return inputs
        return inputs | {BATCH: _describe_before_masks(decoder, inputs | {"attention_mask": given})}


def decoder_in(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return (the patched decoder in a model, the model around it that makes its masks); None for an absent one.

    The decoder is None too if there are several.
    """
    decoders, maker = [], None
    for module in model.modules():
        if state_of(module, DECODER) is not None:
            decoders.append(module)
        elif state_of(module, MASK_MAKER) is not None:
            maker = module
    return decoders[0] if len(decoders) == 1 else None, maker
