"""Host side of a launch: everything that depends only on a call's signature is worked out once and kept.

A Triton launch through ``kernel[grid](...)`` examines every argument again, about 35 us of Python for these kernels. A
``Launch`` does that once per call signature (shapes, strides, dtypes, alignment, device, options) and afterwards hands
the tensors to the compiled kernel. The signature is at least as fine as Triton's own specialisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_rope_attn.runtime.layouts import signature

_MAX_PREPARED = 4096


class Launch:
    """One kernel launch with everything but its tensors fixed. The tensors are the kernel's first parameters."""

    __slots__ = ("kernel", "grid", "scalars", "constants", "options", "compiled", "tail")

    def __init__(self, kernel, programs: int, scalars: tuple, constants: dict, options: dict):
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self.compiled = None
        names = kernel.arg_names
        self.tail = (*scalars, *(constants[name] for name in names[len(names) - len(constants) :]))

    def __call__(self, stream: int, *tensors) -> None:
        """Launch on the current device; ``stream`` is its current stream, as ``device.current_stream`` gives it."""
        compiled = self.compiled
        if compiled is None:  # Triton compiles, launches and returns the kernel; its interpreter returns None.
            self.compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
        elif _hooked():
            compiled[self.grid](*tensors, *self.tail)
        else:  # What compiled[grid](...) does without hooks, the same in triton 3.6 to 3.9.
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *tensors, *self.tail
            )


def _hooked() -> bool:
    """True while a profiler watches Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class PreparedCalls:
    """Calls by signature, built on first use; forgets everything when it grows past any reasonable working set."""

    def __init__(self, prepare: Callable):
        self._prepare = prepare
        self._calls: dict = {}

    def __call__(self, tensors: tuple[torch.Tensor, ...], options: tuple, config):
        key = (tensors[0].device, id(config), options, *map(signature, tensors))
        entry = self._calls.get(key)
        if entry is None:
            if len(self._calls) >= _MAX_PREPARED:
                self._calls.clear()
            # The entry keeps the configuration alive, so that its id stays its own.
            entry = self._calls[key] = (self._prepare(*tensors, *options, config), config)
        return entry[0]


class Source:
    """What ``tiles.head_tiles`` takes for a tensor of one signature: itself, or with tma a tensor descriptor.

    Reads past N or D give zeros. Gluon kernels name the ``layout`` of the tile in shared memory. The descriptor is
    checked once; each call gets a copy around its own tensor.
    """

    __slots__ = ("kind", "fields")

    def __init__(self, x: torch.Tensor, block_rows: int, pad_d: int, tma: bool, layout=None):
        self.fields = None
        if tma:
            shape = list(x.shape)
            # The stride of a size-1 axis is arbitrary, but the hardware checks it.
            strides = [s if size > 1 else shape[3] for size, s in zip(shape, x.stride())]
            strides[3] = 1
            self.kind = TensorDescriptor if layout is None else GluonTensorDescriptor
            arguments = (x, shape, strides, [1, 1, block_rows, pad_d], *(() if layout is None else (layout,)))
            # Without the tensor itself, which would otherwise stay alive.
            self.fields = {**vars(self.kind(*arguments)), "base": None}

    def __call__(self, x: torch.Tensor) -> torch.Tensor | TensorDescriptor | GluonTensorDescriptor:
        if self.fields is None:
            return x
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor


def ordered(kernel, shared: dict, **own) -> dict:
    """Compile-time arguments in the kernel's order."""
    constants = {**shared, **own}
    return {name: constants[name] for name in kernel.arg_names if name in constants}
