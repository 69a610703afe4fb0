"""The same bits of a row in any batch, pack, chunk and cache, on a GPU. ``SAME_BITS_PAIRS`` asks for more pairs."""

import os
import random
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_with_kvcache, rope_tables
from tests.support.dtypes import BF16, F16
from tests.support.hopper import needs_sm_90
from tests.support.internals import Calls, generation_planning, write
from tests.support.same_bits import WAYS, differing_rows, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("features", ["plain", "norms", "masks"])
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_sm_90)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_rows_have_the_same_bits(backend, head_dim, dtype, features):
    longest = random.Random(head_dim)
    for seed in range(int(os.environ.get("SAME_BITS_PAIRS", 10))):
        most = longest.choice([100, 1000, 1000, 4000, 20000])
        call, draw = drawn(seed, "cuda", dtype, head_dim, most, backend, features)
        if seed % 2:  # a few far larger keys, so that the maximum of a row moves late
            call.k[:, :, ::7] *= 8
        way = WAYS[seed % len(WAYS)]
        assert differing_rows(call, way, draw) == 0, (seed, way.__name__, call.q.shape, call.options)


@pytest.mark.parametrize(
    "least_units",
    [pytest.param(1, id="one loop", marks=needs_sm_90), pytest.param(1 << 30, id="split", marks=needs_sm_90)],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_both_ways_of_an_ordered_step(least_units, tokens, monkeypatch):
    """A step of 8 query heads for each key head, in pages, of sequences of different lengths."""
    kept = generation_planning.ordered_config

    def config(problem):
        return replace(kept(problem), least_units=least_units)

    monkeypatch.setattr(generation_planning, "ordered_config", config)
    Calls.forget_all()
    generator = torch.Generator(device="cuda").manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(BF16)

    length, pages = 700, 48
    q, k, v = normal(2, 16, length, 128), normal(2, 2, length, 128), normal(2, 2, length, 128)
    cos, sin = rope_tables(16 * pages, 128, device="cuda")
    expected, expected_lse = rope_attention(q, k, v, cos, sin, True, return_lse=True, batch_invariant=True)
    pool_k, pool_v = (normal(2 * pages, 2, 16, 128) for _ in range(2))
    table = torch.randperm(2 * pages, generator=generator, device="cuda").int().view(2, pages)
    done = torch.tensor([length - tokens, 300], dtype=torch.int32, device="cuda")
    none = torch.zeros_like(done)
    write(k, v, pool_k, pool_v, cos, sin, cache_seqlens=none, block_table=table, rotary_dim=128, interleaved=False)
    rows = [torch.arange(int(x), int(x) + tokens, device="cuda") for x in done]
    of_step = [torch.stack([x[b, :, r] for b, r in enumerate(rows)]) for x in (q, k, v)]
    o, lse = rope_attention_with_kvcache(
        of_step[0], pool_k, pool_v, cos, sin, *of_step[1:], cache_seqlens=done, block_table=table, return_lse=True,
        batch_invariant=True,
    )  # fmt: skip
    Calls.forget_all()
    for b, r in enumerate(rows):
        assert torch.equal(o[b], expected[b, :, r]) and torch.equal(lse[b], expected_lse[b, :, r]), b
