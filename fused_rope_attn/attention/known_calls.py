"""What eager calls of attention were found to be, by their signatures, so that a repeated one is not examined again."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention.problem import Tensors
from fused_rope_attn.runtime.context_parallel import in_context_parallel
from fused_rope_attn.runtime.registration import is_plain

_MAX_KNOWN = 4096
_known: dict[tuple, Any] = {}


def signature(tensors: Tensors, window: Any, *options: Any) -> tuple | None:
    """All that the checks of a call, its description, its plan and its launches look at, but for addresses. None where
    they look at more: traced calls and modes, other classes of tensors, autocast, tables with a gradient.

    The window and the other options go into it with their types, because ``1 == True``.
    """
    if not is_plain(*tensors) or in_context_parallel():
        return None
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    q, k, v, cos, sin, sinks, starts, lens, _, _, q_norm, k_norm, _, _ = tensors
    if q is None or k is None or v is None or cos is None or sin is None or cos.requires_grad or sin.requires_grad:
        return None
    others: tuple | None = None
    if not (window is sinks is starts is lens is q_norm is k_norm is None):
        if window is not None and type(window) is not tuple:
            return None
        others = (window, *map(type, window or ()), *map(_kind, (sinks, starts, lens, q_norm, k_norm)))
    try:
        return (
            q.shape, k.shape, v.shape, cos.shape, sin.shape, q.dtype, k.dtype, v.dtype, cos.dtype, sin.dtype,
            q.device, k.device, v.device, cos.device, sin.device, q.stride(), k.stride(), v.stride(), cos.stride(),
            sin.stride(), others, options, (*map(type, options),), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    except RuntimeError:  # tensors without strides: sparse and nested ones
        return None


def _kind(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.dtype, x.device, x.layout, x.layout is torch.strided and x.stride())


def find(seen: tuple | None) -> Any:
    """The ``eager.KnownCall`` of calls with this signature, or None."""
    try:
        return None if seen is None else _known.get(seen)
    except TypeError:  # an option that cannot be hashed, and that the checks will refuse
        return None


def remember(seen: tuple | None, call: Any) -> None:
    """Keep what ``find`` gives for this signature; forgets everything when that grows past any working set."""
    if seen is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[seen] = call


def forget() -> None:
    """Examine every call again when it comes."""
    _known.clear()
