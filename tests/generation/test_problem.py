"""Refusals of the generation step and of writes: what their messages say, and that nothing is written before."""

from itertools import product
from operator import mul

import pytest
import torch
from hypothesis import given as drawn, settings, strategies as st

from fused_rope_attn import rope_attention_with_kvcache, write_kvcache
from tests.support.generation import CACHES, PAGED, PLAIN, arguments
from tests.support.internals import share_elements
from verification.matrix import step

FLOAT8 = step("float8", (4, 2), 2, 40, 16, (30, 0), float8="head")


def zeros(*shape):
    return torch.zeros(shape)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def changed(given, changes):
    """Return arguments with changes; a shape means zeros, and two names with a space mean both arguments."""
    for names, value in changes.items():
        for name in names.split():
            given[name] = zeros(*value) if isinstance(value, tuple) else value
    return given


def refuse(function, given, message):
    before = {name: given[name].clone() for name in CACHES}
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**given)
    assert message in str(caught.value)
    for name, x in before.items():
        torch.testing.assert_close(given[name], x, rtol=0, atol=0, equal_nan=True, check_device=False)


POOL = zeros(10, 2, 16, 16)
HALF_A_PAGE_LATER = POOL.as_strided((9, 2, 16, 16), POOL.stride(), 256)
ONE_OF_TWO = zeros(1, 2, 40, 16).expand(2, 2, 40, 16)
STEPS = [  # the call, what changes, the message
    (FLOAT8, {"v_cache": (2, 2, 40, 16)}, "v_cache must have k_cache's dtype float8_e4m3fn"),
    (PLAIN, {"k": None}, "k must be given where v is"),
    (PLAIN, {"v": None}, "v must be given where k is"),
    (PLAIN, {"k_cache": ONE_OF_TWO}, "k_cache must not be expanded"),
    (PLAIN, {"q": (2, 4, 41, 16), "k v": (2, 2, 41, 16)}, "k must have at most k_cache's S_max = 40 positions, but"),
    (PAGED, {"block_table": ints(2, 4)}, "cos must have a row for each of block_table's 64 positions, but has 48 rows"),
    (PAGED, {"k_cache v_cache": (9, 2, 15, 16)}, "k_cache must have pages of at least 16 rows, but has 15"),
    (PAGED, {"k_cache v_cache": (0, 2, 16, 16)}, "k_cache must have at least one page, but has 0"),
    (PLAIN, {"k_cache v_cache": zeros(2, 2, 40, 16), "k v": None}, "v_cache must not overlap k_cache in memory,"),
    (PAGED, {"k_cache v_cache": POOL}, "v_cache must not overlap k_cache in memory, but is k_cache"),
    (PAGED, {"k_cache": POOL[:9], "v_cache": HALF_A_PAGE_LATER}, "but begins 256 elements after it in"),
    (PAGED, {"k_scale": torch.ones(1)}, "k_scale must be None unless the caches are float8"),
]  # fmt: skip
WRITES = [  # random calls make no illegal ones
    ({"cache_is_rotated": 1}, "cache_is_rotated must be a bool, but is int 1"),
    ({"interleaved": None}, "interleaved must be a bool, but is NoneType"),
    ({"layout": "sbhd"}, "layout must be 'bhsd' or 'bshd', but is 'sbhd'"),
    ({"cu_seqlens": ints(3)}, "k must have shape (T, HKV, D), but has 4"),
    ({"cu_seqlens": ints(1), "k v": (2, 2, 16)}, "cu_seqlens must have shape (B+1,) with B >= 1, but has"),
    ({"cu_seqlens": ints(3), "new_lens": ints(2)}, "new_lens must be None where cu_seqlens is given"),
    ({"cu_seqlens": torch.tensor([0, 2, 5]).int(), "k v": (4, 2, 16)}, "cu_seqlens must end at or before k's 4 tokens"),
    ({"k v": (2, 4, 2, 16)}, "HKV = 4 of k, but has (9, 2, 16, 16)"),
    ({"block_table": None}, "k_cache must have one entry for each of 2 sequences, but has 9"),
    ({"k": zeros(2, 2, 2, 16).requires_grad_()}, "k must not require a gradient"),
    ({"k_cache": HALF_A_PAGE_LATER, "v_cache": POOL[:9]}, "but begins -256 elements after it in one"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "message"), STEPS)
