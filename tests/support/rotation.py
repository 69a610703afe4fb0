"""Normal numbers from a seed, and a comparison by the expected tensor's rms."""

import torch

from fused_rope_attn import rope_tables
from tests.support.dtypes import F32, F64


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def arguments_of_qk(norms, length=5, *, head_dim=16, heads=(2, 1), dtype=F32, norm_dtype=None, device="cpu"):
    """Return the arguments of ``apply_rope_qk``, those before the tables with gradients."""
    tensors = {x: normal(1, n, length, head_dim, seed=i, dtype=dtype) for i, (x, n) in enumerate(zip("qk", heads))}
    if norms:
        weights = {"q_norm": 2, "k_norm": 3}
        tensors |= {name: normal(head_dim, seed=seed, dtype=norm_dtype or dtype) for name, seed in weights.items()}
    tables = zip(("cos", "sin"), rope_tables(length, head_dim, device=device))
    return {name: x.to(device).requires_grad_() for name, x in tensors.items()} | dict(tables)


def assert_close(actual, expected, tolerance):
    """Relative to the expected tensor's rms, as in the contract."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt()
    assert float(error) <= tolerance * float(expected.square().mean().sqrt()) + 1e-30, float(error)
    assert float((actual.double() - expected).abs().max()) <= 20 * tolerance * float(expected.abs().max())
