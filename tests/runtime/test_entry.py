"""torch's context parallelism is noticed in both its forms, and calls under it are refused."""

import functools

import pytest
import torch
import torch.nn.functional as functional
from torch.distributed.tensor.experimental import _attention as implementation, context_parallel

import fused_rope_attn as package
from fused_rope_attn.runtime.entry import in_context_parallel


@pytest.fixture
def context(mesh):
    return lambda: context_parallel(mesh, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1])


@pytest.mark.unpoisoned
@pytest.mark.parametrize("compiled", [False, True])
def test_both_forms_are_seen_while_they_last(context, compiled):
    def look(x):
        return x + 1 if in_context_parallel() else x

    look = torch.compile(look, backend="eager", fullgraph=True) if compiled else look
    x = torch.zeros(())
    assert look(x) == 0
    with context():
        assert look(x) == 1
    assert look(x) == 0
    try:
        implementation._enable_context_parallel_dispatcher()
        assert look(x) == 1
    finally:
        implementation._disable_context_parallel_dispatcher()
    assert look(x) == 0


def test_an_attention_that_somebody_else_put_in_place_is_not_meant(context, monkeypatch):
    original = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def counted(*arguments, **options):
        return original(*arguments, **options)

    for other in (functools.partial(original, is_causal=True), counted):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", other)
        assert not in_context_parallel()
    with context():
        assert in_context_parallel()


def test_attention_is_refused_in_it(context):
    """Every function is refused with an alternative; the rotation, which looks at one token at a time, is served."""
    q, cos, sin = torch.ones(1, 2, 4, 16), torch.ones(4, 8), torch.zeros(4, 8)
    packed, ends = q[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "rope_attention": ((q, q, q, cos, sin), {}),
        "rope_attention_varlen": ((packed, packed, packed, cos, sin, ends, ends, 4, 4), {}),
        "rope_attention_with_kvcache": ((q, q, q.clone(), cos, sin), {"cache_seqlens": ends[1:]}),
    }
    for name, (arguments, options) in calls.items():
        with context(), pytest.raises(NotImplementedError, match=f"^{name} was called under torch's context_parallel"):
            getattr(package, name)(*arguments, **options)
        getattr(package, name)(*arguments, **options)
    with context():
        torch.testing.assert_close(package.apply_rope(q, cos, sin), q)
