"""Attention under torch.compile: one graph, few compilations, the numbers of eager."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rope_attn import rope_attention
from tests.support.attention import gradients
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.operators import assert_close, differentiated, kernel_or_reference, small_call, small_calls
from verification.testing import Case, make_inputs

pytestmark = [pytest.mark.unpoisoned, ignore_overflow]
both_backends = kernel_or_reference("triton", "reference")


@small_calls
@both_backends
def test_one_graph_has_the_results_of_eager(name, backend):
    """Values, gradients and memory order."""
    torch._dynamo.reset()
    run, tensors = small_call(name, backend=backend)
    expected = differentiated(run, tensors)
    found = differentiated(torch.compile(run, fullgraph=True, backend="aot_eager"), tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()


@interpreted
@both_strategies
def test_dynamic_lengths_have_one_graph(strategy):
    """Forward and backward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v, cos, sin):
        return rope_attention(2 * q, k, v, cos, sin, True, backend="triton", strategy=strategy) + 1

    compiled, frames = torch.compile(run, fullgraph=True, backend=counter, dynamic=True), []
    for len_q, len_k in ((5, 9), (7, 12), (6, 33)):
        inputs = make_inputs(Case(1, 2, 1, len_q, len_k, 16, dtype=torch.float32))
        found, eager = (
            gradients(lambda *qkv: function(*qkv, inputs.cos, inputs.sin), inputs)  # noqa: B023
            for function in (compiled, run)
        )
        assert_close(found, eager)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]
    # Next to the graph with the operator there may be an empty one, from a constant that planning asks for.
    assert sum("attention_forward" in graph.code for graph in counter.graphs) == 1


@pytest.mark.parametrize("backend", ["auto", "reference", pytest.param("triton", marks=interpreted)])
def test_lengths_that_change_are_compiled_once_more(backend):
    """Without `dynamic=True`: the first change of the length makes it dynamic, and that is the last compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope_attention, fullgraph=True, backend=counter)
    for n in (9, 12, 17, 33):
        given = *make_inputs(Case(1, 2, 1, n, n, 16, dtype=torch.float32))[:5], True
        assert_close([compiled(*given, backend=backend)], [rope_attention(*given, backend=backend)])
    assert counter.frame_count <= 2


@both_backends
def test_numbers_that_change(backend):
    """From its second value on, torch.compile makes a number an input of the graph."""
    torch._dynamo.reset()
    q, k, v, cos, sin, _ = make_inputs(Case(1, 2, 1, 9, 9, 16, dtype=torch.float32))

    def run(scale, softcap, offset, eps):
        norm = torch.ones(16)
        numbers = {"softmax_scale": scale, "softcap": softcap, "norm_offset": offset, "norm_eps": eps}
        return rope_attention(q, k, v, cos, sin, True, q_norm=norm, k_norm=norm, backend=backend, **numbers)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for numbers in ((0.1, 5.0, 0.0, 1e-6), (0.2, 6.0, 1.0, 1e-5), (0.3, 7.0, 0.5, 1e-4)):
        assert_close([compiled(*numbers)], [run(*numbers)])
