"""The generation step's reference is attention to the cache after the new tokens are written."""

import math

import pytest
import torch

from fused_rope_attn import rope_attention, rope_tables, write_kvcache
from tests.support.dtypes import F64
from tests.support.internals import with_kvcache

MASKS = {"window": (8, 1), "softcap": 3.0, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=F64)}


@pytest.mark.parametrize("masks", [{}, MASKS], ids=["plain", "masks"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
def test_steps_are_attention_to_the_keys_so_far(rotated, interleaved, causal, masks):
    """A prompt, then chunks and single tokens of two sequences, the second three tokens shorter. Each step is repeated
    without new tokens after they are written: then the queries are the last positions."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 20, 16, dtype=F64)
    k, v = torch.randn(2, 2, 2, 20, 16, dtype=F64)
    caches = torch.full((2, 2, 2, 24, 16), math.nan, dtype=F64)
    cos, sin = rope_tables(24, 16)
    options = {"interleaved": interleaved, "cache_is_rotated": rotated}
    lens = torch.tensor([0, 0], dtype=torch.int32)
    prompt = torch.tensor([6, 3], dtype=torch.int32)
    write_kvcache(k[:, :, :6], v[:, :, :6], *caches, cos, sin, cache_seqlens=lens, new_lens=prompt, **options)
    lens += prompt
    for count in (5, 1, 1, 3):
        ends = lens + count
        part = [torch.stack([x[b, :, e - count : e] for b, e in enumerate(ends.tolist())]) for x in (q, k, v)]
        expected = rope_attention(
            part[0], k, v, cos, sin, causal, kv_lens=ends, interleaved=interleaved, return_lse=True, **masks
        )
        call = (part[0], *caches, cos, sin)
        found = with_kvcache(*call, *part[1:], cache_seqlens=lens, causal=causal, **options, **masks)
        torch.testing.assert_close(found, expected)
        found = with_kvcache(*call, cache_seqlens=ends, causal=causal, **options, **masks)
        torch.testing.assert_close(found, expected)
        lens = ends
    assert torch.equal(caches[1, 0, :, :16], v[0, :, :16]) and caches[:, 1, :, 13:].isnan().all()
