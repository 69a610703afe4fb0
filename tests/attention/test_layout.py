"""layout="bshd": views of the caller's tensors, and results that are contiguous as the caller counts."""

import pytest
import torch

from fused_rope_attn import plan
from tests.support.marks import interpreted
from tests.support.operators import Record, differentiated, kernel_or_reference, small_call


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("name", ["bshd", "latent"])
def test_results_are_contiguous_as_the_caller_counts(backend, name):
    run, tensors = small_call(name, layout="bshd", backend=backend)
    tensors = {x: (y.transpose(1, 2) if name == "latent" else y).contiguous() for x, y in tensors.items()}
    o, _, *gradients = differentiated(run, tensors)
    assert o.is_contiguous()
    assert all(x.is_contiguous() if backend == "triton" else x.stride(3) == 1 for x in gradients)


@interpreted
def test_gradients_of_one_projection_are_contiguous():
    """q, k and v are slices of one tensor, as a projection gives them."""
    run, _ = small_call("bshd", backend="triton")
    tensors = dict(zip("qkv", torch.randn(2, 9, 3, 4, 16).unbind(2)))
    assert all(x.is_contiguous() for i, x in enumerate(differentiated(run, tensors)) if i != 1)


@interpreted
@pytest.mark.unpoisoned
def test_nothing_is_copied():
    """Only views and the two operators reach the dispatcher, in either direction."""
    run, tensors = small_call("bshd", backend="triton", return_lse=False)
    leaves = [x.contiguous().requires_grad_() for x in tensors.values()]
    with Record() as record:
        o = run(*leaves)
        o.backward(torch.ones_like(o))
    work = {name for name in record.operators if "transpose" not in name and "detach" not in name}
    operators = {f"fused_rope_attn.attention_{name}.default" for name in ("forward", "backward")}
    assert work == operators | {"aten.ones_like.default"}


@interpreted
def test_plans_are_those_of_the_views(arch):
    """Heads are not taken for positions: 2048 heads of 4 tokens would be another plan."""
    q, k, v = (torch.empty(2, 2048, heads, 128, dtype=torch.float16) for heads in (4, 2, 2))
    tables = torch.empty(2048, 64), torch.empty(2048, 64)
    for backend in ("triton", "hopper"):
        chosen = plan(q, k, v, *tables, True, layout="bshd", backend=backend)
        assert chosen == plan(*(x.transpose(1, 2) for x in (q, k, v)), *tables, True, backend=backend)
        assert chosen.backend == backend and chosen != plan(q, k, v, *tables, True, backend=backend)
