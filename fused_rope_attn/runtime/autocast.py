"""Autocast, as PyTorch's own attention functions follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def autocast(q: Any, k: Any, v: Any, convert: Callable[..., Any] = torch.Tensor.to) -> tuple[Any, ...]:
    """Return q, k and v in autocast's dtype if it is on, as scaled_dot_product_attention does; None stays None.

    Tables are not cast, because float32 tables are more accurate.
    """
    if not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        return q, k, v
    given = [x for x in (q, k, v) if x is not None]
    if not all(isinstance(x, torch.Tensor) for x in given) or not is_autocast_on(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(
        convert(x, dtype) if x is not None and x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in (q, k, v)
    )


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for this device type. It is off for "meta", which autocast does not support."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def stand_in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with x's shape and device and the new dtype, but without data, for planning."""
    return x if x.dtype is dtype else torch.empty((), dtype=dtype, device=x.device).expand(x.shape)
