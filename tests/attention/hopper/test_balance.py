"""Balance of the sm_90 backward: parts of a group of query heads, and groups that run together."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn.attention.hopper.balance import balance, count_query_blocks, last_end, parts_of_group
from fused_rope_attn.runtime import device
from tests.support.cases import TWO_BATCHES
from tests.support.internals import described
from verification.testing import make_inputs

MIB = 1 << 20
ROW = 1024  # bytes of Q, dO and dQ in a row of a head of 128 columns


def problem_of(monkeypatch, **sizes):
    """Return the problem of a causal call of these sizes, on an H100: 132 multiprocessors, an L2 of 50 MiB."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    monkeypatch.setattr(device, "l2_bytes", lambda where: 50 * MIB)
    case = replace(TWO_BATCHES, len_q=1, len_k=1, head_dim=16)
    return described(make_inputs(case), case)[0]._replace(**sizes)


def sizes_of(call):
    batch, heads_q, heads_kv, length = call
    return {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": length, "len_k": length}


def balanced(problem, section_bytes=32 * MIB, row_bytes=ROW):
    return tuple(balance(problem, 128, problem.group_size * row_bytes, section_bytes))


# (B, HQ, HKV, N), parts of a group, groups or parts that run together.
CALLS = [
    ((2, 32, 8, 4096), 1, 4),
    ((1, 32, 8, 16384), 1, 1),
    # The last head would end late: its first tile takes as long as two of its later ones together.
    ((1, 32, 8, 8192), 1, 2),
    ((1, 32, 8, 4096), 1, 4),
    # Sections of 64 MiB must save more than those of 60 MiB.
    ((2, 64, 16, 4096), 1, 2),
    ((2, 14, 14, 8192), 1, 4),
    # Large groups: four heads of 128 columns in a part, or parts of equal size.
    ((1, 64, 8, 8192), 2, 2),
    ((8, 64, 8, 1024), 2, 8),
    ((2, 48, 8, 4096), 2, 4),
    ((1, 128, 8, 4096), 4, 2),
    ((2, 40, 8, 4096), 4, 6),
    ((2, 28, 4, 4096), 4, 8),
    # More parts, so that all together do not end late.
    ((1, 8, 1, 8192), 4, 2),
    ((1, 8, 1, 4096), 8, 8),
    ((1, 64, 8, 1024), 4, 16),
    ((1, 16, 4, 2048), 4, 16),
    # Parts of a head's query blocks.
    ((1, 2, 1, 4096), 8, 8),
    ((1, 4, 4, 4096), 2, 8),
    ((1, 8, 1, 1024), 16, 16),
    ((1, 7, 1, 1024), 14, 14),
    ((1, 1, 1, 2048), 8, 8),
    # Too little to gain.
    ((1, 4, 4, 300), 1, 4),
    # So many tiles even out.
    ((2, 64, 64, 1024), 1, 32),
]


@pytest.mark.parametrize("call, parts, section", CALLS, ids=str)
def test_balance(call, parts, section, monkeypatch):
    batch, _, heads_kv, length = call
    problem = problem_of(monkeypatch, **sizes_of(call))
    assert balanced(problem) == (parts, section)
    # The order of dQ is fixed, or the device divides tiles.
    for changes in ({"deterministic": True}, {"has_intervals": True}):
        assert balanced(problem._replace(**changes))[0] == 1
    # The lengths of tiles are known to the GPU alone.
    of_drift = parts_of_group(problem, [4, 3, 2, 1], problem.group_size * ROW)
    assert balanced(problem._replace(has_kv_lens=True))[0] == of_drift
    # Every tile has as many query blocks without a mask, and nearly so with a window.
    for changes in ({"causal": False}, {"window": (512, 0)}):
        if batch * heads_kv * length // 128 > 2 * 132:
            assert balanced(problem._replace(**changes))[0] == 1


@pytest.mark.parametrize(
    "group, row_bytes, parts",
    [(1, 4097, 1), (2, 4096, 1), (2, 4097, 2), (3, 4097, 3), (5, 5120, 4), (6, 6144, 2), (7, 7168, 4), (12, 12288, 3)],
)
def test_parts_have_equal_sizes_or_are_small(group, row_bytes, parts, monkeypatch):
    problem = problem_of(monkeypatch, heads_q=group, heads_kv=1)
    assert parts_of_group(problem, [4, 3, 2, 1], row_bytes) == parts
    # Programs of about the same length do not drift apart.
    assert parts_of_group(problem, [4, 4, 4, 1], row_bytes) == 1


# Heads, tokens, longest sequence, parts of a group, groups or parts that run together.
PACKS = [
    # One sequence, as without packing.
    ((32, 8), 8192, 8192, 1, 2),
    # Two sequences of 8192, one of 16384, two of 4096, four of 4096.
    ((32, 8), 16384, 8192, 1, 2),
    ((32, 8), 16384, 16384, 1, 1),
    ((28, 4), 8192, 4096, 4, 8),
    ((14, 2), 16384, 4096, 4, 4),
    # Eight parts would end earlier, but query blocks of packed sequences are not divided.
    ((1, 1), 2048, 2048, 1, 1),
    ((4, 1), 2048, 2048, 4, 4),
    # The bound of the lengths is larger than the number of tokens.
    ((32, 8), 8192, 65536, 1, 2),
    # So many tiles even out.
    ((32, 8), 32768, 8192, 1, 1),
]


@pytest.mark.parametrize("heads, tokens, longest, parts, together", PACKS, ids=str)
def test_packed_sequences_are_taken_to_be_the_longest(heads, tokens, longest, parts, together, monkeypatch):
    sizes = sizes_of((1, *heads, tokens))
    problem = problem_of(monkeypatch, **sizes, sequences=5, max_seqlen=longest)
    assert balanced(problem) == (parts, together)


def test_many_programs_even_out(monkeypatch):
    """Up to 8 programs for each multiprocessor are simulated."""
    problem = problem_of(monkeypatch, **sizes_of((1, 576, 9, 1024)))
    monkeypatch.setattr(device, "num_sms", lambda where: 9)
    # One or two heads at a time would end 11 % late, three 3 %.
    assert balanced(problem, 0, row_bytes=1) == (1, 3)
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    # 1,080 programs, which end 11 % late.
    assert balanced(problem._replace(**sizes_of((1, 64 * 27, 27, 5120))), 0, row_bytes=1) == (1, 1)


# Calls with a last key head that would end 10, 22 and 48 % late, and the most bytes of two that run together, over the
# L2.
@pytest.mark.parametrize("call, most", [((1, 12, 12, 10240), 1.2), ((1, 8, 8, 8192), 2.2), ((1, 4, 4, 8192), 2.6)])
@pytest.mark.parametrize("l2", [50 * MIB, 60 * MIB])
def test_the_later_a_call_would_end_the_larger_its_sections_may_be(call, most, l2, monkeypatch):
    problem = problem_of(monkeypatch, **sizes_of(call))
    monkeypatch.setattr(device, "l2_bytes", lambda where: l2)
    row = int(most * l2 / 2 / call[-1])
    assert (balance(problem, 128, row, 0), balance(problem, 128, row + 1, 0)) == ((1, 2), (1, 1))


@pytest.mark.parametrize("length, parts", [(192, 1), (256, 2), (448, 2), (512, 4), (896, 4), (960, 8)])
def test_groups_are_divided_until_programs_and_sums_take_more_time(length, parts, monkeypatch):
    """A tile of a head takes 4 query blocks more than it has, and each doubling of the parts 3."""
    assert balanced(problem_of(monkeypatch, **sizes_of((1, 2, 1, length)))) == (parts, parts)


def test_windows_of_4096_keys_divide_groups(monkeypatch):
    problem = problem_of(monkeypatch, **sizes_of((1, 64, 8, 16384)))
    for window, parts in (((4096, 0), 2), ((4095, 0), 1), ((5000, 0), 2), ((4000, 96), 2), ((4000, 95), 1)):
        assert balanced(problem._replace(window=window, causal=window[1] == 0))[0] == parts


@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (40, 0), (65, 0), (7, 25), (300, 70), (-1, 30), (-1, 64), (64, -1)], ids=str
)
@pytest.mark.parametrize("rows, keys", [(300, 300), (320, 320), (100, 500), (500, 100), (257, 1030)])
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
    """Parts with one head each, or with one and two, and tiles of 9 and 1 query blocks, on two multiprocessors."""
    assert last_end([9, 1], [1] * 3, 1, 2) == 13 + 5 + 13  # 13, 5 | 13, 5 | 13, 5
    assert last_end([9, 1], [1] * 3, 3, 2) == 13 + 5 + 5 + 5  # 13, 13, 13 | 5, 5, 5
    assert last_end([9, 1], [1] * 3, 2, 2) == 13 + 5 + 13  # 13, 13, 5, 5 | 13, 5
    assert last_end([9, 1], [1, 2], 2, 2) == 13 + 5 + 6  # 13, 22, 5, 6


