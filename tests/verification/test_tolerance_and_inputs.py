"""The tolerance is itself tested: it must see the bugs that whole-tensor rules miss, and pass what is correct."""

import dataclasses
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fused_rope_attn.attention import reference
from verification import testing
from verification.testing import (
    Case,
    Results,
    compare,
    make_inputs,
    masks_of,
    poison_empty,
    reference_attention,
    run_reference,
)

TENSORS = Results._fields


def flash(inputs, case, *, shifted_rows=0, dropped_rows=0, reverses_sums=False):
    """FlashAttention-2's arithmetic: float32 inside; q_rot, k_rot, p, ds and o rounded. Shares the rotation only.

    reverses_sums: the backward pass sums its scores from the last column to the first.
    Bugs to order: K's table is one row late for the last `shifted_rows` keys; one key is dropped for the last
    `dropped_rows` queries.
    """
    dtype, group = case.dtype, case.heads_q // case.heads_kv
    cos, sin = reference.normalise_tables(inputs.cos, inputs.sin, case.rotary, case.interleaved)
    rows_q = torch.arange(case.len_q) + case.len_k - case.len_q
    rows_k = torch.arange(case.len_k)
    rows_k = rows_k - (rows_k >= case.len_k - shifted_rows).int()

    def turn(x, rows, inverse=False):
        rows = rows.clamp(min=0)  # rows before the first key see nothing
        tables = cos[:, None, rows], sin[:, None, rows]
        return reference.rotate(x, *tables, interleaved=case.interleaved, inverse=inverse)

    v, do = inputs.v.float().repeat_interleave(group, 1), inputs.do.float()
    q_rot, k_rot = turn(inputs.q, rows_q).float(), turn(inputs.k, rows_k).float().repeat_interleave(group, 1)
    scores = q_rot @ k_rot.mT * case.scale
    visible = torch.ones(case.len_q, case.len_k, dtype=torch.bool)
    if case.causal:
        visible = torch.arange(case.len_k) <= rows_q[:, None]
    if dropped_rows:
        visible[-dropped_rows:, case.len_k // 2] = False
    scores = scores.masked_fill(~visible, -math.inf)
    top, sink = scores.amax(-1, keepdim=True), torch.tensor(-math.inf)
    if case.sinks:
        sink = masks_of(case)["sinks"][None, :, None, None]
        top = torch.maximum(top, sink)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink - top).exp()
    o, lse = (weights.to(dtype).float() @ v / total).to(dtype), top + total.log()
    if reverses_sums:
        scores = (q_rot.flip(-1) @ k_rot.flip(-1).mT * case.scale).masked_fill(~visible, -math.inf)
    p = (scores - lse).exp()
    lse = lse.masked_fill(~visible.any(-1, keepdim=True), -math.inf)
    delta = (o.float() * do).sum(-1, keepdim=True)
    ds = (p * (do @ v.mT - delta)).to(dtype).float()
    dq = turn(ds @ k_rot * case.scale, rows_q, inverse=True).to(dtype)
    dk = (ds.mT @ q_rot * case.scale).unflatten(1, (-1, group)).sum(2)
    dv = (p.to(dtype).float().mT @ do).unflatten(1, (-1, group)).sum(2)
    return Results(o, lse.squeeze(-1), dq, turn(dk, rows_k, inverse=True).to(dtype), dv.to(dtype))


def verdicts(out, ref64, eager, dtype):
    return {
        name: compare(
            name, getattr(out, name), getattr(ref64, name), getattr(eager, name), grad=name[0] == "d", dtype=dtype
        )
        for name in TENSORS
    }


@pytest.fixture(scope="module", params=[0, 1])
def long_case(request):
    """The simulation of the row rule: bf16, N = 1024, D = 128, causal; two heads, so that few rows carry the proof."""
    case = Case(1, 2, 2, 1024, 1024, 128, dtype=torch.bfloat16, seed=request.param)
    inputs = make_inputs(case)
    return case, inputs, run_reference(inputs, case, torch.float64), run_reference(inputs, case)


def test_a_correct_kernel_passes(long_case):
    case, inputs, ref64, eager = long_case
    for out in (eager, flash(inputs, case)):
        for result in verdicts(out, ref64, eager, case.dtype).values():
            assert result.ok, result


