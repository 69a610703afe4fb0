"""Cached questions about devices. Importing this asks CUDA nothing, and no other file asks it anything."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager

import torch

# Both are found once, at import, so that torch.compile takes them for the constants that they are.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """True when Triton's CPU interpreter is on (``TRITON_INTERPRET=1`` before this package is first imported)."""
    return _IS_INTERPRETED


def has_triton() -> bool:
    """Whether the package triton is installed; macOS and Windows have none, and run the reference."""
    return _HAS_TRITON


@functools.cache
def triton_release() -> tuple[int, int]:
    """(major, minor) of the installed Triton; what it is imported for is about to need it anyway."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


_CURRENT_GPU = torch.device("cuda")


@functools.cache
def _gpu_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch(device: torch.device) -> str:
    """Architecture name of a device: ``"sm_90"``, ``"gfx942"``, ``"interpreter"``, or its type, as ``"cpu"``."""
    return _arch(torch.device("cuda", torch.cuda.current_device()) if device == _CURRENT_GPU else device)


@functools.cache
def _arch(device: torch.device) -> str:
    if device.type == "cuda":
        return _gpu_arch(device.index)
    return "interpreter" if is_interpreted() and device.type == "cpu" else device.type


@functools.cache
def _num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors; 1 where there is no GPU."""
    if device.type != "cuda":
        return 1
    return _num_sms(torch.cuda.current_device() if device.index is None else device.index)


def has_gpu() -> bool:
    """Whether torch sees a GPU, whatever is on it."""
    return torch.cuda.is_available()


def cards() -> list[dict[str, object]]:
    """Every GPU that torch sees: its index, name, architecture, multiprocessors and memory in GiB. Starts CUDA."""
    found: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count() if has_gpu() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "arch": _gpu_arch(index),
                "multiprocessors": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def current_gpu() -> int:
    """Number of the GPU on which this thread's launches go."""
    return torch.cuda.current_device()


def make_current(device: torch.device) -> None:
    """Make the context of a GPU current in this thread, which may not have used the GPU yet.

    An allocation from PyTorch's cache does not do so. Any question to the CUDA runtime does.
    """
    torch.cuda.mem_get_info(device)


def current_stream(device: torch.device) -> int:
    """Handle of the stream on which kernels for ``device`` launch now; 0 where there is no GPU."""
    # A tensor's device has an index where it is a GPU; to ask for its type would cost more than all the rest.
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)


# By (device, stream).
_besides: dict[tuple[int, int], torch.cuda.Stream] = {}


def two_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """(the current stream of a GPU, the one that belongs beside it); None where there is no GPU.

    Each stream has its own beside it, so that threads that do not share a stream do not share that either.
    """
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    key = current.device_index, current.cuda_stream
    if key not in _besides:
        _besides[key] = torch.cuda.Stream(device)
    return current, _besides[key]


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Context in which this stream is the current one."""
    return torch.cuda.stream(stream)


def pause(cycles: int) -> None:
    """Let the current stream do nothing for so many cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)


class _NoGuard:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


_NO_GUARD = _NoGuard()


def is_current(device: torch.device) -> bool:
    """Whether kernels for ``device`` launch on it as things are: it is the current GPU, or none."""
    return device.index is None or device.index == torch._C._cuda_getDevice()


def guard(device: torch.device) -> AbstractContextManager[None]:
    """Context in which kernels launch on ``device``; free when it is already the current one."""
    if is_current(device):
        return _NO_GUARD
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """True while the current stream of a GPU records a graph, where nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
