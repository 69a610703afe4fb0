"""The forward pass that takes the place of a supported attention module's own."""

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from fused_rope_attn import (
    rope_attention,
    rope_attention_mla,
    rope_attention_mla_varlen,
    rope_attention_varlen,
    rope_attention_with_kvcache,
    write_kvcache,
)
from fused_rope_attn.distributed.api import cp_unshard, rope_attention_cp, rope_attention_varlen_cp
from fused_rope_attn.generation import planning
from fused_rope_attn.integrations.transformers import caches, obstacles, rotations, state
from fused_rope_attn.integrations.transformers.batch import BATCH, Batch, describe_layer, kept_of, type_of
from fused_rope_attn.integrations.transformers.families import AttentionModule, Convention, Latent

# Calls of attention modules without their decoder that ran the module's own forward: their number by reason.
_passes_of_layers: Counter[str] = Counter()


def forward(module: AttentionModule, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attend within hidden states (B, N, width): (output (B, N, width), None), as the module's own forward returns it.
    The keywords are those of transformers' decoder layers. Without a Batch the layer was called, not the model; the
    module's own forward then runs, unless the call has no mask and no cache."""
    batch = kwargs.pop(BATCH, None)
    past = caches.cache_of(kwargs)
    if batch is None:
        batch = describe_layer(module, kwargs, bool(args) or past is not None)
        if batch.original:
            state.warn_of(_passes_of_layers, batch.original)
    patch: state.Patch = getattr(module, state.PATCH)
    if (patch.shards is None) != (batch.shared is None):
        raise NotImplementedError(
            "an attention module whose model has a cp_group was called without its model, but only the model knows the "
            "other ranks' part of the batch: call the model"
        )
    if not torch.compiler.is_compiling():
        patch.calls[batch.original] += 1
    if batch.original:
        if patch.previous is not None:
            return patch.previous(hidden_states, *args, **kwargs)
        return type(module).forward(module, hidden_states, *args, **kwargs)
    if batch.otherwise is not None:
        # flash-attention reads the positions that it is handed. Masks show no sequences once the decoder has a cache,
        # even an empty one that it has made itself.
        reads_positions = patch.hands_positions_on and kwargs.get("position_ids") is not None
        separates = reads_positions if obstacles.uses_flash(module.config) else past is None
        batch = batch if separates else batch.otherwise
    if batch.by_type is not None:
        batch = batch.by_type.get(type_of(module) or "", batch)
    tokens, features, gate = prepared(module, hidden_states, batch, past, kwargs)
    if patch.batch_invariant:
        features["batch_invariant"] = True
    trained = features | {"deterministic": patch.deterministic}  # options of the operators that have gradients
    if batch.shared is not None:
        o = _attend_shard(tokens, batch, trained)
    elif batch.paged is not None:
        o = attend_paged(obstacles.layer_of(module), tokens, batch, features)
    elif past is None:
        o = _attend(tokens, batch, trained)
    else:
        # transformers 4.57 tells static caches by an argument where to write.
        place, position = module.layer_idx, kwargs.get("cache_position")
        cache_options = () if position is None else ({"cache_position": position},)
        if caches.tokens_seen(past, place) != 0:
            o = _attend_cache(place, tokens, past, batch, features, cache_options)
        else:
            # The cache needs rotated keys, but attention rotates them again, because that costs less than to write
            # rotated queries and read them back.
            o = _attend(tokens, batch, trained)
            if tokens.latent is not None:
                keys = tokens.rotated_keys(kept_of(batch))
                past.update(*patch.convention.latent_rows(module, tokens.latent, keys, tokens.v), place, *cache_options)
            else:
                _begin_cache(tokens, past, place, kept_of(batch), cache_options)
    return patch.convention.output(module, o.transpose(1, 2).flatten(2), *gate), None


def prepared(
    module: AttentionModule, hidden_states: Tensor, batch: Batch, past: Any, given: dict[str, Any]
) -> tuple[rotations.Tokens, dict[str, Any], list[Tensor]]:
    """Return the heads of hidden states (B, N, width), the options of attention, and the gate if the module has one.
    past: the cache of the call, or None. given: its other keywords."""
    patch = state.state_of(module, state.PATCH)
    convention: Convention = patch.convention
    q, k, v, *others = convention.heads_of(module, hidden_states)
    # Not by ``pop``, because torch.compile of torch 2.11 takes the list for a tuple.
    latent: Latent | None = others[0] if convention.latent else None
    gate = others if latent is None else others[1:]
    q, k, norms = _normed(module, patch, q, k, past is not None)
    if convention.query_scale is not None:
        q = convention.query_scale(module, q, given, past)
        if latent is not None:
            latent = latent._replace(q_nope=convention.query_scale(module, latent.q_nope, given, past))
    tables = rotations.tables_for(module, convention, given.get("position_embeddings"), q, kept_of(batch))
    tokens = rotations.Tokens(q, k, v, tables, norms, latent)
    after = convention.norms_of(module, after_rotation=True)
    if after is not None:
        tokens = tokens.rotated(kept_of(batch))
        tokens = tokens._replace(q=after[0](tokens.q), k=after[1](tokens.k))
    keys, window = convention.window_of(module) if batch.intervals is None else None, None
    if keys is not None:  # a number that includes the query's own
        reach = keys if batch.inclusive_window else keys - 1
        window = (keys - 1, 0) if batch.causal else (reach, reach)
    features: dict[str, Any] = {"causal": batch.causal, "softmax_scale": float(module.scaling), "window": window}
    if latent is None:
        features |= convention.of_scores(module, q)
        if batch.intervals is not None:
            features["query_starts"], features["query_ends"] = batch.intervals
    return tokens, features, gate


def _normed(
    module: AttentionModule, patch: state.Patch, q: Tensor, k: Tensor, cached: bool
) -> tuple[Tensor, Tensor, rotations.HeadNorms | None]:
    """Return q, k (B, H, N, D), and the norms that the kernels compute. Run the module's own if they cannot."""
    pair = patch.convention.norms_of(module)
    if pair is None:
        return q, k, None
    norms = rotations.head_norms(*pair)
    reason = norms if isinstance(norms, str) else rotations.unfit_for(norms, q, cached)
    if not torch.compiler.is_compiling():
        patch.own_norms = reason
    if not reason:
        return q, k, cast(rotations.HeadNorms, norms)
    # The norms take (B, N, H, D), because Cohere's has a weight for every head.
    q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(pair, (q, k)))
    return q, k, None


