"""Co-RoPE: its reference against the definition, and its kernels where random calls do not reach them."""

import itertools

import pytest
import torch

from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import CoRopeAttention, launch, reference
from tests.support.calls import assert_right
from tests.support.dtypes import BF16, F32, F64
from tests.support.marks import cases, ignore_overflow, interpreted
from tests.support.operators import assert_close
from verification.attention import CoRopeCheck
from verification.calls import Machine

pytestmark = ignore_overflow


def make(batch, heads_q, heads_kv, length, head_dim, dtype, device="cpu"):
    """q, k, v as views of (B, N, H, D), and do."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(batch, length, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for shape in shapes]


def results(function, inputs, dtype):
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = function(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def with_kernels(q, k, v):
    return CoRopeAttention.apply(q, k, v, 10000.0, 0.1)


def by_hand(q, k, v, base, scale):
    group, half, o = len(q) // len(k), q.shape[2] // 2, torch.empty_like(q)
    omega = base ** (-torch.arange(half, dtype=F64) / half)
    for h, i in itertools.product(range(len(q)), range(q.shape[1])):
        keys, values, leader = k[h // group, : i + 1], v[h // group, : i + 1], q[h // group * group, i]
        mileage = torch.sigmoid(scale * keys @ leader).cumsum(0)
        angle = (mileage[-1] - mileage)[:, None] * omega
        (a, b), (c, d) = q[h, i].split(half), keys.split(half, 1)
        scores = ((a * c + b * d) * angle.cos() - (b * c - a * d) * angle.sin()).sum(1)
        o[h, i] = torch.softmax(scale * scores, 0) @ values
    return o


def test_reference_is_the_definition():
    q, k, v, _ = make(1, 6, 2, 9, 8, F64)
    expected = by_hand(q[0], k[0], v[0], 50.0, 0.4)
    torch.testing.assert_close(corope_attention(q, k, v, base=50.0, softmax_scale=0.4)[0], expected)


def test_reference_gradients_and_chunks(monkeypatch):
    q, k, v, _ = (x.requires_grad_() for x in make(1, 3, 1, 4, 4, F64))
    whole = corope_attention(q, k, v, base=30.0)
    monkeypatch.setattr(reference, "_CHUNK_ANGLES", 16)  # two rows in a chunk
    torch.testing.assert_close(corope_attention(q, k, v, base=30.0), whole, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *x: corope_attention(*x, base=30.0), (q, k, v))


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_in_nothing_out(batch, length):
    q, k, v, do = make(batch, 2, 1, length, 32, F32)
    for function in (corope_attention, with_kernels):
        assert [x.shape for x in results(function, (q, k, v, do), F32)] == [x.shape for x in (q, q, k, v)]


def test_autocast():
    q, k, v, _ = make(1, 2, 1, 6, 8, F32)
    with torch.autocast("cpu", BF16):
        low, exact = corope_attention(q, k, v), corope_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(low, corope_attention(*(x.bfloat16() for x in (q, k, v))), rtol=2e-2, atol=2e-2)
    assert torch.equal(exact, corope_attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("function", [corope_attention, pytest.param(with_kernels, marks=interpreted)])
def test_derivatives_that_the_kernels_do_not_have_are_refused(function):
    q, k, v, _ = (x.requires_grad_() for x in make(1, 1, 1, 3, 32, F32))
    (dq,) = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^corope_attention: double backward"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match="^corope_attention: forward-mode differentiation"):
        torch.func.jvp(lambda q: corope_attention(q, k, v), (q.detach(),), (q.detach(),))


@interpreted
def test_its_gradients_are_not_deterministic():
    """Like PyTorch's own operators: an error of the backward pass, or a warning if that was asked for."""
    q, k, v, _ = (x.requires_grad_() for x in make(1, 1, 1, 3, 32, F32))
    o = with_kernels(q, k, v).sum()
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="corope_attention has no deterministic kernels"):
            o.backward(retain_graph=True)
        assert q.grad is None
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="corope_attention has no deterministic kernels"):
            o.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert q.grad is not None


@interpreted
def test_more_heads_than_a_program_holds():
    """Chunks of a group add their shares of the distance gradients, which are linear, to the same leader."""
    options = {"base": 100.0, "softmax_scale": 0.2, "config": launch.CoRopeConfig(16, 16, heads=2, num_warps=4)}
    q, k, v, do = inputs = make(1, 3, 1, 19, 32, F32)
    o, *stats = launch.corope_forward(q, k, v, **options)
    out = o, *launch.corope_backward(do, q, k, v, o, *stats, **options)
    expected = results(lambda q, k, v: reference.corope(q, k, v, base=100.0, softmax_scale=0.2), inputs, F64)
    assert_close((x.double() for x in out), expected)


@pytest.mark.gpu
@cases(CoRopeCheck(1, 16, 1, 600, 600, 128, dtype=BF16), CoRopeCheck(1, 2, 2, 4100, 4100, 64, dtype=F32))
def test_longer_than_random_calls(case):
    """At 4K steps a float32 distance times a frequency would be 1e-4 off."""
    assert_right(case, Machine.of("cuda"))


@pytest.mark.gpu
def test_memory():
    """At 8K positions, too, little more than inputs, output and gradients."""
    for length, most in ((1024, 100 << 20), (8192, 800 << 20)):
        *leaves, do = (x.requires_grad_() for x in make(1, 32, 8, length, 128, BF16, "cuda"))
        for _ in range(2):  # the second time nothing is compiled
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            corope_attention(*leaves).backward(do)
            taken = torch.cuda.max_memory_allocated() - before
        assert taken <= most and all(bool(x.grad.isfinite().all()) for x in leaves)
