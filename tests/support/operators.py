"""A small call with every mask, for the tests of operators, autograd, autocast and torch.compile."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.marks import interpreted
from verification.testing import Case

# Masks for two batch entries of two query heads.
MASKS = {
    "window": (3, 0),
    "softcap": 20.0,
    "sinks": torch.tensor([0.5, -0.5]),
    "kv_starts": torch.tensor([0, 2], dtype=torch.int32),
    "kv_lens": torch.tensor([9, 5], dtype=torch.int32),
}
SMALL = Case(2, 2, 1, 7, 9, 16, dtype=torch.float32)


def assert_close(xs, ys, tolerance=1e-5):
    """Tensor by tensor, relative and absolute."""
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def kernel_or_reference(*names):
    """Repeat a test for these backends; the kernels need the interpreter."""
    marks = {"triton": interpreted, "reference": ()}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=marks[name]) for name in names])


class Record(TorchDispatchMode):
    """Notes every operator that reaches the dispatcher, in ``operators``."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(str(function))
        return function(*args, **(kwargs or {}))
