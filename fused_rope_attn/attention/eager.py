# mypy: allow-untyped-defs, allow-incomplete-defs
"""Eager calls of attention: they skip the dispatcher, and are cached by signature.

A cached call is not checked, described or planned again, and its passes are replayed without reading layouts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_rope_attn.attention import ops
from fused_rope_attn.attention.ops import Attention, DifferentiableCall, Unpack
from fused_rope_attn.attention.problem import Options, Outputs, Problem, Saved, Tensors, flatten
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import Replay
from fused_rope_attn.runtime.context_parallel import in_context_parallel
from fused_rope_attn.runtime.differentiation import in_forward_mode
from fused_rope_attn.runtime.guards import guard
from fused_rope_attn.runtime.registration import is_plain

_MAX_KNOWN = 4096
# Calls with the same key. They differ in dtypes, devices, strides, tables, or in which tensors take a gradient.
_MAX_ALIKE = 8
_WINDOW, _RETURN_LSE = map(Options._fields.index, ("window", "return_lse"))


class EagerCall(DifferentiableCall):
    """``call(tensors)`` is attention by the kernels, (o, lse, max_logit or None), in ordinary eager mode.

    Args:
        problem: as ``planning.choose_backend`` has admitted it to the kernels.
        tensors: of such a call.
        is_known: the tensors of every call have the same dtypes, devices, shapes and strides.
        returns_lse: the caller gets lse, which then has a gradient.
    """

    __slots__ = ("_is_known", "_returns_more", "_forward", "_saving", "_backward")

    def __init__(self, problem: Problem, tensors: Tensors, is_known: bool = False, returns_lse: bool = True):
        super().__init__(problem, tensors)
        # A setting decides the precision of products in float32, and it may change between calls.
        self._is_known = is_known and problem.dtype is not torch.float32
        self._returns_more = returns_lse or problem.return_max_logit
        self._forward: Replay | None = None
        self._saving: Replay | None = None
        # (guard of the tensors, replay)
        self._backward: tuple[Callable[..., bool], Replay] | None = None

    def __call__(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if ops.needs_gradient(tensors):
            if self._returns_more:
                return Attention.apply(self, tensors, None, *self.differentiable(tensors))
            found: list[torch.Tensor] = []
            return Attention.apply(self, tensors, found, *self.differentiable(tensors)), found[0], None
        results = None if self._forward is None else self._forward(tensors.given())
        if results is None:
            results, replay = self._run(tensors, saves_rotated=False)
            self._forward = replay
        return results[0], results[1], results[4]

    def _run(self, tensors: Tensors, *, saves_rotated: bool) -> tuple[Outputs, Replay | None]:
        """Return (the results, the replay for the next call of this kind)."""
        with device.guard(self.problem.device):
            call = ops.forward_call(self.problem, tensors, saves_rotated)
            return call(tensors), call.replay if self._is_known else None

    def forward(self, tensors: Tensors) -> Saved:
        results = None if self._saving is None else self._saving(tensors.given())
        if results is None:
            results, replay = self._run(tensors, saves_rotated=True)
            self._saving = replay
        o, lse, q_rot, k_rot, max_logit = results
        if q_rot is None:
            return Saved(o, lse, tensors, max_logit=max_logit)
        if self.problem.has_norms:  # their gradient needs the caller's q and k
            tensors = tensors._replace(raw_q=tensors.q, raw_k=tensors.k)
        return Saved(o, lse, tensors._replace(q=q_rot, k=k_rot), is_rotated=True, max_logit=max_logit)

    def backward(self, do: torch.Tensor, dlse: torch.Tensor | None, kept: Sequence, unpack: Unpack) -> Sequence:
        # With create_graph, or where dO has a tangent, the operator's own autograd must see the call, to refuse it.
        if type(do) is not torch.Tensor or torch.is_grad_enabled() or in_forward_mode():
            return super().backward(do, dlse, kept, unpack)
        if dlse is None and self._backward is not None and self._backward[0](do, *kept):
            results = self._backward[1]((do, *kept))
            if results is not None:
                return results
        saved = unpack(kept)
        with device.guard(self.problem.device):
            call, tensors = ops.backward_call(
                self.problem, do, saved._replace(tensors=saved.tensors._replace(dlse=dlse))
            )
            results = call(tensors)
        if self._is_known and call.replay is not None and dlse is None:
            self._backward = guard((do, *kept)), call.replay
        return results


def attention(
    problem: Problem, tensors: Tensors, returns_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (o, lse, max_logit) of a problem that ``planning.choose_backend`` has admitted to the kernels.

    returns_lse: lse has a gradient. max_logit is meaningful only if the problem asks for it.

    Tracing, fake tensors and modes see one operator. Ordinary calls skip the dispatcher.
    """
    if not is_plain(*tensors):
        return ops.forward_operator(*flatten(problem, tensors))
    return EagerCall(problem, tensors, returns_lse=returns_lse)(tensors)


# Key to (guard of the tensors, call).
_known: dict[tuple, list[tuple[Callable[..., bool], EagerCall]]] = {}


def find(tensors: Tensors, layout: Any, options: tuple) -> EagerCall | None:
    """Return the call that was remembered for this signature, or None.

    It is None for traced calls, in modes and under autocast.
    """
    if not is_plain() or in_context_parallel() or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    try:
        alike = _known.get(_key(tensors, layout, options))
        if alike is not None:
            given = tensors.given()
            for matches, call in alike:
                if matches(*given):
                    return call
    # An argument is no tensor, an option is not hashable, or a tensor has no strides: the checks will refuse it.
    except (AttributeError, TypeError, RuntimeError):
        pass
    return None


def _key(tensors: Tensors, layout: Any, options: tuple) -> tuple:
    """Return the properties that the guard does not compare, and the options with their types, as ``1 == True``."""
    q, k, _, _, _, sinks, starts, lens, _, _, q_norm, k_norm, query_starts, query_ends, *_ = tensors
    others: tuple | None = None
    window = options[_WINDOW]
    if not (window is sinks is starts is lens is q_norm is k_norm is query_starts is query_ends is None):
        optional = (sinks, starts, lens, q_norm, k_norm, query_starts, query_ends)
        others = *map(type, window or ()), *[x is None for x in optional]
    return (
        q.shape,
        k.shape,
        others,
        layout,
        options,
        (*map(type, options),),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def remember(tensors: Tensors, layout: Any, options: tuple, problem: Problem, described: Tensors) -> None:
    """Keep a call for ``find``. described: the tensors as (B, H, N, D).

    Forget all calls once there are more than any program uses in turn.
    """
    if not is_plain(*tensors) or in_context_parallel() or type(options[_WINDOW]) not in (tuple, type(None)):
        return
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    alike = _known.setdefault(_key(tensors, layout, options), [])
    del alike[: max(0, len(alike) + 1 - _MAX_ALIKE)]
    alike.append(
        (guard(tensors.given()), EagerCall(problem, described, is_known=True, returns_lse=options[_RETURN_LSE]))
    )


def forget() -> None:
    """Forget all calls, so that each is examined again."""
    _known.clear()
