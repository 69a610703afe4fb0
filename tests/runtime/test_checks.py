"""Checks that several rooms share, asked directly."""

import torch

from fused_rope_attn.runtime.checks import are_ordinary


def test_what_is_an_ordinary_tensor():
    """Each of several is looked at, whatever its place."""
    x = torch.zeros(2, 2)
    assert are_ordinary(x) and are_ordinary(x, x, x)
    for other in (x.to_sparse(), torch.nn.Parameter(x), None, 1.0):
        assert not are_ordinary(other) and not are_ordinary(other, x) and not are_ordinary(x, x, other)
