"""Triton's interpreter, a third faster in small kernels, and with products that depend on their operands alone."""

import contextlib
import inspect
from collections.abc import Iterator

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

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
