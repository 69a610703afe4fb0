"""Autocast, as PyTorch's own attention functions follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def autocast(q: Any, k: Any, v: Any, convert: Callable[..., Any] = torch.Tensor.to) -> tuple[Any, ...]:
    """q, k and v in autocast's dtype where it is on, as scaled_dot_product_attention does; tables stay as they are.
    What is None stays None."""
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
    """Whether autocast is on for tensors of such devices; never for "meta", of which autocast knows nothing."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def stand_in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Shape, device and new dtype of x, without its data: for planning."""
    return x if x.dtype is dtype else torch.empty((), dtype=dtype, device=x.device).expand(x.shape)
