# mypy: allow-untyped-defs, allow-incomplete-defs
"""Calls by their signatures, and the kernel launches that they make.

``kernel[grid](...)`` of Triton examines every argument again at each launch, which takes about 35 us for these kernels.
A ``Launch`` lets Triton do so once, when it compiles. A ``Call`` prepares its launches at the first time, records them
at the second, and replays them after that.

A replay makes the allocations and the launches of the recorded call with other tensors: it costs the host a list of
addresses, one write into a block, and one call of the driver for each kernel. Only a call that allocates and launches,
and does nothing else with tensors, can be recorded. Any other call runs each time as it did first.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_rope_attn.runtime import device, driver

_MAX_CALLS = 4096
_ALLOCATIONS = ("aten.empty.", "aten.empty_strided.", "aten.empty_like.", "aten.new_empty.", "aten.new_empty_strided.")
# Kernels are specialised for addresses that are multiples of this. PyTorch aligns its allocations to the other.
_ALIGNMENT, _WORKSPACE_ALIGNMENT = 16, 256
# A larger workspace keeps the allocations of the recorded call, because one large block may not fit in free memory.
MOST_WORKSPACE_BYTES = 1 << 24
_address = torch.Tensor.data_ptr


class Launch:
    """One kernel launch with everything but its tensors fixed, all arguments by the names of the kernel's parameters.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``. Its first parameters are those that change from call to
            call: tensors, descriptors, and records that hold tensors.
        programs: size of the grid.
        options: of Triton's launch: ``num_warps``, ``num_stages``, ``maxnreg``, ``launch_pdl``.
        shared: arguments by name that several kernels of a call have in common. The kernel takes those that it has.
        own: arguments of this kernel, which must have them.
    """

    __slots__ = ("kernel", "grid", "arguments", "options", "compiled", "tensor_names")

    def __init__(self, kernel, programs: int, options: dict, shared: dict | None = None, **own):
        given, names = {**(shared or {}), **own}, kernel.arg_names
        self.arguments = {name: given[name] for name in names if name in given}
        self.tensor_names = tuple(names[: len(names) - len(self.arguments)])
        wrong = own.keys() - self.arguments.keys() or self.arguments.keys() & set(self.tensor_names)
        if wrong:
            raise TypeError(f"{kernel.fn.__name__} takes {names}, the tensors first: look at {sorted(wrong)}")
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        # Triton 3.10 will turn the fusion of multiplications and additions off by default.
        # TRITON_DEBUG=1 keeps assertions of kernels. It would also assert that no integer overflows, but some
        # overflow on purpose.
        self.options = {"enable_fp_fusion": True, "sanitize_overflow": False, **options}
        self.compiled = None

    def __call__(self, stream: int, shared: dict | None = None, **own) -> None:
        """Launch on the current device with the kernel's tensors and descriptors, by name. One may be None.

        stream: the device's current one, as ``device.current_stream`` gives it. shared, own: as of the launch; own
        tensors replace shared ones. Raise RuntimeError as Triton does, for example with the CUDA driver's error.
        """
        given = {**(shared or {}), **own}
        tensors = {name: given[name] for name in self.tensor_names if name in given}
        if not own.keys() <= tensors.keys() or len(tensors) < len(self.tensor_names):
            raise TypeError(f"{self.kernel.fn.__name__} takes {self.tensor_names}, but not {', '.join(given)}")
        recording = _python_dispatch._get_current_dispatch_mode()
        if type(recording) is Recording:
            recording.launches.append((self, tensors))
        try:
            self._launch(stream, tensors)
        except RuntimeError as error:
            if "invalid device context" not in str(error):
                raise
            device.make_context_current()
            self._launch(stream, tensors)

    def _launch(self, stream: int, tensors: dict) -> None:
        if self.compiled is None:  # Triton compiles, launches and returns the kernel; its interpreter returns None.
            self.compiled = self.kernel[self.grid](**tensors, **self.arguments, **self.options)
        else:
            self.compiled[self.grid](*tensors.values(), *self.arguments.values(), stream=stream)


def hooked() -> bool:
    """Return whether a profiler watches Triton's launches."""
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor | TensorDescriptor | GluonTensorDescriptor:
        """Return x as a kernel takes it: x itself, or its descriptor."""
        if self.fields is None:
            return x
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor


