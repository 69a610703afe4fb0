# mypy: allow-untyped-defs, allow-incomplete-defs
"""Eager calls of attention: they skip the dispatcher, and are cached by signature.

A cached call is not checked, described or planned again, and its passes are replayed without reading layouts again.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention import ops
from fused_rope_attn.attention.problem import Options, Problem, Tensors, flatten
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.entry import in_context_parallel
from fused_rope_attn.runtime.launch import signature
from fused_rope_attn.runtime.registration import is_plain

_MAX_KNOWN = 4096
_WINDOW, _RETURN_LSE = map(Options._fields.index, ("window", "return_lse"))


def attention(
    problem: Problem, tensors: Tensors, returns_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (o, lse, the largest logits) of a problem that ``planning.choose_backend`` has admitted to the kernels.

    returns_lse: lse has a gradient. The largest logits are meaningful only if the problem asks for them.

    Tracing, fake tensors and modes see one operator. Ordinary calls skip the dispatcher.
    """
    if not is_plain(*tensors):
        return ops.forward_operator(*flatten(problem, tensors))
    return ops.AttentionCall(problem, tensors, returns_lse)(tensors)


_known: dict[tuple, ops.AttentionCall] = {}


def _key(tensors: Tensors, layout: Any, options: tuple) -> tuple | None:
    """Return the signature of a call, with the types of its options, because ``1 == True``.

    It is None for traced calls, in modes and under autocast.
    """
    if not is_plain(*tensors) or in_context_parallel():
        return None
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    window, q = options[_WINDOW], tensors.q
    if type(window) not in (tuple, type(None)):
        return None
    return (
        signature(tensors),
        tensors.cos.requires_grad or tensors.sin.requires_grad,  # refused
        layout,
        options,
        *map(type, options),
        *map(type, window or ()),
        torch.are_deterministic_algorithms_enabled(),
        # A setting decides the precision of products in float32, and it may change between calls.
        q.dtype is torch.float32 and device.dot_precision(q.dtype),
    )


def find(tensors: Tensors, layout: Any, options: tuple) -> ops.AttentionCall | None:
    """Return the call that was remembered for this signature, or None."""
    try:
        key = _key(tensors, layout, options)
        return None if key is None else _known.get(key)  # a graph would guard the whole dictionary
    # An argument is no tensor, an option is not hashable, or a tensor has no strides: the checks will refuse it.
    except (AttributeError, TypeError, RuntimeError):
        return None


def remember(tensors: Tensors, layout: Any, options: tuple, problem: Problem, described: Tensors) -> None:
    """Keep a call for ``find``. described: the tensors as (B, H, N, D).

    Forget all calls once there are more than any program uses in turn.
    """
    key = _key(tensors, layout, options)
    if key is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = ops.AttentionCall(problem, described, options[_RETURN_LSE])


def forget() -> None:
    """Forget all calls, so that each is examined again."""
    _known.clear()
