"""Head dims with their columns multiplied in two pieces on sm_90."""

import pytest

from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.hopper.columns import needed_columns, right_columns
from fused_rope_attn.runtime.layouts import block_d


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_pieces_hold_the_head_and_are_sizes_that_products_have(head_dim):
    width = max(64, block_d(head_dim))
    right, columns = right_columns(head_dim, width), needed_columns(head_dim, width)
    assert head_dim <= columns <= width
    assert (right > 0) == (64 < head_dim <= hopper_configs.NARROW_HEAD_DIM)
    if right:
        assert columns == 64 + right and right in (16, 32) and columns - head_dim < 16
    else:
        assert columns == width
