"""Intervals of query rows for each key: the reference against loops, checks, plans, and what they are refused for."""

import math
from dataclasses import replace

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import masks, plan, rope_attention
from tests.support.attention import assert_matches_float64
from tests.support.loop_attention import check_reference, qkv, tables
from tests.support.marks import cases
from verification.testing import Case, make_inputs, masks_of, run_op

BASE = Case(2, 2, 1, 9, 9, 16, causal=False, intervals="random", dtype=torch.float32)


def random_bounds(seed, batch, rows, keys):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, rows + 3, (2, batch, keys), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    "options", [{}, {"window": (2, 1)}, {"kv_starts": [1, 3], "kv_lens": [6, 9]}, {"softcap": 2.0}]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("given", [(0,), (1,), (0, 1)])
def test_reference(options, causal, batch, given):
    q, k, v = qkv(len_q=6, len_k=7)
    options = {name: torch.tensor(x, dtype=torch.int32) if name[:3] == "kv_" else x for name, x in options.items()}
    bounds = random_bounds(batch, batch, 6, 7)
    intervals = {("query_starts", "query_ends")[i]: bounds[i] for i in given}
    if "kv_lens" in options:
        options["kv_lens"] = options["kv_lens"].clamp(max=7)
    check_reference(q, k, v, *tables(7, 8), causal, rotary_dim=8, **options, **intervals)


@cases(
    BASE,
    replace(BASE, intervals="starts", sinks=True, causal=True),
    replace(BASE, intervals="ends", norms=1.0, lse_gradient=True),
    replace(BASE, intervals="shared", window=(4, 2)),
    *(replace(BASE, intervals=name) for name in ("documents", "tree", "prefix", "chunks", "blocks")),
)
def test_gradients_of_the_reference(case):
    """The operator's reference backend agrees with the float64 reference that every kernel is compared with."""
    inputs = make_inputs(case)
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="reference"))


def test_what_no_row_sees_may_hold_nan():
    case = replace(BASE, batch=1, norms=0.0)
    inputs = make_inputs(case)
    starts = torch.tensor([[0, 5, 0, 3, 0, 9, 0, -3, 2]], dtype=torch.int32)
    ends = torch.tensor([[7, 5, 7, 2, 7, 12, 7, 0, 7]], dtype=torch.int32)
    options = {"query_starts": starts, "query_ends": ends, "norm_eps": 1e-6, "return_lse": True}
    hidden, dead = [1, 3, 5, 7], [7, 8]

    def run(q, k, v, do):
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        weights = [torch.ones(16, requires_grad=True) for _ in range(2)]
        o, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, q_norm=weights[0], k_norm=weights[1], **options)
        return (o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v, *weights), do))

    expected = run(inputs.q, inputs.k, inputs.v, inputs.do)
    q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    k[:, :, hidden], v[:, :, hidden], q[:, :, dead], do[:, :, dead] = math.nan, math.inf, math.nan, math.nan
    found = run(q, k, v, do)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    assert not found[0][:, :, dead].any() and (found[1][:, :, dead] == -math.inf).all()


@pytest.mark.parametrize("name", ["query_starts", "query_ends"])
@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([0] * 9, TypeError, "must be a torch.Tensor"),
        (torch.zeros(2, 9), TypeError, "must be int32, but is float32"),
        (torch.zeros(2, 9, dtype=torch.int64), TypeError, "must be int32, but is int64"),
        (
            torch.zeros(9, dtype=torch.int32),
            ValueError,
            r"shape \(B, NK\) or \(1, NK\) with B = 2, NK = 9, but has \(9,\)",
        ),
        (torch.zeros(2, 8, dtype=torch.int32), ValueError, r"NK = 9, but has \(2, 8\)"),
        (torch.zeros(1, 8, dtype=torch.int32), ValueError, r"NK = 9, but has \(1, 8\)"),
        (torch.zeros(3, 9, dtype=torch.int32), ValueError, r"B = 2, NK = 9, but has \(3, 9\)"),
        (torch.zeros(2, 9, dtype=torch.int32, device="meta"), ValueError, "meta"),
    ],
)
def test_wrong_bounds_are_refused(name, bounds, error, message):
    inputs = make_inputs(BASE)
    with pytest.raises(error, match=f"^{name}.*{message}" if "meta" not in message else message):
        rope_attention(*inputs[:5], **{name: bounds})


def test_layout_and_dtype_of_the_result():
    """In the layout (B, N, H, D) the intervals stay (B, NK)."""
    case = replace(BASE, len_q=5, intervals="random")
    inputs, found = make_inputs(case), {}
    options = {name: x for name, x in masks_of(case).items() if name.startswith("query_")}
    for layout in ("bhsd", "bshd"):
        q, k, v = (x if layout == "bhsd" else x.transpose(1, 2) for x in inputs[:3])
        o = rope_attention(q, k, v, *inputs[3:5], layout=layout, **options)
        found[layout] = o if layout == "bhsd" else o.transpose(1, 2)
    assert torch.equal(found["bhsd"], found["bshd"])


def test_intervals_do_what_other_masks_do():
    inputs = make_inputs(replace(BASE, batch=1, intervals=None))
    causal = rope_attention(*inputs[:5], True)
    token = torch.arange(9, dtype=torch.int32)[None]
    assert torch.equal(rope_attention(*inputs[:5], query_starts=token), causal)
    banded = rope_attention(*inputs[:5], window=(2, 0))
    assert torch.equal(rope_attention(*inputs[:5], query_starts=token, query_ends=token + 3), banded)
    starts, ends = masks.documents(torch.tensor([0, 4, 9]))
    found = rope_attention(*inputs[:5], query_starts=starts, query_ends=ends)
    alone = rope_attention(*(x[:, :, 4:] for x in inputs[:3]), *(x[4:] for x in inputs[3:5]), True)
    torch.testing.assert_close(found[:, :, 4:], alone)


def test_plan_on_a_cpu():
    inputs = make_inputs(BASE)
    options = {name: x for name, x in masks_of(BASE).items() if name.startswith("query_")}
    assert plan(*inputs[:5], **options).backend == "reference"


@pytest.mark.parametrize("name", ["query_starts", "query_ends"])
def test_functions_without_them_refuse_them(name):
    q, k, v, cos, sin, _ = make_inputs(BASE)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    for call in (
        lambda: package.rope_attention_varlen(*packed, cos, sin, ends, ends, 9, 9, **{name: ends}),
        lambda: package.rope_attention_with_kvcache(q, k, v, cos, sin, cache_seqlens=ends, **{name: ends}),
        lambda: package.distributed.rope_attention_cp(q, k, v, cos, sin, group=None, **{name: ends}),
    ):
        with pytest.raises(TypeError, match=rf"^rope_attention_\w+\(\) does not take '{name}' \("):
            call()


@pytest.mark.unpoisoned
def test_compile():
    torch._dynamo.reset()
    inputs, options = make_inputs(BASE), {name: x for name, x in masks_of(BASE).items() if name.startswith("query_")}
    compiled = torch.compile(rope_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs[:5], **options), rope_attention(*inputs[:5], **options))
