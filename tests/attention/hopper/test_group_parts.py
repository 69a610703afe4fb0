"""How many programs of the sm_90 backward divide a group of query heads."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper.backward import parts_of_group
from fused_rope_attn.runtime import device
from tests.support.cases import TWO_BATCHES
from tests.support.internals import described
from verification.testing import make_inputs


@pytest.fixture
def problem(monkeypatch):
    """The problem of a causal call on a card of 132 multiprocessors."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    case = replace(TWO_BATCHES, len_q=1, len_k=1, head_dim=16)
    return described(make_inputs(case), case)[0]


def parts_of(problem, batch, heads_q, heads_kv, length, **changes):
    problem = problem._replace(batch=batch, heads_q=heads_q, heads_kv=heads_kv, len_q=length, len_k=length, **changes)
    tiles = batch * heads_kv * -(-length // 128)
    return parts_of_group(problem, tiles, problem.group_size * 1024)  # bytes of a row of a head of 128 columns


@pytest.mark.parametrize(
    "call, parts",
    [
        ((2, 32, 8, 4096), 1),
        # Four heads in a part, or parts of equal size.
        ((1, 64, 8, 8192), 2),
        ((2, 48, 8, 4096), 2),
        ((1, 128, 8, 4096), 4),
        ((2, 40, 8, 4096), 4),
        ((2, 28, 4, 4096), 4),
        # Few programs: at least one for each multiprocessor, or one for each head.
        ((1, 8, 1, 8192), 4),
        ((1, 8, 1, 4096), 8),
        ((1, 64, 8, 1024), 4),
        ((1, 16, 4, 2048), 4),
        ((1, 32, 8, 1024), 4),
        ((1, 4, 4, 1024), 1),
    ],
)
def test_parts(problem, call, parts):
    assert parts_of(problem, *call) == parts
    # The order of dQ is fixed, or the device divides tiles.
    assert parts_of(problem, *call, deterministic=True) == parts_of(problem, *call, has_intervals=True) == 1


def test_equal_tiles_are_divided_for_more_programs_only(problem):
    assert parts_of(problem, 1, 128, 8, 4096, causal=False) == 1
    assert parts_of(problem, 1, 128, 8, 1024, causal=False) == 4
    for window, parts in (((4096, 0), 2), ((4095, 0), 1), ((4000, 96), 2), ((4000, 95), 1)):
        assert parts_of(problem, 1, 64, 8, 16384, window=window, causal=window[1] == 0) == parts
