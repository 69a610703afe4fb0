"""The ranges of blocks that kernels walk through under a mask."""

import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import Mask, key_range, query_range
from tests.support.marks import interpreted


@triton.jit
def write_ranges(out_ptr, start_m, NK, left, OF_QUERIES: tl.constexpr):
    """The four bounds of the key blocks that 64 queries from ``start_m`` on visit, or the other way round."""
    start = tl.maximum(0, -left)
    mask = Mask(num_keys=NK, first_key=start, left=left, right=None, IS_CAUSAL=True, READS_LENGTHS=False)
    if OF_QUERIES:
        first, full_first, full_last, last = query_range(mask, start_m, 0, NK, 64, 64)
    else:
        first, full_first, full_last, last = key_range(mask, start_m, 0, 64, 64)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, full_first)
    tl.store(out_ptr + 2, full_last)
    tl.store(out_ptr + 3, last)


@interpreted
def test_blocks_outside_are_not_visited():
    """The ranges that the kernels walk through: as long as the window, however long the sequence."""
    out = torch.zeros(4, dtype=torch.int32)
    write_ranges[(1,)](out, 16384, 32768, 1024, False)
    # The last row, 16447, sees keys from 15423 on; the first one up to 16384.
    assert out.tolist() == [15360, 15424, 16384, 16448]
    write_ranges[(1,)](out, 16384, 32768, 1024, True)
    assert out.tolist() == [256, 257, 272, 273]
