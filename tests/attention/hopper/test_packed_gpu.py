"""Packed sequences in the sm_90 kernels."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from tests.support.attention import assert_matches_float64, sequences_of
from tests.support.dtypes import BF16, F16
from tests.support.gpu import assert_alike, assert_same_but_dq, capture
from tests.support.hopper import EMPTY, ON_SM_90, UNEVEN, check_in_dtype, check_reruns, needs_sm_90, packed
from tests.support.internals import run_operators
from tests.support.packed_tables import SEQUENCES, assert_nothing_reads_behind_the_tables
from verification.testing import Results, make_inputs, run_op

pytestmark = needs_sm_90
PACKINGS = (
    packed((700, 1, 333, 64, 128, 129, 63)),
    packed((700, 1, 333, 64, 128, 129, 63), causal=False),
    packed((256, 128, 384)),
    packed((1000,)),
    packed((5,)),
    packed((1000, 40)),  # shorter than the row that it begins at, where limits and rows are easily confused
    packed(((64, 1000), (300, 20), (40, 40)), causal=False),
    packed(UNEVEN),
    packed(UNEVEN, causal=False),
    packed(UNEVEN, head_dim=64),
    packed((0, 0, 200, 0, 333, 0)),
    packed((20, 333), behind=(400, 700)),
    packed((20, 333), behind=(400, 700), causal=False),
    packed((), behind=(5, 9)),
    packed(((0, 20), (0, 300))),
    packed(EMPTY),
    packed(EMPTY, head_dim=64),
    packed((700, 500, 90), window=(200, 0)),
    packed((700, 500), window=(0, 0)),
    packed(UNEVEN, window=(33, 0)),
    packed(UNEVEN, window=(20, 300), causal=False, softcap=3.0, sinks=True),
    packed((700, 500, 90), window=(100, 50), causal=False, softcap=3.0, sinks=True),
    packed(UNEVEN, window=(90, 0), sinks=True, head_dim=96),
    packed(UNEVEN, softcap=20.0, head_dim=64, causal=False, sinks=True),
    packed((300, 401), interleaved=True, rotary_dim=64, full_width=True, tables="random"),
    packed((300, 401), softmax_scale=-0.3, table_dtype=BF16),
    packed((300, 401), softmax_scale=0.0),
    packed((300, 401), layout="bhnd"),
    packed((1500, 40, 2000, 900), heads_q=16, heads_kv=4),
    packed((1500, 40, 0, 2000, 1, 900, 127, 4096), causal=False),
    packed((0, 0, 1500, 0, 40, 700, 0, 0), heads_q=9, heads_kv=3),  # two tiles for each multiprocessor, some empty
    packed(tuple(1 + 37 * i % 300 for i in range(300)), heads_q=4, heads_kv=4),
    packed((700, 1, 333, 64, 128, 129, 63), head_dim=256),
    packed((256, 128, 384), head_dim=256, causal=False),
    packed((5,), head_dim=256),
    packed(UNEVEN, head_dim=256),
    packed(UNEVEN, head_dim=160, causal=False),
    packed((0, 0, 200, 0, 333, 0), head_dim=256),
    packed((20, 333), behind=(400, 700), head_dim=256),
    packed((), behind=(5, 9), head_dim=192),
    packed(EMPTY, head_dim=256),
    packed((700, 500), window=(0, 0), head_dim=256),
    packed(UNEVEN, window=(33, 0), head_dim=192),
    packed(UNEVEN, window=(20, 300), causal=False, softcap=3.0, sinks=True, head_dim=256),
    packed(UNEVEN, window=(90, 0), softcap=20.0, sinks=True, head_dim=256, heads_kv=1),
    packed((300, 401), interleaved=True, rotary_dim=64, full_width=True, tables="random", head_dim=256),
    packed((300, 401), softmax_scale=-0.3, head_dim=136, layout="bhnd"),
    packed((1500, 40, 2000, 900), heads_q=16, heads_kv=8, head_dim=256),
    packed(tuple(1 + 37 * i % 300 for i in range(300)), heads_q=4, heads_kv=4, head_dim=256),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("number", range(len(PACKINGS)))
def test_packed_sequences_against_float64(number, dtype):
    check_in_dtype(PACKINGS[number], dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "case",
    [
        packed((300, 65, 200)),
        packed((300, 65, 200), causal=False, head_dim=64),
        packed(UNEVEN, behind=(90, 150)),
        packed(UNEVEN, behind=(90, 150), causal=False, softcap=20.0),
        packed((300, 65, 200), behind=(0, 30), window=(50, 0), dtype=F16),
        packed((300, 65, 200), head_dim=256),
        packed(UNEVEN, behind=(90, 150), causal=False, head_dim=192),
    ],
    ids=lambda case: case.name,
)
def test_nan_stays_in_its_sequence(case, bad):
    """Bad values in each sequence in turn, and in the rows after the last, do not change the other sequences, although
    their tiles read those rows."""
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **ON_SM_90)
    total_q, total_k = (sum(n[i] for n in case.seqlens) for i in range(2))
    for first_q, len_q, first_k, len_k in sequences_of(case):
        len_k = case.len_k - first_k if first_q >= total_q and first_k >= total_k else len_k
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **ON_SM_90)
        if len_q <= len_k and first_q < total_q:
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any())
        if first_q >= total_q and first_k >= total_k:
            assert not any(bool(x.any()) for x in (out.o[:, :, rows_q], out.dq[:, :, rows_q], out.dk[:, :, rows_k]))
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
        assert_same_but_dq(out, expected)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_packed_reruns(head_dim):
    """Tiles are taken in any order, and unwritten memory is poisoned each time."""
    check_reruns(packed((1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4, head_dim=head_dim), times=50)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_auto_takes_them_for_packed_sequences(head_dim):
    """The same bits as when they are asked for, which the portable kernels' are not."""
    case = packed((1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    auto, asked, portable = (run_op(inputs, case, backend=name) for name in ("auto", "hopper", "triton"))
    assert_same_but_dq(auto, asked)
    assert not torch.equal(auto.dk, portable.dk) and not torch.equal(auto.o, portable.o)
    assert_alike(auto, portable, 2e-2)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_packed_passes_of_different_backends_fit_together(head_dim):
    case = packed(UNEVEN, window=(150, 0), softcap=30.0, sinks=True, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    for forward, backward in (("hopper", "triton"), ("triton", "hopper")):
        out = run_operators(inputs, case, forward=forward, backward=backward)
        assert_matches_float64(case, inputs, out)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_packed_lengths_change_under_a_graph(head_dim):
    """cu_seqlens are read on the device: no synchronisation, and a replay sees the new ones."""
    case = packed((300, 0, 401, 99), head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3])
    do = inputs.do[0].transpose(0, 1)
    ends = torch.zeros(5, dtype=torch.int32, device="cuda")

    def fill(lengths):
        ends.copy_(torch.tensor((0, *lengths)).cumsum(0))

    def step():
        o, lse = rope_attention_varlen(
            q, k, v, inputs.cos, inputs.sin, ends, ends, 800, 800, True, return_lse=True, **ON_SM_90
        )
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do)

    fill((300, 0, 401, 99))
    graph, captured = capture(step)
    for lengths in ((300, 0, 401, 99), (800, 0, 0, 0), (1, 64, 65, 600)):
        fill(lengths)
        graph.replay()
        o, lse, *rest = captured
        whole = [x.transpose(0, 1)[None] for x in (o, *rest)]
        seqlens = tuple((n, n) for n in lengths)
        assert_matches_float64(replace(case, seqlens=seqlens), inputs, Results(whole[0], lse[None], *whole[1:]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", SEQUENCES)
def test_rows_behind_the_last_sequence_read_no_table_rows(name, head_dim, causal):
    options = {"causal": causal, **ON_SM_90}
    assert_nothing_reads_behind_the_tables(name, head_dim, F16, "cuda", **options)