class Recording(_python_dispatch.TorchDispatchMode):
    """Note the allocations and launches of this thread. refusal: the reason why they cannot be replayed, or ""."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Launch, dict[str, Any]]] = []
        self.refusal = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **(kwargs or {})), str(function)
        if name.startswith(_ALLOCATIONS):
            self.made.append(out)
        elif name == "aten.detach.default" and self.made and args[0] is self.made[-1]:
            self.made[-1] = out  # PyTorch's allocating functions return this one
        elif not (name == "aten.fill_.Scalar" and math.isnan(args[1])):  # testing.poison_empty needs no replay
            self.refusal = f"it runs {name}"
        return out


class Replay:
    """``replay(inputs)`` does with these tensors what the recorded call did with those of the same layouts, ``given``.

    results: what the call returned: None, or a tuple of allocations of its own, of given tensors, and of None. Raise
    Unsupported if the call cannot be replayed.
    """

    def __init__(self, recorded: Recording, given: Sequence[torch.Tensor], results: Any):
        if recorded.refusal:
            raise driver.Unsupported(recorded.refusal)
        if not recorded.launches or any(_address(x) % _ALIGNMENT for x in given):
            raise driver.Unsupported("nothing was launched, or an address is odd")
        returned = set(map(id, results or ()))
        kept = [x for x in recorded.made if id(x) in returned]
        workspace = [x for x in recorded.made if id(x) not in returned]
        # Offsets and size, in bytes, of the workspace in one allocation.
        sizes = [x.untyped_storage().nbytes() for x in workspace]
        sizes = [size + -size % _WORKSPACE_ALIGNMENT for size in sizes]
        *self._offsets, self._workspace_bytes = itertools.accumulate(sizes, initial=0)
        if self._workspace_bytes > MOST_WORKSPACE_BYTES:
            kept, workspace, self._offsets = kept + workspace, [], []
        every = [*given, *kept, *workspace]
        numbers = {id(x): i for i, x in enumerate(every)}
        if len(numbers) < len(every):
            raise driver.Unsupported("a tensor was given twice")
        self._where = given[0].device
        self._layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in kept]
        kernels = [driver.Kernel(x.compiled, x.grid, x.arguments | tensors) for x, tensors in recorded.launches]
        maps = [p for kernel in kernels for p in kernel.parameters if isinstance(p, driver.TensorMap)]
        self._make_block = functools.partial(driver.Block, kernels, numbers, len(maps))
        try:
            self._results = results and [*map({**numbers, id(None): -1}.__getitem__, map(id, results))]
            self._maps = [(tensor_map, numbers[tensor_map.tensor]) for tensor_map in maps]
            self._free_blocks = [self._make_block()]
        except KeyError as error:
            raise driver.Unsupported("a tensor came from elsewhere") from error
        self._make_results = getattr(type(results), "_make", tuple)
        self._driver: Any = driver.cuda_driver()
        self._names = ", ".join(launch.kernel.fn.__name__ for launch, _ in recorded.launches)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the results, () if the call returns none. Launch nothing and return None if this cannot be a replay.

        Raise RuntimeError with the driver's error and the kernels' names.
        """
        where = self._where
        if hooked() or not device.is_current(where):
            return None
        addresses = [*map(_address, inputs)]
        empty = device.empty_on_cpu if where.index is None else device.empty_on_gpu
        made = [empty(*layout) for layout in self._layouts]
        addresses += map(_address, made)
        if self._offsets:
            workspace = empty((self._workspace_bytes // 4,), (1,), torch.float32)
            begin = _address(workspace)
            addresses += [begin + offset for offset in self._offsets]
        try:
            maps = [tensor_map.at(addresses[i]) for tensor_map, i in self._maps]
        except RuntimeError:  # as below
            return None
        # Backward passes and a user's threads may be here at once. pop and append are atomic.
        try:
            block = self._free_blocks.pop()
        except IndexError:
            block = self._make_block()
        block.write(*addresses, *maps)
        code = block.launch(self._driver.launch, device.current_stream(where))
        self._free_blocks.append(block)
        if code == driver.INVALID_CONTEXT:  # the thread never used its GPU; the call itself makes a context
            return None
        if code:
            raise RuntimeError(f"{self._names} could not be launched: {self._driver.message(code)}")
        if not self._results:
            return ()
        return self._make_results(map([*inputs, *made, None].__getitem__, self._results))


class Call:
    """The launches of one signature. ``run(tensors)`` allocates, launches and returns a tuple of tensors, or None.

    replay: of ``run``, or None before it was recorded. refusal: the reason why there is none, or "".
    """

    __slots__ = ("run", "replay", "refusal", "_times")

    def __init__(self, run: Callable[[Any], Any]):
        self.run = run
        self.replay: Replay | None = None
        self.refusal, self._times = "not recorded yet", 0

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Call with tensors of this signature, None for a tensor that is not given."""
        replay = self.replay
        if replay is not None:
            results = replay([x for x in tensors if x is not None])
            return self.run(tensors) if results is None else results
        self._times += 1
        if self._times not in (2, 3, 4):  # the first call compiles, and three attempts are enough
            return self.run(tensors)
        recording = Recording()
        with recording:
            results = self.run(tensors)
        try:
            self.replay = Replay(recording, [x for x in tensors if x is not None], results)
            self.refusal = ""
        except driver.Unsupported as reason:
            self.refusal = str(reason)
        return results


# From a signature to (its call, its configurations), which are kept alive because the signature has their ids.
_known: dict[tuple, tuple[Call, tuple]] = {}


def signature(tensors: Sequence[torch.Tensor | None]) -> tuple:
    """Return the classes, shapes, strides, dtypes and devices of tensors, and whether Triton and the TMA see aligned
    addresses.

    A tensor that is not given is None.
    """
    forms = [
        None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNMENT)
        for x in tensors
    ]
    return tuple(forms)


def call_of(
    prepare: Callable[..., Callable[[Any], Any]], problem: Any, tensors: Sequence[torch.Tensor | None], *config: Any
) -> Call:
    """Return the ``Call`` of this signature. If there is none, make it by ``Call(prepare(problem, tensors, *config))``.

    problem: a hashable record of everything that is not a tensor. When ``_MAX_CALLS`` calls are known, forget them all.
    """
    key = (prepare, problem, *map(id, config), signature(tensors))
    entry = _known.get(key)
    if entry is None:
        if len(_known) >= _MAX_CALLS:
            forget()
        entry = _known[key] = Call(prepare(problem, tensors, *config)), config
    return entry[0]


def forget() -> None:
    """Prepare every call again, because the inputs from which launches are prepared have changed."""
    _known.clear()
