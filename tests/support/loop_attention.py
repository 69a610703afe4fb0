"""An oracle of the attention reference, written differently: explicit loops, and rotation as a complex product."""

import math

import torch

from tests.support.rotation import normal
from verification.testing import reference_attention


def tables(rows, rotary_dim, *, batch=None, unit=True, seed=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, rotary_dim // 2) if batch is None else (batch, rows, rotary_dim // 2)
    angle = 3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    radius = 1.0 if unit else 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    return (radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)


def qkv(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=8, dtype=torch.float64):
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
    o, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    max_logit = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    left, right = [math.inf if side == -1 else side for side in window or (-1, -1)]

    def bound(name, default, *index):
        """Return an element of a tensor of bounds. One batch entry serves all."""
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


def check_reference(q, k, v, cos, sin, causal=False, *, rotary_dim, full_width=False, **options):
    """Reference and loops agree in float64. cos and sin: (S, R/2) or (B, S, R/2), of full width for the reference."""
    options = {"softmax_scale": q.shape[-1] ** -0.5} | options
    expected = loop_attention(q, k, v, cos, sin, causal, **options)
    if full_width:
        double = options.get("interleaved", False)
        cos, sin = (x.repeat_interleave(2, -1) if double else torch.cat((x, x), -1) for x in (cos, sin))
    given = options | {"rotary_dim": rotary_dim, "return_max_logit": True}
    for x, y in zip(reference_attention(q, k, v, cos, sin, causal, **given), expected, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
