"""The torch.library operators of the rotation alone, and their autograd.

The gradient of a rotation is the transposed rotation of the gradient: the operator is its own backward, so that nothing
but tables and positions is saved, and double backward is exact.
"""

from __future__ import annotations

import torch

from fused_rope_attn.rotation import launch
from fused_rope_attn.rotation.problem import SCHEMA, RotationOptions, RotationTensors, flatten, rebuild
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.registration import Operator, is_plain


def _launch(options: RotationOptions, tensors: RotationTensors) -> None:
    xs = tensors.xs
    if 0 in [x.numel() for x in xs]:
        kept = [pair for pair in zip(xs, tensors.outs) if pair[0].numel()]
        if not kept:
            return
        xs = [x for x, _ in kept]
        tensors = tensors._replace(xs=xs, outs=[out for _, out in kept])
    where = xs[0].device
    with device.guard(where):
        launch.rotate(options, tensors, device.current_stream(where))


def _rotate_new(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    xs, _, cos, sin, position_ids, cu_seqlens = tensors
    # The memory order of the input, as any pointwise operation of PyTorch gives it.
    outs = [torch.empty_like(x) for x in xs]
    _launch(options, RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens))
    return outs


def _rotate_into(options: RotationOptions, tensors: RotationTensors) -> None:
    pairs = zip(tensors.xs, tensors.outs)
    in_place = all((x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()) for x, out in pairs)
    _launch(options._replace(in_place=in_place), tensors)


class _Rotation(torch.autograd.Function):
    """Saves tables and positions; the backward is the same call with ``inverse`` flipped.

    ``keyset`` is the dispatcher's, or None for a call that skips it.
    """

    @staticmethod
    def forward(ctx, keyset, options: RotationOptions, cos, sin, position_ids, cu_seqlens, *xs):
        tensors = RotationTensors(xs, None, cos, sin, position_ids, cu_seqlens)
        if keyset is None:
            outs = _rotate_new(options, tensors)
        else:
            outs = _rope.below_autograd(keyset, xs, *flatten(options, tensors))
        ctx.plain = keyset is None
        ctx.save_for_backward(cos, sin, position_ids, cu_seqlens)
        ctx.options = options._replace(inverse=not options.inverse)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *dos):
        needed = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(dos) :]
        wanted = [i for i, do in enumerate(dos) if do is not None and needed[i]]
        gradients: list[torch.Tensor | None] = [None] * len(dos)
        if wanted:
            given = [dos[i] for i in wanted]
            tensors = RotationTensors(given, None, *ctx.saved_tensors)
            # With create_graph the operator's own autograd must see the call: it is differentiable again.
            if ctx.plain and is_plain(*given) and not torch.is_grad_enabled():
                dxs = _rotate_new(ctx.options, tensors)
            else:
                dxs = _rope(given, *flatten(ctx.options, tensors))
            for i, dx in zip(wanted, dxs):
                gradients[i] = dx
        return *(None,) * (len(ctx.needs_input_grad) - len(dos)), *gradients


def _apply(keyset, options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    return list(_Rotation.apply(keyset, options, *tensors[2:], *tensors.xs))


def _needs_gradient(xs) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def _rope_autograd(keyset, xs, *arguments):
    if _needs_gradient(xs):
        return _apply(keyset, *rebuild(xs, None, *arguments))
    return _rope.below_autograd(keyset, xs, *arguments)


_rope = Operator(
    f"rope(Tensor[] xs, {SCHEMA}) -> Tensor[]",
    run=lambda xs, *arguments: _rotate_new(*rebuild(xs, None, *arguments)),
    fake=lambda xs, *arguments: [torch.empty_like(x) for x in xs],
    autograd=_rope_autograd,
)
_rope_out = Operator(
    f"rope_out(Tensor[] xs, Tensor(a!)[] outs, {SCHEMA}) -> ()",
    run=lambda xs, outs, *arguments: _rotate_into(*rebuild(xs, outs, *arguments)),
    fake=lambda *arguments: None,
)


def rotate(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Rotated copies of ``xs``, or ``outs`` filled with them. Ordinary eager calls skip the dispatcher."""
    xs, outs = tensors.xs, tensors.outs
    plain = is_plain(*xs, *(outs or ()), *tensors[2:])
    if outs is not None:
        if plain:
            _rotate_into(options, tensors)
        else:
            _rope_out(xs, outs, *flatten(options, tensors))
        return outs
    if not plain:
        return _rope(xs, *flatten(options, tensors))
    return _apply(None, options, tensors) if _needs_gradient(xs) else _rotate_new(options, tensors)
