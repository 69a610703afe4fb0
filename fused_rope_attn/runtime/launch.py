# mypy: allow-untyped-defs, allow-incomplete-defs
"""Host side of a launch: everything that depends only on a call's signature is worked out once and kept.

A Triton launch through ``kernel[grid](...)`` examines every argument again, about 35 us of Python for these kernels. A
``Launch`` does that once per call signature (shapes, strides, dtypes, alignment, device, options) and afterwards hands
the tensors to the compiled kernel. The signature is at least as fine as Triton's own specialisation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_rope_attn.runtime import device, driver
from fused_rope_attn.runtime.direct_launch import DirectLaunch
from fused_rope_attn.runtime.parameters import Unsupported

_MAX_PREPARED = 4096


class _Watched(threading.local):
    """The launches of this thread that somebody writes down, or None."""

    launches: list[tuple[Launch, dict]] | None = None


watched = _Watched()


class Launch:
    """One kernel launch with everything but its tensors fixed, all arguments by the names of the kernel's parameters.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit`` whose tensors are its first parameters.
        programs: size of the grid.
        options: of Triton's launch: ``num_warps``, ``num_stages``, ``maxnreg``, ``launch_pdl``.
        shared: arguments by name, of which the kernel's own are taken: what several kernels of a call have in common.
        own: arguments of this kernel.

    Raises:
        TypeError: where ``own`` names something that the kernel has not, or a parameter behind the tensors gets no
            value.
    """

    __slots__ = ("kernel", "grid", "arguments", "options", "compiled", "direct", "refusal", "tail", "tensor_names")

    def __init__(self, kernel, programs: int, options: dict, shared: dict | None = None, **own):
        names = kernel.arg_names
        unknown = own.keys() - set(names)
        if unknown:
            raise TypeError(f"{kernel.fn.__name__} has no parameter {', '.join(sorted(unknown))}")
        given = {**(shared or {}), **own}
        self.arguments = {name: given[name] for name in names if name in given}
        self.tensor_names = tuple(names[: len(names) - len(self.arguments)])
        if self.arguments.keys() & set(self.tensor_names):
            lacking = [name for name in names if name not in given]
            raise TypeError(f"{kernel.fn.__name__}: the tensors must come first, but values lack for {lacking}")
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        # Triton 3.10 will turn the fusion of multiplications and additions off by default.
        # TRITON_DEBUG=1 keeps assertions of kernels. It would also assert that no integer overflows, but some wrap on
        # purpose.
        self.options = {"enable_fp_fusion": True, "sanitize_overflow": False, **options}
        self.compiled = None
        self.tail = tuple(self.arguments.values())
        self.direct: DirectLaunch | None = None
        self.refusal = "not launched yet"

    def __call__(self, stream: int, **tensors) -> None:
        """Launch on the current device with the kernel's tensors, all of them by name and in its order.

        ``stream`` is the device's current one, as ``device.current_stream`` gives it. A tensor may be None, or what a
        ``Source`` makes of it.

        Raises:
            RuntimeError: the CUDA driver's, with the kernel's name.
        """
        if watched.launches is not None:
            watched.launches.append((self, tensors))
        try:
            code = self._launch(stream, tensors)
        except RuntimeError as error:  # Triton's, which encodes tensor maps, and says in words what is wrong
            if "invalid device context" not in str(error):
                raise
            code = driver.INVALID_CONTEXT
        if code == driver.INVALID_CONTEXT:  # a thread that has not used its GPU yet
            driver.make_current(device.current_gpu())
            code = self._launch(stream, tensors)
        if code:
            raise RuntimeError(f"the kernel {self.kernel.fn.__name__} could not be launched: {driver.message(code)}")

    def _launch(self, stream: int, tensors: dict) -> int:
        """Launch by whichever way is open; returns the CUDA driver's error code, 0 for none."""
        if self.direct is not None and not hooked():
            return self.direct(stream, tensors)
        self.launch_by_triton(stream, tensors)
        return 0

    def launch_by_triton(self, stream: int, tensors: dict) -> None:
        """The same by Triton's own launcher: the first launch, after which ``direct`` is known, and what may not or
        cannot do without it. ``refusal`` says why a kernel cannot, and is empty where it can."""
        if tuple(tensors) != self.tensor_names:
            raise TypeError(f"{self.kernel.fn.__name__} takes {self.tensor_names}, not {tuple(tensors)}")
        given = {name: x[1].descriptor(x[0]) if type(x) is tuple else x for name, x in tensors.items()}
        compiled = self.compiled
        if compiled is None:  # Triton compiles, launches and returns the kernel; its interpreter returns None.
            self.compiled = self.kernel[self.grid](**given, **self.arguments, **self.options)
            if self.compiled is not None:
                self._prepare(tensors)
        elif hooked():
            compiled[self.grid](*given.values(), *self.tail)
        else:  # What compiled[grid](...) does without hooks, the same in triton 3.6 to 3.9.
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given.values(),
                *self.tail,
            )  # fmt: skip

    def _prepare(self, tensors: dict) -> None:
        try:
            self.direct, self.refusal = DirectLaunch(self.compiled, self.grid, tensors, self.arguments), ""
        except Unsupported as reason:
            self.refusal = str(reason)


def hooked() -> bool:
    """True while a profiler watches Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class PreparedCalls:
    """Calls by signature, built on first use; forgets everything when it grows past any reasonable working set.

    ``prepare(problem, tensors)``, or ``prepare(problem, tensors, config)``, builds one; ``problem`` is a hashable
    record of all that is not a tensor, a tensor that a call has not is None.
    """

    _instances: weakref.WeakSet[PreparedCalls] = weakref.WeakSet()
    # How often everything was forgotten: what was made of prepared calls is of no use when this has changed.
    generation = 0

    def __init__(self, prepare: Callable):
        self._prepare = prepare
        self._calls: dict = {}
        self._instances.add(self)

    def __call__(self, problem, tensors: tuple[torch.Tensor | None, ...], *config):
        # What launch arguments can depend on: layout, dtype, and alignment as Triton and the TMA see it. Written out,
        # because a call of a function for each tensor would cost the host another microsecond.
        key = (
            problem,
            *map(id, config),
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors],
        )
        entry = self._calls.get(key)
        if entry is None:
            if len(self._calls) >= _MAX_PREPARED:
                self.forget()
            # The entry keeps the configuration alive, so that its id stays its own.
            entry = self._calls[key] = (self._prepare(problem, tensors, *config), config)
        return entry[0]

    def __len__(self) -> int:
        return len(self._calls)

    def forget(self) -> None:
        """Build every call again when it comes."""
        self._calls.clear()

    @classmethod
    def forget_all(cls) -> None:
        """The same for all instances: after a change of what launches are prepared from."""
        PreparedCalls.generation += 1
        for calls in cls._instances:
            calls.forget()


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Source]:
        """What a ``Launch`` takes for x: itself, or with this source the pair of which a descriptor can be made."""
        return x if self.fields is None else (x, self)

    def descriptor(self, x: torch.Tensor) -> TensorDescriptor | GluonTensorDescriptor:
        """The descriptor of x itself, for Triton's launcher."""
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor
