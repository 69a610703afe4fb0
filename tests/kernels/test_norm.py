"""The norm of rows that kernels hold in pair order, and its gradient, against PyTorch in float64."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.norm import Norm, pair_inverse_rms, unnorm_pairs
from fused_rope_attn.kernels.rotation import RotaryTables, head_rotation, load_pairs, pair_norm_weights, store_pairs
from fused_rope_attn.kernels.tiles import RowFormat, Rows
from fused_rope_attn.rotation import reference
from fused_rope_attn.runtime.device import is_interpreted
from tests.support.rotation import assert_close, normal

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="runs in Triton's interpreter")

ROWS, BLOCK = 5, 8  # rows that exist, and rows of the tile


@triton.jit
def rows_of(ptr, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=False)
    return Rows(ptr=ptr, stride_row=D, stride_column=1, num_rows=num_rows, first_row=None, format=row_format)


@triton.jit
def norm_kernel(
    x_ptr, dy_ptr, y_ptr, dx_ptr, dweight_ptr, weight_ptr, table_ptr, table_strides, eps, offset, num_rows,
    BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One tile: y of x, and dx and each row's part of dweight of dy."""
    tables = RotaryTables(table_ptr, table_ptr, table_strides, table_strides, R, INTERLEAVED)
    rotation = head_rotation(tables, 0, num_rows)
    norm = Norm(weight_ptr=weight_ptr, eps=eps, offset=offset, D=D)
    offs = tl.arange(0, BLOCK)
    first, second = load_pairs(rows_of(x_ptr, num_rows, D, BLOCK_D), offs, rotation, CHECK_ROWS=True)
    dy1, dy2 = load_pairs(rows_of(dy_ptr, num_rows, D, BLOCK_D), offs, rotation, CHECK_ROWS=True)
    weight1, weight2 = pair_norm_weights(norm, rotation, BLOCK_D)
    scale = pair_inverse_rms(first, second, norm)
    y1, y2 = first * weight1 * scale, second * weight2 * scale
    store_pairs(rows_of(y_ptr, num_rows, D, BLOCK_D), y1, y2, offs, rotation)
    dx1, dx2, dweight1, dweight2 = unnorm_pairs(first, second, dy1, dy2, weight1, weight2, norm)
    store_pairs(rows_of(dx_ptr, num_rows, D, BLOCK_D), dx1, dx2, offs, rotation)
    # The rows that do not exist too: they must be zero.
    store_pairs(rows_of(dweight_ptr, BLOCK, D, BLOCK_D), dweight1, dweight2, offs, rotation)


def run(x, dy, weight, rotary_dim, interleaved, eps=1e-5, offset=1.0):
    head_dim = x.shape[1]
    y, dx, dweight = torch.empty_like(x), torch.empty_like(x), torch.empty(BLOCK, head_dim)
    table = torch.zeros(1, ROWS, rotary_dim // 2)
    norm_kernel[(1,)](
        x, dy, y, dx, dweight, weight, table, table.stride(), eps, offset, ROWS, BLOCK, head_dim, rotary_dim, 32,
        interleaved,
    )  # fmt: skip
    return y, dx, dweight


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (24, 10), (20, 20)])
def test_pairs_against_float64(head_dim, rotary_dim, interleaved):
    """Columns that only pad the tile do not enter the mean, and rows that do not exist give no gradient."""
    x, dy, weight = (normal(*shape, seed=i) for i, shape in enumerate([(ROWS, head_dim)] * 2 + [(head_dim,)]))
    leaves = [t.float().double().requires_grad_() for t in (x, weight.half())]
    y = reference.norm(*leaves, 1e-5, 1.0)
    expected = torch.autograd.grad(y, leaves, dy.float().double())
    found = run(x.float(), dy.float(), weight.half(), rotary_dim, interleaved)
    assert_close(found[0], y.detach(), 1e-6)
    assert_close(found[1], expected[0], 1e-6)
    assert_close(found[2].sum(0), expected[1], 1e-6)
    assert not found[2][ROWS:].any()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_row_of_zeros_and_one_that_is_not_finite_stay_by_themselves(eps):
    x, dy, weight = normal(ROWS, 32).float(), normal(ROWS, 32, seed=1).float(), normal(32, seed=2).float()
    alone = run(x, dy, weight, 32, False, eps)
    x[1], x[3, 7] = 0.0, float("nan")
    y, dx, dweight = run(x, dy, weight, 32, False, eps)
    assert not y[1].any() and not dweight[1].any() and dx[1].isfinite().all()
    assert all(tensor[3].isnan().all() for tensor in (y, dx))
    for found, before in zip((y, dx, dweight), alone):
        assert torch.equal(found[[0, 2, 4]], before[[0, 2, 4]])
