"""The generation step's reference: attention to the cache after the new tokens are written."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.attention import reference
from tests.support.dtypes import F64
from tests.support.generation import PLAIN, make_inputs, run_reference
from verification.matrix import step


def rows_of(inputs, check, rotated):
    """float64 caches with the new tokens in their places, written one by one, and the lengths afterwards."""
    k_cache, v_cache = (x.double().clone() for x in inputs[1:3])
    lens = inputs.cache_seqlens.clone()
    for b, length in enumerate(check.lengths):
        for i in range(check.len_q):
            k = inputs.k[b, :, i].double()
            if rotated:
                position = slice(length + i, length + i + 1)
                k = reference.rotate(
                    k[:, None],
                    inputs.cos[position].double(),
                    inputs.sin[position].double(),
                    interleaved=check.interleaved,
                )[:, 0]
            k_cache[b, :, length + i] = k
            v_cache[b, :, length + i] = inputs.v[b, :, i].double()
        lens[b] = length + check.len_q
    return k_cache, v_cache, lens


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_is_attention_to_the_written_cache(interleaved, causal):
    """With raw keys it is ``rope_attention`` with ``kv_lens``, and with rotated keys the same."""
    check = step(
        "",
        (4, 2),
        3,
        40,
        16,
        (30, 2),
        rotated=False,
        interleaved=interleaved,
        causal=causal,
        window=(8, 1),
        sinks=True,
        softcap=3.0,
    )
    inputs = make_inputs(check, F64)
    k_cache, v_cache, lens = rows_of(inputs, check, rotated=False)
    expected = rope_attention(
        inputs.q,
        k_cache,
        v_cache,
        inputs.cos,
        inputs.sin,
        causal,
        interleaved=interleaved,
        window=(8, 1),
        sinks=inputs.sinks,
        softcap=3.0,
        kv_lens=lens,
        return_lse=True,
        backend="reference",
    )
    raw = run_reference(check, inputs, F64)
    torch.testing.assert_close(raw[:2], expected)
    torch.testing.assert_close(raw[2:], (k_cache, v_cache), equal_nan=True, rtol=0, atol=0)
    turned = reference.rotate(inputs.k_cache, inputs.cos.double(), inputs.sin.double(), interleaved=interleaved)
    rotated = run_reference(replace(check, rotated=True), inputs._replace(k_cache=turned), F64)
    torch.testing.assert_close(rotated[:2], expected)
    k_cache, _, _ = rows_of(inputs._replace(k_cache=turned), check, rotated=True)
    torch.testing.assert_close(rotated[2], k_cache, equal_nan=True)


def test_without_new_tokens_the_queries_stand_at_the_end():
    check = replace(PLAIN, append=False, rotated=False, lengths=(30, 1))
    inputs = make_inputs(check, F64)
    o, lse, k_cache, v_cache = run_reference(check, inputs, F64)
    expected = rope_attention(*inputs[:5], True, kv_lens=inputs.cache_seqlens, return_lse=True, backend="reference")
    torch.testing.assert_close((o, lse), expected)
    assert bool((o[1, :, 0] == 0).all()) and bool((lse[1, :, 0] == -math.inf).all())  # before position 0
    torch.testing.assert_close((k_cache, v_cache), inputs[1:3], equal_nan=True, rtol=0, atol=0)


def test_token_by_token_is_all_at_once():
    """Generation of a causal sequence gives the rows of attention to all of it, with both kinds of cache."""
    torch.manual_seed(0)
    length, heads_q, heads_kv, head_dim = 12, 4, 2, 16
    q = torch.randn(2, heads_q, length, head_dim, dtype=F64)
    k, v = torch.randn(2, 2, heads_kv, length, head_dim, dtype=F64)
    cos, sin = rope_tables(20, head_dim)
    whole = rope_attention(q, k, v, cos, sin, True)
    for rotated in (True, False):
        k_cache, v_cache = torch.full((2, 2, heads_kv, 20, head_dim), math.nan, dtype=F64)
        lens = torch.zeros(2, dtype=torch.int32)
        for start, count in ((0, 5), *((n, 1) for n in range(5, length))):
            part = slice(start, start + count)
            o = rope_attention_with_kvcache(
                q[:, :, part],
                k_cache,
                v_cache,
                cos,
                sin,
                k[:, :, part],
                v[:, :, part],
                cache_seqlens=lens,
                cache_is_rotated=rotated,
            )
            torch.testing.assert_close(o, whole[:, :, part])
            assert bool((lens == start).all())
            lens += count
