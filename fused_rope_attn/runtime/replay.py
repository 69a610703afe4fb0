# mypy: allow-untyped-defs, allow-incomplete-defs
"""Eager calls of one kind, replayed: what a call allocates and launches, without the Python that says so.

A call is recorded once while it runs as it always does. A replay makes the same allocations and the same launches with
other tensors, which is a list of addresses, one write into a block and one call of the driver for each kernel. The
order, the kernels and their arguments are those of the recorded call, so that only what allocates and launches, and
does nothing else with tensors, can be recorded.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_attn.runtime import device, driver
from fused_rope_attn.runtime.direct_launch import Blocks, Layout
from fused_rope_attn.runtime.launch import PreparedCalls, hooked, watched
from fused_rope_attn.runtime.parameters import Unsupported

_ATEN = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _ATEN.empty.memory_format,
        _ATEN.empty_strided.default,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    )
)
# Addresses as kernels are specialised for them, and as PyTorch's allocations are.
_ALIGNMENT, _SCRATCH_ALIGNMENT = 16, 256
# Above this the parts of scratch memory stay allocations of their own, which find room where one large one may not.
MOST_SCRATCH_BYTES = 1 << 24
_address = torch.Tensor.data_ptr


class Recording(TorchDispatchMode):
    """While it is entered, the allocations and launches of this thread are written down.

    refusal: why they cannot be replayed, empty where they can.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Any, dict[str, Any]]] = []
        self.refusal = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.made.append(out)
        elif function is _ATEN.detach.default and self.made and args[0] is self.made[-1]:
            self.made[-1] = out  # what PyTorch's functions that allocate hand out
        elif not (function is _ATEN.fill_.Scalar and math.isnan(args[1])):  # testing.poison_empty, which nobody needs
            self.refusal = f"it runs {function}"
        return out

    def __enter__(self) -> Recording:
        watched.launches = self.launches
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watched.launches = None
        super().__exit__(kind, error, trace)


class Replay:
    """``replay(inputs)`` does with these tensors what the recorded call did with those of ``given``.

    Args:
        recorded: of a call whose kernels had been compiled before.
        given: the tensors that the call was given, without those that it had not. Those of a replay must have the same
            dtypes, devices, shapes and strides.
        results: what the call returned; allocations of its own, and None.

    Raises:
        Unsupported: where the call cannot be replayed.
    """

    __slots__ = ("_layouts", "_where", "_scratch", "_offsets", "_maps", "_blocks", "_results", "_names")

    def __init__(self, recorded: Recording, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]):
        if recorded.refusal:
            raise Unsupported(recorded.refusal)
        if not recorded.launches or any(_address(x) % _ALIGNMENT for x in given):
            raise Unsupported("nothing was launched, or an address is odd")
        kept = [x for x in recorded.made if any(x is result for result in results)]
        scratch = [x for x in recorded.made if not any(x is result for result in results)]
        self._offsets, self._scratch = _packed(scratch)
        if self._scratch > MOST_SCRATCH_BYTES:
            kept, scratch, self._offsets, self._scratch = kept + scratch, [], [], 0
        tensors = [*given, *kept, *scratch]
        numbers = {id(x): i for i, x in enumerate(tensors)}
        if len(numbers) < len(tensors):
            raise Unsupported("a tensor was given twice")
        self._layouts = [(_alike(x, given), tuple(x.shape), x.stride(), x.dtype) for x in kept]
        self._where = given[0].device
        where = {id(x): i for i, x in enumerate(kept)}
        try:
            self._results = [None if x is None else where[id(x)] for x in results]
            self._blocks, self._maps = _blocks(recorded.launches, numbers)
        except KeyError as error:
            raise Unsupported("a tensor came from elsewhere") from error
        self._names = ", ".join(launch.kernel.fn.__name__ for launch, _ in recorded.launches)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The results; None, and nothing was launched, where these tensors or this moment need the call itself.

        Raises:
            RuntimeError: the CUDA driver's, with the kernels' names.
        """
        where = self._where
        if hooked() or not device.is_current(where):
            return None
        addresses = [*map(_address, inputs)]
        if functools.reduce(operator.or_, addresses) % _ALIGNMENT:
            return None
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=where) if i is None else torch.empty_like(inputs[i])
            for i, shape, strides, dtype in self._layouts
        ]
        addresses += map(_address, made)
        if self._scratch:
            scratch = torch.empty_strided((self._scratch // 4,), (1,), dtype=torch.float32, device=where)
            begin = _address(scratch)
            addresses += [begin + offset for offset in self._offsets]
        stream = device.current_stream(where)
        try:
            maps = [described.at(addresses[i]) for described, i in self._maps]
        except RuntimeError:  # in a thread that has not used its GPU yet, to which the call itself sees
            return None
        code = self._blocks.launch(stream, *addresses, *maps)
        if code == driver.INVALID_CONTEXT:  # a thread that has not used its GPU yet: no kernel was launched
            driver.make_current(device.current_gpu())
            code = self._blocks.launch(stream, *addresses, *maps)
        if code:
            raise RuntimeError(f"one of the kernels {self._names} could not be launched: {driver.message(code)}")
        return [None if i is None else made[i] for i in self._results]


def _alike(x: torch.Tensor, given: Sequence[torch.Tensor]) -> int | None:
    """The number of a tensor of which ``torch.empty_like`` makes one like x, for less than one with a layout."""
    for i, other in enumerate(given):
        if other.shape == x.shape and other.dtype is x.dtype and other.device == x.device:
            if torch.empty_like(other, device="meta").stride() == x.stride():
                return i
    return None


def _packed(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """(offsets of tensors in one piece of memory, its size), in bytes."""
    offsets, end = [], 0
    for x in tensors:
        offsets.append(end)
        size = x.untyped_storage().nbytes()
        end += size + -size % _SCRATCH_ALIGNMENT
    return offsets, end


def _blocks(launches: list[tuple[Any, dict[str, Any]]], numbers: dict[int, int]) -> tuple[Blocks, list]:
    """(blocks of all launches, their descriptors with the number of each one's tensor)."""
    maps: list[tuple[Any, int]] = []
    tensors, own_maps = [], []
    for launch, given in launches:
        if launch.direct is None:
            raise Unsupported(launch.refusal)
        tensors.append([numbers[id(given[name])] for name in launch.direct.plain])
        first = len(maps)
        maps += [(described, numbers[id(given[described.name][0])]) for described in launch.direct.described]
        own_maps.append(range(first, len(maps)))
    direct = [launch.direct for launch, _ in launches]
    layout = Layout(direct[0].launch, [each.kernel for each in direct], len(numbers), tensors, own_maps)
    return Blocks(layout), maps


class Replayed:
    """A call of one kind that is recorded when it comes again, and replayed from then on.

    ``run()`` is the call itself. What could not be recorded a few times is left to it for good.
    """

    __slots__ = ("_calls", "_replay", "_generation", "refusal")

    _ATTEMPTS = 4

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._calls, self._generation = 0, PreparedCalls.generation
        self._replay: Replay | None = None
        self.refusal = "not recorded yet"

    def __call__(self, inputs: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        if self._generation != PreparedCalls.generation:
            self._forget()
        replay = self._replay
        if replay is not None:
            results = replay(inputs)
            if results is not None:
                return results
            return run()
        self._calls += 1
        if not 1 < self._calls <= self._ATTEMPTS:  # Triton's launcher takes the first of all
            return run()
        recording = Recording()
        with recording:
            results = run()
        try:
            self._replay, self.refusal = Replay(recording, inputs, results), ""
        except Unsupported as reason:
            self.refusal = str(reason)
        return results
