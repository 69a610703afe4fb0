"""The tolerance is itself tested: it must see the bugs that whole-tensor rules miss, and pass what is correct."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fused_rope_attn.attention import reference
from fused_rope_attn.runtime import device
from tests.support.dtypes import BF16, F16, F32, F64
from verification import testing
from verification.attention import AttentionCheck
from verification.testing import Case, Results, compare, make_inputs, masks_of, reference_attention, run_reference

TENSORS = Results._fields


def flash(inputs, case, *, shifted_rows=0, dropped_rows=0, reverses_sums=False):
    """FlashAttention-2's arithmetic: float32 inside; q_rot, k_rot, p, ds and o rounded. Shares the rotation only.

    reverses_sums: the backward pass sums its scores from the last column to the first. Bugs: K's table is one row late
    for the last `shifted_rows` keys; one key is dropped for the last `dropped_rows` queries.
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


class Judge:
    """A case with its inputs and references; calling it compares results with them, by each tensor's name."""

    def __init__(self, case):
        self.case, self.inputs = case, make_inputs(case)
        check = AttentionCheck.of(case)
        self.references = check.references(check.made(self.inputs), "cpu")
        self.ref64, self.eager = (Results(*map(x.get, TENSORS)) for x in (self.references.exact, self.references.eager))

    def flash(self, **bug):
        return flash(self.inputs, self.case, **bug)

    def __call__(self, out, *, draws=False, names=TENSORS):
        if draws:
            return {name: self.references.compare(name, getattr(out, name)) for name in names}
        every = {name: (getattr(out, name), self.references.exact[name], self.references.eager[name]) for name in names}
        return {name: compare(name, *x, grad=name[0] == "d", dtype=self.case.dtype) for name, x in every.items()}


def assert_right(found):
    assert all(result.ok for result in found.values()), found


# The simulation of the row rule; two heads, so that few rows carry the proof.
LONG = Case(1, 2, 2, 1024, 1024, 128, dtype=BF16)
SMALL = Case(2, 16, 16, 63, 63, 24)  # rows with few keys: eager is exact by luck, and delta from the rounded o is not
RIGHT = {
    "long": LONG,
    "small": SMALL,
    "not causal": replace(SMALL, causal=False),
    "any tables": replace(SMALL, tables="random", dtype=BF16),
    "fewer queries": replace(SMALL, len_q=17),
    "GQA, R < D": replace(SMALL, heads_kv=2, interleaved=True, rotary_dim=10, dtype=BF16),
    "one token": Case(1, 1, 1, 1, 1, 24, dtype=BF16),
    # Rows that see nothing do not make their neighbours suspicious: next to them, a row with one key and a sink.
    "rows that see nothing": Case(1, 8, 2, 64, 3, 96, dtype=BF16, sinks=True),
}


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_a_correct_kernel_passes(case):
    for seed in range(1 if case is LONG else 6):
        judge = Judge(replace(case, seed=seed))
        assert_right(judge(judge.eager))
        assert_right(judge(judge.flash()))


@pytest.mark.parametrize("bug", [{"shifted_rows": 64}, {"dropped_rows": 24}], ids=str)
@pytest.mark.parametrize("case", [LONG, Case(1, 1, 1, 320, 320, 64, dtype=BF16)], ids=["eager", "draws"])
def test_a_local_bug_fails(bug, case):
    """Many roundings make a row's error, and no draw of eager's is near it."""
    judge = Judge(case)
    results = judge(judge.flash(**bug), draws=case is not LONG)
    for name in ("o", "dq", "dk", "dv"):
        assert not results[name].ok and results[name].row_ratio > 2.5, results[name]
        assert "rows too far off" in results[name].detail
    # Only the row rule refuses this: the rule on the whole tensor alone would let it through.
    assert case is not LONG or results["dv"].ratio <= 3.0


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


