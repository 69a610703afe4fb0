"""What eager calls of attention were found to be, by their signatures, so that a repeated one is not examined again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fused_rope_attn.attention.problem import Options, Tensors
from fused_rope_attn.runtime.context_parallel import in_context_parallel
from fused_rope_attn.runtime.guards import guard
from fused_rope_attn.runtime.registration import is_plain

_MAX_KNOWN = 4096
# Calls of one key, which differ in dtypes, devices, strides, tables or in what takes a gradient.
_MAX_ALIKE = 8
# A tuple among the options: the types of its elements count too.
_WINDOW = Options._fields.index("window")
# By keys: whether tensors are those of a call, and the call.
_known: dict[tuple, list[tuple[Callable[..., bool], Any]]] = {}


def find(tensors: Tensors, layout: Any, options: tuple) -> Any:
    """What was remembered of a call that has all in common with this one at which its checks, its description, its
    plan and its launches look, but for addresses; None where nothing was, and for traced calls, modes and autocast."""
    if not is_plain() or in_context_parallel() or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    try:
        alike = _known.get(_key(tensors, layout, options))
        if alike is not None:
            given = tensors.given()
            for matches, call in alike:
                if matches(*given):
                    return call
    # What is no tensor, an option that cannot be hashed, tensors without strides: the checks will refuse it.
    except (AttributeError, TypeError, RuntimeError):
        pass
    return None


def _key(tensors: Tensors, layout: Any, options: tuple) -> tuple:
    """The options go into it with their types, because ``1 == True``."""
    q, k, _, _, _, sinks, starts, lens, _, _, q_norm, k_norm, _, _ = tensors
    others: tuple | None = None
    window = options[_WINDOW]
    if not (window is sinks is starts is lens is q_norm is k_norm is None):
        others = *map(type, window or ()), *[x is None for x in (sinks, starts, lens, q_norm, k_norm)]
    return (
        q.shape, k.shape, others, layout, options, (*map(type, options),), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def remember(tensors: Tensors, layout: Any, options: tuple, make: Callable[[], Any]) -> None:
    """Keep what ``make`` gives, for ``find`` to give it to such calls.

    Forgets everything when that grows past any working set.
    """
    if not is_plain(*tensors) or in_context_parallel() or type(options[_WINDOW]) not in (tuple, type(None)):
        return
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    alike = _known.setdefault(_key(tensors, layout, options), [])
    del alike[: max(0, len(alike) + 1 - _MAX_ALIKE)]
    alike.append((guard(tensors.given()), make()))


def forget() -> None:
    """Examine every call again when it comes."""
    _known.clear()
