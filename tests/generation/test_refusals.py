"""Refusals of the generation step: nothing is written before they are raised."""

import math

import pytest
import torch
from torch.autograd import forward_ad

from fused_rope_attn import rope_attention_with_kvcache
from tests.support.dtypes import F32
from tests.support.generation import PLAIN, make_inputs
from tests.support.internals import check_step


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
    assert rope_attention_with_kvcache(none, none, none, cos, sin, none, none, cache_seqlens=ends[:0]).numel() == 0


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
