"""The torch.library operators of attention and their autograd: what is saved and what is passed on, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fused_rope_attn.attention import configs, planning, saving
from fused_rope_attn.attention.arguments import rotated_shape
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
from fused_rope_attn.runtime.launch import PreparedCalls
from fused_rope_attn.runtime.layouts import has_descriptor, like_input
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


def _prepare_forward(problem: Problem, tensors: tuple, wanted: Saving | None) -> Callable:
    plan = planning.plan_for(problem, Tensors(*tensors).v)
    planned = saving.planned(problem, plan)
    if wanted is None:
        wanted = planned
    elif wanted not in (planned, Saving.NOTHING):
        return _prepare_as_traced(problem, tensors, wanted)
    portable = isinstance(plan.forward, configs.ForwardConfig)
    return _doors(portable)[0](problem.for_launch(), tensors, plan.forward, wanted)


def _prepare_as_traced(problem: Problem, tensors: tuple, wanted: Saving) -> Callable:
    """The forward pass of a graph that saves what the plan of this call does not.

    The graph was traced for another card, or for a v that the TMA can address.
    """
    given = Tensors(*tensors)
    if wanted is Saving.TILES and not has_descriptor(given.v):
        run = _prepare_forward(problem, given._replace(v=_copy_for_the_tma(given.v)), wanted)
        return lambda tensors: run(tensors._replace(v=_copy_for_the_tma(tensors.v)))
    # Kernels that can save rows whatever the length.
    saves_rows = problem._replace(backend="triton", strategy="prepass")
    if wanted is Saving.ROWS and problem != saves_rows:
        return _prepare_forward(saves_rows, tensors, wanted)
    raise RuntimeError(
        f"a graph was traced whose forward pass saves rotated q and k for backward as {wanted}, which the kernels for "
        f"tensors on {problem.device} do not: trace it again on this machine"
    )


def _in_tiles(problem: Problem, rotated: Tensors) -> bool:
    """Whether packed queries were saved as ``Saving.TILES``, which have more rows, or as ``Saving.ROWS``."""
    return rotated.q.shape[2] > problem.len_q


def _copy_for_the_tma(x: torch.Tensor) -> torch.Tensor:
    """A copy of x that the TMA can address, contiguous."""
    moved = x.contiguous()
    # What is contiguous already lies at an odd address.
    return moved if has_descriptor(moved) else moved.clone()


def _addressable(problem: Problem, tensors: Tensors) -> Tensors | None:
    """The tensors of a backward pass of rotated q and k, copied where hooks have moved what forward saved; None where
    nothing was moved.

    Rotated q and k are contiguous and aligned. v need not be, except where only the sm_90 kernels can go on: they were
    asked for, or packed queries are saved as they read them.
    """
    only_sm_90 = _in_tiles(problem, tensors) if problem.is_packed else problem.backend == "hopper"
    names = ("q", "k", "v") if only_sm_90 else ("q", "k")
    copied = {
        name: _copy_for_the_tma(x) for name, x in zip(names, tensors) if x.numel() and not has_descriptor(x)
    }  # fmt: skip
    return tensors._replace(**copied) if copied else None


def _prepare_backward(problem: Problem, tensors: tuple, is_rotated: bool) -> Callable:
    if is_rotated:
        copied = _addressable(problem, Tensors(*tensors[2:]))
        if copied is not None:
            run = _prepare_backward(problem, (*tensors[:2], *copied), is_rotated)
            return lambda tensors, *given: run(_addressable(problem, tensors), *given)
        if problem.is_packed and not _in_tiles(problem, Tensors(*tensors[2:])):
            # What the portable kernels read, also where hooks have moved v to where those of sm_90 could read it.
            problem = problem._replace(backend="triton")
    config = planning.plan_for(problem, Tensors(*tensors[2:]).v).backward
    portable = isinstance(config, configs.BackwardConfig)
    return _doors(portable)[1](problem.for_launch(), tensors, config, is_rotated)


# A plan depends on the problem and on v's layout in memory, so that it is remembered with the call that it leads to.
_forward_calls = PreparedCalls(_prepare_forward)
_backward_calls = PreparedCalls(_prepare_backward)


def _with_unit_strides(tensors: Tensors) -> Tensors:
    """Kernels index what only the device reads with unit stride; it nearly always has it."""
    read = ((name, getattr(tensors, name)) for name in READ_BY_THE_DEVICE)
    strided = {name: x.contiguous() for name, x in read if x is not None and not x.is_contiguous()}
    return tensors._replace(**strided) if strided else tensors


def run_forward(problem: Problem, tensors: Tensors, wanted: Saving | None = Saving.NOTHING) -> Outputs:
    """wanted: what q_rot and k_rot shall be, None for what ``saving.planned`` says."""
    if problem.has_masks or problem.has_norms:
        tensors = _with_unit_strides(tensors)
    with device.guard(problem.device):
        return _forward_calls(problem.with_precision(), tensors, wanted)(tensors)


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
    tensors = _with_unit_strides(tensors)
    with device.guard(problem.device):
        return door(problem.for_launch(), (*tensors, room), plan.forward, Saving.NOTHING)(tensors, room)


def backward_by(plan: planning.Plan, problem: Problem, tensors: Tensors, do, o, lse, rooms: Rooms) -> Gradients:
    """The backward pass of ``forward_by``. rooms: where dq, dk and dv are to be written."""
    door = _doors(isinstance(plan.backward, configs.BackwardConfig))[1]
    tensors = _with_unit_strides(tensors)
    with device.guard(problem.device):
        prepared = door(problem.for_launch(), (do, o, *tensors, *rooms), plan.backward, False)
        return prepared(tensors, do, o, lse, rooms)


def _forward_impl(*arguments, saving=Saving.NOTHING.value):
    o, lse, q_rot, k_rot = run_forward(*rebuild(*arguments), Saving(saving))
    if q_rot is None:
        q_rot, k_rot = o.new_empty(0), o.new_empty(0)
    return o, lse, q_rot, k_rot


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


def _forward_fake(*arguments, saving=Saving.NOTHING.value):
    problem, tensors = rebuild(*arguments)
    q, k, form = tensors.q, tensors.k, Saving(saving)
    shapes: tuple[tuple[int, ...], ...] = ((0,), (0,))
    if form is not Saving.NOTHING:
        shapes = rotated_shape(problem, in_tiles=form is Saving.TILES), tuple(k.shape)
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32), *map(q.new_empty, shapes)


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
    """The gradient of calls through the dispatcher.

    ``keyset`` is the dispatcher's; ``form`` says how q and k are saved: rotated, or as they came.
    """

    @staticmethod
    def forward(ctx, keyset, problem: Problem, form: Saving, *arguments):
        tensors = Tensors(*arguments)
        o, lse, q_rot, k_rot = forward_operator.below_autograd(keyset, *flatten(problem, tensors), saving=form.value)
        ctx.problem = problem
        ctx.is_rotated = form is not Saving.NOTHING
        ctx.save_for_backward(
            o, lse, *(tensors.rotated(q_rot, k_rot, problem.has_norms) if ctx.is_rotated else tensors)
        )
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        gradients = Gradients(None, None, None)
        needs = Tensors(*ctx.needs_input_grad[3:])
        if do is not None:
            o, lse, *saved = ctx.saved_tensors
            arguments = flatten(ctx.problem, Tensors(*saved))
            gradients = Gradients(*backward_operator(ctx.is_rotated)(do, o, lse, *arguments))
        dq, dk, dv, dsinks, dq_norm, dk_norm = gradients
        of = Tensors(dq, dk, dv, None, None, sinks=dsinks, q_norm=dq_norm, k_norm=dk_norm)
        return None, None, None, *(gradient if needed else None for gradient, needed in zip(of, needs))


def needs_gradient(tensors: Tensors) -> bool:
    """Whether a call of these tensors must be differentiable."""
    if not torch.is_grad_enabled():
        return False
    if tensors.q.requires_grad or tensors.k.requires_grad or tensors.v.requires_grad:
        return True
    weights = (tensors.sinks, tensors.q_norm, tensors.k_norm)
    return any(weight is not None and weight.requires_grad for weight in weights)


def _forward_autograd(keyset, *arguments, **options):
    problem, tensors = rebuild(*arguments)
    if needs_gradient(tensors):
        form = Saving(options.get("saving", Saving.NOTHING.value))
        if form is Saving.NOTHING:
            form = saving.traced(problem, tensors.v)
        o, lse = _Attention.apply(keyset, problem, form, *tensors)
        return o, lse, o.new_empty(0), o.new_empty(0)
    return forward_operator.below_autograd(keyset, *arguments, **options)


# Which kernels backend="auto" means is decided inside the operators, where v's address is known. The results are o,
# lse, q_rot and k_rot. ``saving`` is the value of a ``Saving``, which says what the last two are: empty for NOTHING.
# Where there is a gradient autograd chooses, unless told by another value, and keeps both: the caller gets empty ones.
forward_operator = Operator(
    f"attention_forward({SCHEMA}, *, int saving=0) -> (Tensor, Tensor, Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The last results are the gradients of sinks and of the norms' weights, empty where there are none.
_backward = Operator(
    f"attention_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=_backward_fake,
    gradient_of="rope_attention",
)
# q and k are those that a forward pass has saved rotated. A second differentiation reaches it from o, which forward
# returned, because q and k were not saved as they came.
_rotated_backward = Operator(
    f"attention_rotated_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_rotated_backward_impl,
    fake=_rotated_backward_fake,
    gradient_of="rope_attention",
)


def backward_operator(is_rotated: bool) -> Operator:
    """The operator of the backward pass of q and k as they came, or of those that a forward pass has rotated."""
    return _rotated_backward if is_rotated else _backward
