"""`apply_rope_qk` with norms: every argument against float64, forward and backward, by the contract's tolerance."""

import math

import pytest
import torch

from fused_rope_attn import apply_rope_qk, rope_tables
from tests.support.dtypes import F16, F32, F64
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import assert_close, normal, strided
from verification.testing import compare

pytestmark = ignore_overflow

AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # from (B, H, N, D)


def written_out(x, weight, cos, sin, eps, offset, rotary_dim, interleaved, inverse):
    """x (..., N, D) normed by PyTorch's own function and turned as complex numbers by angles (..., N, R/2)."""
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], offset + weight, eps)
    turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = turning.unflatten(-1, (-1, 2)) if interleaved else turning.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, -sin if inverse else sin)
    turned = torch.view_as_real(turned)
    return torch.cat(((turned if interleaved else turned.mT).flatten(-2), passing), -1)


def results(function, xs, weights, dos, dtype, weight_dtype):
    """Outputs, gradients of xs, gradients of weights, of a function of both in these dtypes."""
    leaves = [x.to(dtype).requires_grad_() for x in xs]
    weights = [weight.to(weight_dtype).requires_grad_() for weight in weights]
    outs = function(leaves, weights)
    found = torch.autograd.grad(outs, leaves + weights, [do.to(dtype) for do in dos[: len(outs)]])
    return [out.detach() for out in outs], found[: len(xs)], found[len(xs) :]


def hold(ours, theirs, xs, weights, dos, dtype, weight_dtype):
    """Every row of outputs and gradients, and every weight's gradient, within the tolerance: float64 and eager PyTorch
    get the inputs as ``dtype`` has them."""
    xs, dos = [x.to(dtype) for x in xs], [do.to(dtype) for do in dos]
    weights = [weight.to(weight_dtype) for weight in weights]
    out = results(ours, xs, weights, dos, dtype, weight_dtype)
    ref64 = results(theirs, xs, weights, dos, F64, F64)
    eager = results(lambda *given: [y.to(dtype) for y in theirs(*given)], xs, weights, dos, F32, F32)
    for part, kind in zip(zip(out, ref64, eager), ("o", "dx", "dweight")):
        for mine, exact, near in zip(*part, strict=True):
            right = weight_dtype if kind == "dweight" else dtype
            assert mine.dtype == right and mine.shape == exact.shape
            mine, exact, near = ((t[None] if t.ndim == 1 else t) for t in (mine, exact, near.to(right)))
            found = compare(kind, mine, exact, near, grad=kind != "o", dtype=right)
            assert found.ok, found


@pytest.mark.parametrize(
    ("layout", "head_dim", "rotary_dim", "interleaved", "dtype"),
    [
        ("bhsd", 16, 16, False, F16),
        ("bhsd", 16, 16, True, F32),
        ("bshd", 24, 10, False, F32),
        ("bshd", 24, 10, True, F16),
        ("sbhd", 7, 6, False, F32),
        ("sbhd", 7, 6, True, F16),
        ("bshd", 12, 12, False, F32),
    ],
)
def test_against_float64(layout, head_dim, rotary_dim, interleaved, dtype):
    """Whole and partial rotation, odd head dims, GQA, a length that fills no tile, tables that are not unit-norm."""
    length, inverse = 11, layout == "sbhd"
    cos, sin = normal(2, length + 2, rotary_dim // 2, seed=3).float()
    # Halves, then the columns that pass through: Gemma's offset.
    eps, offset = 1e-2, 1.0 if interleaved else 0.0

    def ours(xs, weights):
        q_norm, k_norm = weights
        options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse, "layout": layout}
        q, k = (x.permute(AXES[layout]).contiguous() for x in xs)
        outs = apply_rope_qk(q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, norm_eps=eps, norm_offset=offset, **options)
        axes = AXES[layout]
        return [out.permute([axes.index(axis) for axis in range(4)]) for out in outs]

    def theirs(xs, weights):
        dtype = xs[0].dtype
        tables = [table[:length].to(dtype) for table in (cos, sin)]
        return [
            written_out(x, weight, *tables, eps, offset, rotary_dim, interleaved, inverse)
            for x, weight in zip(xs, weights)
        ]

    xs = [normal(2, heads, length, head_dim, seed=heads) for heads in (2, 1)]
    dos = [normal(*x.shape, seed=8 + i) for i, x in enumerate(xs)]
    weights = [normal(head_dim, seed=5 + i) for i in range(2)]
    hold(ours, theirs, xs, weights, dos, dtype, dtype if layout == "bhsd" else F32)


