"""The number of programs of the sm_90 backward that divide a group of query heads."""

import pytest

from fused_rope_attn.attention.hopper.backward import parts_of_group
from fused_rope_attn.runtime import device
from tests.support.internals import described
from verification.testing import Case, make_inputs


@pytest.mark.parametrize(
    ("sizes", "changes", "parts"),
    [
        ((2, 32, 8, 4096), {}, 1),
        # Four heads in a part, or parts of equal size.
        ((1, 64, 8, 8192), {}, 2),
        ((2, 48, 8, 4096), {}, 2),
        ((1, 128, 8, 4096), {}, 4),
        ((2, 40, 8, 4096), {}, 4),
        ((2, 28, 4, 4096), {}, 4),
        # Few programs: at least one for each multiprocessor, or one for each head.
        ((1, 8, 1, 8192), {}, 4),
        ((1, 8, 1, 4096), {}, 8),
        ((1, 64, 8, 1024), {}, 4),
        ((1, 16, 4, 2048), {}, 4),
        ((1, 4, 4, 1024), {}, 1),
        # The order of dQ is fixed, or the device divides tiles.
        ((1, 8, 1, 4096), {"deterministic": True}, 1),
        ((1, 8, 1, 4096), {"has_intervals": True}, 1),
        # Equal tiles are divided for more programs only.
        ((1, 128, 8, 4096), {"causal": False}, 1),
        ((1, 128, 8, 1024), {"causal": False}, 4),
        ((1, 64, 8, 16384), {"window": (4096, 0)}, 2),
        ((1, 64, 8, 16384), {"window": (4095, 0)}, 1),
        ((1, 64, 8, 16384), {"window": (4000, 96), "causal": False}, 2),
        ((1, 64, 8, 16384), {"window": (4000, 95), "causal": False}, 1),
    ],
)
def test_parts(sizes, changes, parts, monkeypatch):
    """On a card of 132 multiprocessors."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    case = Case(1, 1, 1, 1, 1, 16)
    batch, heads_q, heads_kv, length = sizes
    changes = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": length, "len_k": length} | changes
    problem = described(make_inputs(case), case)[0]._replace(**changes)
    tiles = batch * heads_kv * -(-length // 128)
    assert parts_of_group(problem, tiles, problem.group_size * 1024) == parts  # bytes of a row of a head of 128 columns
