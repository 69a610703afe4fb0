"""Every argument of `apply_rope` and `apply_rope_qk` keeps its promise."""

import os
import subprocess
import sys

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk, rope_tables
from tests.support.dtypes import F16, F32, F64
from tests.support.marks import ignore_overflow
from tests.support.rotation import (
    KINDS,
    TOLERANCE,
    assert_close,
    compare_with_float64,
    normal,
    rotate_by_matrix,
    strided,
)

pytestmark = ignore_overflow


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("width", ["half", "full"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 10), (7, 6), (40, 2)])
def test_matrix(head_dim, rotary_dim, width, inverse, interleaved, dtype):
    """Random tables: not unit-norm, and full-width ones with different columns of a pair."""
    columns = rotary_dim if width == "full" else rotary_dim // 2
    cos, sin = (t.to(F32 if dtype is F16 else dtype) for t in normal(2, 11, columns, seed=3))
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse}
    compare_with_float64(
        lambda x: apply_rope(x, cos, sin, **options),
        lambda x: rotate_by_matrix(x, cos[:9].double(), sin[:9].double(), *options.values()),
        [normal(2, 3, 9, head_dim)],
        dtype,
    )


@pytest.mark.parametrize("table_dtype", [F16, F32])
def test_low_precision_tables_are_taken_as_given(table_dtype):
    cos, sin = (t.to(table_dtype) for t in rope_tables(9, 16))
    compare_with_float64(
        lambda x: apply_rope(x, cos, sin),
        lambda x: rotate_by_matrix(x, cos.double(), sin.double(), 16, False, False),
        [normal(1, 2, 9, 16)],
        F16,
    )


def test_tables_of_every_batch():
    cos, sin = normal(2, 3, 9, 8, seed=4)
    ids = torch.tensor([[8, 7, 0, 1], [2, 2, 3, 3], [5, 6, 7, 8]])
    x = normal(3, 2, 4, 16)
    for position_ids, rows in ((None, torch.arange(4).expand(3, 4)), (ids, ids)):
        expected = torch.stack(
            [rotate_by_matrix(x[b], cos[b, rows[b]], sin[b, rows[b]], 16, False, False) for b in range(3)]
        )
        for dtype in (F32, F64):
            got = apply_rope(x.to(dtype), cos.to(dtype), sin.to(dtype), position_ids=position_ids)
            assert_close(got, expected, TOLERANCE[dtype])
    shared = apply_rope(x.float(), cos.float()[:1], sin.float()[:1], position_ids=ids[0].int())
    assert_close(shared, rotate_by_matrix(x, cos[0, ids[0]], sin[0, ids[0]], 16, False, False), 1e-5)
    one = apply_rope(x.float(), cos.float()[0], sin.float()[0], position_ids=ids[:1])
    assert_close(one, shared.double(), 1e-6)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_out(interleaved, dtype):
    x = normal(2, 3, 9, 24).to(dtype)
    cos, sin = rope_tables(9, 16)
    options = {"rotary_dim": 16, "interleaved": interleaved}
    expected = apply_rope(x, cos, sin, **options)
    for kind in KINDS[:-1]:
        out = strided(torch.full_like(x, 5.0), kind)
        assert apply_rope(x, cos, sin, out=out, **options) is out
        assert torch.equal(out, expected)
    for kind in KINDS[:-1]:
        y = strided(x.clone(), kind)
        assert apply_rope(y, cos, sin, out=y, **options) is y
        assert torch.equal(y, expected)
    q, k = x, x[:, :1].clone()
    outs = (torch.empty_like(q), torch.empty_like(k))
    assert all(a is b for a, b in zip(apply_rope_qk(q, k, cos, sin, out=outs, **options), outs))
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected[:, :1])


def test_out_into_a_cache():
    cache = torch.zeros(2, 3, 20, 16)
    x = normal(2, 3, 4, 16).float()
    cos, sin = rope_tables(20, 16)
    apply_rope(x, cos, sin, position_ids=torch.arange(7, 11), out=cache[:, :, 7:11])
    assert_close(
        cache[:, :, 7:11], rotate_by_matrix(x.double(), cos[7:11].double(), sin[7:11].double(), 16, False, False), 1e-5
    )
    assert bool((cache[:, :, :7] == 0).all()) and bool((cache[:, :, 11:] == 0).all())


