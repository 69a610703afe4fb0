"""Helpers of the rotation's tests: tolerances, memory layouts, and the rotation written out as a matrix."""

import math

import pytest
import torch

from tests.support.dtypes import F16, F32, F64

TOLERANCE = {F16: 2e-3, F32: 1e-5, F64: 1e-12}
dtypes = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def assert_close(actual, expected, tolerance):
    """Relative to the expected tensor's rms, as in the contract."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt()
    assert float(error) <= tolerance * float(expected.square().mean().sqrt()) + 1e-30, float(error)
    assert float((actual.double() - expected).abs().max()) <= 20 * tolerance * float(expected.abs().max())


def compare_with_float64(ours, oracle, xs, dtype, tolerance=None):
    """Outputs and gradients of ``ours`` in dtype are those of ``oracle`` in float64; inputs stay as they were."""
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    mine = [x.to(dtype).requires_grad_() for x in xs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    outs, wanted = ours(*mine), oracle(*exact)
    outs, wanted = ((y,) if isinstance(y, torch.Tensor) else y for y in (outs, wanted))
    dos = [normal(*out.shape, seed=7 + i).to(dtype) for i, out in enumerate(outs)]
    gradients = torch.autograd.grad(outs, mine, dos)
    expected = torch.autograd.grad(wanted, exact, [do.double() for do in dos])
    for x, y in zip((*outs, *gradients), (*wanted, *expected), strict=True):
        assert x.dtype == dtype
        assert_close(x.detach(), y.detach(), tolerance)
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(mine, xs))


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(length, dim, base=10000.0):
    return torch.arange(length, dtype=F64)[:, None] * base ** -(torch.arange(0, dim, 2, dtype=F64) / dim)


def rotate_by_matrix(x, cos, sin, rotary_dim, interleaved, inverse):
    """x (..., N, D) times the matrix of each token, written out: no layout of columns is used twice."""
    matrix = torch.eye(x.shape[-1], dtype=F64).repeat(x.shape[-2], 1, 1)
    wide = cos.shape[-1] == rotary_dim
    for p in range(rotary_dim // 2):
        i, j = (2 * p, 2 * p + 1) if interleaved else (p, p + rotary_dim // 2)
        a, b = (i, j) if wide else (p, p)
        matrix[:, i, i], matrix[:, i, j] = cos[:, a], -sin[:, a]
        matrix[:, j, j], matrix[:, j, i] = cos[:, b], sin[:, b]
    matrix = matrix.mT if inverse else matrix
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def strided(x, kind):
    """The same values in another memory layout."""
    if kind == "bshd view":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "columns apart":
        wide = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "unaligned slice":
        wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 3), math.nan, dtype=x.dtype)
        wide[:, 2:-1, 1:, 1:-2] = x
        return wide[:, 2:-1, 1:, 1:-2]
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "expanded":
        return x[:, :1].expand_as(x)
    return x.contiguous()


KINDS = ["contiguous", "bshd view", "columns apart", "unaligned slice", "transposed", "expanded"]
