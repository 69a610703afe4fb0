"""Norm and rotation on a GPU: every dtype against float64 at the head dims of models, and what only a device has."""

import pytest
import torch

from fused_rope_attn import apply_rope_qk, rope_tables
from verification.testing import compare, run_rotation_reference

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def leaves_of(head_dim, dtype, weight_dtype, length=333):
    """q, k (B, N, H, D) and both weights."""
    xs = [normal(2, length, heads, head_dim, dtype=dtype, seed=heads) for heads in (6, 2)]
    weights = [normal(head_dim, dtype=weight_dtype, seed=3 + i) for i in range(2)]
    return [x.requires_grad_() for x in (*xs, *weights)]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "eps", "offset"),
    [(64, 64, 1e-6, 0.0), (128, 128, 1e-6, 0.0), (256, 256, 1e-6, 1.0), (96, 32, 1e-5, 0.0), (80, 80, 0.0, 1.0)],
)
def test_against_float64(head_dim, rotary_dim, eps, offset, interleaved, dtype):
    cos, sin = rope_tables(400, rotary_dim, device="cuda")
    weight_dtype = dtype if interleaved else F32
    leaves = leaves_of(head_dim, dtype, weight_dtype)
    q, k, q_norm, k_norm = leaves
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    norm = {"norm_eps": eps, "norm_offset": offset}
    outs = apply_rope_qk(q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, layout="bshd", **norm, **options)
    dos = [normal(*out.shape, dtype=dtype, seed=8 + i) for i, out in enumerate(outs)]
    gradients = torch.autograd.grad(outs, leaves, dos)
    for i, x in enumerate((q, k)):
        given = x.detach().transpose(1, 2), dos[i].transpose(1, 2), cos, sin
        ref64, eager = (
            run_rotation_reference(*given, wide, weight=leaves[2 + i], **norm, **options)
            for wide in (torch.float64, None)
        )
        for name, found, exact, near, kind in (
            ("o", outs[i].detach().transpose(1, 2), ref64.y, eager.y, dtype),
            ("dx", gradients[i].transpose(1, 2), ref64.dx, eager.dx, dtype),
            ("dweight", gradients[2 + i][None], ref64.dweight[None], eager.dweight[None], weight_dtype),
        ):
            held = compare(name, found, exact, near, grad=name != "o", dtype=kind)
            assert held.ok, held


def test_reruns_are_bitwise_equal():
    cos, sin = rope_tables(2000, 128, device="cuda")
    leaves = leaves_of(128, BF16, F32, 2000)
    q, k, q_norm, k_norm = leaves

    def run():
        outs = apply_rope_qk(q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, layout="bshd")
        return *outs, *torch.autograd.grad(sum(out.float().square().sum() for out in outs), leaves)

    first = run()
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(run(), first))


def test_graph_capture():
    cos, sin = rope_tables(333, 128, device="cuda")
    leaves = leaves_of(128, BF16, BF16)
    q, k, q_norm, k_norm = leaves

    def run():
        outs = apply_rope_qk(q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, layout="bshd")
        return *outs, *torch.autograd.grad(outs, leaves, [x.detach() for x in (q, k)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for x in found:
        x.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.mark.unpoisoned
def test_compile():
    torch._dynamo.reset()
    cos, sin = rope_tables(100, 128, device="cuda")

    def run(q, k, q_norm, k_norm):
        return apply_rope_qk(
            2 * q, k, cos, sin, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, norm_offset=1.0, layout="bshd"
        )

    compiled = torch.compile(run, fullgraph=True)
    for length in (60, 64, 100):
        leaves = leaves_of(128, BF16, F32, length)
        got, expected = compiled(*leaves), run(*leaves)
        wanted = torch.autograd.grad(sum(y.float().sum() for y in expected), leaves)
        found = torch.autograd.grad(sum(y.float().sum() for y in got), leaves)
        for x, y in zip((*got, *found), (*expected, *wanted)):
            torch.testing.assert_close(x, y)
