"""The generation step in eager PyTorch: the semantics that its kernel is held to, and the fallback on any device."""

from typing import cast

import torch
from torch import Tensor

from fused_rope_attn.attention.reference import absent_keys, attend, query_rows, visible_keys
from fused_rope_attn.rotation.reference import normalise_tables, rotate


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor,
    *,
    cache_is_rotated: bool,
    causal: bool,
    softmax_scale: float,
    rotary_dim: int,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The generation step in eager PyTorch: arguments as in `fused_rope_attn.rope_attention_with_kvcache`, validated.

    Writes `k` and `v` (B, HKV, NQ, D) into the caches (B, HKV, S, D) at rows `cache_seqlens + i`, k rotated where the
    cache is, and attends like `attention` with `kv_lens` behind the new tokens. A token without a row in the cache is
    not written, and its query is dead. `kv_starts` (B,): keys before it do not exist.
    """
    len_q, capacity = q.shape[2], k_cache.shape[2]
    cos, sin = normalise_tables(cos, sin, rotary_dim, interleaved)
    cached = cache_seqlens.long().clamp(0, capacity).unsqueeze(1)
    index = torch.arange(len_q, device=q.device)
    position = cached + index if k is not None else cached - len_q + index
    position = torch.where(position < capacity, position, -1)
    length = cached
    q_rot = rotate(q, *query_rows(cos, sin, position), interleaved=interleaved)
    if k is not None and v is not None:
        length = (cached + len_q).clamp(max=capacity)
        new = rotate(k, *query_rows(cos, sin, position), interleaved=interleaved) if cache_is_rotated else k
        batch = torch.arange(q.shape[0], device=q.device)
        # One token after the other: what has no row is written as it stands into the last one, which may be another's.
        for i in range(len_q if capacity > 0 else 0):
            row, fits = position[:, i].masked_fill(position[:, i] < 0, capacity - 1), position[:, i] >= 0
            for cache, x in ((k_cache, new), (v_cache, v)):
                cache[batch, :, row] = torch.where(fits[:, None, None], x[:, :, i], cache[batch, :, row])
    position, low, high = visible_keys(position, length, causal, window=window, kv_starts=kv_starts)
    # There are lengths, hence keys to ask about.
    absent = cast(
        Tensor, absent_keys(capacity, position, window=window, kv_starts=kv_starts, kv_lens=length.squeeze(1))
    )
    keys, values = (x.masked_fill(absent[:, None, :, None], 0) for x in (k_cache, v_cache))
    if not cache_is_rotated:
        keys = rotate(keys, cos[:, None, :capacity], sin[:, None, :capacity], interleaved=interleaved)
    return attend(q_rot, keys, values, low, high, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
