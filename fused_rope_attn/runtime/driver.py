# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launch compiled kernels by the CUDA driver, from arguments that are prepared once.

Triton compiles and loads a kernel, and makes its first launches. Its launcher examines each argument every time.
``Kernel`` does so once: it takes the parameters from the signature and the metadata that Triton publishes with a
compiled kernel, and the driver confirms their sizes. ``Block`` then launches several kernels with one call of the
driver for each. Functions and structures are those of the CUDA driver API, version 12.4.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import torch

from fused_rope_attn.runtime.triton_compat import LAUNCHER_IS_KNOWN

INVALID_CONTEXT = 201
_WORD, _MAP_BYTES, _MAP_ALIGNMENT = 8, 128, 64
# Tensor maps that one descriptor keeps. The layers of a model use the same few addresses in turn.
_MAX_MAPS = 512
# Letters of Python's struct module for Triton's scalar types.
LETTERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
# CUtensorMapDataType, CUlaunchAttributeID and CUtensorMapL2promotion.
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_PROGRAMMATIC_STREAM_SERIALIZATION, _PROMOTE_TO_128_BYTES = 6, 2


class Unsupported(Exception):
    """The reason why a kernel stays with Triton's launcher."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


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


class Driver:
    """The functions of libcuda that launches need. ``launch`` and ``encode`` return an error code, 0 for none.

    ctypes releases the interpreter's lock during a launch. This is needed, because the driver waits while its queue is
    full, and a queued callback may need the lock.
    """

    def __init__(self, library: ctypes.CDLL):
        self.launch, self.encode = library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled
        self._info, self._explain = library.cuFuncGetParamInfo, library.cuGetErrorString

    def parameter_sizes(self, function: ctypes.c_void_p) -> list[int]:
        """Return the bytes of each parameter of a loaded kernel."""
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        # The driver returns an error past the last one.
        while not self._info(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes

    def message(self, code: int) -> str:
        """Return the number and the driver's explanation of an error code."""
        text = ctypes.c_char_p()
        self._explain(code, ctypes.byref(text))
        return f"CUDA error {code}: {(text.value or b'unknown').decode()}"


@functools.cache
def cuda_driver() -> Driver | None:
    """Return the driver of this process; None without one (a CPU, AMD), or if it lacks one of the functions."""
    try:
        return None if torch.version.hip else Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class TensorMap:
    """The tensor maps (CUtensorMap) of one descriptor of a kernel, by the address of its tensor.

    descriptor: Triton's ``TensorDescriptor``, which is not kept. encoding: its entry of ``tensordesc_meta`` in Triton's
    metadata.
    """

    def __init__(self, name: str, descriptor: Any, encoding: Mapping[str, Any] | None):
        dtype = descriptor.base.dtype
        if encoding is None or dtype not in _MAP_TYPES:
            raise Unsupported(f"{name} has no tensor map that is known")
        self.name, self.tensor, block = name, id(descriptor.base), encoding["block_size"]
        rank, swizzle, none = len(block), encoding["swizzle"], 0
        sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
        pitches = (ctypes.c_uint64 * rank)(*(dtype.itemsize * n for n in reversed(descriptor.strides[:-1])))
        box, steps = (ctypes.c_uint32 * rank)(*reversed(block)), (ctypes.c_uint32 * rank)(*[1] * rank)
        self._before_address = _MAP_TYPES[dtype], rank
        self._after_address = sizes, pitches, box, steps, none, swizzle, _PROMOTE_TO_128_BYTES, none
        self.maps: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """Return the 128 bytes of the map of a tensor at ``address``. Raise RuntimeError if the driver refuses."""
        found = self.maps.get(address)
        if found is None:
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            memory, begin = _aligned(_MAP_BYTES)
            where = ctypes.c_void_p(ctypes.addressof(memory) + begin)
            driver: Any = cuda_driver()
            code = driver.encode(where, *self._before_address, ctypes.c_void_p(address), *self._after_address)
            if code:
                raise RuntimeError(f"no tensor map of {self.name} could be made: {driver.message(code)}")
            found = self.maps[address] = memory.raw[begin : begin + _MAP_BYTES]
        return found


# One parameter of a kernel: the id of a tensor, a descriptor's tensor map, or the bytes of anything else.
Parameter = Union[int, TensorMap, bytes]  # noqa: UP007  tools/hub copies this file for Python 3.9
_BYTES: dict[type, int] = {int: _WORD, TensorMap: _MAP_BYTES}


