"""``batch_invariant=True``: what the pairs of ``tests/test_calls.py`` do not draw, and on a GPU more pairs."""

import math
import random
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention, rope_attention_varlen, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation import planning as generation_planning
from tests.support.attention import assert_equal
from tests.support.calls import assert_right, check_calls
from tests.support.dtypes import BF16, F16, F32, int32
from tests.support.internals import forget_calls
from tests.support.marks import ignore_overflow, interpreted
from tests.support.places import needs_sm_90
from verification.calls import Machine
from verification.pairs import PairCheck, Way, products_in_float64
from verification.testing import Case
from verification.testing.cases import intervals_of

pytestmark = ignore_overflow


@pytest.fixture
def exact_products():
    with products_in_float64():
        yield


def drawn(seed, longest, dtype=F16):
    """Return q (2, 4, N, 32), k and v of whole causal sequences, tables, options of a call, and a generator."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    length = draw.randrange(longest // 2, longest)
    tensors = [torch.randn(2, heads, length, 32).to(dtype) for heads in (4, 2, 2)]
    options = {"backend": "triton", "rotary_dim": 16, "interleaved": True, "sinks": torch.randn(4)}
    options |= {"window": (length // 2, 0), "softcap": 20.0, "q_norm": torch.randn(32), "k_norm": torch.randn(32)}
    angles = torch.rand(length, 8) * 6.3
    return tensors, (angles.cos(), angles.sin()), options, draw


def attend(tensors, tables, **options):
    return rope_attention(*tensors, *tables, True, return_lse=True, batch_invariant=True, **options)


def padded(x, before):
    return torch.cat((torch.full_like(x[:, :, :1], math.nan).expand(-1, -1, before, -1), x), 2)


def later(tables, before):
    return [torch.cat((torch.rand(before, x.shape[1]), x)) for x in tables]


def random_intervals(seed, length):
    starts, ends = intervals_of(Case(1, 1, 1, length, length, 32, intervals="random", seed=seed))
    return {"query_starts": starts, "query_ends": ends}


@interpreted
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("before", [0, 13])
def test_tokens_past_the_end_of_a_cache(before):
    """They give 0 and -inf, and the rows before them the bits that they have in a cache with rows for all."""
    (q, k, v), tables, _, _ = drawn(5, 150)
    options = {"backend": "triton", "rotary_dim": 16}
    expected = attend((q, k, v), tables, **options)
    batch, heads, length, columns = k.shape
    first, room = length - 9, 4  # new tokens from the first one on; the cache has rows for some of them
    rows, starts = before + first + room, int32([before] * batch)
    caches = [torch.full((batch, heads, rows, columns), math.nan).half() for _ in range(2)]
    step = options | {"batch_invariant": True, "return_lse": True, "kv_starts": starts}
    for new in (slice(0, first), slice(first, None)):
        given = q[:, :, new], *caches, *(x[:rows] for x in later(tables, before)), k[:, :, new], v[:, :, new]
        found = rope_attention_with_kvcache(*given, cache_seqlens=starts + new.start, **step)
    assert_equal([x[:, :, :room] for x in found], [x[:, :, first : first + room] for x in expected])
    assert (found[0][:, :, room:] == 0).all() and (found[1][:, :, room:] == -math.inf).all()


@interpreted
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("seed", range(2))
def test_intervals_keep_the_bits(seed):
    tensors, tables, options, draw = drawn(seed, 220)
    length = tensors[0].shape[2]
    bounds = random_intervals(seed, length)
    whole = attend(tensors, tables, **bounds, **options)
    assert (whole[1] > -math.inf).any()
    first, before = draw.randrange(length), draw.randrange(1, 200)
    last = attend((tensors[0][:, :, first:], *tensors[1:]), tables,
                  **{name: x - first for name, x in bounds.items()}, **options)  # fmt: skip
    assert_equal(last, [x[:, :, first:] for x in whole])
    shifted = {name: torch.nn.functional.pad(x + before, (before, 0)) for name, x in bounds.items()}
    starts = int32([before] * len(tensors[0]))
    found = attend([padded(x, before) for x in tensors], later(tables, before), kv_starts=starts, **shifted, **options)
    assert_equal([x[:, :, before:] for x in found], whole)
    for row in [draw.randrange(length) for _ in range(2)]:
        seen = (bounds["query_starts"] <= row) & (row < bounds["query_ends"])
        only = {name: torch.where(seen, row + i, 0).int() for i, name in enumerate(bounds)}
        assert_equal([x[:, :, row] for x in attend(tensors, tables, **only, **options)], [x[:, :, row] for x in whole])


@interpreted
@pytest.mark.parametrize(("seed", "first"), [(4, 0), (3, 45)])
def test_gradients_with_intervals_and_left_padding(seed, first):
    """Rows count from the first row of q, also where blocks of queries count from the first key."""
    (q, k, v), tables, *_ = drawn(seed, 150, F32)
    options = {"rotary_dim": 16, "kv_starts": int32([30] * len(q))}
    options |= {name: x - first for name, x in random_intervals(seed, k.shape[2]).items()}
    found = []
    for chosen in ({"backend": "triton", "batch_invariant": True}, {"backend": "reference"}):
        leaves = [x.detach().clone().requires_grad_() for x in (q[:, :, first:], k, v)]
        o = rope_attention(*leaves, *tables, True, **options, **chosen)
        found.append((o, *torch.autograd.grad(o, leaves, q[:, :, first:].sin())))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.usefixtures("exact_products")
def test_gradients_do_not_depend_on_the_rest_of_the_batch():
    tensors, tables, _, draw = drawn(3, 150)
    options, do = {"backend": "triton", "rotary_dim": 16}, torch.randn_like(tensors[0][:1])
    alone = [x[:1].clone().requires_grad_() for x in tensors]
    attend(alone, tables, **options)[0].backward(do)
    before, length = draw.randrange(1, 99), do.shape[2]
    rows = slice(before, before + length)
    leaves = [padded(x.detach(), before).requires_grad_() for x in alone]
    o, _ = attend(leaves, later(tables, before), kv_starts=int32([before]), **options)
    o.backward(torch.nn.functional.pad(do, (0, 0, before, 0), value=1.0))
    assert all((x.grad[:, :, :before] == 0).all() for x in leaves)
    assert_equal([x.grad[:, :, rows] for x in leaves], [x.grad for x in alone])

    *leaves, do_pack = (torch.nn.functional.pad(x.detach()[0].transpose(0, 1), (0, 0, 0, 0, before, 40), value=0.5)
                        for x in (*alone, do))  # fmt: skip
    leaves, cu = [x.requires_grad_() for x in leaves], int32([0, before, before + length, before + length + 40])
    o = rope_attention_varlen(*leaves, *tables, cu, cu, length, length, True, batch_invariant=True, **options)
    o.backward(do_pack)
    assert_equal([x.grad[rows].transpose(0, 1)[None] for x in leaves], [x.grad for x in alone])


def test_who_cannot_keep_the_promise_refuses():
    q, cache = torch.randn(1, 2, 8, 32), torch.zeros(1, 2, 16, 32)
    tables, float8 = rope_tables(16, 32), cache.to(torch.float8_e4m3fn)

    def call(*given, function=rope_attention, backend="triton", **options):
        function(*given, backend=backend, batch_invariant=True, **options)

    with pytest.raises(ValueError, match="batch_invariant=True needs kernels"):
        call(q, q, q, *tables, True, backend="reference")
    with pytest.raises(NotImplementedError, match="strategy must be 'auto' or 'prepass' with batch_invariant=True"):
        call(q, q, q, *tables, True, strategy="inline")
    step = {"function": rope_attention_with_kvcache, "cache_seqlens": int32([0])}
    with pytest.raises(NotImplementedError, match="causal must be True with batch_invariant=True"):
        call(q, cache, cache.clone(), *tables, q, q, causal=False, **step)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn caches, but k_cache is one"):
        call(q, float8, float8.clone(), *tables, q, q, **step)
    assert plan(q, q, q, *tables, True, batch_invariant=True).backend == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_sm_90)])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "norms"),
    [(64, "bfloat16", 0.0), (96, "float16", 0.0), (128, "float16", None), (256, "bfloat16", None)],
)
def test_rows_have_the_same_bits(backend, head_dim, dtype, norms):
    fixed = {"head_dim": head_dim, "norms": norms, "rotated": True, "variants": ((backend, "auto"),)}
    check_calls(Machine.of("cuda", (dtype,), (backend,)), "pairs", 4, backend, head_dim, **fixed)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    "least_units",
    [pytest.param(1, id="one loop", marks=needs_sm_90), pytest.param(1 << 30, id="split", marks=needs_sm_90)],
)
def test_both_ways_of_an_ordered_step(least_units, tokens, monkeypatch):
    """A step of 8 query heads for each key head, in pages, against the whole sequence."""
    kept = generation_planning.ordered_config
    monkeypatch.setattr(
        generation_planning, "ordered_config", lambda problem: replace(kept(problem), least_units=least_units)
    )
    forget_calls()
    length = 700
    ways = (Way("batch", 0, length), Way("pages", length - tokens, length, before=50, after=30, batch=2, place=1))
    call = PairCheck(1, 16, 2, length, length, 128, dtype=BF16, ways=ways, variants=(("hopper", "auto"),))
    assert_right(call, Machine.of("cuda"))
    forget_calls()
