"""layout="bshd": the numbers of the default layout, on views of the caller's tensors, and messages in its terms."""

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.marks import interpreted
from tests.support.operators import MASKS, SMALL, Record, kernel_or_reference
from verification.testing import Case, Results, make_inputs

CASE = Case(2, 4, 2, 9, 12, 16, dtype=torch.float32)  # another number of heads than of tokens, on both sides


def tokens_first(x):
    """The caller's (B, N, H, D) of a test's (B, H, N, D), contiguous, requiring a gradient."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_()


def call(inputs, *tensors, **options):
    return rope_attention(*tensors, inputs.cos, inputs.sin, True, layout="bshd", **options)


@kernel_or_reference("reference", "triton")
def test_results_and_gradients_are_those_of_float64(backend):
    inputs = make_inputs(CASE)
    q, k, v = (tokens_first(x) for x in inputs[:3])
    o, lse = call(inputs, q, k, v, backend=backend, return_lse=True)
    assert o.shape == (2, 9, 4, 16) and lse.shape == (2, 4, 9)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.do.transpose(1, 2))
    inner = (x.detach().transpose(1, 2) for x in (o, dq, dk, dv))
    o, dq, dk, dv = inner
    assert_matches_float64(CASE, inputs, Results(o, lse, dq, dk, dv))


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("packed", [False, True], ids=["contiguous", "one projection"])
def test_results_are_contiguous_as_the_caller_counts(backend, packed):
    """Also of q, k and v that are slices of one tensor, as a projection gives them."""
    inputs = make_inputs(Case(2, 4, 4, 9, 9, 16, dtype=torch.float32))
    whole = [tokens_first(x) for x in inputs[:3]]
    given = torch.stack([x.detach() for x in whole], 2).unbind(2) if packed else whole
    q, k, v = (x.requires_grad_() for x in given)
    o = call(inputs, q, k, v, backend=backend)
    assert o.is_contiguous()
    gradients = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    if backend == "triton":
        assert all(x.is_contiguous() for x in gradients)
    else:
        assert all(x.stride(3) == 1 for x in gradients)


@interpreted
@pytest.mark.unpoisoned
def test_nothing_is_copied():
    """Only views and the two operators reach the dispatcher, in either direction."""
    inputs = make_inputs(CASE)
    q, k, v = (tokens_first(x) for x in inputs[:3])
    with Record() as record:
        o = call(inputs, q, k, v, backend="triton")
        o.backward(torch.ones_like(o))
    work = {name for name in record.operators if "transpose" not in name and "detach" not in name}
    assert work == {
        "fused_rope_attn.attention_forward.default",
        "fused_rope_attn.attention_backward.default",
        "aten.ones_like.default",
    }


def test_masks_and_sinks_mean_the_same():
    inputs = make_inputs(SMALL)
    expected, expected_lse = rope_attention(*inputs[:5], True, return_lse=True, **MASKS)
    o, lse = call(inputs, *(tokens_first(x) for x in inputs[:3]), return_lse=True, **MASKS)
    assert_equal((o.transpose(1, 2), lse), (expected, expected_lse))


@interpreted
def test_plans_are_those_of_the_views(arch):
    """Heads are not taken for positions: 2048 heads of 4 tokens would be another plan."""
    arch("sm_90")
    q, k, v = (torch.empty(2, 2048, heads, 128, dtype=torch.float16) for heads in (4, 2, 2))
    tables = torch.empty(2048, 64), torch.empty(2048, 64)
    for backend in ("triton", "hopper"):
        chosen = plan(q, k, v, *tables, True, layout="bshd", backend=backend)
        assert chosen == plan(*(x.transpose(1, 2) for x in (q, k, v)), *tables, True, backend=backend)
        assert chosen.backend == backend
        assert chosen != plan(q, k, v, *tables, True, backend=backend)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_compiles_to_one_graph(backend):
    torch._dynamo.reset()
    inputs = make_inputs(CASE)

    def run(q, k, v):
        return call(inputs, q, k, v, backend=backend)

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v = (tokens_first(x) for x in inputs[:3])
        o = function(q, k, v)
        assert o.is_contiguous()
        results.append([o.detach(), *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": "sbhd"}, ValueError, "layout must be 'bhsd' or 'bshd', but is 'sbhd'"),
        ({"layout": None}, TypeError, "layout must be a str, 'bhsd' or 'bshd', but is NoneType"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, but is NoneType"),
        ({"q": (2, 9, 64)}, ValueError, "q must have shape (B, NQ, HQ, D), but has 3 dimensions: (2, 9, 64)"),
        ({"k": (2, 12, 2)}, ValueError, "k must have shape (B, NK, HKV, D), but has 3 dimensions: (2, 12, 2)"),
        ({"k": (2, 12, 2, 16, 1)}, ValueError, "(B, NK, HKV, D), but has 5 dimensions: (2, 12, 2, 16, 1)"),
        (
            {"v": (2, 11, 2, 16)},
            ValueError,
            "v must have shape (B, NK, HKV, D) with NK = 12 of k, but has (2, 11, 2, 16)",
        ),
        ({"k": (2, 12, 3, 16), "v": (2, 12, 3, 16)}, ValueError, "k has 3 heads, but q's 4 heads must be a multiple"),
        ({"q": (2, 9, 4, 15), "k": (2, 12, 2, 15), "v": (2, 12, 2, 15)}, ValueError, "but has 4 heads of 15 columns"),
        ({"cos": (11, 8), "sin": (11, 8)}, ValueError, "a row for each of k's 12 positions, but has 11"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_messages_show_what_the_caller_has(changes, error, message):
    shapes = {"q": (2, 9, 4, 16), "k": (2, 12, 2, 16), "v": (2, 12, 2, 16), "cos": (12, 8), "sin": (12, 8)}
    given = {"causal": True, "layout": "bshd"} | shapes | changes
    with pytest.raises(error) as caught:
        rope_attention(**{name: torch.zeros(x) if isinstance(x, tuple) else x for name, x in given.items()})
    assert message in str(caught.value)
