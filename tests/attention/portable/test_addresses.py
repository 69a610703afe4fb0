"""Every address of the portable kernels, in the interpreter: offsets beyond 32 bits, and none outside the tensors."""

import sys

import pytest
import torch

from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op

pytestmark = [interpreted, ignore_overflow]
FAR = 2**31 + 4096  # elements of a storage; only the touched pages are real


def far_away(inputs, case, strides, names, strategy):
    """Results stay the same when one tensor of `names` at a time gets these strides in a storage of FAR elements."""
    expected = run_op(inputs, case, backend="triton", strategy=strategy)
    storage = torch.empty(FAR, dtype=case.dtype)
    for name in names:
        view = storage.as_strided(getattr(inputs, name).shape, strides)
        view.copy_(getattr(inputs, name))
        out = run_op(inputs._replace(**{name: view}), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), name


@both_strategies
@pytest.mark.parametrize("dim", ["batch", "head", "row"])
def test_offsets_pass_two_to_the_31(dim, strategy):
    """Strides that fit 32 bits, but twice which does not: batches, heads, and rows inside one tile."""
    case = Case(3 if dim == "batch" else 1, 3 if dim == "head" else 1, 3 if dim == "head" else 1, 3, 3, 16)
    strides = {"batch": (2**30, 64, 16, 1), "head": (64, 2**30, 16, 1), "row": (64, 64, 2**30, 1)}[dim]
    far_away(make_inputs(case), case, strides, ("q", "k", "v", "do"), strategy)


@both_strategies
def test_offsets_of_tiles_pass_two_to_the_31(strategy):
    """Inside every tile 32 bits suffice; the first row of the last tile, of 16, 32 or 64 rows, is beyond them."""
    rows = 321
    strides = (64, 64, 2**31 // (rows - 1) + 1, 1)
    assert 256 * strides[2] < 2**31 <= (rows - 1) * strides[2] < FAR - 16
    few_queries, few_keys = Case(1, 1, 1, 1, rows, 16), Case(1, 1, 1, rows, 1, 16)
    far_away(make_inputs(few_queries), few_queries, strides, ("k", "v"), strategy)
    far_away(make_inputs(few_keys), few_keys, strides, ("q", "do"), strategy)


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    """In a process of its own: an access to a guard page ends it."""
    hold_within_bounds(GUARD)