LUCKY = {
    # One key and a sink: dq and dk are multiples of one number, and eager may have escaped its error by luck.
    "one number": (range(40, 60), Case(2, 3, 1, 1, 1, 40, sinks=True), {}),
    # Scores of 30 are wrong by 5e-6 in float32, and so is a weight near 1, which eager has exactly.
    "sums in another order": (range(4), Case(1, 1, 1, 86, 86, 40, dtype=F32, softmax_scale=1.0, tables="yarn"),
                              {"reverses_sums": True}),
}  # fmt: skip


@pytest.mark.parametrize(("seeds", "case", "arithmetic"), LUCKY.values(), ids=LUCKY)
def test_draws_excuse_a_lucky_eager(seeds, case, arithmetic):
    refused = 0
    for seed in seeds:
        judge = Judge(replace(case, seed=seed))
        out = judge.flash(**arithmetic)
        refused += not all(result.ok for result in judge(out).values())
        assert_right(judge(out, draws=True))
        if arithmetic:  # a weight that is wrong by 2e-4 is no such error
            wrong = out._replace(dv=torch.cat((out.dv[:, :, :40], out.dv[:, :, 40:] * 1.0002), 2))
            assert not judge(wrong, draws=True, names=["dv"])["dv"].ok
    assert refused  # of how many seeds it is true depends on the build of torch, which draws the numbers


def test_draws_excuse_a_lucky_largest_logit():
    """Near a number of bfloat16 eager's rounding of the product hides that of q and k, and in every draw of it."""
    refused, name = 0, "max_logit"
    case = Case(1, 1, 1, 11, 11, 128, causal=False, rotary_dim=8, dtype=BF16, tables="random", softmax_scale=-0.088)
    for seed in range(100, 140):
        judge = Judge(replace(case, seed=seed))
        q, k = (reference.rotate(x, judge.inputs.cos, judge.inputs.sin).float() for x in judge.inputs[:2])
        right, wrong = judge.flash(), judge.flash()
        right.max_logit = (q @ k.mT * case.scale).amax((2, 3))
        wrong.max_logit = right.max_logit + 0.05
        assert judge(right, draws=True, names=[name])[name].ok
        if not judge(right, names=[name])[name].ok:
            refused += 1
            assert not judge(wrong, draws=True, names=[name])[name].ok
    assert refused


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
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


def test_float32_leaves_a_wrong_angle_nowhere_to_hide():
    judge = Judge(Case(1, 2, 1, 64, 64, 32, dtype=F32))
    assert_right(judge(judge.flash()))
    low = judge.inputs._replace(cos=judge.inputs.cos.half().float(), sin=judge.inputs.sin.half().float())
    assert not any(result.ok for result in judge(flash(low, judge.case)).values())
    off = judge.ref64.o.clone()
    off[0, 1, 5, 7] += 3e-5 * off.square().mean().sqrt()
    assert not judge(judge.eager._replace(o=off), names=["o"])["o"].ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["o", "dq", "lse"])
def test_what_is_not_finite_never_passes(name, bad):
    ref64 = torch.randn(1, 1, 8, 16, dtype=F64)
    out = ref64.half()
    out.view(-1)[3] = bad
    for eager in (ref64.half(), torch.full_like(out, math.nan), torch.full_like(out, 1e4)):
        result = compare(name, out, ref64, eager, grad=name == "dq", dtype=F16)
        assert not result.ok and result.detail


@pytest.mark.parametrize(
    ("name", "out", "exact", "zero", "holds"),
    [
        # Infinities of lse must agree.
        *(("lse", [-math.inf, 1.0, x], [-math.inf, 1.0, 2.0], 1.0, x < 2.001) for x in (2.0, 2.00001, 2.01)),
        *(("lse", [x, y, 2.0], [-math.inf, 1.0, 2.0], 1.0, False) for x in (math.inf, -1e30) for y in (1.0, -math.inf)),
        # A zero may be float32 noise, and an empty tensor is right.
        *(("dq", [[x] * 8], [[0.0] * 8], zero, holds)
            for x, zero, holds in ((0.0, 1.0, True), (1e-5, 1.0, False), (1e-5, 4.0, True))),
        ("o", [], [], 1.0, True),
    ],
)  # fmt: skip
def test_special_numbers(name, out, exact, zero, holds):
    out, exact, options = torch.tensor(out), torch.tensor(exact, dtype=F64), {"grad": name == "dq", "dtype": F16}
    assert compare(name, out, exact, exact.float(), **options, zero=zero).ok is holds
    with pytest.raises(ValueError, match=f"^{name} and eager must have the reference's shape"):
        compare(name, out[None], exact, exact, **options)


