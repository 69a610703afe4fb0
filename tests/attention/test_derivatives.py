"""Forward-mode differentiation and torch.func: the first derivative in reverse mode is served, any other raises."""

import pytest
import torch
from torch.autograd import forward_ad

from fused_rope_attn import rope_attention, rope_attention_varlen
from tests.support.attention import leaves
from tests.support.marks import interpreted
from tests.support.operators import MASKS, SMALL, assert_close, kernel_or_reference
from verification.testing import make_inputs

both_backends = kernel_or_reference("triton", "reference")
FORWARD_MODE = "^rope_attention: forward-mode differentiation"
# The tensors that have a gradient.
NAMES = ("q", "k", "v", "sinks", "q_norm", "k_norm")


def attention_of(backend, **changes):
    """(a function of the tensors that have a gradient, those tensors)."""
    inputs = make_inputs(SMALL)
    weights = torch.linspace(0.5, 1.5, 16)
    tensors = (*inputs[:3], MASKS["sinks"], weights, weights.flip(0))

    def run(*tensors):
        given = dict(zip(NAMES, tensors, strict=True))
        q, k, v = (given.pop(name) for name in "qkv")
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend, **given, **changes)

    return run, tensors


def with_tangent(function, tensors, i):
    """Call ``function`` with the tensors; number ``i`` has a tangent."""
    with forward_ad.dual_level():
        given = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate(tensors)]
        return function(*given)


@both_backends
@pytest.mark.parametrize("name", NAMES)
def test_a_tangent_is_refused(name, backend):
    run, tensors = attention_of(backend)
    i = NAMES.index(name)
    run(*tensors)  # a known call from here on
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        with_tangent(run, tensors, i)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jvp(lambda x: run(*tensors[:i], x, *tensors[i + 1 :]), (tensors[i],), (tensors[i],))


@both_backends
def test_other_forms_of_forward_mode_are_refused(backend):
    run, (q, *others) = attention_of(backend)
    for transformed in (
        torch.func.jacfwd(lambda q: run(q, *others).sum((1, 3))),
        torch.func.hessian(lambda q: run(q, *others).sum()),
        torch.func.grad(lambda q: torch.func.jvp(lambda q: run(q, *others), (q,), (q,))[1].sum()),
    ):
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            transformed(q)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.vmap(lambda q: torch.func.jvp(lambda q: run(q, *others), (q,), (q,)))(torch.stack((q, q)))


@both_backends
def test_the_tangent_of_a_gradient_is_refused(backend):
    """Only dO has a tangent, for example when the loss depends on a dual tensor."""
    run, (q, *others) = attention_of(backend)
    q = q.clone().requires_grad_()
    o = run(q, *others)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        with_tangent(lambda do: torch.autograd.grad(o, q, do), (torch.ones_like(o),), 0)

    def weighted(weights):
        return torch.func.grad(lambda q: (run(q, *others) * weights).sum())(q.detach())

    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jvp(weighted, (o.detach(),), (o.detach(),))


@both_backends
def test_forward_mode_beside_attention(backend):
    """Tangents that do not reach attention are not refused."""
    run, tensors = attention_of(backend)
    o = run(*tensors)
    value, tangent = torch.func.jvp(lambda x: x * run(*tensors), (o,), (o,))
    assert_close((value, tangent), (o * o, o * o), 1e-6)
    with forward_ad.dual_level():
        assert torch.equal(run(*tensors), o)


@both_backends
def test_packed_calls_refuse_forward_mode(backend):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = torch.tensor([[0, 3, 7], [0, 4, 9]], dtype=torch.int32)

    def run(q, k, v):
        return rope_attention_varlen(q, k, v, cos, sin, *ends, 4, 5, True, backend=backend)

    with pytest.raises(NotImplementedError, match=FORWARD_MODE.replace(":", "(_varlen)?:")):
        with_tangent(run, (q, k, v), 2)


@both_backends
def test_gradients_by_torch_func(backend):
    run, tensors = attention_of(backend)
    every = tuple(range(len(tensors)))
    wanted = [x.detach().clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(run(*wanted).square().sum(), wanted)
    found = torch.func.grad(lambda *tensors: run(*tensors).square().sum(), argnums=every)(*tensors)
    assert_close(found, expected)
    assert_close(torch.func.vjp(run, *tensors)[1](2 * run(*tensors)), expected)


@both_backends
def test_gradients_of_each_entry_by_torch_func(backend):
    """vmap over grad, along any axis, with tensors that all entries share."""
    run, (q, k, *others) = attention_of(backend)
    gradient = torch.func.grad(lambda q, k: run(q, k, *others).square().sum(), argnums=(0, 1))
    qs, ks = torch.stack((q, q + 1), dim=2), torch.stack((k, 2 * k))
    found = torch.func.vmap(gradient, in_dims=(2, 0))(qs, ks)
    for i in range(2):
        assert_close([x[i] for x in found], gradient(qs[:, :, i], ks[i]))


@both_backends
def test_second_derivatives_by_torch_func_are_refused(backend):
    run, (q, *others) = attention_of(backend)
    gradient = torch.func.grad(lambda q, weights: (run(q, *others) * weights).square().sum())
    for through in range(2):  # q, and the operation after attention
        with pytest.raises(NotImplementedError, match="^rope_attention: double backward"):
            torch.func.grad(lambda *given: gradient(*given).sum(), argnums=through)(q, torch.ones_like(q))


@both_backends
@pytest.mark.unpoisoned
@pytest.mark.parametrize("where", ["inside", "around", "dual"])
def test_compiled_calls_refuse_forward_mode(where, backend):
    run, (q, *others) = attention_of(backend)
    torch._dynamo.reset()
    if where == "inside":
        refused = torch.compile(
            lambda q: torch.func.jvp(lambda q: run(q, *others), (q,), (q,)), backend="aot_eager", fullgraph=True
        )
    else:
        compiled = torch.compile(lambda q: run(q, *others), backend="aot_eager", fullgraph=True)
        compiled(q)
        refused = compiled
    with pytest.raises((NotImplementedError, RuntimeError)):
        if where == "dual":
            with_tangent(refused, (q,), 0)
        elif where == "around":
            torch.func.jvp(refused, (q,), (q,))
        else:
            refused(q)


@interpreted
@pytest.mark.unpoisoned
def test_compiled_gradients_by_torch_func():
    run, (q, *others) = attention_of("triton")
    gradient = torch.func.grad(lambda q: run(q, *others).square().sum())
    torch._dynamo.reset()
    assert_close([torch.compile(gradient, backend="aot_eager", fullgraph=True)(q)], [gradient(q)])


def test_leaves_that_share_views_keep_their_gradients():
    """The reference works on views of its inputs: a tensor that is given twice gets the sum."""
    q, k, _ = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    o = rope_attention(q, k, k, inputs.cos, inputs.sin, True, backend="reference")
    other = k.detach().clone().requires_grad_()
    value = k.detach().clone().requires_grad_()
    again = rope_attention(q, other, value, inputs.cos, inputs.sin, True, backend="reference")
    (dk,) = torch.autograd.grad(o.square().sum(), k)
    parts = torch.autograd.grad(again.square().sum(), (other, value))
    assert_close([dk], [parts[0] + parts[1]])
