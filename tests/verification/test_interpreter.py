"""Triton's interpreter: the faster search changes nothing else, and guards find writes outside of memory."""

import inspect

import pytest
import torch
import triton.language as tl

from fused_rope_attn.testing import poison_empty
from tests.support.marks import interpreted
from verification.interpreter import PACKAGES, guarded_memory


def builtins(package):
    return {name: member for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)}


@interpreted
def test_every_builtin_is_replaced_and_comes_back():
    from triton.runtime import interpreter

    assert interpreter._patch_builtin.__module__ == "verification.interpreter"
    before = [builtins(package) for package in PACKAGES]
    assert all(before) and {"load", "dot"} <= before[0].keys()
    scope = interpreter._LangPatchScope()
    for package in PACKAGES:
        interpreter._patch_builtin(package, interpreter.interpreter_builder, scope)
    assert not any(builtins(package) for package in PACKAGES)
    scope.restore()
    assert [builtins(package) for package in PACKAGES] == before


def allocate(expression, module="fused_rope_attn.made_up"):
    """Return the tensors of an expression, as code of this module of the package would make them."""
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
    originals = torch.empty, torch.Tensor.new_empty
    with guarded_memory():
        for expression in KINDS:
            x = allocate(expression)
            assert x.shape == (2, 3) and x._base is None and not x.requires_grad
            assert x.storage_offset() * x.element_size() % 16 == 0 and bool(element(x, -1).isnan())
            x.fill_(1)
        theirs = allocate("torch.empty(3, 4)[1:]", "torch.nn.init")
        element(theirs, -1).fill_(1)
        assert allocate("torch.empty(2, 3, device='meta')").is_meta
    assert (torch.empty, torch.Tensor.new_empty) == originals
    with pytest.raises(ValueError, match="of the call"), guarded_memory():
        element(allocate("torch.empty(3)"), 3).fill_(1)
        raise ValueError("of the call")