def test_noise_of_what_is_zero_grows_with_what_adds_it_up():
    case = Case(1, 8, 2, 16, 16, 256, tables="random")
    inputs = make_inputs(case)
    tables = float((inputs.cos.square() + inputs.sin.square()).max())
    noise = {name: testing.noise_of_zero(name, case, inputs) for name in ("o", "dq", "dk", "dv")}
    assert tables > 1.0 and noise == pytest.approx({"o": 2.0, "dq": 2.0 * tables, "dk": 4.0 * tables, "dv": 4.0})
    small = replace(case, heads_q=2, head_dim=32, tables="rope")
    assert testing.noise_of_zero("dk", small, make_inputs(small)) == pytest.approx(1.0)


def test_layouts():
    q = {layout: make_inputs(Case(2, 4, 2, 5, 7, 16, layout=layout)).q for layout in testing.LAYOUTS}
    assert all(x.shape == (2, 4, 5, 16) and x.stride(-1) == 1 for x in q.values())
    assert q["odd"].data_ptr() % 16 and q["odd"].stride(1) % 2 and q["odd"].stride(2) % 2
    assert q["one batch"].stride(0) == 0 and q["bhnd"].is_contiguous() and q["bnhd"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("tables", testing.TABLES[:-1])  # the last kind is none
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables(tables, interleaved):
    case = Case(2, 1, 1, 5, 7, 16, rotary_dim=10, tables=tables, interleaved=interleaved, extra_rows=3)
    half, full = make_inputs(case).cos, make_inputs(replace(case, full_width=True)).cos
    norm = half.square() + make_inputs(case).sin.square()
    assert half.shape == (10, 5) and torch.allclose(norm, torch.ones_like(norm)) == (tables == "rope")
    parts = (full[:, ::2], full[:, 1::2]) if interleaved else full.chunk(2, -1)
    assert all(torch.equal(part, half) for part in parts)
    batch = make_inputs(replace(case, table_batch=True, table_dtype=F16)).cos
    assert batch.shape == (2, 10, 5) and batch.dtype == F16 and not torch.equal(*batch)


@pytest.mark.parametrize("dtype", [None, F64])
def test_blocks_of_the_reference_add_up(monkeypatch, dtype):
    options = {"table_batch": True, "rotary_dim": 10, "interleaved": True, "sinks": True, "norms": 0.0}
    case = Case(2, 6, 3, 37, 41, 16, dtype=F32, **options)
    inputs = make_inputs(case)
    whole = run_reference(inputs, case, dtype)
    monkeypatch.setitem(testing.runs.BLOCK_BYTES, "cpu", 2 * 10 * 41 * 8)  # ten rows of one group
    parts = run_reference(inputs, case, dtype)
    for name in (*TENSORS, "dsinks", "dq_norm", "dk_norm", "max_logit"):
        torch.testing.assert_close(whole[name], parts[name], msg=name)
        assert whole[name].dtype == (F64 if dtype else F32)


def test_poison_empty_and_back():
    names = ("empty", "empty_like", "empty_strided")
    originals, x = [getattr(torch, name) for name in names] + [torch.Tensor.new_empty], torch.zeros(3)
    with pytest.raises(RuntimeError, match="inside"), testing.poison_empty():
        made = torch.empty(3, dtype=F16), torch.empty_like(x), torch.empty_strided((3,), (1,)), x.new_empty(3)
        for y in (*made, device.empty_on_cpu((3,), (1,), F32)):
            assert bool(y.isnan().all())
        assert torch.empty(3, dtype=torch.int32).shape == (3,) and torch.empty(3, requires_grad=True).requires_grad
        raise RuntimeError("inside")
    assert [getattr(torch, name) for name in names] + [torch.Tensor.new_empty] == originals
