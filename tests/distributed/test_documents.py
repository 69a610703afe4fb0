"""Packed documents over several ranks: cut wherever the chunks end, against float64, and dealt by their work."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from fused_rope_attn.distributed.documents import Costs, DocumentPlan, deal, pairs_of
from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.distributed.layout import check_sharding, chunks_of, owners_of
from tests.support.context_parallel import balanced, judge, refused_plan
from verification.context_parallel import attend, joined
from verification.testing import Case

# Documents of one token, empty ones, one over several chunks, and ends that are those of chunks; 6 tokens of no one.
LENGTHS = (1, 17, 0, 6, 12, 3, 21)
PACKED = Case(1, 4, 2, 66, 66, 16, dtype=torch.float32, seqlens=tuple((n, n) for n in LENGTHS))
WHOLE = replace(PACKED, len_q=60, len_k=60)
ROWS = [
    ((0, 1, 2), WHOLE, {}),
    ((0, 1, 2), PACKED, {}),
    ((0, 2, 3), replace(PACKED, sinks=True, window=(4, 0)), {"sharding": "contiguous"}),
    ((0, 1), replace(WHOLE, dtype=torch.float16, softcap=4.0, sinks=True), {"method": "all_to_all"}),
    ((0, 1, 2), replace(PACKED, causal=False), {}),
    ((0, 1, 2), replace(WHOLE, causal=False, window=(3, 2), tables="random"), {}),
    ((0, 1, 2), replace(PACKED, seqlens=((66, 66),)), {}),
    # Chunks that are adjacent, that have no document in common, and three of one document.
    ((0, 1), PACKED, {"sharding": "dealt:0,1,1,0,0,1"}),
    ((0, 1), replace(PACKED, seqlens=((66, 66),)), {"sharding": "dealt:0,1,0,1,0,1"}),
    ((0, 2, 3), replace(WHOLE, causal=False, window=(9, 4)), {"sharding": "dealt:2,0,0,1,1,0,2,1,2,0,1,2"}),
    ((0, 1), replace(WHOLE, sinks=True), {"sharding": "dealt:1,1,0,0,1,0", "method": "all_to_all"}),
]


@pytest.mark.parametrize(("members", "case", "options"), ROWS, ids=[f"{r} {c.name} {o}" for r, c, o in ROWS])
def test_rows(ranks, members, case, options):
    parts = ranks.results(attend, case, members, "cpu", options, ranks=members)
    judge(case, joined(parts, options.get("sharding", "zigzag")))


def test_a_balanced_plan_says_how_to_cut(ranks):
    for sharding, own in ranks.results(balanced, (0, 1), [0, 2000, 3000, 40000, 65536], ranks=(0, 1)):
        assert sharding.startswith("dealt:")
        assert own > 0.95


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "message"),
    [
        ([1, 8], {}, "cu_seqlens must begin with 0"),
        ([0, 8, 4], {}, "never fall"),
        ([0, 7], {}, "total_tokens must be a multiple of 4 for 2 ranks"),
        ([0, 8], {"total_tokens": 4}, "at least the 8 tokens"),
        ([0, 8], {"sharding": "ring"}, "sharding must be"),
        ([0, 8], {"sharding": "dealt:0,0,0,1"}, "each rank equally often"),
    ],
)
def test_refused_plans(ranks, cu_seqlens, options, message):
    for error in ranks.results(refused_plan, (0, 1), cu_seqlens, options, ranks=(0, 1)):
        assert message in error


MASKS = [(True, None), (True, (5, 0)), (True, (-1, 0)), (False, None), (False, (4, 3)), (False, (-1, 2))]


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_pairs_are_those_that_one_counts(causal, window):
    limits = [0, 1, 1, 18, 24, 50]
    left, right = window or (-1, -1)

    def sees(query, key):
        near = (left < 0 or query - key <= left) and (right < 0 or key - query <= right)
        return near and (key <= query or not causal)

    for begin, end in ((0, 50), (0, 7), (10, 30), (24, 50), (49, 56)):
        counted = sum(
            sees(query, key)
            for first, last in itertools.pairwise(limits)
            for query in range(max(first, begin), min(last, end))
            for key in range(first, last)
        )
        assert pairs_of(limits, begin, end, causal, window) == counted


def documents(total, seed):
    generator, limits = random.Random(seed), [0]
    while limits[-1] < total:
        limits.append(min(total, limits[-1] + int(2 ** generator.uniform(9, 15))))
    return limits


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, (4096, 0)), (False, None)])
def test_dealt_documents_are_balanced(causal, window):
    total = 1 << 17
    for size, seed in itertools.product((2, 3, 4, 8), range(2)):
        padded = -(-total // (16 * size)) * 16 * size
        limits = documents(total, seed)
        sharding = deal(limits, padded, size, causal, window)
        check_sharding("sharding", sharding, size)
        every = [chunks_of(rank, size, sharding) for rank in range(size)]
        costs = Costs(limits, padded, len(owners_of(size, sharding)), causal, window)
        work = [sum(costs.work[c] for c in chunks) for chunks in every]
        found = sum(work) / len(work) / max(work) if any(work) else 1.0
        assert window is not None or found >= 0.93, (size, seed, sharding)  # else calls may cost more
        zigzag = Costs(limits, padded, 2 * size, causal, window)
        least = max(zigzag.of(chunks_of(rank, size, "zigzag")) for rank in range(size))
        assert sharding == "zigzag" or max(map(costs.of, every)) < 0.99 * least
        assert sorted(itertools.chain(*every)) == list(range(len(owners_of(size, sharding))))
        assert len({len(chunks) for chunks in every}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_costs_are_those_of_the_plan(size):
    for seed, (sharding, total) in enumerate(itertools.product(("zigzag", "contiguous", "dealt"), (1 << 15, 3 << 14))):
        limits, total = documents(total, seed), total * size
        if sharding == "dealt":
            sharding = deal(limits, total, size)
        plan = DocumentPlan(torch.tensor(limits), limits, total, Group("nobody's", 0, size), sharding)
        every, costs = plan.work(True, None), Costs(limits, total, len(owners_of(size, sharding)))
        owned = [chunks_of(rank, size, sharding) for rank in range(size)]
        keys, calls = zip(*map(costs.keys_and_calls, owned))
        assert calls == tuple(max(1, len(work.segments)) for work in every.ranks)
        assert max(keys) == every.most_received


def test_zigzag_stays_where_it_is_balanced():
    assert deal([0, 1 << 17], 1 << 17, 4) == "zigzag"  # one document
    assert deal([0], 1 << 17, 4) == "zigzag"  # none
    assert deal([0, 5, 24], 24, 2) == "zigzag"  # chunks shorter than a tile are not worth it


@pytest.mark.parametrize("sharding", ["dealt:", "dealt:0,1,1", "dealt:0,2", "dealt:0,x", "dealt:0,0", "ring"])
def test_wrong_shardings(sharding):
    with pytest.raises(ValueError, match="sharding"):
        check_sharding("sharding", sharding, 2)
