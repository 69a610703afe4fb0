"""The record of a call: what launches are prepared for, and its way through an operator's schema and back."""

from dataclasses import replace

from fused_rope_attn.attention.problem import flatten, rebuild
from tests.support.attention import TWO_BATCHES, packed
from tests.support.internals import described
from verification.testing import make_inputs


def test_heads_share_a_section_by_the_longest_sequence():
    """Not by all tokens; as a power of two, so that batches of about the same lengths share their launches."""
    case = packed((300, 300))
    problem, _ = described(make_inputs(case), case)
    launched = problem.for_launch()
    assert launched.longest(10**6) == 512 and launched.longest(400) == 400
    assert launched == problem._replace(max_seqlen=511).for_launch() != problem._replace(max_seqlen=513).for_launch()
    case = replace(TWO_BATCHES, window=(5, 0))
    assert described(make_inputs(case), case)[0].longest(10**6) == 10**6


def test_records_survive_the_schema():
    masked = replace(TWO_BATCHES, window=(5, 3), softcap=2.0, sinks=True, kv_starts=(0, 3), kv_lens=(9, 70))
    for case in (TWO_BATCHES, masked, packed((30, 0, 7))):
        problem, tensors = described(make_inputs(case), case, strategy="prepass", backend="triton")
        again, same = rebuild(*flatten(problem, tensors))
        assert again == problem and all(x is y for x, y in zip(same, tensors))


def test_a_window_that_hides_nothing_is_none():
    case = replace(TWO_BATCHES, window=(-1, -1))
    problem, _ = described(make_inputs(case), case)
    assert problem.window is None and not problem.has_masks
