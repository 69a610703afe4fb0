"""Rotation alone: every convention of docs/rotation.md against an oracle of a few lines, and what the API promises.

Here the kernel runs in Triton's interpreter, in float16 and float32, and float64 takes the reference; bfloat16 is in
tests/rotation/test_rotation_gpu.py.
"""

import copy
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, permute_rope_layout, rope_tables, rope_tables_2d
from fused_rope_attn.rotation.configs import TABLE
from fused_rope_attn.rotation.reference import rotation
from fused_rope_attn.runtime.device import is_interpreted
from tests.support.guard_pages import hold_within_bounds

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")
F16, F32, F64 = torch.float16, torch.float32, torch.float64
TOLERANCE = {F16: 2e-3, F32: 1e-5, F64: 1e-12}
dtypes = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(actual, expected, tolerance):
    """Relative to the expected tensor's rms, as in the contract."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt()
    assert float(error) <= tolerance * float(expected.square().mean().sqrt()) + 1e-30, float(error)
    assert float((actual.double() - expected).abs().max()) <= 20 * tolerance * float(expected.abs().max())


def hold(ours, oracle, xs, dtype, tolerance=None):
    """Outputs and gradients of ``ours`` in dtype are those of ``oracle`` in float64; inputs stay as they were."""
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    mine = [x.to(dtype).requires_grad_() for x in xs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    outs, wanted = ours(*mine), oracle(*exact)
    outs, wanted = ((y,) if isinstance(y, torch.Tensor) else y for y in (outs, wanted))
    dos = [normal(*out.shape, seed=7 + i).to(dtype) for i, out in enumerate(outs)]
    gradients = torch.autograd.grad(outs, mine, dos)
    expected = torch.autograd.grad(wanted, exact, [do.double() for do in dos])
    for x, y in zip((*outs, *gradients), (*wanted, *expected), strict=True):
        assert x.dtype == dtype
        close(x.detach(), y.detach(), tolerance)
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(mine, xs))


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(length, dim, base=10000.0):
    return torch.arange(length, dtype=F64)[:, None] * base ** -(torch.arange(0, dim, 2, dtype=F64) / dim)


# ---- the six public implementations --------------------------------------------------------------------------------


def transformer_engine(t, freqs, tensor_format="sbhd", cu_seqlens=None):
    """`apply_rotary_pos_emb` of Transformer Engine: freqs (s, 1, 1, d2), half layout, the tail passes through."""
    if tensor_format == "thd":
        ends = cu_seqlens.tolist()
        parts = [transformer_engine(t[a:b, None], freqs)[:, 0] for a, b in zip(ends, ends[1:])]
        return torch.cat(parts)
    if tensor_format == "bshd":
        return transformer_engine(t.transpose(0, 1), freqs).transpose(0, 1)
    freqs = freqs[: t.shape[0]]
    turning, passing = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    return torch.cat((turning * freqs.cos() + rotate_half(turning) * freqs.sin(), passing), -1)


@dtypes
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("d2", [16, 10, 6])
def test_transformer_engine(tensor_format, d2, dtype):
    freqs = torch.cat((angles(13, d2),) * 2, -1)[:, None, None]  # longer than the input
    shape = {"sbhd": (9, 2, 3, 16), "bshd": (2, 9, 3, 16), "thd": (11, 3, 16)}[tensor_format]
    ends = torch.tensor([0, 3, 3, 11], dtype=torch.int32) if tensor_format == "thd" else None
    cos, sin = (f(freqs).squeeze(1, 2).to(dtype) for f in (torch.cos, torch.sin))
    hold(
        lambda t: apply_rope(t, cos, sin, rotary_dim=d2, layout=tensor_format, cu_seqlens=ends),
        lambda t: transformer_engine(t, freqs, tensor_format, ends),
        [normal(*shape)],
        dtype,
    )


@dtypes
def test_neox_and_apex(dtype):
    """`fused_apply_rotary_pos_emb`: sbhd, angles given in float32, their sine and cosine taken in float32."""
    freqs = torch.cat((angles(9, 12),) * 2, -1)[:, None, None].float()

    def oracle(t):
        cos, sin = freqs.cos().double(), freqs.sin().double()
        return torch.cat((t[..., :12] * cos + rotate_half(t[..., :12]) * sin, t[..., 12:]), -1)

    cos, sin = freqs.squeeze(1, 2).cos(), freqs.squeeze(1, 2).sin()
    hold(lambda t: apply_rope(t, cos, sin, layout="sbhd"), oracle, [normal(9, 2, 3, 16)], dtype)


def paddle(q, k, v, sin, cos, position_ids, use_neox_rotary_style, time_major, base):
    """`fused_rotary_position_embedding`: (B, S, H, D), tables (1, S, 1, D). Its "neox style" turns every two columns;
    what it derives from the base gives column i the frequency of i // 2, in both styles."""
    outs = []
    for x in (q, k, v):
        if x is None:
            continue
        x = x.transpose(0, 1) if time_major else x
        length, dim = x.shape[1], x.shape[3]
        angle = angles(2 * length, dim, base).repeat_interleave(2, -1)
        c, s = (angle.cos(), angle.sin()) if cos is None else (cos[0, :, 0], sin[0, :, 0])
        rows = torch.arange(length)[None] if position_ids is None else position_ids
        c, s = c[rows][:, :, None], s[rows][:, :, None]
        x = x * c + (rotate_every_two(x) if use_neox_rotary_style else rotate_half(x)) * s
        outs.append(x.transpose(0, 1) if time_major else x)
    return outs


