"""examples/context_shift.py: a stream that is longer than its cache."""

from examples.context_shift import stream


def test_the_example_of_context_shifting():
    shifts, worst = stream(120)
    assert shifts == 3 and worst < 1e-5
