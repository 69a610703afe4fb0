"""Tensors between pages without any permission: a kernel that reads or writes outside of them ends its process."""

import ctypes
import mmap

import torch

from tests.support.paths import python

_AREAS = []  # a tensor made from a buffer does not keep it
_LAST_WORDS = "no access out of bounds"


def abut(x, at_end):
    """A contiguous copy of x, on a CPU, that ends (else begins) exactly where a page without any permission begins
    (ends). Its memory is never given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    _AREAS.append(area)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (start, start + mmap.PAGESIZE + pages):
        assert libc.mprotect(guard, mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (pages - size if at_end else 0)
    return torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)


def hold_within_bounds(program):
    """Run a program that uses `abut`, kernels interpreted, in a process of its own, which a guard page may end."""
    result = python("-c", f"{program}\nprint({_LAST_WORDS!r})", TRITON_INTERPRET="1", timeout=300)
    assert result.returncode == 0 and _LAST_WORDS in result.stdout, result.stderr[-2000:]
