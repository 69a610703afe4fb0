"""Rotation alone on a GPU: bfloat16 against float64, in every convention's layout, and what only a device has."""

import math

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, apply_rope_qk, rope_tables
from tests.support.gpu import skip_below_free_memory
from verification.testing import compare

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def eager(x, cos, sin, *, rotary_dim, interleaved=False, inverse=False, rows=None, compute=torch.float64):
    """x (B, H, N, D) with half-width tables (S, R/2), the token's row of them or rows (B, N), in dtype ``compute``."""
    y, (c, s) = x.to(compute), (t.to(compute) for t in (cos, sin))
    if rows is None:
        c, s = c[: x.shape[2]], s[: x.shape[2]]
    else:
        c, s = c[rows][:, None], s[rows][:, None]
    s = -s if inverse else s
    turning, passing = y[..., :rotary_dim], y[..., rotary_dim:]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned, passing), -1)


def hold(name, out, x, cos, sin, **options):
    """``out`` (B, H, N, D) within the contract's tolerance, on every row."""
    ref64 = eager(x, cos, sin, **options)
    near = eager(x, cos, sin, compute=F32, **options).to(x.dtype)
    result = compare(name, out, ref64, near, grad=name[0] == "d", dtype=x.dtype)
    assert result.ok, (options, result)


AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # from (B, H, N, D)
BACK = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "random_tables"), [(128, 128, False), (128, 32, False), (80, 80, True), (72, 20, True)]
)
def test_against_float64(head_dim, rotary_dim, random_tables, layout, interleaved, dtype):
    """Transformer Engine, Apex, torchtune, Metal and Paddle: layouts, styles, tails; q, k and v in one launch."""
    length = 333
    cos, sin = rope_tables(400, rotary_dim, device="cuda")
    if random_tables:
        cos, sin = normal(2, 400, rotary_dim // 2, dtype=F32, seed=5)
    rows = torch.randint(0, 400, (2, length), device="cuda") if layout == "bshd" else None
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    back = BACK[layout]
    xs = [
        normal(2, heads, length, head_dim, dtype=dtype, seed=heads).permute(AXES[layout]).contiguous().requires_grad_()
        for heads in (6, 2, 1)
    ]
    for count in (1, 2, 3):
        given, more = xs[:count], {"layout": layout, "position_ids": rows}
        if count == 1:
            outs = (apply_rope(*given, cos, sin, **options, **more),)
        else:
            outs = apply_rope_qk(*given[:2], cos, sin, v=given[2] if count == 3 else None, **options, **more)
        dos = [torch.randn_like(out) for out in outs]
        gradients = torch.autograd.grad(outs, given, dos)
        for x, out, do, dx in zip(given, outs, dos, gradients):
            hold("o", out.detach().permute(back), x.detach().permute(back), cos, sin, rows=rows, **options)
            hold("dx", dx.permute(back), do.permute(back), cos, sin, rows=rows, inverse=True, **options)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_two_position_ids(interleaved, dtype):
    """OneFlow's plane and interval modes in two dimensions."""
    cos, sin = rope_tables(50, 48, device="cuda")
    ids = torch.randint(0, 50, (2, 2, 200), device="cuda")
    x = normal(2, 3, 200, 128, dtype=dtype)
    out = apply_rope(x, cos, sin, rotary_dim=96, interleaved=interleaved, position_ids=ids)
    assert torch.equal(out[..., 96:], x[..., 96:])
    for section in (0, 1):
        part = slice(48 * section, 48 * section + 48)
        hold("o", out[..., part], x[..., part], cos, sin, rotary_dim=48, interleaved=interleaved, rows=ids[:, section])


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed(interleaved):
    ends = [0, 0, 1, 300, 300, 1000]
    cos, sin = rope_tables(700, 128, device="cuda")
    x = normal(1100, 4, 128).requires_grad_()
    options = {"layout": "thd", "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device="cuda")}
    out = apply_rope(x, cos, sin, interleaved=interleaved, **options)
    for a, b in zip(ends, ends[1:]):
        if a < b:
            part = x.detach()[None, a:b].transpose(1, 2)
            hold("o", out.detach()[None, a:b].transpose(1, 2), part, cos, sin, rotary_dim=128, interleaved=interleaved)
    assert torch.equal(out[1000:], x[1000:])
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert dx.isfinite().all() and bool((dx[1000:] == 1).all())


@pytest.mark.parametrize("interleaved", [False, True])
def test_full_width_tables(interleaved):
    """Both columns of a pair count; where they agree it is the half-width result, bit by bit."""
    x = normal(2, 4, 100, 128)
    cos, sin = rope_tables(100, 128, device="cuda")
    full = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    assert torch.equal(apply_rope(x, *full, interleaved=interleaved), apply_rope(x, cos, sin, interleaved=interleaved))
    cos, sin = normal(2, 100, 128, dtype=F32, seed=3)
    y = x.double()
    if interleaved:
        turned = torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-y[..., 64:], y[..., :64]), -1)
    torch.testing.assert_close(
        apply_rope(x, cos, sin, interleaved=interleaved).double(), y * cos + turned * sin, rtol=8e-3, atol=3e-2
    )


