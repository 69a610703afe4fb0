"""A compiled kernel and a CUDA driver that are none: launches leave the bytes that a GPU would have read."""

import ctypes
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import NamedTuple

import torch

from fused_rope_attn.runtime.driver import LaunchAttribute
from fused_rope_attn.runtime.launch import Source
from fused_rope_attn.runtime.triton_compat import gl

NAME = "toy_kernel"
# One parameter of every kind that kernels have: a tensor, a descriptor, an absent tensor, a record with a tensor, a
# tuple, a number, a constant.
SIGNATURE = {
    "x_ptr": "*fp32",
    "y_desc": "tensordesc<bf16[1, 1, 64, 64],NVMMASharedLayout()>",
    "no_ptr": "constexpr",
    "z": ("*bf16", "constexpr"),
    "strides": ("i32", "i64", "constexpr"),
    "scale": "fp32",
    "BLOCK": "constexpr",
}
ENCODING = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64]}
# Bytes of the parameters: x, the tensor map with its shape and strides, z, two strides, scale, two of scratch.
SIZES = [8, 128, *[4] * 4, *[8] * 4, 8, 4, 8, 4, 8, 8]
ARGUMENTS = {"strides": (640, 1 << 40, 1), "scale": 0.25, "BLOCK": 64}
GRID = (12, 1, 1)


class View(NamedTuple):
    """A record as the host passes it."""

    ptr: torch.Tensor
    step: int = 1


def compiled_kernel(signature=SIGNATURE, function=0x5EED, **changed):
    """A replacement of Triton's compiled kernel, as far as launches look at it; ``changed`` fields of its metadata."""
    fields = {
        "name": NAME,
        "num_warps": 4,
        "num_ctas": 1,
        "shared": 4096,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "instrumentation_mode": "",
        "launch_pdl": True,
        "launch_cooperative_grid": False,
        "tensordesc_meta": [ENCODING],
    } | changed
    metadata = namedtuple("KernelMetadata", fields)(**fields)
    runs = []

    class Compiled(SimpleNamespace):
        def run(self, *arguments, grid, stream):
            runs.append((grid, stream, *arguments))

        def __getitem__(self, grid):
            return lambda *arguments, stream: self.run(*arguments, grid=grid, stream=stream)

    return Compiled(src=SimpleNamespace(signature=signature), metadata=metadata, function=function, runs=runs)


def toy_tensors():
    """Tensors and the descriptor for SIGNATURE."""
    y = torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.bfloat16)
    source = Source(y, [1, 1, 64, 64], layout)
    return {"x_ptr": torch.zeros(8), "y_desc": source(y), "no_ptr": None, "z": View(torch.zeros(8).bfloat16())}


def toy_map(address):
    """The tensor map that ``RecordingDriver`` makes, recognisable."""
    return address.to_bytes(8, "little") + bytes(range(120))


class ToyKernel:
    """A replacement of ``triton.jit``: ``kernel[grid](...)`` notes its arguments and returns a compiled kernel."""

    arg_names = list(SIGNATURE)
    fn = SimpleNamespace(__name__=NAME)

    def __init__(self, compiled):
        self.compiled = compiled
        self.first = []

    def __getitem__(self, grid):
        def launch(**arguments):
            self.first.append(arguments)
            return self.compiled

        return launch


class RecordingDriver:
    """A replacement of ``driver.cuda_driver``; every launch adds the values in its block of arguments to ``launches``.

    code: the error code of launches, 0 for none. sizes: of the kernel's parameters. seconds: the time of a launch.
    """

    def __init__(self, code=0, sizes=SIZES, seconds=0.0):
        self.code, self.sizes, self.seconds = code, sizes, seconds
        self.launches, self.encoded, self.code_of_encode = [], [], 0

    def parameter_sizes(self, function):
        return self.sizes

    def encode(self, memory, dtype, rank, address, sizes, pitches, box, steps, *others):
        self.encoded.append((address.value, dtype, rank, list(sizes), list(pitches), list(box), list(steps), others))
        ctypes.memmove(memory, toy_map(address.value), 128)
        return self.code_of_encode

    def launch(self, config, function, parameters, extra):
        time.sleep(self.seconds)
        given = config._obj
        attributes = (LaunchAttribute * given.num_attributes).from_address(given.attributes)
        pointers = list(parameters._obj)
        self.launches.append(
            SimpleNamespace(
                grid=tuple(given.grid),
                block=tuple(given.block),
                shared=given.shared_bytes,
                stream=given.stream,
                attributes=[(each.id, *each.value) for each in attributes],
                function=function.value,
                extra=extra,
                values=[ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)],
                misaligned=[i for i, at in enumerate(pointers) if at % min(64, self.sizes[i])],
            )
        )
        return self.code

    def message(self, code):
        return f"CUDA error {code}: as the driver explains it"
