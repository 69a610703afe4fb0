"""Reasons why a forward pass takes the modules' own attention, or is refused, as far as the host can know them."""

import functools
import sys
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils, modeling_utils

from fused_rope_attn.attention.planning import LATENT_DIM_STEP, MAX_LATENT_DIM, MAX_ROPE_DIM
from fused_rope_attn.integrations.transformers import caches, families
from fused_rope_attn.integrations.transformers.state import PATCH, state_of
from fused_rope_attn.runtime.device import is_capturing
from fused_rope_attn.runtime.entry import in_context_parallel

# transformers 4.57 gives every decoder position ids, and always makes a mask from them; 5 makes none for one document.
_FINDS_SINGLE_DOCUMENTS = masking_utils.find_packed_sequence_indices(torch.arange(2, device="cpu")[None]) is None
# The name of a patched model's attention while a manager of continuous batching makes no masks (``Serving``). It is not
# registered, so calls that need the module's own forward are refused. Managers of older releases put "paged|" before
# every name that lacks it. Newer ones drop that prefix, and would then use eager attention for an unknown name.
PAGES = "paged|" * ("paged|sdpa" in modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()) + "fused_rope_flash"
# The attention functions of transformers that compute the same as the fused kernels, whatever name they are registered
# under. Kernels of its hub are arguments of the second. Its block-sparse functions compute something else.
_ATTENTION = (
    "sdpa_attention_forward flash_attention_forward flex_attention_forward "  # and for paged caches:
    "eager_paged_attention_forward sdpa_attention_paged_forward paged_attention_forward"
).split()
_INNER = "_flash_attention_forward"
# Functions of a modeling file that its attention classes call. Those in EAGER run with eager attention only.
ROTATIONS = (
    "apply_rotary_pos_emb apply_rotary_pos_emb_interleave apply_rotary_emb apply_multimodal_rotary_pos_emb "
    "_apply_rotary_emb rotate_half get_llama_4_attn_scale"
).split()
EAGER = ["eager_attention_forward", "repeat_kv"]
# Liger replaces transformers' rotation of halves for a whole process, and computes the same.
_LIGER = {
    "liger_kernel.transformers.rope.liger_rotary_pos_emb",
    "liger_kernel.transformers.rope.liger_rotary_pos_emb_gpt_oss",
    "liger_kernel.transformers.qwen2vl_mrope.liger_multimodal_rotary_pos_emb",
}
# Implementations for which managers of continuous batching build masks.
MASKED = {"eager", "sdpa", "paged|eager", "paged|sdpa"}


class Pass(NamedTuple):
    """A forward pass of a decoder, or a call of one of its attention modules."""

    attentions: list[nn.Module]  # the patched ones
    config: Any  # the decoder's
    given: dict[str, Any]  # the arguments of the decoder's or the module's forward by name

    @property
    def past(self) -> Any:
        return caches.cache_of(self.given)

    @property
    def tokens(self) -> Any:
        """Token ids (B, N), or embeddings (B, N, width); None without either."""
        tokens = self.given.get("input_ids")
        return self.given.get("inputs_embeds") if tokens is None else tokens

    @property
    def implementation(self) -> str:
        """The name of the modules' own attention."""
        return implementation_of(self.attentions[0].config)

    @property
    def asked_is_causal(self) -> bool | None:
        """The ``is_causal`` of the call, or else of the config; None if neither has one."""
        wanted = getattr(self.config, "is_causal", None)
        # In continuous batching the call's value only tells whether the mask contains the causal mask.
        return wanted if caches.is_paged(self.past) else self.given.get("is_causal", wanted)


def refuse_wrong_calls(call: Pass, *, on_shards: bool = False) -> None:
    """Raise if both the fused kernels and the modules' own forward would compute something else than the caller meant.
    on_shards: the model knows the ranks with which it shares its sequences."""
    if in_context_parallel() and not on_shards:
        raise NotImplementedError(
            "a patched model was called under torch's context_parallel, where every rank holds a shard of the sequence "
            "and fused attention would attend to nothing but the shard: tell it the ranks by patch_model(model, "
            "cp_group=...), call unpatch_model(model) before, with attn_implementation='sdpa', or run the patched "
            "model on whole sequences outside of the context manager"
        )
    flex = call.implementation.removeprefix("paged|") == "flex_attention"
    if isinstance(call.given.get("attention_mask"), BlockMask) and not flex:
        raise ValueError(
            "attention_mask is a BlockMask, which attn_implementation='flex_attention' takes, but the model's is "
            f"{call.implementation!r}: call model.set_attn_implementation('flex_attention')"
        )


