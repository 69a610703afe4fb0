"""The forward pass that takes the place of a supported attention module's own."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from fused_rope_attn import (
    rope_attention,
    rope_attention_varlen,
    rope_attention_with_kvcache,
)
from fused_rope_attn.distributed.shards import cp_unshard
from fused_rope_attn.generation import planning
from fused_rope_attn.integrations.transformers import rooms
from fused_rope_attn.integrations.transformers.batch import (
    PAST_NAMES,
    Batch,
    Kept,
    count_written,
    describe_layer,
    may_be_written,
    tokens_seen,
)
from fused_rope_attn.integrations.transformers.conventions import AttentionModule, Convention
from fused_rope_attn.integrations.transformers.norms import HeadNorms, head_norms, unfit_for
from fused_rope_attn.integrations.transformers.paged import attend_paged
from fused_rope_attn.integrations.transformers.rotations import (
    Tables,
    identity,
    kept_of,
    options_of,
    rotated,
    rotated_keys,
    tables_for,
    unturned,
    weights_of,
)
from fused_rope_attn.integrations.transformers.shards import Shared, attend_shard
from fused_rope_attn.integrations.transformers.state import PATCH, Patch, tell

# The keyword under which a decoder's Batch travels to its attention modules: transformers hands unknown ones through.
BATCH = "fused_rope_batch"
# Of attention modules that were called without their decoder: how often their own forward ran, by reason.
_passes_of_layers: Counter[str] = Counter()


def forward(module: AttentionModule, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of hidden states (B, N, width): (output (B, N, width), None), as the module's own forward gives it.

    Called with the keywords that transformers' decoder layers use. Without a Batch (the layer was called, not the
    model) and with more than a plain mask to heed, the module's own forward runs.
    """
    batch = kwargs.pop(BATCH, None)
    past = None
    for name in PAST_NAMES:
        if past is None:
            past = kwargs.get(name)
    if batch is None:
        batch = _batch_of_a_layer(module, bool(args) or past is not None, kwargs)
    patch: Patch = getattr(module, PATCH)
    if (patch.shards is None) != (batch.shared is None):
        raise NotImplementedError(
            "an attention module whose model has a cp_group was called without its model, which alone knows what the "
            "other ranks have: call the model"
        )
    patch.count(batch.original)
    if batch.original:
        own = type(module).forward.__get__(module) if patch.previous is None else patch.previous
        return own(hidden_states, *args, **kwargs)

    convention = patch.convention
    q, k, v, *gate = convention.project(module, hidden_states)
    q, k, norms = _normed(module, convention, q, k, past is not None or batch.paged is not None)
    if convention.query_scale is not None:
        q = q * convention.query_scale(module, kwargs["position_ids"]).to(q.dtype)
    kept = kept_of(batch)
    tables = tables_for(module, convention, kwargs.get("position_embeddings"), q, kept)
    if convention.after_rotation is not None:
        q, k = convention.after_rotation(module, *rotated(q, k, tables, norms))
        norms = None
        tables = identity(q.shape[2], q.device)
    if batch.shared is not None:
        options = _features(module, convention, q, batch) | {"deterministic": patch.deterministic}
        rotation = tables.options | options_of(norms)
        o = attend_shard(batch.shared, q, k, v, *_joined(tables, batch, kept), rotation, options)
    elif batch.paged is not None:
        o = attend_paged(module, q, k, v, tables, norms, batch, _features(module, convention, q, batch))
    elif past is None:
        o = _attend(module, convention, q, k, v, tables, norms, batch, packed=batch.cu_seqlens is not None)
    elif tokens_seen(past, module.layer_idx) == 0:
        # The rotated keys are for the steps to come. This one rotates them again inside attention: cheaper than to
        # write rotated queries and read them back.
        o = _attend(module, convention, q, k, v, tables, norms, batch, packed=batch.declared)
        _begin_cache(k, v, tables, norms, past, module.layer_idx, kept is not None, _cache_options(kwargs))
    else:
        o = attend_cache(module, convention, q, k, v, tables, norms, past, batch, _cache_options(kwargs))
    return convention.finish(module, o.transpose(1, 2).flatten(2), *gate), None


