"""Norm and rotation as PyTorch sees them: which gradients, the dispatcher, compilation, fake tensors, checkpoints."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import apply_rope_qk, rope_tables
from tests.support.dtypes import F32, F64
from tests.support.internals import rotate_without_the_kernel
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import Record
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow

NAMES = ("q", "k", "q_norm", "k_norm")


def given(dtype=F32, wanted=NAMES, length=5):
    """Return q, k and their norms by name, with gradients for ``wanted``, and tables."""
    shapes = {"q": (1, 2, length, 16), "k": (1, 1, length, 16), "q_norm": (16,), "k_norm": (16,)}
    tensors = {name: normal(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    cos, sin = rope_tables(length, 16)
    return {name: x.requires_grad_(name in wanted) for name, x in tensors.items()} | {"cos": cos, "sin": sin}


def gradients(outs, tensors):
    leaves = [tensors[name] for name in NAMES if tensors[name].requires_grad]
    return torch.autograd.grad(sum((out * out).sum() for out in outs), leaves, allow_unused=True)


@interpreted
@pytest.mark.parametrize(
    "wanted", [("q",), ("k",), ("q_norm",), ("k_norm",), ("q", "k"), ("k", "q_norm"), ("q_norm", "k_norm"), NAMES]
)
def test_some_have_gradients(wanted):
    tensors = given(wanted=wanted)
    found = gradients(apply_rope_qk(**tensors), tensors)
    whole = given()
    expected = dict(zip(NAMES, gradients(apply_rope_qk(**whole), whole)))
    for name, x in zip((name for name in NAMES if name in wanted), found, strict=True):
        assert_close(x, expected[name].double(), 1e-6)  # other tiles, another order of the weight's sum


@interpreted
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_uses(used):
    tensors = given()
    found = gradients(apply_rope_qk(**tensors)[used : used + 1], tensors)
    whole = given()
    expected = gradients(apply_rope_qk(**whole), whole)
    for i, (x, y) in enumerate(zip(found, expected)):
        if i % 2 == used:
            assert_close(x, y.double(), 1e-6)
        else:
            assert x is None


@interpreted
def test_what_is_saved():
    """The input, the weights and the tables are saved; nothing of the norm or of the rotation."""
    tensors, saved = given(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope_qk(**tensors)
    assert {t.data_ptr() for t in saved} == {x.data_ptr() for x in tensors.values()}


@interpreted
def test_weights_gradients_are_the_same_every_time():
    tensors = given(length=40)
    first = gradients(apply_rope_qk(**tensors), tensors)
    assert all(torch.equal(x, y) for x, y in zip(first, gradients(apply_rope_qk(**tensors), tensors)))


@pytest.mark.parametrize(
    "way", [pytest.param("eager", marks=interpreted), pytest.param("dispatcher", marks=interpreted), "reference"]
)
def test_double_backward_is_refused(way, monkeypatch):
    tensors = given()
    if way == "reference":
        rotate_without_the_kernel(monkeypatch)
    if way != "dispatcher":
        outs = apply_rope_qk(**tensors)
    else:
        with Record() as record:
            outs = apply_rope_qk(**tensors)
        assert record.operators == ["fused_rope_attn.rope.default"]
    (dq,) = torch.autograd.grad(outs[0].square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="^apply_rope_qk with norms: double backward"):
        dq.sum().backward()


@interpreted
@pytest.mark.unpoisoned
def test_opcheck():
    operators, tensors = torch.ops.fused_rope_attn, given(wanted=())
    xs, weights = [tensors["q"], tensors["k"]], [tensors["q_norm"], tensors["k_norm"]]
    arguments = (tensors["cos"], tensors["sin"], None, None, weights, 16, False, False, "bhsd", 1e-6, 1.0)
    torch.library.opcheck(operators.rope.default, (xs, *arguments))
    torch.library.opcheck(
        operators.rope_norm_backward.default,
        (xs, xs, *arguments),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(operators.rope_out.default, (xs, [torch.empty_like(x) for x in xs], *arguments))


@interpreted
@pytest.mark.unpoisoned
def test_compile():
    """One graph for all lengths, forward and backward, equal to eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, cos, sin, q_norm, k_norm):
        q, k = apply_rope_qk(2 * q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, norm_offset=1.0)
        return q + 1, k

    frames = []
    for length in (5, 7, 12):
        tensors = given(length=length)
        outs = compiled(**tensors)
        q, k = apply_rope_qk(**tensors | {"q": 2 * tensors["q"]}, norm_eps=1e-5, norm_offset=1.0)
        for x, y in zip((*outs, *gradients(outs, tensors)), (q + 1, k, *gradients((q + 1, k), tensors))):
            assert_close(x.detach(), y.detach().double(), 1e-6)
        frames.append(counter.frame_count)
    assert frames[-1] == frames[-2]  # lengths are dynamic from the second on


@interpreted
@pytest.mark.unpoisoned
def test_fake_tensors_match_the_real_ones():
    tensors = given()
    tensors["q"] = normal(1, 5, 2, 16).float().transpose(1, 2).requires_grad_()
    real = apply_rope_qk(**tensors)
    real += gradients(real, tensors)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in tensors.items()}
        fake = apply_rope_qk(**fakes)
        fake += gradients(fake, fakes)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, dtype):
    tensors = given(dtype)
    outs = checkpoint(
        lambda *some: apply_rope_qk(*some[:4], q_norm=some[4], k_norm=some[5]),
        *(tensors[name] for name in ("q", "k", "cos", "sin", "q_norm", "k_norm")),
        use_reentrant=use_reentrant,
    )
    expected = gradients(apply_rope_qk(**tensors), tensors)
    # Reentrant checkpoints are for backward() alone.
    sum((out * out).sum() for out in outs).backward()
    for name, y in zip(NAMES, expected):
        assert torch.equal(tensors[name].grad, y)


def test_meta_tensors_and_autocast():
    tensors = given()
    shapes = apply_rope_qk(**{name: x.to("meta") for name, x in tensors.items()})
    assert [tuple(x.shape) for x in shapes] == [(1, 2, 5, 16), (1, 1, 5, 16)]
    with torch.autocast("cpu", torch.bfloat16):
        outs = apply_rope_qk(**tensors)
    assert all(torch.equal(x, y) and x.dtype == F32 for x, y in zip(outs, apply_rope_qk(**tensors)))
