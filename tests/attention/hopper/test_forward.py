"""The calls in which the sm_90 forward skips the masked half of diagonal blocks: those with a plain causal mask."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper.forward import is_aligned
from tests.support.internals import described_for_launch
from verification.testing import Case, make_inputs

SQUARE = Case(1, 1, 1, 300, 300, 64)


@pytest.mark.parametrize(
    ("aligned", "changes"),
    [
        (True, {}),
        (True, {"len_q": 44}),
        (True, {"len_k": 428, "softcap": 2.0, "sinks": True}),
        (False, {"len_k": 172}),
        (False, {"len_q": 299}),
        (False, {"causal": False}),
        (False, {"window": (100, 0)}),
        (False, {"kv_lens": (300,)}),
        (False, {"kv_starts": (0,)}),
        (False, {"intervals": "tree"}),
        (False, {"len_q": 384, "len_k": 384, "seqlens": ((128, 128), (256, 256))}),
    ],
)
def test_alignment(aligned, changes):
    case = replace(SQUARE, **changes)
    problem, _ = described_for_launch(make_inputs(case), case)
    assert is_aligned(problem, 128, 128) is aligned
    assert not is_aligned(problem, 192, 128) and not is_aligned(problem, 128, 64)
