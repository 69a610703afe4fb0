"""`permute_rope_layout` between the two conventions, of activations and of weights."""

import pytest
import torch

from fused_rope_attn import apply_rope, permute_rope_layout, rope_tables
from tests.support.marks import ignore_overflow
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, None), (16, 12), (6, 2)])
def test_permute_rope_layout(head_dim, rotary_dim):
    x, weight = normal(2, 3, 5, head_dim), normal(3 * head_dim, 7)
    order = {"rotary_dim": rotary_dim}
    there = permute_rope_layout(x, **order)
    assert torch.equal(permute_rope_layout(there, inverse=True, **order), x)
    columns = rotary_dim or head_dim
    assert torch.equal(there[..., 1], x[..., columns // 2]) and torch.equal(there[..., columns:], x[..., columns:])
    cos, sin = rope_tables(5, columns)
    rotated = apply_rope(x, cos, sin, **order)
    assert_close(apply_rope(there, cos, sin, interleaved=True, **order), permute_rope_layout(rotated, **order), 1e-12)
    full = [torch.cat((t, t), -1) for t in (cos, sin)]
    wide = apply_rope(there, *(permute_rope_layout(t) for t in full), interleaved=True, rotary_dim=columns)
    assert_close(wide, permute_rope_layout(rotated, **order), 1e-12)
    # Weights: permuting the rows of a projection permutes its outputs.
    hidden = normal(4, 7)
    outputs = (hidden @ permute_rope_layout(weight, head_dim, dim=0, **order).T).view(4, 3, head_dim)
    assert_close(outputs, permute_rope_layout((hidden @ weight.T).view(4, 3, head_dim), **order), 1e-12)