@dtypes
@pytest.mark.parametrize("every_two", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("given_tables", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("which", ["q", "qk", "qkv"])
def test_paddle(every_two, time_major, given_tables, with_ids, which, dtype):
    batch, length, dim, base = 2, 5, 8, 500.0
    ids = torch.tensor([[3, 0, 4, 2, 1], [4, 4, 0, 6, 9]]) if with_ids else None
    angle = angles(2 * length, dim, 77.0)
    angle = angle.repeat_interleave(2, -1) if every_two else torch.cat((angle, angle), -1)
    tables = (angle.sin()[None, :, None], angle.cos()[None, :, None]) if given_tables else (None, None)
    if given_tables:
        sin, cos = (t.squeeze(2).to(dtype) for t in tables)
    else:
        angle = angles(2 * length, dim, base).repeat_interleave(2, -1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    options = {"layout": "sbhd" if time_major else "bshd", "interleaved": every_two, "position_ids": ids}
    first = (length, batch) if time_major else (batch, length)
    xs = [normal(*first, heads, dim, seed=heads) for heads in (4, 2, 1)[: len(which)]]

    def ours(q, k=None, v=None):
        if k is None:
            return apply_rope(q, cos, sin, **options)
        return apply_rope_qk(q, k, cos, sin, v=v, **options)

    hold(
        ours,
        lambda q, k=None, v=None: tuple(paddle(q, k, v, *tables, ids, every_two, time_major, base)),
        xs,
        dtype,
    )


def oneflow(x, rotary_size, mode, position_ids, base):
    """`fused_apply_rotary_emb` for x (B, H, M, K), column by column; position_ids (B, 1|2, M), or the row's index."""
    ids = torch.arange(x.shape[2]).expand(x.shape[0], 1, -1) if position_ids is None else position_ids
    width = rotary_size // ids.shape[1]  # of the columns that share a position
    columns = []
    for i in range(x.shape[3]):
        if i >= rotary_size:
            columns.append(x[..., i])
            continue
        section, j = divmod(i, width)
        if mode == "interval":
            partner, sign, pair = (i + 1, -1, j // 2) if j % 2 == 0 else (i - 1, 1, j // 2)
        else:
            half = width // 2
            partner, sign, pair = (i + half, -1, j) if j < half else (i - half, 1, j - half)
        angle = (ids[:, section].double() * base ** (-2 * pair / width))[:, None]
        columns.append(x[..., i] * angle.cos() + sign * x[..., partner] * angle.sin())
    return torch.stack(columns, -1)


@dtypes
@pytest.mark.parametrize("mode", ["plane", "interval"])
@pytest.mark.parametrize("ids", ["none", "1-D", "2-D"])
@pytest.mark.parametrize("rotary_size", [16, 12, 4])
@pytest.mark.parametrize("x_layout", ["BHMK", "BMHK", "MBHK"])
def test_oneflow(mode, ids, rotary_size, x_layout, dtype):
    sections = 2 if ids == "2-D" else 1
    position_ids = None
    if ids != "none":
        position_ids = torch.randint(0, 14, (2, sections, 7), generator=torch.Generator().manual_seed(1))
    axes = {"BHMK": (0, 1, 2, 3), "BMHK": (0, 2, 1, 3), "MBHK": (2, 0, 1, 3)}[x_layout]
    angle = angles(14, rotary_size // sections, 300.0)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    layout = {"BHMK": "bhsd", "BMHK": "bshd", "MBHK": "sbhd"}[x_layout]
    hold(
        lambda x: apply_rope(
            x, cos, sin, rotary_dim=rotary_size, interleaved=mode == "interval", layout=layout,
            position_ids=None if position_ids is None else position_ids[:, 0] if sections == 1 else position_ids,
        ),
        lambda x: oneflow(
            x.permute(*(axes.index(i) for i in range(4))), rotary_size, mode, position_ids, 300.0
        ).permute(axes),
        [normal(2, 3, 7, 16).permute(axes).contiguous()],
        dtype,
    )  # fmt: skip


@dtypes
@pytest.mark.parametrize("with_pos", [False, True])
def test_torchtune(with_pos, dtype):
    """`RotaryPositionalEmbeddings.forward(x (B, S, H, D), input_pos (B, S))`: interleaved, computed in float32."""
    input_pos = torch.tensor([[0, 1, 2, 10, 11], [7, 6, 5, 4, 3]]) if with_pos else None
    cache = torch.stack((angles(12, 16).cos(), angles(12, 16).sin()), -1)

    def oracle(x):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        rope = (cache[: x.shape[1]][None] if input_pos is None else cache[input_pos]).unsqueeze(2)
        first = pairs[..., 0] * rope[..., 0] - pairs[..., 1] * rope[..., 1]
        second = pairs[..., 1] * rope[..., 0] + pairs[..., 0] * rope[..., 1]
        return torch.stack((first, second), -1).flatten(3)

    module = RotaryEmbedding(16, max_seq_len=12, interleaved=True)
    x = [normal(2, 5, 3, 16)]
    hold(lambda x: module(x, layout="bshd", position_ids=input_pos), oracle, x, dtype, max(1e-6, TOLERANCE[dtype]))


@dtypes
def test_metal(dtype):
    """Interleaved on (S, B, H, D) with tables (S, D/2)."""
    angle = angles(6, 16)

    def oracle(x):
        first, second = x[..., ::2], x[..., 1::2]
        c, s = angle.cos()[:, None, None], angle.sin()[:, None, None]
        return torch.stack((first * c - second * s, first * s + second * c), -1).reshape(x.shape)

    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    hold(lambda x: apply_rope(x, cos, sin, layout="sbhd", interleaved=True), oracle, [normal(6, 2, 3, 16)], dtype)


# ---- what every argument promises ----------------------------------------------------------------------------------


def plain(x, cos, sin, rotary_dim, interleaved, inverse):
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


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("width", ["half", "full"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 10), (7, 6), (40, 2)])
def test_matrix(head_dim, rotary_dim, width, inverse, interleaved, dtype):
    """Random tables: not unit-norm, and full-width ones whose two columns of a pair differ."""
    columns = rotary_dim if width == "full" else rotary_dim // 2
    cos, sin = (t.to(F32 if dtype is F16 else dtype) for t in normal(2, 11, columns, seed=3))
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse}
    hold(
        lambda x: apply_rope(x, cos, sin, **options),
        lambda x: plain(x, cos[:9].double(), sin[:9].double(), *options.values()),
        [normal(2, 3, 9, head_dim)],
        dtype,
    )


@pytest.mark.parametrize("table_dtype", [F16, F32])
def test_low_precision_tables_are_taken_as_given(table_dtype):
    cos, sin = (t.to(table_dtype) for t in rope_tables(9, 16))
    hold(
        lambda x: apply_rope(x, cos, sin),
        lambda x: plain(x, cos.double(), sin.double(), 16, False, False),
        [normal(1, 2, 9, 16)],
        F16,
    )


def test_tables_of_every_batch():
    cos, sin = normal(2, 3, 9, 8, seed=4)
    ids = torch.tensor([[8, 7, 0, 1], [2, 2, 3, 3], [5, 6, 7, 8]])
    x = normal(3, 2, 4, 16)
    for position_ids, rows in ((None, torch.arange(4).expand(3, 4)), (ids, ids)):
        expected = torch.stack([plain(x[b], cos[b, rows[b]], sin[b, rows[b]], 16, False, False) for b in range(3)])
        for dtype in (F32, F64):
            got = apply_rope(x.to(dtype), cos.to(dtype), sin.to(dtype), position_ids=position_ids)
            close(got, expected, TOLERANCE[dtype])
    shared = apply_rope(x.float(), cos.float()[:1], sin.float()[:1], position_ids=ids[0].int())
    close(shared, plain(x, cos[0, ids[0]], sin[0, ids[0]], 16, False, False), 1e-5)
    one = apply_rope(x.float(), cos.float()[0], sin.float()[0], position_ids=ids[:1])
    close(one, shared.double(), 1e-6)


def strided(x, kind):
    """The same values in another memory layout."""
    if kind == "bshd view":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "columns apart":
        wide = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "unaligned slice":
        wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 3), math.nan, dtype=x.dtype)
        wide[:, 2:-1, 1:, 1:-2] = x
        return wide[:, 2:-1, 1:, 1:-2]
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "expanded":
        return x[:, :1].expand_as(x)
    return x.contiguous()


KINDS = ["contiguous", "bshd view", "columns apart", "unaligned slice", "transposed", "expanded"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind, interleaved):
    x = strided(normal(2, 3, 9, 16).float(), kind)
    cos, sin = rope_tables(9, 12)
    leaf = x.detach().requires_grad_()
    out = apply_rope(leaf, cos, sin, rotary_dim=12, interleaved=interleaved)
    close(out.detach(), plain(x.double(), cos.double(), sin.double(), 12, interleaved, False), 1e-5)
    do = strided(normal(2, 3, 9, 16, seed=2).float(), kind)
    (dx,) = torch.autograd.grad(out, leaf, do)
    close(dx, plain(do.double(), cos.double(), sin.double(), 12, interleaved, True), 1e-5)
    (dx,) = torch.autograd.grad(apply_rope(leaf, cos, sin, rotary_dim=12, interleaved=interleaved).sum(), leaf)
    close(dx, plain(torch.ones(x.shape, dtype=F64), cos.double(), sin.double(), 12, interleaved, True), 1e-5)


def test_tables_with_odd_strides():
    cos, sin = (strided(t[None, None], "columns apart")[0, 0] for t in rope_tables(9, 16))
    x = normal(1, 2, 9, 16).float()
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x, cos.contiguous(), sin))
    assert torch.equal(apply_rope(x, cos.mT.contiguous().mT[None], sin[None]), apply_rope(x, cos, sin))


