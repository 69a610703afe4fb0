"""Helpers of Co-RoPE's tests, in the interpreter and on a GPU: inputs, gradients, and the yardstick."""

import torch

from fused_rope_attn.experimental.corope import reference
from verification.testing import compare

NAMES = ("o", "dq", "dk", "dv")


def make(batch, heads_q, heads_kv, length, head_dim, dtype, device="cpu"):
    """q, k, v as views of (B, N, H, D), and do."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads):
        x = torch.randn(batch, length, heads, head_dim, generator=generator, device=device)
        return x.to(dtype).transpose(1, 2)

    return normal(heads_q), normal(heads_kv), normal(heads_kv), normal(heads_q)


def results(function, inputs, dtype):
    """(o, dq, dk, dv) of a function of q, k and v, computed in ``dtype`` from (q, k, v, do)."""
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = function(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def assert_matches_float64(inputs, out, *, base=10000.0, scale=None):
    """(o, dq, dk, dv) have the inputs' dtype and are within the tolerance of float64."""
    dtype, scale = inputs[0].dtype, inputs[0].shape[-1] ** -0.5 if scale is None else scale

    def right(q, k, v):
        return reference.corope(q, k, v, base=base, softmax_scale=scale)

    ref64, eager = results(right, inputs, torch.float64), results(right, inputs, dtype)
    for name, *tensors in zip(NAMES, out, ref64, eager):
        assert tensors[0].dtype == dtype, (name, tensors[0].dtype)
        found = compare(name, *tensors, grad=name != "o", dtype=dtype)
        assert found.ok, found
