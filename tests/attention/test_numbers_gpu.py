"""The kernels on a GPU in single cases: extreme logits, calls without rows, NaN, float32, and the same bits again."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.attention import assert_equal, assert_matches_float64, packed_case, sequences_of
from tests.support.dtypes import F16, F32
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_alike, assert_same_but_dq, check_extreme_logits
from tests.support.hopper import (
    ON_SM_90,
    PADDED,
    PREPASS,
    UNEVEN,
    assert_same,
    both_backends,
    each_backend,
    only_sm_90,
    packed,
)
from tests.support.marks import cases
from tests.support.packed_tables import SEQUENCES, assert_nothing_reads_behind_the_tables
from verification.testing import Case, make_inputs, masks_of, run_op

pytestmark = pytest.mark.gpu


@each_backend
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit, chosen):
    check_extreme_logits(logit, **chosen)


@both_backends
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(bad, chosen):
    case = replace(ODD_LENGTHS, len_q=700, len_k=333)
    inputs = make_inputs(case, "cuda")
    inputs.v[:, :, 0] = bad
    out = run_op(inputs, case, **chosen, grads=False)
    hidden = 700 - 333
    assert bool((out.o[:, :, :hidden] == 0).all()) and bool((out.lse[:, :, :hidden] == -math.inf).all())
    assert bool(torch.isfinite(out.lse[:, :, hidden:]).all())
    assert not bool(torch.isfinite(out.o[:, :, hidden:]).any()), "a visible NaN or infinity must not be hidden"


@each_backend
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_calls_without_rows(batch, len_q, len_k, chosen):
    case = replace(ODD_LENGTHS, batch=batch, len_q=len_q, len_k=len_k)
    inputs = make_inputs(case, "cuda")
    if chosen == ON_SM_90 and not len_k:
        with pytest.raises(NotImplementedError, match="^k must have at least one position"):
            run_op(inputs, case, **chosen)
        chosen = {"backend": "auto"}
    assert_matches_float64(case, inputs, run_op(inputs, case, **chosen))


@both_backends
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@cases(
    replace(ODD_LENGTHS, len_q=433, len_k=130),  # no lengths, and more queries than keys
    replace(PADDED, kv_starts=(10, 470), kv_lens=(500, 505), softcap=9.0),
    replace(ODD_LENGTHS, intervals="random", window=(260, 0), sinks=True),
)
def test_nan_where_no_pair_is_visible_changes_no_bit(case, head_dim, chosen):
    """In keys that no query sees, in queries that see none, and in their dO; the gradients there are zero."""
    case = replace(case, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **chosen)
    dead, hidden = expected.lse[:, :1].isneginf()[..., None], (expected.dv == 0).all(-1, True).all(1, True)
    assert dead.any() or hidden.any()
    q, do = (x.masked_fill(dead, math.nan) for x in (inputs.q, inputs.do))
    k, v = inputs.k.masked_fill(hidden, math.nan), inputs.v.masked_fill(hidden, math.inf)
    found = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **chosen)
    assert_same(found, expected, chosen)
    for x, rows in ((found.o, dead), (found.dq, dead), (found.dk, hidden), (found.dv, hidden)):
        assert not x.masked_select(rows).any()


@both_backends
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@cases(
    packed((300, 65, 200)),
    packed(UNEVEN, behind=(90, 150), causal=False, softcap=20.0, head_dim=64),
    packed((300, 65, 200), behind=(0, 30), window=(50, 0), dtype=F16),
    packed(UNEVEN, behind=(90, 150), causal=False, head_dim=192),
)
def test_nan_stays_in_its_sequence(case, bad, chosen):
    """Bad values in each sequence in turn, and in the rows after the last, do not change the other sequences, although
    their tiles read those rows."""
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **chosen)
    for first_q, len_q, first_k, len_k in sequences_of(case):
        is_rest = first_q == sum(pair[0] for pair in case.seqlens) and first_k == sum(pair[1] for pair in case.seqlens)
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, None if is_rest else first_k + len_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **chosen)
        if is_rest:
            assert not any(bool(x.any()) for x in (out.o[:, :, rows_q], out.dq[:, :, rows_q], out.dk[:, :, rows_k]))
        elif len_q <= len_k:
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any())
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
        assert_same(out, expected, chosen)


@both_backends
@pytest.mark.parametrize(("causal", "head_dim"), [(False, 64), (True, 128), (True, 256)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_rows_behind_the_last_sequence_read_no_table_rows(name, head_dim, causal, chosen):
    assert_nothing_reads_behind_the_tables(name, head_dim, F16, "cuda", causal=causal, **chosen)


@both_backends
def test_a_row_that_is_not_finite_stays_in_its_row(chosen):
    case = replace(ODD_LENGTHS, norms=0.0)
    inputs = make_inputs(case, "cuda")
    clean = run_op(inputs, case, **chosen)
    q = inputs.q.clone()
    q[0, 1, 100, 7] = math.inf
    out = run_op(inputs._replace(q=q), case, **chosen)
    others = torch.arange(333, device="cuda") != 100
    for x, y in ((out.o, clean.o), (out.dq, clean.dq)):
        assert x[0, 1, 100].isnan().all()
        assert_alike([x[0, 1, others], x[1]], [y[0, 1, others], y[1]])


@only_sm_90
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_causal_mask_as_intervals_has_the_bits_of_the_option(head_dim, chosen):
    """The blocks are visited in the same order."""
    inputs = make_inputs(replace(MANY_TILES, head_dim=head_dim), "cuda")
    starts = torch.arange(MANY_TILES.len_k, dtype=torch.int32, device="cuda")[None]
    masks = {"causal": True}, {"query_starts": starts}
    assert_equal(*(rope_attention(*inputs[:5], return_lse=True, **masked, **chosen) for masked in masks))


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


@each_backend
def test_a_hundred_reruns(chosen):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    first = run_op(inputs, ODD_LENGTHS, **chosen)
    for _ in range(100):
        assert_same(run_op(inputs, ODD_LENGTHS, **chosen), first, chosen)


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


@only_sm_90
@pytest.mark.parametrize("head_dim", [128, 256])
def test_auto_takes_the_sm_90_kernels(chosen, head_dim):
    """The same bits as when they are asked for, which the portable kernels' are not."""
    case = packed_case(ODD_LENGTHS, (1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4, head_dim=head_dim)
    inputs = make_inputs(case, "cuda")
    auto, asked, portable = (run_op(inputs, case, backend=name) for name in ("auto", "hopper", "triton"))
    assert_same_but_dq(auto, asked)
    assert not torch.equal(auto.dk, portable.dk) and not torch.equal(auto.o, portable.o)


def test_auto_takes_kernels():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    chosen = plan(*inputs[:5], True)
    assert chosen.backend != "reference" and chosen.reason and chosen.forward is not None
    same = {"backend": chosen.backend, "strategy": chosen.strategy}
    assert torch.equal(
        run_op(inputs, ODD_LENGTHS, backend="auto", grads=False).o, run_op(inputs, ODD_LENGTHS, grads=False, **same).o
    )


def test_poisoned_memory_is_poisoned_here_too():
    assert bool(torch.empty(1000, device="cuda").isnan().all())
