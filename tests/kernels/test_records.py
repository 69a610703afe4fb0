"""Records in device code: compile-time and run-time fields, None, tuples, records in records, and refusals."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record, replace, unpack
from tests.support.marks import interpreted

pytestmark = interpreted


@record
class Rows:
    """Rows of a matrix and where its visible columns begin."""

    ptr: tl.tensor
    strides: tl.tuple
    first: tl.tensor | None
    D: tl.constexpr


@record
class Out:
    """The output of a kernel."""

    ptr: tl.tensor
    strides: tl.tuple
    BLOCK: tl.constexpr = 1


@triton.jit
def load_row(rows, i):
    columns = tl.arange(0, rows.D)
    x = tl.load(rows.ptr + i * rows.strides[0] + columns * rows.strides[1])
    if rows.first is not None:
        x = tl.where(columns >= rows.first, x, 0.0)
    return x


@triton.jit
def copies_kernel(rows, out):
    rows, out = unpack((rows, out))
    half = replace(rows, first=2, D=rows.D // 2)
    tl.store(out.ptr + tl.arange(0, rows.D), load_row(rows, 0))
    tl.store(out.ptr + rows.D * out.BLOCK + tl.arange(0, half.D), load_row(half, 1))


def test_copies_with_other_fields():
    """The host passes records whole, with a default. A copy has another compile-time field, and one that was None."""
    x, out = torch.randn(16, 2).T, torch.empty(24)
    copies_kernel[(1,)](Rows.host(x, x.stride(), None, D=16), Out.host(ptr=out, strides=out.stride()))
    expected = torch.cat((x[0], x[1, :8]))
    expected[16:18] = 0
    assert torch.equal(out, expected)


@triton.jit
def incomplete_kernel(x_ptr):
    rows = Rows(ptr=x_ptr, D=16)
    tl.store(rows.ptr, 0.0)


def same_fields():
    @record
    class Other:
        ptr: tl.tensor
        strides: tl.tuple
        BLOCK: tl.constexpr


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (lambda: incomplete_kernel[(1,)](torch.empty(1)), "a record of ptr, strides, first, D cannot be made of"),
        (lambda: Rows.host(1, 2, None), "Rows takes ptr, strides, first, D"),
        (lambda: Rows.host(1, 2, None, 4, ALIGNED=True), "Rows takes ptr, strides, first, D"),
        (same_fields, "has the fields of Out"),  # two such would be one to a kernel
    ],
)
def test_refusals(faulty, words):
    with pytest.raises(Exception, match=words):
        faulty()
