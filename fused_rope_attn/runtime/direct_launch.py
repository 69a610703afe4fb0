# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches of compiled kernels by the CUDA driver, from a block of arguments that is prepared once.

A block is one piece of memory that holds all that cuLaunchKernelEx reads for one or several kernels: the configurations
of the launches, the kernels' parameters and the pointers to them. Before its launches one call of ``struct`` writes
into it what changes from call to call: the tensors' addresses and the tensor maps.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fused_rope_attn.runtime import driver
from fused_rope_attn.runtime.parameters import (
    ADDRESS,
    MAP,
    MAP_ALIGNMENT,
    MAP_BYTES,
    Parameter,
    Unsupported,
    kernel_parameters,
)
from fused_rope_attn.runtime.triton_compat import encode_tensor_map

_WORD = 8
# Tensor maps that a descriptor keeps, by the address of its tensor: a model's layers take turns at the same addresses.
_MAX_MAPS = 512
_address = torch.Tensor.data_ptr


class Kernel(NamedTuple):
    """What no call changes of a kernel's launches.

    numbers: the parameters that are neither addresses nor tensor maps, a word each.
    """

    name: str
    function: ctypes.c_void_p
    parameters: list[Parameter]
    numbers: list[bytes]
    config: driver.LaunchConfig
    attributes: list[driver.LaunchAttribute]


class Layout:
    """Where everything lies in the blocks of some kernels that are launched one after the other.

    At first what ``variable`` packs: addresses, and behind a gap the tensor maps. Then for each kernel its
    configuration, attributes, numbers, and the pointers to all parameters.

    Args:
        launch: cuLaunchKernelEx.
        kernels: in their order.
        addresses: how many addresses there are for all kernels together.
        tensors: for each kernel, which of the addresses its tensors have, in the order of its parameters.
        maps: for each kernel, which of the tensor maps it has.
    """

    __slots__ = ("launch", "kernels", "variable", "places")

    def __init__(
        self, launch: Callable[..., int], kernels: Sequence[Kernel], addresses: int, tensors: Sequence[Sequence[int]],
        maps: Sequence[Sequence[int]],
    ):  # fmt: skip
        first_map = _WORD * addresses + -_WORD * addresses % MAP_ALIGNMENT
        num_maps = 1 + max((i for own in maps for i in own), default=-1)
        self.launch = launch
        self.kernels = kernels
        self.variable = struct.Struct(f"<{addresses}Q{first_map - _WORD * addresses}x" + f"{MAP_BYTES}s" * num_maps)
        self.places = [
            ([_WORD * i for i in own], [first_map + MAP_BYTES * i for i in own_maps])
            for own, own_maps in zip(tensors, maps)
        ]


class Block:
    """The memory of some launches at a time: ``write`` takes the addresses and the tensor maps, then ``launch``."""

    __slots__ = ("write", "_launch", "_stream", "_configs", "_calls")

    def __init__(self, layout: Layout):
        size = layout.variable.size + sum(map(_bytes, layout.kernels))
        memory = bytearray(size + MAP_ALIGNMENT)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        shift = -begin % MAP_ALIGNMENT
        begin += shift
        self.write = functools.partial(layout.variable.pack_into, memory, shift)
        self._launch = layout.launch
        self._stream: int | None = None
        self._configs, self._calls = [], []
        at = layout.variable.size
        for kernel, (tensors, maps) in zip(layout.kernels, layout.places):
            attributes = at + ctypes.sizeof(kernel.config)
            numbers = attributes + ctypes.sizeof(driver.LaunchAttribute) * len(kernel.attributes)
            pointers = numbers + _WORD * len(kernel.numbers)
            where = {
                "tensor": iter(tensors),
                MAP: iter(maps),
                "number": iter(range(numbers, pointers, _WORD)),
            }
            offsets = [next(where[_kind(p)]) for p in kernel.parameters]
            content = b"".join(
                (
                    bytes(kernel.config),
                    *map(bytes, kernel.attributes),
                    *kernel.numbers,
                    struct.pack(f"<{len(offsets)}Q", *(begin + offset for offset in offsets)),
                )
            )
            memory[shift + at : shift + at + len(content)] = content
            config = driver.LaunchConfig.from_buffer(memory, shift + at)
            config.attributes, config.num_attributes = begin + attributes, len(kernel.attributes)
            self._configs.append(config)
            self._calls.append((ctypes.c_void_p(begin + at), kernel.function, ctypes.c_void_p(begin + pointers)))
            at += len(content)

    def launch(self, stream: int) -> int:
        """Launch all kernels on the current device; returns the driver's first error code, 0 for none."""
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        launch = self._launch
        for at, function, parameters in self._calls:
            code = launch(at, function, parameters, None)
            if code:
                return code
        return 0


def _bytes(kernel: Kernel) -> int:
    """What a block has of one kernel."""
    words = len(kernel.numbers) + len(kernel.parameters)
    return ctypes.sizeof(kernel.config) + ctypes.sizeof(driver.LaunchAttribute) * len(kernel.attributes) + _WORD * words


def _kind(parameter: Parameter) -> str:
    return "tensor" if parameter.is_tensor else MAP if parameter.letter == MAP else "number"


