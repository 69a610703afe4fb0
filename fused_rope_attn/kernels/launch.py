"""Host side of a launch: everything that depends only on a call's signature is worked out once and kept.

A Triton launch through ``kernel[grid](...)`` examines every argument again, about 35 us of Python for these kernels. A
``Launch`` does that once per call signature (shapes, strides, dtypes, alignment, device, options) and afterwards hands
the tensors to the compiled kernel. The signature is at least as fine as Triton's own specialisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = math.log2(math.e)
# Rows and columns of the largest tile; a stride beyond 2**31 / this needs 64-bit offsets inside a tile.
_LARGEST_TILE = 256
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


def signature(x: torch.Tensor) -> tuple:
    """What launch arguments can depend on: layout, dtype, and alignment as Triton and the TMA see it."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def block_d(head_dim: int) -> int:
    """Smallest power of two that holds the head dimension, at least 16 (the tensor cores' smallest K)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def table_strides(cos, sin, rotary_dim: int, interleaved: bool):
    """(batch, row, column) strides of both tables, read as (1|B, S, R/2) whatever their width.

    A full-width table carries each angle twice: in the half layout its first R/2 columns are taken, interleaved every
    second one. No view is made.
    """
    return _one_table(cos, rotary_dim, interleaved), _one_table(sin, rotary_dim, interleaved)


def _one_table(table, rotary_dim, interleaved):
    strides = table.stride()
    column = strides[-1] * 2 if interleaved and table.shape[-1] == rotary_dim else strides[-1]
    return (strides[0] if len(strides) == 3 and table.shape[0] > 1 else 0, strides[-2], column)


def is_long(*strides: tuple[int, ...]) -> bool:
    """True when an offset between two elements of one tile of any tensor with these strides can pass 2**31."""
    return any((row + column) * _LARGEST_TILE >= 2**31 for _, _, row, column in strides)


def scale_and_sign(softmax_scale: float, softcap: float = 0.0) -> tuple[float, float, float | None]:
    """(qk_scale > 0 for base-2 softmax, sign to multiply q by, cap_scale): kernels never see a scale <= 0.

    With a softcap the scores are ``qk_scale * tanh(cap_scale * q k)``; without one ``qk_scale * q k``, cap_scale None.
    """
    scale, sign = (1.0, 0.0) if softmax_scale == 0.0 else (abs(softmax_scale), math.copysign(1.0, softmax_scale))
    if softcap:
        return softcap * LOG2E, sign, scale / softcap
    return scale * LOG2E, sign, None


class Masks(NamedTuple):
    """What a call's masks decide about its launches: presence and values of the host's, signatures of the tensors.

    left, right: keys before and after the query's own, None for unbounded; with causal, right is None. The tensors, in
    the order in which kernels take them: sinks (HQ,), kv_starts and kv_lens (B,) int32, cu_seqlens_q and cu_seqlens_k
    (sequences + 1,) int32. max_seqlen: of packed sequences, as a power of two, so that batches share their launches.
    """

    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    tensors: tuple = (None,) * 5
    max_seqlen: int = 0

    @property
    def packed(self) -> bool:
        return self.tensors[3] is not None

    @property
    def bounded(self) -> bool:
        """Whether the number of keys is read on the device, or may begin after the first."""
        return any(x is not None for x in self.tensors[1:])

    def longest(self, length: int) -> int:
        """Rows of one sequence at most, in tensors of ``length`` rows."""
        return min(self.max_seqlen, length) if self.packed else length

    @property
    def num_sequences(self) -> int | None:
        return self.tensors[3][0][0] - 1 if self.packed else None


NO_MASKS = Masks()
NO_TENSORS = (None,) * 5
# Beyond any sequence, and far enough from 2**31 to be added to a position.
_WIDEST_WINDOW = 2**30


def describe_masks(causal: bool, left: int, right: int, softcap: float, tensors: tuple, max_seqlen: int = 0) -> Masks:
    """``Masks`` of a call; left and right as in ``window``, -1 for unbounded."""
    return Masks(
        *window_bounds(causal, left, right),
        softcap,
        tuple(None if x is None else signature(x) for x in tensors),
        1 << max(0, max_seqlen - 1).bit_length() if tensors[3] is not None else 0,
    )


def window_bounds(causal: bool, left: int, right: int) -> tuple[int | None, int | None]:
    """left and right as in ``window``, -1 for unbounded, as kernels take them: None for no bound."""
    return (
        min(left, _WIDEST_WINDOW) if left >= 0 else None,
        min(right, _WIDEST_WINDOW) if right >= 0 and not causal else None,  # the diagonal is the narrower bound
    )


def tile_count(length: int, num_sequences: int | None, block: int) -> int:
    """``packed.count_tiles`` on the host."""
    return -(-length // block) if num_sequences is None else length // block + num_sequences + 1


def dot_precision(dtype: torch.dtype) -> str:
    """Input precision of tl.dot: true float32 unless the user allowed tf32 for matrix products, by either API."""
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def like_input(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised tensor with x's shape whose memory order is (B, N, H, D) where x's is, else (B, H, N, D)."""
    return torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device)


def output_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of ``like_input(x)``."""
    _, heads, length, head_dim = x.shape
    if heads > 1 and x.stride(1) < x.stride(2):
        return (length * heads * head_dim, head_dim, heads * head_dim, 1)
    return (heads * length * head_dim, length * head_dim, head_dim, 1)


def heads_per_section(num_heads: int, group_size: int, bytes_per_kv_head: int, section_bytes: int) -> int:
    """How many query heads run together so that their K and V stay in ``section_bytes`` of L2; 0 bytes means one.

    Sections are of equal size as nearly as groups allow: a small last one would leave multiprocessors idle.
    """
    if section_bytes == 0:
        return 1
    groups = max(1, num_heads // group_size)  # an empty batch has none
    most = min(groups, max(1, section_bytes // max(1, bytes_per_kv_head)))
    return -(-groups // -(-groups // most)) * group_size


def has_descriptor(x: torch.Tensor) -> bool:
    """True when the tensor memory accelerator can address x: 16-byte aligned rows with adjacent columns."""
    batch, head, row, column = x.stride()
    per_16_bytes = 16 // x.element_size()
    if column != 1 or x.data_ptr() % 16 or x.numel() == 0:
        return False
    if (batch | head | row) % per_16_bytes == 0 and batch > 0 and head > 0 and row > 0:
        return True
    return all(size == 1 or (s > 0 and s % per_16_bytes == 0) for size, s in zip(x.shape, (batch, head, row)))


class Source:
    """What ``primitives.head_source`` takes for a tensor of one signature: itself, or with tma a tensor descriptor.

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