def _normed(
    module: AttentionModule, convention: Convention, q: Tensor, k: Tensor, cached: bool
) -> tuple[Tensor, Tensor, HeadNorms | None]:
    """q, k (B, H, N, D) as the rotation gets them, and the norms that are left for the kernels to compute with it.

    cached: the keys go into a cache.
    """
    pair = convention.norms(module)
    if pair is None:
        return q, k, None
    norms = head_norms(*pair)
    reason = norms if isinstance(norms, str) else unfit_for(norms, q, cached)
    if not torch.compiler.is_compiling():
        getattr(module, PATCH).own_norms = reason
    if not reason:
        return q, k, cast(HeadNorms, norms)
    # The norms are given (B, N, H, D): Cohere's has a weight for every head.
    q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(pair, (q, k)))
    return q, k, None


def _batch_of_a_layer(module: AttentionModule, more: bool, kwargs: dict[str, Any]) -> Batch:
    """The Batch of a module that was called without its decoder. more: with a cache or with unnamed arguments."""
    batch = describe_layer(module, kwargs, more)
    if batch.original:
        tell(_passes_of_layers, batch.original)
    return batch


def _joined(tables: Tables, batch: Batch, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """cos and sin of all ranks' rows, joined once for all layers of a pass, where they may be kept and attention reads
    them by position; else this rank's."""
    shared = cast(Shared, batch.shared)
    if kept is None or shared.plan is not None:
        return tables.arrays
    if tables.joined is None:
        cos, sin = (cp_unshard(table, 1, **shared.shards.options) for table in tables.arrays)
        tables.joined = cos, sin
    return tables.joined


def _features(module: AttentionModule, convention: Convention, q: Tensor, batch: Batch) -> dict[str, Any]:
    """What all attention calls of a module have in common."""
    window = convention.window(module)
    sinks = module.sinks if convention.sinks else None
    if sinks is not None and sinks.dtype not in (torch.float32, q.dtype):
        sinks = sinks.float()
    return {
        "causal": batch.causal,
        "softmax_scale": float(module.scaling),
        "window": None if window is None else _window(window, batch),
        "softcap": float(module.attn_logit_softcapping or 0.0) if convention.softcap else 0.0,
        "sinks": sinks,
    }


def _window(keys: int, batch: Batch) -> tuple[int, int]:
    """(left, right) of a window that transformers gives as a number of keys, the query's own among them."""
    if batch.causal:
        return keys - 1, 0
    reach = keys if batch.inclusive_window else keys - 1
    return reach, reach


def _attend(
    module: AttentionModule,
    convention: Convention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    norms: HeadNorms | None,
    batch: Batch,
    packed: bool,
) -> Tensor:
    """Attention of a batch whose keys are its own tokens: o (B, HQ, N, D)."""
    options = tables.options | _features(module, convention, q, batch)
    options["deterministic"] = getattr(module, PATCH).deterministic
    if not packed:
        options |= options_of(norms)
        return cast(Tensor, rope_attention(q, k, v, *tables.arrays, kv_starts=batch.kv_starts, **options))
    size, _, length, _ = q.shape
    if batch.rotates_first:
        q, k = rotated(q, k, tables, norms)
        still = unturned(q.device, batch)
        cos, sin = still.long(batch.max_seqlen)
        options, norms = options | still.options, None
    else:
        # Tables by position, which all sequences share: scores depend on distances alone.
        cos, sin = (table.expand(size, length, -1).flatten(0, 1)[batch.longest] for table in tables.arrays)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    cu_seqlens, longest = cast(Tensor, batch.cu_seqlens), batch.max_seqlen
    options |= options_of(norms)
    o = cast(Tensor, rope_attention_varlen(q, k, v, cos, sin, cu_seqlens, cu_seqlens, longest, longest, **options))
    return o.unflatten(0, (size, length)).transpose(1, 2)


def _cache_options(kwargs: dict) -> tuple:
    """Of transformers 4.57, whose static caches are told where to write."""
    position = kwargs.get("cache_position")
    return () if position is None else ({"cache_position": position},)


def _begin_cache(
    k: Tensor, v: Tensor, tables: Tables, norms: HeadNorms | None, past: Cache, layer_idx: int, in_place: bool,
    cache_options: tuple,
) -> None:  # fmt: skip
    """Put a batch's keys, normed and rotated, and its values into a cache that holds none. Attention has checked them.

    in_place: where the cache allows it, and not by its ``update``.
    """
    layer = past.layers[layer_idx] if layer_idx < len(past.layers) else None
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, *weights_of(norms)))
    # The model may have made the cache itself, after its batch was described: Batch.rows knows nothing of it.
    if not in_place or type(layer) is not DynamicLayer or wanted or not may_be_written(past):
        past.update(rotated_keys(k, tables, norms), v, layer_idx, *cache_options)
        return
    length = k.shape[2]
    room, room_of_values = rooms.new_room(k, length), rooms.new_room(v, length)
    keys, values = rooms.first_rows(room, length), rooms.first_rows(room_of_values, length)
    rotated_keys(k, tables, norms, out=keys)
    values.copy_(v)
    rooms.begin(layer, keys, values, room)


