"""The rotation as PyTorch sees it: gradients, the dispatcher, torch.compile, fake tensors, autocast."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from tests.support.dtypes import F32, F64
from tests.support.internals import rotate_without_the_kernel
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import KINDS, assert_close, normal, rotate_by_matrix, strided

pytestmark = ignore_overflow


def test_the_gradient_is_a_rotation_and_differentiable_again():
    cos, sin = rope_tables(3, 6)
    x = normal(1, 2, 3, 8).requires_grad_()
    for interleaved in (False, True):
        run = lambda x: apply_rope(x, cos, sin, rotary_dim=6, interleaved=interleaved)  # noqa: B023, E731
        assert torch.autograd.gradcheck(run, x) and torch.autograd.gradgradcheck(run, x)
    # The kernel is a function of the gradient, and its own gradient rotates forward again.
    y = x.detach().float().requires_grad_()
    do = normal(1, 2, 3, 8, seed=1).float().requires_grad_()
    (dx,) = torch.autograd.grad(apply_rope(y, cos, sin), y, do, create_graph=True)
    (ddo,) = torch.autograd.grad(dx, do, y.detach())
    assert_close(ddo, apply_rope(y.detach().double(), cos, sin), 1e-5)


@pytest.fixture(params=[pytest.param("kernel", marks=interpreted), "reference"])
def either_way(request, monkeypatch):
    """The kernel and the reference, one after the other."""
    if request.param == "reference":
        rotate_without_the_kernel(monkeypatch)


def rotations():
    """Public functions of one tensor (1, 2, 3, 8), by the names in which they refuse derivatives."""
    cos, sin = rope_tables(3, 8)
    weight = torch.linspace(0.5, 1.5, 8)
    return {
        "apply_rope": lambda x: apply_rope(x, cos, sin),
        "apply_rope_qk with norms": lambda x: apply_rope_qk(x, x, cos, sin, q_norm=weight, k_norm=weight)[0],
    }


@pytest.mark.parametrize("name", rotations())
def test_forward_mode_is_refused(either_way, name):
    run, x = rotations()[name], normal(1, 2, 3, 8).float()
    message = f"^{'apply_rope' if name == 'apply_rope' else 'apply_rope(_qk with norms)?'}: forward-mode"
    for transformed in (
        lambda x: torch.func.jvp(run, (x,), (x,)),
        torch.func.jacfwd(run),
        lambda x: torch.func.jvp(torch.func.grad(lambda x: run(x).square().sum()), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            transformed(x)
    x.requires_grad_()
    y = run(x)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(y, x, forward_ad.make_dual(y.detach(), y.detach()))
        with pytest.raises(NotImplementedError, match=message):
            run(forward_ad.make_dual(x.detach(), x.detach()))


@pytest.mark.parametrize("name", rotations())
def test_gradients_by_torch_func(either_way, name):
    run, x = rotations()[name], torch.stack([normal(1, 2, 3, 8, seed=i).float() for i in range(2)])
    assert torch.equal(torch.func.vmap(run)(x), torch.stack([run(y) for y in x]))
    wanted = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(run(y).square().sum() for y in wanted), wanted)
    gradient = torch.func.grad(lambda x: run(x).square().sum())
    assert_close(torch.func.vmap(gradient)(x), expected.double(), 1e-5)
    second = torch.func.grad(lambda x: gradient(x).sum())
    if name == "apply_rope":  # |x|^2 has the same second derivative before and after the rotation
        assert_close(second(x[0]), torch.full_like(x[0], 2.0).double(), 1e-5)
    else:
        with pytest.raises(NotImplementedError, match=f"^{name}: double backward"):
            second(x[0])


@interpreted
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_what_is_wanted_is_computed(wanted):
    cos, sin = rope_tables(5, 16)
    xs = {name: normal(1, 2, 5, 16, seed=i).float().requires_grad_(name in wanted) for i, name in enumerate("qkv")}
    outs = apply_rope_qk(xs["q"], xs["k"], cos, sin, v=xs["v"])
    sum(out.sum() for out in outs).backward()
    for name, x in xs.items():
        assert (x.grad is not None) == (name in wanted)
        if x.grad is not None:
            assert_close(
                x.grad, rotate_by_matrix(torch.ones_like(x).double(), cos.double(), sin.double(), 16, False, True), 1e-5
            )
    q = xs["q"].detach().requires_grad_()
    outs = apply_rope_qk(q, xs["k"].detach().requires_grad_(), cos, sin)
    outs[0].sum().backward()  # k's output is not used at all
    assert q.grad is not None


@interpreted
def test_nothing_but_tables_is_saved():
    cos, sin = rope_tables(5, 16)
    x, saved = normal(1, 2, 5, 16).float().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope(x, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_opcheck(layout):
    operators = torch.ops.fused_rope_attn
    cos, sin = rope_tables(7, 16)
    if layout == "thd":
        xs, positions = [normal(5, 2, 16).float()], (None, torch.tensor([0, 2, 5], dtype=torch.int32))
    else:
        xs = [normal(1, 2, 5, 16).float(), normal(1, 1, 5, 16).float()]
        positions = (torch.tensor([[[0, 1, 2, 3, 6]]]), None)
    arguments = (cos, sin, *positions, [], 16, False, False, layout, None, None)
    torch.library.opcheck(operators.rope.default, (xs, *arguments))
    leaves = [x.clone().requires_grad_() for x in xs]
    torch.library.opcheck(operators.rope.default, (leaves, *arguments), test_utils="test_aot_dispatch_dynamic")
    torch.library.opcheck(operators.rope_out.default, (xs, [torch.empty_like(x) for x in xs], *arguments))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_compile_with_dynamic_lengths(dtype):
    """One graph for all lengths, forward and backward, equal to eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    cos, sin = rope_tables(40, 16)

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, ids):
        q, k = apply_rope_qk(2 * q, k, cos, sin, position_ids=ids, interleaved=True)
        return q + 1, apply_rope(k, cos, sin, inverse=True)

    for n in (5, 7, 12, 33):
        q, k = (normal(2, h, n, 16, seed=n).to(dtype).requires_grad_() for h in (3, 2))
        ids = torch.arange(n - 1, -1, -1)
        outs = compiled(q, k, ids)
        gradients = torch.autograd.grad(sum((out * out).sum() for out in outs), (q, k))
        q_rot, k_rot = apply_rope_qk(2 * q, k, cos, sin, position_ids=ids, interleaved=True)
        eager = q_rot + 1, apply_rope(k_rot, cos, sin, inverse=True)
        expected = torch.autograd.grad(sum((out * out).sum() for out in eager), (q, k))
        for x, y in zip((*outs, *gradients), (*eager, *expected)):
            assert_close(x.detach(), y.detach().double(), 1e-6)
    assert counter.frame_count == 1


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_compile_with_out(dtype):
    torch._dynamo.reset()
    cos, sin = rope_tables(9, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, out):
        y = x + 1
        apply_rope(y, cos, sin, out=out)
        apply_rope(y, cos, sin, out=y)
        return y

    x = normal(1, 2, 9, 16).to(dtype)
    out = torch.zeros_like(x)
    y = compiled(x, out)
    assert torch.equal(out, apply_rope(x + 1, cos, sin)) and torch.equal(y, out)


@interpreted
@pytest.mark.unpoisoned
def test_fake_tensors_match_the_real_ones():
    cos, sin = rope_tables(9, 16)
    for kind in KINDS:
        x = strided(normal(2, 3, 9, 16).float(), kind)
        real = apply_rope(x, cos, sin)
        with FakeTensorMode() as mode:
            fake = apply_rope(mode.from_tensor(x), mode.from_tensor(cos), mode.from_tensor(sin))
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride()), kind


def test_autocast_leaves_the_dtype_alone():
    cos, sin = rope_tables(5, 16)
    x = normal(1, 2, 5, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = apply_rope(x, cos, sin)
    assert out.dtype == F32 and torch.equal(out, apply_rope(x, cos, sin))
