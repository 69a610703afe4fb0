"""Balance of the sm_90 backward: key heads that run together, and calls with divided tiles of keys."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.attention.hopper.balance import balance, count_query_blocks, last_end
from fused_rope_attn.runtime import device
from fused_rope_attn.testing import make_inputs
from tests.support.cases import TWO_BATCHES
from tests.support.internals import described


def problem_of(monkeypatch, **sizes):
    """Return the problem of a causal call of these sizes, on 132 multiprocessors."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    case = replace(TWO_BATCHES, len_q=1, len_k=1, head_dim=16)
    return described(make_inputs(case), case)[0]._replace(**sizes)


MIB = 1 << 20
# (B, HQ, HKV, N), key heads in a section, bytes of a key head, key heads that run together, whether tiles are divided.
CALLS = [
    ((2, 32, 8, 4096), 4, 16 * MIB, 4, False),
    ((1, 32, 8, 16384), 1, 64 * MIB, 1, False),
    # The last head would end late: its first tile takes as long as two of its later ones together.
    ((1, 32, 8, 8192), 1, 32 * MIB, 2, False),
    ((2, 64, 8, 4096), 2, 16 * MIB, 4, False),
    ((1, 40, 8, 4096), 3, 10 * MIB, 8, False),
    ((8, 64, 8, 1024), 4, 6 * MIB, 16, False),
    # No section is larger than 96 MiB.
    ((2, 64, 8, 4096), 2, 32 * MIB, 2, False),
    ((8, 64, 8, 1024), 4, 6 * MIB + 1, 8, False),
    # ... or than 128 MiB, if the last head would end very late.
    ((1, 40, 8, 4096), 3, 16 * MIB, 8, False),
    ((1, 40, 8, 4096), 3, 16 * MIB + 1, 6, False),
    # There are too few tiles.
    ((1, 28, 4, 4096), 2, 14 * MIB, 2, True),
    ((1, 28, 4, 4096), 2, 28 * MIB, 2, True),
    ((1, 8, 1, 8192), 1, 64 * MIB, 1, True),
    # Too little to gain.
    ((1, 4, 4, 300), 4, MIB, 4, False),
    # So many tiles even out.
    ((2, 64, 64, 1024), 32, MIB, 32, False),
]


@pytest.mark.parametrize("call, section, head_bytes, together, divides", CALLS, ids=str)
def test_balance(call, section, head_bytes, together, divides, monkeypatch):
    batch, heads_q, heads_kv, length = call
    sizes = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": length, "len_k": length}
    problem = problem_of(monkeypatch, **sizes)
    assert balance(problem, 128, section, head_bytes) == (together, divides)
    # The order of dQ is fixed, or the lengths of tiles are known to the GPU alone.
    for changes in ({"deterministic": True}, {"has_kv_lens": True}, {"has_intervals": True}):
        assert balance(problem._replace(**changes), 128, section, head_bytes) == (section, False)
    # Every tile has as many query blocks without a mask, and nearly so with a window.
    for changes in ({"causal": False}, {"window": (512, 0)}):
        if batch * heads_kv * length // 128 > 2 * 132:
            assert not balance(problem._replace(**changes), 128, section, head_bytes)[1]


# Heads, tokens, longest sequence, key heads in a section, bytes of a key head, key heads that run together.
PACKS = [
    # One sequence, as without packing.
    ((32, 8), 8192, 8192, 1, 32 * MIB, 2),
    # Two sequences of 8192, one of 16384, two of 4096, four of 4096.
    ((32, 8), 16384, 8192, 1, 32 * MIB, 2),
    ((32, 8), 16384, 16384, 1, 64 * MIB, 1),
    ((28, 4), 8192, 4096, 2, 28 * MIB, 4),
    ((14, 2), 16384, 4096, 1, 28 * MIB, 2),
    # All heads together end late too, but tiles of packed sequences are not divided.
    ((28, 4), 4096, 4096, 2, 28 * MIB, 4),
    ((14, 2), 8192, 1024, 1, MIB, 2),
    # The bound of the lengths is larger than the number of tokens.
    ((32, 8), 8192, 65536, 1, 32 * MIB, 2),
    # So many tiles even out.
    ((32, 8), 32768, 8192, 1, 32 * MIB, 1),
]


@pytest.mark.parametrize("heads, tokens, longest, section, head_bytes, together", PACKS, ids=str)
def test_packed_sequences_are_taken_to_be_the_longest(
    heads, tokens, longest, section, head_bytes, together, monkeypatch
):
    sizes = {"batch": 1, "heads_q": heads[0], "heads_kv": heads[1], "len_q": tokens, "len_k": tokens}
    problem = problem_of(monkeypatch, **sizes, sequences=5, max_seqlen=longest)
    assert balance(problem, 128, section, head_bytes) == (together, False)


