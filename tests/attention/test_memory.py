"""Memory: addresses in the interpreter, on a GPU alignment, strides, peaks, and more than 2**31 elements."""

import gc
import sys
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, bytes_of, misaligned, peaks_of_both_passes, skip_below_free_memory
from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.places import INLINE, ON_SM_90, PREPASS, assert_same, both_backends, needs_sm_90, only_sm_90
from verification.testing import Case, Inputs, Results, make_inputs, run_op

pytestmark = ignore_overflow
FAR = 2**31 + 4096  # elements of a storage; only the touched pages are real
ROW = 2**31 // 320 + 1  # of 321 rows the last is beyond 2**31, but the distance within a tile of 64 rows fits 32 bits
ONE_HEAD = Case(1, 1, 1, 3, 3, 16)


@interpreted
@both_strategies
@pytest.mark.parametrize(
    ("case", "strides", "names"),
    [
        # Strides that fit 32 bits, but twice which does not: batches, heads, and rows inside one tile.
        (replace(ONE_HEAD, batch=3), (2**30, 64, 16, 1), ("q", "k", "v", "do")),
        (replace(ONE_HEAD, heads_q=3, heads_kv=3), (64, 2**30, 16, 1), ("q", "k", "v", "do")),
        (ONE_HEAD, (64, 64, 2**30, 1), ("q", "k", "v", "do")),
        (replace(ONE_HEAD, len_q=1, len_k=321), (64, 64, ROW, 1), ("k", "v")),
        (replace(ONE_HEAD, len_q=321, len_k=1), (64, 64, ROW, 1), ("q", "do")),
    ],
    ids=["batch", "head", "row", "tiles of keys", "tiles of queries"],
)
def test_offsets_pass_two_to_the_31(case, strides, names, strategy):
    """Results stay the same when one tensor at a time gets these strides."""
    inputs = make_inputs(case)
    expected = run_op(inputs, case, backend="triton", strategy=strategy)
    storage = torch.empty(FAR, dtype=case.dtype)
    for name in names:
        view = storage.as_strided(getattr(inputs, name).shape, strides)
        view.copy_(getattr(inputs, name))
        out = run_op(inputs._replace(**{name: view}), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), name


GUARD = """
import torch
from verification.testing import Case, make_inputs, run_op
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


@interpreted
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    """In a process of its own: an access to a guard page ends it."""
    hold_within_bounds(GUARD)


@interpreted
@both_strategies
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_memory_order_of_outputs_follows_the_inputs(layout, strategy):
    case = Case(2, 4, 2, 9, 12, 16, layout=layout)
    inputs = make_inputs(case)
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    for name, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        assert getattr(out, name).stride() == getattr(inputs, like).stride(), name


@both_backends
def test_alignment_is_not_remembered(chosen):
    """Equal shapes and strides, another alignment: a launch prepared for aligned pointers must not serve both."""
    case = replace(ODD_LENGTHS, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **chosen)
    for name in ("q", "k", "v", "cos", "do"):
        shifted = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        for x, y in zip(run_op(shifted, case, **chosen), expected):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        assert_same(run_op(inputs, case, **chosen), expected, chosen)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("chosen", "layout"),
    [(INLINE, "bnhd"), (PREPASS, "bnhd"), (PREPASS, "odd"), pytest.param(ON_SM_90, "bnhd", marks=needs_sm_90)],
)
def test_peaks(layout, chosen):
    """No copy of an aligned input but the rotated q and k, K and V not expanded to the query heads, no score matrix.

    An inline forward pass saves no rotated q and k, so that the backward pass rotates both. The sm_90 kernels divide
    few key heads of one sequence among programs. They add up dk and dv of 128 keys in float32, in up to two slots for
    each multiprocessor.
    """
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs, o, results, forward, backward = peaks_of_both_passes(case, **chosen)
    lse = torch.empty(1, 32, 1000, device="cuda")
    is_inline, is_copied, is_sm_90 = chosen == INLINE, layout == "odd", chosen == ON_SM_90
    rotated, copies = bytes_of(inputs.q, inputs.k), bytes_of(inputs.v, inputs.do)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    sums = 4 * (32 * 1024 * 128 + 2 * multiprocessors * 2 * 128 * 128)
    slack = (64 << 10) if is_sm_90 else 4096
    most = bytes_of(o, lse) + (not is_inline) * rotated + is_copied * (rotated + bytes_of(inputs.v))
    assert forward <= most + slack
    most = bytes_of(*results, lse, lse) + is_inline * rotated + is_copied * copies + is_sm_90 * sums
    assert backward <= most + slack


@pytest.mark.gpu
@pytest.mark.unpoisoned
@both_strategies
def test_more_than_two_to_the_31_elements(strategy):
    """All of q, k, v and the outputs are larger, and there are more than 65535 heads; both ends against float64."""
    skip_below_free_memory(60 << 30)
    case = Case(66000, 4, 4, 64, 64, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    assert inputs.q.numel() > 2**31 and inputs.k.numel() > 2**31
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    for part in (slice(0, 2), slice(32767, 32769), slice(-2, None)):
        some = replace(case, batch=2)
        some_inputs = Inputs(*(x[part] for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do[part])
        assert_matches_float64(some, some_inputs, Results(*(x[part] for x in out)))
    del inputs, out
    torch.cuda.empty_cache()


@only_sm_90
def test_saved_queries_take_the_place_of_those_that_were_given(chosen):
    """In a model q and k are results of projections: no more is held between the passes than before."""
    case = Case(2, 16, 16, 2048, 2048, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    size = inputs.q.numel() * inputs.q.element_size()

    def held(save_unrotated):
        gc.collect()  # what tests before this one left in cycles would be freed while memory is counted
        before = torch.cuda.memory_allocated()
        q, k, v = (x * 1 for x in leaves)
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **chosen, deterministic=save_unrotated)
        del q, k, v
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, o

    unrotated, o = held(True)
    del o
    rotated, o = held(False)
    lse = o.numel() // case.head_dim * 4
    assert unrotated == rotated <= 4 * size + lse + (64 << 10)
