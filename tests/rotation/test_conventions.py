"""The conventions of docs/guides/rotation.md, each against an oracle of a few lines that follows its own library."""

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, rope_tables
from tests.support.dtypes import F64
from tests.support.marks import ignore_overflow
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow


def hold(ours, oracle, *xs, tolerance=1e-5):
    """Outputs and gradients of ``ours`` in float32 are those of ``oracle`` in float64."""
    mine, exact = ([x.to(dtype).requires_grad_() for x in xs] for dtype in (torch.float32, F64))
    outs, wanted = ((y,) if isinstance(y, torch.Tensor) else y for y in (ours(*mine), oracle(*exact)))
    dos = [normal(*out.shape, seed=7 + i) for i, out in enumerate(outs)]
    gradients = torch.autograd.grad(outs, mine, [do.float() for do in dos])
    for x, y in zip((*outs, *gradients), (*wanted, *torch.autograd.grad(wanted, exact, dos)), strict=True):
        assert_close(x.detach(), y.detach(), tolerance)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(length, dim, base=10000.0):
    return torch.arange(length, dtype=F64)[:, None] * base ** -(torch.arange(0, dim, 2, dtype=F64) / dim)


def transformer_engine(t, freqs, tensor_format="sbhd", cu_seqlens=None):
    """`apply_rotary_pos_emb` of Transformer Engine: freqs (s, 1, 1, d2), half layout, the tail passes through."""
    if tensor_format == "thd":
        ends = cu_seqlens.tolist()
        return torch.cat([transformer_engine(t[a:b, None], freqs)[:, 0] for a, b in zip(ends, ends[1:])])
    if tensor_format == "bshd":
        return transformer_engine(t.transpose(0, 1), freqs).transpose(0, 1)
    freqs = freqs[: t.shape[0]]
    turning, passing = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    return torch.cat((turning * freqs.cos() + rotate_half(turning) * freqs.sin(), passing), -1)


@pytest.mark.parametrize(
    ("layout", "shape", "ends"),
    [("sbhd", (9, 2, 3, 16), None), ("bshd", (2, 9, 3, 16), None), ("thd", (11, 3, 16), [0, 3, 3, 11])],
)
def test_transformer_engine_and_apex(layout, shape, ends):
    """Apex is "sbhd"."""
    freqs = torch.cat((angles(13, 10),) * 2, -1)[:, None, None]  # longer than the input
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    tables = [f(freqs).squeeze(1, 2).float() for f in (torch.cos, torch.sin)]
    hold(
        lambda t: apply_rope(t, *tables, layout=layout, cu_seqlens=ends),
        lambda t: transformer_engine(t, freqs, layout, ends),
        normal(*shape),
    )


def paddle(q, k, v, sin, cos, position_ids, use_neox_rotary_style, time_major, base):
    """`fused_rotary_position_embedding`: (B, S, H, D), tables (1, S, 1, D). Its "neox style" turns every two columns.
    The angles that it derives from the base give column i the frequency of i // 2, in both styles."""
    outs = []
    for x in (q, k, v):
        x = x.transpose(0, 1) if time_major else x
        length, dim = x.shape[1], x.shape[3]
        angle = angles(2 * length, dim, base).repeat_interleave(2, -1)
        c, s = (angle.cos(), angle.sin()) if cos is None else (cos[0, :, 0], sin[0, :, 0])
        rows = torch.arange(length)[None] if position_ids is None else position_ids
        c, s = c[rows][:, :, None], s[rows][:, :, None]
        x = x * c + (rotate_every_two(x) if use_neox_rotary_style else rotate_half(x)) * s
        outs.append(x.transpose(0, 1) if time_major else x)
    return outs