def obstacle(call: Pass, causal: bool | None) -> str:
    """Return why a call needs the modules' own forward, or "". causal: the result of ``is_causal`` for it."""
    name, mask = call.implementation, call.given.get("attention_mask")
    if "paged" in name and name != PAGES:
        return f"attn_implementation={name!r} without the paged cache that it takes (continuous batching)"
    # Since 5.6 transformers' masks and attention functions both read it. Before, each read something else or nothing.
    ignored = families.RELEASE < (5, 6) and call.asked_is_causal is False
    reasons = {
        f"is_causal=False with transformers {transformers.__version__} (from 5.6 on it is served)": ignored,
        "head_mask": call.given.get("head_mask") is not None,
        "a BlockMask": isinstance(mask, BlockMask),
        "a mask for each type of layer, made outside of the patched model,": isinstance(mask, dict),
        "an attention_mask that is not (B, keys)": not (mask is None or isinstance(mask, Tensor) and mask.ndim == 2),
    }
    reason = obstacle_of_any_kind(call, causal) or first_of(reasons) or _changed_window(call)
    return reason or caches.foreign_cache(call.past, list(map(layer_of, call.attentions)))


def first_of(reasons: dict[str, Any]) -> str:
    """Return the first reason that holds, or ""."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def obstacle_of_any_kind(call: Pass, causal: bool | None) -> str:
    """Return an obstacle that depends neither on the mask nor on the cache, or ""."""
    attentions, wanted = call.attentions, call.given.get("output_attentions")
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    widths = _latent_widths(attentions[0])
    in_modules = causal is None and call.asked_is_causal is None and not any(m.is_causal for m in attentions)
    reasons = {
        "output_attentions=True": getattr(call.config, "output_attentions", False) if wanted is None else wanted,
        "attention dropout in training": any(m.training and families.attention_dropout(m) for m in attentions),
        widths: widths,
        "is_causal = False of the attention modules, which SDPA reads only without a mask,": in_modules,
        "attention that is causal in some modules and not in others": causal is None,
    }
    return _foreign_function(attentions[0], call.implementation) or _foreign_code(call) or first_of(reasons)


def obstacle_to_pages(call: Pass, causal: bool | None) -> str:
    """Return the ``obstacle`` of a pass of continuous batching."""
    cache, needed = call.past, ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index")
    missing = [name for name in needed if name not in call.given]
    made = f"a paged cache of type {type(cache).__name__}, as transformers {transformers.__version__} makes it,"
    reasons = {
        "continuous batching in a graph of torch.compile": torch.compiler.is_compiling(),
        "continuous batching with gradients enabled": torch.is_grad_enabled(),
        "continuous batching under autocast": torch.is_autocast_enabled(torch.device(cache.device).type),
        made: not caches.is_known(cache),
        f"continuous batching without {', '.join(missing)}": missing,
    }
    reason = _obstacle_to_any_pages(call, causal) or first_of(reasons)
    if reason:
        return reason
    pools = [caches.pool_of(cache, layer_of(module)) for module in call.attentions]
    for window, pool in zip(map(window_of, call.attentions), pools):
        if window != pool.window:
            return f"a layer with a window of {window} tokens, but the paged cache holds {pool.window or 'all'},"
    if call.given.get("block_table") is not None and pools[0].page_size < caches.FEWEST_ROWS:
        return f"a block table of pages of fewer than {caches.FEWEST_ROWS} tokens"
    return ""


def lasting_obstacle(attentions: list[nn.Module], config: Any) -> str:
    """Return the ``obstacle_to_pages`` that every pass would have, before there is one."""
    call = Pass(attentions, config, {})
    reason = _obstacle_to_any_pages(call, is_causal(call))
    if not reason and any(window_of(module) != _window_of_masks(module, config) for module in attentions):
        return "windows that are not those of the paged cache"
    return reason


def _obstacle_to_any_pages(call: Pass, causal: bool | None) -> str:
    """Return a general obstacle, or a feature of the model that is left out over a paged cache, or ""."""
    reason = obstacle_of_any_kind(call, causal)
    if reason:
        return reason
    name, conventions = call.implementation, [(state_of(m, PATCH).convention, m) for m in call.attentions]
    # Earlier releases do not cap scores in paged flash-attention. No release does in SDPA and eager mode.
    uncapped = not (families.RELEASE >= (5, 23) and uses_flash(call.attentions[0].config))
    uncapped = uncapped and any(convention.cap_of(module) for convention, module in conventions)
    no_sinks = "sdpa" in name and any(convention.sinks for convention, _ in conventions)
    reasons = {
        "bidirectional attention in continuous batching": not causal,
        "continuous batching of multi-head latent attention": any(convention.latent for convention, _ in conventions),
        f"continuous batching of soft-capped scores, which transformers' {name!r} leaves uncapped,": uncapped,
        f"continuous batching with sinks, which transformers' {name!r} leaves out,": no_sinks,
        "continuous batching of attention in chunks": chunked_layer(call.attentions) is not None,
    }
    return first_of(reasons)


def window_of(module: nn.Module) -> int | None:
    """Return the window of a patched attention module, or None."""
    return state_of(module, PATCH).convention.window_of(module)


def _window_of_masks(module: nn.Module, config: Any) -> int | None:
    """Return the window in the masks that transformers makes from the config as it is now for a module."""
    types = getattr(config, "layer_types", None)
    sliding = types is None or types[layer_of(module)] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def _latent_widths(module: Any) -> str:
    """Return why the kernels of multi-head latent attention do not take a module's heads, or ""."""
    patch = state_of(module, PATCH)
    if patch is None or not patch.convention.latent:
        return ""
    rope, others = module.qk_rope_head_dim, (module.qk_nope_head_dim, module.v_head_dim)
    if any(x % LATENT_DIM_STEP for x in (rope, *others)) or rope > MAX_ROPE_DIM or max(others) > MAX_LATENT_DIM:
        return f"latent attention with heads of {others[0]}, {rope} and {others[1]} columns"
    return ""


