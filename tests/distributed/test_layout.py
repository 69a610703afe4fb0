"""Cuts as integers: every row once with every key that it sees, shards and labels, documents dealt by their work."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fused_rope_attn.distributed import cp_positions, cp_shard, cp_shift_labels, cp_unshard, plan_varlen_cp
from fused_rope_attn.distributed.documents import Costs, DocumentPlan, deal, pairs_of
from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.distributed.layout import check_sharding, chunks_of, owners_of, work_of
from tests.support.context_parallel import with_group
from verification.ranks import group_of

SIDE = st.integers(-1, 9) | st.just(300)
MASKS = st.tuples(st.booleans(), st.none() | st.tuples(SIDE, SIDE))


def sees(query, key, causal, window):
    left, right = window or (-1, -1)
    near = (left < 0 or query - key <= left) and (right < 0 or key - query <= right)
    return near and (key <= query or not causal)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_row_once_and_all_that_it_sees(data):
    size, chunk = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((1, 3, 70)))
    dealt = {2: ("dealt:0,1,1,0,0,1",), 3: ("dealt:2,2,0,1,0,1",)}.get(size, ())
    sharding = data.draw(st.sampled_from(("zigzag", "contiguous", *dealt)))
    length = chunk * len(owners_of(size, sharding))
    total, (causal, window) = data.draw(st.integers(0, length) | st.just(length)), data.draw(MASKS)
    window = None if window is None or max(window) < 0 else (window[0], 0 if causal else window[1])
    owned = [chunks_of(rank, size, sharding) for rank in range(size)]
    every = work_of(size, sharding, chunk * len(owned[0]), total, causal, window)
    buffers = [
        [run.chunk * chunk + run.first + row for run in work.buffer for row in range(run.rows)] for work in every.ranks
    ]
    served = []
    for rank, (work, buffer) in enumerate(zip(every.ranks, buffers)):
        assert [owners_of(size, sharding)[c] for c in owned[rank]] == [(rank, i) for i in range(len(owned[rank]))]
        assert len(buffer) == work.length == len(set(buffer))
        # Each row is the rank's own, or arrives once from its owner.
        arrived = [row for row in buffer if row // chunk in owned[rank]]
        for (sender, receiver), messages in every.messages.items():
            for message in messages if receiver == rank else ():
                sent = buffers[sender][message.sent :][: message.rows]
                assert sent == buffer[message.received :][: message.rows]
                assert all(row // chunk in owned[sender] for row in sent)
                arrived += sent
        assert sorted(arrived) == sorted(buffer)
        positions = [c * chunk + row for c in owned[rank] for row in range(chunk)]
        for segment in work.segments:
            keys = buffer[segment.keys[0] : segment.keys[1]]
            assert segment.position is None or keys == list(range(segment.position, segment.position + len(keys)))
            # The last query of a call is at its last key.
            stands = keys[len(keys) - segment.queries : len(keys) - segment.padding]
            assert stands == positions[segment.rows[0] : segment.rows[1]]
            served += stands
            for query in stands:
                assert {key for key in range(total) if sees(query, key, causal, window)} <= set(keys)
    assert sorted(served) == list(range(total))


def test_narrow_windows_need_few_keys():
    every = work_of(4, "zigzag", 2 * 512, 8 * 512, True, (100, 0))
    for rank, work in enumerate(every.ranks):
        own = chunks_of(rank, 4, "zigzag")
        expected = {c: (256, 256) for mine in own for c in (mine - 1,) if c >= 0} | dict.fromkeys(own, (0, 512))
        assert {run.chunk: (run.first, run.rows) for run in work.buffer} == expected
        local = [every.is_local(rank, segment) for segment in work.segments]
        assert local == {0: [True, False], 3: [False, True]}.get(rank, [False, False])
    # Chunk 1 begins with query 512. The window of this query, 257 keys, begins in the first block.
    assert work_of(4, "zigzag", 2 * 512, 8 * 512, True, (257, 0)).ranks[1].buffer[0][:3] == (0, 0, 512)


def cut_and_join(ranks, whole, weights, sharding):
    cut = {"group": group_of(ranks), "sharding": sharding}
    x = whole.clone().requires_grad_()
    shard = cp_shard(x, 1, **cut)
    joined = cp_unshard(shard, -2, **cut)
    (joined * weights[cut["group"].rank()]).sum().backward()
    return shard.detach(), joined.detach(), x.grad


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2, 3), (1, 3)])
def test_cut_and_join(ranks, sharding, members):
    whole = torch.randn(3, 24, 2)
    weights = [torch.randn(3, 24, 2) for _ in members]
    found = ranks.results(cut_and_join, members, whole, weights, sharding, ranks=members)
    chunk = 24 // (2 * len(members))
    for rank, (shard, joined, gradient) in enumerate(found):
        first, last = (rank, 2 * len(members) - 1 - rank) if sharding == "zigzag" else (2 * rank, 2 * rank + 1)
        rows = [*range(first * chunk, (first + 1) * chunk), *range(last * chunk, (last + 1) * chunk)]
        positions = ranks.results(with_group, members, cp_positions, (24,), {"sharding": sharding}, ranks=members)
        assert positions[rank].tolist() == rows
        assert torch.equal(shard, whole[:, rows]) and torch.equal(joined, whole)
        # The gradient of the sum of all ranks' losses; each rank weighs the joined tensor in its own way.
        expected = torch.zeros_like(whole)
        expected[:, rows] = sum(weights)[:, rows]
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("ends", "first", "second"),
    [
        (None, [1, 2, 3, 4, 13, 14, 15, -100], [5, 6, 7, 8, 9, 10, 11, 12]),
        ([0, 4, 4, 9, 16], [1, 2, 3, -100, 13, 14, 15, -100], [5, 6, 7, 8, -100, 10, 11, 12]),
    ],
)
def test_labels(ranks, ends, first, second):
    given = (torch.arange(16)[None],), {"cu_seqlens": None if ends is None else torch.tensor(ends)}
    parts = ranks.results(with_group, (0, 1), cp_shift_labels, *given, ranks=(0, 1))
    assert [part.tolist() for part in parts] == [[first], [second]]


def test_a_balanced_plan_says_how_to_cut(ranks):
    def run(*given):
        return ranks.results(with_group, (0, 1), *given, ranks=(0, 1))

    ends, every = torch.tensor([0, 2000, 3000, 40000, 65536]), torch.arange(65536)
    plan, _ = run(plan_varlen_cp, (ends,), {"sharding": "balanced"})
    assert plan.sharding.startswith("dealt:")
    seen = every - ends[torch.searchsorted(ends, every, right=True) - 1] + 1
    for positions in run(cp_positions, (plan.total,), {"sharding": plan.sharding}):
        assert seen[positions].sum() > 0.475 * seen.sum()


@settings(deadline=None)
@given(MASKS, st.lists(st.integers(0, 50), min_size=2, max_size=6), st.integers(0, 55), st.integers(0, 55))
def test_pairs_are_those_that_one_counts(mask, ends, begin, end):
    causal, (left, right) = mask[0], mask[1] or (-1, -1)
    window, limits = (left, 0 if causal else right), sorted([0, *ends])
    counted = sum(
        sees(query, key, causal, window)
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
        padded, limits = -(-total // (16 * size)) * 16 * size, documents(total, seed)
        sharding = deal(limits, padded, size, causal, window)
        check_sharding("sharding", sharding, size)
        every = [chunks_of(rank, size, sharding) for rank in range(size)]
        costs = Costs(limits, padded, len(owners_of(size, sharding)), causal, window)
        work = [sum(costs.work[c] for c in chunks) for chunks in every]
        # With a window, calls cost more than that.
        assert window is not None or sum(work) / size / max(work) >= 0.93, (size, seed, sharding)
        zigzag = Costs(limits, padded, 2 * size, causal, window)
        least = max(zigzag.of(chunks_of(rank, size, "zigzag")) for rank in range(size))
        assert sharding == "zigzag" or max(map(costs.of, every)) < 0.99 * least
    # One document, none, and chunks shorter than a tile are not worth it.
    assert {deal([0, total], total, 4), deal([0], total, 4), deal([0, 5, 24], 24, 2)} == {"zigzag"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_costs_are_those_of_the_plan(size):
    for seed, (sharding, total) in enumerate(itertools.product(("zigzag", "contiguous", "dealt"), (1 << 15, 3 << 14))):
        limits, total = documents(total, seed), total * size
        if sharding == "dealt":
            sharding = deal(limits, total, size)
        plan = DocumentPlan(torch.tensor(limits), limits, total, Group("nobody's", 0, size), sharding)
        every, costs = plan.work(True, None), Costs(limits, total, len(owners_of(size, sharding)))
        keys, calls = zip(*(costs.keys_and_calls(chunks_of(rank, size, sharding)) for rank in range(size)))
        assert calls == tuple(max(1, len(work.segments)) for work in every.ranks)
        assert max(keys) == every.most_received


@pytest.mark.parametrize("sharding", ["dealt:", "dealt:0,1,1", "dealt:0,2", "dealt:0,x", "dealt:0,0", "ring"])
def test_wrong_shardings(sharding):
    with pytest.raises(ValueError, match="sharding"):
        check_sharding("sharding", sharding, 2)
