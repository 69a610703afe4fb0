# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launchers of the rotation alone, of norm and rotation in one pass, and of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from fused_rope_attn.rotation.configs import RotationConfig, rotation
from fused_rope_attn.rotation.kernel import rotation_kernel
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.rotation.tile import IDS, INDEX, PACKED
from fused_rope_attn.rotation.validation import LAYOUTS
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import Calls
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


def kernel_call(
    options: RotationOptions, tensors: RotationTensors, config: RotationConfig, normed: Sequence[torch.Tensor] = ()
) -> tuple[list[int], dict[str, Any]]:
    """Return (how many tiles each tensor has, the kernel's arguments by name). A program works on one tile.

    An out that is None is not written. normed: the inputs of the norms in a backward call, of the first xs' shapes.
    """
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    rotary_dim, interleaved, conjugate, layout, in_place, eps, offset = options
    axes = LAYOUTS[layout]
    shapes = [_canonical(x.shape, axes, 1) for x in xs]
    batch, _, length, head_dim = shapes[0]
    heads = [shape[1] for shape in shapes]
    x_strides = [_canonical(x.stride(), axes, 0) for x in xs]
    out_strides = [_canonical((x if out is None else out).stride(), axes, 0) for x, out in zip(xs, outs)]
    normed_strides = [_canonical(x.stride(), axes, 0) for x in normed]
    sections = 1 if position_ids is None else position_ids.shape[1]
    width = rotary_dim // sections
    block_p = triton.next_power_of_2(width // 2)
    cos_strides, sin_strides = table_strides(cos, sin, width, interleaved)
    position_strides = (0, 0, 0)
    if position_ids is not None:
        position_strides = position_ids.stride()
        position_strides = (position_strides[0] if position_ids.shape[0] > 1 else 0, *position_strides[1:])
    num_sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1

    # One token (a step of decoding) is all heads, in any order.
    heads_inner = x_strides[0][1] < x_strides[0][2] or length == 1
    # A tile also holds what passes through, which is much where few columns of many rotate.
    block_tail = triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 1
    columns = max(2 * block_p, block_tail // _MOST_TAIL)
    if weights:  # and with a norm all sections at once
        columns = triton.next_power_of_2(head_dim)
    rows, block_heads = tile_shape(config, columns * xs[0].element_size(), min(heads), heads_inner)
    chunks = [triton.cdiv(h, block_heads) for h in heads]
    row_blocks = triton.cdiv(length, rows) * batch
    missing = 3 - len(xs)
    # Absent tensors have the strides of the first one.
    strides = {
        f"{name}{i}_strides": given[i] if i < len(given) else x_strides[0]
        for name, given, most in (("x", x_strides, 3), ("out", out_strides, 3), ("normed", normed_strides, 2))
        for i in range(most)
    }
    arguments = dict(
        strides,
        cos_strides=cos_strides,
        sin_strides=sin_strides,
        position_strides=position_strides,
        eps=0.0 if eps is None else float(eps),
        offset=0.0 if offset is None else float(offset),
        **{f"H{i}": h for i, h in enumerate([*heads, *[0] * missing])},
        N=length,
        S=cos.shape[-2],
        num_sequences=num_sequences,
        search_steps=num_sequences.bit_length(),
        NUM_TENSORS=len(xs),
        D=head_dim,
        R=width,
        SECTIONS=sections,
        BLOCK_TOKENS=rows,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_p,
        BLOCK_TAIL=block_tail,
        INTERLEAVED=interleaved,
        CONJUGATE=conjugate,
        FULL_WIDTH=cos.shape[-1] == width,
        POSITIONS=IDS if position_ids is not None else PACKED if cu_seqlens is not None else INDEX,
        HEADS_INNER=heads_inner,
        # A norm changes the tail too, which a call in place without norms leaves as it is.
        COPY_TAIL=head_dim > rotary_dim and not (in_place and not weights),
        USE_INT64_OFFSETS=_is_long(x_strides + out_strides + normed_strides, rows, block_heads, head_dim),
    )
    return [row_blocks * n for n in chunks], arguments


def _canonical(sizes, axes, absent) -> tuple[int, ...]:
    return tuple(absent if axis is None else sizes[axis] for axis in axes)


def _is_long(strides, rows: int, heads: int, head_dim: int) -> bool:
    """True when an offset between two elements of one tile can pass 2**31."""
    return any(rows * row + heads * head + head_dim * column >= 2**31 for _, head, row, column in strides)


def _prepare(key, flat: tuple, *config: RotationConfig):
    """Prepare the launch of one signature, which returns the partial sums of the weights' gradients that are wanted.

    key: the device, the options, the number of xs and of weights, and for each weight whether its gradient is wanted.
    """
    where, options, count, norms, wanted = key

    def unpack(flat: tuple) -> tuple[RotationTensors, tuple]:
        xs, outs = flat[:count], flat[count : 2 * count]
        cos, sin, position_ids, cu_seqlens, *rest = flat[2 * count :]
        return RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens, rest[:norms]), tuple(rest[norms:])

    tensors, normed = unpack(flat)
    most_bytes = max(x.numel() * x.element_size() for x in tensors.xs)
    chosen = config[0] if config else rotation(device.arch(where), most_bytes, norms > 0)
    tiles, arguments = kernel_call(options, tensors, chosen, normed)
    launch = Launch(rotation_kernel, sum(tiles), {"num_warps": chosen.num_warps}, arguments)
    # A program writes one partial sum of its weight's gradient.
    shapes = [(tiles_of_x, arguments["D"]) if is_wanted else None for tiles_of_x, is_wanted in zip(tiles, wanted)]

    def run(flat: tuple) -> tuple[torch.Tensor | None, ...]:
        (xs, outs, cos, sin, position_ids, cu_seqlens, weights), normed = unpack(flat)
        partials = [
            None if shape is None else torch.empty(shape, dtype=torch.float32, device=cos.device) for shape in shapes
        ]
        given = {"cos_ptr": cos, "sin_ptr": sin, "positions_ptr": position_ids, "cu_seqlens_ptr": cu_seqlens}
        several = {"x": xs, "out": outs, "weight": weights, "normed": normed, "partial": partials}
        given |= {f"{name}{i}_ptr": x for name, some in several.items() for i, x in enumerate((*some, *[None] * 3)[:3])}
        launch(device.current_stream(cos.device), given)
        return tuple(partials)

    return run


_calls = Calls(_prepare)


def _launch(options, tensors: RotationTensors, normed: Sequence, wanted: tuple, config: tuple) -> tuple:
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    flat = (*xs, *outs, cos, sin, position_ids, cu_seqlens, *weights, *normed)
    return _calls((cos.device, options, len(xs), len(weights), wanted), flat, *config)(flat)


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
