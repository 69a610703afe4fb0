"""Graphs of torch.compile save for the backward pass what an eager call saves, and give its bits."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import rope_attention, rope_attention_varlen
from fused_rope_attn.testing import Case, make_inputs, masks_of, norms_of
from tests.support.attention import assert_equal, leaves
from tests.support.dtypes import F16, F32
from tests.support.marks import interpreted

pytestmark = [interpreted, pytest.mark.unpoisoned]

CASE = Case(1, 4, 2, 5, 9, 16, dtype=F32)
LENGTHS = ((5, 9), (7, 12), (33, 40))
compilers = pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(function, inputs, *more):
    """([o, the gradients], the tensors that autograd has saved) of ``function(q, k, v, cos, sin, *more)``."""
    given, saved = leaves(inputs), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = function(*given, inputs.cos, inputs.sin, *more)
    wanted = [x for x in (*given, *more) if x.requires_grad]
    return [o.detach(), *torch.autograd.grad(o, wanted, inputs.do.to(o.dtype))], saved


def attend(strategy="prepass", causal=True, **options):
    """Attention to products of q and k, as in a model, where nobody keeps them."""
    return lambda q, k, v, cos, sin: rope_attention(
        2 * q, 0.5 * k, v, cos, sin, causal, backend="triton", strategy=strategy, **options
    )  # fmt: skip


def has(tensor, tensors):
    return any(x.shape == tensor.shape and torch.equal(x, tensor) for x in tensors)


@compilers
@pytest.mark.parametrize("dynamic", [False, True])
def test_bits_and_saved_tensors_are_those_of_an_eager_call(compiler, dynamic):
    compiled = torch.compile(attend(), fullgraph=True, backend=compiler, dynamic=dynamic)
    for len_q, len_k in LENGTHS:
        inputs = make_inputs(replace(CASE, len_q=len_q, len_k=len_k))
        (eager, kept), (found, saved) = step(attend(), inputs), step(compiled, inputs)
        assert_equal(found, eager)
        # o, lse, v, both tables, and q and k, rotated.
        assert len(saved) == len(kept) == 7 and all(has(x, saved) for x in kept)
        assert not has(2 * inputs.q, saved) and not has(0.5 * inputs.k, saved)


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({"dtype": F16, "causal": False, "heads_kv": 4}, "prepass"),
        ({"layout": "bhnd", "interleaved": True, "rotary_dim": 8, "softmax_scale": -0.2}, "prepass"),
        ({"window": (3, 0), "softcap": 20.0}, "prepass"),
        ({"batch": 2, "kv_starts": (0, 2), "kv_lens": (9, 5)}, "prepass"),
        ({"batch": 0}, "prepass"),
        ({"len_q": 0}, "prepass"),
        ({"len_k": 0}, "prepass"),
        ({}, "inline"),
        ({}, "auto"),
    ],
    ids=str,
)
def test_every_kind_of_call(changes, strategy):
    case = replace(CASE, **changes)
    inputs = make_inputs(case)
    options = masks_of(case, inputs.q.device) | {
        "interleaved": case.interleaved, "rotary_dim": case.rotary, "softmax_scale": case.scale,
    }  # fmt: skip
    function = attend(strategy, case.causal, **options)
    (eager, kept), (found, saved) = (
        step(f, inputs) for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager"))
    )  # fmt: skip
    assert_equal(found, eager)
    # Keys that do not exist are not rotated, so that shapes are compared and not what lies there.
    assert len(saved) <= len(kept) and {x.shape for x in saved} == {x.shape for x in kept}


def test_norms_keep_q_and_k_as_they_came_too():
    case = replace(CASE, norms=1.0)
    inputs, norms = make_inputs(case), norms_of(case, "cpu")
    weights = [norms.pop(name).clone().requires_grad_() for name in ("q_norm", "k_norm")]

    def function(q, k, v, cos, sin, q_norm, k_norm):
        return rope_attention(2 * q, k, v, cos, sin, True, q_norm=q_norm, k_norm=k_norm, backend="triton",
                              strategy="prepass", **norms)  # fmt: skip

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    (eager, kept), (found, saved) = step(function, inputs, *weights), step(compiled, inputs, *weights)
    assert_equal(found, eager)
    assert all(has(x, saved) for x in kept) and has(2 * inputs.q, saved)


@compilers
def test_packed_sequences(compiler):
    def function(q, k, v, cos, sin, cu_seqlens):
        o = rope_attention_varlen(*(x[0].transpose(0, 1) for x in (2 * q, k, v)), cos, sin, cu_seqlens, cu_seqlens, 33,
                                  33, True, backend="triton", strategy="prepass")  # fmt: skip
        return o.transpose(0, 1)[None]

    compiled = torch.compile(function, fullgraph=True, backend=compiler, dynamic=True)
    for lengths in ((5, 0, 20, 13), (33, 1, 30, 6)):
        ends = torch.tensor((0, *lengths)).cumsum(0).int()
        inputs = make_inputs(replace(CASE, len_q=sum(lengths), len_k=sum(lengths)))
        (eager, kept), (found, saved) = step(function, inputs, ends), step(compiled, inputs, ends)
        assert_equal(found, eager)
        assert all(has(x, saved) for x in kept) and not has(2 * inputs.q, saved)


def test_autocast():
    inputs = make_inputs(CASE)
    with torch.autocast("cpu", F16):
        compiled = torch.compile(attend(), fullgraph=True, backend="aot_eager")
        (eager, kept), (found, saved) = step(attend(), inputs), step(compiled, inputs)
    assert found[0].dtype == F16
    assert_equal(found, eager)
    assert all(has(x, saved) for x in kept)


@compilers
def test_activation_checkpointing(compiler):
    """Nothing is saved but what the checkpointed function is given."""

    def function(q, k, v, cos, sin):
        return checkpoint(attend(), q, k, v, cos, sin, use_reentrant=False)

    inputs = make_inputs(CASE)
    eager, _ = step(attend(), inputs)
    found, saved = step(torch.compile(function, fullgraph=True, backend=compiler), inputs)
    assert_equal(found, eager)
    assert len(saved) <= 5 and all(has(x, inputs[:5]) for x in saved)


def test_a_gradient_of_some_inputs():
    for wanted in ("q", "k", "v"):
        inputs = make_inputs(CASE)
        found = []
        for function in (attend(), torch.compile(attend(), fullgraph=True, backend="aot_eager")):
            given = leaves(inputs, wanted)
            o = function(*given, inputs.cos, inputs.sin)
            found.append([o.detach(), *torch.autograd.grad(o, given["qkv".index(wanted)], inputs.do)])
        assert_equal(*found)


def test_nothing_is_saved_without_a_gradient():
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs(CASE)
    compiled = torch.compile(attend(), fullgraph=True, backend=counter, dynamic=True)
    assert torch.equal(compiled(*inputs[:5]), attend()(*inputs[:5]))
    assert compiled(*inputs[:5]).grad_fn is None


def test_an_export_is_not_bound_to_an_amount_of_work():
    """Its lengths stay free, also where parameters take a gradient."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, q, k, v, cos, sin):
            return rope_attention(self.scale * q, k, v, cos, sin, True, backend="triton")

    module, length = Attention(), torch.export.Dim("length", min=2, max=1 << 20)
    inputs = make_inputs(replace(CASE, len_q=9))
    dims = {name: {2: length} for name in "qkv"} | {name: {0: length} for name in ("cos", "sin")}
    program = torch.export.export(module, inputs[:5], dynamic_shapes=dims)
    other = make_inputs(replace(CASE, len_q=20, len_k=20))
    assert torch.equal(program.module()(*other[:5]), module(*other[:5]))
