"""Intervals of query rows in the portable kernels, in Triton's interpreter, against float64.

Shapes are just large enough that every loop runs: 64 x 32 tiles forward and for dq, 32 x 64 for dk and dv.
"""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import masks, rope_attention
from tests.support.attention import gradients, run_and_compare
from tests.support.dtypes import F16, F32
from tests.support.marks import both_strategies, cases_in_turn, ignore_overflow, interpreted
from verification.testing import INTERVALS, Case, make_inputs, masks_of, run_op

BASE = Case(1, 2, 1, 150, 150, 16, causal=False, intervals="random", dtype=F32)
TWO = replace(BASE, batch=2, heads_q=1)


@interpreted
@ignore_overflow
@cases_in_turn(
    *(replace(TWO if name in ("prefix", "random") else BASE, intervals=name) for name in INTERVALS),
    replace(TWO, len_q=70, kv_starts=(10, 90), kv_lens=(100, 130), causal=True),
    replace(TWO, len_q=70, kv_starts=(0, 150), kv_lens=(149, 150)),  # no key is left in the second
    replace(BASE, intervals="shared", window=(40, 10)),
    replace(BASE, intervals="ends", window=(33, -1), causal=True, softcap=2.0, seed=1),
    replace(BASE, intervals="starts", sinks=True, lse_gradient=True, seed=2),
    replace(BASE, intervals="blocks", window=(60, 40), sinks=True, norms=1.0),
    replace(TWO, intervals="random", norms=0.0, kv_lens=(150, 61), head_dim=24, rotary_dim=10, interleaved=True),
    replace(BASE, len_q=100, len_k=33, intervals="random", kv_lens=(33,)),  # rows at negative positions
    replace(BASE, len_q=1),
    replace(BASE, heads_q=3, heads_kv=3, dtype=F16, layout="odd", table_batch=True),
    replace(BASE, dtype=F16, intervals="tree", head_dim=64, tables="random"),
)
def test_intervals(case, strategy):
    run_and_compare(case, strategy=strategy)


@interpreted
@ignore_overflow
@pytest.mark.parametrize(
    ("strategy", "norms", "length", "softcap"),
    [("prepass", None, 70, 2.0), ("inline", None, 150, 0.0), ("inline", 1.0, 70, 2.0), ("prepass", 1.0, 150, 0.0)],
)
def test_nan_where_no_row_and_no_key_is_seen_changes_no_bit(strategy, norms, length, softcap):
    """Hidden keys next to visible ones and in whole blocks; rows that see nothing in the middle of a tile."""
    case = replace(TWO, len_q=length, len_k=length, norms=norms, sinks=True, causal=True, window=(60, 0))
    case = replace(case, softcap=softcap)
    inputs, options = make_inputs(case), masks_of(case)
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, length, (2, length), generator=generator, dtype=torch.int32)
    ends = starts + torch.randint(-3, 9, (2, length), generator=generator, dtype=torch.int32)
    starts[1, length // 3 :] = length + 4  # whole blocks of hidden keys
    row, key = torch.arange(length)[:, None], torch.arange(length)
    sees = (key <= row) & (key >= row - 60) & (row >= starts[:, None]) & (row < ends[:, None])
    hidden, dead = ~sees.any(1), ~sees.any(2)
    assert hidden.any() and dead.any() and sees.any(1).any() and sees.any(2).any()
    options |= {"query_starts": starts, "query_ends": ends}

    def run(q, k, v, do):
        weights = {} if norms is None else {name: torch.ones(16) for name in ("q_norm", "k_norm")}
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *weights.values())]
        given = options | dict(zip(weights, leaves[3:])) | {"backend": "triton", "strategy": strategy}
        o, lse = rope_attention(*leaves[:3], *inputs[3:5], True, return_lse=True, **given)
        return (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do))

    expected = run(*inputs[:3], inputs.do)
    q, do = (x.masked_fill(dead[:, None, :, None], math.nan) for x in (inputs.q, inputs.do))
    k, v = (x.masked_fill(hidden[:, None, :, None], y) for x, y in ((inputs.k, math.nan), (inputs.v, math.inf)))
    found = run(q, k, v, do)
    for x, y in zip(found, expected):
        assert torch.equal(x, y)
    assert (found[1].transpose(1, 2)[dead] == -math.inf).all()
    for x, rows in zip((found[0], *found[2:5]), (dead, dead, hidden, hidden)):
        assert not x.transpose(1, 2)[rows].any()


