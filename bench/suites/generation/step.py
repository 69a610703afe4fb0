"""What every provider of a step of generation gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """q (B, HQ, 1, D), k and v (B, HKV, 1, D), caches (B, HKV, S, D), lengths (B,) int32, tables (S, D/2)."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def bytes(self) -> int:
        """What must be read: keys and values once. All else is a thousandth of it."""
        heads, head_dim = self.k.shape[1], self.k.shape[3]
        return 2 * int((self.lengths + 1).sum()) * heads * head_dim * self.k.element_size()


Run = Callable[[], Tensor]
