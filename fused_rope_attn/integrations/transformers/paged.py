"""transformers' continuous batching (``generate_batch``): its paged cache, a pass over it, and its manager.

A pass packs tokens of many requests into one row: new prompts, parts of prompts and single tokens. It gives every layer
the cache itself and two lists of row indices: the rows for new keys, and the rows of all keys of the requests. Pools
hold pages of consecutive rows of one request. If each request has one new token, the pages are found from the indices,
on the device, once for all layers of a kind, and the generation step reads them in place.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from fused_rope_attn.integrations.transformers import caches, families, obstacles
from fused_rope_attn.integrations.transformers.state import DECODER, PATCH, Method, state_of
from fused_rope_attn.runtime.device import has_gpu

# The smallest pages that kernels read.
FEWEST_ROWS = 16
# Earlier releases read the rings of layers with a window from the oldest key on, although the window excludes it.
_RINGS_ARE_READ_IN_ORDER = Version(transformers.__version__) >= Version("5.17")
# Earlier releases do not pass the softcap to paged flash-attention. No release passes it to SDPA and eager mode.
_FLASH_GETS_THE_SOFTCAP = Version(transformers.__version__) >= Version("5.23")


class Pool(NamedTuple):
    """The memory of one layer's keys and values.

    keys, values: (pages, page_size, HKV, D).
    group: the index of the layer's row indices and block table among those of a pass.
    kind: of the layer, "full_attention" or "sliding_attention".
    window: number of keys that the pool keeps for each request, token p in row ``p % window``; None if it keeps all.
    spare: a page that no request reads.
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
    """The arguments of a pass of continuous batching, and the pages that its layers share.

    given: the arguments of the decoder's forward by name; there must be no obstacle to them.
    cu_seqlens_q: (sequences + 1,) int32. Lengths that are padded for CUDA graphs end with empty sequences.
    max_seqlen_q: an upper bound of a sequence's new tokens.
    """

    # Not a dict, because accelerate and others take containers apart to move the tensors in them.
    __slots__ = ("_cache", "_found", "_given", "cu_seqlens_q", "max_seqlen_q")

    def __init__(self, given: dict[str, Any]):
        self._given, self._cache = given, caches.cache_of(given)
        self.cu_seqlens_q: Tensor = given["cu_seq_lens_q"]
        self.max_seqlen_q: int = _named(given, "max_length_q", "max_seqlen_q")
        self._found: dict[int, Pages | None] = {}

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

    def pages(self, pool: Pool) -> Pages | None:
        """Return the pages of a pass with one new token a request; None if there are more, or pages are unknown."""
        if pool.group not in self._found:
            self._found[pool.group] = self._find(pool)
        return self._found[pool.group]

    def _find(self, pool: Pool) -> Pages | None:
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
            return Pages(torch.where(table < 0, pool.spare, table), lengths.clamp(min=0))
        read = given["read_index"][pool.group]
        if read.shape[0] == 0:
            return None
        starts, size = ends[:-1, None], pool.page_size
        if pool.window is None:
            first_rows = torch.arange(0, most, size, device=read.device)
            rows = read[torch.minimum(starts + first_rows, ends[1:, None] - 1).long()]
            return Pages((rows // size).int(), lengths)
        if not _RINGS_ARE_READ_IN_ORDER or position_ids.ndim != 2:
            return None
        # The indices begin at the oldest key that the new token sees, and lack the row for the new token.
        seen = position_ids[0, :, None]
        oldest = torch.where(seen < pool.window, 0, (seen + 1) % pool.window)
        first_rows = torch.arange(0, pool.window, size, device=read.device)
        places = (first_rows - oldest) % pool.window
        held = torch.minimum(starts + places, ends[1:, None] - 1).long()
        rows = torch.where(places < lengths[:, None], read[held], given["write_index"][pool.group][:, None])
        return Pages((rows // size).int(), seen[:, 0].int())


def obstacle_to_pages(attentions: list[nn.Module], config: Any, given: dict[str, Any], causal: bool | None) -> str:
    """Return the ``obstacle`` of a pass of continuous batching."""
    reason = _obstacle_to_any_pass(attentions, config, given, causal)
    if reason:
        return reason
    if torch.compiler.is_compiling():
        return "continuous batching in a graph of torch.compile"
    if torch.is_grad_enabled():
        return "continuous batching with gradients enabled"
    cache = caches.cache_of(given)
    if torch.is_autocast_enabled(torch.device(cache.device).type):
        return "continuous batching under autocast"
    if not _is_known(cache):
        return f"a paged cache of type {type(cache).__name__}, as transformers {transformers.__version__} makes it,"
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index") if name not in given]
    if missing:
        return f"continuous batching without {', '.join(missing)}"
    pools = [pool_of(cache, obstacles.layer_of(module)) for module in attentions]
    for window, pool in zip(map(window_of, attentions), pools):
        if window != pool.window:
            return f"a layer with a window of {window} tokens, but the paged cache holds {pool.window or 'all'},"
    if given.get("block_table") is not None and pools[0].page_size < FEWEST_ROWS:
        return f"a block table of pages of fewer than {FEWEST_ROWS} tokens"
    return ""


def lasting_obstacle(attentions: list[nn.Module], config: Any) -> str:
    """Return the ``obstacle_to_pages`` that every pass would have, before there is one."""
    reason = _obstacle_to_any_pass(attentions, config, {}, obstacles.is_causal(attentions, config, {}))
    if reason:
        return reason
    held, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for module in attentions:
        expected = held if types is None or types[obstacles.layer_of(module)] == "sliding_attention" else None
        if window_of(module) != expected:
            return "windows that are not those of the paged cache"
    return ""


def _obstacle_to_any_pass(attentions: list[nn.Module], config: Any, given: dict[str, Any], causal: bool | None) -> str:
    reason = obstacles.obstacle_of_any_kind(attentions, config, given, causal)
    if reason or causal:
        return reason or _left_out(attentions)
    return "bidirectional attention in continuous batching"


def _left_out(attentions: list[nn.Module]) -> str:
    """Return a feature of the model that transformers' or this attention ignores over a paged cache, or ""."""
    implementation = obstacles.implementation_of(attentions[0].config)
    conventions = [state_of(module, PATCH).convention for module in attentions]
    if any(convention.latent for convention in conventions):
        return "continuous batching of multi-head latent attention"
    capped = any(c.softcap and m.attn_logit_softcapping for c, m in zip(conventions, cast(Any, attentions)))
    if capped and not (obstacles.uses_flash(attentions[0].config) and _FLASH_GETS_THE_SOFTCAP):
        return f"continuous batching of soft-capped scores, which transformers' {implementation!r} leaves uncapped,"
    if "sdpa" in implementation and any(convention.sinks for convention in conventions):
        return f"continuous batching with sinks, which transformers' {implementation!r} leaves out,"
    if obstacles.chunk_of(attentions) is not None:
        return "continuous batching of attention in chunks"
    return ""


def _is_known(cache: Any) -> bool:
    own = type(cache).__module__.startswith("transformers.generation.continuous_batching")
    if hasattr(cache, "layer_to_allocator"):
        return own and all(hasattr(pool, "_kv_token_views") for pool in cache.layer_to_allocator.values())
    return own and hasattr(cache, "layer_index_to_group_indices")


def window_of(module: nn.Module) -> int | None:
    """Return the window of a patched attention module, or None."""
    return state_of(module, PATCH).convention.window_of(module)


# Cache to the pools of its layers. These are views of the cache's memory, which never moves.
_pools: weakref.WeakKeyDictionary[Any, dict[int, Pool]] = weakref.WeakKeyDictionary()


def pool_of(cache: Any, layer: int) -> Pool:
    """Return the pool of a layer of a PagedAttentionCache."""
    known = _pools.setdefault(cache, {})
    if layer not in known:
        made = _pool_of_allocator if hasattr(cache, "layer_to_allocator") else _pool_of_groups
        known[layer] = made(cache, layer)
    return known[layer]


def _pool_of_allocator(cache: Any, layer: int) -> Pool:
    """Return the pool in versions that store all layers' pages in one tensor."""
    allocator = cache.layer_to_allocator[layer]
    size = allocator.tokens_per_page
    pages = [rows[: rows.shape[0] // size * size].unflatten(0, (-1, size)) for rows in allocator._kv_token_views[layer]]
    count = min(x.shape[0] for x in pages)
    keys, values = (x[:count] for x in pages)
    window = getattr(allocator, "sliding_window", None)
    return Pool(keys, values, allocator.index, allocator.layer_type, window, allocator.write_trash_index // size)


def _pool_of_groups(cache: Any, layer: int) -> Pool:
    """Return the pool in versions that have separate tensors for each layer of a group."""
    group, place = cache.layer_index_to_group_indices[layer]
    size = cache.block_size
    rows = (cache.key_cache[place], cache.value_cache[place])
    keys, values = (x[: x.shape[0] // size * size].unflatten(0, (-1, size)) for x in rows)
    window = cache.sliding_windows[layer]
    kind = "full_attention" if window == 1 else "sliding_attention"
    # Only passes with block tables use this page. Versions with block tables have the attribute.
    spare = getattr(cache, "write_trash_index", 0) // size
    return Pool(keys, values, group, kind, None if window == 1 else window, spare)


def _named(given: dict[str, Any], *names: str) -> Any:
    """Return an argument that has different names in different versions."""
    return next(given[name] for name in names if name in given)


# Implementations for which managers build masks. For flash-attention nothing needs to change.
_MASKED = {"eager", "sdpa", "paged|eager", "paged|sdpa"}
# Earlier managers had no page tables and no CUDA graphs, or different ones.
_KNOWN = Version(transformers.__version__) >= Version("5.17")
# Attributes of a manager that are replaced. A manager without them is of another version, and keeps its masks.
_ATTRIBUTES = ("_original_attn_impl", "_create_batch_processor")
# Pages of a request if no length is given: transformers' own default for flash-attention.
_PAGES_OF_A_REQUEST = 32


class Serving(Method):
    """``init_continuous_batching`` of a patched model: it returns a manager that builds no masks, if possible.

    For SDPA and eager attention a manager builds masks over all requests. For flash-attention it provides page tables,
    CUDA graphs, and batches that are prepared while others run. It decides by the name of the config's implementation.
    A patched model reads pages and needs no masks, so its config has a special name while a manager is in use.
    """

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, config = self.own, cast(Any, self.model.config)
        before, kept = obstacles.implementation_of(config), _kept_manager(self.model)
        made_with_masks = kept is not None and not _is_ours(kept)
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
            manager._fused_rope_pages = True
            manager._create_batch_processor = partial(_create_batch_processor, manager._create_batch_processor)
            self._give_tables(manager, *args, **kwargs)
        return manager

    def _reads_pages(self, implementation: str) -> bool:
        """Return whether every pass over a paged cache will be served, as far as it can be known before."""
        if not _KNOWN or implementation not in _MASKED:
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
        return not lasting_obstacle(decoders[0].attentions, config.get_text_config())

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
        if asked == 0 or size < FEWEST_ROWS or any(map(window_of, patched)):
            return
        longest = 0
        if workload_hints is not None:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length
        pages = math.ceil(longest / size) + 1 if longest else _PAGES_OF_A_REQUEST
        config.max_blocks_per_request = asked or pages + pages % 2


def _create_batch_processor(own: Callable[[], Any]) -> Any:
    """Return the processor that a manager's ``own`` method makes; it continues without CUDA graphs if they fail."""
    processor = own()
    runner: Any = getattr(processor, "model_runner", None)
    if hasattr(runner, "_capture_graph") and "_capture_graph" not in runner.__dict__:
        runner._capture_graph = Capture(runner)
    return processor


class Capture:
    """``_capture_graph`` of a model runner: the runner continues without graphs if the model cannot be captured.

    With masks, managers use no graphs by default, and so serve models that synchronise, for example in their experts or
    in tables that grow. Such models must not fail here.
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self.own = runner._capture_graph

    def __call__(self, forward: Callable[..., None], *args: Any) -> None:
        done = []

        def counted(*given: Any) -> None:
            forward(*given)
            done.append(given)

        try:
            self.own(counted, *args)
        except Exception as error:
            if not done:  # the pass itself failed, in its run before the capture
                raise
            self.runner.use_cuda_graph_varlen = self.runner.use_cuda_graph_decode = False
            warnings.warn(
                f"continuous batching: CUDA graphs of this model cannot be captured ({error}); it runs without them",
                stacklevel=2,
            )


def forget_kept_manager(model: nn.Module) -> None:
    """Destroy the manager that a model keeps for its next batch, if it relies on the model being patched."""
    kept: Any = _kept_manager(model)
    if _is_ours(kept):
        model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def refuse_what_lacks_masks(config: Any, given: dict[str, Any], reason: str) -> None:
    """Raise if a pass needs the modules' own forward, but its manager made no masks.

    given: the arguments of the decoder's forward by name. reason: why the pass needs their forward.
    """
    implementation = obstacles.implementation_of(config)
    unmasked = caches.is_paged(caches.cache_of(given)) and given.get("attention_mask") is None
    if implementation == obstacles.PAGES or unmasked and implementation in _MASKED:
        raise NotImplementedError(
            f"{reason} is not served by the fused kernels, and this continuous batching was begun without the "
            "masks of the model's own attention: call unpatch_model(model) before it begins"
        )


def _kept_manager(model: nn.Module) -> Any:
    return getattr(model, "_cached_continuous_batching_manager", None)


def _is_ours(manager: Any) -> bool:
    return getattr(manager, "_fused_rope_pages", False)
