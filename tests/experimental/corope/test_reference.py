"""Co-RoPE's reference against the definition written out."""

import math

import pytest
import torch

from fused_rope_attn.experimental import corope_attention
from fused_rope_attn.experimental.corope import CoRopeAttention, reference
from tests.support.corope import make, results
from tests.support.dtypes import F32, F64
from tests.support.marks import interpreted


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
    with torch.autocast("cpu", torch.bfloat16):
        low, exact = corope_attention(q, k, v), corope_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(low, corope_attention(*(x.bfloat16() for x in (q, k, v))), rtol=2e-2, atol=2e-2)
    assert exact.dtype == F64 and torch.equal(exact, corope_attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("function", [corope_attention, pytest.param(with_kernels, marks=interpreted)])
def test_derivatives_that_the_kernels_do_not_have_are_refused(function):
    q, k, v, _ = (x.requires_grad_() for x in make(1, 1, 1, 3, 32, F32))
    (dq,) = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^corope_attention: double backward"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match="^corope_attention: forward-mode differentiation"):
        torch.func.jvp(lambda q: corope_attention(q, k, v), (q.detach(),), (q.detach(),))
