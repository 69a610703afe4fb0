"""Multi-head latent attention by the kernels of both backends, in CUDA graphs and under torch.compile."""

import pytest
import torch

from fused_rope_attn import rope_attention_mla
from tests.support.dtypes import BF16
from tests.support.gpu import assert_alike
from tests.support.hopper import needs_sm_90
from verification.testing import LatentCase, make_latent_inputs

DEEPSEEK = LatentCase(2, 6, 333, 700, 128, 64, 128, interleaved=True, dtype=BF16)
both_backends = pytest.mark.parametrize(
    "backend", [pytest.param("triton", marks=pytest.mark.gpu), pytest.param("hopper", marks=needs_sm_90)]
)


@both_backends
def test_a_graph_replays_both_passes(backend):
    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:5]]

    def step():
        o = rope_attention_mla(*leaves, *inputs[5:7], True, interleaved=True, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected))


@both_backends
def test_torch_compile_gives_one_graph(backend):
    torch._dynamo.reset()
    inputs = make_latent_inputs(DEEPSEEK, "cuda")

    def run(function):
        leaves = [x.detach().requires_grad_() for x in inputs[:5]]
        o = function(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    def attention(*rows):
        return rope_attention_mla(*rows, *inputs[5:7], True, interleaved=True, backend=backend)

    assert_alike(run(torch.compile(attention, fullgraph=True)), run(attention))
