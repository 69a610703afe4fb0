"""Balance of the sm_90 backward: key heads that run together, and calls whose tiles of keys are divided."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper.balance import balance
from fused_rope_attn.runtime import device
from fused_rope_attn.testing import make_inputs
from tests.support.cases import TWO_BATCHES
from tests.support.internals import described


def problem_of(monkeypatch, **sizes):
    """Return the problem of a causal call of these sizes, on 132 multiprocessors."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    case = replace(TWO_BATCHES, len_q=1, len_k=1, head_dim=16)
    return described(make_inputs(case), case)[0]._replace(**sizes)


# (B, HQ, HKV, N), key heads that the L2 holds, those that run together, and whether tiles are divided.
CALLS = [
    ((2, 32, 8, 4096), 4, 4, False),
    ((1, 32, 8, 16384), 1, 1, False),
    # The last head would end late: its first tile takes as long as two of its later ones together.
    ((1, 32, 8, 8192), 1, 2, False),
    ((2, 64, 8, 4096), 2, 4, False),
    ((1, 40, 8, 4096), 3, 8, False),
    ((8, 64, 8, 1024), 4, 16, False),
    # There are too few tiles.
    ((1, 28, 4, 4096), 2, 4, True),
    ((1, 8, 1, 8192), 1, 1, True),
    # Too little to gain.
    ((1, 4, 4, 300), 4, 4, False),
    # So many tiles even out.
    ((2, 64, 64, 1024), 32, 32, False),
]


@pytest.mark.parametrize("call, section, together, divides", CALLS, ids=str)
def test_balance(call, section, together, divides, monkeypatch):
    batch, heads_q, heads_kv, length = call
    sizes = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": length, "len_k": length}
    problem = problem_of(monkeypatch, **sizes)
    assert balance(problem, 128, section) == (together, divides)
    # The order of dQ is fixed, or the lengths of tiles are known to the GPU alone.
    for changes in ({"deterministic": True}, {"has_kv_lens": True}, {"sequences": 2}, {"has_intervals": True}):
        assert balance(problem._replace(**changes), 128, section) == (section, False)
    # Every tile has as many query blocks without a mask, and nearly so with a window.
    for changes in ({"causal": False}, {"window": (512, 0)}):
        if batch * heads_kv * length // 128 > 2 * 132:
            assert not balance(problem._replace(**changes), 128, section)[1]


@pytest.mark.parametrize("heads_kv", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [512, 1000, 2048, 3000, 4096])
def test_programs_end_in_time_or_are_divided(heads_kv, length, monkeypatch):
    """Whatever is not divided ends within 10 % of the mean, or a few query blocks after it."""
    sizes = {"batch": 2, "heads_q": 8 * heads_kv, "heads_kv": heads_kv, "len_q": length, "len_k": length}
    section, divides = balance(problem_of(monkeypatch, **sizes), 128, 1)
    assert 1 <= section <= 2 * heads_kv
    assert not divides or section == 2 * heads_kv
    visits = [-(-length // 64) - tile * 2 for tile in range(-(-length // 128))]
    free = [0] * 132
    for first in range(0, 2 * heads_kv, section):
        for work in visits:
            for _ in range(first, min(first + section, 2 * heads_kv)):
                free[free.index(min(free))] += work
    late = max(free) > 1.1 * max(2 * heads_kv * sum(visits) / 132, 8) + 1
    assert late is divides
