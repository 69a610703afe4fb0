"""The CUDA driver's own launch call, by ctypes: the C structures that it takes, and the errors that it gives.

The structures are those of cuda.h since CUDA 12. Nothing here knows of a kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

INVALID_CONTEXT = 201
_MAX_ATTRIBUTE_WORDS = 16

# CUlaunchAttributeID
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_CLUSTER_SCHEDULING = 5
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# CUclusterSchedulingPolicy
_SPREAD = 1


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number that says which, and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * _MAX_ATTRIBUTE_WORDS)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("num_attributes", ctypes.c_uint32),
    ]


def launch_attributes(*, pdl: bool, cooperative: bool, cluster: int) -> list[LaunchAttribute]:
    """What a launch is asked for beside its grid: an early start behind the kernel before it (programmatic dependent
    launch), a cooperative grid, and blocks in clusters of this size."""
    wanted: list[tuple[int, tuple[int, ...]]] = []
    if pdl:
        wanted.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    if cooperative:
        wanted.append((_COOPERATIVE, (1,)))
    if cluster > 1:
        wanted += [(_CLUSTER_DIMENSION, (cluster, 1, 1)), (_CLUSTER_SCHEDULING, (_SPREAD,))]
    return [LaunchAttribute(id=number, value=words) for number, words in wanted]


class Driver:
    """The functions of libcuda that launches need.

    ``launch(config, function, parameters, None)`` is cuLaunchKernelEx. It takes ``ctypes.c_void_p`` objects, which
    ctypes hands on without a conversion, and returns an error code, 0 for none. It gives up the interpreter's lock
    meanwhile, as Triton's launcher does: the driver waits where its queue is full, and what it waits for may be a
    callback that needs the lock.
    """

    __slots__ = ("launch", "_library")

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self.launch: Callable[..., int] = library.cuLaunchKernelEx

    def make_current(self, index: int) -> None:
        """Make the primary context of GPU number ``index``, which PyTorch uses, current in this thread.

        PyTorch does so with the first work that a thread gives to the GPU, which an allocation from its cache is not.
        """
        device, context = ctypes.c_int(), ctypes.c_void_p()
        for code in (
            self._library.cuDeviceGet(ctypes.byref(device), index),
            self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            self._library.cuCtxSetCurrent(context),
        ):
            if code:
                raise RuntimeError(f"no context of GPU {index} could be made current: {self.message(code)}")

    def message(self, code: int) -> str:
        """An error code as the driver names and explains it."""
        words = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(code, ctypes.byref(text))
            words.append((text.value or b"unknown").decode())
        return f"CUDA error {code}, {words[0]}: {words[1]}"


@functools.cache
def load() -> Driver | None:
    """The driver of this process; None where there is none (a CPU, AMD) or where it is older than cuLaunchKernelEx."""
    if torch.version.hip:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def make_current(index: int) -> None:
    """``Driver.make_current`` of this process's driver."""
    found = load()
    if found is None:
        raise RuntimeError(f"no context of GPU {index} could be made current: there is no CUDA driver")
    found.make_current(index)


def message(code: int) -> str:
    """``Driver.message`` of this process's driver, or the bare number without one."""
    found = load()
    return f"CUDA error {code}" if found is None else found.message(code)