def test_memory_order_follows_the_input():
    cos, sin = rope_tables(9, 16)
    for kind in ("contiguous", "bshd view"):
        x = strided(normal(2, 3, 9, 16).float(), kind).requires_grad_()
        out = apply_rope(x, cos, sin)
        assert out.stride() == x.stride()
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


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
    close(cache[:, :, 7:11], plain(x.double(), cos[7:11].double(), sin[7:11].double(), 16, False, False), 1e-5)
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
    """Empty sequences, and tokens behind the last one, which pass through, gradients too."""
    ends = [0, 0, 1, 5, 5, 9]
    x = normal(12, 2, 16).to(dtype).requires_grad_()
    cos, sin = (t.to(dtype) for t in normal(2, 6, 8, seed=3))
    options = {"layout": "thd", "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    out = apply_rope(x, cos, sin, **options)
    for a, b in zip(ends, ends[1:]):
        if a < b:
            part = plain(x[a:b].detach().double().transpose(0, 1), cos.double()[: b - a], sin.double()[: b - a], 16,
                         False, False)  # fmt: skip
            close(out[a:b].detach(), part.transpose(0, 1), TOLERANCE[dtype])
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


@interpreted
@pytest.mark.parametrize("axis", ["batch", "head", "row", "column"])
def test_offsets_pass_two_to_the_31(axis):
    """Strides that fit 32 bits, products that do not; only the touched pages are real."""
    far, near = 2**30, 64
    sizes = {"batch": (3, 2, 2, 16), "head": (1, 3, 2, 16), "row": (1, 2, 3, 16), "column": (1, 1, 1, 16)}[axis]
    strides = {
        "batch": (far, near, 16, 1),
        "head": (near, far, 16, 1),
        "row": (near, 16, far, 1),
        "column": (1, 1, 1, far // 7),
    }[axis]
    x = normal(*sizes).float()
    cos, sin = rope_tables(3, 16)
    expected = apply_rope(x, cos, sin)
    storage = torch.empty(2**31 + 2**29)
    view = storage.as_strided(sizes, strides)
    view.copy_(x)
    out = torch.empty(2**31 + 2**29).as_strided(sizes, strides)
    assert torch.equal(apply_rope(view, cos, sin, out=out), expected)
    apart = (2**30, 1) if axis == "batch" else (0, 2**30)
    ids = torch.empty(2**31 + 2**29, dtype=torch.int32).as_strided((sizes[0], sizes[2]), apart)
    ids.copy_(torch.arange(sizes[2]).expand(sizes[0], -1))
    assert torch.equal(apply_rope(x, cos, sin, position_ids=ids), expected)


def test_far_positions_keep_their_angles():
    far = torch.tensor([131071, 10**6 - 1])
    cos, sin = rope_tables(2, 16, positions=far)
    x = normal(1, 1, 2, 16)
    exact = far.double()[:, None] * 10000.0 ** -(torch.arange(8, dtype=F64) / 8)
    close(apply_rope(x.float(), cos, sin), plain(x, exact.cos(), exact.sin(), 16, False, False), 1e-5)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(1, 3),
    heads=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    length=st.integers(0, 40),
    head_dim=st.integers(2, 70),
    share=st.floats(0, 1),
    full=st.booleans(),
    interleaved=st.booleans(),
    inverse=st.booleans(),
    layout=st.sampled_from(["bhsd", "bshd", "sbhd"]),
    positions=st.sampled_from([None, "shared", "batch"]),
    dtype=st.sampled_from([F16, F32]),
    seed=st.integers(1, 100),
)
def test_any_shape(batch, heads, length, head_dim, share, full, interleaved, inverse, layout, positions, dtype, seed):
    """The kernel in the interpreter against the reference in float64."""
    rotary_dim = max(2, 2 * int(share * head_dim / 2))
    cos, sin = normal(2, length + 3, rotary_dim // (1 if full else 2), seed=seed).float()
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if positions:
        shape = (length,) if positions == "shared" else (batch, length)
        ids = torch.randint(0, length + 3, shape, generator=generator, dtype=torch.int32)
    shapes = {"bhsd": lambda h: (batch, h, length, head_dim), "bshd": lambda h: (batch, length, h, head_dim),
              "sbhd": lambda h: (length, batch, h, head_dim)}  # fmt: skip
    xs = [normal(*shapes[layout](h), seed=seed + i).to(dtype) for i, h in enumerate(heads)]
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse, "layout": layout}
    options["position_ids"] = ids
    if len(xs) == 1:
        outs = [apply_rope(xs[0], cos, sin, **options)]
    else:
        outs = apply_rope_qk(*xs[:2], cos, sin, v=xs[2] if len(xs) > 2 else None, **options)
    for x, out in zip(xs, outs):
        expected = apply_rope(x.double(), cos.double(), sin.double(), **options)
        if expected.numel():
            close(out, expected, TOLERANCE[dtype])


GUARD = """
import torch
from fused_rope_attn import apply_rope
from tests.support.guard_pages import abut

for shape, layout, width, options in (
    ((1, 3, 37, 24), "bhsd", 5, {"rotary_dim": 10}),
    ((1, 37, 3, 24), "bshd", 24, {"interleaved": True}),
    ((2, 5, 9, 12), "bhsd", 6, {"interleaved": True, "position_ids": torch.randint(0, 40, (2, 9))}),
    ((2, 5, 9, 12), "bhsd", 3, {"rotary_dim": 12, "position_ids": torch.randint(0, 40, (2, 2, 9))}),
    ((19, 3, 10), "thd", 5, {"cu_seqlens": torch.tensor([0, 4, 11, 19], dtype=torch.int32)}),
):
    x, cos, sin = torch.randn(shape), torch.randn(40, width), torch.randn(40, width)
    expected = apply_rope(x, cos, sin, layout=layout, **options)
    for at_end in (True, False):
        guarded = {k: abut(v, at_end) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        tensors = [abut(t, at_end) for t in (x, cos, sin)]
        out = apply_rope(*tensors, layout=layout, out=abut(torch.zeros_like(x), at_end), **guarded)
        assert torch.equal(out, expected), (shape, layout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    hold_within_bounds(GUARD)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_the_gradient_is_a_rotation_and_differentiable_again():
    cos, sin = rope_tables(3, 6)
    x = normal(1, 2, 3, 8).requires_grad_()
    for interleaved in (False, True):
        run = lambda x: apply_rope(x, cos, sin, rotary_dim=6, interleaved=interleaved)  # noqa: B023, E731
        assert torch.autograd.gradcheck(run, x) and torch.autograd.gradgradcheck(run, x)
    # The kernel: a function of the gradient, whose gradient rotates forward again.
    y = x.detach().float().requires_grad_()
    do = normal(1, 2, 3, 8, seed=1).float().requires_grad_()
    (dx,) = torch.autograd.grad(apply_rope(y, cos, sin), y, do, create_graph=True)
    (ddo,) = torch.autograd.grad(dx, do, y.detach())
    close(ddo, apply_rope(y.detach().double(), cos, sin), 1e-5)


@interpreted
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_what_is_wanted_is_computed(wanted):
    cos, sin = rope_tables(5, 16)
    xs = {name: normal(1, 2, 5, 16, seed=i).float().requires_grad_(name in wanted) for i, name in enumerate("qkv")}
    outs = apply_rope_qk(xs["q"], xs["k"], cos, sin, v=xs["v"])
    sum(out.sum() for out in outs).backward()
    for name, x in xs.items():
        assert (x.grad is not None) == (name in wanted)
        if x.grad is not None:
            close(x.grad, plain(torch.ones_like(x).double(), cos.double(), sin.double(), 16, False, True), 1e-5)
    q = xs["q"].detach().requires_grad_()
    outs = apply_rope_qk(q, xs["k"].detach().requires_grad_(), cos, sin)
    outs[0].sum().backward()  # k's output is not used at all
    assert q.grad is not None


@interpreted
def test_nothing_but_tables_is_saved():
    cos, sin = rope_tables(5, 16)
    x, saved = normal(1, 2, 5, 16).float().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope(x, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_opcheck(layout):
    operators = torch.ops.fused_rope_attn
    cos, sin = rope_tables(7, 16)
    if layout == "thd":
        xs, positions = [normal(5, 2, 16).float()], (None, torch.tensor([0, 2, 5], dtype=torch.int32))
    else:
        xs = [normal(1, 2, 5, 16).float(), normal(1, 1, 5, 16).float()]
        positions = (torch.tensor([[[0, 1, 2, 3, 6]]]), None)
    arguments = (cos, sin, *positions, 16, False, False, layout)
    torch.library.opcheck(operators.rope.default, (xs, *arguments))
    leaves = [x.clone().requires_grad_() for x in xs]
    torch.library.opcheck(operators.rope.default, (leaves, *arguments), test_utils="test_aot_dispatch_dynamic")
    torch.library.opcheck(operators.rope_out.default, (xs, [torch.empty_like(x) for x in xs], *arguments))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_compile_with_dynamic_lengths(dtype):
    """One graph for all lengths, forward and backward, equal to eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    cos, sin = rope_tables(40, 16)

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, ids):
        q, k = apply_rope_qk(2 * q, k, cos, sin, position_ids=ids, interleaved=True)
        return q + 1, apply_rope(k, cos, sin, inverse=True)

    for n in (5, 7, 12, 33):
        q, k = (normal(2, h, n, 16, seed=n).to(dtype).requires_grad_() for h in (3, 2))
        ids = torch.arange(n - 1, -1, -1)
        outs = compiled(q, k, ids)
        gradients = torch.autograd.grad(sum((out * out).sum() for out in outs), (q, k))
        q_rot, k_rot = apply_rope_qk(2 * q, k, cos, sin, position_ids=ids, interleaved=True)
        eager = q_rot + 1, apply_rope(k_rot, cos, sin, inverse=True)
        expected = torch.autograd.grad(sum((out * out).sum() for out in eager), (q, k))
        for x, y in zip((*outs, *gradients), (*eager, *expected)):
            close(x.detach(), y.detach().double(), 1e-6)
    assert counter.frame_count == 1


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_compile_with_out(dtype):
    torch._dynamo.reset()
    cos, sin = rope_tables(9, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, out):
        y = x + 1
        apply_rope(y, cos, sin, out=out)
        apply_rope(y, cos, sin, out=y)
        return y

    x = normal(1, 2, 9, 16).to(dtype)
    out = torch.zeros_like(x)
    y = compiled(x, out)
    assert torch.equal(out, apply_rope(x + 1, cos, sin)) and torch.equal(y, out)


