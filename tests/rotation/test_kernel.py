"""The rotation's kernel in Triton's interpreter: outputs, memory and numbers that random calls do not have."""

import math
import sys

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from tests.support.dtypes import F32, F64
from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import assert_close, normal
from verification.memory import lay

pytestmark = ignore_overflow
either_dtype = pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])


@either_dtype
@pytest.mark.parametrize("memory", ["bnhd", "columns", "odd"])
def test_out_of_other_strides(memory, dtype):
    """Random calls have ``out`` of the strides of the input. Here the members of a pair have two angles."""
    xs = [normal(2, heads, 9, 24, seed=heads).to(dtype) for heads in (3, 1, 2)]
    options = dict(zip(("v", "q_norm", "k_norm"), (xs[2], *normal(2, 24, seed=2).to(dtype)))) | {"rotary_dim": 16}
    outs, tables = tuple(lay(torch.full_like(x, 5.0), memory) for x in xs), normal(2, 9, 16, seed=5).float()
    assert all(a is b for a, b in zip(apply_rope_qk(*xs[:2], *tables, out=outs, **options), outs))
    exact = (x.double() for x in (*xs[:2], *tables))
    expected = apply_rope_qk(*exact, **{name: x if name == "rotary_dim" else x.double() for name, x in options.items()})
    for x, y in zip(outs, expected):
        assert_close(x, y, 1e-6)


@either_dtype
def test_packed_positions_without_a_row_give_nan(dtype):
    """Also if tables are empty. Packed sequences may all be empty."""
    x, (cos, sin) = normal(5, 2, 8).to(dtype), rope_tables(4, 8)
    assert apply_rope(x[None], cos[:0], sin[:0], position_ids=torch.zeros(2, dtype=torch.int32)).isnan().all()
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    out = apply_rope(x, cos[:2], sin[:2], layout="thd", cu_seqlens=ends)
    assert out[[0, 1, 3, 4]].isfinite().all() and out[2].isnan().all()
    assert torch.equal(apply_rope(x, cos, sin, layout="thd", cu_seqlens=ends[:1]), x)


@either_dtype
@pytest.mark.parametrize("norms", [False, True])
def test_no_heads(norms, dtype):
    x, other = (normal(2, heads, 5, 16).to(dtype).requires_grad_() for heads in (0, 2))
    weights = [normal(16, seed=i).to(dtype).requires_grad_() for i in range(2)] if norms else []
    outs = apply_rope_qk(x, other, *rope_tables(5, 16), **dict(zip(("q_norm", "k_norm"), weights)))
    dx, *of_weights = torch.autograd.grad(sum(out.sum() for out in outs), (x, *weights))
    assert outs[0].shape == dx.shape == x.shape and [bool(dw.any()) for dw in of_weights] == [False, True][: 2 * norms]


@either_dtype
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rows_of_zeros_and_rows_that_are_not_finite(eps, value, dtype):
    """Zeros stay zeros with finite gradients; a row that is not finite stays in its row, but for the weight's sum."""
    x, weight = normal(1, 2, 9, 16).to(dtype), normal(16, seed=1).to(dtype).requires_grad_()
    cos, sin = rope_tables(9, 16)

    def run(x):
        x = x.clone().requires_grad_()
        out, _ = apply_rope_qk(x, x.detach(), cos, sin, q_norm=weight, k_norm=weight, norm_eps=eps)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, weight))

    expected, changed = run(x), x.clone()
    changed[0, 1, 3, slice(None) if value == 0.0 else 5] = value
    out, dx, dweight = run(changed)
    others = torch.ones(1, 2, 9, dtype=torch.bool)
    others[0, 1, 3] = False
    assert torch.equal(out[others], expected[0][others]) and torch.equal(dx[others], expected[1][others])
    if value == 0.0:
        assert not out[0, 1, 3].any() and dx.isfinite().all() and dweight.isfinite().all()
    else:
        assert out[0, 1, 3].isnan().any() and dx[0, 1, 3].isnan().any()


