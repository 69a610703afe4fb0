"""Normal numbers from a seed, and a comparison by the expected tensor's rms."""

import torch

from tests.support.dtypes import F64


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def assert_close(actual, expected, tolerance):
    """Relative to the expected tensor's rms, as in the contract."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt()
    assert float(error) <= tolerance * float(expected.square().mean().sqrt()) + 1e-30, float(error)
    assert float((actual.double() - expected).abs().max()) <= 20 * tolerance * float(expected.abs().max())