def _attend(tokens: rotations.Tokens, batch: Batch, options: dict[str, Any]) -> Tensor:
    """Attend in a batch whose keys are its own tokens: o (B, HQ, N, D)."""
    attend: Any = rope_attention if tokens.latent is None else rope_attention_mla
    attend_packed: Any = rope_attention_varlen if tokens.latent is None else rope_attention_mla_varlen
    if batch.cu_seqlens is None:
        return attend(*tokens.rows, *tokens.tables.arrays, kv_starts=batch.kv_starts, **options | tokens.options)
    size, _, length, _ = tokens.q.shape
    if tokens.latent is not None:  # it takes no tables by token
        tokens = tokens.rotated(kept_of(batch))
        cos, sin = tokens.tables.long(batch.max_seqlen)
    else:
        cos, sin = tokens.tables.mapped(lambda table: table.expand(size, length, -1).flatten(0, 1))
        options["token_tables"] = cos is not None
    rows = (x.transpose(1, 2).flatten(0, 1) for x in tokens.rows)
    lengths = batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen
    o = attend_packed(*rows, cos, sin, *lengths, **options | tokens.options)
    return o.unflatten(0, (size, length)).transpose(1, 2)


def _attend_shard(tokens: rotations.Tokens, batch: Batch, options: dict[str, Any]) -> Tensor:
    """Attend with this rank's rows of a sequence that several ranks share: o (B, HQ, N / P, D)."""
    if batch.plan is not None:
        # A document's rows have different tables on each rank, so rotate them before attention.
        tokens = tokens.rotated(kept_of(batch))
        q, k, v = (x[0].transpose(0, 1) for x in tokens[:3])
        o = rope_attention_varlen_cp(q, k, v, *tokens.tables.arrays, batch.plan, **options | tokens.options)
        return o.transpose(0, 1).unsqueeze(0)
    q, k, v, tables = tokens[:4]
    (cos, sin), ranks = tables.arrays, cast(state.Shards, batch.shared).options
    if kept_of(batch) is not None:  # gather the rows of all ranks once for all layers of a pass
        cos, sin = tables.joined = tables.joined or tables.mapped(lambda table: cp_unshard(table, 1, **ranks))
    return rope_attention_cp(q, k, v, cos, sin, **ranks | options | tokens.options)


