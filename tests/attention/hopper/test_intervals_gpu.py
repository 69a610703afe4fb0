"""Intervals of query rows in the sm_90 kernels against float64."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import ODD_LENGTHS, assert_same_but_dq, capture
from tests.support.hopper import ON_SM_90, needs_sm_90
from tests.support.internals import run_operators
from verification.testing import INTERVALS, Case, Results, make_inputs, masks_of, run_op

pytestmark = needs_sm_90
RANDOM = replace(ODD_LENGTHS, causal=False, intervals="random")
SQUARE = replace(RANDOM, len_q=700)
# Several tiles of keys and of queries for each multiprocessor, with runs of whole blocks between mixed ones.
MANY = Case(2, 16, 4, 2500, 2500, 128, causal=False, dtype=BF16, intervals="random")
# The root has several times the part of the work of a multiprocessor.
UNEVEN = Case(2, 8, 2, 3000, 3000, 128, causal=False, dtype=BF16, intervals="tree")


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", INTERVALS)
def test_intervals(kind, head_dim):
    case = replace(SQUARE, intervals=kind, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, **ON_SM_90))


@pytest.mark.parametrize(
    "case",
    [
        replace(RANDOM, causal=True),
        replace(RANDOM, dtype=F16, heads_kv=8, batch=3),
        replace(RANDOM, kv_starts=(10, 300), kv_lens=(640, 410), causal=True),
        replace(RANDOM, kv_starts=(0, 700), kv_lens=(699, 700)),  # no key is left in the second
        replace(RANDOM, window=(150, 33), softcap=20.0, sinks=True),
        replace(RANDOM, norms=1.0, causal=True, sinks=True, head_dim=64),
        replace(RANDOM, norms=0.0, kv_lens=(700, 61), rotary_dim=64, interleaved=True, window=(90, -1)),
        replace(RANDOM, head_dim=256, softcap=9.0, kv_starts=(5, 500), norms=0.0, causal=True),
        replace(RANDOM, len_q=700, len_k=130, causal=True),  # rows at negative positions
        replace(RANDOM, len_q=1),
        replace(RANDOM, len_q=1, len_k=1),
        replace(RANDOM, intervals="starts", lse_gradient=True, sinks=True),
        replace(SQUARE, intervals="ends", window=(100, -1), causal=True),
        replace(SQUARE, intervals="blocks", window=(300, 200), layout="bhnd"),
        MANY,
        replace(MANY, intervals="tree", len_q=5000, len_k=5000, batch=1, head_dim=64),
        replace(MANY, intervals="prefix", len_q=4500, len_k=4500, batch=1, head_dim=96),
        replace(MANY, intervals="blocks", dtype=F16, head_dim=256, heads_q=8),
    ],
    ids=lambda case: case.name,
)
def test_intervals_with_other_options(case):
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, **ON_SM_90))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("norms", [None, 1.0])
def test_nan_where_no_row_and_no_key_is_seen_changes_no_bit(norms, head_dim):
    """Hidden keys next to visible ones and in whole blocks; rows that see nothing in the middle of a tile."""
    case = replace(SQUARE, norms=norms, sinks=True, causal=True, window=(260, 0), head_dim=head_dim, intervals=None)
    inputs, options = make_inputs(case, "cuda"), masks_of(case, "cuda")
    length = case.len_q
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, length, (2, length), generator=generator, dtype=torch.int32)
    ends = starts + torch.randint(-10, 30, (2, length), generator=generator, dtype=torch.int32)
    starts[0, 100:230], ends[0, 100:230] = 120, 400  # a block that is whole for some tiles
    ends[0, 170] = 0
    starts[1, length // 3 :] = length + 4  # whole blocks of hidden keys
    row, key = torch.arange(length)[:, None], torch.arange(length)
    sees = (key <= row) & (key >= row - 260) & (row >= starts[:, None]) & (row < ends[:, None])
    hidden, dead = (~sees.any(1)).cuda(), (~sees.any(2)).cuda()
    assert hidden.any() and dead.any() and not hidden.all() and not dead.all()
    options |= {"query_starts": starts.cuda(), "query_ends": ends.cuda()}

    def run(q, k, v, do):
        names = [] if norms is None else ["q_norm", "k_norm"]
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        leaves += [torch.ones(head_dim, device="cuda", requires_grad=True) for _ in names]
        given = options | dict(zip(names, leaves[3:])) | ON_SM_90
        o, lse = rope_attention(*leaves[:3], *inputs[3:5], True, return_lse=True, **given)
        return (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do))

    expected = run(*inputs[:3], inputs.do)
    q, do = (x.masked_fill(dead[:, None, :, None], math.nan) for x in (inputs.q, inputs.do))
    k, v = (x.masked_fill(hidden[:, None, :, None], y) for x, y in ((inputs.k, math.nan), (inputs.v, math.inf)))
    found = run(q, k, v, do)
    assert_same_but_dq(found[:5], expected[:5])
    for x, y in zip(found[5:], expected[5:]):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)
    assert (found[1].transpose(1, 2)[dead] == -math.inf).all()
    for x, rows in zip((found[0], *found[2:5]), (dead, dead, hidden, hidden)):
        assert not x.transpose(1, 2)[rows].any()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (2, 2)])
@pytest.mark.parametrize("norms", [None, 1.0])
def test_tiles_that_several_programs_share(heads, head_dim, norms):
    case = replace(UNEVEN, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, norms=norms)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, **ON_SM_90))


@pytest.mark.parametrize("case", [MANY, replace(MANY, head_dim=256, heads_q=8), UNEVEN], ids=lambda case: case.name)
def test_fifty_reruns(case):
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90)
    for _ in range(50):
        assert_same_but_dq(run_op(inputs, case, **ON_SM_90), first)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_causal_mask_as_intervals_has_the_bits_of_the_option(head_dim):
    """The blocks are visited in the same order."""
    case = replace(MANY, intervals=None, causal=True, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    starts = torch.arange(case.len_k, dtype=torch.int32, device="cuda")[None]
    found = [
        rope_attention(*inputs[:5], return_lse=True, **masked, **ON_SM_90)
        for masked in ({"causal": True}, {"query_starts": starts})
    ]
    assert_equal(*found)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_chunk_of_queries_has_the_bits_of_the_whole(head_dim):
    case = replace(SQUARE, head_dim=head_dim, kv_starts=(0, 90), causal=True)
    inputs = make_inputs(case, "cuda")
    q, *others = inputs[:5]
    given = {name: x for name, x in masks_of(case, "cuda").items() if x is not None and name != "softcap"}
    given |= {"batch_invariant": True, "return_lse": True} | ON_SM_90
    whole = rope_attention(q, *others, True, **given)
    for rows in (1, 77, 400):
        first = case.len_q - rows
        shifted = given | {name: given[name] - first for name in ("query_starts", "query_ends")}
        found = rope_attention(q[:, :, first:], *others, True, **shifted)
        assert_equal(found, [x[:, :, first:] for x in whole])


def test_passes_of_different_backends_fit_together():
    case = replace(RANDOM, norms=0.0, kv_starts=(0, 300), kv_lens=(700, 600), sinks=True)
    inputs = make_inputs(case, "cuda")
    for forward, backward in (("hopper", "triton"), ("triton", "hopper")):
        assert_matches_float64(case, inputs, run_operators(inputs, case, forward=forward, backward=backward))


def test_intervals_change_under_a_graph():
    """They are read on the device: no synchronisation, and a replay sees the new ones."""
    inputs = make_inputs(SQUARE, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    given = {name: x for name, x in masks_of(SQUARE, "cuda").items() if name.startswith("query_")}

    def step():
        o, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, return_lse=True, **given, **ON_SM_90)
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), inputs.do)

    graph, captured = capture(step)
    for seed in (3, 4):
        case = replace(SQUARE, seed=seed)
        for name, x in masks_of(case, "cuda").items():
            if name in given:
                given[name].copy_(x)
        graph.replay()
        assert_matches_float64(case, inputs, Results(*captured))
