"""The calls in which the sm_90 forward skips the masked half of diagonal blocks: those with a plain causal mask."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper.forward import is_aligned
from tests.support.internals import described_for_launch
from verification.testing import Case, make_inputs

SQUARE = Case(1, 1, 1, 300, 300, 64)


@pytest.mark.parametrize(
    "aligned, case",
    [
        (True, SQUARE),
        (True, replace(SQUARE, len_q=44)),
        (True, replace(SQUARE, len_k=428, softcap=2.0, sinks=True)),
        (False, replace(SQUARE, len_k=172)),
        (False, replace(SQUARE, len_q=299)),
        (False, replace(SQUARE, causal=False)),
        (False, replace(SQUARE, window=(100, 0))),
        (False, replace(SQUARE, kv_lens=(300,))),
        (False, replace(SQUARE, kv_starts=(0,))),
        (False, replace(SQUARE, intervals="tree")),
    ],
)
def test_alignment(aligned, case):
    problem, _ = described_for_launch(make_inputs(case), case)
    assert is_aligned(problem, 128, 128) is aligned
    assert not is_aligned(problem, 192, 128) and not is_aligned(problem, 128, 64)


def test_packed_sequences():
    case = Case(1, 1, 1, 0, 0, 64, seqlens=((128, 128), (256, 256)))
    problem, _ = described_for_launch(make_inputs(case), case)
    assert not is_aligned(problem, 128, 128)