@pytest.mark.parametrize("bug", [{"shifted_rows": 64}, {"dropped_rows": 24}], ids=str)
def test_a_local_bug_fails(long_case, bug):
    case, inputs, ref64, eager = long_case
    results = verdicts(flash(inputs, case, **bug), ref64, eager, case.dtype)
    for name in ("o", "dq", "dk", "dv"):
        assert not results[name].ok and results[name].row_ratio > 2.5, results[name]
        assert "rows too far off" in results[name].detail
    # Only the row rule refuses this: the rule on the whole tensor alone would let it through.
    assert results["dv"].ratio <= 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"tables": "random"},
        {"len_q": 17},
        {"heads_kv": 2, "interleaved": True, "rotary_dim": 10},
        {"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 1, "len_k": 1},
    ],
    ids=str,
)
def test_a_correct_kernel_passes_on_small_shapes(changes, dtype):
    """Rows with few keys, where eager is exact by luck and delta from the rounded o is not."""
    for seed in range(3):
        case = dataclasses.replace(Case(2, 16, 16, 63, 63, 24, dtype=dtype, seed=seed), **changes)
        inputs = make_inputs(case)
        ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
        for result in verdicts(flash(inputs, case), ref64, eager, dtype).values():
            assert result.ok, (case.name, result)


def eager_draws(inputs, case):
    """Return the draws of `compare`, of each tensor."""
    with testing.RandomRounding(torch.Generator().manual_seed(0)):
        results = [run_reference(inputs, case) for _ in range(testing.DRAWS)]
    return {name: lambda name=name: (getattr(draw, name) for draw in results) for name in TENSORS}


def second_opinions(out, ref64, eager, inputs, case):
    draws = eager_draws(inputs, case)
    return {
        name: compare(
            name,
            getattr(out, name),
            getattr(ref64, name),
            getattr(eager, name),
            grad=name[0] == "d",
            dtype=case.dtype,
            draws=draws[name],
        )
        for name in TENSORS
    }


@pytest.mark.parametrize("way", ["alone", "packed", "computed again"])
def test_draws_have_the_error_of_delta(way):
    """Two keys have equal weights and a dp of 0. Each column of o needs one bit more than float16 has, and no other
    number is rounded. Packed calls had no such error before, because their products leave NaN out, nor had checkpoints,
    which PyTorch computes again up to the last tensor that it needs."""
    odd, sign = torch.arange(64) % 2, torch.where(torch.arange(64) < 32, 1.0, -1.0)
    v = (1 + torch.stack((odd, 1 - odd)) * 2.0**-10).half()[None, None]
    q, k, do = torch.zeros(1, 1, 1, 64).half(), torch.randn(1, 1, 2, 64).half(), sign.half()[None, None, None]
    options = {"softmax_scale": 1.0, "rotary_dim": 64}
    if way == "packed":  # one more row and key, which are in no sequence
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1), value=math.nan) for x in (q, k, v))
        do = torch.nn.functional.pad(do, (0, 0, 0, 1))
        options |= {"cu_seqlens_q": torch.tensor([0, 1]), "cu_seqlens_k": torch.tensor([0, 2])}
    q.requires_grad_()

    def gradient():
        if way == "computed again":
            o = checkpoint(lambda: (q.float() @ k.float().mT).softmax(-1).half() @ v, use_reentrant=False)
        else:
            o, _ = reference_attention(q, k, v, torch.ones(3, 32), torch.zeros(3, 32), **options)
        return torch.autograd.grad(o, q, do)[0][0, 0, 0].double()

    assert not gradient().any()
    with testing.RandomRounding(torch.Generator().manual_seed(0)):
        errors = torch.stack([gradient() for _ in range(testing.DRAWS)])
    keys = k[0, 0, :2].double().sum(0)
    delta = -2 * errors @ keys / (keys @ keys)
    assert delta.square().mean().sqrt().item() == pytest.approx(64**0.5 * 2.0**-11, rel=0.4)


def test_draws_excuse_a_lucky_eager():
    """One key and a sink: dq and dk are multiples of one number, and eager may have escaped its error by luck."""
    refused = 0
    for seed in range(40, 60):
        case = Case(2, 3, 1, 1, 1, 40, seed=seed, sinks=True)
        inputs = make_inputs(case)
        ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
        out = flash(inputs, case)
        refused += not all(result.ok for result in verdicts(out, ref64, eager, case.dtype).values())
        for result in second_opinions(out, ref64, eager, inputs, case).values():
            assert result.ok, result
    assert refused  # of how many seeds it is true depends on the build of torch, which draws the numbers


