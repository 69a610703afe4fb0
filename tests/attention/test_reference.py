"""The eager reference: against loops in float64, and its gradients. test_numbers.py has NaN and infinity."""

import math
import random

import pytest
import torch

from tests.support.dtypes import F16, F64, int32
from tests.support.rotation import normal
from verification.testing import reference_attention


def tables(rows, rotary_dim, batch=()):
    """Tables that are not unit-norm."""
    shape = *batch, rows, rotary_dim // 2
    angle, radius = 3.0 * normal(*shape, seed=7), 0.5 + normal(*shape, seed=8).abs()
    return radius * angle.cos(), radius * angle.sin()


def qkv(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=8, dtype=F64):
    sizes = ((heads_q, len_q), (heads_kv, len_k), (heads_kv, len_k))
    return [normal(batch, *size, head_dim, seed=i + 1, dtype=dtype) for i, size in enumerate(sizes)]


def complex_rotation(x, cos, sin, interleaved):
    """One vector x (D,): the pair (a, b) is the number a + ib, turned by cos + i sin. Plain Python numbers."""
    half = len(cos)
    out = [float(value) for value in x]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(out[first], out[second]) * complex(float(cos[i]), float(sin[i]))
        out[first], out[second] = turned.real, turned.imag
    return out


def loop_attention(q, k, v, cos, sin, causal, *, softmax_scale, interleaved=False, window=None, softcap=0.0,
                   sinks=None, **bounds):  # fmt: skip
    """The contract, sentence by sentence, one score at a time. cos and sin: (S, R/2) or (B, S, R/2)."""
    batch, heads_q, len_q, _ = q.shape
    group, len_k = heads_q // k.shape[1], k.shape[2]
    o, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=F64)
    max_logit = torch.full(q.shape[:2], -math.inf, dtype=F64)
    left, right = [math.inf if side == -1 else side for side in window or (-1, -1)]

    def bound(name, default, *index):
        x = bounds.get(name)
        return default if x is None else int(x[index[0] % len(x)][index[1:]])

    for b in range(batch):
        cos_b, sin_b = (cos[b], sin[b]) if cos.ndim == 3 else (cos, sin)
        start, length = max(bound("kv_starts", 0, b), 0), min(max(bound("kv_lens", len_k, b), 0), len_k)
        for h, i in ((h, i) for h in range(heads_q) for i in range(len_q)):
            position = length - len_q + i
            if position < 0:
                continue
            query = complex_rotation(q[b, h, i], cos_b[position], sin_b[position], interleaved)
            scores = {}
            for j in range(start, length):
                in_window = position - left <= j <= position + (0 if causal else right) and j <= position + right
                if not in_window or not bound("query_starts", 0, b, j) <= i < bound("query_ends", len_q, b, j):
                    continue
                key = complex_rotation(k[b, h // group, j], cos_b[j], sin_b[j], interleaved)
                score = softmax_scale * sum(x * y for x, y in zip(query, key))
                scores[j] = softcap * math.tanh(score / softcap) if softcap else score
            if not scores:
                continue
            max_logit[b, h] = max(float(max_logit[b, h]), *scores.values())
            logits = list(scores.values()) + ([float(sinks[h])] if sinks is not None else [])
            top = max(logits)
            total = sum(math.exp(logit - top) for logit in logits)
            lse[b, h, i] = top + math.log(total)
            for j, score in scores.items():
                o[b, h, i] += math.exp(score - top) / total * v[b, h // group, j]
    return o, lse, max_logit


@pytest.mark.parametrize("seed", range(60))
def test_against_loops(seed):
    draw = random.Random(seed)
    batch, heads_kv, len_k, causal = draw.choice([1, 2]), draw.choice([1, 2]), draw.randint(1, 7), draw.random() < 0.5
    len_q = draw.randint(1, len_k + 3)
    q, k, v = qkv(batch, heads_kv * draw.choice([1, 2, 3]), heads_kv, len_q, len_k)
    rotary_dim, shared = draw.choice([2, 6, 8]), draw.random() < 0.5
    cos, sin = tables(len_k + draw.choice([0, 2]), rotary_dim, () if shared else (batch,))
    options = {"softmax_scale": q.shape[3] ** -0.5, "interleaved": draw.random() < 0.5}
    if draw.random() < 0.5:
        options["window"] = draw.choice([(0, 0), (2, 0), (-1, 1), (1, -1), (2, 1), (-1, -1)])
    if draw.random() < 0.5:
        options |= {"softmax_scale": draw.choice([0.0, -0.7, 3.0]), "softcap": draw.choice([0.0, 0.5, 30.0])}
    if draw.random() < 0.3:
        options["sinks"] = torch.tensor([0.5, -1.0, 3.0, -40.0, 0.0, 1.0], dtype=F64)[: q.shape[1]]
    for name, least in (("kv_starts", -4), ("kv_lens", -2)):
        if draw.random() < 0.4:
            options[name] = int32([draw.randint(least, len_k + 2) for _ in range(batch)])
    for name in ("query_starts", "query_ends"):
        if draw.random() < 0.3:
            rows = draw.choice([1, batch])
            options[name] = int32([[draw.randint(-2, len_q + 2) for _ in range(len_k)] for _ in range(rows)])
    expected = loop_attention(q, k, v, cos, sin, causal, **options)
    if draw.random() < 0.5:  # of full width
        cos, sin = (x.repeat_interleave(2, -1) if options["interleaved"] else torch.cat((x, x), -1) for x in (cos, sin))
    found = reference_attention(q, k, v, cos, sin, causal, **options, rotary_dim=rotary_dim, return_max_logit=True)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == F64
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5, "interleaved": True},
        {"window": (2, 1), "causal": False},
        {"kv_starts": int32([1, 0]), "kv_lens": int32([5, 2])},
        {"interleaved": True, "weights": {"sinks": [2], "q_norm": [6], "k_norm": [6]}},
    ],
    ids=lambda options: ",".join(options),
)
def test_gradcheck(options):
    given = {"causal": True, "softmax_scale": 0.6, "rotary_dim": 4, "norm_eps": 1e-2, "norm_offset": 0.5} | options
    weights = given.pop("weights", {})
    names = ["q", "k", "v", *weights]
    leaves = [*qkv(2, 2, 1, 3, 5, 6), *(normal(*shape, seed=i) for i, shape in enumerate(weights.values()))]
    cos, sin = tables(5, 4)

    def run(*tensors):
        o, lse = reference_attention(**dict(zip(names, tensors)), cos=cos, sin=sin, **given)
        return o, lse.masked_fill(lse.isinf(), 0.0)

    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)  # along one random direction


def test_what_overflows_where_nothing_is_visible_stays_there():
    """float16: do v^T is infinite for the last key, which the first query does not see; its gradients are finite."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 3, 3, dtype=F16))
    with torch.no_grad():
        v[:, :, 2] = 300.0
    do = torch.zeros_like(q)
    do[:, :, 0] = 300.0
    o, _ = reference_attention(q, k, v, *tables(3, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert all(bool(torch.isfinite(x).all()) for x in (o, *torch.autograd.grad(o, (q, k, v), do)))