def test_strides_and_out():
    cos, sin = rope_tables(100, 128, device="cuda")
    packed = normal(2, 100, 3, 4, 128)  # q, k and v of one projection
    q = packed[:, :, 0]
    expected = apply_rope(q.contiguous(), cos, sin, layout="bshd")
    assert torch.equal(apply_rope(q, cos, sin, layout="bshd"), expected)
    assert torch.equal(apply_rope(q.transpose(1, 2), cos, sin), expected.transpose(1, 2))
    odd = torch.empty(2, 100, 4, 131, device="cuda", dtype=BF16)[..., 1:129].copy_(q)
    assert torch.equal(apply_rope(odd, cos, sin, layout="bshd"), expected)
    untouched = packed[:, :, 1:].clone()
    apply_rope(q, cos, sin, layout="bshd", out=q)
    assert torch.equal(q, expected) and torch.equal(packed[:, :, 1:], untouched)
    x = normal(2, 4, 100, 128).requires_grad_()
    apply_rope(x, cos, sin).sum().backward()  # an expanded gradient
    ones = torch.ones_like(x)
    hold("dx", x.grad, ones.detach(), cos, sin, rotary_dim=128, inverse=True)


def test_positions_without_a_row_give_nan():
    cos, sin = rope_tables(4, 128, device="cuda")
    ids = torch.tensor([0, 3, 4, -1, 2**40], device="cuda")
    x = normal(1, 2, 5, 128)
    out = apply_rope(x, cos, sin, position_ids=ids)
    assert torch.equal(out[:, :, :2], apply_rope(x[:, :, :2], cos, sin, position_ids=ids[:2]))
    assert out[:, :, 2:].isnan().all()


