"""Guards: one fast comparison of the classes, dtypes, devices, shapes and strides of several tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors that returns whether they are of the same kinds as these, one by one.

    It may wrongly return False if a tensor is given twice, or under another state of the dispatcher.
    """
    if _compiled_guards_work():
        found = _compiled_guard(tensors)
        if found(*tensors):  # False if a tensor is given twice
            return found
    return _python_guard(tensors)


def _python_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    kinds = _kinds(tensors)
    return lambda *others: _kinds(others) == kinds


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    return [(type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad) for x in tensors]


def _compiled_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return the guard that graphs of torch.compile use: one call into C++, ten times as fast as Python."""
    guards = torch._C._dynamo.guards.TensorGuards  # a private name
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]


@functools.cache
def _compiled_guards_work() -> bool:
    """Return whether this release of PyTorch has the compiled guards, and their answers are right."""
    x, y = torch.zeros(2, 3), torch.zeros(3)
    others = (x[:1], x.double(), torch.zeros(3, 2).t(), torch.nn.Parameter(x), x.to("meta"))
    try:
        found = _compiled_guard((x, y))
        return found(x + 1, y + 1) and not any(found(other, y) for other in others)
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return False
