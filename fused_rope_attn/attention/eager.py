# mypy: allow-untyped-defs, allow-incomplete-defs
"""Eager calls of attention: past the dispatcher, with an autograd function of their own, and replayed when known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_rope_attn.attention import ops
from fused_rope_attn.attention.problem import Gradients, Outputs, Problem, Tensors, flatten
from fused_rope_attn.runtime.differentiation import apply_of, in_forward_mode
from fused_rope_attn.runtime.guards import guard
from fused_rope_attn.runtime.registration import is_plain
from fused_rope_attn.runtime.replay import Replayed

# Of ``Tensors``: how many every call has.
_ALWAYS = 5
# What has a gradient beside q, k and v, with its place in ``Gradients``.
_WEIGHTS = {"sinks": 3, "q_norm": 4, "k_norm": 5}
# Kinds of dO and of saved tensors for which a call keeps replays of its backward pass.
_MOST_BACKWARDS = 4


class EagerCall:
    """``call(tensors)`` is attention by the kernels, (o, lse), in ordinary eager mode.

    Args:
        problem: as ``planning.choose_backend`` has admitted it to the kernels.
        tensors: of such a call.
    """

    __slots__ = ("problem", "weights")

    def __init__(self, problem: Problem, tensors: Tensors):
        self.problem = problem
        self.weights = tuple((name, i) for name, i in _WEIGHTS.items() if getattr(tensors, name) is not None)

    def __call__(self, tensors: Tensors) -> tuple[torch.Tensor, Any]:
        if not ops.needs_gradient(tensors):
            o, lse, _, _ = self.forward(tensors, False)
            return o, lse
        found: list[torch.Tensor] = []
        weights = [getattr(tensors, name) for name, _ in self.weights]
        o = _apply(self, tensors, found, tensors.q, tensors.k, tensors.v, *weights)
        return o, found[0]

    def forward(self, tensors: Tensors, saves_rotated: bool) -> Sequence[Any]:
        """What ``ops.run_forward`` returns."""
        return ops.run_forward(self.problem, tensors, saves_rotated)

    def backward(self, do: torch.Tensor, saved: Sequence[torch.Tensor], run: Callable[[], Gradients]) -> Sequence[Any]:
        """The gradients that ``run`` returns, for what a forward pass has saved."""
        return run()


class KnownCall(EagerCall):
    """The same for tensors of one kind: those of each call have the same dtypes, devices, shapes and strides, so that
    its passes can be replayed. Not in float32: how its products are computed is a setting that may change.

    returns_lse: False where nobody wants lse, which a forward pass without a gradient then returns as None.
    """

    __slots__ = ("_returns_lse", "_forward", "_saving", "_backwards")

    def __init__(self, problem: Problem, tensors: Tensors, returns_lse: bool):
        super().__init__(problem, tensors)
        self._returns_lse = returns_lse
        self._forward, self._saving = Replayed(), Replayed()
        self._backwards: list[tuple[Callable[..., bool], Replayed]] = []

    def forward(self, tensors: Tensors, saves_rotated: bool) -> Sequence[Any]:
        if saves_rotated:
            return self._saving(tensors.given(), lambda: ops.run_forward(self.problem, tensors, True))
        return self._forward(tensors.given(), lambda: self._run(tensors))

    def _run(self, tensors: Tensors) -> Outputs:
        outputs = ops.run_forward(self.problem, tensors)
        return outputs if self._returns_lse else outputs._replace(lse=None)

    def backward(self, do: torch.Tensor, saved: Sequence[torch.Tensor], run: Callable[[], Gradients]) -> Sequence[Any]:
        inputs = (do, *saved)
        for matches, replayed in self._backwards:
            if matches(*inputs):
                return replayed(inputs, run)
        if len(self._backwards) == _MOST_BACKWARDS:
            return run()
        self._backwards.append((guard(inputs), Replayed()))
        return self._backwards[-1][1](inputs, run)


def call_of(problem: Problem, tensors: Tensors, returns_lse: bool) -> EagerCall:
    """The call to remember for tensors of this kind, ``returns_lse`` as ``KnownCall`` has it."""
    if problem.dtype is torch.float32:
        return EagerCall(problem, tensors)
    return KnownCall(problem, tensors, returns_lse)


class _Attention(torch.autograd.Function):
    """Saves q and k rotated where the kernels can make and take them so, with norms also as they came, which the
    gradient of a norm needs; else only so. Gradients come back in the frame that the caller knows.

    The function's result is o alone; lse, which has no gradient, is put into the list ``found``.
    """

    @staticmethod
    def forward(ctx, call: EagerCall, tensors: Tensors, found: list, *differentiable):
        o, lse, q_rot, k_rot = call.forward(tensors, True)
        found.append(lse)
        ctx.is_rotated = q_rot is not None
        if q_rot is not None:
            if call.problem.has_norms:
                tensors = tensors._replace(raw_q=tensors.q, raw_k=tensors.k)
            tensors = tensors._replace(q=q_rot, k=k_rot)
        saved = tensors.given()
        ctx.call = call
        # Which tensors were saved; None where they are the first ones, which every call has.
        ctx.present = None if len(saved) == _ALWAYS else [x is not None for x in tensors]
        ctx.save_for_backward(o, lse, *saved)
        ctx.set_materialize_grads(False)
        return o

    @staticmethod
    def backward(ctx, do):
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        call, saved = ctx.call, ctx.saved_tensors
        # With create_graph, or where dO has a tangent, the operator's own autograd must see the call, to refuse it.
        if type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            dq, dk, dv, *others = call.backward(do, saved, lambda: _run_backward(ctx, do, saved))
        else:
            o, lse, tensors = _tensors(ctx, saved)
            dq, dk, dv, *others = ops.backward_operator(ctx.is_rotated)(
                do, o, lse, *flatten(call.problem, tensors)
            )  # fmt: skip
        return None, None, None, dq, dk, dv, *[others[i - 3] for _, i in call.weights]


def _run_backward(ctx, do: torch.Tensor, saved: Sequence[torch.Tensor]) -> Gradients:
    o, lse, tensors = _tensors(ctx, saved)
    return ops.run_backward(ctx.call.problem, tensors, do, o, lse, ctx.is_rotated)


def _tensors(ctx, saved: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """(o, lse, the others) of what was saved."""
    o, lse, *rest = saved
    if ctx.present is None:
        return o, lse, Tensors(*rest)
    values = iter(rest)
    return o, lse, Tensors(*[next(values) if present else None for present in ctx.present])


# There are no transforms of torch.func in ordinary eager mode.
_apply: Callable[..., torch.Tensor] = apply_of(_Attention)


def attention(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a problem that ``planning.choose_backend`` has admitted to the kernels.

    Tracing, fake tensors and modes see one operator; ordinary calls save its dispatch.
    """
    if not is_plain(*tensors):
        return ops.forward_operator(*flatten(problem, tensors))
    return EagerCall(problem, tensors)(tensors)
