"""``patch_model`` and ``unpatch_model``: instance attributes and hooks, nothing global or saved."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from fused_rope_attn.integrations.transformers import attention, caches, families, obstacles, state
from fused_rope_attn.integrations.transformers.batch import BATCH, PLAN, Batch, describe, describe_shard
from fused_rope_attn.integrations.transformers.state import DECODER, MASK_MAKER, PATCH, state_of
from fused_rope_attn.runtime.device import has_gpu

Model = TypeVar("Model", bound=nn.Module)

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
    state.check_model(model)
    if unsupported not in ("raise", "skip"):
        raise ValueError(f"unsupported must be 'raise' or 'skip', but is {unsupported!r}")
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise TypeError(f"deterministic must be a bool or None, but is {type(deterministic).__name__}")
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool, but is {type(batch_invariant).__name__}")
    shards = state.shards_of(cp_group, cp_sharding)
    found = {path: module for path, module in model.named_modules() if families.looks_like_attention(module)}
    rows = {path: row for path, module in found.items() if (row := families.convention_of(module)) is not None}
    supported = {path: found[path] for path in rows}
    if not supported or unsupported == "raise" and len(supported) < len(found):
        raise NotImplementedError(_refusal(model, found, supported))
    if (batch_invariant or cp_group is not None) and any(convention.latent for convention in rows.values()):
        option = "batch_invariant=True" if batch_invariant else "cp_group"
        raise NotImplementedError(f"{option} is not served for models with multi-head latent attention")
    _check_release(list(supported.values()))
    owners = _decoders(model)
    decoders: dict[nn.Module, list[nn.Module]] = {}
    for path, module in supported.items():
        patch = _patch_of(module, rows[path])
        patch.deterministic, patch.batch_invariant, patch.shards = bool(deterministic), batch_invariant, shards
        if module in owners:
            decoders.setdefault(owners[module], []).append(module)
    for decoder, modules in decoders.items():
        if state_of(decoder, DECODER) is None:
            decoder.register_forward_pre_hook(describe_batch, with_kwargs=True)
        others = sum(families.looks_like_attention(module) for module in decoder.modules()) > len(modules)
        kinds = set(getattr(decoder.config, "layer_types", None) or ())
        others = others or not kinds <= _ATTENTION_LAYERS or families.hands_padding_on(decoder)
        names, own_cache = state.names_of_parameters(decoder), caches.own_cache_of(decoder)
        setattr(decoder, DECODER, state.Decoder(decoder, names, modules, others, shards, own_cache))
    for module in list(model.modules()):
        _remove_hooks(module, state.check_labels)  # of the last call
        if not isinstance(module, PreTrainedModel) or (inner := decoder_in(module)[0]) is None:
            continue
        if _rule_of(module) is not None:
            if state_of(module, MASK_MAKER) is None:
                module.register_forward_pre_hook(describe_before_masks, with_kwargs=True)
            names = state.names_of_parameters(module)
            setattr(module, MASK_MAKER, dataclasses.replace(getattr(inner, DECODER), names=names))
        for method in (Preparation, Serving):
            method.install(module)
        if shards is not None and "labels" in state.names_of_parameters(module):
            module.register_forward_pre_hook(state.check_labels, with_kwargs=True)
    return model


def unpatch_model(model: Model) -> Model:
    """Undo ``patch_model`` exactly. A model that is not patched stays as it is.

    Returns:
        the same model.

    Raises:
        TypeError: model is not a module.
    """
    state.check_model(model)
    for module in model.modules():
        patch, slot = state_of(module, PATCH), _slot(module)
        if patch is not None and _is_fused(module.__dict__.get(slot)):
            _restore(module, slot, patch.previous)
        for method in (Preparation, Serving):
            current = module.__dict__.get(method.name)
            if isinstance(current, method):
                _restore(module, method.name, current.previous)
        if getattr(getattr(module, _KEPT, None), _MARK, False):  # it relies on the model being patched
            cast(Any, module).destroy_cached_continuous_batching_manager()
        for kind in (PATCH, DECODER, MASK_MAKER):
            module.__dict__.pop(kind, None)
        _remove_hooks(module, describe_batch, describe_before_masks, state.check_labels)
    return model


def _remove_hooks(module: nn.Module, *ours: Callable) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in ours]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def is_patched(model: nn.Module) -> bool:
    """Return whether ``patch_model`` has replaced the attention of any module in a model.

    Raises:
        TypeError: model is not a module.
    """
    state.check_model(model)
    return any(state_of(module, PATCH) is not None for module in model.modules())


def _decoders(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the innermost PreTrainedModel around each module. ``modules`` has the outer ones before the inner."""
    outer = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return {module: decoder for decoder in outer for module in decoder.modules()}


