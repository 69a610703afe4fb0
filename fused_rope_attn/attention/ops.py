"""The torch.library operators of attention and their autograd: what is saved and what is passed on, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.problem import (
    READ_BY_THE_DEVICE,
    SCHEMA,
    Gradients,
    Outputs,
    Problem,
    Rooms,
    Saving,
    Tensors,
    flatten,
    rebuild,
)
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import apply_in_operator
from fused_rope_attn.runtime.launch import PreparedCalls
from fused_rope_attn.runtime.layouts import like_input, with_aligned_rows
from fused_rope_attn.runtime.registration import Operator


@functools.cache
def _doors(portable: bool) -> tuple[PreparedCalls, PreparedCalls]:
    """(forward, backward) of the portable or of the sm_90 backend, imported when a call first needs it.

    Each gives the prepared call of (problem, tensors, configuration, how q and k are saved or come): forward takes a
    ``Saving``, backward whether they are rotated.
    """
    if portable:
        from fused_rope_attn.attention.portable.backward import prepared as portable_backward
        from fused_rope_attn.attention.portable.forward import prepared as portable_forward

        return portable_forward, portable_backward
    from fused_rope_attn.attention.hopper.backward import prepared as hopper_backward
    from fused_rope_attn.attention.hopper.forward import prepared as hopper_forward

    return hopper_forward, hopper_backward


def _prepare_forward(problem: Problem, tensors: tuple, saves_rotated: bool) -> Callable:
    given = Tensors(*tensors)
    aligned = _with_aligned_rows(given)
    if aligned is not given:
        run = _prepare_forward(problem, aligned, saves_rotated)
        return lambda tensors: run(_with_aligned_rows(tensors))
    plan = planning.plan_for(problem)
    saving = Saving.NOTHING
    if saves_rotated and plan.saves_rotated:
        reads_tiles = isinstance(plan.backward, configs.HopperBackwardConfig) and problem.is_packed
        saving = Saving.TILES if reads_tiles else Saving.ROWS
    portable = isinstance(plan.forward, configs.ForwardConfig)
    return _doors(portable)[0](problem.for_launch(), tensors, plan.forward, saving)


def _with_aligned_rows(tensors: Tensors) -> Tensors:
    """Return the same record, or one with copies of those of q, k and v that kernels cannot read as they are."""
    copies = {name: with_aligned_rows(x) for name, x in zip(("q", "k", "v"), tensors)}
    if all(copies[name] is x for name, x in zip(copies, tensors)):
        return tensors
    return tensors._replace(**copies)


def _prepare_backward(problem: Problem, tensors: tuple, is_rotated: bool) -> Callable:
    do, o, given = *tensors[:2], Tensors(*tensors[2:])
    aligned = with_aligned_rows(do), with_aligned_rows(o), _with_aligned_rows(given)
    if not (aligned[0] is do and aligned[1] is o and aligned[2] is given):
        run = _prepare_backward(problem, (*aligned[:2], *aligned[2]), is_rotated)
        return lambda tensors, do, o, lse: run(
            _with_aligned_rows(tensors), with_aligned_rows(do), with_aligned_rows(o), lse
        )
    config = planning.plan_for(problem).backward
    portable = isinstance(config, configs.BackwardConfig)
    return _doors(portable)[1](problem.for_launch(), tensors, config, is_rotated)


_forward_calls = PreparedCalls(_prepare_forward)
_backward_calls = PreparedCalls(_prepare_backward)


def _with_unit_strides(tensors: Tensors) -> Tensors:
    """Kernels index what only the device reads with unit stride; it nearly always has it."""
    read = ((name, getattr(tensors, name)) for name in READ_BY_THE_DEVICE)
    strided = {name: x.contiguous() for name, x in read if x is not None and not x.is_contiguous()}
    return tensors._replace(**strided) if strided else tensors


def run_forward(problem: Problem, tensors: Tensors, saves_rotated: bool = False) -> Outputs:
    """saves_rotated: with q_rot and k_rot in place of None, if the kernels are those that can."""
    if problem.has_masks or problem.has_norms:
        tensors = _with_unit_strides(tensors)
    with device.guard(problem.device):
        return _forward_calls(problem.with_precision(), tensors, saves_rotated)(tensors)


def run_backward(problem: Problem, tensors: Tensors, do, o, lse, is_rotated: bool = False) -> Gradients:
    """is_rotated: q and k in ``tensors`` are the forward pass's q_rot and k_rot, and raw_q and raw_k those before."""
    if problem.has_masks or problem.has_norms:
        tensors = _with_unit_strides(tensors)
    with device.guard(problem.device):
        return _backward_calls(problem.with_precision(), (do, o, *tensors), is_rotated)(tensors, do, o, lse)


def forward_by(plan: planning.Plan, problem: Problem, tensors: Tensors, room: torch.Tensor | None = None) -> Outputs:
    """A forward pass without autograd by the kernels of a plan, for what makes one call of several.

    room: where o is to be written, None for memory of its own.
    """
    door = _doors(isinstance(plan.forward, configs.ForwardConfig))[0]
    tensors = _with_aligned_rows(_with_unit_strides(tensors))
    with device.guard(problem.device):
        return door(problem.for_launch(), (*tensors, room), plan.forward, Saving.NOTHING)(tensors, room)


