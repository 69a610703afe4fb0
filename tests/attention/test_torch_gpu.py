"""The kernels on a GPU under torch.compile, autocast, checkpointing and double backward."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.dtypes import BF16, F32
from tests.support.gpu import ODD_LENGTHS, assert_alike
from tests.support.marks import cases
from tests.support.places import ON_SM_90, PREPASS, both_backends, each_of
from verification.testing import make_inputs, norms_of, run_op

pytestmark = pytest.mark.gpu
NORMED = replace(ODD_LENGTHS, norms=0.0)


@pytest.mark.unpoisoned
@each_of(prepass=PREPASS, auto={"backend": "auto"}, sm_90=ON_SM_90)
@cases(ODD_LENGTHS, NORMED)
def test_compile(case, chosen):
    """Inductor, full graph, with operations to fuse before and after the operator. The lengths are on both sides of
    where "auto" changes its mind, and one compilation serves all of them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    norms = norms_of(case, "cuda")
    weights = {name: norms.pop(name).requires_grad_() for name in ("q_norm", "k_norm") if name in norms}

    def block(q, k, v, cos, sin, weights):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, **weights, **norms, **chosen)

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True if case is ODD_LENGTHS else None)
    count = None
    for len_q, len_k in ((333, 700), (200, 400), (64, 2000)):
        inputs = make_inputs(replace(case, len_q=len_q, len_k=len_k), "cuda")
        results = []
        for function in (block, compiled):
            leaves = [*(x.detach().requires_grad_() for x in inputs[:3]), *weights.values()]
            o = function(*leaves[:3], inputs.cos, inputs.sin, weights)
            results.append((o.detach(), *torch.autograd.grad(o, leaves, inputs.do)))
        # Eager calls alone save q and k rotated, by another kernel than rotates them here: a last bit may differ.
        assert_alike(*results)
        count = count or counter.frame_count
    assert counter.frame_count == count or case is NORMED


@pytest.mark.unpoisoned
@both_backends
def test_compile_with_cuda_graphs(chosen):
    torch._dynamo.reset()
    tensors = make_inputs(ODD_LENGTHS, "cuda")[:5]

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def compiled(*tensors):
        return rope_attention(*tensors, True, **chosen)

    expected = rope_attention(*tensors, True, **chosen)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(*tensors), expected)


@both_backends
def test_autocast(chosen):
    """q, k and v become bfloat16; the tables and norms' weights stay float32, and all gradients are float32."""
    inputs = make_inputs(replace(NORMED, dtype=F32), "cuda")
    norms = norms_of(NORMED, "cuda")
    weights = [norms[name].requires_grad_() for name in ("q_norm", "k_norm")]

    def run(dtype):
        leaves = [*(x.detach().to(dtype).requires_grad_() for x in inputs[:3]), *weights]
        o = rope_attention(*leaves[:3], inputs.cos, inputs.sin, True, **norms, **chosen, deterministic=True)
        return o, leaves

    with torch.autocast("cuda", BF16):
        assert plan(*inputs[:5], True, **chosen).backend == chosen["backend"]
        o, leaves = run(F32)
    found = torch.autograd.grad(o, leaves, inputs.do.to(BF16))
    assert o.dtype == BF16 and all(x.dtype == F32 for x in found)
    low, low_leaves = run(BF16)
    assert torch.equal(o, low)
    assert_alike(found, torch.autograd.grad(low, low_leaves, inputs.do.to(BF16)))


@both_backends
def test_double_backward_raises(chosen):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    q = inputs.q.detach().requires_grad_()
    o = rope_attention(q, *inputs[1:5], True, **chosen)
    (dq,) = torch.autograd.grad(o, q, inputs.do, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()
    assert_alike([dq.detach()], [run_op(inputs, ODD_LENGTHS, **chosen).dq])