# The metadata of a kernel that needs nothing but its parameters.
_PLAIN = {"global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "launch_cooperative_grid": False}


class Kernel:
    """One compiled kernel as the driver launches it. ``parameters`` are in the kernel's order.

    Args:
        compiled: as ``kernel[grid](...)`` of Triton returns it.
        grid: three numbers of programs.
        given: all arguments by name.

    Raises:
        Unsupported: if a launch needs more than this file knows, or if the driver counts other parameters.
    """

    def __init__(self, compiled: Any, grid: Sequence[int], given: Mapping[str, Any]):
        driver: Any = cuda_driver()
        if compiled is None or driver is None or not LAUNCHER_IS_KNOWN:
            raise Unsupported("there is no CUDA driver or compiled kernel, or this release of Triton is not known")
        metadata = compiled.metadata._asdict()
        if metadata.get("instrumentation_mode") or any(metadata[name] != plain for name, plain in _PLAIN.items()):
            raise Unsupported("the kernel is instrumented, or needs scratch memory or clusters")
        self.function = ctypes.c_void_p(compiled.function)
        encodings = iter(metadata.get("tensordesc_meta") or ())
        signature = compiled.src.signature
        self.parameters = [p for name in signature for p in _values(name, signature[name], given.get(name), encodings)]
        self.parameters += [bytes(_WORD), bytes(_WORD)]  # pointers to scratch memory
        sizes = [len(p) if isinstance(p, bytes) else _BYTES[type(p)] for p in self.parameters]
        if driver.parameter_sizes(self.function) != sizes:
            raise Unsupported(f"the driver does not find parameters of {sizes} bytes")
        numbers = [p.ljust(_WORD, b"\0") for p in self.parameters if isinstance(p, bytes)]
        self.numbers = ctypes.create_string_buffer(b"".join(numbers))
        self.launch_early = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        size = tuple(grid), (32 * metadata["num_warps"], 1, 1), metadata["shared"]
        self.config = *size, 0, ctypes.addressof(self.launch_early), int(metadata["launch_pdl"])


def _values(name: str, kind: Any, value: Any, encodings: Iterator[Mapping]) -> Iterator[Parameter]:
    """Yield the parameters that an argument is by the rule of triton 3.6 to 3.9.

    A constant is none. A record or tuple gives those of its elements, a descriptor its map, shape and strides.
    """
    if isinstance(kind, tuple):
        for pair in zip(kind, value):
            yield from _values(name, *pair, encodings)
    elif kind.startswith("tensordesc"):
        yield TensorMap(name, value, next(encodings, None))
        yield from (struct.pack("<i", n) for n in value.shape)
        yield from (struct.pack("<q", n) for n in value.strides)
    elif kind.startswith("*"):
        yield id(value)
    elif kind != "constexpr":
        try:
            yield struct.pack(f"<{LETTERS[kind]}", value)
        except (struct.error, OverflowError, TypeError, KeyError) as error:
            raise Unsupported(f"{name}, of type {kind}, does not fit its parameter: {error}") from error


def _aligned(size: int) -> tuple[Any, int]:
    """Return memory for ``size`` bytes, and the offset at which they are aligned as tensor maps must be."""
    memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT)
    return memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT


class Block:
    """Memory from which the driver reads the arguments of several launches, for one thread at a time.

    ``write(*addresses, *maps)`` stores the arguments that change from call to call.

    Args:
        kernels: in the order of their launches.
        places: from the id of a tensor to the index of its address.
        maps: how many the kernels have. ``write`` takes them in the order of the kernels and of their parameters.

    Raises:
        KeyError: if a kernel has a tensor without a place.
    """

    def __init__(self, kernels: Sequence[Kernel], places: Mapping[int, int], maps: int):
        addresses = _WORD * len(places)
        first_map = addresses + -addresses % _MAP_ALIGNMENT
        memory, shift = _aligned(first_map + _MAP_BYTES * maps)
        begin = ctypes.addressof(memory) + shift
        layout = f"<{len(places)}Q{first_map - addresses}x" + f"{_MAP_BYTES}s" * maps
        self.write = functools.partial(struct.Struct(layout).pack_into, memory, shift)
        self._stream, self._launches = 0, []
        others: dict[type, Iterator[int]] = {TensorMap: itertools.count(begin + first_map, _MAP_BYTES)}
        for kernel in kernels:
            others[bytes] = itertools.count(ctypes.addressof(kernel.numbers), _WORD)
            at = [begin + _WORD * places[p] if isinstance(p, int) else next(others[type(p)]) for p in kernel.parameters]
            pointers = (ctypes.c_void_p * len(at))(*at)
            config = LaunchConfig(*kernel.config)
            self._launches.append((config, ctypes.byref(config), kernel.function, ctypes.byref(pointers)))

    def launch(self, launch: Any, stream: int) -> int:
        """Launch all kernels on the current device by ``Driver.launch``. Return the first error code, 0 for none."""
        if stream != self._stream:
            for config, *_ in self._launches:
                config.stream = stream
            self._stream = stream
        for _, *arguments in self._launches:
            if code := launch(*arguments, None):
                return code
        return 0
