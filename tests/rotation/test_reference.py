"""The reference of rotation and norm, by which everything else is defined, against others."""

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from fused_rope_attn.rotation import reference
from tests.support.dtypes import F16, F32, F64
from tests.support.rotation import normal


def rotate_by_matrix(x, cos, sin, rotary_dim, interleaved, inverse):
    """x (..., N, D) times the matrix of each token, written out: no layout of columns is used twice."""
    matrix = torch.eye(x.shape[-1], dtype=F64).repeat(x.shape[-2], 1, 1)
    wide = cos.shape[-1] == rotary_dim
    for p in range(rotary_dim // 2):
        i, j = (2 * p, 2 * p + 1) if interleaved else (p, p + rotary_dim // 2)
        a, b = (i, j) if wide else (p, p)
        matrix[:, i, i], matrix[:, i, j] = cos[:, a], -sin[:, a]
        matrix[:, j, j], matrix[:, j, i] = cos[:, b], sin[:, b]
    matrix = matrix.mT if inverse else matrix
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("width", ["half", "full"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 10), (7, 6), (8, 2)])
def test_the_rotation_is_a_product_with_a_matrix(head_dim, rotary_dim, width, inverse, interleaved):
    """Random tables: not unit-norm, and full-width ones with different columns of a pair."""
    cos, sin = normal(2, 9, rotary_dim if width == "full" else rotary_dim // 2, seed=3)
    x = normal(2, 3, 9, head_dim)
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse}
    expected = rotate_by_matrix(x, cos, sin, *options.values())
    torch.testing.assert_close(apply_rope(x, cos, sin, **options), expected)
    if width == "half":
        out = reference.rotate(x, cos, sin, interleaved=interleaved, inverse=inverse)
        assert torch.equal(out, reference.rotation(x, cos, sin, **options))
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("table_dtype", [F32, F16])
def test_the_result_is_rounded_once(table_dtype, norm):
    x, cos, sin = normal(1, 1, 64, 32).half(), *(t.to(table_dtype) for t in rope_tables(64, 16))
    options = {"rotary_dim": 16}
    if norm:
        options |= {"weight": normal(32, seed=1).half(), "norm_eps": 1e-6, "norm_offset": 0.0}
    found = reference.rotation(x, cos, sin, **options)
    wide = reference.rotation(x.double(), cos.double(), sin.double(), **options)
    # Half a unit in the last place, and float32's own error where two products cancel.
    assert found.dtype == F16 and bool(((found.double() - wide).abs() <= wide.abs() * 2**-11 + 2**-19).all())
    x = x.float()  # float64 where a table is
    wide = reference.rotate(x.double(), cos.double(), sin.double()).float()
    assert torch.equal(reference.rotate(x, cos.double(), sin.double()), wide)


@pytest.mark.parametrize(("eps", "offset"), [(1e-6, 0.0), (1e-2, 1.0)])
def test_the_norm_is_pytorchs(eps, offset):
    x, weight = normal(3, 5, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    expected = torch.nn.functional.rms_norm(x, (8,), offset + weight, eps)
    torch.testing.assert_close(reference.norm(x, weight, eps, offset), expected)
    assert torch.autograd.gradcheck(lambda x, weight: reference.norm(x, weight, eps, offset), (x, weight))
    assert reference.norm(x.half(), weight.half(), eps, offset).dtype == F32


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved, inverse):
    cos, sin = normal(2, 3, 3, seed=3)
    leaves = [normal(1, heads, 3, 8, seed=heads).requires_grad_() for heads in (2, 1)]
    leaves += [normal(8, seed=5 + i).requires_grad_() for i in range(2)]
    options = {"rotary_dim": 6, "inverse": inverse, "interleaved": interleaved}

    def run(q, k, q_norm, k_norm):
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-2, "norm_offset": 0.5}
        return apply_rope_qk(q, k, cos, sin, **norms, **options)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, cos, sin, **options), leaves[0])
