"""What a compiled kernel takes, in the order and the sizes in which the CUDA driver hands it over.

Triton makes one parameter of the binary of every argument that is not a constant: of a tuple its elements, of a tensor
descriptor a CUtensorMap and then its shape and strides. Behind them come two pointers to scratch memory. That is the
rule of triton 3.6 to 3.9; because it is Triton's own affair, it is held against the parameters that the kernel's PTX
declares, and a kernel that differs in anything stays with Triton's launcher.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from fused_rope_attn.runtime.triton_compat import LAUNCHER_IS_KNOWN, TENSOR_MAP_BYTES

MAP = "CUtensorMap"
MAP_BYTES, MAP_ALIGNMENT = TENSOR_MAP_BYTES, 64
ADDRESS = "Q"
# Triton's names of scalar types, and the letters of Python's struct module for them.
LETTERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
# More dynamic shared memory than this takes an attribute of its own in Triton's newest launchers.
_MOST_SHARED_BYTES = 228 << 10
# A cluster of 16 blocks takes an attribute of the kernel.
_LARGEST_CLUSTER = 8


class Unsupported(Exception):
    """Why a kernel stays with Triton's own launcher."""


class Parameter(NamedTuple):
    """One parameter of a binary.

    name: the argument that it comes from, "" for scratch memory. letter: of its type, ADDRESS for a tensor's, MAP for a
    tensor map. path: the keys and indices that lead from the argument to a number, empty for the argument itself.
    """

    name: str
    letter: str
    path: tuple[str | int, ...] = ()
    is_tensor: bool = False

    @property
    def bytes(self) -> int:
        return MAP_BYTES if self.letter == MAP else struct.calcsize(f"<{self.letter}")


_SCRATCH = Parameter("", ADDRESS)


def kernel_parameters(signature: Mapping[str, Any], metadata: Mapping[str, Any], ptx: str) -> list[Parameter]:
    """The parameters of a compiled kernel, from Triton's signature of it, its metadata and its PTX.

    Raises Unsupported where a launch would have to know more than ``driver`` does, or where the PTX declares others.
    """
    if not LAUNCHER_IS_KNOWN:
        raise Unsupported("this release of Triton is not known")
    if metadata["target"].backend != "cuda":
        raise Unsupported("the kernel is not for CUDA")
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if metadata[scratch]:
            raise Unsupported(f"the kernel needs scratch memory: {scratch}")
    if metadata.get("instrumentation_mode"):
        raise Unsupported("the kernel is instrumented")
    if metadata["shared"] > _MOST_SHARED_BYTES or metadata["num_ctas"] > _LARGEST_CLUSTER:
        raise Unsupported("the kernel needs more shared memory or a larger cluster than is provided for")
    parameters = _expected(signature, metadata.get("tensordesc_meta"))
    _compare(parameters, metadata, ptx)
    return parameters


def _expected(signature: Mapping[str, Any], descriptors: list[dict] | None) -> list[Parameter]:
    found: list[Parameter] = []
    encodings = iter(descriptors or ())
    for name, kind in signature.items():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            encoding = next(encodings, None)
            if encoding is None or encoding["fp4_padded"] or encoding.get("is_im2col"):
                raise Unsupported(f"{name} is no plain tensor map")
            rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
            found.append(Parameter(name, MAP))
            found += [Parameter(name, "i", ("shape", axis)) for axis in range(rank)]
            found += [Parameter(name, "q", ("strides", axis)) for axis in range(rank)]
        else:
            found += _flat(name, kind, ())
    return [*found, _SCRATCH, _SCRATCH]


def _flat(name: str, kind: Any, path: tuple[int, ...]) -> list[Parameter]:
    """The parameters of a tensor, of a number, or of a tuple of numbers."""
    if isinstance(kind, tuple):
        return [each for i, part in enumerate(kind) for each in _flat(name, part, (*path, i))]
    if kind == "constexpr":
        return []
    if kind.startswith("*") and not path:
        return [Parameter(name, ADDRESS, is_tensor=True)]
    if kind not in LETTERS:
        raise Unsupported(f"{name} has the type {kind}")
    return [Parameter(name, LETTERS[kind], path)]


def _compare(parameters: list[Parameter], metadata: Mapping[str, Any], ptx: str) -> None:
    """Hold the parameters against those of the kernel's entry: their number, sizes and alignment; and its threads."""
    entry = re.search(rf"\.entry\s+{re.escape(metadata['name'])}\(([^)]*)\)([^{{]*)", ptx)
    if entry is None:
        raise Unsupported("the PTX has no entry of the kernel's name")
    declared = []
    for line in filter(None, map(str.strip, entry[1].split(","))):
        match = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)(?:\s+\.ptr[^$%\w]*[\w. ]*?)?\s+[$%\w]+(?:\[(\d+)\])?", line
        )
        if match is None:
            raise Unsupported(f"the PTX has a parameter that is not understood: {line}")
        size = int(match[2]) // 8 * int(match[3] or 1)
        declared.append((size, int(match[1] or size)))
    expected = [(p.bytes, MAP_ALIGNMENT if p.letter == MAP else p.bytes) for p in parameters]
    if declared != expected:
        raise Unsupported(f"the PTX declares parameters of (bytes, alignment) {declared}, not {expected}")
    threads = re.search(r"\.reqntid\s+(\d+)", entry[2])
    if threads is None or int(threads[1]) != 32 * metadata["num_warps"]:
        raise Unsupported("the PTX does not require the threads of the kernel's warps")
