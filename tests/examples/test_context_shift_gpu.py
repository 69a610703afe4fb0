"""examples/context_shift.py on a GPU, in bfloat16."""

import pytest
import torch

from examples.context_shift import stream

pytestmark = pytest.mark.gpu


def test_the_example_of_context_shifting():
    shifts, worst = stream(120, "cuda", torch.bfloat16)
    assert shifts == 3 and worst < 2e-2
