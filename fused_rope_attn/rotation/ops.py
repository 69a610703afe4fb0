"""The torch.library operators of the rotation alone, with norms and without, and their autograd.

The gradient of a rotation is the transposed rotation of the gradient: the operator is its own backward, so that nothing
but tables and positions is saved, and double backward is exact. With norms the gradient needs what was normed too, has
an operator of its own, and cannot be differentiated again.
"""

from __future__ import annotations

import itertools

import torch

from fused_rope_attn.rotation import launch, problem
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator, last_gradients
from fused_rope_attn.runtime.registration import Operator, is_plain


def _rotate_new(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    # The memory order of the input, as any pointwise operation of PyTorch gives it.
    outs = [torch.empty_like(x) for x in tensors.xs]
    launch.launch_rotation(options, tensors._replace(outs=outs))
    return outs


def _rotate_into(options: RotationOptions, tensors: RotationTensors) -> None:
    pairs = zip(tensors.xs, tensors.outs)
    in_place = all((x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()) for x, out in pairs)
    launch.launch_rotation(options._replace(in_place=in_place), tensors)


class _Rotation(SingleLevelFunction):
    """Saves tables, positions, and the inputs and weights of ``norms`` norms.

    given: cos, sin, two of positions, weights, xs. outs: the results. plain: the call skips the dispatcher.
    """

    @staticmethod
    def forward(ctx, plain: bool, options: RotationOptions, outs: list[torch.Tensor], norms: int, *given):
        ctx.save_for_backward(*given[: 4 + 2 * norms])
        ctx.plain, ctx.norms, ctx.options = plain, norms, options._replace(inverse=not options.inverse)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *dos):
        norms, needed = ctx.norms, ctx.needs_input_grad[8:]
        cos, sin, position_ids, cu_seqlens, *rest = ctx.saved_tensors
        # For each output: whether the gradients of its input and of its weight are wanted.
        asked = [(needed[norms + i], i < norms and needed[i]) for i in range(len(dos))]
        of = [i for i, do in enumerate(dos) if do is not None and any(asked[i])]
        gradients: list[torch.Tensor | None] = [None] * (norms + len(dos))
        if of:
            some = [i for i in of if i < norms]
            given, weights, normed = [dos[i] for i in of], [rest[i] for i in some], [rest[norms + i] for i in some]
            tensors = RotationTensors(given, None, cos, sin, position_ids, cu_seqlens, weights)
            wanted = [asked[i][0] for i in of] + [asked[i][1] for i in some]
            # With create_graph the operator's own autograd must see the call: without norms it is differentiable again.
            plain = ctx.plain and is_plain(*given) and not torch.is_grad_enabled()
            if plain:
                found = _unrotate(ctx.options, tensors, normed, wanted) if norms else _rotate_new(ctx.options, tensors)
            elif norms:
                found = _rope_norm_backward(given, normed, wanted, *problem.to_arguments(ctx.options, tensors))
            else:
                found = _rope(given, *problem.to_arguments(ctx.options, tensors))
            places = [norms + i for i in of] + some
            for place, gradient in zip(itertools.compress(places, wanted), found):
                gradients[place] = gradient
        return *(None,) * 8, *gradients


def _empty_gradients(tensors: RotationTensors, normed, wanted) -> list[torch.Tensor | None]:
    """Allocate gradients in the order of ``wanted``, in the memory order of the norms' inputs or their gradients."""
    like = [*normed, *tensors.xs[len(normed) :]]
    dxs = [torch.empty_like(x) if is_wanted else None for x, is_wanted in zip(like, wanted)]
    dweights = [
        weight.new_empty(weight.shape) if is_wanted else None
        for weight, is_wanted in zip(tensors.weights, wanted[len(like) :])
    ]
    return dxs + dweights


def _unrotate(options: RotationOptions, tensors: RotationTensors, normed, wanted) -> list[torch.Tensor | None]:
    """Return the gradients that are wanted, of inputs and then of weights; xs are those of the results."""
    count = len(tensors.xs)
    dxs = _empty_gradients(tensors, normed, wanted)[:count]
    dweights = launch.launch_norm_gradient(options, tensors._replace(outs=dxs), normed, tuple(wanted[count:]))
    return [gradient for gradient, is_wanted in zip((*dxs, *dweights), wanted) if is_wanted]


def _rope_norm_backward_autograd(keyset, dos, normed, wanted, *arguments):
    tensors = [*dos, *normed, *problem.from_arguments(dos, None, *arguments)[1].weights]
    gradients = _rope_norm_backward.below_autograd(keyset, dos, normed, wanted, *arguments)
    return list(last_gradients(problem.WITH_NORMS, gradients, tensors))


def _rope_norm_backward_fake(dos, normed, wanted, *arguments):
    found = _empty_gradients(problem.from_arguments(dos, None, *arguments)[1], normed, wanted)
    return [gradient for gradient in found if gradient is not None]


def _apply(keyset, options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    xs, weights = tensors.xs, tensors.weights
    if keyset is None:
        outs = _rotate_new(options, tensors)
    else:
        outs = _rope.below_autograd(keyset, xs, *problem.to_arguments(options, tensors))
    return list(apply_in_operator(_Rotation, keyset is None, options, outs, len(weights), *tensors[2:6], *weights, *xs))


def _needs_gradient(tensors: RotationTensors) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors.xs, *tensors.weights))


def _rope_autograd(keyset, xs, *arguments):
    options, tensors = problem.from_arguments(xs, None, *arguments)
    if _needs_gradient(tensors):
        return _apply(keyset, options, tensors)
    return _rope.below_autograd(keyset, xs, *arguments)


_rope = Operator(
    f"rope(Tensor[] xs, {problem.SCHEMA}) -> Tensor[]",
    run=lambda xs, *arguments: _rotate_new(*problem.from_arguments(xs, None, *arguments)),
    fake=lambda xs, *arguments: [torch.empty_like(x) for x in xs],
    function="apply_rope",
    autograd=_rope_autograd,
)
# xs: gradients of the results; normed: inputs of the norms, one for each weight; wanted: one for each x and weight.
_rope_norm_backward = Operator(
    f"rope_norm_backward(Tensor[] xs, Tensor[] normed, bool[] wanted, {problem.SCHEMA}) -> Tensor[]",
    run=lambda xs, normed, wanted, *arguments: _unrotate(*problem.from_arguments(xs, None, *arguments), normed, wanted),
    fake=_rope_norm_backward_fake,
    function=problem.WITH_NORMS,
    autograd=_rope_norm_backward_autograd,
)
_rope_out = Operator(
    f"rope_out(Tensor[] xs, Tensor(a!)[] outs, {problem.SCHEMA}) -> ()",
    run=lambda xs, outs, *arguments: _rotate_into(*problem.from_arguments(xs, outs, *arguments)),
    fake=lambda *arguments: None,
    function="apply_rope",
)


def rotate_by_kernel(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Rotated copies of ``xs``, or ``outs`` filled with them. Ordinary eager calls skip the dispatcher."""
    xs, outs, *tables, weights = tensors
    plain = is_plain(*xs, *(outs or ()), *tables, *weights)
    if outs is not None:
        if plain:
            _rotate_into(options, tensors)
        else:
            _rope_out(xs, outs, *problem.to_arguments(options, tensors))
        return outs
    if not plain:
        return _rope(xs, *problem.to_arguments(options, tensors))
    return _apply(None, options, tensors) if _needs_gradient(tensors) else _rotate_new(options, tensors)
