# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launcher of norm and rotation in one pass, and of its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused_rope_attn.rotation.configs import RotationConfig
from fused_rope_attn.rotation.launch import config_for, describe
from fused_rope_attn.rotation.norm_kernel import norm_rotation_kernel
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import Calls
from fused_rope_attn.runtime.launch import Launch


class NormRotationCall:
    """The launch of one signature: forward, or with ``normed``, the inputs of the norms, backward.

    wanted: whether the gradient of each weight is wanted.
    """

    def __init__(
        self,
        options: RotationOptions,
        tensors: RotationTensors,
        normed: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        config: RotationConfig,
    ):
        tiles, arguments, launch_options = describe(options, tensors, config, normed)
        self.launch = Launch(norm_rotation_kernel, sum(tiles), launch_options, arguments)
        # A program writes one partial sum of its weight's gradient.
        head_dim = arguments["D"]
        self.partials = [(count, head_dim) if is_wanted else None for count, is_wanted in zip(tiles, wanted)]

    def __call__(self, call: RotationTensors, normed: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Launch the call, and return the partial sums of the weights' gradients that are wanted."""
        xs, outs, cos, sin, position_ids, cu_seqlens, weights = call
        partials = [
            None if shape is None else torch.empty(shape, dtype=torch.float32, device=cos.device)
            for shape in self.partials
        ]
        # A tensor that there is not is none of the launch's, and its pointer must still be one.
        x0, x1, x2 = (*xs, xs[0], xs[0])[:3]
        out0, out1, out2 = (*outs, xs[0], xs[0])[:3]
        (weight0, weight1), (normed0, normed1), (partial0, partial1) = (
            (*some, None, None)[:2] for some in (weights, normed, partials)
        )
        self.launch(
            device.current_stream(cos.device), x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, out0_ptr=out0, out1_ptr=out1,
            out2_ptr=out2, weight0_ptr=weight0, weight1_ptr=weight1, normed0_ptr=normed0, normed1_ptr=normed1,
            partial0_ptr=partial0, partial1_ptr=partial1, cos_ptr=cos, sin_ptr=sin,
            positions_ptr=cos if position_ids is None else position_ids,
            cu_seqlens_ptr=cos if cu_seqlens is None else cu_seqlens,
        )  # fmt: skip
        return tuple(partials)


def _prepare(key, flat: tuple, *config: RotationConfig):
    where, options, count, norms, wanted = key

    def unpack(flat: tuple) -> tuple[RotationTensors, tuple]:
        xs, outs = flat[:count], flat[count : 2 * count]
        cos, sin, position_ids, cu_seqlens, *rest = flat[2 * count :]
        return RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens, rest[:norms]), tuple(rest[norms:])

    tensors, normed = unpack(flat)
    call = NormRotationCall(options, tensors, normed, wanted, *config or (config_for(where, tensors.xs, True),))
    return lambda flat: call(*unpack(flat))


_calls = Calls(_prepare)


def _launch(options, tensors: RotationTensors, normed: Sequence, wanted: tuple, config: tuple) -> tuple:
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    flat = (*xs, *outs, cos, sin, position_ids, cu_seqlens, *weights, *normed)
    return _calls((cos.device, options, len(xs), len(weights), wanted), flat, *config)(flat)


def norm_rotate(options: RotationOptions, tensors: RotationTensors, *config: RotationConfig) -> None:
    """Fill ``outs`` with the normed and rotated ``xs``, in one launch on the current device; none of them is empty.

    ``weights`` are those of the first xs, contiguous; the others are rotated only. ``config`` is a ``RotationConfig``
    to run instead of the table's.
    """
    _launch(options, tensors, (), (), config)


def norm_unrotate(
    options: RotationOptions,
    tensors: RotationTensors,
    normed: Sequence[torch.Tensor],
    wanted: tuple[bool, ...],
    *config: RotationConfig,
) -> list[torch.Tensor | None]:
    """The gradient of ``norm_rotate``, in one launch and a sum for each weight; no tensor is empty.

    Args:
        options: those of the forward call with ``inverse`` turned round.
        tensors: xs are gradients of what was normed and rotated, and outs receive those of what was given; an out that
            is None is not wanted.
        normed: what the call normed, one for each of ``weights``.
        wanted: whether the gradient of each weight is.

    Returns:
        the weights' gradients (D,) in their own dtypes, None where they are not wanted. Each program sums the rows of
        its tile in float32, and the sums are added in one order: bitwise equal from run to run.
    """
    partials = _launch(options, tensors, normed, wanted, config)
    return [None if part is None else part.sum(0).to(weight.dtype) for part, weight in zip(partials, tensors.weights)]