def test_draws_excuse_a_lucky_largest_logit():
    """Near a number of bfloat16 eager's rounding of the product hides that of q and k, and in every draw of it."""
    refused = 0
    for seed in range(100, 140):
        case = Case(1, 1, 1, 11, 11, 128, causal=False, rotary_dim=8, dtype=torch.bfloat16, tables="random", seed=seed)
        case = dataclasses.replace(case, softmax_scale=-0.088)
        inputs = make_inputs(case)
        q, k = (reference.rotate(x, inputs.cos, inputs.sin).float() for x in inputs[:2])
        exact, eager = (run_reference(inputs, case, dtype).max_logit for dtype in (torch.float64, None))
        options = {"grad": False, "dtype": case.dtype}
        with testing.RandomRounding(torch.Generator().manual_seed(0)):
            draws = [run_reference(inputs, case).max_logit for _ in range(testing.DRAWS)]
        right = (q @ k.mT * case.scale).amax((2, 3))
        refused += not compare("max_logit", right, exact, eager, **options).ok
        assert compare("max_logit", right, exact, eager, **options, draws=lambda draws=draws: draws).ok
        wrong = right + 0.05
        assert not compare("max_logit", wrong, exact, eager, **options, draws=lambda draws=draws: draws).ok
    assert refused


@pytest.mark.parametrize("bug", [{"shifted_rows": 64}, {"dropped_rows": 24}], ids=str)
def test_draws_excuse_no_local_bug(bug):
    """Only the row rule refuses this: many roundings make a row's error, and no draw of eager's is near it."""
    case = Case(1, 1, 1, 320, 320, 64, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    results = second_opinions(flash(inputs, case, **bug), ref64, eager, inputs, case)
    assert all(not results[name].ok and results[name].row_ratio > 4.0 for name in ("o", "dq", "dk", "dv")), results


def test_draws_excuse_scores_that_backward_sums_in_another_order():
    """Scores of 30 are wrong by 5e-6 in float32, and so is a weight near 1, which eager has exactly."""
    refused = 0
    for seed in range(4):
        case = Case(1, 1, 1, 86, 86, 40, dtype=torch.float32, softmax_scale=1.0, tables="yarn", seed=seed)
        inputs = make_inputs(case)
        ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
        out = flash(inputs, case, reverses_sums=True)
        refused += not verdicts(out, ref64, eager, case.dtype)["dv"].ok
        for result in second_opinions(out, ref64, eager, inputs, case).values():
            assert result.ok, result
        # A weight that is wrong by 2e-4 is no such error.
        wrong = out._replace(dv=torch.cat((out.dv[:, :, :40], out.dv[:, :, 40:] * 1.0002), 2))
        assert not second_opinions(wrong, ref64, eager, inputs, case)["dv"].ok
    assert refused > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_random_rounding_goes_to_a_neighbour_and_keeps_the_mean(dtype):
    exponent = torch.arange(-8, 9, dtype=torch.float64).repeat_interleave(20)
    x = -(1 + torch.rand(exponent.shape, dtype=torch.float64)) * 2**exponent
    unit = torch.finfo(dtype).eps * 2**exponent
    with testing.RandomRounding(torch.Generator().manual_seed(0)):
        rounded = x.repeat(1000, 1).to(dtype).double()
        subnormal = torch.full((1000,), 0.3 * 2.0**-24, dtype=torch.float64).half().double()
        odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0], dtype=torch.float64).to(dtype)
    assert torch.equal(torch.minimum(rounded.amax(0) - rounded.amin(0), unit), rounded.amax(0) - rounded.amin(0))
    assert ((rounded - x).abs() < unit).all() and ((rounded.mean(0) - x).abs() < 0.08 * unit).all()
    assert set(subnormal.tolist()) == {0.0, 2.0**-24} and abs(float(subnormal.mean()) * 2**24 - 0.3) < 0.08
    assert odd[0].isnan() and odd[1:].tolist() == [math.inf, -math.inf, 0.0]


def test_rows_that_see_nothing_do_not_make_their_neighbours_suspicious():
    """Next to them, a row with one key and a sink: eager's error there is far less than that of delta from the rounded
    o, and around it half of the rows are zero."""
    for seed in range(10):
        case = Case(1, 8, 2, 64, 3, 96, dtype=torch.bfloat16, seed=seed, sinks=True)
        inputs = make_inputs(case)
        ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
        for result in verdicts(flash(inputs, case), ref64, eager, case.dtype).values():
            assert result.ok, (case.name, result)


