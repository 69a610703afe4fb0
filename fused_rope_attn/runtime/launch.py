# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches of Triton kernels by the names of their arguments, and the tensor descriptors that they take.

``kernel[grid](...)`` examines every argument again at each launch, which takes about 35 us for these kernels. A
``Launch`` lets Triton do so once, when it compiles. ``Calls`` keeps launches by the signatures of their calls.
"""

from __future__ import annotations

import threading

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.driver import Kernel, Unsupported


class _Watched(threading.local):
    """The list to which launches of this thread are added, or None."""

    launches: list[tuple[Launch, dict]] | None = None


watched = _Watched()


class Launch:
    """One kernel launch with everything but its tensors fixed, all arguments by the names of the kernel's parameters.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``. Its first parameters are those that change from call to
            call: tensors, descriptors, and records that hold tensors.
        programs: size of the grid.
        options: of Triton's launch: ``num_warps``, ``num_stages``, ``maxnreg``, ``launch_pdl``.
        shared: arguments by name that several kernels of a call have in common. The kernel takes those that it has.
        own: arguments of this kernel.

    Raises:
        TypeError: if the kernel lacks a parameter that ``own`` names, or a parameter after the tensors gets no value.
    """

    __slots__ = ("kernel", "grid", "arguments", "options", "compiled", "tensor_names", "_names")

    def __init__(self, kernel, programs: int, options: dict, shared: dict | None = None, **own):
        names = kernel.arg_names
        unknown = own.keys() - set(names)
        if unknown:
            raise TypeError(f"{kernel.fn.__name__} has no parameter {', '.join(sorted(unknown))}")
        given = {**(shared or {}), **own}
        self.arguments = {name: given[name] for name in names if name in given}
        self.tensor_names = tuple(names[: len(names) - len(self.arguments)])
        self._names = frozenset(self.tensor_names)
        if self.arguments.keys() & self._names:
            lacking = [name for name in names if name not in given]
            raise TypeError(f"{kernel.fn.__name__}: the tensors must come first, but values lack for {lacking}")
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        # Triton 3.10 will turn the fusion of multiplications and additions off by default.
        # TRITON_DEBUG=1 keeps assertions of kernels. It would also assert that no integer overflows, but some
        # overflow on purpose.
        self.options = {"enable_fp_fusion": True, "sanitize_overflow": False, **options}
        self.compiled = None

    def __call__(self, stream: int, shared: dict | None = None, **own) -> None:
        """Launch on the current device with the kernel's tensors, by name. One may be None, or a ``Source``'s result.

        Args:
            stream: the device's current one, as ``device.current_stream`` gives it.
            shared: tensors that several kernels of a call have in common. The kernel takes those that it has.
            own: tensors of this kernel, which replace shared ones.

        Raises:
            TypeError: if the kernel lacks a tensor that ``own`` names, or a tensor of the kernel is not given.
            RuntimeError: as Triton raises it, for example with the CUDA driver's error.
        """
        given = {**(shared or {}), **own}
        if not own.keys() <= self._names <= given.keys():
            wrong = sorted(own.keys() - self._names or self._names - given.keys())
            raise TypeError(f"{self.kernel.fn.__name__} takes {self.tensor_names}: look at {', '.join(wrong)}")
        tensors = {name: given[name] for name in self.tensor_names}
        if watched.launches is not None:
            watched.launches.append((self, tensors))
        given = {name: x[1].descriptor(x[0]) if type(x) is tuple else x for name, x in tensors.items()}
        try:
            self._launch(stream, given)
        except RuntimeError as error:
            if "invalid device context" not in str(error):
                raise
            device.make_current(torch.device("cuda", device.current_gpu()))
            self._launch(stream, given)

    def _launch(self, stream: int, given: dict) -> None:
        compiled = self.compiled
        if compiled is None:  # Triton compiles, launches and returns the kernel; its interpreter returns None.
            self.compiled = self.kernel[self.grid](**given, **self.arguments, **self.options)
        else:
            compiled[self.grid](*given.values(), *self.arguments.values(), stream=stream)

    def for_driver(self, tensors: dict) -> Kernel:
        """Return this launch as the driver makes it. tensors: as ``__call__`` took them.

        Raises Unsupported if the driver cannot make it.
        """
        if self.compiled is None:
            raise Unsupported("nothing was compiled")
        return Kernel(self.compiled, self.grid, {**self.arguments, **tensors})


def hooked() -> bool:
    """True while a profiler watches Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Source:
    """The form in which kernels take tensors of one layout: as they are, or as descriptors of blocks.

    block: the sizes of a block, or None for tensors as they are. Reads past the tensor's end give zeros. Gluon kernels
    name the ``layout`` of the block in shared memory. The descriptor is checked once; each call gets a copy around its
    own tensor.
    """

    __slots__ = ("kind", "fields")

    def __init__(self, x: torch.Tensor, block: list[int] | None, layout=None):
        self.fields = None
        if block is not None:
            shape = list(x.shape)
            # The stride of a size-1 axis is arbitrary, but the hardware checks it.
            strides = [s if size > 1 else shape[-1] for size, s in zip(shape, x.stride())]
            strides[-1] = 1
            self.kind = TensorDescriptor if layout is None else GluonTensorDescriptor
            arguments = (x, shape, strides, block, *(() if layout is None else (layout,)))
            # Without the tensor itself, which would otherwise stay alive.
            self.fields = {**vars(self.kind(*arguments)), "base": None}

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Source]:
        """Return x as a ``Launch`` takes it: x itself, or the pair (x, self) for a descriptor."""
        return x if self.fields is None else (x, self)

    def descriptor(self, x: torch.Tensor) -> TensorDescriptor | GluonTensorDescriptor:
        """Return the descriptor of x, for Triton's launcher."""
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor
