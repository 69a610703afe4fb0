"""Co-RoPE's kernels on a GPU: longer than random calls, and memory."""

import pytest
import torch

from fused_rope_attn.experimental import corope_attention
from tests.support.corope import assert_matches_float64, make, results
from tests.support.dtypes import BF16, F32

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("shape", "dtype"), [((1, 16, 1, 600, 128), BF16), ((1, 2, 2, 4100, 64), F32)], ids=str)
def test_kernels(shape, dtype):
    inputs = make(*shape, dtype, "cuda")
    assert_matches_float64(inputs, results(corope_attention, inputs, dtype))


def test_memory():
    """At 8K positions, too, little more than inputs, output and gradients."""
    for length, most in ((1024, 100 << 20), (8192, 800 << 20)):
        q, k, v, do = make(1, 32, 8, length, 128, BF16, "cuda")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        assert all(bool(x.isfinite().all()) for x in results(corope_attention, (q, k, v, do), BF16))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        corope_attention(*leaves).backward(do)
        assert torch.cuda.max_memory_allocated() - before <= most
