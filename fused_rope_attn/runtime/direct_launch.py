"""Launches of one compiled kernel by the CUDA driver, from a block of arguments that is prepared once.

A block is one piece of memory that holds all that cuLaunchKernelEx reads: the configuration of the launch, the kernel's
parameters and the pointers to them. A launch writes into it, in one call of ``struct``, what changes from call to call:
the stream, the tensors' addresses and the tensor maps.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

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


class Block:
    """The memory of one launch at a time; ``write`` and the two pointers for the driver lead into it."""

    __slots__ = ("write", "attributes", "config", "parameters")

    def __init__(self, layout: _Layout):
        memory = bytearray(len(layout.template) + MAP_ALIGNMENT)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        shift = -begin % MAP_ALIGNMENT
        begin += shift
        memory[shift : shift + len(layout.template)] = layout.template
        pointers = (begin + offset for offset in layout.offsets)
        struct.pack_into(f"<{len(layout.offsets)}Q", memory, shift + layout.pointers, *pointers)
        self.write = functools.partial(layout.variable.pack_into, memory, shift + driver.LaunchConfig.stream.offset)
        self.attributes = begin + layout.attributes
        self.config = ctypes.c_void_p(begin)
        self.parameters = ctypes.c_void_p(begin + layout.pointers)


class _Layout:
    """Where everything lies in a block, as offsets in bytes, and the bytes that all blocks of a launch share.

    At first the configuration of the launch; from its stream on, what ``variable`` packs: the stream, the address and
    the number of the attributes, the tensors' addresses, and behind a gap the tensor maps. Then the attributes, the
    numbers and the pointers to all parameters.
    """

    __slots__ = ("variable", "attributes", "num_attributes", "offsets", "pointers", "template")

    def __init__(self, parameters: list[Parameter], numbers: list[float], config: driver.LaunchConfig, attributes):
        tensors = [p for p in parameters if p.is_tensor]
        maps = [p for p in parameters if p.letter == MAP]
        first_address = driver.LaunchConfig.stream.offset + 3 * _WORD
        gap = -(first_address + _WORD * len(tensors)) % MAP_ALIGNMENT
        first_map = first_address + _WORD * len(tensors) + gap
        self.variable = struct.Struct(f"<QQQ{len(tensors)}Q{gap}x" + f"{MAP_BYTES}s" * len(maps))
        self.attributes = first_map + MAP_BYTES * len(maps)
        self.num_attributes = len(attributes)
        first_number = self.attributes + ctypes.sizeof(driver.LaunchAttribute) * len(attributes)
        self.pointers = first_number + _WORD * len(numbers)
        at = {
            "tensor": iter(range(first_address, first_map, _WORD)),
            MAP: iter(range(first_map, self.attributes, MAP_BYTES)),
            "number": iter(range(first_number, self.pointers, _WORD)),
        }
        self.offsets = [next(at["tensor" if p.is_tensor else MAP if p.letter == MAP else "number"]) for p in parameters]
        template = bytearray(self.pointers + _WORD * len(parameters))
        template[: ctypes.sizeof(config)] = bytes(config)
        template[self.attributes : first_number] = b"".join(map(bytes, attributes))
        letters = [p.letter for p in parameters if not p.is_tensor and p.letter != MAP]
        for i, (letter, number) in enumerate(zip(letters, numbers, strict=True)):
            struct.pack_into(f"<{letter}", template, first_number + _WORD * i, number)
        self.template = bytes(template)


class DirectLaunch:
    """``launch(stream, tensors)`` by the driver, with everything but the tensors fixed.

    Calls of several threads do not meet: each takes a block for itself, and makes one where all are in use.

    Args:
        compiled: Triton's compiled kernel, loaded.
        grid: numbers of programs along three axes.
        tensors: of a call of this signature: tensors, pairs of a tensor and its ``Source``, or None, by name.
        arguments: the others, by name.

    Raises:
        Unsupported: where the kernel must stay with Triton's launcher.
    """

    __slots__ = ("name", "function", "_launch", "_layout", "_blocks", "_plain", "_described")

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
        self.name = metadata["name"]
        self.function = ctypes.c_void_p(compiled.function)
        self._launch = found.launch
        self._plain = _getter([p.name for p in parameters if p.is_tensor])
        maps = [p.name for p in parameters if p.letter == MAP]
        encodings = metadata.get("tensordesc_meta") or []
        sources = {name: tensors[name][1] for name in maps}
        self._described = [_Described(name, sources[name], encoding) for name, encoding in zip(maps, encodings)]
        for described in self._described:
            described.check(tensors[described.name])
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
            self._layout = _Layout(parameters, numbers, config, attributes)
        except (struct.error, OverflowError, TypeError, LookupError) as error:
            raise Unsupported(f"an argument does not fit its parameter: {error}") from error
        self._blocks: list[Block] = []

    def __call__(self, stream: int, tensors: Mapping[str, Any]) -> int:
        """Launch on the current device; returns the driver's error code, 0 for none."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = Block(self._layout)
        block.write(
            stream, block.attributes, self._layout.num_attributes, *map(_address, self._plain(tensors)),
            *[each.maps.get(_address(tensors[each.name][0])) or each.encoded(tensors) for each in self._described],
        )  # fmt: skip
        code = self._launch(block.config, self.function, block.parameters, None)
        self._blocks.append(block)
        return code


class _Described:
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

    def encoded(self, tensors: Mapping[str, Any]) -> bytes:
        """The map of the tensor in a call, which ``maps`` has from then on."""
        if len(self.maps) >= _MAX_MAPS:
            self.maps.clear()
        address = _address(tensors[self.name][0])
        found = self.maps[address] = self._encode(address)
        return found

    def check(self, pair: tuple) -> None:
        """Raise Unsupported where the bytes that were found for a tensor are no map of it."""
        address = _address(pair[0])
        found = self.encoded({self.name: pair})
        if len(found) != MAP_BYTES or struct.pack(f"<{ADDRESS}", address) not in found:
            raise Unsupported("Triton's tensor map was not found where it should be")


def _number(parameter: Parameter, given: Mapping[str, Any]) -> float:
    """The value of a parameter that is no tensor; scratch memory is a null pointer."""
    if not parameter.name:
        return 0
    value = given[parameter.name]
    for key in parameter.path:
        value = value[key]
    return value


def _getter(names: list[str]) -> Callable[[Mapping[str, Any]], tuple]:
    """The values of ``names`` as a tuple, whatever their number."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda tensors: tuple(tensors[name] for name in names)
