"""Triton's interpreter: it is faster and else the same, finds overflow, and guards find writes outside of memory."""

import operator
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.support.marks import interpreted
from verification.interpreter import guarded_memory
from verification.testing import poison_empty


@interpreted
def test_builtins_are_replaced_once_for_all():
    replaced = tl.load, tl.core.load, tl.tensor.to
    assert not any(map(tl.core.is_builtin, replaced)) and combined(3, 4, "mul") == 12
    for _ in range(2):
        with pytest.raises(InterpreterError):
            combined(1, 2, "div")
        assert (tl.load, tl.core.load, tl.tensor.to) == replaced
    assert combined(3, 4, "sub") == -1


@triton.jit
def combine(a, b, OPERATION: tl.constexpr):
    tl.static_assert(OPERATION in ("add", "sub", "mul"))
    return a + b if OPERATION == "add" else a - b if OPERATION == "sub" else a * b


@triton.jit
def write_combined(a_ptr, b_ptr, out_ptr, OPERATION: tl.constexpr, WIDE: tl.constexpr):
    offs = tl.arange(0, 2)
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    if WIDE:
        a, b = a.to(tl.int64), b.to(tl.int64)
    tl.store(out_ptr + offs, combine(a, b, OPERATION))


def combined(a, b, operation, dtype=torch.int32, wide=False):
    out = torch.zeros(2, dtype=torch.int64)
    given = (torch.tensor([3, x]).to(dtype) for x in (a, b))
    write_combined[(1,)](*given, out, operation, wide)
    return out[1].item()


HIGHEST, LOWEST = 2**31 - 1, -(2**31)
EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
# Numbers beyond the last that fit, and these.
TOO_FAR = [
    (HIGHEST, 1, "add", torch.int32), (LOWEST, -1, "add", torch.int32), (LOWEST, 1, "sub", torch.int32),
    (HIGHEST, -1, "sub", torch.int32), (2**16, 2**15, "mul", torch.int32), (-(2**16), 2**15 + 1, "mul", torch.int32),
    (100, 28, "add", torch.int8), (1, 2, "sub", torch.uint32), (2**16, 2**16, "mul", torch.uint32),
]  # fmt: skip
LAST = [
    (HIGHEST, 0, "add", torch.int32), (LOWEST + 1, 1, "sub", torch.int32), (-(2**16), 2**15, "mul", torch.int32),
    (HIGHEST - 1, 1, "add", torch.int32), (255, 2**31, "add", torch.uint32), (100, 27, "add", torch.int8),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize(("a", "b", "operation", "dtype"), TOO_FAR + LAST)
def test_an_overflow_is_found(a, b, operation, dtype):
    is_found = pytest.raises(InterpreterError, match=f"overflow detected for operation {operation}")
    with is_found if (a, b, operation, dtype) in TOO_FAR else nullcontext():
        assert combined(a, b, operation, dtype) == EXACT[operation](a, b)
    assert combined(a, b, operation, dtype, wide=True) == EXACT[operation](a, b)


def allocate(expression, module="fused_rope_attn.made_up"):
    return eval(expression, {"torch": torch, "__name__": module, "like": torch.ones(2, 3)})


def element(x, number):
    """Return the element of ``x``'s memory with this number, which may be outside of ``x``."""
    return x.as_strided((1,), (1,), x.storage_offset() + number)


KINDS = ("torch.empty(2, 3)", "torch.empty_like(like)", "torch.empty_strided((2, 3), (4, 1))", "like.new_empty((2, 3))")


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("expression", [*KINDS, "torch.empty(0, 3)", "torch.empty(6, dtype=torch.int8)"])
@pytest.mark.parametrize("is_poisoned", [False, True])
def test_a_write_outside_is_found(expression, is_poisoned):
    for outside in ("before", "after"):
        with pytest.raises(AssertionError, match=r"wrote outside of tensors of shape \("), guarded_memory():
            with poison_empty() if is_poisoned else torch.no_grad():
                x = allocate(expression)
            end = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0
            element(x, -1 if outside == "before" else end).fill_(1)


@interpreted
@pytest.mark.unpoisoned
def test_writes_inside_and_other_memory_are_not():
    with guarded_memory():
        for expression in KINDS:
            x = allocate(expression)
            assert x.shape == (2, 3) and x._base is None and not x.requires_grad
            assert x.storage_offset() * x.element_size() % 16 == 0 and bool(element(x, -1).isnan())
            x.fill_(1)
        element(allocate("torch.empty(3, 4)[1:]", "torch.nn.init"), -1).fill_(1)
        assert allocate("torch.empty(2, 3, device='meta')").is_meta
    with pytest.raises(ValueError, match="of the call"), guarded_memory():
        element(allocate("torch.empty(3)"), 3).fill_(1)
        raise ValueError("of the call")
