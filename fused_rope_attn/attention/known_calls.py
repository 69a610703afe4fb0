"""What eager calls of attention were found to be, by their signatures, so that a repeated one is not examined again."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.context_parallel import in_context_parallel

_MAX_KNOWN = 4096
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_STRIDED = torch.strided
_known: dict[tuple, Problem] = {}


def signature(tensors: Tensors, window: Any, *options: Any) -> tuple | None:
    """All that the checks of a call, its description and the choice of its backend look at. None where they look at
    more: traced calls, other classes of tensors, autocast, tables with a gradient.

    The window and the other options go into it with their types, because ``1 == True``.
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)) or in_context_parallel():
        return None
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    q, k, v, cos, sin, sinks, starts, lens, _, _, q_norm, k_norm, _, _ = tensors
    if q is None or k is None or v is None or cos is None or sin is None or q.is_nested:
        return None
    if not (q.layout is k.layout is v.layout is _STRIDED) or cos.requires_grad or sin.requires_grad:
        return None
    masks: tuple | None = None
    if window is not None or sinks is not None or starts is not None or lens is not None:
        if window is not None and type(window) is not tuple:
            return None
        given = [None if x is None else (x.shape, x.dtype, x.device) for x in (sinks, starts, lens)]
        masks = (window, *map(type, window or ()), *given)
    norms: tuple | None = None
    if q_norm is not None or k_norm is not None:
        norms = tuple(None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in (q_norm, k_norm))
    where = q.device
    return (
        q.shape, k.shape, v.shape, cos.shape, sin.shape, q.dtype, k.dtype, v.dtype, cos.dtype, sin.dtype,
        where, k.device, v.device, cos.device, sin.device, device.arch(where), masks, norms, options,
        (*map(type, options),), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def find(seen: tuple | None) -> Problem | None:
    """The problem of a call with this signature, its backend chosen, or None."""
    try:
        return None if seen is None else _known.get(seen)
    except TypeError:  # an option that cannot be hashed, and that the checks will refuse
        return None


def remember(seen: tuple | None, problem: Problem) -> None:
    """Keep a problem for the next call with this signature; forgets everything when it grows past any working set."""
    if seen is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[seen] = problem


def forget() -> None:
    """Examine every call again when it comes."""
    _known.clear()
