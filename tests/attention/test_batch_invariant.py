"""The same bits of a row in any batch, pack, chunk and cache, by the portable kernels in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import (
    plan,
    rope_attention,
    rope_attention_varlen,
    rope_attention_with_kvcache,
    rope_tables,
)
from tests.support.calls import INTERPRETER, assert_right
from tests.support.dtypes import F16, F32
from tests.support.marks import ignore_overflow, interpreted
from tests.support.same_bits import drawn, later_tables, padded, starts as kv_starts
from verification.calls import FUNCTIONS
from verification.interpreter import products_in_float64
from verification.pairs import PairCheck, Way
from verification.workers import run_check


@pytest.fixture
def exact_products():
    with products_in_float64():
        yield


PLAIN = PairCheck(1, 4, 2, 90, 90, 32, rotary_dim=32, seed=1, variants=(("triton", "auto"),), page_size=48)
WAYS = {
    "a batch": Way("batch", 0, 90, batch=3, place=1),
    "a prefix": Way("batch", 0, 61),
    "the last rows": Way("batch", 37, 90, after=9),
    "left padding": Way("batch", 0, 90, before=45),
    "a pack": Way("pack", 0, 90, before=33, after=5, batch=3, place=1),
    "a chunk of a packed sequence": Way("pack", 40, 77, before=7, batch=2, place=1),
    "a cache": Way("cache", 59, 60, after=30, batch=2),
    "a cache with left padding": Way("cache", 59, 64, before=13),
    "pages": Way("pages", 50, 90, batch=2, place=1),
    "keys of the cache alone": Way("pages", 59, 60, appends=False),
}


@interpreted
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_way(way):
    assert_right(replace(PLAIN, ways=(Way("batch", 0, 90), way)))


@interpreted
def test_raw_caches():
    assert_right(replace(PLAIN, ways=(WAYS["pages"], WAYS["a cache"]), rotated=False))


@interpreted
@pytest.mark.parametrize("way", ["left padding", "a cache", "pages"])
def test_without_the_option_they_differ(way, monkeypatch):
    """The comparison can fail: without the option blocks begin elsewhere, and a step has other tiles."""
    for name in ("rope_attention", "rope_attention_with_kvcache"):
        public = FUNCTIONS[name]

        def without(*given, public=public, **options):
            return public(*given, **options | {"batch_invariant": False})

        monkeypatch.setitem(FUNCTIONS, name, without)
    outcome = run_check(replace(PLAIN, ways=(Way("batch", 0, 90), WAYS[way])), INTERPRETER)
    assert "bits of o" in {finding.found.tensor for finding in outcome.failures}


@interpreted
@ignore_overflow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("before", [0, 13])
def test_tokens_past_the_end_of_a_cache(before):
    """They give 0 and -inf, and the rows before them the bits that they have in a cache with room for all."""
    call, _ = drawn(5, F16, 32, 150)
    call.options = {"backend": "triton"}
    o, lse = call.whole()
    first, room = max(0, call.length - 9), 4  # new tokens from the first one on; the cache has rows for some of them
    batch, heads, _, head_dim = call.k.shape
    rows = before + first + room
    caches = [torch.full((batch, heads, rows, head_dim), torch.nan).half() for _ in range(2)]
    tables = [x[:rows] for x in later_tables(call, before)]
    step = {"batch_invariant": True, "return_lse": True, "kv_starts": kv_starts(call, before), **call.options}
    for new in (slice(0, first), slice(first, None)):
        found, found_lse = rope_attention_with_kvcache(
            call.q[:, :, new],
            *caches,
            *tables,
            call.k[:, :, new],
            call.v[:, :, new],
            cache_seqlens=kv_starts(call, before + new.start),
            **step,
        )
    kept = slice(first, first + room)
    assert torch.equal(found[:, :, :room], o[:, :, kept]) and torch.equal(found_lse[:, :, :room], lse[:, :, kept])
    assert (found[:, :, room:] == 0).all() and (found_lse[:, :, room:] == -torch.inf).all()


def random_intervals(draw, length):
    """Intervals (1, length) of single keys of any kind, between runs of keys that many rows see or that none sees."""
    starts, ends = [], []
    while len(starts) < length:
        low, high = draw.randrange(length), draw.choice([0, length, length])
        for _ in range(draw.choice([1, 3, 12, 40])):
            starts.append(draw.choice([low, low, low, 0]))
            ends.append(high)
    return [torch.tensor([x[:length]], dtype=torch.int32) for x in (starts, ends)]


@interpreted
@ignore_overflow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("seed", range(4))
def test_intervals_keep_the_bits(seed):
    """Which blocks of keys a tile skips, and which it compares, changes no bit of a row."""
    call, draw = drawn(seed, F16, 32, 220)
    length = call.length
    starts, ends = random_intervals(draw, length)
    tensors, tables = (call.q, call.k, call.v), (call.cos, call.sin)

    def attend(tensors, starts, ends, tables=tables, **masks):
        return call.attend(tensors, *tables, query_starts=starts.int(), query_ends=ends.int(), **masks)

    whole = attend(tensors, starts, ends)
    assert (whole[1] > -math.inf).any()
    first = draw.randrange(length)
    last = attend((call.q[:, :, first:], call.k, call.v), starts - first, ends - first)
    assert all(torch.equal(x, y[:, :, first:]) for x, y in zip(last, whole))
    before = draw.randrange(1, 200)
    shifted = [torch.cat((torch.zeros(1, before), x + before), 1) for x in (starts, ends)]
    found = attend(
        [padded(x, before) for x in tensors], *shifted, later_tables(call, before), kv_starts=kv_starts(call, before)
    )
    assert all(torch.equal(x[:, :, before:], y) for x, y in zip(found, whole))
    for row in [draw.randrange(length) for _ in range(3)]:
        seen = (starts <= row) & (row < ends)
        alone = attend(tensors, torch.where(seen, row, 0), torch.where(seen, row + 1, 0))
        assert all(torch.equal(x[:, :, row], y[:, :, row]) for x, y in zip(alone, whole))
    everything = attend(tensors, 0 * starts, 0 * ends + length)
    assert all(torch.equal(x, y) for x, y in zip(everything, call.whole()))


@interpreted
@ignore_overflow
@pytest.mark.parametrize(("seed", "first"), [(3, 0), (4, 0), (3, 45)])
def test_gradients_with_intervals_and_left_padding(seed, first):
    """Rows count from the first row of q, also where blocks of queries count from the first key."""
    call, draw = drawn(seed, F32, 32, 150)
    call.options = {}
    starts, ends = random_intervals(draw, call.length)
    bounds = {"query_starts": starts - first, "query_ends": ends - first, "kv_starts": kv_starts(call, 30)}
    do = torch.randn_like(call.q[:, :, first:])
    found = []
    for options in ({"backend": "triton", "batch_invariant": True}, {"backend": "reference"}):
        leaves = [x.detach().clone().requires_grad_() for x in (call.q[:, :, first:], call.k, call.v)]
        o = rope_attention(*leaves, call.cos, call.sin, True, rotary_dim=2 * call.cos.shape[1], **bounds, **options)
        found.append((o, *torch.autograd.grad(o, leaves, do)))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@interpreted
@ignore_overflow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_do_not_depend_on_the_rest_of_the_batch(packed):
    call, draw = drawn(3, F16, 32, 150)
    call.options = {"backend": "triton"}
    do = torch.randn_like(call.q)
    alone = [x[:1].clone().requires_grad_() for x in (call.q, call.k, call.v)]
    call.attend(alone, call.cos, call.sin)[0].backward(do[:1])
    before = draw.randrange(1, 99)
    if packed:
        rows = slice(before, before + call.length)
        cu = torch.tensor([0, before, before + call.length, before + call.length + 40], dtype=torch.int32)
        given = [torch.randn(int(cu[-1]), x.shape[1], 32).half() for x in (*alone, do)]
        for stream, x in zip(given, (*alone, do)):
            stream[rows] = x[0].detach().transpose(0, 1)
        leaves = [x.requires_grad_() for x in given[:3]]
        sizes = (cu, cu, call.length, call.length)
        o = rope_attention_varlen(*leaves, call.cos, call.sin, *sizes, True, batch_invariant=True, backend="triton")
        o.backward(given[3])
        grads = [x.grad[rows].transpose(0, 1)[None] for x in leaves]
    else:
        leaves = [
            torch.cat((x.new_full((1, x.shape[1], before, 32), torch.nan), x.detach()), 2).requires_grad_()
            for x in alone
        ]
        tables = [torch.cat((torch.rand(before, 16), x)) for x in (call.cos, call.sin)]
        o, _ = call.attend(leaves, *tables, kv_starts=torch.tensor([before], dtype=torch.int32))
        o.backward(torch.cat((torch.ones_like(leaves[0][:, :, :before]), do[:1]), 2))
        assert all((x.grad[:, :, :before] == 0).all() for x in leaves)
        grads = [x.grad[:, :, before:] for x in leaves]
    assert all(torch.equal(found, x.grad) for found, x in zip(grads, alone))


def test_who_cannot_keep_the_promise_refuses():
    q, cache = torch.randn(1, 2, 8, 32), torch.zeros(1, 2, 16, 32)
    cos, sin = rope_tables(16, 32)
    with pytest.raises(ValueError, match="batch_invariant=True needs kernels"):
        rope_attention(q, q, q, cos, sin, True, batch_invariant=True, backend="reference")
    with pytest.raises(TypeError, match="batch_invariant must be a bool"):
        rope_attention(q, q, q, cos, sin, True, batch_invariant=1)
    with pytest.raises(NotImplementedError, match="strategy must be 'auto' or 'prepass' with batch_invariant=True"):
        rope_attention(q, q, q, cos, sin, True, batch_invariant=True, backend="triton", strategy="inline")
    step = {"cache_seqlens": torch.zeros(1, dtype=torch.int32), "batch_invariant": True, "backend": "triton"}
    with pytest.raises(NotImplementedError, match="causal must be True with batch_invariant=True"):
        rope_attention_with_kvcache(q, cache, cache.clone(), cos, sin, q, q, causal=False, **step)
    float8 = cache.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn caches, but k_cache is one"):
        rope_attention_with_kvcache(q, float8, float8.clone(), cos, sin, q, q, **step)
    assert plan(q, q, q, cos, sin, True, batch_invariant=True).backend == "reference"
