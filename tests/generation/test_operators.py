"""The generation step as PyTorch sees it: what it changes, the dispatcher, torch.compile, autocast, inference mode."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_with_kvcache, rope_tables, write_kvcache
from tests.support.dtypes import BF16, F32
from tests.support.generation import CACHES, PLAIN, TINY, arguments, with_own_caches
from tests.support.internals import OPERATORS, kvcache_arguments, with_kvcache, write
from tests.support.marks import interpreted
from tests.support.operators import Record, kernel_or_reference

TENSORS = ("q", *CACHES, "cos", "sin", "k", "v", "cache_seqlens", "sinks")


def finite(check):
    given = arguments(check)
    return given | {name: given[name].nan_to_num() for name in CACHES}


def tokens_first(given):
    turned = {name: given[name].transpose(1, 2).contiguous() for name in ("q", *CACHES, "k", "v")}
    return given | turned | {"layout": "bshd"}


@interpreted
def test_autograd_sees_the_caches_change_and_inference_mode_changes_nothing():
    given = arguments()
    for new, changes in (({}, True), ({"k": None, "v": None}, False)):
        versions = [given[name]._version for name in CACHES]
        expected = with_kvcache(**given | new, backend="triton")
        assert [given[name]._version > version for name, version in zip(CACHES, versions)] == [changes] * 2
    with torch.inference_mode():
        given = arguments()
        with_kvcache(**given, backend="triton")
        found = with_kvcache(**given | new, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("empty", ["batch", "queries", "capacity"])
def test_nothing_to_do(empty, backend):
    batch, len_q, capacity = (0 if empty == what else 2 for what in ("batch", "queries", "capacity"))
    q, new = torch.randn(batch, 4, len_q, 16), torch.zeros(batch, 2, 0, 16)
    caches = torch.randn(2, batch, 2, capacity, 16)
    cos, sin = rope_tables(8, 16)
    lens = torch.zeros(batch, dtype=torch.int32)
    o, lse = with_kvcache(q, *caches, cos, sin, cache_seqlens=lens, backend=backend)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert bool((o == 0).all()) and bool((lse == -math.inf).all())
    before = caches.clone()
    write(new, new, *caches, cos, sin, cache_seqlens=lens, backend=backend)
    write_kvcache(new, new, *caches, cos, sin)
    assert torch.equal(caches, before)


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("append", [True, False])
def test_opcheck(append):
    given = finite(replace(TINY, append=append, sinks=True))
    step = kvcache_arguments(*(given[name] for name in TENSORS))
    torch.library.opcheck(OPERATORS.attention_with_kvcache.default, step)
    if append:
        flat = [given[name] for name in ("k", "v", *CACHES, "cos", "sin", "block_table", "cache_seqlens")]
        flat += [None, None, None, None, 16, False, True]
        torch.library.opcheck(OPERATORS.write_kvcache.default, flat, test_utils=("test_schema", "test_faketensor"))


@interpreted
@pytest.mark.unpoisoned
def test_other_layouts_are_viewed():
    given = tokens_first(finite(TINY))
    with Record() as record:
        with_kvcache(**given, backend="triton")
    expected = [*["aten.transpose.int"] * 5, "fused_rope_attn.attention_with_kvcache.default", "aten.transpose.int"]
    assert record.operators == expected


@pytest.mark.unpoisoned
@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("kind", ["bhsd", "bshd", "pages"])
def test_compiles_to_one_graph(kind, backend):
    torch._dynamo.reset()

    def run(given):
        names = ("k", "v", *CACHES, "cos", "sin", "cache_seqlens", "block_table", "layout")
        write(**{name: given[name] for name in names if name in given}, backend=backend)
        later = given | {"q": 2 * given["q"], "cache_seqlens": given["cache_seqlens"] + 1}
        o, lse = with_kvcache(**later, backend=backend)
        return o + 1, lse, given["k_cache"].sum()

    def made():
        given = finite(replace(TINY, page_size=20) if kind == "pages" else TINY)
        return tokens_first(given) if kind == "bshd" else given

    eager, compiled, before = made(), made(), made()
    expected = run(eager)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(compiled), expected)
    for name in CACHES:
        torch.testing.assert_close(compiled[name], eager[name])
        assert int((eager[name] != before[name]).any(-1).sum()) == 2  # rows


def test_autocast_casts_the_new_tokens():
    given = arguments(PLAIN, BF16)
    expected = rope_attention_with_kvcache(**with_own_caches(given))
    given |= {name: given[name].to(F32) for name in ("q", "k", "v")}
    with torch.autocast("cpu", BF16):
        o = rope_attention_with_kvcache(**given)
    assert o.dtype == BF16 and torch.equal(o, expected)
