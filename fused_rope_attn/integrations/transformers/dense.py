"""Masks of four dimensions as intervals of queries: those that users give, and those that a model makes of its inputs.

A model like PaliGemma or Gemma 3 hands its decoder masks in which some tokens see later ones. What they hide differs
between models and releases, so it is read from the masks themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_rope_attn.integrations.transformers.obstacles import implementation_of, is_blind
from fused_rope_attn.masks import intervals_of_dense

Intervals = tuple[Tensor, Tensor]


def dense_masks(config: Any, given: dict[str, Any], length: int) -> dict[str, Tensor] | None:
    """Return the masks of a call by type of layer, "" for all layers; None if one of them can be no intervals.

    Masks have a row for each of the pass's tokens, a column for each, and perhaps more columns for the empty rows of a
    static cache. Eager attention adds them to scores, and SDPA adds them or takes True for visible.
    """
    mask: Any = given.get("attention_mask")
    masks: dict[str, Any] = mask if isinstance(mask, dict) else {"": mask}
    implementation = implementation_of(config)
    if implementation not in ("eager", "sdpa"):
        return None
    for one in masks.values():
        if not isinstance(one, Tensor) or one.ndim != 4 or one.requires_grad:
            return None
        if one.shape[2] != length or one.shape[3] < length:
            return None
        if is_blind(one) or not (one.is_floating_point() or one.dtype == torch.bool and implementation == "sdpa"):
            return None
    return masks


def intervals_by_type(masks: dict[str, Tensor], device: torch.device) -> dict[str, Intervals] | None:
    """Return query_starts and query_ends (1|B, N) int32 of each mask (1|B, 1|HQ, N, K); None if they are not exact.

    Synchronise with the device once. Rows that see no key are padding, which no row may see.
    """
    found: dict[str, Intervals] = {}
    exact = []
    for name, mask in masks.items():
        sees = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool:
            exact.append((sees | (mask <= torch.finfo(mask.dtype).min)).all())
        sees, later = sees.tensor_split([sees.shape[2]], 3)
        starts, ends, is_exact = intervals_of_dense(sees)
        exact += [is_exact, ~later.any(), (sees[:, 0].any(2) | (starts == ends)).all()]
        found[name] = starts.to(device), ends.to(device)
    return found if bool(torch.stack(exact).all()) else None
