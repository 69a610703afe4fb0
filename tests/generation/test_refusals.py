"""Refusals of the generation step: nothing is written before they are raised."""

import math
from itertools import product
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd import forward_ad

from fused_rope_attn import rope_attention_with_kvcache
from tests.support.dtypes import F32
from tests.support.generation import PLAIN, make_inputs
from tests.support.internals import check_step, share_elements


def call(**changes):
    q, k_cache, v_cache, cos, sin, k, v, lens, *_ = make_inputs(PLAIN, F32)
    valid = {
        "q": q,
        "k_cache": k_cache.nan_to_num(),
        "v_cache": v_cache.nan_to_num(),
        "cos": cos,
        "sin": sin,
        "k": k,
        "v": v,
        "cache_seqlens": lens,
    }
    return rope_attention_with_kvcache(**(valid | changes))


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor, but is NoneType"),
        ({"cache_seqlens": 3}, TypeError, "cache_seqlens must be a torch.Tensor, but is int 3"),
        ({"cache_seqlens": zeros(2)}, TypeError, "cache_seqlens must be int32, but is float32"),
        ({"cache_seqlens": zeros(3, dtype=torch.int32)}, ValueError,
         "cache_seqlens must have shape (B,) with B = 2, but has (3,)"),
        ({"k": None}, ValueError, "k must be given where v is"),
        ({"v": None}, ValueError, "v must be given where k is"),
        ({"k": zeros(2, 2, 3, 16)}, ValueError,
         "k must have shape (B, HKV, NQ, D) with NQ = 2 of q, but has (2, 2, 3, 16)"),
        ({"v": zeros(2, 4, 2, 16)}, ValueError,
         "v must have shape (B, HKV, NQ, D) with HKV = 2 of k_cache, but has (2, 4,"),
        ({"k_cache": zeros(2, 2, 40, 16).half()}, TypeError,
         "k_cache must have q's dtype float32 or float8_e4m3fn, but is float16"),
        ({"v": zeros(2, 2, 2, 16).half()}, TypeError, "v must have q's dtype float32, but is float16"),
        ({"k_cache": zeros(2, 40, 16)}, ValueError, "k_cache must have shape (B, HKV, S_max, D), but has 3 dimensions"),
        ({"k_cache": zeros(1, 2, 40, 16)}, ValueError,
         "k_cache must have shape (B, HKV, S_max, D) with B = 2 of q, but has (1, 2"),
        ({"v_cache": zeros(2, 2, 41, 16)}, ValueError,
         "v_cache must have shape (B, HKV, S_max, D) with S_max = 40 of k_cache, but has (2"),
        ({"k_cache": zeros(2, 3, 40, 16), "v_cache": zeros(2, 3, 40, 16), "k": None, "v": None}, ValueError,
         "k_cache has 3 heads, but q's 4 heads must be a multiple of it"),
        ({"k_cache": zeros(1, 2, 40, 16).expand(2, 2, 40, 16)}, ValueError, "k_cache must not be expanded"),
        ({"q": zeros(2, 4, 50, 16), "k": zeros(2, 2, 50, 16), "v": zeros(2, 2, 50, 16)}, ValueError,
         "k must have at most k_cache's S_max = 40 positions, but has 50"),
        ({"cos": zeros(39, 8), "sin": zeros(39, 8)}, ValueError, "cos must"),
        ({"rotary_dim": 3}, ValueError, "rotary_dim must be even"),
        ({"q_norm": zeros(16)}, ValueError, "k_norm must be given where q_norm is"),
        ({"q_norm": zeros(16), "k_norm": zeros(8)}, ValueError,
         "k_norm must have shape (D,) with D = 16, but has (8,)"),
        ({"q_norm": zeros(16), "k_norm": zeros(16).requires_grad_()}, ValueError, "k_norm must not require a gradient"),
        ({"cache_is_rotated": 1}, TypeError, "cache_is_rotated must be a bool, but is int 1"),
        ({"causal": None}, TypeError, "causal must be a bool"),
        ({"causal": np.bool_(True)}, TypeError, "causal must be a bool, but is numpy.bool"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and positive"),
        ({"window": (1,)}, ValueError, "window must have two elements"),
        ({"sinks": zeros(3)}, ValueError, "sinks must have shape (HQ,) with HQ = 4, but has (3,)"),
        ({"k": zeros(2, 2, 2, 16, device="meta")}, ValueError, "k must be on q's device cpu, but is on meta"),
        ({"v_cache": zeros(1, 2, 40, 16).expand(2, 2, 40, 16)}, ValueError, "v_cache must not be expanded"),
        ({"v": zeros(2, 2, 2, 16, device="meta")}, ValueError, "v must be on q's device cpu, but is on meta"),
        ({"k": zeros(2, 2, 2, 16).half()}, TypeError, "k must have q's dtype float32, but is float16"),
        ({"k": zeros(2, 2, 2)}, ValueError, "k must have shape (B, HKV, NQ, D), but has 3 dimensions: (2, 2, 2)"),
        ({"k": zeros(2, 2, 2, 16, 1)}, ValueError,
         "k must have shape (B, HKV, NQ, D), but has 5 dimensions: (2, 2, 2, 16, 1)"),
        ({"v": zeros(2, 1, 2, 16)}, ValueError, "with HKV = 2 of k_cache, but has (2, 1, 2, 16)"),
        ({"k": 1.0}, TypeError, "k must be a torch.Tensor, but is float 1.0"),
        ({"v": [0.0]}, TypeError, "v must be a torch.Tensor, but is list"),
        *(({name: None}, TypeError, f"{name} must be a torch.Tensor, but is NoneType")
          for name in ("k_cache", "v_cache", "cos", "sin", "cache_seqlens")),
        *(({name: 0}, TypeError, f"{name} must be a bool, but is int 0")
          for name in ("causal", "interleaved", "return_lse")),
        ({"kv_starts": zeros(2)}, TypeError, "kv_starts must be int32, but is float32"),
        ({"k": zeros(2, 2, 2, 16).requires_grad_()}, ValueError, "k must not require a gradient"),
        ({"q": zeros(2, 4, 2, 16).requires_grad_()}, ValueError, "q must not require a gradient"),
        ({"v_cache": zeros(2, 2, 40, 16).requires_grad_()}, ValueError, "v_cache must not require a gradient"),
        ({"sinks": zeros(4).requires_grad_()}, ValueError, "sinks must not require a gradient"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_refusals(changes, error, message):
    with pytest.raises(error) as caught:
        call(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("new", [True, False])
def test_large_steps_pass(new):
    """Sizes are compared as numbers: none of these is an object that Python keeps only once."""
    q, cache = zeros(300, 600, 900, 512, device="meta"), zeros(300, 300, 900, 512, device="meta")
    tokens = zeros(300, 300, 900, 512, device="meta") if new else None
    table, ends = zeros(900, 256, device="meta"), zeros(300, device="meta", dtype=torch.int32)
    rotary_dim = check_step(
        q=q,
        k_cache=cache,
        v_cache=cache.clone(),
        cos=table,
        sin=table,
        k=tokens,
        v=tokens,
        cache_seqlens=ends,
        cache_is_rotated=True,
        window=(3, 0),
        sinks=zeros(600, device="meta"),
        kv_starts=ends,
    )
    assert rotary_dim == 512


def test_axes_of_one_entry_may_be_expanded():
    """Their stride says nothing."""
    x = zeros(1, 16).as_strided((1, 1, 1, 16), (0, 0, 0, 1))
    cos, sin, ends = zeros(1, 8) + 1, zeros(1, 8), torch.zeros(1, dtype=torch.int32)
    o = rope_attention_with_kvcache(zeros(1, 1, 1, 16), x, x.clone(), cos, sin, x + 1, x + 1, cache_seqlens=ends)
    assert torch.equal(o, torch.ones(1, 1, 1, 16)) and torch.equal(x, torch.ones(1, 1, 1, 16))
    none = zeros(1, 1, 1, 16).expand(0, 1, 1, 16)
    caches = none, none.clone()
    assert rope_attention_with_kvcache(none, *caches, cos, sin, none, none, cache_seqlens=ends[:0]).numel() == 0


def transposed(x):
    return x.transpose(1, 2)


def views(length, strides, offsets):
    """Return two caches (2, 2, 40, 16) in one allocation, which begin at these offsets."""
    x = zeros(length)
    return tuple(x.as_strided((2, 2, 40, 16), strides, offset) for offset in offsets)


# Caches in one allocation that share no element, and those that share some.
BOTH, ONE_MORE = zeros(2, 2560), zeros(16 + 2560)
APART = {
    "pages": zeros(2, 2, 2, 40, 16).unbind(1),
    "columns": zeros(2, 2, 40, 16, 2).unbind(-1),
    "halves of rows": zeros(2, 2, 40, 32).chunk(2, -1),
    "tensors": zeros(2, 2, 2, 40, 16).unbind(0),
    "tokens": tuple(map(transposed, zeros(2, 40, 2, 2, 16).unbind(2))),
    "two orders": (BOTH[0].view(2, 2, 40, 16), transposed(BOTH[1].view(2, 40, 2, 16))),
    "one expanded": (ONE_MORE[:16].expand(2, 2, 40, 16), ONE_MORE[16:].view(2, 2, 40, 16)),
}
WHOLE = zeros(2, 2, 40, 16)
OVERLAPPING = {
    "one tensor": (WHOLE, WHOLE),
    "two views": (WHOLE, WHOLE.view(WHOLE.shape)),
    "two orders": (WHOLE, transposed(WHOLE.view(2, 40, 2, 16))),
    "one row": views(2 * 2560 - 16, (1280, 640, 16, 1), (0, 2560 - 16)),
    "one column": views(4 * 40 * 31, (2480, 1240, 31, 1), (0, 15)),
    "k_cache begins later": views(3 * 1280, (1280, 640, 16, 1), (1280, 0)),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_caches_that_overlap(name, new):
    k_cache, v_cache = OVERLAPPING[name]
    tokens = {} if new else {"k": None, "v": None}
    with pytest.raises(ValueError, match="^v_cache must not overlap k_cache in memory, but "):
        call(k_cache=k_cache, v_cache=v_cache, **tokens)
    assert not k_cache.any() and not v_cache.any()


@pytest.mark.parametrize("name", APART)
def test_caches_in_one_allocation(name):
    k_cache, v_cache = APART[name]
    tokens = {"k": None, "v": None} if 0 in k_cache.stride() else {}
    o = call(k_cache=k_cache, v_cache=v_cache, **tokens)
    assert torch.equal(o, call(k_cache=zeros(2, 2, 40, 16), v_cache=zeros(2, 2, 40, 16), **tokens))


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
@given(layouts())
def test_shared_elements_are_found(layout):
    sizes, *strides, distance = layout
    places = [{sum(map(mul, index, s)) for index in product(*map(range, sizes))} for s in strides]
    assert share_elements(*layout) == (not places[0].isdisjoint({place + distance for place in places[1]}))


def test_parameters_are_welcome_without_gradients():
    sinks = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        o = call(sinks=sinks)
    assert not o.requires_grad and torch.equal(o, call(sinks=sinks.detach()))


@pytest.mark.parametrize("name", ["q", "k_cache", "v", "sinks"])
def test_tangents_are_refused(name):
    x = {"q": zeros(2, 4, 2, 16), "k_cache": zeros(2, 2, 40, 16), "v": zeros(2, 2, 2, 16), "sinks": zeros(4)}[name]
    with torch.no_grad(), forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="^rope_attention_with_kvcache: forward-mode differentiation"):
            call(**{name: forward_ad.make_dual(x, x)})
