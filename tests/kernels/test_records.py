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
class Window:
    """A record within a record, with a compile-time default."""

    rows: Rows
    scale: tl.tensor | None
    IS_DOUBLED: tl.constexpr = False


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
def copies_kernel(x_ptr, o_ptr, strides, D: tl.constexpr):
    rows = Rows(ptr=x_ptr, strides=strides, first=None, D=D)
    half = replace(rows, first=2, D=D // 2)
    tl.store(o_ptr + tl.arange(0, D), load_row(rows, 0))
    tl.store(o_ptr + D + tl.arange(0, D // 2), load_row(half, 1))


def test_copies_with_other_fields():
    """A compile-time field, and one that was None; the original keeps its own."""
    x, out = torch.randn(2, 16), torch.empty(24)
    copies_kernel[(1,)](x, out, x.stride(), 16)
    expected = torch.cat((x[0], x[1, :8]))
    expected[16:18] = 0
    assert torch.equal(out, expected)


@triton.jit(do_not_specialize=["count"])
def passed_kernel(window, out, count, D: tl.constexpr):
    window, out = unpack((window, out))
    total = tl.zeros((D,), tl.float32)
    for i in range(count):
        total += load_row(window.rows, i)
    if window.scale is not None:
        total *= window.scale
    if window.IS_DOUBLED:
        total *= 2
    tl.store(out.ptr + tl.arange(0, window.rows.D) * out.strides[0], total)


@pytest.mark.parametrize(("scale", "options"), [(None, {}), (0.5, {}), (3.0, {"IS_DOUBLED": True})])
def test_the_host_passes_records_whole(scale, options):
    """A record in a record, an absent field, a default, strides, and a compile-time field that shapes a block."""
    x, out = torch.randn(16, 7).T, torch.empty(16)
    window = Window.host(Rows.host(x, x.stride(), None, D=16), scale, **options)
    passed_kernel[(1,)](window, Out.host(ptr=out, strides=out.stride()), 7, 16)
    torch.testing.assert_close(out, x.sum(0) * (scale or 1.0) * (2 if options else 1))


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
