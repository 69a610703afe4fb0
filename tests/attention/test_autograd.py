"""Attention and autograd: checkpointing, double backward, sinks alone, changed inputs, inference mode."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import rope_attention
from tests.support.attention import gradients, leaves, packed_case, run_and_compare
from tests.support.internals import go_through_the_dispatcher
from tests.support.marks import STRATEGIES, both_strategies, cases, interpreted
from tests.support.operators import MASKS, SMALL, assert_close, kernel_or_reference
from verification.testing import make_inputs


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(backend, use_reentrant):
    inputs = make_inputs(SMALL)

    def plain(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend)

    saved = gradients(lambda q, k, v: checkpoint(plain, q, k, v, use_reentrant=use_reentrant), inputs)
    assert_close(saved, gradients(plain, inputs), 0.0)


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [pytest.param("triton", s, marks=interpreted) for s in STRATEGIES] + [("reference", "auto")],
)
@pytest.mark.parametrize("through", ["q", "k", "v", "do"])
def test_double_backward_raises(through, backend, strategy):
    inputs = make_inputs(SMALL)
    q, k, v = leaves(inputs)
    do = inputs.do.detach().clone().requires_grad_()
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend, strategy=strategy)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    assert dq.requires_grad and dk.requires_grad and dv.requires_grad
    with pytest.raises(NotImplementedError, match="^rope_attention: double backward"):
        torch.autograd.grad(dq.sum() + dk.sum() + dv.sum(), {"q": q, "k": k, "v": v, "do": do}[through])


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_have_no_gradient(name, backend):
    inputs = make_inputs(SMALL)
    table = {name: getattr(inputs, name).clone().requires_grad_()}
    q, k, v, cos, sin, _ = inputs._replace(**table)
    with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
        rope_attention(q, k, v, cos, sin, True, backend=backend)


@interpreted
@pytest.mark.parametrize("plain", [True, False])
def test_only_sinks_require_a_gradient(plain, monkeypatch):
    if not plain:
        go_through_the_dispatcher(monkeypatch)
    q, k, v, cos, sin, do = make_inputs(SMALL)
    gradients = []
    for backend in ("reference", "triton"):
        sinks = MASKS["sinks"].clone().requires_grad_()
        o = rope_attention(q, k, v, cos, sin, True, sinks=sinks, backend=backend)
        gradients += torch.autograd.grad(o, sinks, do)
    assert_close(gradients[:1], gradients[1:])


@kernel_or_reference("triton", "reference")
def test_double_backward_through_sinks_raises(backend):
    inputs = make_inputs(SMALL)
    q, k, v = leaves(inputs)
    sinks = MASKS["sinks"].clone().requires_grad_()
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, sinks=sinks, backend=backend)
    (dsinks,) = torch.autograd.grad(o, sinks, inputs.do, create_graph=True)
    with pytest.raises(NotImplementedError, match="^rope_attention: double backward"):
        torch.autograd.grad(dsinks.sum(), q)


def test_sinks_are_differentiable():
    q, k, v, cos, sin, do = make_inputs(SMALL)
    sinks = MASKS["sinks"].clone().requires_grad_()
    o, lse = rope_attention(q, k, v, cos, sin, True, sinks=sinks, return_lse=True)
    o.backward(do)
    # A sink has the weight exp(sink - lse) and the value 0.
    weights = torch.exp(sinks.detach()[:, None] - lse)
    expected = -(weights * (o.detach() * do).sum(-1)).sum((0, 2))
    torch.testing.assert_close(sinks.grad, expected, rtol=1e-4, atol=1e-5)


DLSE = [
    replace(SMALL, lse_gradient=True),
    replace(SMALL, lse_gradient=True, causal=False, softcap=4.0, sinks=True, window=(20, 9)),
    replace(SMALL, lse_gradient=True, norms=1.0, interleaved=True, kv_lens=(5,) * SMALL.batch),
    packed_case(replace(SMALL, lse_gradient=True, sinks=True), (40, 3, 0, 20)),
]


@interpreted
@both_strategies
@pytest.mark.parametrize("plain", [True, False])
@cases(*DLSE)
def test_gradients_of_o_and_lse(case, plain, strategy, monkeypatch):
    """dS = P * (dP - delta + dlse), in the kernels as in float64, in every pass that makes delta."""
    if not plain:
        go_through_the_dispatcher(monkeypatch)
    run_and_compare(case, strategy=strategy)


@kernel_or_reference("triton", "reference")
def test_a_loss_of_lse_alone(backend):
    """v has the gradient 0; a row that sees nothing takes any gradient of lse, and gives none."""
    case = replace(SMALL, kv_lens=(5,) * SMALL.batch)
    inputs = make_inputs(case)
    lens = torch.full((case.batch,), 5, dtype=torch.int32)
    for _ in range(2):  # the second call is a known one
        q, k, v = leaves(inputs)
        _, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, True, kv_lens=lens, return_lse=True, backend=backend)
        dlse = torch.where(lse == -torch.inf, torch.nan, 1.0)
        assert bool(dlse.isnan().any())
        dq, dk, dv = torch.autograd.grad(lse, (q, k, v), dlse, materialize_grads=True)
        assert bool(torch.isfinite(dq).all()) and bool(dk.any()) and not bool(dv.any())


@kernel_or_reference("triton", "reference")
def test_double_backward_through_lse_raises(backend):
    inputs = make_inputs(SMALL)
    q, k, v = leaves(inputs)
    _, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, True, return_lse=True, backend=backend)
    (dq,) = torch.autograd.grad(lse.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^rope_attention: double backward"):
        torch.autograd.grad(dq.sum(), k)


@kernel_or_reference("triton", "reference")
def test_inference_mode(backend):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    expected = rope_attention(q, k, v, cos, sin, True, backend=backend)
    with torch.inference_mode():
        q, k, v, cos, sin, _ = make_inputs(SMALL)
        assert torch.equal(rope_attention(q, k, v, cos, sin, True, backend=backend), expected)


@interpreted
def test_in_place_changes_of_inputs_are_noticed():
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton")
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
