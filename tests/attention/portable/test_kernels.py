"""The Triton kernels in Triton's interpreter, through the public function, against float64.

No case is in bfloat16, whose raw bits the interpreter multiplies; tests/attention/test_gpu.py has those. Shapes are
tiny, since a 64x64 tile of one head costs about 0.2 s, and odd, since kernels go wrong where a tile is cut.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fused_rope_attn import rope_attention
from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.testing import Case, Inputs, Results, compare, make_inputs, run_op, run_reference
from tests.support.guard_pages import hold_within_bounds

pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1; on a GPU see test_gpu.py"),
    # NumPy, of rows and columns of a tile that lie outside the tensor; what they hold is never stored.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

STRATEGIES = ("inline", "prepass")


def hold(case, inputs=None, *, strategy, out=None):
    """Every output and gradient of the kernels within the tolerance; inputs as they were. Returns the results."""
    inputs = make_inputs(case) if inputs is None else inputs
    before = [x.clone() for x in inputs]
    if out is None:
        out = run_op(inputs, case, backend="triton", strategy=strategy)
    assert all(torch.equal(x, y) for x, y in zip(before, inputs)), "inputs were modified"
    ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    for name in Results._fields:
        actual = getattr(out, name)
        expected_dtype = torch.float32 if name == "lse" else case.dtype
        assert actual.dtype == expected_dtype, (name, actual.dtype)
        result = compare(
            name, actual, getattr(ref64, name), getattr(eager, name), grad=name[0] == "d", dtype=case.dtype
        )
        assert result.ok, f"{case.name} [{strategy}]: {result}"
    return out


def cases(*rows):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in rows])


both = pytest.mark.parametrize("strategy", STRATEGIES)
F16, F32 = torch.float16, torch.float32


@both
@cases(
    *(Case(1, 1, 1, n, n, 32, causal=causal) for n in (1, 17, 63, 100) for causal in (False, True)),
    Case(1, 1, 1, 128, 128, 16),  # whole tiles only
    Case(1, 1, 1, 65, 65, 16, dtype=F32),
    Case(1, 1, 1, 100, 100, 32, dtype=F32, causal=False),
)
def test_lengths(case, strategy):
    hold(case, strategy=strategy)


@both
@cases(
    *(Case(1, 1, 1, *lengths, 16) for lengths in ((1, 70), (33, 100), (64, 65), (70, 1), (100, 33), (97, 64))),
    *(Case(1, 1, 1, *lengths, 16, causal=False) for lengths in ((1, 70), (33, 100), (64, 65))),
    Case(2, 2, 1, 37, 50, 16, dtype=F32),
    Case(2, 2, 1, 50, 37, 16, dtype=F32),
)
def test_different_lengths_of_q_and_k(case, strategy):
    out = hold(case, strategy=strategy)
    unseeing = max(0, case.len_q - case.len_k)
    if case.causal and unseeing:
        assert bool((out.o[:, :, :unseeing] == 0).all()) and bool((out.dq[:, :, :unseeing] == 0).all())
        assert bool((out.lse[:, :, :unseeing] == -math.inf).all())


@both
@cases(
    Case(2, 6, 2, 17, 17, 16),
    Case(2, 3, 1, 17, 17, 16, causal=False),
    Case(1, 5, 5, 17, 17, 16),
    Case(3, 7, 1, 9, 20, 16, dtype=F32),
    Case(1, 8, 2, 40, 40, 16, dtype=F32),
)
def test_heads(case, strategy):
    hold(case, strategy=strategy)


@both
@cases(
    *(Case(1, 1, 1, 37, 37, d) for d in (16, 24, 40, 64, 72, 80, 96)),
    Case(1, 1, 1, 20, 33, 128),
    Case(1, 1, 1, 17, 17, 256),
    Case(1, 2, 1, 20, 20, 24, dtype=F32, causal=False),
    Case(1, 2, 1, 20, 20, 96, dtype=F32),
    Case(1, 1, 1, 9, 9, 200, dtype=F32, interleaved=True),
)
def test_head_dims(case, strategy):
    hold(case, strategy=strategy)


@both
@pytest.mark.parametrize("interleaved", [False, True])
@cases(
    *(Case(1, 2, 1, 20, 37, d, rotary_dim=r) for d, r in ((16, 2), (16, 6), (24, 10), (40, 38), (32, 16), (64, 32))),
    Case(1, 1, 1, 37, 37, 80, rotary_dim=64, dtype=F32),
    Case(1, 1, 1, 20, 20, 24, rotary_dim=14, dtype=F32),
)
def test_partial_rotation(case, interleaved, strategy):
    hold(replace(case, interleaved=interleaved), strategy=strategy)


@both
@pytest.mark.parametrize("interleaved", [False, True])
@cases(
    Case(1, 1, 1, 37, 37, 32),
    Case(1, 1, 1, 37, 37, 32, full_width=True),
    Case(1, 1, 1, 37, 37, 40, full_width=True, rotary_dim=24),
    Case(1, 1, 1, 37, 37, 40, full_width=True, rotary_dim=10),  # W <= D/2: only rotary_dim tells it is full-width
    Case(3, 2, 1, 17, 20, 16, table_batch=True),
    Case(2, 1, 1, 17, 20, 16, table_batch=True, full_width=True, extra_rows=3, dtype=F32),
    Case(2, 1, 1, 17, 20, 16, extra_rows=7),
    Case(1, 1, 1, 37, 37, 16, table_dtype=F16),
    Case(1, 1, 1, 37, 37, 16, table_dtype=F16, full_width=True),
    Case(1, 1, 1, 37, 37, 16, tables="random"),
    Case(2, 2, 1, 20, 33, 24, tables="random", dtype=F32, rotary_dim=20, table_batch=True),
    Case(1, 1, 1, 37, 37, 16, tables="yarn", dtype=F32),
)
def test_tables(case, interleaved, strategy):
    hold(replace(case, interleaved=interleaved), strategy=strategy)


@both
def test_tables_with_a_leading_one_and_odd_strides(strategy):
    case = Case(2, 2, 1, 17, 17, 16)
    inputs = make_inputs(case)
    plain = hold(case, inputs, strategy=strategy)

    def strided(table):
        wide = torch.full((1, 2 * table.shape[0], 3 * table.shape[1] + 1), math.nan)
        wide[:, ::2, 1::3] = table
        return wide[:, ::2, 1::3]

    for cos, sin in ((strided(inputs.cos), inputs.sin[None]), (inputs.cos[None], strided(inputs.sin))):
        again = run_op(inputs._replace(cos=cos, sin=sin), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(plain, again))


@both
@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, -1.0, 2.0, 1])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_softmax_scale(softmax_scale, dtype, strategy):
    hold(Case(1, 2, 1, 20, 40, 16, dtype=dtype, softmax_scale=softmax_scale), strategy=strategy)


@both
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4, 2.45e5])
def test_extreme_logits(logit, causal, strategy):
    """All scores of a head far from zero: a finite mask sentinel or a maximum clamped at 0 would silence it.

    Scores and lse are float32, so that the weights, exp(score - lse), are known to an ulp of the logit only, here and
    in any other program that saves lse; the tolerance is four of them.
    """
    case = Case(1, 2, 1, 20, 40, 16, dtype=F32, causal=causal, rotary_dim=8)
    inputs = make_inputs(case)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 15], k[..., 15] = 4.0 * logit, 1.0
    inputs = inputs._replace(q=q, k=k)
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    ref64 = run_reference(inputs, case, torch.float64)
    tolerance = 1e-5 + 4 * abs(logit) * torch.finfo(F32).eps
    for name in Results._fields:
        expected = getattr(ref64, name)
        error = (getattr(out, name) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert float(error) <= tolerance, (name, float(error), tolerance)


@both
def test_hot_future_keys_are_invisible(strategy):
    """Keys that a row may not see carry scores that a finite mask value would lose against."""
    case = Case(1, 1, 1, 40, 40, 16, dtype=F32)
    inputs = make_inputs(case)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0] = q[..., 0].abs() + 1
    k[:, :, 20:] *= 1e5
    out = run_op(inputs._replace(q=q, k=k), case, backend="triton", strategy=strategy)
    short = replace(case, len_q=20, len_k=20)
    first = Inputs(q[:, :, :20], k[:, :, :20], inputs.v[:, :, :20], inputs.cos, inputs.sin, inputs.do[:, :, :20])
    expected = run_op(first, short, backend="triton", strategy=strategy)
    assert torch.equal(out.o[:, :, :20], expected.o) and torch.equal(out.dq[:, :, :20], expected.dq)


@both
@pytest.mark.parametrize("layout", ["bhnd", "odd", "expanded"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts(layout, interleaved, strategy):
    hold(Case(2, 4, 2, 17, 20, 24, layout=layout, interleaved=interleaved, rotary_dim=16), strategy=strategy)


@both
def test_the_last_dimension_may_be_strided(strategy):
    case = Case(1, 2, 1, 17, 20, 16, dtype=F32)
    inputs = make_inputs(case)

    def spread(x):
        wide = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]

    strided = Inputs(*(spread(x) for x in inputs[:3]), inputs.cos, inputs.sin, spread(inputs.do))
    out = run_op(strided, case, backend="triton", strategy=strategy)
    assert all(torch.equal(x, y) for x, y in zip(out, hold(case, inputs, strategy=strategy)))


@both
def test_transposed_sequence_and_head_dim(strategy):
    case = Case(1, 2, 1, 17, 20, 16, dtype=F32)
    inputs = make_inputs(case)
    turned = Inputs(*(x.mT.contiguous().mT for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do.mT.contiguous().mT)
    assert turned.q.stride(2) == 1
    hold(case, turned, strategy=strategy)


@both
@pytest.mark.parametrize("gradient", ["sum", "transposed", "strided", "broadcast over heads"])
def test_gradients_come_in_any_layout(gradient, strategy):
    """`out.sum().backward()` gives an expanded gradient, `out.transpose().reshape()` a permuted one."""
    case = Case(2, 2, 1, 17, 17, 16)
    inputs = make_inputs(case)
    do = {
        "sum": torch.ones((), dtype=F16).expand(2, 2, 17, 16),
        "transposed": inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "strided": inputs.do.repeat_interleave(2, -1)[..., ::2],
        "broadcast over heads": inputs.do[:, :1].expand(2, 2, 17, 16),
    }[gradient]
    out = hold(case, inputs._replace(do=do), strategy=strategy)
    if gradient == "sum":
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy).sum().backward()
        assert torch.equal(q.grad, out.dq) and torch.equal(k.grad, out.dk) and torch.equal(v.grad, out.dv)


@both
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 0, 0), (2, 5, 0)])
def test_empty(batch, len_q, len_k, strategy):
    case = Case(batch, 2, 1, len_q, len_k, 16)
    out = hold(case, strategy=strategy)
    assert bool((out.lse == -math.inf).all()) or len_k > 0
    for x in (out.o, out.dq, out.dk, out.dv):
        assert bool((x == 0).all())


@both
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_some_inputs_require_a_gradient(wanted, strategy):
    case = Case(1, 2, 1, 9, 12, 16)
    inputs = make_inputs(case)
    everything = run_op(inputs, case, backend="triton", strategy=strategy)
    tensors = {name: getattr(inputs, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    o = rope_attention(*tensors.values(), inputs.cos, inputs.sin, True, backend="triton", strategy=strategy)
    o.backward(inputs.do)
    for name, x in tensors.items():
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, getattr(everything, f"d{name}"))


@both
def test_lse_is_returned_and_not_differentiable(strategy):
    case = Case(1, 2, 1, 9, 12, 16, dtype=F32)
    q, k, v, cos, sin, do = make_inputs(case)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = rope_attention(q, k, v, cos, sin, True, return_lse=True, backend="triton", strategy=strategy)
    assert lse.shape == (1, 2, 9) and lse.dtype == F32 and not lse.requires_grad and o.requires_grad
    alone = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy=strategy)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)
    with torch.no_grad():
        quiet = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy=strategy)
    assert torch.equal(quiet, o) and not quiet.requires_grad
    gradients = torch.autograd.grad(o + lse[..., None].detach(), (q, k, v), do, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(gradients, torch.autograd.grad(o, (q, k, v), do)))


@both
def test_reruns_are_bitwise_equal(strategy):
    case = Case(2, 4, 2, 33, 40, 16)
    inputs = make_inputs(case)
    first = run_op(inputs, case, backend="triton", strategy=strategy)
    for deterministic in (False, True):
        again = run_op(inputs, case, backend="triton", strategy=strategy, deterministic=deterministic)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_strategies_agree():
    case = Case(2, 4, 2, 33, 40, 24, dtype=F32, rotary_dim=10, tables="random")
    inputs = make_inputs(case)
    inline, prepass = (run_op(inputs, case, backend="triton", strategy=strategy) for strategy in STRATEGIES)
    for x, y in zip(inline, prepass):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert torch.equal(run_op(inputs, case, backend="triton", strategy="auto").o, inline.o) or torch.equal(
        run_op(inputs, case, backend="triton", strategy="auto").o, prepass.o
    )


@both
def test_memory_order_of_outputs_follows_the_inputs(strategy):
    for layout in ("bnhd", "bhnd"):
        case = Case(2, 4, 2, 9, 12, 16, layout=layout)
        inputs = make_inputs(case)
        out = run_op(inputs, case, backend="triton", strategy=strategy)
        for name, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
            assert getattr(out, name).stride() == getattr(inputs, like).stride(), name


FAR = 2**31 + 4096  # elements of a storage of which only the touched pages are real


def far_away(inputs, case, strides, names, strategy):
    """Results stay the same when one tensor of `names` at a time gets these strides in a storage of FAR elements."""
    expected = run_op(inputs, case, backend="triton", strategy=strategy)
    storage = torch.empty(FAR, dtype=case.dtype)
    for name in names:
        view = storage.as_strided(getattr(inputs, name).shape, strides)
        view.copy_(getattr(inputs, name))
        out = run_op(inputs._replace(**{name: view}), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), name


@both
@pytest.mark.parametrize("dim", ["batch", "head", "row"])
def test_offsets_pass_two_to_the_31(dim, strategy):
    """Strides that fit 32 bits, but twice which does not: batches, heads, and rows inside one tile."""
    case = Case(3 if dim == "batch" else 1, 3 if dim == "head" else 1, 3 if dim == "head" else 1, 3, 3, 16)
    strides = {"batch": (2**30, 64, 16, 1), "head": (64, 2**30, 16, 1), "row": (64, 64, 2**30, 1)}[dim]
    far_away(make_inputs(case), case, strides, ("q", "k", "v", "do"), strategy)


@both
def test_offsets_of_tiles_pass_two_to_the_31(strategy):
    """Inside every tile 32 bits suffice; the first row of the last tile, of 16, 32 or 64 rows, lies beyond them."""
    rows = 321
    strides = (64, 64, 2**31 // (rows - 1) + 1, 1)
    assert 256 * strides[2] < 2**31 <= (rows - 1) * strides[2] < FAR - 16
    few_queries, few_keys = Case(1, 1, 1, 1, rows, 16), Case(1, 1, 1, rows, 1, 16)
    far_away(make_inputs(few_queries), few_queries, strides, ("k", "v"), strategy)
    far_away(make_inputs(few_keys), few_keys, strides, ("q", "do"), strategy)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(1, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    len_q=st.integers(0, 40),
    len_k=st.integers(0, 70),
    head_dim=st.integers(2, 6).map(lambda x: 8 * x),
    rotary=st.floats(0, 1),
    interleaved=st.booleans(),
    causal=st.booleans(),
    dtype=st.sampled_from([F16, F32]),
    tables=st.sampled_from(["rope", "yarn", "random"]),
    full_width=st.booleans(),
    table_batch=st.booleans(),
    layout=st.sampled_from(["bnhd", "bhnd", "odd", "expanded"]),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(1, 100),
)
def test_any_shape(batch, heads_kv, group, len_q, len_k, head_dim, rotary, causal, strategy, **features):
    case = Case(
        batch, group * heads_kv, heads_kv, len_q if causal else min(len_q, len_k), len_k, head_dim, causal=causal,
        rotary_dim=max(2, 2 * int(rotary * head_dim / 2)), **features,
    )  # fmt: skip
    hold(case, strategy=strategy)


GUARD = """
import torch
from fused_rope_attn.testing import Case, make_inputs, run_op
from tests.support.guard_pages import abut

