"""The rotation's kernel in Triton's interpreter: outputs, memory and numbers that random calls do not have."""

import math
import os
import subprocess
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
@pytest.mark.parametrize("norms", [False, True])
def test_out_of_any_strides(norms, memory, dtype):
    """In place, too, the columns that pass through are normed."""
    q, k = normal(2, 3, 9, 24).to(dtype), normal(2, 1, 9, 24, seed=1).to(dtype)
    weights = dict(zip(("q_norm", "k_norm"), normal(2, 24, seed=2).to(dtype))) if norms else {}
    tables, options = rope_tables(9, 16), {"rotary_dim": 16, **weights}
    expected = apply_rope_qk(q, k, *tables, **options)
    outs = tuple(lay(torch.full_like(x, 5.0), memory) for x in (q, k))
    assert all(a is b for a, b in zip(apply_rope_qk(q, k, *tables, out=outs, **options), outs))
    both = tuple(lay(x, memory) for x in (q, k))
    apply_rope_qk(*both, *tables, out=both, **options)
    for x, y, z in zip(outs, expected, both):
        assert_close(x, y.double(), 1e-6)
        assert_close(z, y.double(), 1e-6)


@either_dtype
def test_positions_without_a_row_give_nan(dtype):
    """Also if the tables are empty, and within packed sequences, which may all be empty."""
    x, (cos, sin) = normal(1, 2, 5, 8).to(dtype), rope_tables(4, 8)
    out = apply_rope(x, cos, sin, position_ids=torch.tensor([0, 3, 4, -1, 2**40]))
    assert out[:, :, :2].isfinite().all() and out[:, :, 2:].isnan().all()
    assert apply_rope(x, cos[:0], sin[:0], position_ids=torch.zeros(5, dtype=torch.int32)).isnan().all()
    packed, ends = x[0].transpose(0, 1), torch.tensor([0, 3, 5], dtype=torch.int32)
    out = apply_rope(packed, cos[:2], sin[:2], layout="thd", cu_seqlens=ends)
    assert out[[0, 1, 3, 4]].isfinite().all() and out[2].isnan().all()
    assert torch.equal(apply_rope(packed, cos, sin, layout="thd", cu_seqlens=ends[:1]), packed)


@either_dtype
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16), (2, 0, 5, 16)])
@pytest.mark.parametrize("norms", [False, True])
def test_empty(norms, shape, dtype):
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    other = normal(2, 2, 5, 16).to(dtype).requires_grad_() if shape[1] == 0 else x
    weights = [normal(16, seed=i).to(dtype).requires_grad_() for i in range(2)] if norms else []
    outs = apply_rope_qk(x, other, *rope_tables(5, 16), **dict(zip(("q_norm", "k_norm"), weights)))
    dx, *of_weights = torch.autograd.grad(sum(out.sum() for out in outs), (x, *weights))
    assert outs[0].shape == dx.shape == shape and outs[1].shape == other.shape
    assert [bool(dw.any()) for dw in of_weights] == [False, other is not x][: len(weights)]


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
    ((2, 5, 9, 12), "bhsd", 6, {"interleaved": True, "position_ids": torch.randint(0, 40, (2, 9))}),
    ((2, 5, 9, 12), "bhsd", 3, {"rotary_dim": 12, "position_ids": torch.randint(0, 40, (2, 2, 9))}),
    ((19, 3, 10), "thd", 5, {"cu_seqlens": torch.tensor([0, 4, 11, 19], dtype=torch.int32)}),
    ((1, 3, 9, 24), "bhsd", 12, norms),
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


def test_bfloat16_takes_the_reference_here():
    x, (cos, sin) = normal(1, 2, 5, 16).bfloat16(), rope_tables(5, 16)
    out = apply_rope(x, cos, sin)
    assert out.dtype == torch.bfloat16 and torch.equal(out, apply_rope(x.double(), cos, sin).bfloat16())


def test_without_the_interpreter_a_cpu_takes_the_reference():
    program = """
import torch, fused_rope_attn as f
x = torch.randn(2, 3, 9, 16, requires_grad=True)
out = f.apply_rope(x, *f.rope_tables(9, 16))
out.sum().backward()
assert "Rope" not in type(out.grad_fn).__name__, type(out.grad_fn)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
