"""Cached questions about devices. No other file asks CUDA anything, and importing this file does not either."""

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Constants, because torch.compile would otherwise trace the questions.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton's interpreter is on (``TRITON_INTERPRET=1`` before this package is first imported)."""
    return _IS_INTERPRETED


def has_triton() -> bool:
    """Return whether the package triton is installed. macOS and Windows lack it and run the reference."""
    return _HAS_TRITON


_CURRENT_GPU = torch.device("cuda")
_NO_GUARD = nullcontext()


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == _CURRENT_GPU else device


@functools.cache
def _properties(index: int | None) -> Any:
    return torch.cuda.get_device_properties(index)


def arch(device: torch.device) -> str:
    """Return the architecture of a device: ``"sm_90"``, ``"gfx942"``, ``"interpreter"``, or its type, as ``"cpu"``."""
    return _arch(_indexed(device))


@functools.cache
def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreter" if is_interpreted() and device.type == "cpu" else device.type
    found = _properties(device.index)
    return found.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 without a GPU."""
    return _properties(_indexed(device).index).multi_processor_count if device.type == "cuda" else 1


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def cards() -> list[dict[str, object]]:
    """Return index, name, architecture, multiprocessors and memory in GiB of every GPU that torch sees. Starts CUDA."""
    return [
        {
            "index": index,
            "name": properties.name,
            "arch": arch(torch.device("cuda", index)),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        for index, properties in enumerate(map(_properties, range(torch.cuda.device_count())))
    ]


def make_context_current() -> None:
    """Make the context of the current GPU current in this thread, which may not have used the GPU yet.

    An allocation from PyTorch's cache does not do so. Any question to the CUDA runtime does.
    """
    torch.cuda.mem_get_info()


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream of ``device``; 0 without a GPU."""
    # Only a GPU's device has an index. Reading the type would cost more than the rest of the function.
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)


@functools.cache
def _second_stream(index: int, stream: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def two_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """Return (the current stream of a GPU, a second stream for concurrent work); None without a GPU.

    Each current stream has its own second one, so that threads with different streams do not share it.
    """
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    return current, _second_stream(current.device_index, current.cuda_stream)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Return a context in which this stream is the current one."""
    return torch.cuda.stream(stream)


def pause(cycles: int) -> None:
    """Delay the current stream by so many cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)


def is_current(device: torch.device) -> bool:
    """Return whether ``device`` is the current GPU, or no GPU."""
    return device.index is None or device.index == torch._C._cuda_getDevice()


# ``empty(shape, strides, dtype)`` of the CPU and of the current GPU. Private names: compiled graphs allocate with them.
# They save the host 0.6 us of ``torch.empty_strided``, because they skip PyTorch's dispatcher.
empty_on_cpu: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
empty_on_gpu: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


def guard(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which kernels launch on ``device``; free if it is the current GPU."""
    return _NO_GUARD if is_current(device) else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a GPU records a graph. The host must not wait for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input precision of tl.dot: float32 unless the user allowed tf32 for matrix products, by either API."""
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
