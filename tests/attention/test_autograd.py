"""Attention and differentiation: checkpointing, autocast, torch.func; higher derivatives and forward mode raise."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import plan, rope_attention
from tests.support import operators
from tests.support.marks import STRATEGIES, ignore_overflow
from verification.testing import make_inputs

pytestmark = ignore_overflow
both_backends = operators.kernel_or_reference("triton", "reference")
FORWARD_MODE = "^rope_attention(_varlen|_mla)?: forward-mode differentiation"


@operators.small_calls
@both_backends
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(name, backend, use_reentrant):
    run, tensors = operators.small_call(name, backend=backend)
    leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
    outputs = checkpoint(lambda *given: run(*given)[:2], *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(outputs, operators.upstream_of(*outputs))
    expected = operators.differentiated(lambda *given: run(*given)[:2], tensors)
    operators.assert_close([*(x.detach() for x in outputs), *(x.grad for x in leaves)], expected, 0.0)


@operators.small_calls
@both_backends
def test_double_backward_raises(name, backend):
    for strategy in ({},) if name == "latent" or backend == "reference" else ({"strategy": x} for x in STRATEGIES):
        run, tensors = operators.small_call(name, backend=backend, **strategy)
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        outputs = run(*leaves)[:2]
        upstream = [x.requires_grad_() for x in operators.upstream_of(*outputs)]
        gradients = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
        assert all(x.requires_grad for x in gradients)
        for x in (*leaves, *upstream):
            with pytest.raises(NotImplementedError, match="double backward"):
                torch.autograd.grad(sum(x.sum() for x in gradients), x, retain_graph=True)


@both_backends
def test_a_loss_of_lse_alone(backend):
    """v has the gradient 0."""
    run, tensors = operators.small_call("masks", backend=backend)
    for _ in range(2):  # the second call is a known one
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        _, lse, max_logit = run(*leaves)
        assert not max_logit.requires_grad
        found = torch.autograd.grad(lse, leaves, operators.upstream_of(lse, lse)[1], materialize_grads=True)
        assert [bool(x.any()) for x in found] == [True, True, False, True] and all(x.isfinite().all() for x in found)


@both_backends
def test_inference_mode(backend):
    run, tensors = operators.small_call("plain", backend=backend)
    with torch.inference_mode():
        operators.assert_close(run(*(x.clone() for x in tensors.values())), run(*tensors.values()), 0.0)


def test_a_tensor_that_is_given_twice_gets_the_sum():
    """The reference works on views of its inputs."""
    run, tensors = operators.small_call("plain", backend="reference")
    *_, dk, dv = operators.differentiated(run, tensors | {"v": tensors["k"]})
    twice = operators.differentiated(lambda q, k: run(q, k, k), {name: tensors[name] for name in "qk"})
    operators.assert_close([twice[-1]], [dk + dv])


@both_backends
@operators.small_calls
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(name, backend, mixed):
    """Inputs are cast to autocast's dtype, tables and weights are not; gradients have the inputs' dtypes."""
    run, tensors = operators.small_call(name, backend=backend)
    weights = ("sinks", "q_norm", "k_norm")
    halves = {name: x if name in weights else x.half() for name, x in tensors.items()}
    given = {
        x: y if x in weights else halves[x] if mixed and x[0] == "k" else halves[x].float() for x, y in tensors.items()
    }
    leaves = [x.detach().clone().requires_grad_() for x in given.values()]
    with torch.autocast("cpu", torch.float16):
        outputs = run(*leaves)
    assert outputs[0].dtype == torch.float16
    found = torch.autograd.grad(outputs[:2], leaves, operators.upstream_of(*outputs[:2]))
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    expected = operators.differentiated(run, halves)
    operators.assert_close([x.detach().to(y.dtype) for x, y in zip((*outputs, *found), expected)], expected, 1e-3)


def test_autocast_and_the_reference():
    """bfloat16 takes it, as the plan says, and so does float64, which stays as it is."""
    q, k, v, cos, sin, _ = make_inputs(operators.SMALL)
    wide = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(q, k.bfloat16(), v, cos, sin, True).backend == "reference"
        assert rope_attention(q, k, v, cos, sin, True).dtype == torch.bfloat16
        assert torch.equal(rope_attention(*wide, cos, sin, True), operators.small_call("plain")[0](*wide)[0])


def with_tangent(function, tensors, i):
    with forward_ad.dual_level():
        given = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate(tensors)]
        return function(*given)


def plain(backend):
    run, tensors = operators.small_call("plain", backend=backend)
    q, k, v = tensors.values()
    return lambda q: run(q, k, v)[0], q


@both_backends
def test_torch_func_refuses_forward_mode_and_second_derivatives(backend):
    """The tangent of a gradient too: only dO has one, for example when the loss depends on a dual tensor."""
    run, q = plain(backend)
    leaf = q.clone().requires_grad_()
    o = run(leaf)

    def weighted(weights):
        return torch.func.grad(lambda q: (run(q) * weights).sum())(q)

    run(q)  # a known call from here on
    for refused in (
        lambda: torch.func.jvp(run, (q,), (q,)),
        lambda: torch.func.jacfwd(lambda q: run(q).sum((1, 3)))(q),
        lambda: torch.func.hessian(lambda q: run(q).sum())(q),
        lambda: torch.func.grad(lambda q: torch.func.jvp(run, (q,), (q,))[1].sum())(q),
        lambda: torch.func.vmap(lambda q: torch.func.jvp(run, (q,), (q,)))(torch.stack((q, q))),
        lambda: with_tangent(lambda do: torch.autograd.grad(o, leaf, do), (torch.ones_like(o),), 0),
        lambda: torch.func.jvp(weighted, (o.detach(),), (o.detach(),)),
    ):
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            refused()
    gradient = torch.func.grad(lambda q, weights: (run(q) * weights).square().sum())
    for through in range(2):  # q, and the operation after attention
        with pytest.raises(NotImplementedError, match="^rope_attention: double backward"):
            torch.func.grad(lambda *given: gradient(*given).sum(), argnums=through)(q, torch.ones_like(q))


@both_backends
def test_tangents_that_do_not_reach_attention_are_served(backend):
    run, q = plain(backend)
    o = run(q)
    operators.assert_close(torch.func.jvp(lambda x: x * run(q), (o,), (o,)), (o * o, o * o), 1e-6)
    with forward_ad.dual_level():
        assert torch.equal(run(q), o)


@both_backends
@pytest.mark.parametrize("name", ["masks", "packed", "latent"])
def test_torch_func(name, backend):
    run, tensors = operators.small_call(name, backend=backend)
    given, every = list(tensors.values()), tuple(range(len(tensors)))
    leaves = [x.detach().clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(run(*leaves)[0].square().sum(), leaves)

    def gradient(*tensors):
        return torch.func.grad(lambda *tensors: run(*tensors)[0].square().sum(), argnums=every)(*tensors)

    operators.assert_close(gradient(*given), expected)
    operators.assert_close(torch.func.vjp(lambda *x: run(*x)[0], *given)[1](2 * run(*given)[0]), expected)
    first, second, *others = given
    axes = (2, 0, *[None] * len(others))
    several = torch.stack((first, first + 1), 2), torch.stack((second, 2 * second))
    function = run if name == "masks" else gradient
    found = torch.func.vmap(function, in_dims=axes)(*several, *others)
    for i in range(2):
        operators.assert_close([x[i] for x in found], function(several[0][:, :, i], several[1][i], *others))


@both_backends
@pytest.mark.unpoisoned
def test_compiled_calls(backend):
    run, q = plain(backend)
    gradient = torch.func.grad(lambda q: run(q).square().sum())
    torch._dynamo.reset()
    graph, graph_of_gradient = (torch.compile(x, backend="aot_eager", fullgraph=True) for x in (run, gradient))
    graph(q)
    if backend == "triton":
        operators.assert_close([graph_of_gradient(q)], [gradient(q)])
    for refused in (lambda: with_tangent(graph, (q,), 0), lambda: torch.func.jvp(graph, (q,), (q,))):
        with pytest.raises((NotImplementedError, RuntimeError)):
            refused()