def may_have_images(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return False if no tokens of a pass of Gemma 3 see each other both ways, as those of an image do, for which
    ``token_type_ids`` is 1. Return True too if the host cannot read it."""
    types = given.get("token_type_ids")
    # A single token is the last one, so attention to the rest of its image is causal.
    if types is None or types.shape[-1] == 1:
        return False
    return is_blind(types) or bool((types == 1).any())


def may_have_a_prefix(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return False if no tokens of a pass of PaliGemma see each other both ways, which is known of single tokens.
    transformers 4.57 ignores the windows of PaliGemma 2, so only its own masks are right."""
    config: Any = model.config
    windowed = getattr(config.get_text_config(), "sliding_window", None) is not None
    return windowed or Pass([], config, given).tokens.shape[1] > 1


def chunked_layer(attentions: list[nn.Module]) -> Any:
    """Return the first of the modules that attends within chunks, or None."""
    return next((m for m, patch in _patched(attentions) if patch.convention.chunk_of(m)), None)


def is_causal(call: Pass) -> bool | None:
    """Return whether the modules attend causally in this call; None if they disagree, or if the host cannot tell. A
    call's ``is_causal`` takes precedence over the config's, and the config's over the modules'. If only the modules
    have one, eager and flex attention ignore it, because they follow the mask that the decoder makes. flash-attention
    follows the modules, because it gets no causal mask. SDPA follows them only without a mask."""
    config, wanted = call.config, call.asked_is_causal
    own = {bool(module.is_causal) for module in call.attentions}
    # Gemma 1 and 2 tell their modules only.
    of_masks = not (getattr(config, "use_bidirectional_attention", False) and config.model_type == "gemma3_text")
    if wanted is None:
        if own != {of_masks} and not uses_flash(config):
            masked = _gets_a_mask(call, of_masks) if "sdpa" in implementation_of(config) else True
            if masked is None:
                return None
            own = {of_masks} if masked else own
    elif wanted and not of_masks:  # the masks hide no key, whatever is asked for
        own.add(False)
    if len(own) > 1 or wanted is True and own == {False}:
        return None
    return bool(own.pop() if wanted is None else wanted)


def _gets_a_mask(call: Pass, is_causal: bool) -> bool | None:
    """Return whether SDPA gets a mask in this call of a decoder or a layer; None if this is not known before.
    is_causal: of the masks. Synchronise with the device if a padding mask or positions are given."""
    tokens, past = call.tokens, call.past
    mask, positions = call.given.get("attention_mask"), call.given.get("position_ids")
    if caches.is_paged(past):  # continuous batching always makes one
        return True
    if tokens is None:  # a layer was called without its decoder
        return mask is not None
    # A single new token sees every key, so that either answer is right. Bidirectional masks are never left out.
    if tokens.shape[1] == 1 or not is_causal:
        return True
    if past is not None or is_blind(tokens) or torch.jit.is_tracing():
        return None
    window = getattr(call.config, "sliding_window", None)
    if window is not None and tokens.shape[1] >= window:  # layers without a window may get none
        return None
    if mask is not None:
        return not bool((mask != 0).all()) if isinstance(mask, Tensor) and mask.ndim == 2 else True
    # The mask shows packed documents, unless the decoder makes a cache.
    packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
    return None if packed or not _FINDS_SINGLE_DOCUMENTS else False


def _foreign_function(module: nn.Module, name: str) -> str:
    """Return a description of a module's attention or mask function if it is not transformers' own; else "". Those that
    users and libraries register, also in place of known ones, may compute anything, so they are never replaced."""
    modeling = sys.modules.get(type(module).__module__)
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", modeling_utils.ALL_ATTENTION_FUNCTIONS)
    function = _unwrapped(functions.get(name))
    if function is not None:
        origin = str(getattr(function, "__module__", ""))
        if not origin.startswith("transformers.") or getattr(function, "__name__", "") not in _ATTENTION:
            return f"the attention function {families.described(function)}, registered as {name!r},"
        # verl replaces the function that it calls by one that exchanges shards of a sequence.
        inner = getattr(function, "__globals__", {}).get(_INNER)
        if inner is not None and not str(getattr(inner, "__module__", "")).startswith("transformers."):
            return f"{_INNER} of {origin}, which was replaced by {families.described(inner)},"
    function = _unwrapped(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name))
    if function is not None and getattr(function, "__module__", "") != masking_utils.__name__:
        return f"the mask function {families.described(function)}, registered as {name!r},"
    return ""


