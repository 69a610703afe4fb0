"""On a GPU: compiled passes of the sm_90 kernels save rotated q and k, as eager ones do, and give their bits."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.attention import saving
from fused_rope_attn.attention.problem import Saving
from fused_rope_attn.testing import make_inputs, masks_of, norms_of
from tests.support.attention import assert_equal, leaves
from tests.support.dtypes import BF16, F16
from tests.support.gpu import ODD_LENGTHS, assert_same_but_dq
from tests.support.hopper import ON_SM_90, PADDED, UNEVEN, needs_sm_90, packed
from tests.support.internals import forget_plans
from tests.support.marks import cases

pytestmark = [*needs_sm_90, pytest.mark.unpoisoned]

CASES = (
    ODD_LENGTHS,
    replace(ODD_LENGTHS, causal=False, dtype=F16, interleaved=True, rotary_dim=64),
    replace(ODD_LENGTHS, head_dim=64, softmax_scale=-0.2, layout="bhnd"),
    replace(ODD_LENGTHS, head_dim=256),
    replace(ODD_LENGTHS, len_q=700, window=(90, 0)),
    replace(PADDED, kv_starts=(40, 690), kv_lens=(650, 700), softcap=4.0),
    replace(ODD_LENGTHS, norms=1.0),
    packed(UNEVEN),
    packed(UNEVEN, head_dim=256),
)


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attend(case, **options):
    """``function(q, k, v, cos, sin)`` of a case: attention to products of q and k, as in a model."""
    options = ON_SM_90 | norms_of(case, "cuda") | {
        "interleaved": case.interleaved, "rotary_dim": case.rotary, "softmax_scale": case.scale,
        "window": case.window, "softcap": case.softcap,
    } | options  # fmt: skip
    if case.seqlens is None:
        options |= masks_of(case, "cuda")
        return lambda q, k, v, cos, sin: rope_attention(2 * q, 0.5 * k, v, cos, sin, case.causal, **options)
    ends = torch.tensor(((0, 0), *case.seqlens)).cumsum(0).int().cuda()
    ends = [x.contiguous() for x in ends.unbind(1)]
    longest = [max(pair[i] for pair in case.seqlens) for i in range(2)]

    def function(q, k, v, cos, sin):
        tokens_first = (x[0].transpose(0, 1) for x in (2 * q, 0.5 * k, v))
        o = rope_attention_varlen(*tokens_first, cos, sin, *ends, *longest, case.causal, **options)
        return o.transpose(0, 1)[None]

    return function


def step(function, inputs, dynamic=False):
    """(o, a stand-in for lse, dq, dk, dv) of a step, and what autograd has saved. dynamic: lengths are free."""
    given, saved = leaves(inputs), []
    if dynamic:
        for x in given:
            torch._dynamo.maybe_mark_dynamic(x, 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = function(*given, inputs.cos, inputs.sin)
    return (o.detach(), o.detach(), *torch.autograd.grad(o, given, inputs.do)), saved


@pytest.mark.parametrize("dynamic", [False, True])
@cases(*CASES)
def test_bits_are_those_of_an_eager_call(case, dynamic):
    """But for dq, whose parts are added in any order."""
    inputs, function = make_inputs(case, "cuda"), attend(case)
    compiled = torch.compile(function, fullgraph=True)
    (eager, kept), (found, saved) = step(function, inputs), step(compiled, inputs, dynamic)
    assert_same_but_dq(found, eager)
    # Keys that no sequence has are not rotated, so that sizes are compared and not what lies there.
    assert sorted(x.shape for x in saved if x.ndim == 4) == sorted(x.shape for x in kept if x.ndim == 4)


@cases(CASES[0], CASES[3])
def test_deterministic_gradients_have_equal_bits(case):
    inputs, function = make_inputs(case, "cuda"), attend(case, deterministic=True)
    (eager, _), (found, _) = step(function, inputs), step(torch.compile(function, fullgraph=True), inputs)
    assert_equal(found, eager)


@pytest.mark.parametrize("offset", [0, 1])
def test_packed_values_at_an_address_that_the_tma_cannot_read(offset):
    """A graph that was traced for another address runs with a copy."""
    case = packed((2000, 3000))
    inputs, options = make_inputs(case, "cuda"), {"backend": "auto"}
    room = torch.empty(inputs.v.numel() + offset, dtype=inputs.v.dtype, device="cuda")
    # Graphs of "aot_eager" take inputs at any address as they are.
    compiled = torch.compile(attend(case, **options), fullgraph=True, backend="aot_eager")
    expected, _ = step(compiled, inputs)
    dense = inputs.v.transpose(1, 2)
    moved = room[offset:].view(dense.shape).copy_(dense).transpose(1, 2)
    given = [x.detach().requires_grad_() for x in (*inputs[:2], moved)]
    o = compiled(*given, inputs.cos, inputs.sin)
    found = o.detach(), o.detach(), *torch.autograd.grad(o, given, inputs.do)
    assert_same_but_dq(found, expected)


def test_a_training_step_needs_no_more_memory(monkeypatch):
    """Than with q and k saved as they came, whose rotated copies the backward pass then makes beside them."""
    batch, heads_q, heads_kv, length, head_dim = 2, 16, 4, 2048, 128
    cos, sin = rope_tables(length, head_dim, device="cuda")
    x = torch.randn(batch, length, 1024, device="cuda", dtype=BF16)
    sizes = [heads * head_dim for heads in (heads_q, heads_kv, heads_kv)]
    weights = [(torch.randn(1024, n, device="cuda", dtype=BF16) / 32).requires_grad_() for n in sizes]

    def block(x, *weights):
        q, k, v = ((x @ w).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in weights)
        return rope_attention(q, k, v, cos, sin, True, **ON_SM_90).transpose(1, 2).flatten(2)

    def peak():
        forget_plans()
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True)
        for _ in range(3):
            for weight in weights:
                weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            o = compiled(x, *weights)
            held = torch.cuda.memory_allocated() - before
            o.sum().backward()
            del o
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - before
        return held, most

    rotated = peak()
    monkeypatch.setattr(saving, "traced", lambda *_: Saving.NOTHING)
    unrotated = peak()
    slack = 64 << 10
    assert all(x <= y + slack for x, y in zip(rotated, unrotated)), (rotated, unrotated)
