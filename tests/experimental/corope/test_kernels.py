"""Co-RoPE's kernels in Triton's interpreter against float64.

They are called below the public function, which sends CPU tensors to the reference. bfloat16 is test_kernels_gpu.py's:
the interpreter computes it wrongly.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.experimental.corope import CoRopeAttention, kernels, launch
from fused_rope_attn.experimental.corope.launch import CoRopeConfig
from tests.support.corope import assert_matches_float64, make, results
from tests.support.dtypes import F16, F32, F64
from tests.support.marks import ignore_overflow, interpreted


def compare_kernels(inputs, *, base=10000.0, scale=None, function=None):
    """Kernels within the tolerance of float64, inputs as they were."""
    dtype, scale = inputs[0].dtype, inputs[0].shape[-1] ** -0.5 if scale is None else scale
    before = [x.clone() for x in inputs]
    out = results(function or (lambda q, k, v: CoRopeAttention.apply(q, k, v, base, scale)), inputs, dtype)
    assert all(torch.equal(x, y) for x, y in zip(before, inputs)), "inputs were modified"
    assert_matches_float64(inputs, out, base=base, scale=scale)


@interpreted
@ignore_overflow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1, 32), F16),
        ((2, 2, 1, 17, 32), F32),
        ((1, 3, 1, 45, 64), F16),  # three heads in a tile of four
        ((2, 16, 2, 18, 32), F16),  # blocks and heads in one grid
        ((1, 8, 1, 37, 32), F16),
        ((1, 2, 1, 67, 32), F16),
        ((1, 2, 2, 17, 128), F32),
        ((1, 1, 1, 21, 34), F32),  # D with padding
    ],
    ids=str,
)
def test_kernels(shape, dtype):
    compare_kernels(make(*shape, dtype))


@interpreted
@ignore_overflow
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale_and_base(scale):
    compare_kernels(make(1, 2, 1, 35, 32, F32), base=7.0, scale=scale)


@interpreted
@ignore_overflow
def test_more_heads_than_a_program_holds():
    """Chunks of a group add their shares of the distance gradients, which are linear, to the same leader."""
    config = CoRopeConfig(16, 16, heads=2, num_warps=4)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, *stats = launch.corope_forward(q, k, v, base=100.0, softmax_scale=0.2, config=config)
            ctx.save_for_backward(q, k, v, o, *stats)
            return o

        @staticmethod
        def backward(ctx, do):
            return launch.corope_backward(do, *ctx.saved_tensors, base=100.0, softmax_scale=0.2, config=config)

    compare_kernels(make(1, 3, 1, 19, 32, F32), base=100.0, scale=0.2, function=Chunked.apply)


@interpreted
@ignore_overflow
def test_strides_and_expanded_gradients():
    q, k, v, _ = make(1, 2, 1, 20, 40, F32)
    k = torch.randn(1, 1, 20, 80, generator=torch.Generator().manual_seed(1))[..., ::2]
    do = torch.ones(()).expand(q.shape)
    compare_kernels(
        (q[..., 3:35], k[..., 4:36], v[..., :32].transpose(2, 3).contiguous().transpose(2, 3), do[..., :32])
    )


@interpreted
def test_double_backward_raises():
    q, k, v, _ = (x.requires_grad_() for x in make(1, 1, 1, 3, 32, F32))
    (dq,) = torch.autograd.grad(CoRopeAttention.apply(q, k, v, 10.0, 0.1).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^corope_attention: double backward"):
        dq.sum().backward()


@triton.jit
def write_phases(
    out_ptr,
    mileage_ptr,
    local_ptr,
    multiples_ptr,
    revolutions_ptr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """cos and sin of every row's distance (mileage in fixed point plus local steps) at each frequency."""
    rows, pairs, key = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, 1)
    distance = kernels.distances_of(tl.load(mileage_ptr + rows), tl.load(local_ptr + rows)[:, None])
    inputs = kernels.CoRopeInputs(None, None, None, multiples_ptr, revolutions_ptr)
    cos, sin = kernels.distance_phases(pairs, distance, inputs, D)
    out = out_ptr + (rows[:, None, None] * (D // 2) + pairs[None, :, None]) * 2 + key
    exists = pairs[None, :, None] < D // 2
    tl.store(out, cos, mask=exists)
    tl.store(out + 1, sin, mask=exists)


@interpreted
@ignore_overflow
@pytest.mark.parametrize("base", [10000.0, 0.3])
def test_phases_stay_exact(base):
    """At 8K steps, and at a million, a float32 distance times a frequency would be 2e-4 and 6e-2 off."""
    head_dim, rows = 62, 32
    generator = torch.Generator().manual_seed(0)
    largest = torch.tensor([8192.0, 2.0**20], dtype=F64).repeat(rows // 2)
    mileage = (torch.rand(rows, generator=generator, dtype=F64) * largest * 2**23).to(torch.int64)
    mileage[0], mileage[1] = 0, -3  # what rounding differences of two passes can leave at the diagonal
    local = torch.rand(rows, generator=generator) * 64
    out = torch.zeros(rows, head_dim // 2, 2)
    tables = launch.frequency_tables(base, head_dim, torch.device("cpu"))
    write_phases[(1,)](out, mileage, local, *tables, D=head_dim, PADDED=32, ROWS=rows)
    omega = base ** -(torch.arange(head_dim // 2, dtype=F64) / (head_dim // 2))
    angle = (mileage.double() / 2**23 + local.double())[:, None] * omega
    expected = torch.stack((angle.cos(), angle.sin()), -1)
    # The rest: local times the frequency, two roundings of at most T * 2**-24 revolutions, and the evaluation.
    revolutions = 1.0 + 64 * float(omega.max()) / (2 * math.pi)
    limit = 2 * math.pi * 2 * revolutions * 2.0**-24 + 6e-7
    assert float((out.double() - expected).abs().max()) < limit
