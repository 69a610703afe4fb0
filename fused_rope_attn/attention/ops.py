"""The torch.library operators of attention, their autograd, and the calls of the backends' launchers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.problem import (
    READ_BY_THE_DEVICE,
    SCHEMA,
    Gradients,
    Outputs,
    Problem,
    Saved,
    Saving,
    Tensors,
    flatten,
    rebuild,
    split_outputs,
)
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator, in_forward_mode
from fused_rope_attn.runtime.launch import Call, call_of
from fused_rope_attn.runtime.layouts import like_input, with_aligned_rows
from fused_rope_attn.runtime.registration import Operator


@functools.cache
def _launchers(portable: bool) -> tuple[Callable, Callable]:
    """Return (forward, backward) of the portable or of the sm_90 backend, imported when a call first needs them.

    Each takes (problem, tensors, configuration, saving) and prepares the launches. saving: in forward a ``Saving``, in
    backward whether q and k are rotated.
    """
    if portable:
        from fused_rope_attn.attention.portable.backward import BackwardCall as portable_backward
        from fused_rope_attn.attention.portable.forward import ForwardCall as portable_forward

        return portable_forward, portable_backward
    from fused_rope_attn.attention.hopper.backward import backward_call as hopper_backward
    from fused_rope_attn.attention.hopper.forward import ForwardCall as hopper_forward

    return hopper_forward, hopper_backward


def _readable(tensors: Tensors) -> Tensors:
    """Return the tensors as kernels read them; those with another layout are copied.

    Rows of q, k and v begin at multiples of 16 bytes. Tensors that only the device reads have unit stride.
    """
    rows = ("q", "k", "v") if tensors.q_nope is None else ("q", "k", "v", "q_nope", "k_nope")
    changed = {name: with_aligned_rows(getattr(tensors, name)) for name in rows}
    changed |= {name: x.contiguous() for name in READ_BY_THE_DEVICE if (x := getattr(tensors, name)) is not None}
    changed = {name: x for name, x in changed.items() if x is not getattr(tensors, name)}
    return tensors._replace(**changed) if changed else tensors


def _readable_forward(tensors: Sequence) -> tuple:
    given, outputs = split_outputs(tensors, 0)
    return (*_readable(given), *outputs)


def _readable_backward(tensors: Sequence) -> tuple:
    do, o, lse, *of_forward = tensors
    return (with_aligned_rows(do), with_aligned_rows(o), lse, *_readable_forward(of_forward))


def _same(some: Sequence, others: Sequence) -> bool:
    return all(x is y for x, y in zip(some, others))


def _prepare_forward(
    problem: Problem, tensors: Sequence, saves_rotated: bool, plan: planning.Plan | None = None
) -> Callable[[Sequence], Outputs]:
    readable = _readable_forward(tensors)
    if not _same(readable, tensors):
        run = _prepare_forward(problem, readable, saves_rotated, plan)
        return lambda tensors: run(_readable_forward(tensors))
    plan = plan or planning.plan_for(problem)
    saving = Saving.NOTHING
    if saves_rotated and plan.saves_rotated:
        reads_tiles = isinstance(plan.backward, configs.HopperBackwardConfig) and problem.is_packed
        saving = Saving.TILES if reads_tiles else Saving.ROWS
    prepare = _launchers(isinstance(plan.forward, configs.ForwardConfig))[0]
    return prepare(problem, tensors, plan.forward, saving)


def _prepare_backward(
    problem: Problem, tensors: Sequence, is_rotated: bool, plan: planning.Plan | None = None
) -> Callable[[Sequence], Gradients]:
    readable = _readable_backward(tensors)
    if not _same(readable, tensors):
        run = _prepare_backward(problem, readable, is_rotated, plan)
        return lambda tensors: run(_readable_backward(tensors))
    config = (plan or planning.plan_for(problem)).backward
    prepare = _launchers(isinstance(config, configs.BackwardConfig))[1]
    return prepare(problem, tensors, config, is_rotated)


def forward_call(problem: Problem, tensors: Tensors, saves_rotated: bool = False) -> Call:
    """Return the call of a forward pass, which takes ``Tensors`` and returns ``Outputs``.

    saves_rotated: also return q_rot and k_rot, if the kernels support it; else they are None.
    """
    return call_of(_prepare_forward, problem.for_launch(), tensors, saves_rotated)


def run_forward(problem: Problem, tensors: Tensors) -> Outputs:
    """Run a forward pass that saves nothing."""
    with device.guard(problem.device):
        return forward_call(problem, tensors)(tensors)


def run_backward(problem: Problem, do: torch.Tensor, saved: Saved) -> Gradients:
    """Run a backward pass."""
    tensors = (do, saved.o, saved.lse, *saved.tensors)
    with device.guard(problem.device):
        return call_of(_prepare_backward, problem.for_launch(), tensors, saved.is_rotated)(tensors)


def forward_by(plan: planning.Plan, problem: Problem, tensors: Tensors, out: torch.Tensor | None = None) -> Outputs:
    """Run a forward pass without autograd by the kernels of a plan. out: a buffer for o, if not new memory."""
    with device.guard(problem.device):
        given = tensors if out is None else (*tensors, out)
        return call_of(_prepare_forward, problem.for_launch(), given, False, plan)(given)


def backward_by(plan: planning.Plan, problem: Problem, do: torch.Tensor, saved: Saved, outputs: tuple) -> Gradients:
    """Run the backward pass of ``forward_by``. outputs: buffers for dq, dk and dv, None for new memory."""
    with device.guard(problem.device):
        given = (do, saved.o, saved.lse, *saved.tensors, *outputs)
        return call_of(_prepare_backward, problem.for_launch(), given, saved.is_rotated, plan)(given)


def _forward_impl(*arguments):
    results = run_forward(*rebuild(*arguments))
    lacks = results.max_logit is None
    return results.o, results.lse, results.lse.new_empty(0) if lacks else results.max_logit


def _backward_impl(do, o, lse, *arguments):
    problem, tensors = rebuild(*arguments)
    return without_none(run_backward(problem, do, Saved(o, lse, tensors)), do)


def _rotated_backward_impl(do, o, lse, *arguments):
    problem, tensors = rebuild(*arguments)
    # q_rot holds packed queries with padding.
    problem = problem._replace(len_q=o.shape[2])
    return without_none(run_backward(problem, do, Saved(o, lse, tensors, is_rotated=True)), do)


def without_none(gradients: Gradients, do: torch.Tensor) -> Gradients:
    """Return empty tensors in place of None, because an operator returns tensors only."""
    return Gradients(*(do.new_empty(0) if gradient is None else gradient for gradient in gradients))


def _forward_fake(*arguments):
    problem, tensors = rebuild(*arguments)
    q = tensors.q
    shape = problem.maxima_shape if problem.return_max_logit else (0,)
    o, lse = like_input(q, problem.value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)
    return o, lse, lse.new_empty(shape)


def backward_fake(do, o, lse, *arguments):
    """Return uninitialised gradients, as ``without_none`` returns them, for tracing."""
    _, tensors = rebuild(*arguments)
    return like_input(tensors.q), like_input(tensors.k), like_input(tensors.v), *_fake_rest(do, tensors)


def _rotated_backward_fake(do, o, lse, *arguments):
    _, tensors = rebuild(*arguments)
    if tensors.q_nope is not None:
        dq = like_input(tensors.q_nope, tensors.q.shape[3])
        return dq, like_input(tensors.k), like_input(tensors.v), *_fake_rest(do, tensors)
    return like_input(o), like_input(tensors.v), like_input(tensors.v), *_fake_rest(do, tensors)


def _fake_rest(do, tensors: Tensors) -> list[torch.Tensor]:
    """Return the gradients after dv in the form of ``without_none``."""
    given = [getattr(tensors, name) for name in _WEIGHTS]
    return [do.new_empty(0) if x is None else torch.empty_like(x) if x.ndim == 1 else like_input(x) for x in given]


# Tensors that may have a gradient, in addition to q, k and v: name in ``Tensors`` to index in ``Gradients``.
_WEIGHTS = {"sinks": 3, "q_norm": 4, "k_norm": 5, "q_nope": 6, "k_nope": 7}


def needs_gradient(tensors: Tensors) -> bool:
    """Return whether a call of these tensors must be differentiable."""
    if not torch.is_grad_enabled():
        return False
    if tensors.q.requires_grad or tensors.k.requires_grad or tensors.v.requires_grad:
        return True
    others = (tensors.sinks, tensors.q_norm, tensors.k_norm, tensors.q_nope, tensors.k_nope)
    return any(x is not None and x.requires_grad for x in others)


class AttentionCall:
    """Attention by the kernels for all calls of one signature: ``call(tensors)`` returns (o, lse, max_logit or None).

    Args:
        problem: one that ``planning.choose_backend`` admits to the kernels.
        tensors: those of one such call. Only their presence is read.
        returns_lse: the caller gets lse, which then has a gradient.
        keyset: None in ordinary eager mode. In a call by PyTorch's dispatcher, its set of dispatch keys. The call then
            saves q and k unrotated, because the kernels are not known while a graph is traced, and not every backward
            kernel reads rotated q and k.
    """

    __slots__ = ("problem", "returns_more", "weights", "keyset", "_passes")

    def __init__(self, problem: Problem, tensors: Tensors, returns_lse: bool = True, keyset: Any = None):
        self.problem, self.keyset = problem, keyset
        self.returns_more = returns_lse or problem.return_max_logit
        self.weights = tuple((name, i) for name, i in _WEIGHTS.items() if getattr(tensors, name) is not None)
        # The forward pass with gradients (True), which also saves q and k rotated, and the one without (False).
        self._passes: dict[bool, Call] = {}

    def __call__(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        needed = needs_gradient(tensors)
        if self.keyset is None:
            call = self._passes.get(needed)
            if call is None:
                call = self._passes[needed] = forward_call(self.problem, tensors, saves_rotated=needed)
            with device.guard(self.problem.device):
                outputs = call(tensors)
        else:
            o, lse, max_logit = forward_operator.below_autograd(self.keyset, *flatten(self.problem, tensors))
            outputs = Outputs(o, lse, max_logit=max_logit)
        if not needed:
            return outputs.o, outputs.lse, outputs.max_logit
        # Those that may have a gradient, in the order of ``Gradients``.
        differentiable = tensors.q, tensors.k, tensors.v, *[getattr(tensors, name) for name, _ in self.weights]
        if self.keyset is not None:
            return apply_in_operator(Attention, self, outputs, tensors, *differentiable)
        if self.returns_more:
            return Attention.apply(self, outputs, tensors, *differentiable)
        return Attention.apply(self, outputs, tensors, *differentiable), outputs.lse, None

    def backward(self, do: torch.Tensor, saved: Saved) -> Sequence:
        """Return ``Gradients``."""
        # With create_graph, or where dO has a tangent, the operator's own autograd must see the call, to refuse it.
        if self.keyset is None and type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            return run_backward(self.problem, do, saved)
        operator = _rotated_backward if saved.is_rotated else _backward
        return operator(do, saved.o, saved.lse, *flatten(self.problem, saved.tensors))


class Attention(SingleLevelFunction):
    """The gradient of attention. Its results are o, lse and max_logit, or o alone.

    Every further argument and result costs the host time, so that only those tensors that may have a gradient are
    arguments of their own, and lse is a result if the caller gets it.
    """

    @staticmethod
    def forward(ctx, call: AttentionCall, outputs: Outputs, tensors: Tensors, *differentiable):
        o, lse, q_rot, k_rot, max_logit = outputs
        ctx.call, ctx.is_rotated = call, q_rot is not None
        if ctx.is_rotated:
            if call.problem.has_norms:  # their gradient needs the caller's q and k
                tensors = tensors._replace(raw_q=tensors.q, raw_k=tensors.k)
            tensors = tensors._replace(q=q_rot, k=k_rot)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        if not call.returns_more:
            return o
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        o, lse, *tensors = ctx.saved_tensors
        saved = Saved(o, lse, Tensors(*tensors)._replace(dlse=dlse), ctx.is_rotated)
        dq, dk, dv, *others = ctx.call.backward(torch.zeros_like(o) if do is None else do, saved)
        return None, None, None, dq, dk, dv, *[others[i - 3] for _, i in ctx.call.weights]


def _forward_autograd(keyset, *arguments):
    problem, tensors = rebuild(*arguments)
    return AttentionCall(problem, tensors, keyset=keyset)(tensors)


# backend="auto" is resolved inside the operators. The last result is max_logit, empty unless the call asks for it.
forward_operator = Operator(
    f"attention_forward({SCHEMA}) -> (Tensor, Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    function="rope_attention",
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The results after dv are empty if the call has no such tensor.
_backward = Operator(
    f"attention_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=backward_fake,
    function="rope_attention",
    is_gradient=True,
)
# For an eager forward pass that saved q and k rotated, if its backward pass has to go through the dispatcher. A second
# differentiation reaches this operator through o, because the saved q and k are not the caller's.
_rotated_backward = Operator(
    f"attention_rotated_backward(Tensor do, Tensor o, Tensor lse, {SCHEMA}) -> ({_GRADIENTS})",
    run=_rotated_backward_impl,
    fake=_rotated_backward_fake,
    function="rope_attention",
    is_gradient=True,
)