def _check_release(attentions: list[nn.Module]) -> None:
    """Warn if transformers is newer than the releases that were read. Raise if it has another name for caches."""
    knows = f"patch_model knows transformers 4.57 to {families.NEWEST}, but transformers {transformers.__version__}"
    if not all(set(caches.CACHE_NAMES).intersection(state.names_of_parameters(module)) for module in attentions):
        raise NotImplementedError(f"{knows} passes caches by another name than {', '.join(caches.CACHE_NAMES)}")
    if Version(transformers.__version__).release[:2] > Version(families.NEWEST).release:
        warnings.warn(f"{knows} is installed: compare a pass with one of the unpatched model", stacklevel=3)


def _refusal(model: nn.Module, found: dict[str, nn.Module], supported: dict[str, nn.Module]) -> str:
    """Return why a model cannot be patched. found, supported: its attention modules by path."""
    if not found:
        return f"model must have attention modules of transformers, but {type(model).__name__} has none"
    others: dict[type, list[str]] = {}
    for path, module in found.items():
        if path not in supported:
            others.setdefault(type(module), []).append(path or "(model)")
    reasons = [f"{_first(paths)} ({cls.__name__}: {families.refusal(cls)})" for cls, paths in others.items()]
    if not supported:
        return f"model must have an attention module that patch_model can replace, but has only {_first(reasons)}"
    text = f"model must have no attention but what patch_model can replace, but has {_first(reasons)}"
    # Name the text decoders of a multimodal model.
    owners = _decoders(model)
    decoders = {owners[module] for module in supported.values() if module in owners}
    paths = [path for path, module in model.named_modules() if module in decoders]
    where = f" of {', '.join(paths)}" if paths and all(paths) else ""
    return (
        f"{text}: patch_model(model, unsupported='skip') leaves these alone and patches the {len(supported)} supported "
        f"modules{where}"
    )


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _patch_of(module: nn.Module, convention: families.Convention) -> state.Patch:
    """Replace the forward of a module, unless it is replaced, and return its Patch."""
    slot = _slot(module)
    present, patch = module.__dict__.get(slot), state_of(module, PATCH)
    if patch is None:
        patch = state.Patch(convention, present)
        setattr(module, PATCH, patch)
    if not _is_fused(present):  # new, or the forward was replaced after the last patch
        patch.previous = present
        # A partial function, because pickle stores a method in an instance's dict as its class's own.
        setattr(module, slot, functools.partial(attention.forward, module))
    patch.own_forward = _foreign_forward(module, patch.previous)
    patch.hands_positions_on = families.hands_positions_on(type(module))
    return patch


def _foreign_forward(module: nn.Module, previous: Any) -> str:
    """Return how an instance's previous forward differs from its class's; "" if it is the same or None."""
    function = previous
    if isinstance(function, functools.partial) and function.args == (module,) and not function.keywords:
        function = function.func
    elif isinstance(function, MethodType) and function.__self__ is module:
        function = function.__func__
    if previous is None or function is type(module).forward:
        return ""
    return f"an attention module whose forward was replaced by {families.described(previous)} before it was patched"


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


# Models that make the masks of their decoder, and functions that return whether these may be other than causal.
_MASK_MAKERS: dict[str, Callable[[nn.Module, dict[str, Any]], bool]] = {
    "gemma3.modeling_gemma3.Gemma3Model": obstacles.may_have_images,
    "paligemma.modeling_paligemma.PaliGemmaModel": obstacles.may_have_a_prefix,
}