def _foreign_code(call: Pass) -> str:
    """Return why code that the modules replace is no longer transformers' own, "" if it is. Users and libraries replace
    functions and methods before a model is patched, and after."""
    eager, last = call.implementation == "eager", None
    for module, patch in _patched(call.attentions):
        reason = patch.own_forward or (_foreign_code_of(type(module), eager) if type(module) is not last else "")
        if reason:
            return reason
        last = type(module)
    return ""


def _patched(attentions: list[nn.Module]) -> list[tuple[Any, Any]]:
    """Return attention modules with their patches. Modules that were unpatched by themselves run their own forward."""
    return [(m, patch) for m, patch in zip(attentions, [state_of(m, PATCH) for m in attentions]) if patch is not None]


# Graphs of torch.compile assume that the methods of a class never change, and so may assume this result.
@torch.compiler.assume_constant_result
def _foreign_code_of(cls: type[nn.Module], eager: bool) -> str:
    """Return ``_foreign_code`` of one class. eager: its own forward would call the functions of eager attention."""
    convention = families.row_of(cls, families.ROWS)
    if convention is None:
        return f"{cls.__name__} ({families.refusal(cls)})"
    modeling = vars(sys.modules[cast(type, families.base_of(cls, families.ROWS)).__module__])
    for name in ROTATIONS + EAGER if eager else ROTATIONS:
        function = modeling.get(name)
        if function is None or getattr(function, "__globals__", None) is modeling:
            continue
        # The package ``kernels`` replaces functions by modules if its hub has kernels for them.
        if type(function).__module__.partition(".")[0] == "kernels":
            continue
        if not (families.described(function) in _LIGER and convention.interleaved is False):
            return f"{name} of {modeling['__name__']}, which was replaced by {families.described(function)},"
    return ""


def _changed_window(call: Pass) -> str:
    """Return why the modules' own attention would see another window than the modules have, "" if it would not.
    transformers makes masks from the config as it is now. Flash-attention gets the window of the module."""
    if uses_flash(call.attentions[0].config):
        return ""
    for module, patch in _patched(call.attentions):
        own, masked = window_of(module), _window_of_masks(module, call.config)
        if patch.convention.window in ("of layer", "of sliding layer") and own != masked:
            return (
                f"a layer that was made with the window {own}, for which config.sliding_window and config.layer_types "
                f"now say {masked},"
            )
    return ""


def is_blind(x: Tensor) -> bool:
    """Return whether the host cannot read a tensor: a graph is compiled or captured, or the tensor has no data."""
    return torch.compiler.is_compiling() or is_capturing(x.device) or x.is_meta or isinstance(x, FakeTensor)


def uses_flash(config: Any) -> bool:
    """Return whether the modules' own attention would be one of the flash-attention implementations."""
    return "flash" in implementation_of(config)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def implementation_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", None) or "eager")


def layer_of(module: nn.Module) -> int:
    """Return the index of a module's keys and values in a cache."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else 0