@interpreted
@pytest.mark.unpoisoned
def test_fake_tensors_match_the_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    cos, sin = rope_tables(9, 16)
    for kind in KINDS:
        x = strided(normal(2, 3, 9, 16).float(), kind)
        real = apply_rope(x, cos, sin)
        with FakeTensorMode() as mode:
            fake = apply_rope(mode.from_tensor(x), mode.from_tensor(cos), mode.from_tensor(sin))
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride()), kind


def test_autocast_leaves_the_dtype_alone():
    cos, sin = rope_tables(5, 16)
    x = normal(1, 2, 5, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(apply_rope(x, cos, sin), apply_rope(x, cos, sin)) and apply_rope(x, cos, sin).dtype == F32


def test_bfloat16_takes_the_reference_here():
    cos, sin = rope_tables(5, 16)
    x = normal(1, 2, 5, 16).bfloat16()
    expected = plain(x.double(), cos.double(), sin.double(), 16, False, False)
    out = apply_rope(x, cos, sin)
    assert out.dtype == torch.bfloat16
    close(out, expected, 4e-3)


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


@interpreted
def test_the_configurations_serve_every_architecture():
    from fused_rope_attn.attention.configs import ARCHS
    from fused_rope_attn.rotation.configs import RotationConfig
    from fused_rope_attn.rotation.configs import rotation as choose
    from fused_rope_attn.rotation.launch import tile_shape

    for arch in (*ARCHS, "interpreter", "sm_75"):
        for size in (0, 1 << 10, 4 << 20, (4 << 20) + 1, 1 << 34):
            assert choose(arch, size) in [row.config for row in TABLE if row.matches(arch, size)][:1]
    config = RotationConfig(1 << 14, 1 << 12, 4)
    assert tile_shape(config, 256, 96, heads_inner=True) == (4, 16)
    assert tile_shape(config, 256, 96, heads_inner=False) == (16, 4)
    assert tile_shape(config, 256, 3, heads_inner=True) == (16, 4)
    assert tile_shape(config, 256, 1, heads_inner=False) == (64, 1)
    assert tile_shape(config, 1 << 16, 8, heads_inner=True) == (1, 1)


# ---- tables, module, layouts -----------------------------------------------------------------------------------------


def test_rope_tables_2d():
    height, width, dim = 3, 5, 12
    cos, sin = rope_tables_2d(height, width, dim, base=100.0)
    assert cos.shape == sin.shape == (15, 6) and cos.dtype == sin.dtype == F32
    for token in range(15):
        for pair in range(6):
            position = token // width if pair < 3 else token % width
            angle = position * 100.0 ** (-2 * (pair % 3) / (dim / 2))
            assert abs(float(cos[token, pair]) - math.cos(angle)) < 1e-6
            assert abs(float(sin[token, pair]) - math.sin(angle)) < 1e-6
    assert rope_tables_2d(0, 5, 4)[0].shape == (0, 2)
    # Interleaved, it is what two ids for every token give.
    x = normal(1, 2, 15, 12).float()
    line = rope_tables(5, 6, base=100.0)
    ids = torch.stack((torch.arange(15) // width, torch.arange(15) % width))[None]
    two = apply_rope(x, *line, rotary_dim=12, interleaved=True, position_ids=ids)
    close(apply_rope(x, cos, sin, interleaved=True), two.double(), 1e-6)


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (TypeError, "height", lambda: rope_tables_2d(3.0, 5, 4)),
        (ValueError, "width", lambda: rope_tables_2d(3, -1, 4)),
        (ValueError, "rotary_dim", lambda: rope_tables_2d(3, 5, 6)),
        (ValueError, "base", lambda: rope_tables_2d(3, 5, 4, base=-1.0)),
        (ValueError, "rotary_dim", lambda: RotaryEmbedding(7)),
        (TypeError, "max_seq_len", lambda: RotaryEmbedding(8, "many")),
        (TypeError, "interleaved", lambda: RotaryEmbedding(8, interleaved=1)),
        (TypeError, "seq_len", lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 4, 8), seq_len=4.0)),
        (ValueError, "layout", lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 4, 8), layout="hbsd")),
        (TypeError, "x", lambda: RotaryEmbedding(8)([1.0])),
        (TypeError, "x", lambda: permute_rope_layout([1.0])),
        (TypeError, "head_dim", lambda: permute_rope_layout(torch.zeros(8), 4.0)),
        (ValueError, "head_dim", lambda: permute_rope_layout(torch.zeros(8), 3)),
        (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=6)),
        (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=3)),
        (ValueError, "dim", lambda: permute_rope_layout(torch.zeros(8), dim=1)),
    ],
)
def test_tables_module_and_layouts_refuse(error, name, call):
    with pytest.raises(error, match=f"^{name} "):
        call()