def test_no_synchronisation():
    cos, sin = rope_tables(64, 128, device="cuda")
    q, k = normal(2, 4, 64, 128).requires_grad_(), normal(2, 2, 64, 128).requires_grad_()
    ids, module = torch.arange(64, device="cuda"), RotaryEmbedding(128)
    apply_rope_qk(q, k, cos, sin, position_ids=ids), module(q, k)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = apply_rope_qk(q, k, cos, sin, position_ids=ids)
        sum(out.sum() for out in (*outs, *module(q, k))).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_capture_and_streams():
    cos, sin = rope_tables(64, 128, device="cuda")
    x = normal(2, 4, 64, 128)
    expected = apply_rope(x, cos, sin)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(apply_rope(x, cos, sin), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply_rope(x, cos, sin)
    out.fill_(math.nan)
    x.copy_(normal(2, 4, 64, 128, seed=9))
    graph.replay()
    assert torch.equal(out, apply_rope(x, cos, sin))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device():
    cos, sin = (t.to("cuda:1") for t in rope_tables(64, 128))
    x = torch.randn(2, 4, 64, 128, device="cuda:1", dtype=BF16)
    assert torch.equal(
        apply_rope(x, cos, sin).cpu(), apply_rope(x.to("cuda:0"), *rope_tables(64, 128, device="cuda:0")).cpu()
    )


@pytest.mark.unpoisoned
def test_compile():
    torch._dynamo.reset()
    module = RotaryEmbedding(128, interleaved=True)
    compiled = torch.compile(lambda q, k: module(2 * q, k), fullgraph=True)
    for n in (60, 64, 100):
        q, k = normal(2, 4, n, 128).requires_grad_(), normal(2, 1, n, 128).requires_grad_()
        got, expected = compiled(q, k), module(2 * q, k)
        for x, y in zip(got, expected):
            torch.testing.assert_close(x, y)
        wanted = torch.autograd.grad(sum(y.float().sum() for y in expected), (q, k))
        for x, y in zip(torch.autograd.grad(sum(y.float().sum() for y in got), (q, k)), wanted):
            torch.testing.assert_close(x, y)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_more_than_two_to_the_31_elements(layout):
    """The elements past the 2**31st, and strides inside a tile that pass it."""
    skip_below_free_memory(20 << 30)
    shape = (2, 33, 2**18, 128) if layout == "bhsd" else (2, 2**18, 33, 128)
    x = torch.empty(shape, device="cuda", dtype=BF16)
    assert x.numel() > 2**31
    x.normal_()
    cos, sin = rope_tables(2**18, 128, device="cuda")
    out = apply_rope(x, cos, sin, layout=layout)
    last = x[-1, -1:, -64:] if layout == "bhsd" else x[-1, -64:, -1:].transpose(0, 1)
    got = out[-1, -1:, -64:] if layout == "bhsd" else out[-1, -64:, -1:].transpose(0, 1)
    hold("o", got[None], last[None], cos[-64:], sin[-64:], rotary_dim=128)
    del x, out, last, got
    torch.cuda.empty_cache()
    storage = torch.empty(2**32 + 2**20, dtype=BF16, device="cuda")
    for size, strides in (((1, 4, 3, 128), (0, 2**30, 128, 1)), ((1, 2, 4, 128), (0, 128, 2**30, 1))):
        far = storage.as_strided(size, strides)
        far.copy_(normal(*size))
        assert torch.equal(apply_rope(far, cos, sin), apply_rope(far.contiguous(), cos, sin))


def test_reruns_are_bitwise_equal():
    cos, sin = rope_tables(500, 128, device="cuda")
    q, k = normal(2, 32, 500, 128), normal(2, 8, 500, 128)
    first = apply_rope_qk(q, k, cos, sin)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(apply_rope_qk(q, k, cos, sin), first))


def test_a_short_rotation_with_a_long_tail():
    """Two sections of one pair each, and 124 columns that pass through, which a tile holds as well."""
    shape, generator = (2, 310, 12, 128), torch.Generator("cuda").manual_seed(3)
    q, k = (normal(*shape, dtype=F32, seed=seed).requires_grad_() for seed in (1, 2))
    cos, sin = torch.randn(2, 408, 1, generator=generator, device="cuda").unbind()
    ids = torch.randint(0, 408, (2, 2, 310), generator=generator, device="cuda")
    options = {"rotary_dim": 4, "interleaved": True, "layout": "bshd", "position_ids": ids}
    do = torch.full((2, 310, 12, 256), math.nan, device="cuda")[..., :128].copy_(normal(*shape, dtype=F32, seed=4))
    rotated = apply_rope_qk(q, k, cos, sin, **options)
    gradients = torch.autograd.grad(rotated, (q, k), (do, do))
    for x, out in ((q, rotated[0]), (k, rotated[1]), *((do, dx) for dx in gradients)):
        assert torch.equal(out[..., 4:], x[..., 4:]) and bool(out.isfinite().all())
