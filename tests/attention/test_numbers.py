"""Single calls of the reference and of the kernels, in the interpreter and on a GPU: extreme numbers, NaN, no rows,
equal bits."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.attention import prepass
from tests.support.attention import assert_equal, assert_matches_float64, packed_case, sequences_of
from tests.support.calls import assert_right
from tests.support.dtypes import F16, F32
from tests.support.gpu import ODD_LENGTHS, assert_alike
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.places import PREPASS, UNEVEN, assert_same, each_place, only_sm_90
from verification.attention import AttentionCheck
from verification.testing import Case, make_inputs, masks_of, run_op


@each_place
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit, place):
    """Every score is ``logit``: o is the mean of the visible v, lse is logit + log(count). A finite mask sentinel, or a
    maximum that is clamped at 0, would silence every head."""
    case = place.sized(len_q=300, len_k=300, softmax_scale=logit)
    inputs = make_inputs(case, place.device)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0], k[..., 0] = 1.0, 1.0
    inputs = inputs._replace(q=q, k=k, cos=torch.ones_like(inputs.cos), sin=torch.zeros_like(inputs.sin))
    out = run_op(inputs, case, **place.options)
    count = torch.arange(1, case.len_k + 1, device=place.device)
    torch.testing.assert_close(out.lse, logit + count.log().expand(out.lse.shape))
    mean = inputs.v.double().cumsum(2) / count[:, None]
    expected = mean.repeat_interleave(case.heads_q // case.heads_kv, 1)
    torch.testing.assert_close(out.o.double(), expected, rtol=4e-2, atol=4e-2)
    assert all(bool(torch.isfinite(x).all()) for x in out)


@interpreted
@both_strategies
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_extreme_sinks(sink, strategy):
    q, k, v, cos, sin, do = make_inputs(Case(1, 2, 1, 20, 40, 16, dtype=F32))
    results = []
    for options in ({"backend": "triton", "strategy": strategy}, {"backend": "reference"}):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)] + [torch.full((2,), sink, requires_grad=True)]
        o, lse = rope_attention(*tensors[:3], cos, sin, True, sinks=tensors[3], return_lse=True, **options)
        results.append((o, lse, *torch.autograd.grad(o, tensors, do)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@each_place
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(bad, place):
    case = place.sized(len_q=700, len_k=333)
    inputs = make_inputs(case, place.device)
    inputs.v[:, :, 0] = bad
    out = run_op(inputs, case, **place.options, grads=False)
    hidden = case.len_q - case.len_k
    assert bool((out.o[:, :, :hidden] == 0).all()) and bool((out.lse[:, :, :hidden] == -math.inf).all())
    assert bool(torch.isfinite(out.lse[:, :, hidden:]).all())
    assert not bool(torch.isfinite(out.o[:, :, hidden:]).any()), "a visible NaN or infinity must not be hidden"


@each_place
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(
    ("seqlens", "fields"),
    [
        ((300, 65, 200), {"behind": (0, 30), "window": (50, 0), "dtype": F16}),
        (UNEVEN, {"behind": (90, 150), "causal": False, "softcap": 20.0, "head_dim": 64}),
        (UNEVEN, {"behind": (90, 150), "causal": False, "head_dim": 192}),
    ],
    ids=["window", "UNEVEN, softcap", "UNEVEN, wide"],
)
def test_nan_stays_in_its_sequence(seqlens, fields, place):
    """Bad values in every second sequence, and in the rows after the last, do not change the other sequences, although
    their tiles read those rows."""
    case = place.packed(seqlens, **fields)
    inputs = make_inputs(case, place.device)
    *sequences, (last_q, _, last_k, _) = sequences_of(case)
    expected = run_op(inputs, case, **place.options)
    for bad_sequences in (sequences[::2], sequences[1::2]):
        bad_q, bad_k = (torch.zeros(n, dtype=torch.bool, device=place.device) for n in (case.len_q, case.len_k))
        for first_q, len_q, first_k, len_k in bad_sequences:
            bad_q[first_q : first_q + len_q], bad_k[first_k : first_k + len_k] = True, True
        kept = ~bad_q, ~bad_q, ~bad_q, ~bad_k, ~bad_k
        bad_q[last_q:], bad_k[last_k:] = True, True
        q, do, k = (
            x.masked_fill(y[:, None], math.nan) for x, y in zip((inputs.q, inputs.do, inputs.k), (bad_q, bad_q, bad_k))
        )
        v = inputs.v.masked_fill(bad_k[:, None], math.inf)
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **place.options)
        assert not any(x[:, :, last:].any() for x, last in ((out.o, last_q), (out.dq, last_q), (out.dk, last_k)))
        assert_same(*([x[:, :, rows] for x, rows in zip(of, kept)] for of in (out, expected)), place.options)


@each_place
def test_normed_rows_that_are_zero_or_not_finite_stay_by_themselves(place):
    case = replace(place.case, norms=0.0, norm_eps=0.0)
    inputs = make_inputs(case, place.device)
    inputs.q[0, 0, 10] = 0.0
    clean = run_op(inputs, case, **place.options)
    assert all(bool(x.isfinite().all()) for x in clean)
    q = inputs.q.clone()
    q[0, 1, 20, 7] = math.inf
    out = run_op(inputs._replace(q=q), case, **place.options)
    others = torch.arange(case.len_q, device=place.device) != 20
    for x, y in ((out.o, clean.o), (out.dq, clean.dq)):
        assert x[0, 1, 20].isnan().all()
        assert_alike([x[0, 1, others], x[1]], [y[0, 1, others], y[1]])


ONE_KEY = {"causal": False, "softmax_scale": 1.0, "window": (0, 0), "dtype": F16, "head_dim": 64}


@each_place
@pytest.mark.parametrize(
    ("seqlens", "fields"),
    [
        (None, {}),
        (None, {"softmax_scale": -0.4, "tables": "yarn", "interleaved": True, "head_dim": 128, "causal": True}),
        (None, {"norms": 0.0, "head_dim": 128}),
        ((589, 573, 7), {"interleaved": True}),
    ],
    ids=["plain", "negative scale", "norms", "packed"],
)
def test_one_visible_key_has_weight_one(seqlens, fields, place):
    """Then o is v, and dv is do, to the bit. A single bit of a rotation that differs between the passes is 2e-3 of it
    here; so is a rounded lse."""
    case = place.sized(**ONE_KEY | fields, len_q=600, len_k=600)
    case = replace(case, heads_kv=case.heads_q)
    if seqlens is not None:
        case = packed_case(case, place.smaller(seqlens))
    for seed in range(1 if place.device == "cpu" else 5):
        case = replace(case, seed=seed)
        inputs = make_inputs(case, place.device)
        out = run_op(inputs, case, **place.options)
        assert torch.equal(out.dv, inputs.do) and torch.equal(out.o, inputs.v)
    assert_matches_float64(case, inputs, out)


@only_sm_90
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_chunk_of_queries_has_the_bits_of_the_whole(head_dim, chosen):
    """Intervals are rows of the chunk."""
    case = replace(ODD_LENGTHS, len_q=700, head_dim=head_dim, kv_starts=(0, 90), intervals="random")
    q, *others = make_inputs(case, "cuda")[:5]
    given = {name: x for name, x in masks_of(case, "cuda").items() if x is not None and name != "softcap"}
    given |= {"batch_invariant": True, "return_lse": True} | chosen
    whole = rope_attention(q, *others, True, **given)
    for rows in (1, 77, 400):
        first = case.len_q - rows
        shifted = given | {name: given[name] - first for name in ("query_starts", "query_ends")}
        assert_equal(rope_attention(q[:, :, first:], *others, True, **shifted), [x[:, :, first:] for x in whole])


@pytest.mark.gpu
def test_true_float32_unless_tf32_is_allowed():
    case = Case(2, 4, 2, 300, 400, 64, dtype=F32, tables="random")
    inputs = make_inputs(case, "cuda")
    exact = run_op(inputs, case, **PREPASS)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = run_op(inputs, case, **PREPASS)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for x, y in zip(exact, rounded):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert not torch.equal(exact.o, rounded.o)
    assert_equal(run_op(inputs, case, **PREPASS), exact)


@interpreted
@ignore_overflow
@both_strategies
def test_sums_of_many_blocks_of_normed_rows(strategy, monkeypatch):
    """Small blocks make more than 32 of them, and the sums of so many are added up in parts."""
    monkeypatch.setattr(prepass, "ROWS", 2)
    monkeypatch.setattr(prepass, "HEADS", 1)
    case = Case(2, 4, 2, 20, 20, 16, norms=1.0, norm_dtype=torch.float16, kv_starts=(0, 5), kv_lens=(20, 13))
    assert_right(AttentionCheck.of(case, variants=(("triton", strategy),)))
