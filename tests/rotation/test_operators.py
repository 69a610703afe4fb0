"""The rotation as PyTorch sees it: gradients, the dispatcher, torch.compile, fake tensors, autocast."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from fused_rope_attn.attention.configs import ARCHS
from fused_rope_attn.rotation.ops import TABLE, RotationConfig, tile_shape
from fused_rope_attn.runtime.rows import find_row
from tests.support.dtypes import F32, F64
from tests.support.internals import OPERATORS, rotate_without_the_kernel
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import Record
from tests.support.rotation import arguments_of_qk, assert_close, normal
from verification.memory import lay

pytestmark = ignore_overflow
with_and_without_norms = pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
either_dtype = pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])


def gradients(outs, tensors):
    leaves = [x for x in tensors.values() if x.requires_grad]
    return torch.autograd.grad(sum((out * out).sum() for out in outs), leaves, allow_unused=True)


@pytest.fixture(params=[pytest.param("kernel", marks=interpreted), "reference"])
def either_way(request, monkeypatch):
    if request.param == "reference":
        rotate_without_the_kernel(monkeypatch)


@interpreted
@with_and_without_norms
def test_what_is_saved_and_an_output_that_is_not_used(norms):
    """Tables are saved, and with norms the input and the weights, but nothing of the norm or of the rotation."""
    tensors, saved = arguments_of_qk(norms), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outs = apply_rope_qk(**tensors)
    kept = tensors if norms else ("cos", "sin")
    assert {t.data_ptr() for t in saved} == {tensors[name].data_ptr() for name in kept}
    whole = gradients(outs, tensors)
    for used in range(2):
        for i, (x, y) in enumerate(zip(gradients(apply_rope_qk(**tensors)[used : used + 1], tensors), whole)):
            assert (x is None) == (i % 2 != used)
            if x is not None:
                assert_close(x, y.double(), 1e-6)


def rotations():
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
    gradient, y = torch.func.grad(lambda x: run(x).square().sum()), run(x.requires_grad_())
    for function in (run, gradient):
        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(function, (x.detach(),), (x.detach(),))
    with forward_ad.dual_level():
        for z in (x, y):
            dual = forward_ad.make_dual(z.detach(), z.detach())
            with pytest.raises(NotImplementedError, match=message):
                run(dual) if z is x else torch.autograd.grad(y, x, dual)


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
@with_and_without_norms
def test_double_backward(norms):
    """The rotation alone is linear: its gradient is a rotation, and so is the gradient of that."""
    tensors = arguments_of_qk(norms)
    with Record() as record:
        out, _ = apply_rope_qk(**tensors)
    assert record.operators == ["fused_rope_attn.rope.default"]
    do = normal(*out.shape, seed=7).float().requires_grad_()
    (dq,) = torch.autograd.grad(out, tensors["q"], do, create_graph=True)
    if norms:
        with pytest.raises(NotImplementedError, match="^apply_rope_qk with norms: double backward"):
            dq.sum().backward()
        return
    (ddo,) = torch.autograd.grad(dq, do, tensors["q"].detach())
    assert_close(ddo, out.detach().double(), 1e-5)


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("memory", ["bnhd", "odd"])
@pytest.mark.parametrize("kind", ["ids", "packed", "norms"])
def test_opcheck(kind, memory):
    """The fake tensors have the strides of the real ones."""
    cos, sin = rope_tables(5, 16)
    xs = [lay(normal(1, heads, 5, 16).float(), memory) for heads in (3, 1)]
    weights, positions, layout = [], (torch.tensor([[[0, 1, 2, 3, 4]]]), None), "bhsd"
    if kind == "packed":
        xs, positions, layout = [x[0].transpose(0, 1) for x in xs], (None, torch.tensor([0, 2, 5]).int()), "thd"
    elif kind == "norms":
        weights, positions = [normal(16).float(), normal(16).float()], (None, None)
    of_norms = (1e-6, 1.0) if weights else (None, None)
    arguments = (cos, sin, *positions, weights, 16, False, False, layout, *of_norms)
    torch.library.opcheck(OPERATORS.rope.default, (xs, *arguments))
    torch.library.opcheck(OPERATORS.rope_out.default, (xs, [torch.empty_like(x) for x in xs], *arguments))
    if weights:
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(OPERATORS.rope_norm_backward.default, (xs, xs, *arguments), test_utils=tests)
    else:
        leaves = [x.clone().requires_grad_() for x in xs]
        torch.library.opcheck(OPERATORS.rope.default, (leaves, *arguments), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.unpoisoned
@with_and_without_norms
@either_dtype
def test_compile(dtype, norms):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options = {"norm_eps": 1e-5, "norm_offset": 1.0} if norms else {"interleaved": True}

    def run(ids, out, **tensors):
        q, k = apply_rope_qk(**tensors | {"q": 2 * tensors["q"]}, position_ids=ids, **options)
        apply_rope(k.detach(), tensors["cos"], tensors["sin"], out=out)
        return q + 1, apply_rope(k, tensors["cos"], tensors["sin"], inverse=True)

    compiled, frames = torch.compile(run, fullgraph=True, backend=counter), []
    for length in (5, 7, 12):
        tensors, ids = arguments_of_qk(norms, length, dtype=dtype), torch.arange(length - 1, -1, -1)
        buffers = torch.zeros(2, 1, 1, length, 16, dtype=dtype)
        outs, expected = compiled(ids, buffers[0], **tensors), run(ids, buffers[1], **tensors)
        for x, y in zip((*outs, *gradients(outs, tensors)), (*expected, *gradients(expected, tensors))):
            assert_close(x.detach(), y.detach().double(), 1e-6)
        assert_close(buffers[0], buffers[1].double(), 1e-6)
        frames.append(counter.frame_count)
    assert buffers[0].any() and frames[-1] == frames[-2]  # lengths are dynamic from the second on


@with_and_without_norms
def test_autocast_changes_nothing(norms):
    tensors = arguments_of_qk(norms)
    with torch.autocast("cpu", torch.bfloat16):
        outs = apply_rope_qk(**tensors)
    assert all(torch.equal(x, y) and x.dtype == F32 for x, y in zip(outs, apply_rope_qk(**tensors)))


@interpreted
def test_the_configurations_serve_every_architecture():
    def choose(arch, size, norms=False):
        return find_row(TABLE, arch=arch, most_bytes=size, norms=norms)

    for arch in (*ARCHS, "interpreter", "sm_75"):
        small, normed, large = TABLE[:1] * 3 if arch == "interpreter" else TABLE[1:]
        for size in (0, 1 << 10, 4 << 20):
            assert choose(arch, size) == choose(arch, size, True) == small
        for size in ((4 << 20) + 1, 1 << 34):
            assert choose(arch, size) == large and choose(arch, size, True) == normed
    config = RotationConfig(1 << 14, 1 << 12, 4)
    assert tile_shape(config, 256, 96, heads_inner=True) == (4, 16)
    assert tile_shape(config, 256, 96, heads_inner=False) == (16, 4)
    assert tile_shape(config, 256, 3, heads_inner=True) == (16, 4)
    assert tile_shape(config, 256, 1, heads_inner=False) == (64, 1)
    assert tile_shape(config, 1 << 16, 8, heads_inner=True) == (1, 1)