def test_module():
    module = RotaryEmbedding(12, max_seq_len=4)
    q, k = normal(2, 3, 9, 16).float(), normal(2, 1, 9, 16, seed=1).float()
    cos, sin = rope_tables(9, 12)
    assert torch.equal(module(q), apply_rope(q, cos, sin, rotary_dim=12))  # grown beyond max_seq_len
    both = module(q, k)
    assert torch.equal(both[0], module(q)) and torch.equal(both[1], apply_rope(k, cos, sin, rotary_dim=12))
    far = module(q, position_ids=torch.arange(100, 109), seq_len=109)
    assert torch.equal(far, apply_rope(q, *rope_tables(109, 12), rotary_dim=12, position_ids=torch.arange(100, 109)))
    rows = module.tables(1)[0].shape[0]
    assert module.tables(rows + 1)[0].shape[0] == 2 * rows and "max_seq_len=4" in repr(module)
    packed = q[0].transpose(0, 1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert torch.equal(
        module(packed, layout="thd", cu_seqlens=ends),
        apply_rope(packed, cos, sin, rotary_dim=12, layout="thd", cu_seqlens=ends),
    )
    assert torch.equal(module(module(q), inverse=True), apply_rope(module(q), cos, sin, rotary_dim=12, inverse=True))


def test_module_survives_casts_copies_and_inference_mode():
    x = normal(1, 2, 9, 8).float()
    module = RotaryEmbedding(8)
    with torch.inference_mode():
        expected = module(x).clone()
    y = x.clone().requires_grad_()
    module(y).sum().backward()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), RotaryEmbedding(8).half(), module.to(F16)):
        assert torch.equal(other(x), expected)
        assert other.tables(1)[0].dtype == F32 and not other.state_dict() and not list(other.buffers())
    assert module.to("meta")(x.to("meta")).device.type == "meta"
    assert torch.equal(module(x), expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_module_compiles_and_grows(dtype):
    torch._dynamo.reset()
    module = RotaryEmbedding(8, max_seq_len=4)
    compiled = torch.compile(lambda x: 2 * module(x), fullgraph=True, backend="aot_eager")
    for n in (3, 4, 9, 40, 7):
        x = normal(1, 2, n, 8).to(dtype)
        close(compiled(x), (2 * apply_rope(x, *rope_tables(n, 8))).double(), 1e-6)
    assert module.tables(1)[0].shape[0] >= 40


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, None), (16, 12), (6, 2)])
def test_permute_rope_layout(head_dim, rotary_dim):
    x, weight = normal(2, 3, 5, head_dim), normal(3 * head_dim, 7)
    order = {"rotary_dim": rotary_dim}
    there = permute_rope_layout(x, **order)
    assert torch.equal(permute_rope_layout(there, inverse=True, **order), x)
    columns = rotary_dim or head_dim
    assert torch.equal(there[..., 1], x[..., columns // 2]) and torch.equal(there[..., columns:], x[..., columns:])
    cos, sin = rope_tables(5, columns)
    rotated = apply_rope(x, cos, sin, **order)
    close(apply_rope(there, cos, sin, interleaved=True, **order), permute_rope_layout(rotated, **order), 1e-12)
    full = [torch.cat((t, t), -1) for t in (cos, sin)]
    wide = apply_rope(there, *(permute_rope_layout(t) for t in full), interleaved=True, rotary_dim=columns)
    close(wide, permute_rope_layout(rotated, **order), 1e-12)
    # Weights: permuting the rows of a projection permutes its outputs.
    hidden = normal(4, 7)
    outputs = (hidden @ permute_rope_layout(weight, head_dim, dim=0, **order).T).view(4, 3, head_dim)
    close(outputs, permute_rope_layout((hidden @ weight.T).view(4, 3, head_dim), **order), 1e-12)


# ---- refusals --------------------------------------------------------------------------------------------------------


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


IDS = torch.zeros(4, dtype=torch.int64)
ENDS = torch.tensor([0, 4], dtype=torch.int32)
REFUSALS = [
    (TypeError, "x", {"x": None}, "Tensor.*NoneType"),
    (TypeError, "cos", {"cos": 1.0}, "Tensor.*float"),
    (TypeError, "x", {"x": zeros(2, 3, 4, 8).int()}, "float16, bfloat16, float32.*int32"),
    (TypeError, "cos", {"cos": zeros(4, 4, dtype=F16)}, "x's dtype float32.*float16"),
    (TypeError, "sin", {"sin": zeros(4, 4, dtype=F16)}, "cos's dtype"),
    (TypeError, "interleaved", {"interleaved": 1}, "bool"),
    (TypeError, "inverse", {"inverse": None}, "bool"),
    (TypeError, "layout", {"layout": None}, "str.*NoneType"),
    (TypeError, "rotary_dim", {"rotary_dim": 8.0}, "int.*float"),
    (TypeError, "position_ids", {"position_ids": [0, 1, 2, 3]}, "Tensor.*list"),
    (TypeError, "position_ids", {"position_ids": IDS.float()}, "int32 or int64.*float32"),
    (TypeError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": [0, 4]}, "Tensor.*list"),
    (TypeError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS.long()}, "int32.*int64"),
    (TypeError, "out", {"out": 0}, "Tensor.*int"),
    (TypeError, "out", {"out": zeros(2, 3, 4, 8, dtype=F16)}, "float32.*float16"),
    (ValueError, "x", {"x": zeros(3, 4, 8)}, r"\(B, H, N, D\).*3 dimensions"),
    (ValueError, "x", {"layout": "thd", "cu_seqlens": ENDS}, r"\(T, H, D\).*4 dimensions"),
    (ValueError, "x", {"x": zeros(2, 3, 4, 1)}, "head dim of at least 2"),
    (ValueError, "layout", {"layout": "hbsd"}, "'bhsd', 'bshd', 'sbhd' or 'thd'.*'hbsd'"),
    (ValueError, "cos", {"cos": zeros(3, 4), "sin": zeros(3, 4)}, "x's 4 positions.*3 rows"),
    (ValueError, "cos", {"cos": zeros(4, 4).requires_grad_()}, "gradient"),
    (ValueError, "cos", {"cos": zeros(3, 4, 4), "sin": zeros(3, 4, 4)}, "leading 1 or B = 2"),
    (ValueError, "cos", {"cos": zeros(4, 9), "sin": zeros(4, 9)}, "D = 8.*9"),
    (ValueError, "cos", {"rotary_dim": 6}, "6 or rotary_dim / 2 = 3 columns.*4"),
    (ValueError, "sin", {"sin": zeros(4, 3)}, "cos's shape"),
    (ValueError, "rotary_dim", {"rotary_dim": 10}, "between 2 and D = 8.*10"),
    (ValueError, "rotary_dim", {"rotary_dim": 6, "position_ids": zeros(2, 2, 4).int()}, "multiple of 4.*6"),
    (ValueError, "position_ids", {"position_ids": IDS[:3]}, r"N = 4.*\(3,\)"),
    (ValueError, "position_ids", {"position_ids": zeros(3, 4).int()}, "B = 1 or 2"),
    (ValueError, "position_ids", {"position_ids": zeros(2, 3, 4).int()}, r"\(B, 2, N\)"),
    (ValueError, "position_ids", {"position_ids": IDS, "cu_seqlens": ENDS}, "None where cu_seqlens"),
    (ValueError, "cu_seqlens", {"cu_seqlens": ENDS}, "'thd'.*'bhsd'"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd"}, "given.*None"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS[:0]}, r"\(0,\)"),
    (ValueError, "cu_seqlens", {"x": zeros(4, 3, 8), "layout": "thd", "cu_seqlens": ENDS[None]}, r"\(1, 2\)"),
    (ValueError, "out", {"out": zeros(2, 3, 4, 6)}, "x's shape"),
    (ValueError, "out", {"out": zeros(2, 1, 4, 8).expand(2, 3, 4, 8)}, "expanded"),
    (ValueError, "out", {"x": zeros(2, 3, 4, 8).requires_grad_(), "out": zeros(2, 3, 4, 8)}, "x requires a gradient"),
    (ValueError, "cos", {"cos": zeros(4, 4).to("meta")}, "x's device cpu.*meta"),
    (ValueError, "position_ids", {"position_ids": IDS.to("meta")}, "x's device cpu.*meta"),
]


@pytest.mark.parametrize(("error", "name", "changes", "pattern"), REFUSALS)
def test_refusals(error, name, changes, pattern):
    arguments = {"x": zeros(2, 3, 4, 8), "cos": zeros(4, 4), "sin": zeros(4, 4)} | changes
    with pytest.raises(error, match=f"^{name} .*{pattern}"):
        apply_rope(**arguments)


@pytest.mark.parametrize(
    ("error", "name", "changes", "pattern"),
    [
        (TypeError, "k", {"k": None}, "Tensor.*NoneType"),
        (TypeError, "k", {"k": zeros(2, 1, 4, 8, dtype=F16)}, "q's dtype float32.*float16"),
        (TypeError, "v", {"v": zeros(2, 1, 4, 8, dtype=F16)}, "q's dtype float32.*float16"),
        (TypeError, "out", {"out": zeros(2, 1, 4, 8)}, "tuple of 2 tensors.*Tensor"),
        (TypeError, r"out\[1\]", {"out": (zeros(2, 3, 4, 8), None)}, "Tensor.*NoneType"),
        (ValueError, "out", {"out": (zeros(2, 3, 4, 8),)}, "2 tensors, for q, k, but holds 1"),
        (ValueError, "k", {"k": zeros(2, 1, 5, 8)}, "q's shape.*apart from the heads"),
        (ValueError, "k", {"k": zeros(2, 1, 4, 10)}, "q's shape"),
        (ValueError, "v", {"v": zeros(1, 1, 4, 8)}, "q's shape"),
        (ValueError, "k", {"k": zeros(1, 4, 8)}, "3 dimensions"),
    ],
)
def test_refusals_of_pairs(error, name, changes, pattern):
    arguments = {"q": zeros(2, 3, 4, 8), "k": zeros(2, 1, 4, 8), "cos": zeros(4, 4), "sin": zeros(4, 4)} | changes
    with pytest.raises(error, match=f"^{name} .*{pattern}"):
        apply_rope_qk(**arguments)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "factor": 4.0,
        "long_factor": [2.0 + i / 8 for i in range(8)], "original_max_position_embeddings": 32}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("seq_len", [20, 64, 200])
@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, YARN, LLAMA3, LONG],
    ids=lambda scaling: scaling["rope_type"] if scaling else "default",
)
def test_tables_of_a_hugging_face_config(scaling, seq_len):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from fused_rope_attn.integrations.transformers import rope_tables_from_config

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_scaling=scaling)
    cos, sin = rope_tables_from_config(config, seq_len)
    assert cos.shape == sin.shape == (seq_len, 8) and cos.dtype == F32
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(seq_len)[None])
    for mine, table in zip((cos, sin), theirs):
        torch.testing.assert_close(mine, table[0, :, :8].float(), rtol=1e-4, atol=1e-4)