for strategy in ("inline", "prepass"):
    for case in (
        Case(1, 2, 1, 17, 37, 24, rotary_dim=10, layout="bhnd"),
        Case(1, 1, 1, 37, 17, 16, layout="bhnd", interleaved=True, full_width=True),
        Case(2, 1, 1, 9, 9, 40, layout="bhnd", causal=False, table_batch=True),
    ):
        inputs = make_inputs(case)
        expected = run_op(inputs, case, backend="triton", strategy=strategy)
        for at_end in (True, False):
            guarded = type(inputs)(*(abut(x, at_end) for x in inputs))
            out = run_op(guarded, case, backend="triton", strategy=strategy)
            assert all(torch.equal(x, y) for x, y in zip(out, expected)), case.name
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    """In a process of its own: an access to a guard page ends it."""
    hold_within_bounds(GUARD)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(strategy, bad):
    """100 queries over 33 keys, causal: the first 67 rows see no key, whatever v holds."""
    inputs = make_inputs(Case(1, 1, 1, 100, 33, 16))
    v = inputs.v.clone()
    v[:, :, 0] = bad
    o, lse = rope_attention(
        inputs.q, inputs.k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy, return_lse=True
    )
    assert torch.equal(o[:, :, :67], torch.zeros_like(o[:, :, :67]))
    assert bool((lse[:, :, :67] == -math.inf).all()) and bool(torch.isfinite(lse[:, :, 67:]).all())
    assert not bool(torch.isfinite(o[:, :, 67:]).any()), "a visible NaN or infinity must not be hidden"
