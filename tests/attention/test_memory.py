"""Memory: addresses beyond 2**31 and outside of tensors, in the interpreter; alignment and peaks on a GPU."""

import sys
from dataclasses import replace

import pytest
import torch

from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, bytes_of, misaligned, peaks_of_both_passes
from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.places import INLINE, ON_SM_90, PREPASS, assert_same, both_backends, needs_sm_90
from verification.testing import Case, make_inputs, run_op

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
    hold_within_bounds(GUARD)


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