def describe_batch(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Add the Batch to a decoder's keywords, for its attention modules. A forward pre-hook."""
    if getattr(decoder, "_is_replica", False):
        raise NotImplementedError(
            "a patched model was called by torch.nn.DataParallel, but all of its replicas would compute with the "
            "attention modules of the first: use torch.nn.parallel.DistributedDataParallel"
        )
    known: state.Decoder = getattr(decoder, DECODER)
    given = dict(zip(known.names, args)) | kwargs
    batch = given.get(BATCH)
    if known.shards is not None:
        if batch is None:
            batch = describe_shard(obstacles.Pass(known.attentions, decoder.config, given), known.shards)
        given.pop(PLAN, None)
        # A cache would hold this rank's shard only, so make none.
        return _without_mask(given | {"use_cache": False}, batch)
    if given.get(PLAN) is not None:
        raise ValueError(f"{PLAN} must be given to a model whose ranks patch_model knows, but this one has no cp_group")
    if batch is None:
        call = obstacles.Pass(known.attentions, decoder.config, given)
        batch, wanted = describe(call), given.get("use_cache")
        wanted = getattr(decoder.config, "use_cache", False) if wanted is None else wanted
        if not batch.original and known.own_cache and wanted and call.past is None:
            batch = Batch(f"a cache of type {known.own_cache}, which the decoder makes,")
    if batch.original:
        refuse_what_lacks_masks(decoder.config, given, batch.original)
        state.warn_of(known.passes, batch.original)
    if batch.original or known.reads_masks:
        return args, kwargs | {BATCH: batch}
    return _without_mask(given, batch)


def describe_before_masks(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Add the decoder's Batch to a model's keywords. A forward pre-hook of models that make their decoder's masks. Such
    a decoder gets the masks only. If they may be other than causal, leave them to its own hook."""
    known: state.Decoder = getattr(model, MASK_MAKER)
    given = dict(zip(known.names, args)) | kwargs
    rule = _rule_of(model)
    if given.get(BATCH) is not None or rule is None or rule(model, given):
        return args, kwargs
    config, wanted = known.module.config, given.get("output_attentions")
    if wanted is None:  # with transformers 4.57 the model's config decides, with 5 the decoder's
        wanted = any(getattr(x, "output_attentions", False) for x in (model.config, config))
    batch = describe(obstacles.Pass(known.attentions, config, given | {"output_attentions": wanted}), made=True)
    if batch.original or known.reads_masks:
        return args, kwargs | {BATCH: batch}
    return _without_mask(given, batch)


def _rule_of(model: nn.Module) -> Callable[[nn.Module, dict[str, Any]], bool] | None:
    """Return a model's entry of _MASK_MAKERS; None if its class lacks one, or has another forward."""
    own = type(model).forward
    names = (families.name_of(base) for base in type(model).__mro__ if vars(base).get("forward") is own)
    return next((_MASK_MAKERS[name] for name in names if name in _MASK_MAKERS), None)


def _without_mask(given: dict[str, Any], batch: Batch) -> tuple[tuple, dict]:
    """Return a model's arguments with a mask (B, 1, 0, 0): transformers builds no other from four dimensions."""
    tokens = obstacles.Pass([], None, given).tokens
    mask = torch.empty((tokens.shape[0], 1, 0, 0), dtype=torch.bool, device=tokens.device)
    return (), given | {BATCH: batch, "attention_mask": mask}


class Preparation(state.Method):
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
        if decoder is None or caches.cache_of(inputs) is None or not made:
            return inputs
        rule = None if maker is None else _rule_of(maker)
        if inputs.get("token_type_ids") is not None and (rule is None or rule(cast(nn.Module, maker), inputs)):
            return inputs
        call = obstacles.Pass(getattr(decoder, DECODER).attentions, decoder.config, inputs | {"attention_mask": given})
        return inputs | {BATCH: describe(call, made=True)}


def decoder_in(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return (the only patched decoder in a model, the model around it that makes its masks), or None for either."""
    decoders, maker = [], None
    for module in model.modules():
        if state_of(module, DECODER) is not None:
            decoders.append(module)
        elif state_of(module, MASK_MAKER) is not None:
            maker = module
    return decoders[0] if len(decoders) == 1 else None, maker


# Earlier managers had no page tables and no CUDA graphs, or different ones.
_KNOWN = Version(transformers.__version__) >= Version("5.17")
# Attributes of a manager that are replaced. A manager without them is of another version, and keeps its masks.
_ATTRIBUTES = ("_original_attn_impl", "_create_batch_processor")
# Attributes: the manager that a model keeps for its next batch, and the mark of a manager without masks.
_KEPT, _MARK = "_cached_continuous_batching_manager", "_fused_rope_pages"
# Pages of a request if no length is given: transformers' own default for flash-attention.
_PAGES_OF_A_REQUEST = 32


class Serving(state.Method):
    """``init_continuous_batching`` of a patched model: it returns a manager that builds no masks, if possible.

    For SDPA and eager attention a manager builds masks over all requests. For flash-attention it has page tables and
    CUDA graphs. The name of the config's implementation decides, so a patched model has a special one while it serves.
    """

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, config = self.own, cast(Any, self.model.config)
        before, kept = obstacles.implementation_of(config), getattr(self.model, _KEPT, None)
        made_with_masks = kept is not None and not getattr(kept, _MARK, False)
        if before == obstacles.PAGES or made_with_masks or not self._reads_pages(before):
            return own(*args, **kwargs)
        config._attn_implementation = obstacles.PAGES
        try:
            manager = own(*args, **kwargs)
        except BaseException:
            config._attn_implementation = before
            raise
        # The model's own attention runs in compiled passes.
        options = manager.continuous_batching_config
        compiles = options.varlen_compile_config is not None or options.decode_compile_config is not None
        if compiles or not all(hasattr(manager, name) for name in _ATTRIBUTES):
            config._attn_implementation = before
            return own(*args, **kwargs)
        manager._original_attn_impl = before  # the manager restores it when it stops
        if kept is None:
            setattr(manager, _MARK, True)
            create = functools.partial(_create_batch_processor, manager._create_batch_processor)
            manager._create_batch_processor = create
            self._give_tables(manager, *args, **kwargs)
        return manager

    def _reads_pages(self, implementation: str) -> bool:
        """Return whether every pass over a paged cache will be served, as far as it can be known before."""
        if not _KNOWN or implementation not in obstacles.MASKED:
            return False
        # Without masks a manager uses CUDA graphs if there is a GPU, even if the model is not on it.
        where: Any = self.model.device
        if has_gpu() and where.type != "cuda":
            return False
        decoders = [decoder for m in self.model.modules() if (decoder := state_of(m, DECODER)) is not None]
        if len(decoders) != 1 or decoders[0].reads_masks or decoders[0].shards is not None:
            return False
        if any(families.looks_like_attention(m) and state_of(m, PATCH) is None for m in self.model.modules()):
            return False
        config: Any = self.model.config
        return not obstacles.lasting_obstacle(decoders[0].attentions, config.get_text_config())

    def _give_tables(
        self,
        manager: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        **_: Any,
    ) -> None:
        """Ask for page tables in passes of single tokens. By itself a manager has them for flash-attention only."""
        patched = [module for module in self.model.modules() if state_of(module, PATCH) is not None]
        asked = getattr(continuous_batching_config, "max_blocks_per_request", None)
        config = manager.continuous_batching_config
        size = getattr(config, "page_size", None) or config.block_size
        if asked == 0 or size < caches.FEWEST_ROWS or any(map(obstacles.window_of, patched)):
            return
        hints = workload_hints
        longest = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
        pages = math.ceil(longest / size) + 1 if longest else _PAGES_OF_A_REQUEST
        config.max_blocks_per_request = asked or pages + pages % 2


def _create_batch_processor(own: Callable[[], Any]) -> Any:
    """Return the processor that a manager's ``own`` method makes; it continues without CUDA graphs if they fail."""
    processor = own()
    runner: Any = getattr(processor, "model_runner", None)
    if hasattr(runner, "_capture_graph") and "_capture_graph" not in runner.__dict__:
        runner._capture_graph = functools.partial(capture, runner, runner._capture_graph)
    return processor


def capture(runner: Any, own: Callable[..., None], forward: Callable[..., None], *args: Any) -> None:
    """Capture a graph by a runner's ``own`` method, or let the runner continue without graphs if that fails. With
    masks, managers use no graphs, and so serve models that synchronise, for example in their experts."""
    done = []

    def counted(*given: Any) -> None:
        forward(*given)
        done.append(given)

    try:
        own(counted, *args)
    except Exception as error:
        if not done:  # the pass itself failed, in its run before the capture
            raise
        runner.use_cuda_graph_varlen = runner.use_cuda_graph_decode = False
        message = f"continuous batching: CUDA graphs of this model cannot be captured ({error}); it runs without them"
        warnings.warn(message, stacklevel=2)


def refuse_what_lacks_masks(config: Any, given: dict[str, Any], reason: str) -> None:
    """Raise if a pass needs the modules' own forward for a reason, but its manager made no masks. given: the arguments
    of the decoder's forward by name."""
    implementation = obstacles.implementation_of(config)
    unmasked = caches.is_paged(caches.cache_of(given)) and given.get("attention_mask") is None
    if implementation == obstacles.PAGES or unmasked and implementation in obstacles.MASKED:
        raise NotImplementedError(
            f"{reason} is not served by the fused kernels, and this continuous batching was begun without the "
            "masks of the model's own attention: call unpatch_model(model) before it begins"
        )
