"""``patch_model``, ``unpatch_model`` and ``patch_report``: instance attributes and hooks, nothing global or saved."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from fused_rope_attn.integrations.transformers import attention, caches, families, obstacles, paged, rotations, state
from fused_rope_attn.integrations.transformers.batch import BATCH, Batch, Kept, describe
from fused_rope_attn.integrations.transformers.families import Convention
from fused_rope_attn.integrations.transformers.shards import PLAN, check_labels, describe_shard, shards_of

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
    shards = shards_of(cp_group, cp_sharding)
    found = {path: module for path, module in model.named_modules() if families.looks_like_attention(module)}
    conventions = {path: families.convention_of(module) for path, module in found.items()}
    supported = {path: found[path] for path, convention in conventions.items() if convention is not None}
    if not supported or unsupported == "raise" and len(supported) < len(found):
        raise NotImplementedError(_refusal(model, found, supported))
    if (batch_invariant or cp_group is not None) and any(c is not None and c.latent for c in conventions.values()):
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
        if state.state_of(decoder, state.DECODER) is None:
            decoder.register_forward_pre_hook(describe_batch, with_kwargs=True)
        others = sum(families.looks_like_attention(module) for module in decoder.modules()) > len(modules)
        kinds = set(getattr(decoder.config, "layer_types", None) or ())
        others = others or not kinds <= _ATTENTION_LAYERS or families.hands_padding_on(decoder)
        names, own_cache = state.names_of_parameters(decoder), caches.own_cache_of(decoder)
        setattr(decoder, state.DECODER, state.Decoder(names, modules, others, shards, own_cache))
    for module in list(model.modules()):
        _remove_hooks(module, check_labels)
        if not isinstance(module, PreTrainedModel) or (decoder := decoder_in(module)[0]) is None:
            continue
        if _rule_of(module) is not None:
            if state.state_of(module, state.MASK_MAKER) is None:
                module.register_forward_pre_hook(describe_before_masks, with_kwargs=True)
            setattr(module, state.MASK_MAKER, state.MaskMaker(state.names_of_parameters(module), decoder))
        for method in (Preparation, paged.Serving):
            method.install(module)
        if shards is not None and "labels" in state.names_of_parameters(module):
            module.register_forward_pre_hook(check_labels, with_kwargs=True)
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
        patch = state.state_of(module, state.PATCH)
        if patch is not None:
            slot = _slot(module)
            if _is_fused(module.__dict__.get(slot)):
                _restore(module, slot, patch.previous)
            delattr(module, state.PATCH)
        for method in (Preparation, paged.Serving):
            current = module.__dict__.get(method.name)
            if isinstance(current, method):
                _restore(module, method.name, current.previous)
        paged.forget_kept_manager(module)
        for kind, ours in ((state.DECODER, describe_batch), (state.MASK_MAKER, describe_before_masks)):
            if state.state_of(module, kind) is not None:
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
    state.check_model(model)
    return any(state.state_of(module, state.PATCH) is not None for module in model.modules())


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
    module: nn.Module, convention: Convention, deterministic: bool, batch_invariant: bool, shards: state.Shards | None
) -> None:
    slot = _slot(module)
    present, patch = module.__dict__.get(slot), state.state_of(module, state.PATCH)
    if patch is None:
        patch = state.Patch(convention, present, deterministic, batch_invariant)
        setattr(module, state.PATCH, patch)
    elif not _is_fused(present):  # the forward was replaced after the last patch
        patch.previous = present
    patch.own_forward = _foreign_forward(module, patch.previous)
    patch.hands_positions_on = families.hands_positions_on(type(module))
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


def _decoder_around(model: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost PreTrainedModel around the module at a path, or None."""
    module, nearest = model, model if isinstance(model, PreTrainedModel) else None
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        nearest = module if isinstance(module, PreTrainedModel) else nearest
    return nearest


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
    known: state.Decoder = getattr(decoder, state.DECODER)
    given = dict(zip(known.names, args)) | kwargs
    batch = given.get(BATCH)
    if known.shards is not None:
        if batch is None:
            shared = describe_shard(known.attentions, decoder.config, given, known.shards)
            kept = None if torch.compiler.is_compiling() else Kept()
            batch = Batch(shared=shared, causal=shared.causal, kept=kept)
        given.pop(PLAN, None)
        # A cache would hold this rank's shard only, so make none.
        return (), given | {BATCH: batch, "attention_mask": _no_mask(given), "use_cache": False}
    if given.get(PLAN) is not None:
        raise ValueError(f"{PLAN} must be given to a model whose ranks patch_model knows, but this one has no cp_group")
    if batch is None:
        batch = describe(known.attentions, decoder.config, given)
        if not batch.original and known.own_cache and _makes_cache(decoder, given):
            batch = Batch(f"a cache of type {known.own_cache}, which the decoder makes,")
    if batch.original:
        paged.refuse_what_lacks_masks(decoder.config, given, batch.original)
        state.warn_of(known.passes, batch.original)
        return args, kwargs | {BATCH: batch}
    if known.reads_masks:
        return args, kwargs | {BATCH: batch}
    return (), given | {BATCH: batch, "attention_mask": _no_mask(given)}


