"""Guards say whether tensors are of the kinds that others were, by PyTorch's own and without them."""

import pytest
import torch

from tests.support.internals import GUARDS

X, Y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.float16)
OTHERS = {
    "shape": torch.zeros(3, 3),
    "rank": torch.zeros(2, 3, 1),
    "strides": torch.zeros(3, 2).t(),
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "device": torch.zeros(2, 3, device="meta"),
    "gradient": torch.zeros(2, 3, requires_grad=True),
    "class": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
}


@pytest.fixture(params=GUARDS)
def guard(request):
    return GUARDS[request.param]


def test_the_same_kinds(guard):
    matches = guard([X, Y])
    assert matches(X, Y) and matches(X + 1, Y[:].clone())


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind(guard, what):
    other = OTHERS[what]
    assert not guard([Y, X])(Y, other) and not guard([other, Y])(X, Y)
    assert guard([other, Y])(other, Y)


def test_a_tensor_that_comes_twice(guard):
    assert guard([X, X])(X, X) and not guard([X, X])(X, Y)


def test_the_guard_of_compiled_graphs_is_used():
    """This release of PyTorch has it, and it is the one that is taken."""
    assert type(GUARDS["chosen"]([X, Y])).__name__ == "builtin_function_or_method"
