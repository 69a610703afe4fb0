"""The portable kernels on a GPU under torch.compile, autocast, checkpointing and double backward."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, gradients
from tests.support.dtypes import BF16, F32
from tests.support.gpu import ODD_LENGTHS, assert_alike
from verification.testing import make_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.unpoisoned
def test_compile():
    """Inductor, full graph, one compilation for all lengths, with operations to fuse before and after the operator."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def block(q, k, v, cos, sin):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, backend="triton", strategy="prepass")

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    count = None
    for len_q, len_k in ((333, 700), (200, 600), (64, 1000)):
        case = replace(ODD_LENGTHS, len_q=len_q, len_k=len_k)
        inputs = make_inputs(case, "cuda")
        tables = inputs.cos, inputs.sin
        eager = gradients(lambda q, k, v: block(q, k, v, *tables), inputs)  # noqa: B023
        # Eager calls alone save q and k rotated, by another kernel than rotates them here: a last bit may differ.
        assert_alike(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager)  # noqa: B023
        count = count or counter.frame_count
    assert counter.frame_count == count


@pytest.mark.unpoisoned
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    inputs = make_inputs(ODD_LENGTHS, "cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend="triton", strategy="prepass")

    q, k, v, cos, sin, _ = inputs
    expected = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy="prepass")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k, v, cos, sin), expected)


def test_autocast():
    """float32 activations under autocast: q, k, v are cast, the tables stay float32, gradients are float32 again."""
    dtype = BF16
    inputs = make_inputs(replace(ODD_LENGTHS, dtype=F32), "cuda")
    low = inputs._replace(q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, deterministic=True)

    with torch.autocast("cuda", dtype):
        q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
        o = run(q, k, v)
    o.backward(inputs.do.to(dtype))
    assert o.dtype == dtype and q.grad.dtype == k.grad.dtype == v.grad.dtype == F32
    expected = gradients(run, low)
    for x, y in zip((o.detach(), q.grad, k.grad, v.grad), expected):
        assert torch.equal(x.to(dtype), y)


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(ODD_LENGTHS, "cuda")

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, deterministic=True)

    for use_reentrant in (False, True):
        assert_equal(
            gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=use_reentrant), inputs),  # noqa: B023
            gradients(run, inputs),
        )


def test_double_backward_raises():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    q = inputs.q.detach().requires_grad_()
    o = rope_attention(q, inputs.k, inputs.v, inputs.cos, inputs.sin, True)
    (dq,) = torch.autograd.grad(o, q, inputs.do, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        dq.sum().backward()
