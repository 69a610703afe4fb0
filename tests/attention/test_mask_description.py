"""The description of a call's masks that launchers specialise on."""

import torch

from fused_rope_attn.attention.masks import describe_masks


def test_heads_share_a_section_by_the_longest_sequence():
    """Not by all tokens; as a power of two, so that batches of about the same lengths share their launches."""
    ends = torch.tensor([0, 300, 600], dtype=torch.int32)
    packed_masks = describe_masks(True, -1, -1, 0.0, (None, None, None, ends, ends), 300)
    assert packed_masks.longest(10**6) == 512 and packed_masks.longest(400) == 400
    assert packed_masks == describe_masks(True, -1, -1, 0.0, (None, None, None, ends, ends), 511)
    assert describe_masks(True, 5, -1, 0.0, (None,) * 5).longest(10**6) == 10**6
