"""The conventions of docs/guides/rotation.md, each against an oracle of a few lines that follows its own library."""

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk
from tests.support.marks import ignore_overflow
from tests.support.rotation import (
    TOLERANCE,
    angles,
    compare_with_float64,
    dtypes,
    normal,
    rotate_every_two,
    rotate_half,
)

pytestmark = ignore_overflow


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
    compare_with_float64(
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
    compare_with_float64(lambda t: apply_rope(t, cos, sin, layout="sbhd"), oracle, [normal(9, 2, 3, 16)], dtype)


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

    compare_with_float64(
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
    compare_with_float64(
        lambda x: apply_rope(
            x,
            cos,
            sin,
            rotary_dim=rotary_size,
            interleaved=mode == "interval",
            layout=layout,
            position_ids=None if position_ids is None else position_ids[:, 0] if sections == 1 else position_ids,
        ),
        lambda x: oneflow(
            x.permute(*(axes.index(i) for i in range(4))), rotary_size, mode, position_ids, 300.0
        ).permute(axes),
        [normal(2, 3, 7, 16).permute(axes).contiguous()],
        dtype,
    )


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
    compare_with_float64(
        lambda x: module(x, layout="bshd", position_ids=input_pos), oracle, x, dtype, max(1e-6, TOLERANCE[dtype])
    )


@dtypes
def test_metal(dtype):
    """Interleaved on (S, B, H, D) with tables (S, D/2)."""
    angle = angles(6, 16)

    def oracle(x):
        first, second = x[..., ::2], x[..., 1::2]
        c, s = angle.cos()[:, None, None], angle.sin()[:, None, None]
        return torch.stack((first * c - second * s, first * s + second * c), -1).reshape(x.shape)

    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    compare_with_float64(
        lambda x: apply_rope(x, cos, sin, layout="sbhd", interleaved=True), oracle, [normal(6, 2, 3, 16)], dtype
    )