@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
@pytest.mark.parametrize("positions", ["ids", "two ids", "packed", "tables of every batch"])
def test_positions(positions, dtype):
    """The norm does not depend on them: what it gives is what normed tensors give without it. v is not normed."""
    q, k, v = (normal(2, 9, heads, 24, seed=heads).to(dtype) for heads in (2, 1, 1))
    cos, sin = normal(2, 12, 8, seed=9).to(dtype)
    options = {"layout": "bshd", "rotary_dim": 16}
    if positions == "ids":
        options["position_ids"] = torch.tensor([[3, 1, 11, 0, 5, 5, 2, 10, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    elif positions == "two ids":
        options["position_ids"] = torch.randint(0, 12, (2, 2, 9), generator=torch.Generator().manual_seed(0))
        options |= {"rotary_dim": 20, "interleaved": True}
        cos, sin = cos[:, :5], sin[:, :5]
    elif positions == "tables of every batch":
        cos, sin = normal(2, 2, 12, 8, seed=9).to(dtype)
    else:  # tokens after the last sequence are normed, and not rotated
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        options |= {"layout": "thd", "cu_seqlens": torch.tensor([0, 4, 4, 15], dtype=torch.int32)}
    q_norm, k_norm = normal(2, 24, seed=4).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, q_norm, k_norm)]

    def grads(outs):
        return torch.autograd.grad(sum((out * torch.linspace(-1, 2, 24)).sum() for out in outs), leaves)

    outs = apply_rope_qk(q, k, cos, sin, v=v, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-3, **options)
    normed = [torch.nn.functional.rms_norm(x, (24,), weight, 1e-3) for x, weight in ((q, q_norm), (k, k_norm))]
    expected = apply_rope_qk(*normed, cos, sin, v=v, **options)
    for x, y in zip((*outs, *grads(outs)), (*expected, *grads(expected))):
        assert_close(x.detach(), y.detach(), 1e-5)


@interpreted
@pytest.mark.parametrize("kind", ["bshd view", "unaligned slice", "expanded"])
def test_strides(kind):
    """Strides of the input, of its gradient, and of a weight."""
    x = strided(normal(2, 3, 9, 16).float(), kind).detach().requires_grad_()
    weight = normal(16, 2, seed=1).float()[:, 0].requires_grad_()
    cos, sin = rope_tables(9, 12)
    options = {"rotary_dim": 12, "q_norm": weight, "k_norm": weight}
    do = strided(normal(2, 3, 9, 16, seed=2).float(), kind)

    def run(x):
        out, _ = apply_rope_qk(x, x, cos, sin, **options)
        return out, *torch.autograd.grad(out, (x, weight), do.contiguous() if x.is_contiguous() else do)

    for found, expected in zip(run(x), run(x.detach().contiguous().requires_grad_())):
        assert_close(found.detach(), expected.detach().double(), 1e-6)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_out(dtype):
    """In place, too, the columns that pass through are normed."""
    q, k = normal(2, 3, 9, 24).to(dtype), normal(2, 1, 9, 24, seed=1).to(dtype)
    cos, sin = rope_tables(9, 16)
    weights = normal(2, 24, seed=2).to(dtype)
    options = {"rotary_dim": 16, "q_norm": weights[0], "k_norm": weights[1], "norm_offset": 1.0}
    expected = apply_rope_qk(q, k, cos, sin, **options)
    for kind in ("contiguous", "columns apart"):
        outs = tuple(strided(torch.full_like(x, 5.0), kind) for x in (q, k))
        assert all(a is b for a, b in zip(apply_rope_qk(q, k, cos, sin, out=outs, **options), outs))
        assert all(torch.equal(a, b) for a, b in zip(outs, expected))
    apply_rope_qk(q, k, cos, sin, out=(q, k), **options)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rows_of_zeros_and_rows_that_are_not_finite(eps, dtype):
    """Zeros stay zeros with finite gradients; a row that is not finite stays in its row, but for the weight's sum."""
    x = normal(1, 2, 9, 16).to(dtype)
    weight = normal(16, seed=1).to(dtype).requires_grad_()
    cos, sin = rope_tables(9, 16)

    def run(x):
        x = x.clone().requires_grad_()
        out, _ = apply_rope_qk(x, x.detach(), cos, sin, q_norm=weight, k_norm=weight, norm_eps=eps)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, weight))

    out, dx, _ = run(x)
    silent = x.clone()
    silent[0, 1, 3] = 0.0
    out_silent, dx_silent, dweight = run(silent)
    assert not out_silent[0, 1, 3].any() and dx_silent.isfinite().all() and dweight.isfinite().all()
    assert torch.equal(out_silent[0, 0], out[0, 0]) and torch.equal(dx_silent[0, 0], dx[0, 0])
    for value in (math.nan, math.inf):
        bad = x.clone()
        bad[0, 1, 3, 5] = value
        found, dx_bad, _ = run(bad)
        others = torch.arange(9) != 3
        assert found[0, 1, 3].isnan().any() and dx_bad[0, 1, 3].isnan().any()
        assert torch.equal(found[0, 0], out[0, 0]) and torch.equal(found[0, 1, others], out[0, 1, others])
        assert torch.equal(dx_bad[0, 1, others], dx[0, 1, others])


@interpreted
def test_tokens_that_do_not_exist_add_nothing_to_a_weights_gradient():
    """The rest of a tile has whatever angle position 0 has, here NaN."""
    x, weight = normal(1, 1, 3, 16).float().requires_grad_(), normal(16, seed=1).float().requires_grad_()
    cos, sin = rope_tables(9, 16)
    bad = cos.clone()
    bad[0] = math.nan
    found = []
    for table in (cos, bad):
        out, _ = apply_rope_qk(
            x, x.detach(), table, sin, q_norm=weight, k_norm=weight, position_ids=torch.tensor([5, 6, 7])
        )
        found.append(torch.autograd.grad(out.sum(), weight)[0])
    assert found[1].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16), (2, 0, 5, 16)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_empty(shape, dtype):
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    other = normal(2, 2, 5, 16).to(dtype).requires_grad_() if shape[1] == 0 else x
    weights = [normal(16, seed=i).to(dtype).requires_grad_() for i in range(2)]
    cos, sin = rope_tables(5, 16)
    outs = apply_rope_qk(x, other, cos, sin, q_norm=weights[0], k_norm=weights[1])
    dx, dq_norm, dk_norm = torch.autograd.grad(sum(out.sum() for out in outs), (x, *weights))
    assert outs[0].shape == dx.shape == shape and not dq_norm.any()
    assert bool(dk_norm.any()) == (other is not x)