def _makes_cache(decoder: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether a decoder makes a cache in a call, because it is given none and asked to use one."""
    wanted = given.get("use_cache")
    config: Any = decoder.config
    return caches.cache_of(given) is None and bool(getattr(config, "use_cache", False) if wanted is None else wanted)


def describe_before_masks(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Add the decoder's Batch to a model's keywords. A forward pre-hook of models that make their decoder's masks.

    Such a decoder gets the masks only. If they may be other than causal, leave them to its own hook.
    """
    maker: state.MaskMaker = getattr(model, state.MASK_MAKER)
    given = dict(zip(maker.names, args)) | kwargs
    if given.get(BATCH) is not None or _sees_later_tokens(model, given):
        return args, kwargs
    decoder = maker.decoder
    wanted = given.get("output_attentions")
    if wanted is None:  # with transformers 4.57 the model's config decides, with 5 the decoder's
        wanted = any(getattr(config, "output_attentions", False) for config in (model.config, decoder.config))
    batch = _describe_before_masks(decoder, given | {"output_attentions": wanted})
    if batch.original or getattr(decoder, state.DECODER).reads_masks:
        return args, kwargs | {BATCH: batch}
    return (), given | {BATCH: batch, "attention_mask": _no_mask(given)}


def _rule_of(model: nn.Module) -> Callable[[nn.Module, dict[str, Any]], bool] | None:
    """Return a model's entry of _MASK_MAKERS; None if its class lacks one, or has another forward."""
    own = type(model).forward
    names = (families.name_of(base) for base in type(model).__mro__ if vars(base).get("forward") is own)
    return next((_MASK_MAKERS[name] for name in names if name in _MASK_MAKERS), None)


def _sees_later_tokens(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether the masks that a model makes of its inputs may be other than causal."""
    rule = _rule_of(model)
    return rule is None or rule(model, given)


def _describe_before_masks(decoder: nn.Module, given: dict[str, Any]) -> Batch:
    """Return a decoder's Batch from the inputs from which ``generate``, or a model like Gemma 3's, makes its masks.

    Those masks are causal even if the modules are not.
    """
    attentions = getattr(decoder, state.DECODER).attentions
    if not obstacles.is_causal(attentions, decoder.config, given):
        return Batch("bidirectional attention with masks that are made outside of the decoder")
    return describe(attentions, decoder.config, given, made=True)


def _no_mask(given: dict[str, Any]) -> torch.Tensor:
    """Return (B, 1, 0, 0). transformers passes on a mask of four dimensions, and then builds no other."""
    tokens = obstacles.tokens_of(given)
    return torch.empty((tokens.shape[0], 1, 0, 0), dtype=torch.bool, device=tokens.device)


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
        if inputs.get("token_type_ids") is not None and (maker is None or _sees_later_tokens(maker, inputs)):
            return inputs
        return inputs | {BATCH: _describe_before_masks(decoder, inputs | {"attention_mask": given})}


def decoder_in(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return (the patched decoder in a model, the model around it that makes its masks); None for an absent one.

    The decoder is None too if there are several.
    """
    decoders, maker = [], None
    for module in model.modules():
        if state.state_of(module, state.DECODER) is not None:
            decoders.append(module)
        elif state.state_of(module, state.MASK_MAKER) is not None:
            maker = module
    return decoders[0] if len(decoders) == 1 else None, maker


_HEADER = ("module", "class", "patched", "norms", "calls served here", "calls of its own forward")


class ModuleReport(NamedTuple):
    """The report of one attention module.

    Attributes:
        path: within the model; "" if the model is the module.
        name: of its class.
        patched: whether ``rope_attention`` replaces its attention.
        reason: why it is not patched, or "".
        served: number of calls that ``rope_attention`` served since it was patched.
        own: number of calls that took the module's own forward since then, by reason.
        norms: of a patched module that norms each head of q and k before the rotation: ``"fused"`` if the kernels did
            so in the last served call, ``"its own"`` and the reason if the module's norms ran. Before the first call,
            the choice for the norms as they are now. "" without such norms.
    """

    path: str
    name: str
    patched: bool
    reason: str
    served: int
    own: dict[str, int]
    norms: str = ""


class PatchReport(tuple[ModuleReport, ...]):
    """A ModuleReport for every attention module of a model, in the model's order. It prints as a table.

    The table has one line for equal layers, for example ``model.layers.{0-31}.self_attn``, and a column of norms if a
    module has any.
    """

    def __str__(self) -> str:
        if not self:
            return "the model has no attention modules"
        alike: dict[tuple, list[ModuleReport]] = {}
        for row in self:
            # Layers are counted by the last number in a path.
            key = (re.sub(r"\d+(?=\D*$)", "{}", row.path), *row[1:5], row.norms, tuple(sorted(row.own.items())))
            alike.setdefault(key, []).append(row)
        table = [_HEADER, *(_line(rows) for rows in alike.values())]
        if not any(row.norms for row in self):
            table = [(*line[:3], *line[4:]) for line in table]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append("Calls in graphs of torch.compile and replays of CUDA graphs are not counted.")
        return "\n".join(lines)


def patch_report(model: nn.Module) -> PatchReport:
    """Report for every attention module of a model whether it is patched, which forward its calls took, and why.

    Args:
        model: patched or not.

    Returns:
        a tuple of ``ModuleReport``, which prints as a table.

    Raises:
        TypeError: model is not a module.
    """
    state.check_model(model)
    return PatchReport(_report(path, m) for path, m in model.named_modules() if families.looks_like_attention(m))


def _report(path: str, module: nn.Module) -> ModuleReport:
    patch: state.Patch | None = state.state_of(module, state.PATCH)
    if patch is not None:
        return ModuleReport(path, type(module).__name__, True, "", patch.served, dict(patch.own), _norms(module, patch))
    reason = "patch_model has not been called since the module came into the model"
    if families.convention_of(module) is None:
        reason = families.refusal(type(module))
    return ModuleReport(path, type(module).__name__, False, reason, 0, {})


def _norms(module: nn.Module, patch: state.Patch) -> str:
    """Return ``ModuleReport.norms``."""
    pair = patch.convention.norms_of(module)
    if pair is None:
        return ""
    # Prefer the last call's answer, because weights may look different then: FSDP2 gathers them for it.
    reason = patch.own_norms
    if reason is None:
        found = rotations.head_norms(*pair)
        reason = found if isinstance(found, str) else ""
    return f"its own: {reason}" if reason else "fused"


def _line(rows: list[ModuleReport]) -> tuple[str, ...]:
    """Return the line for modules that differ only in the last number of their paths."""
    row, path = rows[0], rows[0].path or "(model)"
    if len(rows) > 1:
        numbers = [int(re.findall(r"\d+(?=\D*$)", row.path)[0]) for row in rows]
        path = re.sub(r"\d+(?=\D*$)", "{" + _ranges(numbers) + "}", row.path)
    own = "; ".join(f"{count}: {reason}" for reason, count in row.own.items())
    patched = "yes" if row.patched else f"no: {row.reason}"
    return path, row.name, patched, row.norms or "none", str(row.served), own or "0"


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges, for example "0-3, 5"."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
