"""Helpers of Co-RoPE's tests, in the interpreter and on a GPU: inputs, gradients, and the yardstick."""

import torch

from fused_rope_attn.experimental.corope import reference
from verification.testing import compare

NAMES = ("o", "dq", "dk", "dv")


def make(batch, heads_q, heads_kv, length, head_dim, dtype, device="cpu"):
    """q, k, v as views of (B, N, H, D), and do."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(batch, length, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for shape in shapes]


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

    tensors = zip(out, results(right, inputs, torch.float64), results(right, inputs, dtype))
    for name, (x, exact, eager) in zip(NAMES, tensors):
        assert x.dtype == dtype
        found = compare(name, x, exact, eager, grad=name != "o", dtype=dtype)
        assert found.ok, found
