"""Autocast, as PyTorch's own attention functions follow it."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.runtime.dry_run import is_dry_run


def autocast(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return q, k and v in autocast's dtype, as scaled_dot_product_attention does, or ``rows`` itself if it is off.

    None stays None. Tables are not cast, because float32 tables are more accurate. Results of a dry run have no data.
    """
    if not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        return rows
    given = [x for x in rows if x is not None]
    if not all(isinstance(x, torch.Tensor) for x in given) or not (given and is_autocast_on(given[0].device.type)):
        return rows
    dtype = torch.get_autocast_dtype(given[0].device.type)
    convert = _stand_in if is_dry_run() else torch.Tensor.to
    return tuple(
        convert(x, dtype) if x is not None and x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in rows
    )


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for this device type. It is off for "meta", which autocast does not support."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _stand_in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with x's shape and device and the new dtype, but without data."""
    return x if x.dtype is dtype else torch.empty((), dtype=dtype, device=x.device).expand(x.shape)