def simulated(lengths, groups, group_size, parts):
    """Return the end of a call, in query blocks, if all parts run together."""
    free = [0] * 132
    for length in lengths:
        for part in range(groups * parts):
            number = part % parts
            heads = max(1, group_size * (number + 1) // parts - group_size * number // parts)
            free[free.index(min(free))] += 4 + heads * -(-length // max(1, parts // group_size))
    return max(free) + 3 * math.ceil(math.log2(parts))


@pytest.mark.parametrize("group_size", [1, 7, 8])
@pytest.mark.parametrize("heads_kv", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [512, 1000, 2048, 3000, 4096])
def test_no_other_number_of_parts_ends_much_earlier(heads_kv, group_size, length, monkeypatch):
    sizes = sizes_of((2, group_size * heads_kv, heads_kv, length))
    parts, section = balanced(problem_of(monkeypatch, **sizes), 0, row_bytes=1)
    assert 1 <= section <= 2 * heads_kv * parts
    lengths = [-(-length // 64) - tile * 2 for tile in range(-(-length // 128))]
    end = simulated(lengths, 2 * heads_kv, group_size, parts)
    numbers = {1, 2, 4, group_size, 2 * group_size, 4 * group_size, 8 * group_size}
    for other in numbers:
        if other > parts and len(lengths) * 2 * heads_kv * other <= 8 * 132:
            assert end < 1.05 * simulated(lengths, 2 * heads_kv, group_size, other)
