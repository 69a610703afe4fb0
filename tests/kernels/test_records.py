"""Records in device code that are refused; every kernel uses the others."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record
from tests.support.marks import interpreted

pytestmark = interpreted


@record
class Rows:
    ptr: tl.tensor
    strides: tl.tuple
    first: tl.tensor | None
    D: tl.constexpr


@triton.jit
def incomplete_kernel(x_ptr):
    rows = Rows(ptr=x_ptr, D=16)
    tl.store(rows.ptr, 0.0)


def same_fields():
    @record
    class Other:
        ptr: tl.tensor
        strides: tl.tuple
        first: tl.tensor
        D: tl.constexpr


def test_refusals():
    for faulty, words in (
        (lambda: incomplete_kernel[(1,)](torch.empty(1)), "a record of ptr, strides, first, D cannot be made of"),
        (lambda: Rows.host(1, 2, None), "Rows takes ptr, strides, first, D"),
        (lambda: Rows.host(1, 2, None, 4, ALIGNED=True), "Rows takes ptr, strides, first, D"),
        (same_fields, "has the fields of Rows"),  # two such would be one to a kernel
    ):
        with pytest.raises(Exception, match=words):
            faulty()
