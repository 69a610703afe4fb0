"""Triton's interpreter: faster in small kernels, with exact products, and with writes outside of tensors found."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.runtime import interpreter

from fused_rope_attn.testing.poison import wrap_empty

# The packages that Triton (3.6 to 3.9) searches.
PACKAGES = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)


def remember_builtins() -> None:
    """From now on look up the known names only; a Triton without that search stays as it is. Not within a kernel.

    At every call of a device function the interpreter goes through all of ``triton.language`` in search of the
    builtins, which are the same each time.
    """
    search = getattr(interpreter, "_patch_builtin", None)
    if search is None:
        return
    builtins = {
        package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in PACKAGES
    }

    def look_up(package, builder, scope):
        if package not in builtins:
            return search(package, builder, scope)
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not in a nested call: the outermost has replaced them
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = look_up


@contextlib.contextmanager
def products_in_float64() -> Iterator[None]:
    """Give a row of a product the same bits whatever the other rows of its tile are, which BLAS does not do."""
    multiply = np.matmul

    def in_float64(a, b, dtype=None):
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)

    np.matmul = in_float64
    try:
        yield
    finally:
        np.matmul = multiply


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
