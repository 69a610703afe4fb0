"""Triton's interpreter: faster, with exact products, and with overflow and writes outside of tensors found."""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.language import core  # noqa: F401
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from verification.frames import in_one_chunk
from verification.testing.poison import wrap_empty

_OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def make_faster() -> None:
    """Make the interpreter of this process four times as fast, and let it find overflow. Not within a kernel.

    At every call of a device function Triton searches ``triton.language`` for its builtins and replaces them. Here it
    does so once for all, by functions that call a builtin's body directly.

    For every sum of integers Triton computes whether it overflows, in ten operations, and ignores the answer. From now
    on three calls of NumPy compute it, and an overflow raises.

    Every operation makes types and shapes of its operands and of its result. From now on equal ones are made once.
    Operands of one type are not cast.
    """
    if interpreter._patch_lang.__module__ != __name__:
        interpreter._patch_attr = _called_directly
        interpreter._patch_lang(make_faster)  # the languages that this module sees
        interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
        interpreter.GridExecutor.__call__ = in_one_chunk(interpreter.GridExecutor.__call__)
        tl.block_type.__init__ = _made_once(tl.block_type.__init__)
        tl.tensor.__init__ = _with_fields_of_its_type(tl.tensor.__init__)
        tl.dtype.__eq__ = _of_identical_types(tl.dtype.__eq__)
        interpreter._get_np_dtype = _kept_in_the_type(interpreter._get_np_dtype)
        TritonSemantic.binary_op_type_checking_impl = _unless_types_are_one(TritonSemantic.binary_op_type_checking_impl)
    check = getattr(TritonSemantic, "binary_op_sanitize_overflow_impl", None)
    if check is not None and check.__module__ != __name__:
        TritonSemantic.binary_op_sanitize_overflow_impl = _checked_by_numpy(check)


def _called_directly(owner, name, builtin, builder, scope) -> None:
    """Replace a builtin by a call of its body: Triton's wrapper only checks that the semantics are given."""
    run = getattr(builtin, "__wrapped__", builtin)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return run(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _made_once(initialise: Callable) -> Callable:
    """Return an initialisation of block types that gives equal types one dictionary of fields."""
    made: dict[tuple, tuple[dict[str, Any], Any]] = {}

    def initialise_once(self, element_ty, shape):
        key = (id(element_ty), *shape)
        if key not in made:
            initialise(self, element_ty, shape)
            made[key] = self.__dict__, element_ty  # as long as the element's type exists, no other has its id
        self.__dict__ = made[key][0]

    return initialise_once


def _with_fields_of_its_type(initialise: Callable) -> Callable:
    """Return an initialisation of tensors that makes all fields but the data once for each type."""

    def initialise_fast(self, handle, type):
        found = type.__dict__.get("_of_tensors")
        if found is None:
            initialise(self, handle, type)
            type._of_tensors = {name: field for name, field in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(found)
            self.handle = handle

    return initialise_fast


def _of_identical_types(equal: Callable) -> Callable:
    def equal_fast(self, other):
        return self is other or equal(self, other)

    return equal_fast


def _kept_in_the_type(find: Callable) -> Callable:
    def find_once(type):
        if "_numpy" not in type.__dict__:
            type._numpy = find(type)
        return type._numpy

    return find_once


def _unless_types_are_one(check: Callable) -> Callable:
    """Return a check of two operands that returns tensors of one type, no pointers, as they are."""

    def check_fast(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if type(lhs) is type(rhs) is tl.tensor and lhs.type.__dict__ is rhs.type.__dict__:
            is_divided = div_or_mod and lhs.dtype.is_floating()  # 16 bits are divided in 32
            if not (is_divided or lhs.dtype.is_ptr()):
                return lhs, rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check_fast


def _checked_by_numpy(check: Callable) -> Callable:
    """Return a check that raises AssertionError where a sum, difference or product of integers overflows."""

    def check_by_numpy(self, lhs, rhs, binary_op):
        kind, operation = lhs.type.scalar, _OPERATIONS.get(binary_op.__name__)
        is_interpreted = isinstance(lhs.handle, interpreter.TensorHandle) and kind == rhs.type.scalar and kind.is_int()
        if operation is None or not is_interpreted:
            return check(self, lhs, rhs, binary_op)
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        left, right = lhs.handle.data, rhs.handle.data
        if left.size == right.size == 1:
            least = most = operation(left.item(), right.item())
        else:
            exact = operation(left.astype(np.int64), right.astype(np.int64))
            least, most = exact.min(), exact.max()
        is_held = kind.get_int_min_value() <= least and most <= kind.get_int_max_value()
        assert is_held, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"

    return check_by_numpy


# Bytes before and after a tensor, a multiple of PyTorch's alignment: NaN in every format, -1 as integers.
_GUARD = b"\xff" * 256


@contextlib.contextmanager
def guarded_memory() -> Iterator[None]:
    """Inside, CPU tensors that fused_rope_attn takes from ``torch.empty`` and the like have guards around them.

    Raises:
        AssertionError: at the end, if a kernel wrote outside of such a tensor and changed a guard.
    """
    memory: list[tuple[np.ndarray, torch.Size]] = []
    new_bytes = torch.empty

    def guarded(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_guarded(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            caller = sys._getframe(1)
            if caller.f_globals["__name__"] == wrap_empty.__module__:
                assert caller.f_back is not None
                caller = caller.f_back
            is_ours = caller.f_globals["__name__"].startswith("fused_rope_attn.")
            is_plain = type(x) is torch.Tensor and x.device.type == "cpu" and _get_current_dispatch_mode() is None
            if not (is_ours and is_plain):
                return x
            extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0
            size = extent * x.element_size()
            block = new_bytes(size + 2 * len(_GUARD), dtype=torch.uint8)
            content = block.numpy()
            content[: len(_GUARD)] = content[-len(_GUARD) :] = _GUARD[0]
            memory.append((content, x.shape))
            with torch.no_grad():
                return x.set_(block.untyped_storage(), len(_GUARD) // x.element_size(), x.shape, x.stride())

        return allocate_guarded

    with wrap_empty(guarded):
        yield
    changed = [
        str(tuple(shape))
        for content, shape in memory
        if content[: len(_GUARD)].tobytes() != _GUARD or content[-len(_GUARD) :].tobytes() != _GUARD
    ]
    assert not changed, f"a kernel wrote outside of tensors of shape {', '.join(changed)}"
