"""transformers' caches: which argument of a call is one, what it holds, and whether a kernel may write it.

Whatever differs between releases is asked here. A ``Cache`` and the paged cache of continuous batching share a name in
some of them, so they are told apart by their types.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils, masking_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers.conventions import Latent
from fused_rope_attn.integrations.transformers.families import described

# transformers 5.24 renames ``past_key_values`` to ``cache``, which up to 5.23 is the name of a paged cache only.
_IS_RENAMED = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
_OLDER_NAMES = ("past_key_values", "layer_past", "past_key_value")
CACHE_NAMES = ("cache", *_OLDER_NAMES)
# A decoder without a given cache may make one of these.
_MADE_BY_DECODERS = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)


def cache_of(given: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a decoder or of an attention module, or None.

    transformers ignores the older names next to the new one, and ``cache=`` in older releases, unless it is paged.
    """
    cache = given.get("cache")
    if _IS_RENAMED and "cache" in given or is_paged(cache):
        return cache
    return next((given[name] for name in _OLDER_NAMES if given.get(name) is not None), None)


def own_cache_of(decoder: nn.Module) -> str:
    """Return the name of the cache class that a decoder's forward uses, if it does not inherit from ``Cache``.

    Return "" for other decoders. Hybrid models before transformers 5.15 make such a cache if they are given none.
    """
    forward = inspect.unwrap(type(decoder).forward)
    if not isinstance(forward, FunctionType):
        return ""
    used = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    classes = (x for x in used if isinstance(x, type) and x.__name__.endswith("Cache"))
    return next((cls.__name__ for cls in classes if not issubclass(cls, Cache)), "")


def is_paged(cache: Any) -> bool:
    """Return whether a cache is that of continuous batching."""
    return isinstance(cache, PagedAttentionCache)


def reused(past: Cache | None) -> bool:
    """Return whether a static layer is initialised, and so, as it may count on the device, may hold tokens."""
    return past is not None and any(isinstance(layer, StaticLayer) and layer.is_initialized for layer in past.layers)


def tokens_seen(past: Cache, layer_idx: int) -> int | None:
    """Return the number of tokens that the cache has seen; None if only the device knows it."""
    if layer_idx >= len(past.layers):
        return 0
    layer = past.layers[layer_idx]
    if isinstance(layer, StaticLayer):
        if not layer.is_initialized:
            return 0
        # transformers 5 counts by a tensor and, in sliding layers, by an int too; 4.57 in sliding layers by an int.
        count = getattr(layer, "cumulative_length_int", getattr(layer, "cumulative_length", None))
        return count if isinstance(count, int) else None
    return layer.get_seq_length()


def may_be_written(past: Cache) -> bool:
    """Return whether the cache adds tokens by its layers' ``update`` and does nothing else."""
    return type(past).update is Cache.update and not past.offloading


def count_written(layer: StaticLayer, tokens: int) -> None:
    """Count tokens that a kernel has written, as ``StaticLayer.update`` does. 4.57 instead counts nonzero rows."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length.add_(tokens)  # in place: compiled graphs know its address


def latent_rows(module: nn.Module, latent: Latent, k_rope: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two tensors that a module of multi-head latent attention gives to its cache.

    They are the latent vectors and k_rope (B, 1, N, R) if the module expands the cache in each step, and otherwise the
    keys and values of all heads.
    """
    if hasattr(module, "expand_kv"):
        return latent.compressed, k_rope
    return torch.cat((latent.k_nope, k_rope.expand(-1, v.shape[1], -1, -1)), dim=-1), v


def update_options(kwargs: dict) -> tuple:
    """Return the argument by which transformers 4.57 tells static caches where to write."""
    position = kwargs.get("cache_position")
    return () if position is None else ({"cache_position": position},)


def foreign_cache(past: Any, places: list[int]) -> str:
    """Return why a cache (or None) may return other keys and values than transformers' caches, "" if it cannot.

    Classes are compared exactly, because a subclass may override anything.
    """
    if past is None:
        return next(filter(None, map(_foreign_update, _MADE_BY_DECODERS)), "")
    # Some caches of transformers 5 place queries elsewhere than at the end of the keys.
    offset = getattr(type(past), "get_query_offset", None) is getattr(Cache, "get_query_offset", None)
    if not (isinstance(past, Cache) and _is_of_transformers(type(past), past) and offset):
        return f"a cache of type {type(past).__name__}"
    reason, last = _foreign_update(type(past)), None
    for place in places:  # layers of other modules may hold anything
        layer = past.layers[place] if place < len(past.layers) else None
        cls = getattr(past, "layer_class_to_replicate", None) if layer is None else type(layer)
        if cls is not last and cls is not None:
            if not issubclass(cls, (DynamicLayer, StaticLayer)):
                return f"a cache of type {type(past).__name__}"
            last, reason = cls, reason or _foreign_update(cls)
        if cls is not None and not _is_of_transformers(cls, layer):
            return f"a cache with layers of type {cls.__name__}"
    return reason


def _is_of_transformers(cls: type, cache: Any) -> bool:
    """Return True if transformers defines the class of a cache or layer and the instance, or None, keeps its update."""
    return cls.__module__ == cache_utils.__name__ and (cache is None or "update" not in cache.__dict__)


def _foreign_update(cls: type) -> str:
    update: Any = cls.update  # type: ignore[attr-defined]
    if update.__module__ == cache_utils.__name__:
        return ""
    return f"a cache whose {cls.__name__}.update was replaced by {described(update)}"
