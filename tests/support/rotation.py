"""Normal numbers from a seed, and a comparison by the expected tensor's rms."""

import torch

from fused_rope_attn import rope_tables
from tests.support.dtypes import F32, F64


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def arguments_of_qk(norms, length=5, dtype=F32):
    """Return the arguments of ``apply_rope_qk``, those before the tables with gradients."""
    tensors = {x: normal(1, 2 - i, length, 16, seed=i, dtype=dtype) for i, x in enumerate("qk")}
    if norms:
        tensors |= {"q_norm": normal(16, seed=2, dtype=dtype), "k_norm": normal(16, seed=3, dtype=dtype)}
    tables = zip(("cos", "sin"), rope_tables(length, 16))
    return {name: x.requires_grad_() for name, x in tensors.items()} | dict(tables)


def assert_close(actual, expected, tolerance):
    """Relative to the expected tensor's rms, as in the contract."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt()
    assert float(error) <= tolerance * float(expected.square().mean().sqrt()) + 1e-30, float(error)
    assert float((actual.double() - expected).abs().max()) <= 20 * tolerance * float(expected.abs().max())
