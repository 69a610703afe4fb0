"""A pool of pages with two sequences in it, on a GPU."""

import torch

from fused_rope_attn import rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation.reference import stored
from tests.support.dtypes import BF16

PAGE, PAGES, HEADS, HEAD_DIM = 16, 20, (8, 2), 128


class Server:
    """Two sequences of up to PAGES pages of a pool of 64, in bfloat16 or float8; nothing is written twice."""

    def __init__(self, float8=False):
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device="cuda", dtype=BF16)

        self.pools = [normal(64, PAGE, HEADS[1], HEAD_DIM).transpose(1, 2) for _ in range(2)]
        self.options = {}
        if float8:
            self.pools = [(50 * x).to(torch.float8_e4m3fn) for x in self.pools]
            self.options = {"k_scale": torch.tensor(0.02, device="cuda"), "v_scale": torch.full((2,), 0.02).cuda()}
        self.tokens = [normal(2, heads, 1, HEAD_DIM) for heads in (HEADS[0], HEADS[1], HEADS[1])]
        self.tables = rope_tables(PAGE * PAGES, HEAD_DIM, device="cuda")
        order = torch.randperm(64, generator=generator, device="cuda").int()
        self.table = order[: 2 * PAGES].view(2, PAGES).clone()
        self.spare = order[2 * PAGES :]
        self.lens = torch.tensor([37, 250], dtype=torch.int32, device="cuda")

    def __call__(self):
        q, k, v = self.tokens
        return rope_attention_with_kvcache(
            q,
            *self.pools,
            *self.tables,
            k,
            v,
            cache_seqlens=self.lens,
            block_table=self.table,
            return_lse=True,
            **self.options,
        )

    def advance(self, step):
        """The second sequence moves a page elsewhere now and then; all grow."""
        if step % 5 == 2:
            page = step // 5
            for pool in self.pools:
                number = pool.view(torch.uint8) if pool.element_size() == 1 else pool
                number[self.spare[page].long()] = number[self.table[1, page].long()]
            self.table[1, page] = self.spare[page]
        self.lens += 1


def pages_of(k_cache, v_cache, page):
    """(K's pool, V's pool, block_table) of contiguous caches on a GPU, in pages of ``page`` rows in random order."""
    batch, _, capacity, _ = k_cache.shape
    order = torch.randperm(batch * capacity // page, generator=torch.Generator().manual_seed(0)).to(k_cache.device)
    pools = []
    for cache in (k_cache, v_cache):
        rows = stored(cache).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        pool = torch.empty_like(rows)
        pool[order] = rows
        pools.append(pool.view(cache.dtype))
    return *pools, order.view(batch, -1).int()