@interpreted
def test_tokens_that_do_not_exist_add_nothing_to_a_weights_gradient():
    """The rest of a tile has whatever angle position 0 has, here NaN."""
    x, weight = normal(1, 1, 3, 16).float().requires_grad_(), normal(16, seed=1).float().requires_grad_()
    cos, sin = rope_tables(9, 16)
    bad = cos.clone()
    bad[0] = math.nan
    found = []
    for table in (cos, bad):
        options = {"q_norm": weight, "k_norm": weight, "position_ids": torch.tensor([5, 6, 7])}
        out, _ = apply_rope_qk(x, x.detach(), table, sin, **options)
        found.append(torch.autograd.grad(out.sum(), weight)[0])
    assert found[1].isfinite().all() and torch.equal(*found)


@interpreted
@pytest.mark.parametrize("axis", ["batch", "head", "row", "column"])
def test_offsets_pass_two_to_the_31(axis):
    """Strides that fit 32 bits, products that do not; only the touched pages are real."""
    far, near, length = 2**30, 64, 2**31 + 2**29
    sizes, strides = {
        "batch": ((3, 2, 2, 16), (far, near, 16, 1)),
        "head": ((1, 3, 2, 16), (near, far, 16, 1)),
        "row": ((1, 2, 3, 16), (near, 16, far, 1)),
        "column": ((1, 1, 1, 16), (1, 1, 1, far // 7)),
    }[axis]
    x, (cos, sin) = normal(*sizes).float(), rope_tables(3, 16)
    expected = apply_rope(x, cos, sin)
    view, out = (torch.empty(length).as_strided(sizes, strides) for _ in range(2))
    assert torch.equal(apply_rope(view.copy_(x), cos, sin, out=out), expected)
    apart = (2**30, 1) if axis == "batch" else (0, 2**30)
    ids = torch.empty(length, dtype=torch.int32).as_strided((sizes[0], sizes[2]), apart)
    ids.copy_(torch.arange(sizes[2]).expand(sizes[0], -1))
    assert torch.equal(apply_rope(x, cos, sin, position_ids=ids), expected)


GUARD = """
import torch
from fused_rope_attn import apply_rope_qk
from tests.support.guard_pages import abut

norms = {"q_norm": torch.randn(24), "k_norm": torch.randn(24)}
for shape, layout, width, options in (
    ((1, 3, 37, 24), "bhsd", 5, {"rotary_dim": 10}),
    ((1, 37, 3, 24), "bshd", 24, {"interleaved": True}),
    ((2, 5, 9, 12), "bhsd", 3, {"rotary_dim": 12, "position_ids": torch.randint(0, 40, (2, 2, 9))}),
    ((19, 3, 10), "thd", 5, {"cu_seqlens": torch.tensor([0, 4, 11, 19], dtype=torch.int32)}),
    ((1, 3, 9, 24), "bhsd", 5, {"interleaved": True, **norms}),
):
    tables = {name: torch.randn(40, width) for name in ("cos", "sin")}
    given = {"q": torch.randn(shape), "k": torch.randn(shape), **tables, **options}
    found = []
    for place in (lambda t: t.clone(), lambda t: abut(t, True), lambda t: abut(t, False)):
        tensors = {name: place(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        leaves = [tensors[name].requires_grad_() for name in ("q", "k", *norms) if name in tensors]
        outs = apply_rope_qk(**tensors, layout=layout)
        found.append((*outs, *torch.autograd.grad(outs, leaves, [place(torch.ones(shape)) for _ in outs])))
    assert all(torch.equal(x, y) for more in found[1:] for x, y in zip(found[0], more)), (shape, layout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    hold_within_bounds(GUARD)


@interpreted
def test_the_reference_takes_bfloat16_here_and_everything_without_the_interpreter(monkeypatch):
    x, tables = normal(1, 2, 5, 16), rope_tables(5, 16)
    assert "_Rotation" in type(apply_rope(x.float().requires_grad_(), *tables).grad_fn).__name__
    assert torch.equal(apply_rope(x.bfloat16(), *tables), apply_rope(x.bfloat16().double(), *tables).bfloat16())
    monkeypatch.setattr("fused_rope_attn.rotation.api.is_interpreted", lambda: False)
    assert "_Rotation" not in type(apply_rope(x.float().requires_grad_(), *tables).grad_fn).__name__
