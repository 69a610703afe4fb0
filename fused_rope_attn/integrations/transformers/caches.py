"""transformers' caches: which argument of a call is one, what it holds, whether a kernel may write it, and growth.

Whatever differs between releases is asked here. A ``Cache`` and the paged cache of continuous batching share a name in
some of them, so they are told apart by their types.

A pass of continuous batching (``generate_batch``) packs tokens of many requests into one row. It gives every layer the
paged cache and two lists of row indices: the rows for new keys, and the rows of all keys of the requests. If each
request has one new token, its pages are found from these on the device, once for all layers of a kind.
"""

from __future__ import annotations

import inspect
import weakref
from types import FunctionType
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import cache_utils, masking_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers import families

# transformers 5.24 renames ``past_key_values`` to ``cache``, which up to 5.23 is the name of a paged cache only.
_IS_RENAMED = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
_OLDER_NAMES = ("past_key_values", "layer_past", "past_key_value")
CACHE_NAMES = ("cache", *_OLDER_NAMES)
# The smallest pages that kernels read.
FEWEST_ROWS = 16
# Earlier releases read the rings of layers with a window from the oldest key on, although the window excludes it.
_RINGS_ARE_READ_IN_ORDER = Version(transformers.__version__) >= Version("5.17")
# A decoder without a given cache may make one of these.
_MADE_BY_DECODERS = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)


