"""The sm_90 kernels under torch.compile, autocast, checkpointing and double backward."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.attention import gradients
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import ODD_LENGTHS, assert_alike
from tests.support.hopper import ON_SM_90, needs_sm_90
from verification.testing import make_inputs

pytestmark = needs_sm_90


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_compile(backend):
    """Inductor, full graph, one compilation for all lengths, on both sides of where "auto" changes its mind."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def block(q, k, v, cos, sin):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, backend=backend)

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    count = None
    for len_q, len_k in ((333, 700), (200, 400), (64, 2000)):
        inputs = make_inputs(replace(ODD_LENGTHS, len_q=len_q, len_k=len_k), "cuda")
        tables = inputs.cos, inputs.sin
        eager = gradients(lambda q, k, v: block(q, k, v, *tables), inputs)  # noqa: B023
        assert_alike(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager)  # noqa: B023
        count = count or counter.frame_count
    assert counter.frame_count == count


@pytest.mark.unpoisoned
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    q, k, v, cos, sin, _ = make_inputs(ODD_LENGTHS, "cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, **ON_SM_90)

    expected = rope_attention(q, k, v, cos, sin, True, **ON_SM_90)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k, v, cos, sin), expected)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(dtype):
    inputs = make_inputs(replace(ODD_LENGTHS, dtype=F32), "cuda")
    low = inputs._replace(q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, **ON_SM_90)

    with torch.autocast("cuda", dtype):
        assert plan(*inputs[:5], True, **ON_SM_90).backend == "hopper"
        q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
        o = run(q, k, v)
    o.backward(inputs.do.to(dtype))
    assert o.dtype == dtype and q.grad.dtype == k.grad.dtype == v.grad.dtype == F32
    assert_alike((o.detach(), q.grad, k.grad, v.grad), gradients(run, low))


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(ODD_LENGTHS, "cuda")

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, **ON_SM_90)

    for use_reentrant in (False, True):
        saved = gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=use_reentrant), inputs)  # noqa: B023
        assert_alike(saved, gradients(run, inputs))


def test_double_backward_raises():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    q = inputs.q.detach().requires_grad_()
    o = rope_attention(q, inputs.k, inputs.v, inputs.cos, inputs.sin, True, **ON_SM_90)
    (dq,) = torch.autograd.grad(o, q, inputs.do, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        dq.sum().backward()