def backward_by(plan: planning.Plan, problem: Problem, tensors: Tensors, do, o, lse, rooms: Rooms) -> Gradients:
    """The backward pass of ``forward_by``. rooms: where dq, dk and dv are to be written."""
    door = _doors(isinstance(plan.backward, configs.BackwardConfig))[1]
    tensors, do, o = _with_aligned_rows(_with_unit_strides(tensors)), with_aligned_rows(do), with_aligned_rows(o)
    with device.guard(problem.device):
        prepared = door(problem.for_launch(), (do, o, *tensors, *rooms), plan.backward, False)
        return prepared(tensors, do, o, lse, rooms)


def _forward_impl(*arguments):
    o, lse, _, _ = run_forward(*rebuild(*arguments))
    return o, lse


def _backward_impl(do, o, lse, *arguments):
    return _without_none(run_backward(*rebuild(*arguments), do, o, lse), do)


def _rotated_backward_impl(do, o, lse, *arguments):
    problem, tensors = rebuild(*arguments)
    # Packed queries lie padded in q_rot.
    problem = problem._replace(len_q=o.shape[2])
    return _without_none(run_backward(problem, tensors, do, o, lse, is_rotated=True), do)


def _without_none(gradients: Gradients, do: torch.Tensor) -> Gradients:
    """An operator returns tensors only: empty ones where there are no sinks or norms."""
    return Gradients(*(do.new_empty(0) if gradient is None else gradient for gradient in gradients))


def _forward_fake(q, *arguments):
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(do, o, lse, *arguments):
    _, tensors = rebuild(*arguments)
    return like_input(tensors.q), like_input(tensors.k), like_input(tensors.v), *_fake_rest(do, tensors)


def _rotated_backward_fake(do, o, lse, *arguments):
    _, tensors = rebuild(*arguments)
    return like_input(o), like_input(tensors.v), like_input(tensors.v), *_fake_rest(do, tensors)


def _fake_rest(do, tensors: Tensors) -> list[torch.Tensor]:
    """What ``_without_none`` makes of the gradients of sinks and of the norms' weights."""
    given = (tensors.sinks, tensors.q_norm, tensors.k_norm)
    return [do.new_empty(0) if x is None else torch.empty_like(x) for x in given]


class _Attention(torch.autograd.Function):
    """The gradient of calls through the dispatcher, which save q and k as they came: which kernels will run, and
    whether they could take them rotated, is not known to who traces a call.

    ``keyset`` is the dispatcher's.
    """

    @staticmethod
    def forward(ctx, keyset, problem: Problem, *arguments):
        tensors = Tensors(*arguments)
        o, lse = forward_operator.below_function(keyset, *flatten(problem, tensors))
        ctx.problem = problem
        ctx.save_for_backward(o, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        gradients = Gradients(None, None, None)
        needs = Tensors(*ctx.needs_input_grad[2:])
        if do is not None:
            o, lse, *saved = ctx.saved_tensors
            gradients = Gradients(*_backward(do, o, lse, *flatten(ctx.problem, Tensors(*saved))))
        dq, dk, dv, dsinks, dq_norm, dk_norm = gradients
        of = Tensors(dq, dk, dv, None, None, sinks=dsinks, q_norm=dq_norm, k_norm=dk_norm)
        return None, None, *(gradient if needed else None for gradient, needed in zip(of, needs))


def needs_gradient(tensors: Tensors) -> bool:
    """Whether a call of these tensors must be differentiable."""
    if not torch.is_grad_enabled():
        return False
    if tensors.q.requires_grad or tensors.k.requires_grad or tensors.v.requires_grad:
        return True
    weights = (tensors.sinks, tensors.q_norm, tensors.k_norm)
    return any(weight is not None and weight.requires_grad for weight in weights)


def _forward_autograd(keyset, *arguments):
    problem, tensors = rebuild(*arguments)
    if needs_gradient(tensors):
        return apply_in_operator(_Attention, keyset, problem, *tensors)
    return forward_operator.below_autograd(keyset, *arguments)


# Which kernels backend="auto" means is decided inside the operators.
forward_operator = Operator(
    f"attention_forward({SCHEMA}) -> (Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    function="rope_attention",
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The last results are the gradients of sinks and of the norms' weights, empty where there are none.
_backward = Operator(
    f"attention_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=_backward_fake,
    function="rope_attention",
    is_gradient=True,
)
# q and k are those that an eager forward pass has saved rotated, whose backward pass has to go through the dispatcher.
# A second differentiation reaches it from o, which forward returned, because q and k were not saved as they came.
_rotated_backward = Operator(
    f"attention_rotated_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_rotated_backward_impl,
    fake=_rotated_backward_fake,
    function="rope_attention",
    is_gradient=True,
)


def backward_operator(is_rotated: bool) -> Operator:
    """The operator of the backward pass of q and k as they came, or of those that an eager forward pass rotated."""
    return _rotated_backward if is_rotated else _backward
