"""Multi-head latent attention by the kernels of both backends, in CUDA graphs and under torch.compile."""

import pytest
import torch

from fused_rope_attn import rope_attention_mla
from tests.support.attention import assert_equal
from tests.support.dtypes import BF16
from tests.support.gpu import assert_alike, capture
from tests.support.places import both_backends
from verification.testing import LatentCase, make_latent_inputs

pytestmark = pytest.mark.gpu
DEEPSEEK = LatentCase(2, 6, 333, 700, 128, 64, 128, interleaved=True, dtype=BF16)


@both_backends
@pytest.mark.parametrize("how", ["graph", "compile"])
def test_both_passes(how, chosen):
    """A replay has the bits of eager calls; torch.compile makes one graph."""
    torch._dynamo.reset()
    inputs = make_latent_inputs(DEEPSEEK, "cuda")

    def attention(*rows):
        return rope_attention_mla(*rows, *inputs[5:7], True, interleaved=True, backend=chosen["backend"])

    def step(function=attention):
        leaves = [x.detach().requires_grad_() for x in inputs[:5]]
        o = function(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    if how == "compile":
        assert_alike(step(torch.compile(attention, fullgraph=True)), step())
        return
    graph, captured = capture(step)
    for x in captured:
        x.zero_()
    graph.replay()
    assert_equal(captured, step())