def test_float32_leaves_a_wrong_angle_nowhere_to_hide():
    case = Case(1, 2, 1, 64, 64, 32, dtype=torch.float32)
    inputs = make_inputs(case)
    ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    assert all(result.ok for result in verdicts(flash(inputs, case), ref64, eager, case.dtype).values())
    low = inputs._replace(cos=inputs.cos.half().float(), sin=inputs.sin.half().float())
    assert not any(result.ok for result in verdicts(flash(low, case), ref64, eager, case.dtype).values())
    off = ref64.o.clone()
    off[0, 1, 5, 7] += 3e-5 * off.square().mean().sqrt()
    assert not compare("o", off, ref64.o, eager.o, grad=False, dtype=torch.float32).ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["o", "dq", "lse"])
def test_what_is_not_finite_never_passes(name, bad):
    case = Case(1, 1, 1, 8, 8, 16)
    inputs = make_inputs(case)
    ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    out = getattr(eager, name).clone()
    out.view(-1)[3] = bad
    for noisy_eager in (getattr(eager, name), torch.full_like(out, math.nan), torch.full_like(out, 1e4)):
        result = compare(name, out, getattr(ref64, name), noisy_eager, grad=name == "dq", dtype=case.dtype)
        assert not result.ok and result.detail


def test_infinities_of_lse_must_agree():
    ref64 = torch.tensor([-math.inf, 1.0, 2.0], dtype=torch.float64)
    eager = ref64.float()

    def ok(*values):
        return compare("lse", torch.tensor(values), ref64, eager, grad=False, dtype=torch.float16).ok

    assert ok(-math.inf, 1.0, 2.0) and ok(-math.inf, 1.0, 2.00001)
    assert not ok(math.inf, 1.0, 2.0) and not ok(-1e30, 1.0, 2.0)
    assert not ok(-math.inf, -math.inf, 2.0) and not ok(-math.inf, 1.0, 2.01)


def test_zeros_and_empties():
    zero = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    assert compare("dq", zero.half(), zero, zero.half(), grad=True, dtype=torch.float16).ok
    assert not compare("dq", zero.half() + 1e-5, zero, zero.half(), grad=True, dtype=torch.float16).ok
    empty = zero[:, :, :0]
    assert compare("o", empty.half(), empty, empty.half(), grad=False, dtype=torch.float16).ok
    with pytest.raises(ValueError, match="^o and eager must have the reference's shape"):
        compare("o", zero[:, :, :2], zero, zero, grad=False, dtype=torch.float16)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts(layout):
    case = Case(2, 4, 2, 5, 7, 16, layout=layout)
    inputs = make_inputs(case)
    assert inputs.q.shape == inputs.do.shape == (2, 4, 5, 16) and inputs.k.shape == inputs.v.shape == (2, 2, 7, 16)
    assert inputs.q.dtype == torch.float16 and inputs.q.stride(-1) == 1
    assert not torch.equal(inputs.k, inputs.v)
    if layout == "odd":
        assert inputs.q.data_ptr() % 16 and all(stride % 2 for stride in (inputs.q.stride(1), inputs.q.stride(2)))
    if layout == "expanded":
        assert inputs.q.stride(0) == inputs.do.stride(0) == 0
    if layout == "bnhd":
        assert inputs.q.transpose(1, 2).is_contiguous()
    if layout == "bhnd":
        assert inputs.q.is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(inputs, make_inputs(case)))
    other = make_inputs(dataclasses.replace(case, seed=1))
    assert not torch.equal(inputs.q, other.q)


