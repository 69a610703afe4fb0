"""Co-RoPE's kernels in Triton's interpreter where random calls do not reach them."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.experimental.corope import kernels, launch
from fused_rope_attn.experimental.corope.launch import CoRopeConfig
from tests.support.corope import assert_matches_float64, make, results
from tests.support.dtypes import F32, F64
from tests.support.marks import ignore_overflow, interpreted

pytestmark = ignore_overflow


@interpreted
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

    inputs = make(1, 3, 1, 19, 32, F32)
    assert_matches_float64(inputs, results(Chunked.apply, inputs, F32), base=100.0, scale=0.2)


@triton.jit
def write_phases(out_ptr, mileage_ptr, local_ptr, multiples_ptr, revolutions_ptr, D: tl.constexpr, ROWS: tl.constexpr):
    """cos and sin of every row's distance (mileage in fixed point plus local steps) at each of 32 frequencies."""
    rows, pairs, key = tl.arange(0, ROWS), tl.arange(0, 32), tl.arange(0, 1)
    distance = kernels.distances_of(tl.load(mileage_ptr + rows), tl.load(local_ptr + rows)[:, None])
    inputs = kernels.CoRopeInputs(None, None, None, multiples_ptr, revolutions_ptr)
    cos, sin = kernels.distance_phases(pairs, distance, inputs, D)
    out = out_ptr + (rows[:, None, None] * (D // 2) + pairs[None, :, None]) * 2 + key
    exists = pairs[None, :, None] < D // 2
    tl.store(out, cos, mask=exists)
    tl.store(out + 1, sin, mask=exists)


@interpreted
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
    write_phases[(1,)](out, mileage, local, *tables, D=head_dim, ROWS=rows)
    omega = base ** -(torch.arange(head_dim // 2, dtype=F64) / (head_dim // 2))
    angle = (mileage.double() / 2**23 + local.double())[:, None] * omega
    expected = torch.stack((angle.cos(), angle.sin()), -1)
    # The rest: local times the frequency, two roundings of at most T * 2**-24 revolutions, and the evaluation.
    revolutions = 1.0 + 64 * float(omega.max()) / (2 * math.pi)
    limit = 2 * math.pi * 2 * revolutions * 2.0**-24 + 6e-7
    assert float((out.double() - expected).abs().max()) < limit
