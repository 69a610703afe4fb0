# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launchers of the rotation alone, of norm and rotation in one pass, and of its gradient; and the table of their tiles.

A memory-bound kernel needs bytes in flight, whatever the head dimension and the dtype: rows of the table give bytes,
and the launcher turns them into tokens by heads. ``attention/configs.py`` explains tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.rotation import RotaryTables
from fused_rope_attn.kernels.tiles import TensorView
from fused_rope_attn.rotation import kernel
from fused_rope_attn.rotation.problem import LAYOUTS, RotationOptions, RotationTensors
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, call_of
from fused_rope_attn.runtime.layouts import table_strides
from fused_rope_attn.runtime.rows import find_row


@dataclass(frozen=True)
class RotationConfig:
    """The tile of one program.

    tile_bytes: bytes that it loads; divided by 32 * num_warps, the bytes that a thread has in flight.
    run_bytes: how many of them are neighbours in memory: heads of one token, or tokens of one head, whichever are.
    """

    tile_bytes: int
    run_bytes: int
    num_warps: int


@dataclass(frozen=True)
class RotationRow:
    """Hold one row: ``config`` for the calls that the other fields select.

    most_bytes: of a call's largest tensor. norms: whether the call has any. None matches anything.
    """

    config: RotationConfig
    arch: tuple[str, ...] | None = None
    most_bytes: int | None = None
    norms: bool | None = None


# fmt: off
TABLE: tuple[RotationRow, ...] = (
    # More than one tile in few rows, so that small tests cross every border.
    RotationRow(arch=("interpreter",), config=RotationConfig(tile_bytes=1 << 11, run_bytes=1 << 8, num_warps=1)),
    # Twice the programs, with eight 16-byte loads of a thread in flight. Untimed.
    RotationRow(most_bytes=4 << 20, config=RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4)),
    # 90 registers forward and 128 backward on sm_90, so that smaller tiles keep more in flight. Untimed.
    RotationRow(norms=True, config=RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4)),
    # H200, triton 3.6.0, 2026-11-21: .94 to .99 of a copy at seven shapes, both layouts.
    RotationRow(config=RotationConfig(tile_bytes=1 << 14, run_bytes=1 << 12, num_warps=8)),
)
# fmt: on

# Columns that pass through, as a multiple of those that rotate, up to which a tile's size does not count them.
_MOST_TAIL = 4


