"""Attention of a pass of continuous batching, over transformers' paged cache."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from fused_rope_attn import rope_attention_varlen, rope_attention_with_kvcache, write_kvcache
from fused_rope_attn.integrations.transformers.batch import Batch
from fused_rope_attn.integrations.transformers.conventions import AttentionModule
from fused_rope_attn.integrations.transformers.norms import HeadNorms
from fused_rope_attn.integrations.transformers.obstacles import layer_of
from fused_rope_attn.integrations.transformers.pages import PagedPass, Pages, Pool
from fused_rope_attn.integrations.transformers.rotations import (
    Tables,
    options_of,
    rotated,
    rotated_keys,
    unturned,
)


def attend_paged(
    module: AttentionModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    norms: HeadNorms | None,
    batch: Batch,
    features: dict[str, Any],
) -> Tensor:
    """Attention of the new tokens of many requests, each over its own pages: o (1, HQ, N, D).

    q (1, HQ, N, D), k and v (1, HKV, N, D) are the new tokens, unrotated; ``norms`` as in ``attend_cache``, and
    ``features`` the options of attention. Keys are written normed and rotated, as transformers' own attention does it.

    Where every request has one new token, the generation step writes it and reads the pages in place. Otherwise the
    cache gathers all keys of the pass, as it does for the model's own attention, and packed attention reads them.
    """
    paged, layer = cast(PagedPass, batch.paged), layer_of(module)
    pool = paged.pool(layer)
    pages = paged.pages(pool)
    if pages is not None:
        step = _step if pool.window is None else _ring_step
        q, k, v = (x.transpose(0, 2) for x in (q, k, v))
        return step(q, k, v, tables.by_token(), norms, pool, pages, features, batch).transpose(0, 2)
    q, k = rotated(q, k, tables, norms)
    keys, values = paged.update(k, v, layer)
    cu_seqlens_k, max_seqlen_k = paged.keys_of(pool.kind)
    still = unturned(q.device, batch)
    o = rope_attention_varlen(
        q[0].transpose(0, 1), keys, values, *still.long(max_seqlen_k), paged.cu_seqlens_q, cu_seqlens_k,
        paged.max_seqlen_q, max_seqlen_k, **features | still.options,
    )  # fmt: skip
    return cast(Tensor, o).transpose(0, 1).unsqueeze(0)


def _step(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, norms: HeadNorms | None, pool: Pool, pages: Pages,
    features: dict[str, Any], batch: Batch,
) -> Tensor:  # fmt: skip
    """o (B, HQ, 1, D) of q (B, HQ, 1, D), k and v (B, HKV, 1, D), and tables (B, 1, R/2)."""
    caches = pool.keys.transpose(1, 2), pool.values.transpose(1, 2)
    arrays = tables.long(pages.table.shape[1] * pool.page_size)
    o = rope_attention_with_kvcache(
        q, *caches, *arrays, k, v, cache_seqlens=pages.lengths, block_table=pages.table,
        **features | tables.options | options_of(norms),
    )  # fmt: skip
    return cast(Tensor, o)


def _ring_step(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, norms: HeadNorms | None, pool: Pool, pages: Pages,
    features: dict[str, Any], batch: Batch,
) -> Tensor:  # fmt: skip
    """As ``_step`` over pages that hold no more keys than a window has, the new token in the place of the oldest.

    All keys that are there are seen, whose order does not matter, because they are rotated.
    """
    window = cast(int, pool.window)
    caches = pool.keys.transpose(1, 2), pool.values.transpose(1, 2)
    arrays = tables.long(pages.table.shape[1] * pool.page_size)
    turning, written = tables.options, arrays
    if norms is not None:  # the writing launch has no norms
        k, still = rotated_keys(k, tables, norms), unturned(k.device, batch)
        turning, written = still.options, still.long(arrays[0].shape[1])
    write_kvcache(
        k, v, *caches, *written, cache_seqlens=pages.lengths % window, block_table=pages.table, **turning
    )  # fmt: skip
    options = features | tables.options | options_of(norms) | {"window": None}
    o = rope_attention_with_kvcache(
        q, *caches, *arrays, cache_seqlens=(pages.lengths + 1).clamp(max=window), block_table=pages.table, **options
    )
    return cast(Tensor, o)