def test_many_programs_even_out(monkeypatch):
    """Up to 8 programs for each multiprocessor are simulated."""
    sizes = {"batch": 1, "heads_q": 576, "heads_kv": 9, "len_q": 1024, "len_k": 1024}
    problem = problem_of(monkeypatch, **sizes)
    monkeypatch.setattr(device, "num_sms", lambda where: 9)
    # One or two heads at a time end after 80 query blocks instead of 72.
    assert balance(problem, 128, 1, 1) == (4, False)
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    sizes = {"heads_q": 64 * 32, "heads_kv": 32, "len_q": 5120, "len_k": 5120}
    assert balance(problem._replace(**sizes), 128, 1, 1) == (1, False)  # 1,280 programs, which end 11 % late


# MiB of the L2 of an H100 and an H200, and whether two key heads of up to 64 MiB run together if one ends 24 % late.
@pytest.mark.parametrize("l2, holds_two", [(50, False), (60, True)])
def test_a_large_l2_or_a_very_late_end_asks_for_larger_sections(l2, holds_two, monkeypatch):
    monkeypatch.setattr(device, "l2_bytes", lambda where: l2 * MIB)
    late = {"batch": 1, "heads_q": 64, "heads_kv": 8, "len_q": 8192, "len_k": 8192}
    very_late = {**late, "heads_q": 28, "heads_kv": 4}  # 48 %
    for sizes, together in ((late, 2 if holds_two else 1), (very_late, 2)):
        problem = problem_of(monkeypatch, **sizes)
        assert balance(problem, 128, 1, 49 * MIB) == (together, False)
        assert balance(problem, 128, 1, 64 * MIB) == (together, False)
        assert balance(problem, 128, 1, 64 * MIB + 1) == (1, False)


@pytest.mark.parametrize(
    "group_size, length, divides", [(1, 1024, False), (1, 1088, True), (2, 512, False), (2, 576, True)]
)
def test_the_gain_must_pay_for_two_launches(group_size, length, divides, monkeypatch):
    """A share has 8 query blocks of a head at least. Tiles are divided if this saves as many, less 10 %."""
    sizes = {"batch": 1, "heads_q": group_size, "heads_kv": 1, "len_q": length, "len_k": length}
    assert balance(problem_of(monkeypatch, **sizes), 128, 1, 1) == (1, divides)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0), (7, 25), (300, 70), (-1, 30), (64, -1)])
@pytest.mark.parametrize("rows, keys", [(300, 300), (100, 500), (500, 100), (257, 1030)])
@pytest.mark.parametrize("block_n", [64, 128])
def test_query_blocks_of_a_tile_are_those_that_see_its_keys(rows, keys, window, block_n, monkeypatch):
    problem = problem_of(monkeypatch, len_q=rows, len_k=keys, causal=window[1] == 0, window=window)
    row, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    left, right = (bound if bound >= 0 else 10**6 for bound in window)
    sees = (key >= row - left) & (key <= row + right)
    for first in range(0, keys, block_n):
        blocks = sees[:, first : first + block_n].any(1).split(64)
        assert count_query_blocks(problem, first, block_n) == sum(bool(block.any()) for block in blocks)


def test_programs_start_in_their_order():
    """Programs of 3 and 1 query blocks for each of three heads, on two multiprocessors."""
    assert last_end([3, 1], 3, 1, 2) == 7  # 3, 1 | 3, 1 | 3, 1
    assert last_end([3, 1], 3, 3, 2) == 6  # 3, 3, 3 | 1, 1, 1
    assert last_end([3, 1], 3, 2, 2) == 7  # 3, 3, 1, 1 | 3, 1


@pytest.mark.parametrize("heads_kv", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [512, 1000, 2048, 3000, 4096])
def test_programs_end_in_time_or_are_divided(heads_kv, length, monkeypatch):
    """Whatever is not divided ends within 10 % of the mean, or a few query blocks after it."""
    sizes = {"batch": 2, "heads_q": 8 * heads_kv, "heads_kv": heads_kv, "len_q": length, "len_k": length}
    section, divides = balance(problem_of(monkeypatch, **sizes), 128, 1, 1)
    assert 1 <= section <= 2 * heads_kv
    if divides:
        assert section == 1
        section = 2 * heads_kv
    visits = [-(-length // 64) - tile * 2 for tile in range(-(-length // 128))]
    free = [0] * 132
    for first in range(0, 2 * heads_kv, section):
        for work in visits:
            for _ in range(first, min(first + section, 2 * heads_kv)):
                free[free.index(min(free))] += work
    late = max(free) > 1.1 * max(2 * heads_kv * sum(visits) / 132, 1) + 1  # groups of 8
    assert late is divides