def tile_shape(config: RotationConfig, row_bytes: int, heads: int, heads_inner: bool) -> tuple[int, int]:
    """Return (tokens, heads) of a tile with rows of ``row_bytes``. Heads are a constant of a model, lengths are not."""
    total = max(1, config.tile_bytes // row_bytes)
    inner = max(1, min(total, config.run_bytes // row_bytes))
    block_heads = min(triton.next_power_of_2(heads), inner if heads_inner else total // inner)
    return total // block_heads, block_heads


def _prepare(key, flat: tuple, *config: RotationConfig):
    """Prepare the launch of one signature, which returns the partial sums of the weights' gradients that are wanted.

    key: the options, the number of xs and of weights, and for each weight whether its gradient is wanted.
    """
    options, count, norms, wanted = key
    axes = LAYOUTS[options.layout]

    def split(flat: tuple) -> tuple[RotationTensors, list]:
        xs, outs = flat[:count], flat[count : 2 * count]
        cos, sin, ids, ends, *rest = flat[2 * count :]
        return RotationTensors(xs, outs, cos, sin, ids, ends, rest[:norms]), rest[norms:]

    def in_order(sizes, absent) -> tuple[int, ...]:
        return tuple(absent if axis is None else sizes[axis] for axis in axes)

    def view(x: torch.Tensor | None) -> Any:
        return None if x is None else TensorView.host(x, in_order(x.stride(), 0))

    tensors, normed = split(flat)
    (xs, outs, cos, _, ids, ends, _), x = tensors, tensors.xs[0]
    most_bytes = max(x.numel() * x.element_size() for x in xs)
    arch = device.arch(cos.device)
    chosen = config[0] if config else find_row(TABLE, arch=arch, most_bytes=most_bytes, norms=norms > 0).config
    heads = [in_order(x.shape, 1)[1] for x in xs]
    batch, _, length, head_dim = in_order(x.shape, 1)
    sections = 1 if ids is None else ids.shape[1]
    width, tail = options.rotary_dim // sections, head_dim - options.rotary_dim
    block_pairs, block_tail = triton.next_power_of_2(width // 2), triton.next_power_of_2(tail) if tail else 1
    # A tile also holds what passes through, which is much where few columns of many rotate.
    columns = max(triton.next_power_of_2(2 * block_pairs * sections), block_tail // _MOST_TAIL)
    if norms:  # or is normed
        columns = triton.next_power_of_2(head_dim)
    # One token (a step of decoding) is all heads, in any order.
    _, head, row, _ = in_order(x.stride(), 0)
    heads_inner = head < row or length == 1
    fewest = min((h for h in heads if h), default=1)
    rows, block_heads = tile_shape(chosen, columns * x.element_size(), fewest, heads_inner)
    # True where an offset between two elements of one tile can pass 2**31.
    strides = [in_order(x.stride(), 0) for x in (*xs, *outs, *normed) if x is not None]
    is_wide = any(rows * row + block_heads * head + head_dim * column >= 2**31 for _, head, row, column in strides)
    # A norm changes the tail too, which a call in place without norms leaves as it is.
    copies_tail = tail > 0 and not (options.in_place and not norms)
    tile = rows, block_heads, heads_inner, is_wide
    sequences = None if ends is None else ends.shape[0] - 1
    numbers = {
        **dict(itertools.zip_longest(("H0", "H1", "H2"), heads)),
        "N": length,
        "num_positions": cos.shape[-2],
        "num_sequences": sequences,
        "search_steps": None if sequences is None else sequences.bit_length(),
        "shape": kernel.TileShape.host(*tile, head_dim, sections, block_pairs, block_tail, copies_tail),
    }
    tiles = [triton.cdiv(length, rows) * batch * triton.cdiv(h, block_heads) for h in heads]
    launch = Launch(kernel.rotation_kernel, sum(tiles), {"num_warps": chosen.num_warps}, numbers)
    # A program writes one partial sum of its weight's gradient.
    shapes = [(tiles_of_x, head_dim) if is_wanted else None for tiles_of_x, is_wanted in zip(tiles, wanted)]
    of_table = width, options.interleaved
    is_full = cos.shape[-1] == width
    of_norm = float(options.norm_eps or 0.0), float(options.norm_offset or 0.0), head_dim

    def run(flat: tuple) -> tuple[torch.Tensor | None, ...]:
        tensors, normed = split(flat)
        xs, outs, cos, sin, ids, ends, weights = tensors
        partials = [None if shape is None else cos.new_empty(shape, dtype=torch.float32) for shape in shapes]
        if sum(tiles):
            of_norms = [Norm.host(weight, *of_norm) for weight in weights]
            several = itertools.zip_longest(xs, outs, of_norms, normed, partials)
            operands = [
                kernel.RotatedTensor.host(view(x), view(out), norm, view(y), sums) for x, out, norm, y, sums in several
            ]
            given = dict(itertools.zip_longest(("tensor0", "tensor1", "tensor2"), operands))
            tables = RotaryTables.host(cos, sin, *table_strides(cos, sin, *of_table), *of_table)
            ids_strides = None if ids is None else (ids.stride(0) if ids.shape[0] > 1 else 0, *ids.stride()[1:])
            angles = kernel.Angles.host(tables, ids, ids_strides, ends, None, None, is_full, options.inverse)
            launch(device.current_stream(cos.device), given, angles=angles)
        return tuple(partials)

    return run


def _launch(options, tensors: RotationTensors, normed: Sequence, wanted: tuple, config: tuple) -> tuple:
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    flat = (*xs, *outs, cos, sin, position_ids, cu_seqlens, *[w.contiguous() for w in weights], *normed)
    with device.guard(cos.device):
        return call_of(_prepare, (options, len(xs), len(weights), wanted), flat, *config)(flat)


def launch_rotation(options: RotationOptions, tensors: RotationTensors, *config: RotationConfig) -> None:
    """Fill ``outs`` with the rotated ``xs``, in one launch.

    If there are ``weights``, the first xs are normed before. ``config`` is a ``RotationConfig`` to run instead of the
    table's.
    """
    _launch(options, tensors, (), (), config)


def launch_norm_gradient(
    options: RotationOptions,
    tensors: RotationTensors,
    normed: Sequence[torch.Tensor],
    wanted: tuple[bool, ...],
    *config: RotationConfig,
) -> list[torch.Tensor | None]:
    """Launch the gradient of norm and rotation, and a sum for each weight.

    Args:
        options: those of the forward call with the opposite ``inverse``.
        tensors: xs are gradients of the forward call's outs, and outs receive those of its xs; an out that is None is
            not wanted.
        normed: the forward call's inputs of the norms, one for each of ``weights``.
        wanted: whether the gradient of each weight is wanted.

    Returns:
        the weights' gradients (D,) in their own dtypes, None where they are not wanted. Each program sums the rows of
        its tile in float32, and the sums are added in one order: bitwise equal from run to run.
    """
    partials = _launch(options, tensors, normed, wanted, config)
    return [None if part is None else part.sum(0).to(weight.dtype) for part, weight in zip(partials, tensors.weights)]
