"""Arithmetic of times, and interleaving."""

import pytest

from bench.timing import Measurement, interleave, order, ratio


def test_ratios_are_taken_within_rounds():
    # A clock that slows both sides down by half in the last rounds: medians over all rounds would say 1.5.
    assert ratio([1.0, 1.0, 1.5, 1.5, 1.5], [1.0, 1.0, 1.5, 1.5, 1.5]) == 1.0
    measurement = Measurement([[1.0, 3.0, 2.0], [4.0]])
    assert measurement.round_medians == [2.0, 4.0]
    assert measurement.quantiles(0.5, 0.2, 0.8) == pytest.approx([2.5, 1.6, 3.4])


def test_rounds_go_there_and_back():
    names = ["a", "b", "c", "d", "e"]
    rounds = [order(names, index) for index in range(6)]
    assert all(sorted(one) == names for one in rounds)
    assert all(rounds[i + 1] == rounds[i][::-1] for i in (0, 2, 4)) and rounds[0] != rounds[2]


def test_interleave_changes_the_order_and_drops_who_fails():
    def run(fns, rounds, fail_after=None):
        order = []

        def sample(fn, calls):
            order.append(fn())
            if fn() == "bad" and fail_after is not None and len(order) > fail_after:
                raise RuntimeError("broke")
            return [1.0] * calls

        return order, *interleave(fns, sample, dict.fromkeys(fns, 2), rounds)

    names = ["a", "b", "c", "d", "e"]
    order, _, _ = run({name: lambda name=name: name for name in names}, 6)
    rounds = [order[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(one) == names for one in rounds)
    predecessors = {one[i - 1] for one in rounds for i in range(1, 5) if one[i] == "a"}
    assert len(predecessors) > 1, "a always follows the same neighbour"
    assert order == run({name: lambda name=name: name for name in names}, 6)[0], "a run can be repeated"

    fns = {name: lambda name=name: name for name in ("a", "bad", "c")}
    order, measured, failed = run(fns, 3, fail_after=3)
    assert order.count("bad") == 2  # a sample in the first round, the failure in the second, none after it
    assert list(failed) == ["bad"]
    assert measured["c"].rounds == [[1.0, 1.0]] * 3