@pytest.mark.parametrize("dtype", [F32, F64])
def test_positions_without_a_row_give_nan(dtype):
    x = normal(1, 2, 5, 8).to(dtype)
    cos, sin = rope_tables(4, 8)
    out = apply_rope(x, cos, sin, position_ids=torch.tensor([0, 3, 4, -1, 2**40]))
    assert out[:, :, :2].isfinite().all() and out[:, :, 2:].isnan().all()
    assert apply_rope(x, cos[:0], sin[:0], position_ids=torch.zeros(5, dtype=torch.int32)).isnan().all()
    packed = x[0].transpose(0, 1)
    out = apply_rope(packed, cos[:2], sin[:2], layout="thd", cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32))
    assert out[[0, 1, 3, 4]].isfinite().all() and out[2].isnan().all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_packed_sequences(dtype):
    """Empty sequences, and tokens after the last one, which pass through, gradients too."""
    ends = [0, 0, 1, 5, 5, 9]
    x = normal(12, 2, 16).to(dtype).requires_grad_()
    cos, sin = (t.to(dtype) for t in normal(2, 6, 8, seed=3))
    options = {"layout": "thd", "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    out = apply_rope(x, cos, sin, **options)
    for a, b in zip(ends, ends[1:]):
        if a < b:
            rows = x[a:b].detach().double().transpose(0, 1)
            expected = rotate_by_matrix(rows, cos.double()[: b - a], sin.double()[: b - a], 16, False, False)
            assert_close(out[a:b].detach(), expected.transpose(0, 1), TOLERANCE[dtype])
    assert torch.equal(out[9:], x[9:])
    out[9:].sum().backward()
    assert torch.equal(x.grad, torch.cat((torch.zeros(9, 2, 16), torch.ones(3, 2, 16))).to(dtype))
    ids = torch.tensor([0, 0, 1, 2, 3, 0, 1, 2, 3])
    by_ids = apply_rope(x.detach()[:9], cos, sin, layout="thd", position_ids=ids)
    assert torch.equal(by_ids, out[:9])
    none = apply_rope(x.detach(), cos, sin, layout="thd", cu_seqlens=torch.zeros(1, dtype=torch.int32))
    assert torch.equal(none, x)


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16), (2, 0, 5, 16)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_empty(shape, dtype):
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    cos, sin = rope_tables(5, 16)
    out = apply_rope(x, cos, sin)
    assert out.shape == shape and torch.autograd.grad(out.sum(), x)[0].shape == shape
    full = normal(2, 2, 5, 16).to(dtype)
    if shape[1] == 0:
        q, k = apply_rope_qk(full, x.detach(), cos, sin)
        assert k.shape == shape and torch.equal(q, apply_rope(full, cos, sin))


def test_far_positions_keep_their_angles():
    far = torch.tensor([131071, 10**6 - 1])
    cos, sin = rope_tables(2, 16, positions=far)
    x = normal(1, 1, 2, 16)
    exact = far.double()[:, None] * 10000.0 ** -(torch.arange(8, dtype=F64) / 8)
    assert_close(apply_rope(x.float(), cos, sin), rotate_by_matrix(x, exact.cos(), exact.sin(), 16, False, False), 1e-5)


def test_bfloat16_takes_the_reference_here():
    cos, sin = rope_tables(5, 16)
    x = normal(1, 2, 5, 16).bfloat16()
    expected = rotate_by_matrix(x.double(), cos.double(), sin.double(), 16, False, False)
    out = apply_rope(x, cos, sin)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, 4e-3)


def test_without_the_interpreter_a_cpu_takes_the_reference():
    program = """
import torch, fused_rope_attn as f
x = torch.randn(2, 3, 9, 16, requires_grad=True)
cos, sin = f.rope_tables(9, 16)
out = f.apply_rope(x, cos, sin)
out.sum().backward()
assert "Rope" not in type(out.grad_fn).__name__, type(out.grad_fn)
y = f.apply_rope(out.detach(), cos, sin, inverse=True)
torch.testing.assert_close(y, x.detach())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
