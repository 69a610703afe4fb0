"""``patch_model`` and ``unpatch_model``: instance attributes and hooks, nothing global, nothing in a state dict."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from fused_rope_attn.integrations.transformers import attention
from fused_rope_attn.integrations.transformers.caches import CACHE_NAMES, own_cache_of
from fused_rope_attn.integrations.transformers.conventions import Convention
from fused_rope_attn.integrations.transformers.families import (
    NEWEST,
    convention_of,
    described,
    hands_padding_on,
    hands_positions_on,
    looks_like_attention,
    refusal,
)
from fused_rope_attn.integrations.transformers.hooks import (
    Preparation,
    decoder_in,
    describe_batch,
    describe_before_masks,
    makes_masks,
)
from fused_rope_attn.integrations.transformers.serving import Serving, forget_kept_manager
from fused_rope_attn.integrations.transformers.shards import Shards, check_labels, shards_of
from fused_rope_attn.integrations.transformers.state import (
    DECODER,
    MASK_MAKER,
    PATCH,
    Decoder,
    MaskMaker,
    Method,
    Patch,
    check_model,
    names_of_parameters,
    state_of,
)

Model = TypeVar("Model", bound=nn.Module)

_METHODS: tuple[type[Method], ...] = (Preparation, Serving)
# Types of layers (`config.layer_types`) that are attention and read no other mask than attention does.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def patch_model(
    model: Model,
    *,
    unsupported: Literal["raise", "skip"] = "raise",
    deterministic: bool | None = None,
    cp_group: Any = None,
    cp_sharding: str = "zigzag",
    batch_invariant: bool = False,
) -> Model:
    """Replace the attention of a loaded transformers model by ``rope_attention``, in place, for this model only.

    Training, prefill and generation compute what they did before, up to rounding; ``unpatch_model`` undoes it. Weights,
    projections, norms and every other module stay as they are, so that Liger's patches, LoRA, gradient checkpointing,
    FSDP2, torch.compile, Trainer, save_pretrained and pickling work as before. Patch after loading: a model made by
    ``from_pretrained`` is unpatched. A model that is patched already stays so, with the options of the last call.

    Norms of each head of q and k before the rotation (Qwen 3, Gemma 3) are computed by the kernels, with gradients of
    their weights, where they are plain root-mean-square norms; others, and those with hooks, run as they are.

    Bidirectional models (``config.is_causal = False``) are served too. Calls that the kernels do not serve take the
    module's own forward, with a warning that gives the reason: attention weights (``output_attentions``), attention
    dropout in training, padding masks with holes, caches of unknown types, and attention functions that a user or a
    library has registered with ``AttentionInterface``. ``patch_report`` counts those calls. Outputs of padding tokens
    are unspecified, as they are in transformers.

    A mask of four dimensions (eager attention and SDPA) is served if the queries that see a key are next to one another
    for every key, and no tokens are cached before. That is found out once for all layers, by a synchronisation with the
    device. Gemma 3 and PaliGemma make such masks for the tokens of images and for prompts, which see each other in both
    directions.

    Continuous batching (``generate_batch``) is served. Managers that are made while the model is patched rely on it
    (transformers 5.17 and later): they build no masks, and unpatching the model destroys the one that it keeps.

    In a vision model ``unsupported="skip"`` patches the language model only.

    Args:
        model: a model of transformers, or a module that contains one (PEFT, torch.compile). ``families.SUPPORTED``
            lists the attention modules that are supported.
        unsupported: ``"raise"`` where the model has an attention module that is not supported (the vision tower of a
            multimodal model, for example), or ``"skip"``: such modules are left alone, and all others patched.
        deterministic: True for gradients that are bitwise equal from run to run, as ``rope_attention`` gives them with
            ``deterministic=True``. Otherwise ``torch.use_deterministic_algorithms`` decides.
        cp_group: a ProcessGroup or a DeviceMesh of one dimension whose ranks share every sequence: each passes its
            shard of ``input_ids`` and of ``position_ids``, which are required, and ``shift_labels`` with ``labels``, as
            ``cp_shard`` and ``cp_shift_labels`` of ``fused_rope_attn.distributed`` cut them. Position ids that restart
            are packed documents. Padding masks and caches are refused, and so are all calls that need the module's own
            forward, because it would attend to this rank's shard only.
        cp_sharding: as ``sharding`` in ``cp_shard``. A batch that is cut by its documents brings their plan, which
            ``plan_varlen_cp(..., sharding="balanced")`` makes, as one more argument of the forward pass, ``cp_plan``.
        batch_invariant: True for attention with the same bits in training, prefill and generation, whatever else is in
            the batch, as ``rope_attention`` gives them with ``batch_invariant=True``. The model's matrix products and
            norms of layers are not in our hands.

    Returns:
        the same model.

    Raises:
        TypeError: model is not a module, deterministic or batch_invariant not a bool, or cp_group no group.
        ValueError: unsupported is neither of the two, cp_sharding no sharding of these ranks, or cp_group has several
            dimensions.
        NotImplementedError: there is no attention module that is supported, or, with ``"raise"``, one that is not, or
            transformers has a new name for the argument of a cache, or batch_invariant or cp_group is given for
            multi-head latent attention; nothing has been changed then.
    """
    check_model(model)
    if unsupported not in ("raise", "skip"):
        raise ValueError(f"unsupported must be 'raise' or 'skip', but is {unsupported!r}")
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise TypeError(f"deterministic must be a bool or None, but is {type(deterministic).__name__}")
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool, but is {type(batch_invariant).__name__}")
    shards = shards_of(cp_group, cp_sharding)
    found = {path: module for path, module in model.named_modules() if looks_like_attention(module)}
    conventions = {path: convention_of(module) for path, module in found.items()}
    supported = {path: found[path] for path, convention in conventions.items() if convention is not None}
    if not supported or unsupported == "raise" and len(supported) < len(found):
        raise NotImplementedError(_refusal(model, found, supported))
    if (batch_invariant or cp_group is not None) and any(
        c is not None and c.latent is not None for c in conventions.values()
    ):
        option = "batch_invariant=True" if batch_invariant else "cp_group"
        raise NotImplementedError(f"{option} is not served for models with multi-head latent attention")
    _check_release(list(supported.values()))
    decoders: dict[nn.Module, list[nn.Module]] = {}
    for path, module in supported.items():
        _patch_module(module, cast(Convention, conventions[path]), bool(deterministic), batch_invariant, shards)
        decoder = _decoder_around(model, path)
        if decoder is not None:
            decoders.setdefault(decoder, []).append(module)
    for decoder, modules in decoders.items():
        if state_of(decoder, DECODER) is None:
            decoder.register_forward_pre_hook(describe_batch, with_kwargs=True)
        others = sum(looks_like_attention(module) for module in decoder.modules()) > len(modules)
        kinds = set(getattr(decoder.config, "layer_types", None) or ())
        others = others or not kinds <= _ATTENTION_LAYERS or hands_padding_on(decoder)
        setattr(decoder, DECODER, Decoder(names_of_parameters(decoder), modules, others, shards, own_cache_of(decoder)))
    for module in list(model.modules()):
        _remove_hooks(module, check_labels)
        if not isinstance(module, PreTrainedModel) or (decoder := decoder_in(module)[0]) is None:
            continue
        if makes_masks(module):
            if state_of(module, MASK_MAKER) is None:
                module.register_forward_pre_hook(describe_before_masks, with_kwargs=True)
            setattr(module, MASK_MAKER, MaskMaker(names_of_parameters(module), decoder))
        for method in _METHODS:
            method.install(module)
        if shards is not None and "labels" in names_of_parameters(module):
            module.register_forward_pre_hook(check_labels, with_kwargs=True)
    return model


def unpatch_model(model: Model) -> Model:
    """Undo ``patch_model`` exactly. A model that is not patched stays as it is.

    Returns:
        the same model.

    Raises:
        TypeError: model is not a module.
    """
    check_model(model)
    for module in model.modules():
        patch = state_of(module, PATCH)
        if patch is not None:
            slot = _slot(module)
            if _is_fused(module.__dict__.get(slot)):
                _restore(module, slot, patch.previous)
            delattr(module, PATCH)
        for method in _METHODS:
            current = module.__dict__.get(method.name)
            if isinstance(current, method):
                _restore(module, method.name, current.previous)
        forget_kept_manager(module)
        for kind, ours in ((DECODER, describe_batch), (MASK_MAKER, describe_before_masks)):
            if state_of(module, kind) is not None:
                delattr(module, kind)
                _remove_hooks(module, ours)
        _remove_hooks(module, check_labels)
    return model


def _remove_hooks(module: nn.Module, ours: Callable) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is ours]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def is_patched(model: nn.Module) -> bool:
    """Return whether ``patch_model`` has replaced the attention of any module in a model.

    Raises:
        TypeError: model is not a module.
    """
    check_model(model)
    return any(state_of(module, PATCH) is not None for module in model.modules())


def _check_release(attentions: list[nn.Module]) -> None:
    """Warn if transformers is newer than the releases that were read. Raise if it has another name for caches."""
    knows = f"patch_model knows transformers 4.57 to {NEWEST}, but transformers {transformers.__version__}"
    if not all(set(CACHE_NAMES).intersection(names_of_parameters(module)) for module in attentions):
        raise NotImplementedError(f"{knows} passes caches by another name than {', '.join(CACHE_NAMES)}")
    if Version(transformers.__version__).release[:2] > Version(NEWEST).release:
        warnings.warn(f"{knows} is installed: compare a pass with one of the unpatched model", stacklevel=3)


def _refusal(model: nn.Module, found: dict[str, nn.Module], supported: dict[str, nn.Module]) -> str:
    """Return why a model cannot be patched. found, supported: its attention modules by path."""
    if not found:
        return f"model must have attention modules of transformers, but {type(model).__name__} has none"
    others: dict[type, list[str]] = {}
    for path, module in found.items():
        if path not in supported:
            others.setdefault(type(module), []).append(path or "(model)")
    reasons = [f"{_first(paths)} ({cls.__name__}: {refusal(cls)})" for cls, paths in others.items()]
    if not supported:
        return f"model must have an attention module that patch_model can replace, but has only {_first(reasons)}"
    text = f"model must have no attention but what patch_model can replace, but has {_first(reasons)}"
    # Name the text decoders of a multimodal model.
    decoders = {id(decoder): decoder for path in supported if (decoder := _decoder_around(model, path)) is not None}
    paths = [path for path, module in model.named_modules() if id(module) in decoders]
    where = f" of {', '.join(paths)}" if paths and all(paths) else ""
    return (
        f"{text}: patch_model(model, unsupported='skip') leaves these alone and patches the {len(supported)} supported "
        f"modules{where}"
    )


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _patch_module(
    module: nn.Module, convention: Convention, deterministic: bool, batch_invariant: bool, shards: Shards | None
) -> None:
    slot = _slot(module)
    present, patch = module.__dict__.get(slot), state_of(module, PATCH)
    if patch is None:
        patch = Patch(convention, present, deterministic, batch_invariant)
        setattr(module, PATCH, patch)
    elif not _is_fused(present):  # the forward was replaced after the last patch
        patch.previous = present
    patch.own_forward = _foreign_forward(module, patch.previous)
    patch.hands_positions_on = hands_positions_on(type(module))
    patch.deterministic, patch.batch_invariant, patch.shards = deterministic, batch_invariant, shards
    if not _is_fused(present):
        # A partial function, because pickle stores a method in an instance's dict as its class's own.
        setattr(module, slot, functools.partial(attention.forward, module))


def _foreign_forward(module: nn.Module, previous: Any) -> str:
    """Return how an instance's previous forward differs from its class's; "" if it is the same or None."""
    function = previous
    if isinstance(function, functools.partial) and function.args == (module,) and not function.keywords:
        function = function.func
    elif isinstance(function, MethodType) and function.__self__ is module:
        function = function.__func__
    if previous is None or function is type(module).forward:
        return ""
    return f"an attention module whose forward was replaced by {described(previous)} before it was patched"


def _is_fused(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is attention.forward


def _slot(module: nn.Module) -> str:
    """Return the attribute that is the module's forward: accelerate's hooks wrap it and rename the original."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _restore(module: nn.Module, slot: str, previous: Callable | None) -> None:
    if previous is not None:
        setattr(module, slot, previous)
    elif slot == "_old_forward":  # accelerate added its hook after the patch, and still needs a forward
        setattr(module, slot, type(module).forward.__get__(module))
    else:
        delattr(module, slot)


def _decoder_around(model: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost PreTrainedModel around the module at a path, or None."""
    module, nearest = model, model if isinstance(model, PreTrainedModel) else None
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        nearest = module if isinstance(module, PreTrainedModel) else nearest
    return nearest
