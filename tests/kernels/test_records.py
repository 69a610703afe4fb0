"""Records in device code: compile-time and run-time fields, None, tuples, and a record around a loop."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record, replace, unpack
from fused_rope_attn.runtime.device import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="runs in Triton's interpreter")


@record
class Rows:
    """Rows of a matrix and where its visible columns begin."""

    ptr: tl.tensor
    strides: tl.tuple
    first: tl.tensor | None
    D: tl.constexpr


@triton.jit
def load_row(rows, i):
    columns = tl.arange(0, rows.D)
    x = tl.load(rows.ptr + i * rows.strides[0] + columns * rows.strides[1])
    if rows.first is not None:
        x = tl.where(columns >= rows.first, x, 0.0)
    return x


@triton.jit
def sum_kernel(x_ptr, first_ptr, o_ptr, strides, N: tl.constexpr, D: tl.constexpr):
    first = None
    if first_ptr is not None:
        first = tl.load(first_ptr)
    rows = Rows(ptr=x_ptr, strides=strides, first=first, D=D)
    total = tl.zeros((D,), tl.float32)
    for i in range(N):
        total += load_row(rows, i)
    tl.store(o_ptr + tl.arange(0, D), total)


@pytest.mark.parametrize("first", [None, 5])
def test_fields_of_every_kind(first):
    x = torch.randn(16, 7).T
    out = torch.empty(16)
    first_ptr = None if first is None else torch.tensor([first], dtype=torch.int32)
    sum_kernel[(1,)](x, first_ptr, out, x.stride(), 7, 16)
    expected = x.sum(0)
    if first is not None:
        expected[:first] = 0
    torch.testing.assert_close(out, expected)


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


@triton.jit
def incomplete_kernel(x_ptr):
    rows = Rows(ptr=x_ptr, D=16)
    tl.store(rows.ptr, 0.0)


def test_a_missing_field_is_an_error():
    with pytest.raises(Exception, match="a record of ptr, strides, first, D cannot be made of"):
        incomplete_kernel[(1,)](torch.empty(1))


@record
class Window:
    """A record within a record, with a compile-time default."""

    rows: Rows
    scale: tl.tensor | None
    IS_DOUBLED: tl.constexpr = False


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


@record
class Out:
    """The output of a kernel."""

    ptr: tl.tensor
    strides: tl.tuple
    BLOCK: tl.constexpr = 1


@pytest.mark.parametrize(("scale", "doubled"), [(None, False), (0.5, False), (3.0, True)])
def test_the_host_passes_records_whole(scale, doubled):
    """A record in a record, an absent field, a default, strides, and a compile-time field that shapes a block."""
    x, out = torch.randn(16, 7).T, torch.empty(16)
    options = {"IS_DOUBLED": True} if doubled else {}
    window = Window.host(Rows.host(x, x.stride(), None, D=16), scale, **options)
    passed_kernel[(1,)](window, Out.host(ptr=out, strides=out.stride()), 7, 16)
    torch.testing.assert_close(out, x.sum(0) * (scale or 1.0) * (2 if doubled else 1))


def test_a_record_takes_its_fields_alone():
    with pytest.raises(TypeError, match="Rows takes ptr, strides, first, D"):
        Rows.host(1, 2, None)
    with pytest.raises(TypeError, match="Rows takes ptr, strides, first, D"):
        Rows.host(1, 2, None, 4, ALIGNED=True)


def test_records_are_told_by_their_fields():
    """Two with the same fields would be one to a kernel, so the second is refused."""
    with pytest.raises(TypeError, match="has the fields of Out"):

        @record
        class Other:
            ptr: tl.tensor
            strides: tl.tuple
            BLOCK: tl.constexpr
