"""Calls that stop where they would run, because only their plan is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

# The public functions that stop: each raises ``Planned`` after its checks if ``is_dry_run``.
FUNCTIONS = (
    "rope_attention",
    "rope_attention_varlen",
    "rope_attention_mla",
    "rope_attention_mla_varlen",
    "rope_attention_with_kvcache",
    "rope_attention_cp",
    "rope_attention_varlen_cp",
)


class Planned(Exception):
    """Raised in place of running a call, with its plan."""


class _State(threading.local):
    is_dry = False


_state = _State()


def is_dry_run() -> bool:
    """Return whether the call that this thread is making must raise ``Planned``, and neither launch nor write."""
    return not torch.compiler.is_compiling() and _state.is_dry


def plan_of_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the plan of ``function(*arguments, **options)``, or raise what the function raises."""
    name = getattr(function, "__name__", "")
    if name not in FUNCTIONS:
        raise TypeError(f"function must be one of {', '.join(FUNCTIONS)}, but is {name or type(function).__name__}")
    _state.is_dry = True
    try:
        function(*arguments, **options)
    except Planned as planned:
        return planned.args[0]
    finally:
        _state.is_dry = False
    raise AssertionError(f"{name} has run")
