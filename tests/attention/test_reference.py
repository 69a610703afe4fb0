"""The eager reference: against loops in float64, and its gradients. test_numbers.py has NaN and infinity."""

import random

import pytest
import torch

from tests.support.dtypes import F16, F64, int32
from tests.support.loop_attention import check_reference, qkv, tables
from tests.support.rotation import normal
from verification.testing import reference_attention


@pytest.mark.parametrize("seed", range(60))
def test_against_loops(seed):
    draw = random.Random(seed)
    batch, heads_kv, len_k, causal = draw.choice([1, 2]), draw.choice([1, 2]), draw.randint(1, 7), draw.random() < 0.5
    len_q = draw.randint(1, len_k + 3)
    q, k, v = qkv(batch, heads_kv * draw.choice([1, 2, 3]), heads_kv, len_q, len_k)
    rotary_dim, shared = draw.choice([2, 6, 8]), draw.random() < 0.5
    cos, sin = tables(len_k + draw.choice([0, 2]), rotary_dim, batch=None if shared else batch, unit=False)
    options = {"full_width": draw.random() < 0.5, "interleaved": draw.random() < 0.5}
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
    check_reference(q, k, v, cos, sin, causal, rotary_dim=rotary_dim, **options)


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
    cos, sin = tables(5, 4, unit=False)

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