@pytest.mark.parametrize("every_two", [False, True])
@pytest.mark.parametrize(("time_major", "ids"), [(False, [[3, 0, 4, 2, 1], [4, 4, 0, 6, 9]]), (True, None)])
@pytest.mark.parametrize("given_tables", [False, True])
def test_paddle(every_two, time_major, ids, given_tables):
    ids = None if ids is None else torch.tensor(ids)
    angle = angles(10, 8, 77.0 if given_tables else 500.0)
    angle = torch.cat((angle, angle), -1) if given_tables and not every_two else angle.repeat_interleave(2, -1)
    cos, sin = angle.cos().float(), angle.sin().float()
    tables = (sin[None, :, None], cos[None, :, None]) if given_tables else (None, None)
    options = {"layout": "sbhd" if time_major else "bshd", "interleaved": every_two, "position_ids": ids}
    shape = (5, 2) if time_major else (2, 5)
    hold(
        lambda q, k, v: apply_rope_qk(q, k, cos, sin, v=v, **options),
        lambda q, k, v: paddle(q, k, v, *tables, ids, every_two, time_major, 500.0),
        *(normal(*shape, heads, 8, seed=heads) for heads in (4, 2, 1)),
    )


def oneflow(x, rotary_size, mode, position_ids, base):
    """`fused_apply_rotary_emb` for x (B, H, M, K), column by column; position_ids (B, 1|2, M), or the row's index."""
    ids = torch.arange(x.shape[2]).expand(x.shape[0], 1, -1) if position_ids is None else position_ids
    width = rotary_size // ids.shape[1]  # of the columns that share a position
    columns = list(x.unbind(-1))
    for i in range(rotary_size):
        section, j = divmod(i, width)
        if mode == "interval":
            partner, sign, pair = (i + 1, -1, j // 2) if j % 2 == 0 else (i - 1, 1, j // 2)
        else:
            half = width // 2
            partner, sign, pair = (i + half, -1, j) if j < half else (i - half, 1, j - half)
        angle = (ids[:, section].double() * base ** (-2 * pair / width))[:, None]
        columns[i] = x[..., i] * angle.cos() + sign * x[..., partner] * angle.sin()
    return torch.stack(columns, -1)


@pytest.mark.parametrize("mode", ["plane", "interval"])
@pytest.mark.parametrize(("sections", "x_layout", "layout"), [(0, "bhmk", "bhsd"), (1, "bmhk", "bshd"),
                                                              (2, "mbhk", "sbhd")])  # fmt: skip
def test_oneflow(mode, sections, x_layout, layout):
    ids = torch.randint(0, 14, (2, sections, 7), generator=torch.Generator().manual_seed(1)) if sections else None
    tables = rope_tables(14, 12 // max(sections, 1), base=300.0)
    options = {"rotary_dim": 12, "interleaved": mode == "interval", "layout": layout}
    options["position_ids"] = ids[:, 0] if sections == 1 else ids
    there, back = ["bhmk".index(axis) for axis in x_layout], [x_layout.index(axis) for axis in "bhmk"]
    hold(
        lambda x: apply_rope(x, *tables, **options),
        lambda x: oneflow(x.permute(back), 12, mode, ids, 300.0).permute(there),
        normal(2, 3, 7, 16).permute(there).contiguous(),
    )


@pytest.mark.parametrize("input_pos", [None, torch.tensor([[0, 1, 2, 10, 11], [7, 6, 5, 4, 3]])])
def test_torchtune_and_metal(input_pos):
    """`RotaryPositionalEmbeddings.forward(x (B, S, H, D), input_pos (B, S))`: interleaved, computed in float32. Metal's
    kernels do the same on (S, B, H, D) with tables (S, D/2)."""
    cache = torch.stack((angles(12, 16).cos(), angles(12, 16).sin()), -1)

    def torchtune(x):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        rope = (cache[: x.shape[1]][None] if input_pos is None else cache[input_pos]).unsqueeze(2)
        first = pairs[..., 0] * rope[..., 0] - pairs[..., 1] * rope[..., 1]
        second = pairs[..., 1] * rope[..., 0] + pairs[..., 0] * rope[..., 1]
        return torch.stack((first, second), -1).flatten(3)

    module, x = RotaryEmbedding(16, max_seq_len=12, interleaved=True), normal(2, 5, 3, 16)
    hold(lambda x: module(x, layout="bshd", position_ids=input_pos), torchtune, x)
    options = {"layout": "sbhd", "interleaved": True, "position_ids": input_pos}
    metal = lambda x: torchtune(x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
    hold(lambda x: apply_rope(x, *rope_tables(12, 16), **options), metal, x.transpose(0, 1).contiguous())
