# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launchers of the rotation alone, of norm and rotation in one pass, and of its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.rotation import RotaryTables
from fused_rope_attn.kernels.tiles import TensorView
from fused_rope_attn.rotation.configs import RotationConfig, rotation
from fused_rope_attn.rotation.kernel import rotation_kernel
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.rotation.tile import Angles, RotatedTensor, TileShape
from fused_rope_attn.rotation.validation import LAYOUTS
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import call_of
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import table_strides

# Columns that pass through, as a multiple of those that rotate, up to which a tile's size does not count them.
_MOST_TAIL = 4


def tile_shape(config: RotationConfig, row_bytes: int, heads: int, heads_inner: bool) -> tuple[int, int]:
    """Return (tokens, heads) of a tile with rows of ``row_bytes``. Heads are a constant of a model, lengths are not."""
    total = max(1, config.tile_bytes // row_bytes)
    inner = max(1, min(total, config.run_bytes // row_bytes))
    block_heads = min(triton.next_power_of_2(heads), inner if heads_inner else total // inner)
    return total // block_heads, block_heads


def _canonical(sizes, axes, absent) -> tuple[int, ...]:
    return tuple(absent if axis is None else sizes[axis] for axis in axes)


def _angles(options: RotationOptions, tensors: RotationTensors) -> Any:
    """Return the ``Angles`` of a call, without their numbers."""
    cos, sin, ids = tensors.cos, tensors.sin, tensors.position_ids
    width, id_strides = options.rotary_dim, None
    if ids is not None:
        width //= ids.shape[1]
        id_strides = (ids.stride(0) if ids.shape[0] > 1 else 0, *ids.stride()[1:])
    strides = table_strides(cos, sin, width, options.interleaved)
    tables = RotaryTables.host(cos, sin, *strides, width, options.interleaved)
    is_full = cos.shape[-1] == width
    return Angles.host(tables, ids, id_strides, tensors.cu_seqlens, None, None, is_full, options.inverse)


def _prepare(key, flat: tuple, *config: RotationConfig):
    """Prepare the launch of one signature, which returns the partial sums of the weights' gradients that are wanted.

    key: the device, the options, the number of xs and of weights, and for each weight whether its gradient is wanted.
    """
    where, options, count, norms, wanted = key
    axes = LAYOUTS[options.layout]

    def unpack(flat: tuple) -> tuple[RotationTensors, tuple]:
        xs, outs = flat[:count], flat[count : 2 * count]
        cos, sin, position_ids, cu_seqlens, *rest = flat[2 * count :]
        return RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens, rest[:norms]), tuple(rest[norms:])

    def strides(x: torch.Tensor) -> tuple[int, ...]:
        return _canonical(x.stride(), axes, 0)

    def view(x: torch.Tensor | None) -> Any:
        return None if x is None else TensorView.host(x, strides(x))

    tensors, normed = unpack(flat)
    (xs, outs, cos, _, position_ids, cu_seqlens, _), x = tensors, tensors.xs[0]
    most_bytes = max(x.numel() * x.element_size() for x in xs)
    chosen = config[0] if config else rotation(device.arch(where), most_bytes, norms > 0)
    heads = [_canonical(x.shape, axes, 1)[1] for x in xs]
    batch, _, length, head_dim = _canonical(x.shape, axes, 1)
    sections = 1 if position_ids is None else position_ids.shape[1]
    block_pairs = triton.next_power_of_2(options.rotary_dim // sections // 2)
    tail = head_dim - options.rotary_dim
    block_tail = triton.next_power_of_2(tail) if tail else 1
    # A tile also holds what passes through, which is much where few columns of many rotate.
    columns = max(triton.next_power_of_2(2 * block_pairs * sections), block_tail // _MOST_TAIL)
    if norms:  # or is normed
        columns = triton.next_power_of_2(head_dim)
    # One token (a step of decoding) is all heads, in any order.
    heads_inner = strides(x)[1] < strides(x)[2] or length == 1
    rows, block_heads = tile_shape(chosen, columns * x.element_size(), min(heads), heads_inner)
    # True where an offset between two elements of one tile can pass 2**31.
    is_wide = any(
        rows * row + block_heads * head + head_dim * column >= 2**31
        for _, head, row, column in (strides(x) for x in (*xs, *outs, *normed) if x is not None)
    )
    shape = TileShape.host(
        BLOCK_TOKENS=rows,
        BLOCK_HEADS=block_heads,
        HEADS_INNER=heads_inner,
        USE_INT64_OFFSETS=is_wide,
        D=head_dim,
        SECTIONS=sections,
        BLOCK_PAIRS=block_pairs,
        BLOCK_TAIL=block_tail,
        # A norm changes the tail too, which a call in place without norms leaves as it is.
        COPY_TAIL=tail > 0 and not (options.in_place and not norms),
    )
    tiles = [triton.cdiv(length, rows) * batch * triton.cdiv(h, block_heads) for h in heads]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    numbers = {
        **dict(itertools.zip_longest(("H0", "H1", "H2"), heads)),
        "N": length,
        "num_positions": cos.shape[-2],
        "num_sequences": sequences,
        "search_steps": None if sequences is None else sequences.bit_length(),
        "shape": shape,
    }
    launch = Launch(rotation_kernel, sum(tiles), {"num_warps": chosen.num_warps}, numbers)
    # A program writes one partial sum of its weight's gradient.
    shapes = [(tiles_of_x, head_dim) if is_wanted else None for tiles_of_x, is_wanted in zip(tiles, wanted)]

    def run(flat: tuple) -> tuple[torch.Tensor | None, ...]:
        tensors, normed = unpack(flat)
        where = tensors.cos.device
        partials = [
            None if shape is None else torch.empty(shape, dtype=torch.float32, device=where) for shape in shapes
        ]
        of_norm = float(options.norm_eps or 0.0), float(options.norm_offset or 0.0), head_dim
        weights = [Norm.host(weight, *of_norm) for weight in tensors.weights]
        several = itertools.zip_longest(tensors.xs, tensors.outs, weights, normed, partials)
        operands = [RotatedTensor.host(view(x), view(out), norm, view(y), sums) for x, out, norm, y, sums in several]
        given = dict(itertools.zip_longest(("tensor0", "tensor1", "tensor2"), operands))
        launch(device.current_stream(where), given, angles=_angles(options, tensors))
        return tuple(partials)

    return run


def _launch(options, tensors: RotationTensors, normed: Sequence, wanted: tuple, config: tuple) -> tuple:
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    flat = (*xs, *outs, cos, sin, position_ids, cu_seqlens, *weights, *normed)
    return call_of(_prepare, (cos.device, options, len(xs), len(weights), wanted), flat, *config)(flat)


def launch_rotation(options: RotationOptions, tensors: RotationTensors, *config: RotationConfig) -> None:
    """Fill ``outs`` with the rotated ``xs``, in one launch on the current device; none of them is empty.

    If there are ``weights``, contiguous, the first xs are normed before. ``config`` is a ``RotationConfig`` to run
    instead of the table's.
    """
    _launch(options, tensors, (), (), config)


def launch_norm_gradient(
    options: RotationOptions,
    tensors: RotationTensors,
    normed: Sequence[torch.Tensor],
    wanted: tuple[bool, ...],
    *config: RotationConfig,
) -> list[torch.Tensor | None]:
    """Launch the gradient of norm and rotation, and a sum for each weight; no tensor is empty.

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
