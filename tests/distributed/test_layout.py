"""Segments of work as integers: every row once, at its own position, with every key that it sees."""

import itertools
import random

import pytest

from fused_rope_attn.distributed.layout import chunks_of, owners_of, work_of


def visible(position, total, causal, window):
    low, high = 0, total - 1
    if window is not None and window[0] >= 0:
        low = max(low, position - window[0])
    if window is not None and window[1] >= 0:
        high = min(high, position + window[1])
    return range(low, (min(high, position) if causal else high) + 1)


def check(size, sharding, chunk, total, causal, window):
    owned = [chunks_of(rank, size, sharding) for rank in range(size)]
    local = chunk * len(owned[0])
    served = []
    every = work_of(size, sharding, local, total, causal, window)
    buffers = [
        [run.chunk * chunk + run.first + row for run in work.buffer for row in range(run.rows)] for work in every.ranks
    ]
    for rank, (work, buffer) in enumerate(zip(every.ranks, buffers)):
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
            for position in stands:
                assert set(visible(position, total, causal, window)) <= set(keys)
    assert sorted(served) == list(range(total))


MASKS = [
    (True, None),
    (True, (5, 0)),
    (True, (300, 0)),
    (False, None),
    (False, (4, 3)),
    (False, (-1, 2)),
    (False, (7, -1)),
]


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
def test_every_row_once_and_all_that_it_sees(causal, window, sharding):
    generator = random.Random(0)
    for size, chunk in itertools.product((1, 2, 3, 4, 5), (1, 3, 130)):
        length = chunk * len(owners_of(size, sharding))
        for total in {length, 0, 1, generator.randrange(length + 1)}:
            check(size, sharding, chunk, total, causal, window)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_chunks_that_are_dealt(causal, window):
    for size, sharding in ((2, "dealt:0,1,1,0,0,1"), (3, "dealt:2,2,0,1,0,1")):
        for chunk, total in ((3, 18), (130, 700)):
            check(size, sharding, chunk, total, causal, window)


def test_narrow_windows_need_few_keys():
    every = work_of(4, "zigzag", 2 * 512, 8 * 512, True, (100, 0))
    for rank, work in enumerate(every.ranks):
        own = chunks_of(rank, 4, "zigzag")
        expected = {c: (256, 256) for mine in own for c in (mine - 1,) if c >= 0} | dict.fromkeys(own, (0, 512))
        assert {run.chunk: (run.first, run.rows) for run in work.buffer} == expected
        local = [every.is_local(rank, segment) for segment in work.segments]
        assert local == {0: [True, False], 3: [False, True]}.get(rank, [False, False])


def test_owners():
    for size, sharding in itertools.product((1, 2, 5), ("zigzag", "contiguous")):
        for rank in range(size):
            for place, chunk in enumerate(chunks_of(rank, size, sharding)):
                assert owners_of(size, sharding)[chunk] == (rank, place)
