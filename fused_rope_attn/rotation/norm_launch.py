# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launcher of norm and rotation in one pass, and of its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused_rope_attn.rotation.configs import RotationConfig
from fused_rope_attn.rotation.launch import config_for, describe
from fused_rope_attn.rotation.norm_kernel import norm_rotation_kernel
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.runtime.launch import Launch, PreparedCalls


class NormRotationCall:
    """The launch of one signature: forward, or with ``normed``, the inputs of the norms, backward.

    ``tiles``: how many each tensor has, which is the number of its weight's partial sums.
    """

    def __init__(
        self, options: RotationOptions, tensors: RotationTensors, normed: Sequence[torch.Tensor], config: RotationConfig
    ):
        self.tiles, arguments, launch_options = describe(options, tensors, config, normed)
        self.launch = Launch(norm_rotation_kernel, sum(self.tiles), launch_options, arguments)

    def __call__(
        self,
        stream: int,
        call: RotationTensors,
        normed: Sequence[torch.Tensor] = (),
        partials: Sequence[torch.Tensor | None] = (),
    ) -> None:
        xs, outs, cos, sin, position_ids, cu_seqlens, weights = call
        # A tensor that there is not is none of the launch's, and its pointer must still be one.
        x0, x1, x2 = (*xs, xs[0], xs[0])[:3]
        out0, out1, out2 = (*outs, xs[0], xs[0])[:3]
        (weight0, weight1), (normed0, normed1), (partial0, partial1) = (
            (*some, None, None)[:2] for some in (weights, normed, partials)
        )
        self.launch(
            stream, x0_ptr=x0, x1_ptr=x1, x2_ptr=x2, out0_ptr=out0, out1_ptr=out1, out2_ptr=out2, weight0_ptr=weight0,
            weight1_ptr=weight1, normed0_ptr=normed0, normed1_ptr=normed1, partial0_ptr=partial0,
            partial1_ptr=partial1, cos_ptr=cos, sin_ptr=sin,
            positions_ptr=cos if position_ids is None else position_ids,
            cu_seqlens_ptr=cos if cu_seqlens is None else cu_seqlens,
        )  # fmt: skip


def _prepare(key, flat: tuple, *config: RotationConfig) -> NormRotationCall:
    where, options, count, norms, _ = key
    xs, outs = flat[:count], flat[count : 2 * count]
    cos, sin, position_ids, cu_seqlens, *rest = flat[2 * count :]
    tensors = RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens, rest[:norms])
    return NormRotationCall(options, tensors, rest[norms:], *config or (config_for(where, xs, True),))


_prepared = PreparedCalls(_prepare)


def _prepared_call(options, tensors: RotationTensors, normed, wanted, config) -> NormRotationCall:
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    flat = (*xs, *outs, cos, sin, position_ids, cu_seqlens, *weights, *normed)
    return _prepared((cos.device, options, len(xs), len(weights), wanted), flat, *config)


def norm_rotate(options: RotationOptions, tensors: RotationTensors, stream: int, *config: RotationConfig) -> None:
    """Fill ``outs`` with the normed and rotated ``xs``, in one launch on the current device; none of them is empty.

    ``weights`` are those of the first xs, contiguous; the others are rotated only. ``config`` is a ``RotationConfig``
    to run instead of the table's.
    """
    _prepared_call(options, tensors, (), (), config)(stream, tensors)


def norm_unrotate(
    options: RotationOptions,
    tensors: RotationTensors,
    normed: Sequence[torch.Tensor],
    wanted: tuple[bool, ...],
    stream: int,
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
    call = _prepared_call(options, tensors, normed, wanted, config)
    head_dim = tensors.xs[0].shape[-1]
    tiles = [count if is_wanted else 0 for count, is_wanted in zip(call.tiles, wanted)]
    workspace = torch.empty(sum(tiles), head_dim, dtype=torch.float32, device=tensors.cos.device)
    partials = [part if len(part) else None for part in workspace.split(tiles)]
    call(stream, tensors, normed, partials)
    return [None if part is None else part.sum(0).to(weight.dtype) for part, weight in zip(partials, tensors.weights)]
