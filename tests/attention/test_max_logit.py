"""``return_max_logit``: the results and their order, gradients, graphs, and the kernels that run."""

import pytest
import torch

import fused_rope_attn
from fused_rope_attn import plan, plan_varlen, rope_attention, rope_attention_varlen
from fused_rope_attn.attention.hopper.forward_kernel import max_logit_kernel
from tests.support.attention import leaves
from tests.support.internals import go_through_the_dispatcher
from tests.support.operators import MASKS, SMALL, assert_close, kernel_or_reference
from tests.support.planning import HOPPER, PORTABLE, call, kinds
from verification.testing import make_inputs

INPUTS = make_inputs(SMALL)
PACKED = tuple(x[:1].flatten(0, 0)[0].transpose(0, 1) for x in (INPUTS.q, INPUTS.k, INPUTS.v))
ENDS = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 7], [0, 4, 9])]


def run(q, k, v, **options):
    return rope_attention(q, k, v, INPUTS.cos, INPUTS.sin, True, return_max_logit=True, **(MASKS | options))


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_order_of_the_results(backend, layout):
    q, k, v = (x if layout == "bhsd" else x.transpose(1, 2) for x in INPUTS[:3])
    o, lse, max_logit = run(q, k, v, return_lse=True, layout=layout, backend=backend)
    assert o.shape == q.shape and lse.shape == (2, 2, 7) and max_logit.shape == (2, 2)
    assert max_logit.dtype == torch.float32
    pair = run(q, k, v, layout=layout, backend=backend)
    assert_close(pair, (o, max_logit), 0.0)
    assert_close(run(q, k, v, layout=layout, backend="reference"), pair)
    given = *PACKED, INPUTS.cos, INPUTS.sin, *ENDS, 4, 5, True
    o, lse, max_logit = rope_attention_varlen(*given, return_max_logit=True, return_lse=True, backend=backend)
    assert o.shape == PACKED[0].shape and lse.shape == (2, 7) and max_logit.shape == (2, 2)
    pair = rope_attention_varlen(*given, return_max_logit=True, backend=backend)
    assert_close(pair, (o, max_logit), 0.0)


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("through_the_dispatcher", [False, True])
def test_it_has_no_gradient_and_changes_none(monkeypatch, backend, through_the_dispatcher):
    if through_the_dispatcher:
        go_through_the_dispatcher(monkeypatch)
    found = []
    for options in ({}, {"return_lse": True}, {"return_max_logit": False}):
        q, k, v = leaves(INPUTS)
        result = (
            run(q, k, v, backend=backend, **options)
            if "return_max_logit" not in options
            else rope_attention(q, k, v, INPUTS.cos, INPUTS.sin, True, backend=backend, **MASKS)
        )
        o, max_logit = (result[0], result[-1]) if isinstance(result, tuple) else (result, None)
        assert max_logit is None or not max_logit.requires_grad
        found.append([o.detach(), *torch.autograd.grad(o, (q, k, v), INPUTS.do)])
    assert_close(found[0], found[2], 0.0)
    assert_close(found[1], found[2], 0.0)
    # A loss of lse alone.
    q, k, v = leaves(INPUTS)
    _, lse, _ = run(q, k, v, backend=backend, return_lse=True)
    assert torch.autograd.grad(lse[0].sum(), q)[0].any()


@pytest.mark.unpoisoned
@kernel_or_reference("reference", "triton")
def test_it_is_compiled_into_one_graph(backend):
    torch._dynamo.reset()

    def both(q, k, v):
        return run(2 * q, k, v, backend=backend, return_lse=True)

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        q, k, v = leaves(INPUTS)
        o, lse, max_logit = function(q, k, v)
        assert not max_logit.requires_grad
        gradients = torch.autograd.grad((o, lse), (q, k, v), (INPUTS.do, torch.ones_like(lse)))
        results.append([o.detach(), lse.detach(), max_logit, *gradients])
    assert_close(*results)


@kernel_or_reference("triton")
def test_a_known_call_and_torch_func(backend):
    first, again = (run(*INPUTS[:3], backend=backend) for _ in range(2))
    assert_close(first, again, 0.0)
    one, other = torch.func.vmap(lambda q: run(q, *INPUTS[1:3], backend=backend))(torch.stack((INPUTS.q, -INPUTS.q)))
    assert torch.equal(one[0], first[0]) and torch.equal(other[0], first[1])
    assert torch.equal(other[1], run(-INPUTS.q, *INPUTS[1:3], backend=backend)[1])


@pytest.mark.parametrize("ends", [None, [0, 3, 3, 10, 37], [0, 3, 10], [0, -5, 12, 90]])
def test_the_maximum_over_rows(ends):
    """The second launch of the sm_90 forward, over batches and packed rows: empty sequences and wrong ends too."""
    highest = torch.randn(2, 3, 37) if ends is None else torch.randn(3, 37)
    cu_q, entries = (None, 2) if ends is None else (torch.tensor(ends, dtype=torch.int32), len(ends) - 1)
    found = torch.full((entries, 3), float("nan"))
    max_logit_kernel[(entries * 3,)](highest, found, cu_q, H=3, NQ=37, BLOCK=8)
    if ends is None:
        assert torch.equal(found, highest.amax(-1))
    else:
        rows = torch.nn.functional.pad(highest, (0, 1), value=float("-inf"))
        for i, (a, b) in enumerate(zip(ends, ends[1:])):
            assert torch.equal(found[i], rows[:, [*range(max(a, 0), min(b, 37)), 37]].amax(-1))


@kernel_or_reference("reference", "triton")
def test_rows_after_the_last_sequence(backend):
    """They have no maximum of their own, also if there is no sequence at all."""
    for sequences in (2, 1, 0):
        ends = [x[: sequences + 1] for x in ENDS]
        given = *PACKED, INPUTS.cos, INPUTS.sin, *ends, 4, 5
        o, max_logit = rope_attention_varlen(*given, return_max_logit=True, backend=backend)
        assert max_logit.shape == (sequences, 2) and bool(max_logit.isfinite().all())
        assert not bool(o[int(ends[0][-1]) :].any())


def test_who_refuses_it():
    with pytest.raises(TypeError, match="return_max_logit must be a bool"):
        rope_attention(*INPUTS[:5], return_max_logit=1)
    for name in ("rope_attention_mla", "rope_attention_mla_varlen"):
        with pytest.raises(TypeError, match=r"\(\) does not take 'return_max_logit'"):
            getattr(fused_rope_attn, name)(return_max_logit=True)


def test_the_kernels_that_serve_it(arch):
    """Those of other calls, except that none are inline by themselves: a launch has to fill it anyway."""
    assert plan(**call(return_max_logit=True)) == plan(**call())
    assert kinds(plan(**call(return_max_logit=True))) == HOPPER
    assert kinds(plan(**call(return_max_logit=True, backend="triton"))) == PORTABLE
    tiny = call(64, batch=1)
    assert plan(**tiny).strategy == "inline"
    assert plan(**tiny, return_max_logit=True).strategy == "prepass"
    assert plan(**tiny, return_max_logit=True, strategy="inline").strategy == "inline"
    given = *(x.transpose(1, 2)[0] for x in (tiny["q"], tiny["k"], tiny["v"])), tiny["cos"], tiny["sin"]
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    assert plan_varlen(*given, ends, ends, 64, 64, True, return_max_logit=True).strategy == "prepass"
