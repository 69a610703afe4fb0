"""Caches of a benchmark's step in pages and in float8, and who attends to pages without a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.suites.generation.step import Run, Step
from fused_rope_attn.generation.cache_reference import quantise, stored

# A power of two, with which normally distributed numbers fill float8_e4m3fn's range.
FLOAT8_SCALE = 2.0**-6


def pools_of(step: Step, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(K's pool, V's pool, block_table) of a step's caches, with no more pages than the lengths need, in random order.

    In memory a pool is (num_pages, page_size, HKV, D), as servers have it. Entries that nobody needs are -1.
    """
    _, heads, capacity, head_dim = step.k_cache.shape
    counts = [-(-(length + 1) // page_size) for length in step.lengths.tolist()]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(sum(counts), generator=generator).to(step.q.device)
    shape = (sum(counts), page_size, heads, head_dim)
    pools = [torch.empty(shape, dtype=step.k_cache.dtype, device=step.q.device).transpose(1, 2) for _ in range(2)]
    table = torch.full((len(counts), capacity // page_size), -1, dtype=torch.int32, device=step.q.device)
    for b, entries in enumerate(order.split(counts)):
        table[b, : len(entries)] = entries
        for pool, cache in zip(pools, (step.k_cache, step.v_cache)):
            rows = stored(cache)[b, :, : len(entries) * page_size]
            stored(pool)[entries] = rows.unflatten(1, (-1, page_size)).transpose(0, 1)
    return pools[0], pools[1], table


def in_float8(step: Step) -> tuple[Step, dict[str, Tensor]]:
    """The step with float8 caches, and their scales."""
    scale = torch.full((1,), FLOAT8_SCALE, device=step.q.device)
    caches = {name: quantise(getattr(step, name), scale) for name in ("k_cache", "v_cache")}
    return step._replace(**caches), {"k_scale": scale, "v_scale": scale}


def stored_step(page_size: int | None, float8: bool) -> Callable[[Step], Run]:
    """Our step on the caches in pages, in float8, or both."""

    def make(step: Step) -> Run:
        from fused_rope_attn import rope_attention_with_kvcache

        options: dict[str, Tensor] = {}
        if float8:
            step, options = in_float8(step)
        q, k, v, k_cache, v_cache, lengths, cos, sin = step
        if page_size is not None:
            k_cache, v_cache, options["block_table"] = pools_of(step, page_size)
        return lambda: rope_attention_with_kvcache(
            q, k_cache, v_cache, cos, sin, k, v, cache_seqlens=lengths, **options
        )  # fmt: skip

    return make


def gathering(page_size: int) -> Callable[[Step], Run]:
    """What serves pages without a kernel for them: rotate, write, gather into contiguous tensors, SDPA.

    All sequences are as long.
    """

    def make(step: Step) -> Run:
        from fused_rope_attn import apply_rope_qk

        q, k, v, _, _, lengths, cos, sin = step
        k_pool, v_pool, table = pools_of(step, page_size)
        row, index = lengths[:1].long(), table.flatten().long()
        last, slot = table[:, -1].long(), int(lengths[0]) % page_size

        def run() -> Tensor:
            q_rot, k_rot = apply_rope_qk(q, k, cos, sin, position_ids=row)
            gathered = []
            for pool, new in ((k_pool, k_rot), (v_pool, v)):
                pool[last, :, slot] = new[:, :, 0]
                gathered.append(pool.index_select(0, index).unflatten(0, table.shape).transpose(1, 2).flatten(2, 3))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q_rot, *gathered, enable_gqa=True)

        return run

    return make