def _begin_cache(
    tokens: rotations.Tokens, past: Cache, layer_idx: int, kept: rotations.Kept | None, cache_options: tuple
) -> None:
    """Put a batch's normed and rotated keys, and its values, into an empty cache. Attention has checked them. kept: of
    the pass. With one, write into buffers if the cache allows it; otherwise always call its ``update``."""
    layer = past.layers[layer_idx] if layer_idx < len(past.layers) else None
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (tokens.k, tokens.v, *tokens.weights))
    # Do not ask Batch.rows: the model may have made the cache itself, after its batch was described.
    if kept is None or type(layer) is not DynamicLayer or wanted or not caches.may_be_written(past):
        past.update(tokens.rotated_keys(kept), tokens.v, layer_idx, *cache_options)
        return
    length = tokens.k.shape[2]
    kv_buffers = [caches.new_buffer(x, length) for x in (tokens.k, tokens.v)]
    keys, values = (cache.narrow(2, 0, length) for cache in kv_buffers)
    tokens.rotated_keys(kept, out=keys)
    values.copy_(tokens.v)
    caches.store(layer, keys, values, kv_buffers[0])


def _attend_cache(
    layer_idx: int, tokens: rotations.Tokens, past: Cache, batch: Batch, options: dict[str, Any], cache_options: tuple
) -> Tensor:
    """Attend with new tokens over a cache that holds others, normed and rotated: o (B, HQ, N, D). A few tokens take the
    generation step, which writes static caches itself; more of them take ``rope_attention``."""
    layer, length = past.layers[layer_idx], tokens.q.shape[2]
    step = _is_step(tokens, layer, options["sinks"])
    # Attention reads table rows by place in the cache, but transformers gives those of the new tokens. One token's row
    # can serve all places. Several tokens are normed and rotated before.
    single = step and length == 1
    if not single:
        tokens = tokens.rotated(kept_of(batch))
    tables, options = tokens.tables, options | tokens.options
    if step and batch.cached is not None:
        static, kv_caches = type(layer) is StaticLayer, None
        if static:
            kv_caches = layer.keys, layer.values
        elif type(layer) is DynamicLayer and not torch.compiler.is_compiling() and layer.keys.shape[2] == batch.rows:
            kv_caches = caches.buffers_of(layer, length)
        if kv_caches is not None:
            options |= {"kv_starts": batch.kv_starts, "cache_seqlens": batch.cached}
            arrays = tables.long(kv_caches[0].shape[2])
            o = rope_attention_with_kvcache(tokens.q, *kv_caches, *arrays, tokens.k, tokens.v, **options)
            if static:
                caches.count_written(layer, length)
            else:
                rows = cast(int, batch.rows) + length
                keys, values = (cache.narrow(2, 0, rows) for cache in kv_caches)
                caches.store(layer, keys, values, kv_caches[0])
            return cast(Tensor, o)
    k = tokens.rotated_keys(kept_of(batch)) if single else tokens.k
    keys, values = past.update(k, tokens.v, layer_idx, *cache_options)
    options["kv_starts"], arrays = batch.kv_starts, tables.long(keys.shape[2])
    if batch.kv_starts is not None and layer.is_sliding:  # it has dropped its first tokens, and counts on the host
        dropped = cast(int, caches.tokens_seen(past, layer_idx)) - keys.shape[2]
        if dropped > 0:
            options["kv_starts"] = batch.kv_starts - dropped
    if step:
        options["cache_seqlens"] = batch.kv_lens
        return cast(Tensor, rope_attention_with_kvcache(tokens.q, keys, values, *arrays, **options))
    kv_lens = batch.kv_lens if isinstance(layer, StaticLayer) else None
    return cast(Tensor, rope_attention(tokens.q, keys, values, *arrays, kv_lens=kv_lens, **options))


