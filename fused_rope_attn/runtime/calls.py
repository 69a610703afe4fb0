# mypy: allow-untyped-defs, allow-incomplete-defs
"""Calls by their signatures: prepared at the first call, recorded at the second, and replayed after that.

A replay makes the allocations and the launches of the recorded call with other tensors: it costs the host a list of
addresses, one write into a block, and one call of the driver for each kernel. Only a call that allocates and launches,
and does nothing else with tensors, can be recorded. Any other call runs each time as it did first.
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
from fused_rope_attn.runtime.driver import Block, TensorMap, Unsupported
from fused_rope_attn.runtime.launch import Launch, hooked, watched

_MAX_CALLS = 4096
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
# Kernels are specialised for addresses that are multiples of this. PyTorch aligns its allocations to the other.
_ALIGNMENT, _WORKSPACE_ALIGNMENT = 16, 256
# A larger workspace keeps the allocations of the recorded call, because one large block may not fit in free memory.
MOST_WORKSPACE_BYTES = 1 << 24
_address = torch.Tensor.data_ptr


class Recording(TorchDispatchMode):
    """A context that notes the allocations and launches of this thread.

    refusal: the reason why they cannot be replayed, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Launch, dict[str, Any]]] = []
        self.refusal = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.made.append(out)
        elif function is _ATEN.detach.default and self.made and args[0] is self.made[-1]:
            self.made[-1] = out  # PyTorch's allocating functions return this one
        elif not (function is _ATEN.fill_.Scalar and math.isnan(args[1])):  # testing.poison_empty needs no replay
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
        recorded: from a call after its kernels were compiled.
        given: the tensors that the call was given. Those of a replay must have the same dtypes, devices, shapes and
            strides.
        results: what the call returned: None, or a tuple of allocations of its own, of given tensors, and of None.

    Raises:
        Unsupported: if the call cannot be replayed.
    """

    def __init__(self, recorded: Recording, given: Sequence[torch.Tensor], results: Any):
        if recorded.refusal:
            raise Unsupported(recorded.refusal)
        if not recorded.launches or any(_address(x) % _ALIGNMENT for x in given):
            raise Unsupported("nothing was launched, or an address is odd")
        kept = [x for x in recorded.made if any(x is result for result in results or ())]
        workspace = [x for x in recorded.made if not any(x is result for result in results or ())]
        self._offsets, self._workspace_bytes = _packed(workspace)
        if self._workspace_bytes > MOST_WORKSPACE_BYTES:
            kept, workspace, self._offsets, self._workspace_bytes = kept + workspace, [], [], 0
        tensors = [*given, *kept, *workspace]
        numbers = {id(x): i for i, x in enumerate(tensors)}
        if len(numbers) < len(tensors):
            raise Unsupported("a tensor was given twice")
        self._where = given[0].device
        self._layouts = [(_alike(x, given), tuple(x.shape), x.stride(), x.dtype) for x in kept]
        self._maps: list[tuple[TensorMap, int]] = []
        launches = []
        try:
            self._results = results and [None if x is None else numbers[id(x)] for x in results]
            for launch, arguments in recorded.launches:
                kernel = launch.for_driver(arguments)
                first = len(self._maps)
                self._maps += [(p, numbers[p.tensor]) for p in kernel.parameters if isinstance(p, TensorMap)]
                addresses = [numbers[p] for p in kernel.parameters if isinstance(p, int)]
                launches.append((kernel, addresses, range(first, len(self._maps))))
        except KeyError as error:
            raise Unsupported("a tensor came from elsewhere") from error
        self._make_results = getattr(type(results), "_make", tuple)
        self._make_block = functools.partial(Block, launches, len(tensors), len(self._maps))
        self._free_blocks: list[Block] = []
        found = driver.cuda_driver()
        assert found is not None  # a ``Kernel`` needs it
        self._driver = found
        self._names = ", ".join(launch.kernel.fn.__name__ for launch, _ in recorded.launches)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the results, () if the call returns none. Launch nothing and return None if this cannot be a replay.

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
        if self._offsets:
            workspace = torch.empty_strided((self._workspace_bytes // 4,), (1,), dtype=torch.float32, device=where)
            begin = _address(workspace)
            addresses += [begin + offset for offset in self._offsets]
        try:
            maps = [tensor_map.at(addresses[i]) for tensor_map, i in self._maps]
        except RuntimeError:  # the thread never used its GPU and lacks a context; the call itself makes one
            return None
        # Backward passes and a user's threads may be here at once. pop and append are atomic.
        try:
            block = self._free_blocks.pop()
        except IndexError:
            block = self._make_block()
        block.write(*addresses, *maps)
        code = block.launch(self._driver.launch, device.current_stream(where))
        if code == driver.INVALID_CONTEXT:  # again such a thread; no kernel was launched
            device.make_current(where)
            code = block.launch(self._driver.launch, device.current_stream(where))
        self._free_blocks.append(block)
        if code:
            raise RuntimeError(f"{self._names} could not be launched: {self._driver.message(code)}")
        if not self._results:
            return ()
        tensors = [*inputs, *made]
        return self._make_results([None if i is None else tensors[i] for i in self._results])


def _alike(x: torch.Tensor, given: Sequence[torch.Tensor]) -> int | None:
    """Return the index of a given tensor for which ``torch.empty_like`` returns x's layout; None if there is none.

    ``empty_like`` is the fastest allocation.
    """
    for i, other in enumerate(given):
        if other.shape == x.shape and other.dtype is x.dtype and other.device == x.device:
            if torch.empty_like(other, device="meta").stride() == x.stride():
                return i
    return None


def _packed(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Return (offsets of tensors in one allocation, its size), in bytes."""
    offsets, end = [], 0
    for x in tensors:
        offsets.append(end)
        size = x.untyped_storage().nbytes()
        end += size + -size % _WORKSPACE_ALIGNMENT
    return offsets, end


class Call:
    """The launches of one signature. ``run(tensors)`` allocates, launches and returns a tuple of tensors, or None.

    replay: the recording of ``run``, or None before there is one. refusal: the reason why there is none, or "".
    """

    __slots__ = ("run", "replay", "refusal", "_times")

    _ATTEMPTS = 4

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
        if not 1 < self._times <= self._ATTEMPTS:  # the first call compiles
            return self.run(tensors)
        recording = Recording()
        with recording:
            results = self.run(tensors)
        try:
            self.replay = Replay(recording, [x for x in tensors if x is not None], results)
            self.refusal = ""
        except Unsupported as reason:
            self.refusal = str(reason)
        return results


# From a signature to (its call, its configurations), which are kept alive because the signature has their ids.
_known: dict[tuple, tuple[Call, tuple]] = {}


def signature(tensors: Sequence[torch.Tensor | None]) -> tuple:
    """Return the shapes, strides, dtypes and devices of tensors, and whether Triton and the TMA see aligned addresses.

    A tensor that is not given is None.
    """
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNMENT) for x in tensors]
    )


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
