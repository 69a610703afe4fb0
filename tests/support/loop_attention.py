"""An oracle of the attention reference, written differently: explicit loops, and rotation as a complex product."""

import math

import torch

from verification.testing import reference_attention


def tables(rows, rotary_dim, *, batch=None, unit=True, seed=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, rotary_dim // 2) if batch is None else (batch, rows, rotary_dim // 2)
    angle = 3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    radius = 1.0 if unit else 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    return (radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=8, dtype=torch.float64):
    q = normal(batch, heads_q, len_q, head_dim, seed=1, dtype=dtype)
    k = normal(batch, heads_kv, len_k, head_dim, seed=2, dtype=dtype)
    v = normal(batch, heads_kv, len_k, head_dim, seed=3, dtype=dtype)
    return q, k, v


def complex_rotation(x, cos, sin, interleaved):
    """One vector x (D,): the pair (a, b) is the number a + ib, turned by cos + i sin. Plain Python numbers."""
    half = len(cos)
    out = [float(value) for value in x]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(out[first], out[second]) * complex(float(cos[i]), float(sin[i]))
        out[first], out[second] = turned.real, turned.imag
    return out


def loop_attention(
    q,
    k,
    v,
    cos,
    sin,
    causal=False,
    *,
    softmax_scale,
    rotary_dim,
    interleaved=False,
    window=None,
    softcap=0.0,
    sinks=None,
    kv_starts=None,
    kv_lens=None,
    query_starts=None,
    query_ends=None,
):
    """The contract, sentence by sentence, one score at a time. cos and sin: (S, R/2) or (B, S, R/2)."""
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_k = k.shape[1], k.shape[2]
    o, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    max_logit = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b in range(batch):
        cos_b, sin_b = (cos[b], sin[b]) if cos.ndim == 3 else (cos, sin)
        start = int(kv_starts[b]) if kv_starts is not None else 0
        length = int(kv_lens[b]) if kv_lens is not None else len_k
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for i in range(len_q):
                position = length - len_q + i
                if position < 0:
                    continue
                query = complex_rotation(q[b, h, i], cos_b[position], sin_b[position], interleaved)
                scores = {}
                for j in range(start, length):
                    if causal and j > position:
                        continue
                    if window is not None and window[0] != -1 and j < position - window[0]:
                        continue
                    if window is not None and window[1] != -1 and j > position + window[1]:
                        continue
                    if query_starts is not None and i < int(query_starts[b % len(query_starts), j]):
                        continue
                    if query_ends is not None and i >= int(query_ends[b % len(query_ends), j]):
                        continue
                    key = complex_rotation(k[b, g, j], cos_b[j], sin_b[j], interleaved)
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
                    o[b, h, i] += math.exp(score - top) / total * v[b, g, j]
    return o, lse, max_logit


def check_reference(q, k, v, cos, sin, causal=False, **options):
    """Reference and loops agree in float64. The loops take (S, R/2) tables, the reference whatever it is given."""
    options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    half = cos[..., ::2] if options.get("interleaved") else cos[..., : options["rotary_dim"] // 2]
    half_sin = sin[..., ::2] if options.get("interleaved") else sin[..., : options["rotary_dim"] // 2]
    if cos.shape[-1] == options["rotary_dim"] // 2:
        half, half_sin = cos, sin
    if half.ndim == 3 and half.shape[0] == 1:
        half, half_sin = half[0], half_sin[0]
    o, lse, max_logit = reference_attention(q, k, v, cos, sin, causal, **options, return_max_logit=True)
    expected, expected_lse, expected_max = loop_attention(q, k, v, half, half_sin, causal, **options)
    assert o.dtype == lse.dtype == max_logit.dtype == torch.float64
    torch.testing.assert_close(max_logit, expected_max, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(o, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-11, atol=1e-12)
