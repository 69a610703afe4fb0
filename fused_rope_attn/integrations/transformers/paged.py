"""Attention of a pass of continuous batching, over transformers' paged cache."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from fused_rope_attn import rope_attention_varlen, rope_attention_with_kvcache, write_kvcache
from fused_rope_attn.integrations.transformers.batch import Batch
from fused_rope_attn.integrations.transformers.pages import PagedPass, Pages, Pool
from fused_rope_attn.integrations.transformers.rotations import Tokens, identity_row


def attend_paged(layer: int, tokens: Tokens, batch: Batch, features: dict[str, Any]) -> Tensor:
    """Attend with the new tokens of many requests, each over its own pages: o (1, HQ, N, D).

    layer: the layer's index in the cache. tokens: q (1, HQ, N, D), k and v (1, HKV, N, D). features: the options of
    attention. Keys are written normed and rotated, as transformers' own attention writes them.

    If every request has one new token, the generation step writes it and reads the pages in place. Otherwise the cache
    gathers all keys of the pass, as it does for the model's own attention, and packed attention reads them.
    """
    paged = cast(PagedPass, batch.paged)
    pool = paged.pool(layer)
    pages = paged.pages(pool)
    if pages is not None:
        q, k, v = (x.transpose(0, 2) for x in tokens[:3])
        tokens = Tokens(q, k, v, tokens.tables.by_token(), tokens.norms)
        return _step(tokens, pool, pages, features, batch).transpose(0, 2)
    tokens = tokens.rotated(identity_row(tokens.q.device, batch))
    keys, values = paged.update(tokens.k, tokens.v, layer)
    cu_seqlens_k, longest = paged.keys_of(pool.kind)
    q, (cos, sin) = tokens.q[0].transpose(0, 1), tokens.tables.long(longest)
    sizes = paged.cu_seqlens_q, cu_seqlens_k, paged.max_seqlen_q, longest
    o = rope_attention_varlen(q, keys, values, cos, sin, *sizes, **features | tokens.options)
    return cast(Tensor, o).transpose(0, 1).unsqueeze(0)


def _step(tokens: Tokens, pool: Pool, pages: Pages, features: dict[str, Any], batch: Batch) -> Tensor:
    """Return o (B, HQ, 1, D) of q (B, HQ, 1, D), k and v (B, HKV, 1, D), and tables (B, 1, R/2)."""
    caches = pool.keys.transpose(1, 2), pool.values.transpose(1, 2)
    rows = pages.table.shape[1] * pool.page_size
    arrays, options = tokens.tables.long(rows), features | tokens.options | {"block_table": pages.table}
    lengths, new = pages.lengths, cast(tuple, tokens[1:3])
    if pool.window is not None:
        # The pages hold the last ``window`` keys, and the new token replaces the oldest. The query sees all of them in
        # any order, because they are rotated.
        _write_to_ring(tokens, caches, pages, pool.window, batch)
        new, lengths, options["window"] = (None, None), (lengths + 1).clamp(max=pool.window), None
    return cast(Tensor, rope_attention_with_kvcache(tokens.q, *caches, *arrays, *new, cache_seqlens=lengths, **options))


def _write_to_ring(tokens: Tokens, caches: tuple[Tensor, Tensor], pages: Pages, window: int, batch: Batch) -> None:
    """Write the new tokens at their positions modulo the window."""
    k, tables = tokens.k, tokens.tables
    if tokens.norms is not None:  # write_kvcache has no norms
        k, tables = tokens.rotated_keys(), identity_row(k.device, batch)
    arrays = tables.long(pages.table.shape[1] * caches[0].shape[2])
    options = tables.options | {"cache_seqlens": pages.lengths % window, "block_table": pages.table}
    write_kvcache(k, tokens.v, *caches, *arrays, **options)
