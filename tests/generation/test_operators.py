"""The generation step as PyTorch sees it: what it changes, the dispatcher, torch.compile, autocast, inference mode."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_with_kvcache, rope_tables
from tests.support.dtypes import F32
from tests.support.generation import PLAIN, TINY, hold, make_inputs, run_kernels, run_reference
from tests.support.internals import OPERATORS, kvcache_arguments, with_kvcache
from tests.support.marks import ignore_overflow, interpreted


@interpreted
def test_inputs_stay_and_autograd_sees_the_caches_change():
    inputs = make_inputs(PLAIN, F32)
    kept = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, inputs.cache_seqlens)]
    versions = [x._version for x in inputs[1:3]]
    run_kernels(PLAIN, inputs)
    now = (inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, inputs.cache_seqlens)
    assert all(torch.equal(x, y) for x, y in zip(kept, now))
    assert all(x._version > version for x, version in zip(inputs[1:3], versions))
    versions = [x._version for x in inputs[1:3]]
    run_kernels(replace(PLAIN, append=False), inputs._replace(k=None, v=None))
    assert versions == [x._version for x in inputs[1:3]]


@interpreted
def test_inference_mode():
    with torch.inference_mode():
        failures = [result for result in hold(PLAIN, F32) if not result.ok]
    assert not failures, failures


@interpreted
@pytest.mark.parametrize("empty", ["batch", "queries", "capacity"])
def test_nothing_to_do(empty):
    batch, len_q, capacity = (0 if empty == what else 2 for what in ("batch", "queries", "capacity"))
    q = torch.randn(batch, 4, len_q, 16)
    k_cache, v_cache = torch.randn(2, batch, 2, capacity, 16)
    cos, sin = rope_tables(8, 16)
    lens = torch.zeros(batch, dtype=torch.int32)
    for backend in ("reference", "triton"):
        o, lse = with_kvcache(q, k_cache, v_cache, cos, sin, cache_seqlens=lens, return_lse=True, backend=backend)
        assert o.shape == q.shape and lse.shape == q.shape[:3]
        assert bool((o == 0).all()) and bool((lse == -math.inf).all())


@interpreted
@ignore_overflow
def test_kernels_and_reference_agree_on_padded_prompts():
    """Keys before ``kv_starts`` do not exist, not even NaN."""
    inputs = make_inputs(PLAIN, F32)
    starts = torch.tensor([20, 0], dtype=torch.int32)
    inputs.v_cache[0, :, :20] = math.nan
    results = []
    for backend in ("reference", "triton"):
        q, k_cache, v_cache, cos, sin, k, v, lens, _ = (x if x is None else x.clone() for x in inputs[:9])
        results.append(
            with_kvcache(
                q,
                k_cache,
                v_cache,
                cos,
                sin,
                k,
                v,
                cache_seqlens=lens,
                kv_starts=starts,
                return_lse=True,
                backend=backend,
            )
        )
    torch.testing.assert_close(*results)


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("append", [True, False])
def test_opcheck(append):
    check = replace(TINY, append=append, sinks=True)
    q, k_cache, v_cache, cos, sin, k, v, lens, sinks = make_inputs(check, F32)[:9]
    k_cache, v_cache = (x.nan_to_num() for x in (k_cache, v_cache))
    arguments = kvcache_arguments(q, k_cache, v_cache, cos, sin, k, v, lens, sinks)
    torch.library.opcheck(OPERATORS.attention_with_kvcache.default, arguments)


@interpreted
@pytest.mark.unpoisoned
def test_compile_writes_the_caches():
    torch._dynamo.reset()
    inputs = make_inputs(TINY, F32)

    def step(q, k_cache, v_cache, k, v, lens):
        o, lse = with_kvcache(
            2 * q, k_cache, v_cache, inputs.cos, inputs.sin, k, v, cache_seqlens=lens, return_lse=True, backend="triton"
        )
        return o + 1, lse, k_cache.nan_to_num().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [x.clone() for x in inputs[1:3]]
        out = [
            function(inputs.q, *caches, inputs.k, inputs.v, lens)
            for lens in (inputs.cache_seqlens, torch.ones(1).int())
        ]
        results.append([*out, *caches])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(results[0][2].nan_to_num(), inputs.k_cache.nan_to_num())


def test_compile_of_the_reference():
    torch._dynamo.reset()
    inputs = make_inputs(PLAIN, F32)

    def step(q, k_cache, v_cache, k, v, lens):
        return rope_attention_with_kvcache(
            q, k_cache, v_cache, inputs.cos, inputs.sin, k, v, cache_seqlens=lens, return_lse=True
        )

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [x.clone() for x in inputs[1:3]]
        results.append([*function(inputs.q, *caches, inputs.k, inputs.v, inputs.cache_seqlens), *caches])
    torch.testing.assert_close(*results, equal_nan=True)


def test_autocast_casts_the_new_tokens():
    inputs = make_inputs(PLAIN, torch.bfloat16)
    wide = [x.float() for x in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast("cpu", torch.bfloat16):
        o = rope_attention_with_kvcache(wide[0], *inputs[1:5], *wide[1:], cache_seqlens=inputs.cache_seqlens)
    expected, *_ = run_reference(PLAIN, make_inputs(PLAIN, torch.bfloat16), torch.bfloat16)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