class Blocks:
    """Blocks of one layout. Calls of several threads do not meet: each takes one for itself, and makes one where all
    are in use."""

    __slots__ = ("_layout", "_free")

    def __init__(self, layout: Layout):
        self._layout = layout
        self._free: list[Block] = []

    def launch(self, stream: int, *values: Any) -> int:
        """``Block.launch`` with these addresses and tensor maps."""
        try:
            block = self._free.pop()
        except IndexError:
            block = Block(self._layout)
        block.write(*values)
        code = block.launch(stream)
        self._free.append(block)
        return code


class DirectLaunch:
    """``launch(stream, tensors)`` by the driver, with everything but the tensors fixed.

    Args:
        compiled: Triton's compiled kernel, loaded.
        grid: numbers of programs along three axes.
        tensors: of a call of this signature: tensors, pairs of a tensor and its ``Source``, or None, by name.
        arguments: the others, by name.

    Raises:
        Unsupported: where the kernel must stay with Triton's launcher.
    """

    __slots__ = ("kernel", "plain", "described", "launch", "_blocks", "_plain")

    def __init__(self, compiled, grid: tuple[int, int, int], tensors: Mapping[str, Any], arguments: Mapping[str, Any]):
        metadata = compiled.metadata._asdict()
        if "ptx" not in compiled.asm:
            raise Unsupported("the kernel was stored without its PTX")
        parameters = kernel_parameters(compiled.src.signature, metadata, compiled.asm["ptx"])
        if min(grid) < 1:
            raise Unsupported("the grid is empty")
        found = driver.load()
        if found is None:
            raise Unsupported("there is no CUDA driver with cuLaunchKernelEx")
        if not compiled.function or not isinstance(compiled.function, int):
            raise Unsupported("the kernel is not loaded")
        # The names of tensors that it takes by their addresses, and its descriptors, in the order of its parameters.
        self.plain = [p.name for p in parameters if p.is_tensor]
        maps = [p.name for p in parameters if p.letter == MAP]
        encodings = metadata.get("tensordesc_meta") or []
        sources = {name: tensors[name][1] for name in maps}
        self.described = [Described(name, sources[name], encoding) for name, encoding in zip(maps, encodings)]
        for described in self.described:
            described.check(_address(tensors[described.name][0]))
        given = {**arguments, **{name: source.fields for name, source in sources.items()}}
        cluster = metadata["num_ctas"]
        attributes = driver.launch_attributes(
            pdl=metadata["launch_pdl"], cooperative=metadata["launch_cooperative_grid"], cluster=cluster
        )
        config = driver.LaunchConfig(
            grid=(grid[0] * cluster, *grid[1:]), block=(32 * metadata["num_warps"], 1, 1),
            shared_bytes=metadata["shared"],
        )  # fmt: skip
        try:
            numbers = [_number(p, given) for p in parameters if not p.is_tensor and p.letter != MAP]
        except (struct.error, OverflowError, TypeError, LookupError) as error:
            raise Unsupported(f"an argument does not fit its parameter: {error}") from error
        function = ctypes.c_void_p(compiled.function)
        self.kernel = Kernel(metadata["name"], function, parameters, numbers, config, attributes)
        self.launch = found.launch
        indices = range(len(self.plain)), range(len(maps))
        self._blocks = Blocks(Layout(found.launch, [self.kernel], len(self.plain), *([each] for each in indices)))
        self._plain = _getter(self.plain)

    def __call__(self, stream: int, tensors: Mapping[str, Any]) -> int:
        """Launch on the current device; returns the driver's error code, 0 for none."""
        return self._blocks.launch(
            stream, *map(_address, self._plain(tensors)),
            *[each.at(_address(tensors[each.name][0])) for each in self.described],
        )  # fmt: skip


class Described:
    """The tensor maps of one descriptor, by the address of its tensor."""

    __slots__ = ("name", "maps", "_encode")

    def __init__(self, name: str, source, encoding: dict):
        fields = source.fields
        if fields["padding"] != "zero" or fields.get("round_f32_to_tf32"):
            raise Unsupported(f"{name} is a descriptor that pads with NaN or rounds")
        self.name = name
        self._encode = functools.partial(
            encode_tensor_map, encoding=encoding, shape=fields["shape"], strides=fields["strides"]
        )
        self.maps: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """The map of the tensor at an address, which is kept."""
        found = self.maps.get(address)
        if found is None:
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            found = self.maps[address] = self._encode(address)
        return found

    def check(self, address: int) -> None:
        """Raise Unsupported where the bytes that were found for a tensor are no map of it."""
        found = self.at(address)
        if len(found) != MAP_BYTES or struct.pack(f"<{ADDRESS}", address) not in found:
            raise Unsupported("Triton's tensor map was not found where it should be")


def _number(parameter: Parameter, given: Mapping[str, Any]) -> bytes:
    """The word of a parameter that is no tensor; scratch memory is a null pointer."""
    if not parameter.name:
        return bytes(_WORD)
    value = given[parameter.name]
    for key in parameter.path:
        value = value[key]
    return struct.pack(f"<{parameter.letter}", value).ljust(_WORD, b"\0")


def _getter(names: list[str]) -> Callable[[Mapping[str, Any]], tuple]:
    """The values of ``names`` as a tuple, whatever their number."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda tensors: tuple(tensors[name] for name in names)
