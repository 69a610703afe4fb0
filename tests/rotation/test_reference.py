"""The rotation's reference is the one that the attention's reference is defined by."""

import torch

from fused_rope_attn import rope_tables
from fused_rope_attn.rotation.reference import rotate, rotation
from tests.support.rotation import normal


def test_the_rotation_is_the_reference_of_attention_too():
    """`reference.rotation` without positions is `reference.rotate`, by which the attention is defined."""
    x, (cos, sin) = normal(2, 3, 9, 16), rope_tables(9, 12)
    assert torch.equal(rotation(x, cos, sin, rotary_dim=12), rotate(x, cos, sin))