def _is_step(tokens: rotations.Tokens, layer: CacheLayerMixin, sinks: Tensor | None) -> bool:
    """Return whether new tokens take the generation step: few tokens, in the cache's dtype, without a gradient."""
    q, k, v, keys, values = *tokens[:3], layer.keys, layer.values
    few = planning.reads_cache_once(q.shape[2], q.shape[1] // k.shape[1])
    if not few or not (k.dtype is v.dtype is keys.dtype is values.dtype is q.dtype):
        return False
    # Autocast would give q another dtype than the cache has.
    if torch.is_autocast_enabled(q.device.type) and torch.get_autocast_dtype(q.device.type) is not q.dtype:
        return False
    given = (q, k, v, keys, values, sinks, *tokens.weights)
    return not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in given)


def attend_paged(layer: int, tokens: rotations.Tokens, batch: Batch, features: dict[str, Any]) -> Tensor:
    """Attend with the new tokens of many requests, q (1, HQ, N, D), each over its own pages: o (1, HQ, N, D). If every
    request has one new token, the generation step writes it and reads the pages in place. Otherwise the cache gathers
    all keys of the pass, as for the model's own attention, and packed attention reads them."""
    requests = cast(caches.PagedPass, batch.paged)
    pool = requests.pool(layer)
    pages = requests.pages(pool)
    if pages is not None:
        # Each token of the row becomes a sequence of its own.
        q, k, v = (x.transpose(0, 2) for x in tokens[:3])
        cos, sin = tokens.tables.mapped(lambda table: table.transpose(0, 1))
        tables = rotations.Tables(cos, sin, tokens.tables.options["interleaved"])
        tokens = rotations.Tokens(q, k, v, tables, tokens.norms)
        return _step_in_pages(tokens, pool, pages, features, batch).transpose(0, 2)
    tokens = tokens.rotated(kept_of(batch))
    keys, values = requests.update(tokens.k, tokens.v, layer)
    cu_seqlens_k, longest = requests.keys_of(pool.kind)
    q, (cos, sin) = tokens.q[0].transpose(0, 1), tokens.tables.long(longest)
    sizes = requests.cu_seqlens_q, cu_seqlens_k, requests.max_seqlen_q, longest
    o = rope_attention_varlen(q, keys, values, cos, sin, *sizes, **features | tokens.options)
    return cast(Tensor, o).transpose(0, 1).unsqueeze(0)


def _step_in_pages(
    tokens: rotations.Tokens, pool: caches.Pool, pages: tuple[Tensor, Tensor], features: dict[str, Any], batch: Batch
) -> Tensor:
    """Return o (B, HQ, 1, D) of q (B, HQ, 1, D), k and v (B, HKV, 1, D), and tables (B, 1, R/2)."""
    kv_caches = pool.keys.transpose(1, 2), pool.values.transpose(1, 2)
    (block_table, lengths), new = pages, cast(tuple, tokens[1:3])
    rows = block_table.shape[1] * pool.page_size
    arrays, options = tokens.tables.long(rows), features | tokens.options | {"block_table": block_table}
    if pool.window is not None:
        # The pages hold the last ``window`` keys, and the new token replaces the oldest. The query sees all of them in
        # any order, because they are rotated.
        k, tables = tokens.k, tokens.tables
        if tokens.norms is not None:  # write_kvcache has no norms
            k, tables = tokens.rotated_keys(kept_of(batch)), rotations.Tables()
        places = tables.options | {"cache_seqlens": lengths % pool.window, "block_table": block_table}
        write_kvcache(k, tokens.v, *kv_caches, *tables.long(rows), **places)
        new, lengths, options["window"] = (None, None), (lengths + 1).clamp(max=pool.window), None
    options["cache_seqlens"] = lengths
    return cast(Tensor, rope_attention_with_kvcache(tokens.q, *kv_caches, *arrays, *new, **options))
