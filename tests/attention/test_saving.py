"""What an eager forward pass saves: q and k rotated where sm_90's kernels make and take them so, else as they came.

Launchers that compute nothing of their own stand in for the kernels.
"""

from types import SimpleNamespace

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.testing import Case, make_inputs, run_reference
from tests.support.dtypes import F16
from tests.support.internals import go_through_the_dispatcher, replace_sm_90_launchers

CASE = Case(1, 4, 2, 20, 20, 16, dtype=F16)


@pytest.fixture
def sm_90(arch, monkeypatch):
    """Launchers of sm_90 that return the reference's results and write down what they were given."""
    inputs = make_inputs(CASE)
    expected = run_reference(inputs, CASE)
    seen = SimpleNamespace(inputs=inputs, expected=expected, forward=[], backward=[])

    def forward(problem, tensors, config, saves_rotated=False):
        seen.forward.append(saves_rotated)
        o, lse = expected.o.clone(), expected.lse.clone()
        return (o, lse, tensors.q + 1, tensors.k + 2) if saves_rotated else (o, lse)

    def backward(problem, tensors, config, is_rotated=False):
        seen.backward.append((is_rotated, tensors))
        return tuple(x.clone() for x in expected[2:])

    replace_sm_90_launchers(monkeypatch, forward, backward)
    return seen


def run(seen, *, needs=(True, True, True), **options):
    """(the leaves, o) of a call in which those of q, k and v that ``needs`` names take a gradient."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(seen.inputs[:3], needs)]
    return leaves, rope_attention(*leaves, seen.inputs.cos, seen.inputs.sin, True, backend="hopper", **options)


def assert_gradients(seen, gradients):
    assert all(torch.equal(x, y) for x, y in zip(gradients, seen.expected[2:], strict=True))


def test_the_rotated_are_saved_and_the_others_are_not(sm_90):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        leaves, o = run(sm_90)
    q, k, v = leaves
    storages = {x.untyped_storage().data_ptr() for x in saved}
    assert {v.untyped_storage().data_ptr(), o.untyped_storage().data_ptr()} <= storages
    assert not {q.untyped_storage().data_ptr(), k.untyped_storage().data_ptr()} & storages
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert sm_90.forward == [True] and is_rotated
    assert torch.equal(tensors.q, q + 1) and torch.equal(tensors.k, k + 2) and torch.equal(tensors.v, v)


def test_nothing_is_saved_without_a_gradient(sm_90):
    run(sm_90, needs=(False, False, False))
    with torch.no_grad():
        run(sm_90)
    assert sm_90.forward == [False, False]


def test_an_input_may_change_after_the_call(sm_90):
    """Only v and the tables are still the caller's."""
    leaves, _ = run(sm_90)
    q, k, v = (x * 1 for x in leaves)
    o = rope_attention(q, k, v, sm_90.inputs.cos, sm_90.inputs.sin, True, backend="hopper")
    before = q.detach() + 1, k.detach() + 2
    q.data.zero_()
    with torch.no_grad():
        k.zero_()
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    _, tensors = sm_90.backward.pop()
    assert torch.equal(tensors.q, before[0]) and torch.equal(tensors.k, before[1])


def test_a_deterministic_call_saves_what_it_was_given(sm_90):
    """Its backward pass is the portable kernels', which read q and k as they came."""
    run(sm_90, deterministic=True)
    assert sm_90.forward == [False]


def test_the_dispatcher_saves_what_it_was_given(sm_90, monkeypatch):
    """Which kernels run is not known before a traced graph does."""
    go_through_the_dispatcher(monkeypatch)
    leaves, o = run(sm_90)
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert sm_90.forward == [False] and not is_rotated and torch.equal(tensors.q, leaves[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_double_backward_is_refused(sm_90, which):
    """Whichever tensor takes the gradient, and whether or not dO does, a second differentiation finds the node."""
    leaves, o = run(sm_90, needs=[i == which for i in range(3)])
    (gradient,) = torch.autograd.grad(o, leaves[which], sm_90.inputs.do, create_graph=True)
    assert torch.equal(gradient, sm_90.expected[2 + which]) and sm_90.backward[0][0]
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(gradient.sum(), leaves[which], retain_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


def test_a_backward_pass_through_the_dispatcher(sm_90):
    """A mode that watches operators sees one, with the rotated tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    leaves, o = run(sm_90)
    with Watch(), torch.enable_grad():
        gradients = torch.autograd.grad(o, leaves, sm_90.inputs.do, create_graph=True)
    assert_gradients(sm_90, gradients)
    assert any("attention_rotated_backward" in name for name in names)


def moved(x):
    """The same tensor at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


def every_second_column(x):
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("unpack", [moved, every_second_column])
def test_what_hooks_have_moved(sm_90, unpack):
    """Saved tensors may come back elsewhere: the TMA must be able to address what the kernels get."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        leaves, o = run(sm_90)
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert is_rotated
    for x, expected in zip(tensors, (leaves[0] + 1, leaves[1] + 2, leaves[2])):
        assert torch.equal(x, expected) and x.data_ptr() % 16 == 0 and x.stride(-1) == 1
