"""Co-RoPE: its reference against the definition, and its kernels where random calls do not reach them."""

import itertools

import pytest
import torch

from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import CoRopeAttention, launch, reference
from tests.support.dtypes import BF16, F32, F64
from tests.support.marks import ignore_overflow, interpreted
from verification.testing import compare

pytestmark = ignore_overflow


def make(batch, heads_q, heads_kv, length, head_dim, dtype, device="cpu"):
    """q, k, v as views of (B, N, H, D), and do."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(batch, length, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for shape in shapes]


def results(function, inputs, dtype):
    """(o, dq, dk, dv) of a function of q, k and v, computed in ``dtype`` from (q, k, v, do)."""
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = function(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def assert_matches_float64(inputs, out, *, base=10000.0, scale=None):
    """(o, dq, dk, dv) have the inputs' dtype and are within the tolerance of float64."""
    dtype, scale = inputs[0].dtype, inputs[0].shape[-1] ** -0.5 if scale is None else scale

    def right(q, k, v):
        return reference.corope(q, k, v, base=base, softmax_scale=scale)

    tensors = zip(out, results(right, inputs, torch.float64), results(right, inputs, dtype))
    for name, (x, exact, eager) in zip(("o", "dq", "dk", "dv"), tensors):
        assert x.dtype == dtype
        found = compare(name, x, exact, eager, grad=name != "o", dtype=dtype)
        assert found.ok, found


def with_kernels(q, k, v):
    return CoRopeAttention.apply(q, k, v, 10000.0, 0.1)


def by_hand(q, k, v, base, scale):
    """The definition, one query at a time: q (HQ, N, D), k and v (HKV, N, D)."""
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


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, r"q must have shape \(B, HQ, N, D\)", {"q": torch.zeros(4, 5, 8)}),
        (ValueError, "k has 3 heads, but q's 4 heads", {"k": torch.zeros(1, 3, 5, 8), "v": torch.zeros(1, 3, 5, 8)}),
        (ValueError, "N = 5 of q", dict.fromkeys("kv", torch.zeros(1, 2, 6, 8))),
        (ValueError, "base must be finite and positive", {"base": -1.0}),
        (TypeError, "softmax_scale must be a float or None", {"softmax_scale": True}),
    ],
)
def test_refusals(error, match, change):
    arguments = {"q": torch.zeros(1, 4, 5, 8), "k": torch.zeros(1, 2, 5, 8), "v": torch.zeros(1, 2, 5, 8)} | change
    with pytest.raises(error, match=match):
        corope_attention(**arguments)


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
    assert_matches_float64(inputs, out, base=100.0, scale=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [((1, 16, 1, 600, 128), BF16), ((1, 2, 2, 4100, 64), F32)], ids=str)
def test_longer_than_random_calls(shape, dtype):
    """At 4K steps a float32 distance times a frequency would be 1e-4 off."""
    inputs = make(*shape, dtype, "cuda")
    assert_matches_float64(inputs, results(corope_attention, inputs, dtype))


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