def attend_cache(
    module: AttentionModule,
    convention: Convention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    norms: HeadNorms | None,
    past: Cache,
    batch: Batch,
    cache_options: tuple,
) -> Tensor:
    """Attention of new tokens over a cache that holds others: o (B, HQ, N, D). Only the new tokens are rotated.

    q (B, HQ, N, D), k and v (B, HKV, N, D) are the new tokens, unrotated, and ``norms`` what is still to be done before
    the rotation; the cache holds normed and rotated keys. The one place that knows how a step with a cache is computed:
    a few tokens by the generation step, which writes static caches itself, many by ``rope_attention``.
    """
    layer, features = past.layers[module.layer_idx], _features(module, convention, q, batch)
    step = _is_step(q, k, v, layer, features["sinks"], *weights_of(norms))
    # Attention knows table rows by their place in the cache, transformers gives the new tokens'. One token's row can
    # stand for all places; several tokens are normed and rotated beforehand, and attention turns nothing.
    single = step and q.shape[2] == 1
    if single:
        inside, options = tables, features | options_of(norms)
    else:
        q, k = rotated(q, k, tables, norms)
        inside, options = unturned(q.device, batch), features
    options |= inside.options
    if step and batch.cached is not None:
        tokens, static = q.shape[2], type(layer) is StaticLayer
        caches = None
        if static:
            caches = layer.keys, layer.values
        elif type(layer) is DynamicLayer and not torch.compiler.is_compiling() and layer.keys.shape[2] == batch.rows:
            caches = rooms.room_for(layer, tokens)
        if caches is not None:
            arrays = inside.long(caches[0].shape[2])
            o = rope_attention_with_kvcache(
                q, *caches, *arrays, k, v, cache_seqlens=batch.cached, kv_starts=batch.kv_starts, **options
            )  # fmt: skip
            if static:
                count_written(layer, tokens)
            else:
                rows = cast(int, batch.rows) + tokens
                keys, values = (rooms.first_rows(cache, rows) for cache in caches)
                rooms.settle(layer, keys, values, caches[0])
            return cast(Tensor, o)
    if single:
        k = rotated_keys(k, tables, norms)
    keys, values = past.update(k, v, module.layer_idx, *cache_options)
    kv_starts, arrays = _starts_among(keys, past, module.layer_idx, batch), inside.long(keys.shape[2])
    if step:
        lengths = cast(Tensor, batch.kv_lens)  # there is a cache
        o = rope_attention_with_kvcache(
            q, keys, values, *arrays, cache_seqlens=lengths, kv_starts=kv_starts, **options
        )  # fmt: skip
        return cast(Tensor, o)
    kv_lens = batch.kv_lens if isinstance(layer, StaticLayer) else None
    return cast(Tensor, rope_attention(q, keys, values, *arrays, kv_starts=kv_starts, kv_lens=kv_lens, **options))


def _is_step(q: Tensor, k: Tensor, v: Tensor, layer: CacheLayerMixin, *others: Tensor | None) -> bool:
    """Whether new tokens take the generation step: few, in the cache's dtype, and nobody wants a gradient.

    others: sinks and weights of norms, which may want one too.
    """
    if not planning.reads_cache_once(q.shape[2], q.shape[1] // k.shape[1]):
        return False
    dtype, kind = q.dtype, q.device.type
    if not (k.dtype is v.dtype is layer.keys.dtype is layer.values.dtype is dtype):
        return False
    # Autocast would give q another dtype than the cache has.
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not dtype:
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(x is not None and x.requires_grad for x in (q, k, v, layer.keys, layer.values, *others))


def _starts_among(keys: Tensor, past: Cache, layer_idx: int, batch: Batch) -> Tensor | None:
    """``batch.kv_starts`` as rows of keys (B, HKV, rows, D): a sliding layer has dropped what came first."""
    if batch.kv_starts is None or not past.layers[layer_idx].is_sliding:
        return batch.kv_starts
    dropped = cast(int, tokens_seen(past, layer_idx)) - keys.shape[2]  # sliding layers count on the host
    return batch.kv_starts - dropped if dropped > 0 else batch.kv_starts
