"""NaN in memory that nothing has written yet."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fused_rope_attn.runtime import device

# torch.empty of more elements is left as it is: poisoning would make the pages of a sparse allocation real.
_POISON_LIMIT = 1 << 28


@contextmanager
def wrap_empty(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Replace `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` by ``wrap`` of each, inside, and the
    allocations of replays."""
    targets = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]
    targets += [(device, "empty_on_cpu"), (device, "empty_on_gpu")]
    with ExitStack() as replaced:
        for owner, name in targets:
            replaced.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


@contextmanager
def poison_empty() -> Iterator[None]:
    """Inside, `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return NaN where they return floats,
    so that an output element which nothing wrote shows. Allocations beyond 2^28 elements are left alone."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.numel() <= _POISON_LIMIT:
                with torch.no_grad():
                    x.fill_(math.nan)
            return x

        return allocate_nan

    with wrap_empty(poisoned):
        yield