@pytest.mark.parametrize("tables", testing.TABLES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables(tables, interleaved):
    case = Case(2, 1, 1, 5, 7, 16, rotary_dim=10, tables=tables, interleaved=interleaved, extra_rows=3)
    half = make_inputs(case)
    assert half.cos.shape == half.sin.shape == (10, 5) and half.cos.dtype == torch.float32
    norm = half.cos.square() + half.sin.square()
    assert torch.allclose(norm, torch.ones_like(norm)) == (tables == "rope")
    full = make_inputs(dataclasses.replace(case, full_width=True))
    assert full.cos.shape == (10, 10)
    first = full.cos[:, ::2] if interleaved else full.cos[:, :5]
    second = full.cos[:, 1::2] if interleaved else full.cos[:, 5:]
    assert torch.equal(first, half.cos) and torch.equal(second, half.cos)
    batch = make_inputs(dataclasses.replace(case, table_batch=True, table_dtype=torch.float16))
    assert batch.cos.shape == (2, 10, 5) and batch.cos.dtype == torch.float16
    assert not torch.equal(batch.cos[0], batch.cos[1])


def test_unknown_layouts_and_tables_are_refused():
    for changes in ({"layout": "bhdn"}, {"tables": "alibi"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            make_inputs(dataclasses.replace(Case(1, 1, 1, 1, 1, 16), **changes))


def test_names_tell_cases_apart():
    base = Case(2, 4, 2, 5, 7, 16)
    assert base.name == "B2 H4/2 N5x7 D16 causal fp16"
    changes = {
        "causal": False,
        "rotary_dim": 8,
        "interleaved": True,
        "dtype": torch.float32,
        "softmax_scale": 0.0,
        "tables": "yarn",
        "table_dtype": torch.bfloat16,
        "table_batch": True,
        "full_width": True,
        "layout": "odd",
        "extra_rows": 1,
        "seed": 3,
    }
    names = {dataclasses.replace(base, **{field: value}).name for field, value in changes.items()}
    assert len(names | {base.name}) == len(changes) + 1


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_blocks_of_the_reference_add_up(monkeypatch, dtype):
    case = Case(2, 6, 3, 37, 41, 16, dtype=torch.float32, table_batch=True, rotary_dim=10, interleaved=True)
    inputs = make_inputs(case)
    whole = run_reference(inputs, case, dtype)
    monkeypatch.setitem(testing.runs.BLOCK_BYTES, "cpu", 2 * 10 * 41 * 8)  # ten rows of one group
    for name, a, b in zip(TENSORS, whole, run_reference(inputs, case, dtype)):
        torch.testing.assert_close(a, b, msg=name)
        assert a.dtype == (torch.float64 if dtype else torch.float32)


def test_gradients_of_weights_are_rounded_once():
    """Sequences are added up in float32, and the sums have the dtype of the weights."""
    dtypes = {"dsinks": torch.bfloat16, "dq_norm": torch.float16, "dk_norm": torch.float16}
    case = Case(1, 4, 2, 9, 9, 16, dtype=torch.float16, sinks=True, sinks_dtype=torch.bfloat16, norms=0.0)
    case = dataclasses.replace(case, norm_dtype=torch.float16, seqlens=((5, 5), (4, 4)))
    inputs = make_inputs(case)
    eager, exact = run_reference(inputs, case), run_reference(inputs, case, torch.float64)
    sums = testing.runs._summed(inputs, case, case.dtype)
    for name, dtype in dtypes.items():
        found, whole = getattr(eager, name), getattr(sums, name)
        assert found.dtype == dtype and getattr(exact, name).dtype == torch.float64
        assert torch.equal(found, whole.to(dtype)) and not torch.equal(found.float(), whole)


def test_run_reference_is_the_reference():
    case = Case(2, 4, 2, 9, 12, 16, dtype=torch.float16, full_width=True)
    inputs = make_inputs(case)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o, lse = reference_attention(q, k, v, inputs.cos, inputs.sin, True, softmax_scale=case.scale, rotary_dim=16)
    expected = Results(o, lse, *torch.autograd.grad(o, (q, k, v), inputs.do))
    for name, a, b in zip(TENSORS, run_reference(inputs, case), expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)  # batches are multiplied one by one there


def test_poison_empty_and_back():
    originals = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty
    x = torch.zeros(3)
    with poison_empty():
        for y in (torch.empty(3), torch.empty_like(x), torch.empty_strided((3,), (1,)), x.new_empty(3)):
            assert bool(y.isnan().all())
        assert bool(torch.empty(3, dtype=torch.float16).isnan().all())
        assert torch.empty(3, dtype=torch.int32).shape == (3,)
        assert torch.empty(3, requires_grad=True).requires_grad
    with pytest.raises(RuntimeError, match="inside"), poison_empty():
        raise RuntimeError("inside")
    assert (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty) == originals


def test_noise_of_what_is_zero_grows_with_what_adds_it_up():
    case = Case(1, 8, 2, 16, 16, 256, tables="random")
    inputs = testing.make_inputs(case)
    tables = float((inputs.cos.square() + inputs.sin.square()).max())
    assert tables > 1.0
    noise = {name: testing.noise_of_zero(name, case, inputs) for name in ("o", "dq", "dk", "dv")}
    assert noise == pytest.approx({"o": 2.0, "dq": 2.0 * tables, "dk": 4.0 * tables, "dv": 4.0})
    small = dataclasses.replace(case, heads_q=2, head_dim=32, tables="rope")
    assert testing.noise_of_zero("dk", small, testing.make_inputs(small)) == pytest.approx(1.0)
    zero, wrong = torch.zeros(1, 1, 4, 8, dtype=torch.float64), torch.full((1, 1, 4, 8), 1e-5)
    for factor, holds in ((1.0, False), (4.0, True)):
        found = testing.compare("dk", wrong, zero, zero.half(), grad=True, dtype=torch.float16, zero=factor)
        assert found.ok is holds