def cache_of(given: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a decoder or of an attention module, or None. transformers ignores the
    older names next to the new one, and ``cache=`` in older releases, unless it is paged."""
    cache = given.get("cache")
    if _IS_RENAMED and "cache" in given or is_paged(cache):
        return cache
    return next((given[name] for name in _OLDER_NAMES if given.get(name) is not None), None)


def own_cache_of(decoder: nn.Module) -> str:
    """Return the name of a cache class that a decoder's forward uses and that is no ``Cache``, or "". Hybrid models
    before transformers 5.15 make such a cache if they are given none."""
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


def foreign_cache(past: Any, places: list[int]) -> str:
    """Return why a cache (or None) may return other keys and values than transformers' caches, "" if it cannot. Classes
    are compared exactly, because a subclass may override anything."""
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
    return f"a cache whose {cls.__name__}.update was replaced by {families.described(update)}"


# Growing buffers. ``DynamicLayer.update`` concatenates, so each step copies the whole cache. Here a layer's keys and
# values are the first rows of larger buffers, and most steps only make two new views. A layer owns the rows after its
# tokens as long as its keys and values are the tensors that it was given last, and each row is written once. A layer
# that was cropped, reordered, copied or filled by other code holds other tensors, so its tokens move to new buffers.
# Tensors that a program kept therefore never change, just as with concatenation.
#
# Buffers grow by an eighth, so that all copies cost less than a hundredth of reading a long cache.
_FEWEST, _MOST, _FRACTION = 16, 256, 8
# Layer to (weak references to its keys and values, their addresses and shape, the shape and strides of its buffers).
# Addresses, because `keys.data = other` gives the same tensor other memory. Weak, so that buffers die with their views.
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def buffers_of(layer: DynamicLayer, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the buffers (keys, values) of a filled layer, (B, HKV, rows, D), with ``tokens`` free rows or more."""
    keys, values = layer.keys, layer.values
    known = _known.get(layer)
    if known is not None:
        keys_given, values_given, addresses, held, shape, strides = known
        fits = keys_given() is keys and values_given() is values and held[2] + tokens <= shape[2]
        fits = fits and keys.shape == held and keys.stride() == strides and keys.data_ptr() == addresses[0]
        fits = fits and values.shape == held and values.stride() == strides and values.data_ptr() == addresses[1]
        # Tensors of inference mode are read-only outside it.
        if fits and (torch.is_inference_mode_enabled() or not keys.is_inference()):
            return keys.as_strided(shape, strides), values.as_strided(shape, strides)
    length = keys.shape[2]
    buffers = new_buffer(keys, length + tokens), new_buffer(values, length + tokens)
    for buffer, held in zip(buffers, (keys, values)):
        first_rows(buffer, length).copy_(held)
    return buffers


def new_buffer(x: Tensor, rows: int) -> Tensor:
    """Return a contiguous, uninitialised (B, HKV, more than ``rows``, D) like x (B, HKV, any, D)."""
    batch, heads, _, head_dim = x.shape
    step = min(_MOST, max(_FEWEST, 1 << (rows // _FRACTION).bit_length()))
    return torch.empty((batch, heads, (rows // step + 1) * step, head_dim), dtype=x.dtype, device=x.device)


def first_rows(buffer: Tensor, length: int) -> Tensor:
    """Return the view (B, HKV, length, D) of a buffer. This is ``narrow``, but costs the host less."""
    batch, heads, _, head_dim = buffer.shape
    return buffer.as_strided((batch, heads, length, head_dim), buffer.stride())


def store(layer: DynamicLayer, keys: Tensor, values: Tensor, buffer: Tensor) -> None:
    """Give a layer, perhaps an empty one, new keys and values: the first rows of buffers with the layout of ``buffer``.
    Set what ``lazy_initialization`` sets (dtype up to 5.23)."""
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    addresses = keys.data_ptr(), values.data_ptr()
    _known[layer] = (weakref.ref(keys), weakref.ref(values), addresses, keys.shape, buffer.shape, buffer.stride())


# The pages (B, pages) int32 of every request of a pass, and (B,) int32, the rows before the new token's; or None.
Pages = tuple[Tensor, Tensor] | None


class Pool(NamedTuple):
    """The memory of one layer's keys and values."""

    keys: Tensor  # (pages, page_size, HKV, D)
    values: Tensor
    group: int  # the index of the layer's row indices and block table among those of a pass
    kind: str  # "full_attention" or "sliding_attention"
    window: int | None  # number of keys that a request keeps, token p in row ``p % window``; None if it keeps all
    spare: int  # a page that no request reads

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


class PagedPass:
    """The arguments of a pass of continuous batching, and the pages that its layers share.

    given: the arguments of the decoder's forward by name; there must be no obstacle to them.
    cu_seqlens_q: (sequences + 1,) int32. Lengths that are padded for CUDA graphs end with empty sequences.
    max_seqlen_q: an upper bound of a sequence's new tokens.
    """

    # Not a dict, because accelerate and others take containers apart to move the tensors in them.
    __slots__ = ("_cache", "_found", "_given", "cu_seqlens_q", "max_seqlen_q")

    def __init__(self, given: dict[str, Any]):
        self._given, self._cache = given, cache_of(given)
        self.cu_seqlens_q: Tensor = given["cu_seq_lens_q"]
        self.max_seqlen_q: int = _named(given, "max_length_q", "max_seqlen_q")
        self._found: dict[int, Pages] = {}

    def pool(self, layer: int) -> Pool:
        return pool_of(self._cache, layer)

    def keys_of(self, kind: str) -> tuple[Tensor, int]:
        """Return cu_seqlens (sequences + 1,) int32 of the keys in layers of a kind, and a bound of their lengths."""
        cu_seqlens, longest = self._given["cu_seq_lens_k"], _named(self._given, "max_length_k", "max_seqlen_k")
        # Some versions use no dict if there is only one kind of layers.
        return (cu_seqlens[kind], longest[kind]) if isinstance(cu_seqlens, dict) else (cu_seqlens, longest)

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write new rotated keys and values (1, HKV, N, D); return all (T, HKV, D) of the pass's requests."""
        cache, indices = self._cache, {name: self._given[name] for name in ("read_index", "write_index")}
        if hasattr(cache, "layer_to_allocator"):
            indices |= {name: self._given[name] for name in ("cu_seq_lens_k", "max_length_k")}
            keys, values = cache.update(k, v, layer, indices)
            return keys[0].transpose(0, 1), values[0].transpose(0, 1)
        return cache.update(k, v, layer, **indices)

    def pages(self, pool: Pool) -> Pages:
        """Return the ``Pages`` of a pass with one new token a request; None if there are more, or pages are unknown."""
        if pool.group not in self._found:
            self._found[pool.group] = self._find(pool)
        return self._found[pool.group]

    def _find(self, pool: Pool) -> Pages:
        given = self._given
        position_ids, block_table = given["position_ids"], given.get("block_table")
        sequences, tokens = self.cu_seqlens_q.shape[0] - 1, position_ids.shape[-1]
        if self.max_seqlen_q != 1 or sequences != tokens or pool.page_size < FEWEST_ROWS:
            return None
        ends, most = self.keys_of(pool.kind)
        lengths = ends[1:] - ends[:-1] - 1
        if block_table is not None:
            table = block_table[pool.group]
            # The empty sequences of a CUDA graph have no pages, so their tokens go to the spare one.
            return torch.where(table < 0, pool.spare, table), lengths.clamp(min=0)
        read = given["read_index"][pool.group]
        if read.shape[0] == 0:
            return None
        starts, size = ends[:-1, None], pool.page_size
        if pool.window is None:
            first_rows = torch.arange(0, most, size, device=read.device)
            rows = read[torch.minimum(starts + first_rows, ends[1:, None] - 1).long()]
            return (rows // size).int(), lengths
        if not _RINGS_ARE_READ_IN_ORDER or position_ids.ndim != 2:
            return None
        # The indices begin at the oldest key that the new token sees, and lack the row for the new token.
        seen = position_ids[0, :, None]
        oldest = torch.where(seen < pool.window, 0, (seen + 1) % pool.window)
        first_rows = torch.arange(0, pool.window, size, device=read.device)
        places = (first_rows - oldest) % pool.window
        held = torch.minimum(starts + places, ends[1:, None] - 1).long()
        rows = torch.where(places < lengths[:, None], read[held], given["write_index"][pool.group][:, None])
        return (rows // size).int(), seen[:, 0].int()


def is_known(cache: Any) -> bool:
    """Return whether the pools of a paged cache can be found."""
    own = type(cache).__module__.startswith("transformers.generation.continuous_batching")
    if hasattr(cache, "layer_to_allocator"):
        return own and all(hasattr(pool, "_kv_token_views") for pool in cache.layer_to_allocator.values())
    return own and hasattr(cache, "layer_index_to_group_indices")


# Paged cache to the pools of its layers. These are views of the cache's memory, which never moves.
_pools: weakref.WeakKeyDictionary[Any, dict[int, Pool]] = weakref.WeakKeyDictionary()


def pool_of(cache: Any, layer: int) -> Pool:
    """Return the pool of a layer of a PagedAttentionCache."""
    known = _pools.setdefault(cache, {})
    if layer in known:
        return known[layer]
    if hasattr(cache, "layer_to_allocator"):  # one tensor stores the pages of all layers
        own = cache.layer_to_allocator[layer]
        group, kind, window = own.index, own.layer_type, getattr(own, "sliding_window", None)
        size, rows, spare = own.tokens_per_page, own._kv_token_views[layer], own.write_trash_index
    else:  # every layer of a group has tensors of its own
        group, place = cache.layer_index_to_group_indices[layer]
        window = None if cache.sliding_windows[layer] == 1 else cache.sliding_windows[layer]
        kind = "full_attention" if window is None else "sliding_attention"
        # Only passes with block tables use the spare page. Versions with block tables have the attribute.
        spare = getattr(cache, "write_trash_index", 0)
        size, rows = cache.block_size, (cache.key_cache[place], cache.value_cache[place])
    count = min(x.shape[0] for x in rows) // size
    keys, values = (x[: count * size].unflatten(0, (count, size)) for x in rows)
    known[layer] = Pool(keys, values, group, kind, window, spare // size)
    return known[layer]


def _named(given: dict[str, Any], *names: str) -> Any:
    """Return an argument that has different names in different versions."""
    return next(given[name] for name in names if name in given)
