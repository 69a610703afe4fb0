"""The operators run the planned kernels: launchers that note their calls replace them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rope_attn import rope_attention
from tests.support.dtypes import F16
from tests.support.internals import go_through_the_dispatcher, replace_portable_launchers, replace_sm_90_launchers
from tests.support.planning import HOPPER, PORTABLE, call
from verification.testing import Case, make_inputs, run_reference


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("through_the_dispatcher", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_the_operators_take_the_planned_kernels(arch, monkeypatch, backend, through_the_dispatcher, deterministic):
    """With launchers that write down who was called and compute nothing of their own."""
    case = Case(1, 2, 1, 20, 20, 16, dtype=F16)
    inputs = make_inputs(case)
    expected = run_reference(inputs, case)
    seen = []

    def launcher(name, results):
        def launch(problem, tensors, config, rotated):
            assert problem.causal and not problem.interleaved
            assert (problem.softmax_scale, problem.rotary_dim) == (0.25, 16)
            seen.append((name, type(config)))
            return tuple(x.clone() for x in results)

        return launch

    replace_portable_launchers(
        monkeypatch, launcher("portable forward", expected[:2]), launcher("portable backward", expected[2:])
    )
    replace_sm_90_launchers(
        monkeypatch, launcher("sm_90 forward", expected[:2]), launcher("sm_90 backward", expected[2:])
    )
    if through_the_dispatcher:
        go_through_the_dispatcher(monkeypatch)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend, deterministic=deterministic)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    assert all(torch.equal(x, y) for x, y in zip((o, *gradients), (expected.o, *expected[2:])))
    name, (forward, backward) = ("sm_90", HOPPER) if backend == "hopper" else ("portable", PORTABLE)
    assert seen == [(f"{name} forward", forward), (f"{name} backward", backward)]


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_compile_asks_nothing_that_a_graph_does_not_know(arch, monkeypatch, backend):
    """One graph for lengths of every bucket: which kernels run is decided when it runs."""
    seen = []

    def launch(problem, tensors, config, saving):
        q = tensors.q
        seen.append(type(config))
        return q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32)

    replace_portable_launchers(monkeypatch, launch)
    replace_sm_90_launchers(monkeypatch, launch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend=backend) + 1

    first = None
    for length in (200, 700, 3000, 5000):
        given = call(length, head_dim=16, batch=1, heads=(2, 1), where="cpu")
        arguments = [given[name].fill_(1) for name in ("q", "k", "v", "cos", "sin")]
        assert torch.equal(compiled(*arguments), arguments[0] + 1)
        first = first or counter.frame_count
    assert counter.frame_count == first
    assert set(seen) == {HOPPER[0] if backend == "hopper" else PORTABLE[0]}
