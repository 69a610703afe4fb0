"""Co-RoPE's kernels on a GPU: bfloat16, memory, 8K positions."""

import pytest
import torch

from fused_rope_attn.experimental import corope_attention
from tests.support.corope import assert_matches_float64, make, results
from tests.support.dtypes import BF16, F16, F32

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 8, 2, 333, 128), BF16),
        ((1, 6, 2, 100, 64), BF16),
        ((1, 16, 2, 257, 128), BF16),
        ((1, 16, 1, 130, 64), BF16),
        ((1, 4, 4, 200, 32), F16),
        ((1, 32, 1, 65, 96), F16),
        ((1, 8, 2, 200, 128), F32),
        ((1, 2, 2, 4100, 64), F32),
    ],
    ids=str,
)
def test_kernels(shape, dtype):
    inputs = make(*shape, dtype, "cuda")
    assert_matches_float64(inputs, results(corope_attention, inputs, dtype))


def test_memory():
    """The issue's shape: at most 100 MiB beyond inputs, output and gradients."""
    q, k, v, do = make(1, 32, 8, 1024, 128, BF16, "cuda")
    for x in (q, k, v):
        x.requires_grad_()
    results(corope_attention, (q, k, v, do), BF16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    corope_attention(q, k, v).backward(do)
    assert torch.cuda.max_memory_allocated() - before <= 100 << 20


def test_8k_runs():
    inputs = make(1, 8, 2, 8192, 128, BF16, "cuda")
    assert all(bool(torch.isfinite(x).all()) for x in results(corope_attention, inputs, BF16))