def test_tables_of_other_models():
    """Partial rotation, parameters for each type of layer, and what nobody knows."""
    import transformers

    from fused_rope_attn.integrations.transformers import rope_tables_from_config

    glm = transformers.GlmConfig(hidden_size=64, num_attention_heads=4, head_dim=16, partial_rotary_factor=0.5)
    cos, _ = rope_tables_from_config(glm, 9)
    assert cos.shape == (9, 4)
    torch.testing.assert_close(cos, rope_tables(9, 8)[0], rtol=1e-5, atol=1e-5)
    gemma = transformers.Gemma3TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    for layer_type, base in (("sliding_attention", 10000.0), ("full_attention", 1000000.0)):
        if not isinstance(getattr(gemma, "rope_parameters", None), dict) or layer_type not in gemma.rope_parameters:
            break  # transformers 4
        cos, _ = rope_tables_from_config(gemma, 9, layer_type=layer_type)
        torch.testing.assert_close(cos, rope_tables(9, 16, base=base)[0], rtol=1e-5, atol=1e-5)
    glm.rope_parameters = glm.rope_scaling = {"rope_type": "sideways", "rope_theta": 1.0}
    with pytest.raises(ValueError, match="^config .*'sideways'"):
        rope_tables_from_config(glm, 9)


def test_the_rotation_is_the_reference_of_attention_too():
    """`reference.rotation` without positions is `reference.rotate`, which the attention is defined by."""
    from fused_rope_attn.rotation.reference import rotate

    x, (cos, sin) = normal(2, 3, 9, 16), rope_tables(9, 12)
    assert torch.equal(rotation(x, cos, sin, rotary_dim=12), rotate(x, cos, sin))
