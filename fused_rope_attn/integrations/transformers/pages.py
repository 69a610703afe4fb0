"""transformers' continuous batching (``generate_batch``): its paged cache, and what a pass over it means to all layers.

A pass packs tokens of many requests into one row, new prompts, parts of prompts and single tokens side by side, and
hands every layer the cache itself with indices of rows: where new keys go, and where all keys of the requests lie. The
pools hold pages of consecutive rows of one request. Where each request has one new token, the pages are found among
the indices, on the device, once for all layers of a kind: the generation step then reads them where they are.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from fused_rope_attn.integrations.transformers.obstacles import (
    implementation_of,
    is_causal,
    layer_of,
    obstacle_of_any_kind,
    uses_flash,
)
from fused_rope_attn.integrations.transformers.state import PATCH, state_of

# Kernels read pages of this many rows or more.
FEWEST_ROWS = 16
# Before, the rings of layers with a window were read from the oldest key on, which the window no longer holds.
_RINGS_ARE_READ_IN_ORDER = Version(transformers.__version__) >= Version("5.17")
# Before, paged flash-attention was not told of it; SDPA and eager mode never are.
_FLASH_GETS_THE_SOFTCAP = Version(transformers.__version__) >= Version("5.23")


class Pool(NamedTuple):
    """Where the keys and values of one layer lie.

    keys, values: (pages, page_size, HKV, D).
    group: the place of the layer's indices and tables among those of a pass.
    kind: of the layer, "full_attention" or "sliding_attention".
    window: keys that the pool holds of each request, token p in row ``p % window``; None where it holds all.
    spare: a page that nobody reads.
    """

    keys: Tensor
    values: Tensor
    group: int
    kind: str
    window: int | None
    spare: int

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


class Pages(NamedTuple):
    """The pages of every request of a pass that has one new token for each.

    table: (B, pages) int32.
    lengths: (B,) int32, rows before the new token's.
    """

    table: Tensor
    lengths: Tensor


class PagedPass:
    """The arguments of a pass of continuous batching, and what its layers keep for each other.

    cache: transformers' PagedAttentionCache.
    cu_seqlens_q: (sequences + 1,) int32; sequences of no tokens come last where lengths are padded for CUDA graphs.
    max_seqlen_q: the largest number of new tokens of a sequence, or a larger one.
    """

    # No dict: a plain object passes through what takes containers apart to move the tensors in them.
    __slots__ = (
        "_block_table",
        "_cu_seqlens_k",
        "_found",
        "_given",
        "_max_seqlen_k",
        "_position_ids",
        "_read",
        "_write",
        "cache",
        "cu_seqlens_q",
        "max_seqlen_q",
    )

    def __init__(self, given: dict[str, Any]):
        """given: the arguments of the decoder's forward by their names, for which there is no obstacle."""
        self._given = given
        self.cache = given["cache"]
        self.cu_seqlens_q: Tensor = given["cu_seq_lens_q"]
        self.max_seqlen_q: int = _named(given, "max_length_q", "max_seqlen_q")
        self._cu_seqlens_k = given["cu_seq_lens_k"]
        self._max_seqlen_k = _named(given, "max_length_k", "max_seqlen_k")
        self._read, self._write = given["read_index"], given["write_index"]
        self._block_table: Tensor | None = given.get("block_table")
        self._position_ids: Tensor = given["position_ids"]
        self._found: dict[int, Pages | None] = {}

    def pool(self, layer: int) -> Pool:
        return pool_of(self.cache, layer)

    def keys_of(self, kind: str) -> tuple[Tensor, int]:
        """(sequences + 1,) int32 of the keys of layers of a kind, and a bound of their number in one sequence."""
        # With one kind of layers some versions leave the dict out.
        if isinstance(self._cu_seqlens_k, dict):
            return self._cu_seqlens_k[kind], self._max_seqlen_k[kind]
        return self._cu_seqlens_k, self._max_seqlen_k

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write new rotated keys and values (1, HKV, N, D); all keys and values (T, HKV, D) of the pass's requests."""
        if hasattr(self.cache, "layer_to_allocator"):
            names = ("cu_seq_lens_k", "max_length_k", "read_index", "write_index")
            keys, values = self.cache.update(k, v, layer, {name: self._given[name] for name in names})
            return keys[0].transpose(0, 1), values[0].transpose(0, 1)
        return self.cache.update(k, v, layer, read_index=self._read, write_index=self._write)

    def pages(self, pool: Pool) -> Pages | None:
        """The pages of a pass with one new token a request; None where it has more, or pages cannot be told."""
        if pool.group not in self._found:
            self._found[pool.group] = self._find(pool)
        return self._found[pool.group]

    def _find(self, pool: Pool) -> Pages | None:
        sequences, tokens = self.cu_seqlens_q.shape[0] - 1, self._position_ids.shape[-1]
        if self.max_seqlen_q != 1 or sequences != tokens or pool.page_size < FEWEST_ROWS:
            return None
        ends, most = self.keys_of(pool.kind)
        lengths = ends[1:] - ends[:-1] - 1
        if self._block_table is not None:
            table = self._block_table[pool.group]
            # Sequences that pad a CUDA graph's have no pages; their tokens go where nobody reads.
            return Pages(torch.where(table < 0, pool.spare, table), lengths.clamp(min=0))
        read = self._read[pool.group]
        if read.shape[0] == 0:
            return None
        starts, size = ends[:-1, None], pool.page_size
        if pool.window is None:
            first_rows = torch.arange(0, most, size, device=read.device)
            rows = read[torch.minimum(starts + first_rows, ends[1:, None] - 1).long()]
            return Pages((rows // size).int(), lengths)
        if not _RINGS_ARE_READ_IN_ORDER or self._position_ids.ndim != 2:
            return None
        # The indices begin at the oldest key that the new token sees, and lack the row that it is written to.
        seen = self._position_ids[0, :, None]
        oldest = torch.where(seen < pool.window, 0, (seen + 1) % pool.window)
        first_rows = torch.arange(0, pool.window, size, device=read.device)
        places = (first_rows - oldest) % pool.window
        held = torch.minimum(starts + places, ends[1:, None] - 1).long()
        rows = torch.where(places < lengths[:, None], read[held], self._write[pool.group][:, None])
        return Pages((rows // size).int(), seen[:, 0].int())


def obstacle_to_pages(attentions: list[nn.Module], config: Any, given: dict[str, Any], causal: bool | None) -> str:
    """``obstacle`` of a pass of continuous batching."""
    reason = obstacle_of_any_kind(attentions, config, given, causal)
    if reason:
        return reason
    if torch.compiler.is_compiling():
        return "continuous batching in a graph of torch.compile"
    if torch.is_grad_enabled():
        return "continuous batching with gradients enabled"
    cache = given["cache"]
    if torch.is_autocast_enabled(torch.device(cache.device).type):
        return "continuous batching under autocast"
    if not causal:
        return "bidirectional attention in continuous batching"
    if not _is_known(cache):
        return f"a paged cache of type {type(cache).__name__}, as transformers {transformers.__version__} makes it,"
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index") if name not in given]
    if missing:
        return f"continuous batching without {', '.join(missing)}"
    reason = _left_out(attentions)
    if reason:
        return reason
    for module in attentions:
        window, pool = window_of(module), pool_of(cache, layer_of(module))
        if window != pool.window:
            return f"a layer with a window of {window} tokens, of which the paged cache holds {pool.window or 'all'},"
    if given.get("block_table") is not None and pool_of(cache, layer_of(attentions[0])).page_size < FEWEST_ROWS:
        return f"a block table of pages of fewer than {FEWEST_ROWS} tokens"
    return ""


def lasting_obstacle(attentions: list[nn.Module], config: Any) -> str:
    """What of ``obstacle_to_pages`` holds for every pass, before there is one."""
    causal = is_causal(attentions, config, {})
    reason = obstacle_of_any_kind(attentions, config, {}, causal)
    if reason:
        return reason
    if not causal:
        return "bidirectional attention in continuous batching"
    reason = _left_out(attentions)
    if reason:
        return reason
    held, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for module in attentions:
        expected = held if types is None or types[layer_of(module)] == "sliding_attention" else None
        if window_of(module) != expected:
            return "windows that are not those of the paged cache"
    return ""


def _left_out(attentions: list[nn.Module]) -> str:
    """What the models have and transformers' own attention leaves out over a paged cache; "" where it computes all."""
    implementation = implementation_of(attentions[0].config)
    if any(map(_softcap, attentions)) and not (uses_flash(attentions[0].config) and _FLASH_GETS_THE_SOFTCAP):
        return f"continuous batching of soft-capped scores, which transformers' {implementation!r} leaves uncapped,"
    if "sdpa" in implementation and any(state_of(module, PATCH).convention.sinks for module in attentions):
        return f"continuous batching with sinks, which transformers' {implementation!r} leaves out,"
    return ""


def _is_known(cache: Any) -> bool:
    own = type(cache).__module__.startswith("transformers.generation.continuous_batching")
    if hasattr(cache, "layer_to_allocator"):
        return own and all(hasattr(pool, "_kv_token_views") for pool in cache.layer_to_allocator.values())
    return own and hasattr(cache, "layer_index_to_group_indices")


def _softcap(module: nn.Module) -> bool:
    convention = state_of(module, PATCH).convention
    return bool(convention.softcap and module.attn_logit_softcapping)


def window_of(module: nn.Module) -> int | None:
    """The window of a patched attention module, None where it has none."""
    return state_of(module, PATCH).convention.window(module)


# Of a cache: the pools of its layers. They are views of the cache's memory, which stays the same as long as it lives.
_pools: weakref.WeakKeyDictionary[Any, dict[int, Pool]] = weakref.WeakKeyDictionary()


def pool_of(cache: Any, layer: int) -> Pool:
    """The pool of a layer of a PagedAttentionCache."""
    known = _pools.setdefault(cache, {})
    if layer not in known:
        made = _pool_of_allocator if hasattr(cache, "layer_to_allocator") else _pool_of_groups
        known[layer] = made(cache, layer)
    return known[layer]


def _pool_of_allocator(cache: Any, layer: int) -> Pool:
    """Of versions that hold all layers' pages in one tensor."""
    allocator = cache.layer_to_allocator[layer]
    size = allocator.tokens_per_page
    pages = [rows[: rows.shape[0] // size * size].unflatten(0, (-1, size)) for rows in allocator._kv_token_views[layer]]
    count = min(x.shape[0] for x in pages)
    keys, values = (x[:count] for x in pages)
    window = getattr(allocator, "sliding_window", None)
    return Pool(keys, values, allocator.index, allocator.layer_type, window, allocator.write_trash_index // size)


def _pool_of_groups(cache: Any, layer: int) -> Pool:
    """Of versions that hold the pages of each layer of a group in tensors of their own."""
    group, place = cache.layer_index_to_group_indices[layer]
    size = cache.block_size
    rows = (cache.key_cache[place], cache.value_cache[place])
    keys, values = (x[: x.shape[0] // size * size].unflatten(0, (-1, size)) for x in rows)
    window = cache.sliding_windows[layer]
    kind = "full_attention" if window == 1 else "sliding_attention"
    # The page is of use where there are block tables, which came with it.
    spare = getattr(cache, "write_trash_index", 0) // size
    return Pool(keys, values, group, kind, None if window == 1 else window, spare)


def _named(given: dict[str, Any], *names: str) -> Any:
    """The argument that different versions give different names."""
    return next(given[name] for name in names if name in given)