def test_refusals_of_a_step(check, changes, message):
    refuse(rope_attention_with_kvcache, changed(arguments(check), changes), message)


@pytest.mark.parametrize(("changes", "message"), WRITES)
def test_refusals_of_a_write(changes, message):
    names = ("k", "v", *CACHES, "cos", "sin", "block_table", "cache_seqlens")
    given = {name: x for name, x in arguments(PAGED).items() if name in names}
    refuse(write_kvcache, changed(given, changes), message)


def test_axes_of_one_entry_may_be_expanded():
    x = zeros(1, 16).as_strided((1, 1, 1, 16), (0, 0, 0, 1))
    cos, sin, ends = zeros(1, 8) + 1, zeros(1, 8), ints(1)
    o = rope_attention_with_kvcache(zeros(1, 1, 1, 16), x, x.clone(), cos, sin, x + 1, x + 1, cache_seqlens=ends)
    assert torch.equal(o, torch.ones(1, 1, 1, 16)) and torch.equal(x, torch.ones(1, 1, 1, 16))
    none = zeros(1, 1, 1, 16).expand(0, 1, 1, 16)
    caches = none, none.clone()
    assert rope_attention_with_kvcache(none, *caches, cos, sin, none, none, cache_seqlens=ends[:0]).numel() == 0


def test_caches_in_one_allocation():
    caches = dict(zip(CACHES, zeros(2, 2, 2, 40, 16).unbind(2)))
    o = rope_attention_with_kvcache(**arguments() | caches)
    assert torch.equal(o, rope_attention_with_kvcache(**arguments() | {name: zeros(2, 2, 40, 16) for name in CACHES}))
    expanded = zeros(16).expand(2, 2, 40, 16)  # may be read
    rope_attention_with_kvcache(**arguments() | {"k_cache": expanded, "k": None, "v": None})


@st.composite
def layouts(draw):
    """Draw sizes, the strides of two tensors, most of them nested, and how far apart the tensors begin."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    strides = []
    for _ in range(2):
        step, found = draw(st.integers(1, 3)), {}
        for axis in draw(st.permutations(range(len(sizes)))):
            found[axis] = draw(st.sampled_from([step, step, step, step + 1, 0]))
            step = max(step, 1) * max(sizes[axis], 1) * draw(st.sampled_from([1, 1, 2]))
        strides.append(tuple(found[axis] for axis in range(len(sizes))))
    return tuple(sizes), *strides, draw(st.integers(-40, 40))


@settings(max_examples=500)
@drawn(layouts())
def test_shared_elements_are_found(layout):
    sizes, *strides, distance = layout
    places = [{sum(map(mul, index, s)) for index in product(*map(range, sizes))} for s in strides]
    assert share_elements(*layout) == (not places[0].isdisjoint({place + distance for place in places[1]}))


@pytest.mark.parametrize("name", ["q", "k_cache", "v", "sinks"])
def test_tangents_and_gradients_are_refused(name):
    given = arguments() | {"sinks": zeros(4)}
    with torch.autograd.forward_ad.dual_level():
        given[name] = torch.autograd.forward_ad.make_dual(given[name], given[name])
        with pytest.raises(NotImplementedError, match="^rope_attention_with_kvcache: forward-mode differentiation"):
            rope_attention_with_kvcache(**given)
    given[name] = torch.nn.Parameter(given[name].detach())
    with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
        rope_attention_with_kvcache(**given)
    with torch.no_grad():
        assert not rope_attention_with_kvcache(**given).requires_grad
