# mypy: allow-untyped-defs, allow-incomplete-defs
"""Refusal of unsupported derivatives: only the first derivative in reverse mode is served, on every backend.

Kernels have no formula for other derivatives, so PyTorch would return zeros. The references could compute them, but
then a program would work on one machine and raise on another.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

# The base of autograd functions that no transform of torch.func needs to see: those of ordinary eager calls, where none
# is active, and of operators, which the dispatcher calls once for each transform. ``torch.autograd.Function`` looks for
# transforms in ``apply``: up to torch 2.13 it costs host time, and from 2.14 on it raises in operators. A private name.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
_NO_FORWARD_MODE = "{}: forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) is not supported"
_NO_DOUBLE_BACKWARD = "{}: double backward (create_graph=True) is not supported"


def apply_in_operator(function: Any, *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)`` in the autograd kernel of an operator. function: a ``SingleLevelFunction``.

    PyTorch refuses such a function while a transform of torch.func is active, unless it is allowed.
    """
    functorch = torch._C._functorch  # private names
    if functorch.peek_interpreter_stack() is None:
        return function.apply(*arguments)
    allowed = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(*arguments)
    finally:
        functorch.set_single_level_autograd_function_allowed(allowed)


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents now: inside of ``forward_ad.dual_level`` or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0  # a private name


def refuse_tangents(function: str, tensors: Iterable[Any]) -> None:
    """Raise NotImplementedError, naming a public function, if one of these tensors has a tangent; some may be None.

    A graph of torch.compile cannot look at its tensors, so that it refuses forward mode as such.
    """
    if not in_forward_mode():
        return
    compiling = torch.compiler.is_compiling()
    for x in tensors:
        if isinstance(x, (list, tuple)):
            refuse_tangents(function, x)
        elif isinstance(x, torch.Tensor) and (compiling or forward_ad.unpack_dual(x).tangent is not None):
            raise NotImplementedError(_NO_FORWARD_MODE.format(function))


class _Computed(SingleLevelFunction):
    """Gradients that a kernel has computed, as functions of ``inputs``."""

    @staticmethod
    def forward(ctx, function: str, gradients: Sequence[Any], *inputs):
        ctx.set_materialize_grads(False)
        ctx.function = function
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(_NO_DOUBLE_BACKWARD.format(ctx.function))


def last_gradients(function: str, gradients: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """Return gradients that a kernel has computed from ``inputs``; to differentiate them again raises.

    function: the public function that the message names. Call this in autograd kernels of operators.
    """
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return apply_in_operator(_Computed, function, gradients, *inputs)
    return gradients


class _Limited(torch.autograd.Function):
    """The same tensors, which can be differentiated ``orders`` times, in reverse mode only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: str, orders: float, *tensors):
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, ctx.orders = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.orders == 0:
            raise NotImplementedError(_NO_DOUBLE_BACKWARD.format(ctx.function))
        # By create_graph, in a transform of torch.func, or with tangents the gradients may be differentiated again.
        if torch.is_grad_enabled() or in_forward_mode():
            given = iter(_Limited.apply(ctx.function, ctx.orders - 1, *[x for x in gradients if x is not None]))
            gradients = tuple(None if x is None else next(given) for x in gradients)
        return None, None, *gradients

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE.format(ctx.function))


def differentiable(function: str, tensors: Sequence[Any], orders: float = 1) -> list[Any]:
    """Return views of a call's tensors that can be differentiated as often as the kernels can, and no more.

    function: the public function that messages name. tensors: some may be None, and stay so.
    orders: how often they can be differentiated in reverse mode. Graphs of torch.compile need no views, because PyTorch
    itself refuses to differentiate the gradients of such a graph.
    """
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling():
        refuse_tangents(function, given)
        return list(tensors)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not (transformed or in_forward_mode() or (torch.is_grad_enabled() and any(x.requires_grad for x in given))):
        return list(tensors)
    views = iter(_Limited.apply(function, orders, *given))
    return [None if x is None else next(views) for x in tensors]
