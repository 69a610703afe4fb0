"""Co-RoPE: its reference against the definition, and its kernels where random calls do not reach them."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import CoRopeAttention, kernels, launch, reference
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
    """The definition, one number at a time: q (HQ, N, D), k and v (HKV, N, D), nested lists."""
    group, half = len(q) // len(k), len(q[0][0]) // 2

    def dot(x, y):
        return sum(a * b for a, b in zip(x, y))

    o = []
    for h in range(len(q)):
        keys, values, leader = k[h // group], v[h // group], q[h // group * group]
        rows = []
        for i in range(len(keys)):
            z = [1 / (1 + math.exp(-scale * dot(leader[i], keys[j]))) for j in range(i + 1)]
            a = [sum(z[: j + 1]) for j in range(i + 1)]
            scores = []
            for j in range(i + 1):
                x, y, score = q[h][i], keys[j], 0.0
                for d in range(half):
                    angle = (a[i] - a[j]) * base ** (-2 * d / (2 * half))
                    score += (x[d] * y[d] + x[d + half] * y[d + half]) * math.cos(angle)
                    score -= (x[d + half] * y[d] - x[d] * y[d + half]) * math.sin(angle)
                scores.append(math.exp(scale * score))
            rows.append([dot(scores, column) / sum(scores) for column in zip(*values[: i + 1])])
        o.append(rows)
    return o


def test_reference_is_the_definition():
    q, k, v, _ = make(1, 6, 2, 9, 8, F64)
    expected = torch.tensor(by_hand(q[0].tolist(), k[0].tolist(), v[0].tolist(), 50.0, 0.4), dtype=F64)
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
        (TypeError, "q must be float16", {"q": torch.zeros(1, 4, 5, 8, dtype=torch.int32)}),
        (ValueError, r"q must have shape \(B, HQ, N, D\)", {"q": torch.zeros(4, 5, 8)}),
        (ValueError, "even head dim", dict.fromkeys("qkv", torch.zeros(1, 4, 5, 7))),
        (ValueError, "k has 3 heads, but q's 4 heads", {"k": torch.zeros(1, 3, 5, 8), "v": torch.zeros(1, 3, 5, 8)}),
        (ValueError, "N = 5 of q", dict.fromkeys("kv", torch.zeros(1, 2, 6, 8))),
        (ValueError, "base must be finite and positive", {"base": -1.0}),
        (TypeError, "softmax_scale must be a float or None", {"softmax_scale": True}),
        (ValueError, "softmax_scale must be finite", {"softmax_scale": math.inf}),
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


@triton.jit
def write_phases(out_ptr, mileage_ptr, local_ptr, multiples_ptr, revolutions_ptr, D: tl.constexpr, ROWS: tl.constexpr):
    """cos and sin of every row's distance (mileage in fixed point plus local steps) at each of 32 frequencies."""
    rows, pairs, key = tl.arange(0, ROWS), tl.arange(0, 32), tl.arange(0, 1)
    distance = kernels.distances_of(tl.load(mileage_ptr + rows), tl.load(local_ptr + rows)[:, None])
    inputs = kernels.CoRopeInputs(None, None, None, multiples_ptr, revolutions_ptr)
    cos, sin = kernels.distance_phases(pairs, distance, inputs, D)
    out = out_ptr + (rows[:, None, None] * (D // 2) + pairs[None, :, None]) * 2 + key
    exists = pairs[None, :, None] < D // 2
    tl.store(out, cos, mask=exists)
    tl.store(out + 1, sin, mask=exists)


@interpreted
@pytest.mark.parametrize("base", [10000.0, 0.3])
def test_phases_stay_exact(base):
    """At 8K steps, and at a million, a float32 distance times a frequency would be 2e-4 and 6e-2 off."""
    head_dim, rows = 62, 32
    generator = torch.Generator().manual_seed(0)
    largest = torch.tensor([8192.0, 2.0**20], dtype=F64).repeat(rows // 2)
    mileage = (torch.rand(rows, generator=generator, dtype=F64) * largest * 2**23).to(torch.int64)
    mileage[0], mileage[1] = 0, -3  # what rounding differences of two passes can leave at the diagonal
    local = torch.rand(rows, generator=generator) * 64
    out = torch.zeros(rows, head_dim // 2, 2)
    tables = launch.frequency_tables(base, head_dim, torch.device("cpu"))
    write_phases[(1,)](out, mileage, local, *tables, D=head_dim, ROWS=rows)
    omega = base ** -(torch.arange(head_dim // 2, dtype=F64) / (head_dim // 2))
    angle = (mileage.double() / 2**23 + local.double())[:, None] * omega
    expected = torch.stack((angle.cos(), angle.sin()), -1)
    # The rest: local times the frequency, two roundings of at most T * 2**-24 revolutions, and the evaluation.
    revolutions = 1.0 + 64 * float(omega.max()) / (2 * math.pi)
    limit = 2 * math.pi * 2 * revolutions * 2.0**-24 + 6e-7
    assert float((out.double() - expected).abs().max()) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [((1, 16, 1, 600, 128), BF16), ((1, 2, 2, 4100, 64), F32)], ids=str)
def test_longer_than_random_calls(shape, dtype):
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