@interpreted
@ignore_overflow
@both_strategies
def test_hidden_keys_between_keys_that_every_row_sees(strategy):
    """Blocks of queries run without comparisons then, and the hidden keys' gradients are zero all the same."""
    inputs = make_inputs(replace(BASE, intervals=None))
    ends = torch.full((1, 150), 150, dtype=torch.int32)
    ends[:, [3, 64, 65, 149]] = 0
    kept = ends[0] > 0
    options = {"query_ends": ends, "backend": "triton", "strategy": strategy}
    found = gradients(lambda q, k, v: rope_attention(q, k, v, *inputs[3:5], **options), inputs)
    expected = gradients(
        lambda q, k, v: rope_attention(q, k, v, *inputs[3:5], query_ends=ends, backend="reference"), inputs
    )
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)
    assert not found[2][:, :, ~kept].any() and not found[3][:, :, ~kept].any()


@interpreted
@ignore_overflow
@both_strategies
def test_calls_are_told_apart_by_which_tensors_they_have_and_their_values(strategy):
    """A known call is replayed with other intervals; a call with other tensors is another call."""
    inputs = make_inputs(replace(TWO, len_q=40, len_k=40))
    token = torch.arange(40, dtype=torch.int32)[None]
    shared = {"backend": "triton", "strategy": strategy}
    causal = rope_attention(*inputs[:5], True, **shared)
    banded = rope_attention(*inputs[:5], window=(7, 0), **shared)
    reversed_band = rope_attention(*inputs[:5], window=(-1, 0), **shared)
    full = rope_attention(*inputs[:5], **shared)
    for batch in (1, 2):
        for _ in range(3):
            rows = token.expand(batch, -1)
            for options, expected in (
                ({"query_starts": rows}, causal),
                ({"query_starts": rows, "query_ends": rows + 8}, banded),
                ({"query_starts": rows, "query_ends": rows + 40}, reversed_band),
                ({"query_ends": 0 * rows + 40}, full),
                ({"query_ends": 0 * rows}, torch.zeros_like(full)),
            ):
                torch.testing.assert_close(rope_attention(*inputs[:5], **options, **shared), expected)


@interpreted
@pytest.mark.unpoisoned
@both_strategies
def test_compile(strategy):
    torch._dynamo.reset()
    inputs = make_inputs(replace(TWO, len_q=9, len_k=12))
    options = {name: x for name, x in masks_of(replace(TWO, len_q=9, len_k=12)).items() if name.startswith("query_")}
    options |= {"backend": "triton", "strategy": strategy}
    compiled = torch.compile(rope_attention, fullgraph=True, backend="aot_eager")
    expected = gradients(lambda q, k, v: rope_attention(q, k, v, *inputs[3:5], **options), inputs)
    found = gradients(lambda q, k, v: compiled(q, k, v, *inputs[3:5], **options), inputs)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)


@interpreted
@ignore_overflow
def test_documents_are_packed_sequences():
    """Documents by intervals agree with each document by itself, tables included."""
    cu_seqlens = torch.tensor([0, 37, 37, 120, 150], dtype=torch.int32)
    starts, ends = masks.documents(cu_seqlens, 150)
    inputs = make_inputs(replace(BASE, intervals=None))
    whole = {"query_starts": starts, "query_ends": ends, "backend": "triton"}
    found = gradients(lambda q, k, v: rope_attention(q, k, v, *inputs[3:5], **whole), inputs)
    for first, end in ((0, 37), (37, 120), (120, 150)):
        part = inputs._replace(**{name: getattr(inputs, name)[:, :, first:end] for name in ("q", "k", "v", "do")})
        tables = [x[first:end] for x in inputs[3:5]]
        alone = gradients(lambda q, k, v: rope_attention(q, k, v, *tables, True, backend="triton"), part)  # noqa: B023
        for x, y in zip(found, alone):
            torch.testing.assert_close(x[:, :, first:end], y)


@interpreted
@ignore_overflow
def test_the_reference_and_the_kernels_agree_about_dead_rows():
    case = replace(BASE, len_q=40, len_k=40, sinks=True, lse_gradient=True, seed=4)
    inputs = make_inputs(case)
    found, expected = (run_op(inputs, case, backend=backend) for backend in ("triton", "reference"))
    assert torch.equal(found.lse == -math.inf, expected.lse == -math.inf)
