"""The eager reference: against loops in float64, its gradients, and what NaN and infinity may reach."""

import math
import random

import pytest
import torch

from tests.support.attention import packed_case, sequences_of
from tests.support.dtypes import F16, F32, F64
from tests.support.loop_attention import check_reference, qkv, tables
from tests.support.marks import cases
from tests.support.rotation import normal
from verification.testing import Case, make_inputs, reference_attention, run_op


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(80))
def test_against_loops(seed):
    """Random calls of a few rows: masks, bounds beyond the keys, tables of all forms."""
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


@pytest.mark.parametrize("logit", [1e4, -1e4, -2.45e5])
def test_extreme_logits(logit):
    """A head with scores far below zero is not silenced: the softmax sees differences only."""
    q, k, v = qkv(1, 1, 1, 4, 9, 8)
    k = 1e-3 * k
    q[..., 0], k[..., 0] = 1.0, 1.0
    cos, sin = torch.ones(9, 4, dtype=F64), torch.zeros(9, 4, dtype=F64)
    check_reference(q, k, v, cos, sin, rotary_dim=8, softmax_scale=logit)


@pytest.mark.parametrize(("batch", "len_q", "len_k", "rows"), [(0, 3, 3, 3), (2, 0, 3, 3), (2, 3, 0, 0), (2, 3, 0, 4)])
def test_empty(batch, len_q, len_k, rows):
    q, k, v = (x.requires_grad_() for x in qkv(batch, len_q=len_q, len_k=len_k))
    o, lse = reference_attention(q, k, v, *tables(rows, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert o.shape == q.shape and not o.any() and lse.shape == q.shape[:3] and (lse == -math.inf).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v))):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5, "interleaved": True},
        {"window": (2, 1), "causal": False},
        {"kv_starts": int32([1, 0]), "kv_lens": int32([5, 2]), "norms": True},
        {"sinks": True, "interleaved": True, "norms": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_gradcheck(options):
    """Also of queries that see nothing, and of keys that do not exist."""
    given = {"causal": True, "softmax_scale": 0.6, "rotary_dim": 4, "norm_eps": 1e-2, "norm_offset": 0.5} | options
    weights = {"sinks": [2] * given.pop("sinks", False)}
    weights |= dict.fromkeys(("q_norm", "k_norm"), [6] * given.pop("norms", False))
    names = ["q", "k", "v", *(name for name, shape in weights.items() if shape)]
    leaves = [*qkv(2, 2, 1, 3, 5, 6), *(normal(*weights[name], seed=i) for i, name in enumerate(names[3:]))]
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


# Masks of 2 batch entries of 7 keys; the keys that no query sees, and the queries that see none, in each entry.
HIDING = {
    "bounds": ({"causal": True, "kv_starts": int32([3, 0]), "kv_lens": int32([7, 4])},
               ([0, 1, 2], [4, 5, 6]), ([0, 1, 2], [0, 1, 2])),
    "intervals": ({"causal": False, "query_starts": int32([[0, 5, 0, 3, 0, 9, 0]]),
                   "query_ends": int32([[6, 5, 6, 2, 6, 12, 6]])}, ([1, 3, 5],) * 2, ([6],) * 2),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, F64])
@pytest.mark.parametrize(("masks", "absent", "dead"), HIDING.values(), ids=HIDING)
def test_what_no_row_sees_may_hold_nan(masks, absent, dead, dtype):
    """NaN in absent keys, in queries that see none, and in the gradients of their rows."""
    tensors = [*qkv(2, 4, 2, 7, 7, dtype=dtype), normal(2, 4, 7, 8, seed=5, dtype=dtype)]
    cos, sin = tables(7, 8, dtype=F32)
    weights = [normal(8, seed=6 + i, dtype=dtype).requires_grad_() for i in range(2)]
    options = {"softmax_scale": 0.4, "rotary_dim": 8, "norm_eps": 1e-6, "norm_offset": 0.0}
    options |= dict(zip(("q_norm", "k_norm"), weights))

    def run(q, k, v, do):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        o, lse = reference_attention(*leaves, cos, sin, sinks=torch.ones(4), **masks, **options)
        return o, lse, *torch.autograd.grad(o, (*leaves, *weights), do)

    expected = run(*tensors)
    q, k, v, do = (x.clone() for x in tensors)
    for b in range(2):
        k[b, :, absent[b]], v[b, :, absent[b]], q[b, :, dead[b]], do[b, :, dead[b]] = (
            math.nan,
            math.inf,
            math.nan,
            math.nan,
        )
    found = run(q, k, v, do)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    for b in range(2):
        assert not any(x[b, :, dead[b]].any() for x in (found[0], found[2])) and not found[3][b, :, absent[b]].any()
        assert (found[1][b, :, dead[b]] == -math.inf).all()


UNEVEN = ((10, 20), (7, 3), (0, 5), (4, 0), (1, 9), (12, 12))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@cases(
    packed_case(Case(1, 2, 1, 0, 0, 16, dtype=F64, causal=False), UNEVEN, behind=(3, 6)),
    packed_case(Case(1, 2, 1, 0, 0, 16, window=(3, 0), softcap=4.0, sinks=True), (9, 1, 6)),
)
def test_packed_sequences_keep_bad_values_where_they_are(case, bad):
    """In each sequence in turn, and after the last: o and every gradient of the others keep their bits."""
    inputs = make_inputs(case)
    expected = run_op(inputs, case, backend="reference")
    for first_q, len_q, first_k, len_k in sequences_of(case):
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        if len_k == 0:  # the keys after the last sequence too
            rows_k = slice(first_k, case.len_k if first_q + len_q == case.len_q else first_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, backend="reference")
        if 0 < len_q <= len_k:  # all of them see a key
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any()), "what a row sees must not be hidden"
            assert not bool(torch.isfinite(out.dv[:, :, rows_k]).all())
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
            assert torch.equal(x, y), (name, rows)
