"""Attention under torch.compile: one graph, few compilations, the numbers of eager."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rope_attn import rope_attention
from tests.support.attention import gradients, leaves
from tests.support.marks import both_strategies, interpreted
from tests.support.operators import MASKS, SMALL, assert_close
from verification.testing import Case, make_inputs


@interpreted
@pytest.mark.unpoisoned
@both_strategies
def test_compile_with_dynamic_lengths(strategy):
    """One graph for all lengths, forward and backward, equal to eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin):
        return rope_attention(2 * q, k, v, cos, sin, True, backend="triton", strategy=strategy) + 1

    first = None
    for len_q, len_k in ((5, 9), (7, 12), (11, 17), (6, 33)):
        inputs = make_inputs(Case(1, 2, 1, len_q, len_k, 16, dtype=torch.float32))
        tables = inputs.cos, inputs.sin
        options = {"backend": "triton", "strategy": strategy}
        eager = gradients(lambda q, k, v: rope_attention(2 * q, k, v, *tables, True, **options) + 1, inputs)  # noqa: B023
        assert_close(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager)  # noqa: B023
        first = first or counter.frame_count
    assert counter.frame_count == first
    # Beside the graph with the operator there may be an empty one, from a constant that planning asks for.
    assert sum("attention_forward" in graph.code for graph in counter.graphs) == 1


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["auto", "reference", pytest.param("triton", marks=interpreted)])
def test_compile_recompiles_once_for_lengths_that_change(backend):
    """Without `dynamic=True`: the first change of the length makes it dynamic, and that is the last compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend=backend)

    for n in (9, 12, 17, 33):
        q, k, v, cos, sin, _ = make_inputs(Case(1, 2, 1, n, n, 16, dtype=torch.float32))
        assert_close([compiled(q, k, v, cos, sin)], [rope_attention(q, k, v, cos, sin, True, backend=backend)])
    assert counter.frame_count <= 2


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_compile_takes_numbers_that_change(backend):
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


@pytest.mark.unpoisoned
def test_compile_serves_every_feature_through_auto():
    torch._dynamo.reset()
    inputs = make_inputs(Case(2, 2, 1, 7, 9, 16, dtype=torch.float32, interleaved=True, full_width=True))

    def run(q, k, v, sinks, starts, lens):
        return rope_attention(
            q,
            k,
            v,
            inputs.cos,
            inputs.sin,
            True,
            interleaved=True,
            window=(3, 0),
            softcap=20.0,
            sinks=sinks,
            kv_starts=starts,
            kv_lens=lens,
            return_lse=True,
        )

    arguments = *inputs[:3], MASKS["sinks"], MASKS["kv_starts"], MASKS["kv_lens"]
    o, lse = torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments)
    expected, expected_lse = run(*arguments)
    assert_close([o, lse], [expected, expected_lse])


@interpreted
@pytest.mark.unpoisoned
def test_compile_with_masks_equals_eager():
    torch._dynamo.reset()
    inputs = make_inputs(SMALL)
    window, softcap = MASKS["window"], MASKS["softcap"]

    def run(q, k, v, sinks, starts, lens):
        return rope_attention(
            q,
            k,
            v,
            inputs.cos,
            inputs.sin,
            True,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_starts=starts,
            kv_lens=lens,
            return_lse=True,
            backend="triton",
        )

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v = leaves(inputs)
        sinks = MASKS["sinks"].clone().requires_grad_()
        o, lse = function(q, k, v, sinks, MASKS["kv_starts"], MASKS["kv_lens"])
        upstream = inputs.do, torch.ones_like(lse)
        results.append([o.detach(), *torch.autograd.grad((o, lse), (q, k, v, sinks), upstream)])
    assert_close(*results, 0.0)
