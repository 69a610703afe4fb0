"""``patch_model`` and ``unpatch_model``: instance attributes and a hook, nothing global, nothing in a state dict."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fused_rope_attn.integrations.transformers import attention
from fused_rope_attn.integrations.transformers.attention import BATCH, PREVIOUS
from fused_rope_attn.integrations.transformers.batch import describe, say_once
from fused_rope_attn.integrations.transformers.families import SUPPORTED, convention_of, looks_like_attention

_STATE = "_fused_rope"
_PREPARE = "prepare_inputs_for_generation"
_PREPARE_PREVIOUS = "_fused_rope_previous_prepare"


class _State:
    """Of a patched decoder: its forward's parameters, its attention modules, and what has been said about it."""

    def __init__(self, decoder: nn.Module, attentions: list[nn.Module]):
        self.names = [name for name in inspect.signature(type(decoder).forward).parameters if name != "self"]
        self.attentions = attentions
        self.said: set[str] = set()


def patch_model(model: nn.Module) -> nn.Module:
    """Replace the attention of a loaded transformers model by ``rope_attention``, in place, for this model only.

    Training, prefill and generation compute what they did before, up to rounding; ``unpatch_model`` undoes it. Weights,
    projections, norms and every other module stay as they are, so that Liger's patches, LoRA, gradient checkpointing,
    torch.compile, Trainer and save_pretrained work as before. Patch after loading: a model made by ``from_pretrained``
    is unpatched. A model that is patched already stays so.

    What the kernels do not serve takes the module's own forward, with one warning for each reason: attention weights
    (``output_attentions``), attention dropout in training, 4-D and punctured attention masks, caches of unknown types.
    Outputs of padding tokens are unspecified, as they are in transformers.

    Args:
        model: a model of transformers, or a module that contains one (PEFT, torch.compile), whose attention modules are
            all supported: see ``families.SUPPORTED``.

    Returns:
        the same model.

    Raises:
        TypeError: model is not a module.
        NotImplementedError: an attention module is not supported, or there is none; nothing has been changed then.
    """
    _check(model)
    found = {path: module for path, module in model.named_modules() if looks_like_attention(module)}
    unsupported = [f"{path or '(model)'} ({type(m).__name__})" for path, m in found.items() if not convention_of(m)]
    names = ", ".join(name.rpartition(".")[2] for name in SUPPORTED)
    if unsupported:
        more = f" and {len(unsupported) - 3} more" if len(unsupported) > 3 else ""
        raise NotImplementedError(
            f"model must have supported attention modules only ({names}), but has {', '.join(unsupported[:3])}{more}"
        )
    if not found:
        raise NotImplementedError(
            f"model must have attention modules of transformers ({names}), but {type(model).__name__} has none"
        )
    decoders: dict[nn.Module, list[nn.Module]] = {}
    for path, module in found.items():
        _set(module, _slot(module), PREVIOUS, types.MethodType(attention.forward, module))
        decoder = _nearest(model, path, PreTrainedModel)
        if decoder is not None:
            decoders.setdefault(decoder, []).append(module)
    for decoder, modules in decoders.items():
        if _STATE not in decoder.__dict__:
            setattr(decoder, _STATE, _State(decoder, modules))
            decoder.register_forward_pre_hook(_describe_batch, with_kwargs=True)
    for module in list(model.modules()):
        if hasattr(type(module), _PREPARE) and isinstance(module, PreTrainedModel) and _decoder_in(module) is not None:
            _set(module, _PREPARE, _PREPARE_PREVIOUS, _prepare_method(module))
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo ``patch_model``: every method is the one that it was. A model that is not patched stays as it is.

    Returns:
        the same model.

    Raises:
        TypeError: model is not a module.
    """
    _check(model)
    for module in model.modules():
        for slot in ("forward", "_old_forward"):
            method = module.__dict__.get(slot)
            if getattr(method, "__func__", None) is attention.forward:
                _restore(module, slot, PREVIOUS)
        if getattr(module.__dict__.get(_PREPARE), "__func__", None) in _PREPARERS:
            _restore(module, _PREPARE, _PREPARE_PREVIOUS)
        if module.__dict__.pop(_STATE, None) is not None:
            for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _describe_batch]:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")


def _slot(module: nn.Module) -> str:
    """The attribute that is the module's forward: accelerate's hooks wrap it and keep it under another name."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _set(module: nn.Module, slot: str, keep: str, method: types.MethodType) -> None:
    present = module.__dict__.get(slot)
    if getattr(present, "__func__", None) is method.__func__:
        return
    if present is not None:
        setattr(module, keep, present)
    setattr(module, slot, method)


def _restore(module: nn.Module, slot: str, kept: str) -> None:
    previous = module.__dict__.pop(kept, None)
    if previous is not None:
        setattr(module, slot, previous)
    elif slot == "_old_forward":  # accelerate's hook came after the patch and needs something to call
        setattr(module, slot, type(module).forward.__get__(module))
    else:
        delattr(module, slot)


def _nearest(model: nn.Module, path: str, kind: type) -> nn.Module | None:
    """The innermost module of a kind on the way from the model to one of its modules."""
    module, nearest = model, model if isinstance(model, kind) else None
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        nearest = module if isinstance(module, kind) else nearest
    return nearest


def _decoder_in(model: nn.Module) -> nn.Module | None:
    """The patched decoder that a model consists of; None where there is none or more than one."""
    decoders = [module for module in model.modules() if _STATE in module.__dict__]
    return decoders[0] if len(decoders) == 1 else None


def _describe_batch(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of a decoder: its Batch as one more keyword, for the attention modules to find."""
    state: _State = getattr(decoder, _STATE)
    given = dict(zip(state.names, args)) | kwargs
    batch = given.get(BATCH)
    if batch is None:
        batch = describe(state.attentions, decoder.config, given)
    if batch.original:
        say_once(state.said, batch.original)
        return args, kwargs | {BATCH: batch}
    # A mask of four dimensions is handed on as it is: none is built that nobody reads.
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    mask = torch.empty((tokens.shape[0], 1, 0, 0), dtype=torch.bool, device=tokens.device)
    return (), given | {BATCH: batch, "attention_mask": mask}


# Functions that `_prepare_method` made, by the class whose method they wrap: `unpatch_model` knows them by identity.
@functools.cache
def _prepare_function(cls: type) -> Callable[..., dict[str, Any]]:
    own = getattr(cls, _PREPARE)

    @functools.wraps(own)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        previous = self.__dict__.get(_PREPARE_PREVIOUS)
        inputs = own(self, *args, **kwargs) if previous is None else previous(*args, **kwargs)
        given, mask = kwargs.get("attention_mask"), inputs.get("attention_mask")
        past = inputs.get("past_key_values")
        decoder = _decoder_in(self)
        # With a static cache the mask is replaced by one of four dimensions, which no longer says what it is made of.
        made = mask is not given and (given is None or getattr(given, "ndim", 0) == 2)
        if decoder is None or past is None or not made or inputs.get("token_type_ids") is not None:
            return inputs
        state: _State = getattr(decoder, _STATE)
        return inputs | {BATCH: describe(state.attentions, decoder.config, inputs | {"attention_mask": given})}

    _PREPARERS.add(prepare_inputs_for_generation)
    return prepare_inputs_for_generation


_PREPARERS: set = set()


def _prepare_method(module: nn.Module) -> types.MethodType:
    cls: type = type(module)
    return types.MethodType(_prepare_function(cls), module)
