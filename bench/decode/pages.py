"""The tensors of a step of generation, its caches in pages and in float8, and rivals that attend to pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baselines.attentions import SDPA_FLASH, first
from fused_rope_attn.generation.reference import quantise, stored


class Step(NamedTuple):
    """q (B, HQ, 1, D), k and v (B, HKV, 1, D), caches (B, HKV, S, D), lengths (B,) int32, tables (S, D/2)."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def bytes(self) -> int:
        """Return what must be read: keys and values once. Everything else is a thousandth of it."""
        heads, head_dim = self.k.shape[1], self.k.shape[3]
        return 2 * int((self.lengths + 1).sum()) * heads * head_dim * self.k.element_size()


Run = Callable[[], Tensor]


# A power of two, with which normally distributed numbers fill float8_e4m3fn's range.
FLOAT8_SCALE = 2.0**-6


def pools_of(step: Step, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pool of K, pool of V, block_table) of a step's caches, with as many pages as the lengths need, shuffled.

    In memory a pool is (num_pages, page_size, HKV, D), as servers have it. Entries past a sequence's end are -1.
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


def ours(page_size: int | None = None, float8: bool = False, **fixed: bool) -> Callable[[Step], Run]:
    """Return what makes our step with ``fixed`` options, on contiguous caches, in pages, in float8, or both."""

    def make(step: Step) -> Run:
        from fused_rope_attn import rope_attention_with_kvcache

        options: dict[str, Any] = {"cache_seqlens": step.lengths, **fixed}
        if float8:
            scale = torch.full((1,), FLOAT8_SCALE, device=step.q.device)
            options |= {"k_scale": scale, "v_scale": scale}
            step = step._replace(**{name: quantise(getattr(step, name), scale) for name in ("k_cache", "v_cache")})
        q, k, v, k_cache, v_cache, _, cos, sin = step
        if page_size is not None:
            k_cache, v_cache, options["block_table"] = pools_of(step, page_size)
        given = q, k_cache, v_cache, cos, sin, k, v
        return lambda: rope_attention_with_kvcache(*given, **options)

    return make


# (q (B, HQ, 1, D) rotated, pools of keys and values, the step) -> o (B, HQ, 1, D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_parts(page_size: int, prepare: Callable[[Step, Tensor], Attend]) -> Callable[[Step], Run]:
    """Return what makes a step of a rival that only attends to pages: rotate in one launch, write each pool in one.

    prepare: ``prepare(step, table)`` returns the attention; entries of ``table`` past a sequence's end are 0.
    """

    def make(step: Step) -> Run:
        from fused_rope_attn import apply_rope_qk

        q, k, v, _, _, lengths, cos, sin = step
        k_pool, v_pool, table = pools_of(step, page_size)
        table = table.clamp_min(0)
        attend = prepare(step, table)
        row = lengths.long().unsqueeze(1)
        page, slot = table.long().gather(1, row // page_size).squeeze(1), row.squeeze(1) % page_size

        def run() -> Tensor:
            q_rot, k_rot = apply_rope_qk(q, k, cos, sin, position_ids=row)
            for pool, new in ((k_pool, k_rot), (v_pool, v)):
                pool[page, :, slot] = new[:, :, 0]
            return attend(q_rot, k_pool, v_pool)

        return run

    return make


def gathered(step: Step, table: Tensor) -> Attend:
    """Gather pages into contiguous tensors and call SDPA. All sequences have the same length."""
    index = table.flatten().long()

    def attend(q: Tensor, *pools: Tensor) -> Tensor:
        found = [pool.index_select(0, index).unflatten(0, table.shape).transpose(1, 2).flatten(2, 3) for pool in pools]
        return SDPA_FLASH.attend(q, *found, False)

    return attend


def by_flash_attention_4(step: Step, table: Tensor) -> Attend:
    """Call FlashAttention-4 on pages. On sm_90 it does not split the keys of a sequence among multiprocessors."""
    from flash_attn.cute import flash_attn_varlen_func

    used = step.lengths + 1

    def attend(q: Tensor, *pools: Tensor) -> Tensor:
        k, v = (pool.transpose(1, 2) for pool in pools)
        o = flash_attn_varlen_func(q.transpose(1, 2), k, v, seqused_k=used, page_table=table, causal=True)
        return first(o).transpose(1, 2)

    return attend


def by_flashinfer(step: Step, table: Tensor) -> Attend:
    """Call FlashInfer on pages, planned for these lengths on the host before any clock runs."""
    import flashinfer

    _, heads_kv, capacity, head_dim = step.k_cache.shape
    page_size = capacity // table.shape[1]
    used = step.lengths.cpu() + 1
    counts = -(-used // page_size)
    ends = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    index = torch.cat([row[:count] for row, count in zip(table, counts.tolist())])
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = ((used - 1) % page_size + 1).to(table.device)
    dtypes = {"q_data_type": step.q.dtype, "kv_data_type": step.q.dtype}
    wrapper.plan(ends.to(table.device), index, last, step.q.shape[1], heads_kv, head_dim, page_size, **dtypes)

    def attend(q: Tensor, *pools: Tensor) -> Tensor:
        k, v = (pool.transpose(1, 2) for pool in pools)
        return wrapper.run(q[:, :, 0], (k, v)).unsqueeze(2)

    return attend
