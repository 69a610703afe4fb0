"""Chunks of a sequence, and the rank that owns each. Integers only; no tensors.

A sequence of N rows is cut into equal chunks, and every rank owns equally many. Its local rows are its chunks' rows,
in the order of the sequence. ``"zigzag"`` cuts 2P chunks and gives rank r the chunks r and 2P - 1 - r, so that under a
causal mask all ranks have equal work; ``"contiguous"`` cuts P, one for each rank; ``"dealt:0,1,1,0"`` names the rank of
every chunk, which packed documents need for equal work, and ``deal`` finds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fused_rope_attn.runtime.checks import refuse_choice

SHARDINGS = ("zigzag", "contiguous")
_DEALT = "dealt:"
# Chunks of a rank, of the cuts that are weighed.
_CHUNKS = (2, 4, 8, 16)
# The cost of a key that is sent, and of each call of a rank after its first, in pairs of a query and a key: about 30 ns
# and half a millisecond of both passes, with 32 heads of 128 columns on H200s.
_KEY, _CALL = 300, 5_000_000
# The part of the time that finer chunks must save.
_WORTH = 0.01
# Swaps that are tried for a cut: 10 us each.
_SWAPS = 1000
# Rows of a chunk that is worth dealing: a tile of queries.
_FEWEST_ROWS = 128

Window = tuple[int, int] | None


def check_sharding(name: str, sharding: Any, size: int, *, also: tuple[str, ...] = ()) -> None:
    """Raise TypeError or ValueError, naming the argument, if P = ``size`` ranks cannot have this sharding.

    also: other names that are right.
    """
    if sharding in (*SHARDINGS, *also):
        return
    if isinstance(sharding, str) and sharding.startswith(_DEALT):
        ranks = sharding.removeprefix(_DEALT).split(",")
        counts = [ranks.count(str(rank)) for rank in range(size)]
        if counts[0] and counts == [counts[0]] * size and sum(counts) == len(ranks):
            return
        raise ValueError(
            f"{name}='{_DEALT}...' must name a rank below {size} for every chunk, each rank equally often, but is "
            f"{sharding!r}"
        )
    refuse_choice(name, sharding, (*SHARDINGS, *also, f"{_DEALT}..."))


@functools.lru_cache(maxsize=1024)
def _owners(size: int, sharding: str) -> tuple[int, ...]:
    """Return the rank of every chunk."""
    if sharding == "zigzag":
        return (*range(size), *reversed(range(size)))
    if sharding == "contiguous":
        return tuple(range(size))
    return tuple(int(rank) for rank in sharding.removeprefix(_DEALT).split(","))


@functools.lru_cache(maxsize=1024)
def chunks_of(rank: int, size: int, sharding: str) -> tuple[int, ...]:
    """Return the chunks of a rank, in the order of its local rows."""
    return tuple(chunk for chunk, owner in enumerate(_owners(size, sharding)) if owner == rank)


@functools.lru_cache(maxsize=1024)
def owners_of(size: int, sharding: str) -> tuple[tuple[int, int], ...]:
    """Return (its rank, its index among the rank's chunks) of every chunk."""
    places = [0] * size
    found = []
    for owner in _owners(size, sharding):
        found.append((owner, places[owner]))
        places[owner] += 1
    return tuple(found)


def chunk_count(size: int, sharding: str) -> int:
    return len(_owners(size, sharding))


def _sum_below(limit: int, most: int) -> int:
    """Return the sum of ``min(x, most)`` over x from 0 to limit - 1."""
    inside = min(limit, most)
    return inside * (inside - 1) // 2 + (limit - inside) * most


def pairs_of(limits: Sequence[int], begin: int, end: int, causal: bool, window: Window) -> int:
    """Return the number of pairs of a query in [begin, end) and a key that see each other in one head.

    limits: the first token of each document, and the end of the last.
    """
    left, right = window or (-1, -1)
    total = 0
    # The documents that begin before ``end`` and end after ``begin``.
    met = limits[max(0, bisect.bisect_right(limits, begin) - 1) : bisect.bisect_left(limits, end) + 1]
    for first, last in itertools.pairwise(met):
        low, high = max(first, begin), min(last, end)
        if low < high:
            length = last - first
            widest = length if left < 0 else left
            total += high - low + _sum_below(high - first, widest) - _sum_below(low - first, widest)
            if not causal:
                widest = length if right < 0 else right
                total += _sum_below(last - low, widest) - _sum_below(last - high, widest)
    return total


class Costs:
    """The cost of chunks to the rank that owns them, in pairs of a query and a key: attention, keys received, calls.

    A chunk needs no call of its own if it is next to the rank's chunk before it, or has no document in common with it.
    count: chunks of the whole stream.
    """

    def __init__(self, limits: Sequence[int], total: int, count: int, causal: bool = True, window: Window = None):
        self.chunk, self.end = total // count, limits[-1]
        begins = range(0, total, self.chunk) if self.chunk else [0] * count
        self.work = [pairs_of(limits, begin, begin + self.chunk, causal, window) for begin in begins]
        # The first token of the document of each chunk's first token.
        self.firsts = [limits[max(0, bisect.bisect_right(limits, begin) - 1)] for begin in begins]

    def received(self, chunks: Sequence[int]) -> int:
        """Return the number of keys that a rank with these chunks, in order, gets from others under a causal mask."""
        rows, end = 0, 0
        for begin, first in self._chunks(chunks):
            rows += max(0, begin - max(first, end))
            end = begin + self.chunk
        return rows

    def calls(self, chunks: Sequence[int]) -> int:
        """Return the number of calls of attention of a rank with these chunks, in order."""
        count, end = 1, 0
        for begin, first in self._chunks(chunks):
            count += begin > end > first
            end = begin + self.chunk
        return count

    def of(self, chunks: Sequence[int]) -> int:
        """Return the cost of a rank with these chunks, in order."""
        work = sum(self.work[c] for c in chunks)
        return work + _KEY * self.received(chunks) + _CALL * (self.calls(chunks) - 1)

    def _chunks(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (first token, first token of its document) of each chunk that has documents."""
        return [(c * self.chunk, self.firsts[c]) for c in chunks if c * self.chunk < self.end]


def deal(limits: Sequence[int], total: int, size: int, causal: bool = True, window: Window = None) -> str:
    """Return the sharding that gives P = ``size`` ranks nearly equal work on these documents, the same on all ranks.

    It is zigzag, unless finer chunks take ``_WORTH`` less: those with most work are dealt first, each to the rank that
    has least, and then swapped as long as that helps the rank that takes longest.
    """
    owned = [list(chunks_of(rank, size, "zigzag")) for rank in range(size)]
    costs = Costs(limits, total, 2 * size, causal, window)
    best, least = "zigzag", max(map(costs.of, owned))
    for each in _CHUNKS if size > 1 else ():
        count = each * size
        if total % count or total // count < _FEWEST_ROWS:
            break
        costs = Costs(limits, total, count, causal, window)
        owned = _swapped(costs, _dealt(costs.work, size))
        time = max(map(costs.of, owned))
        if time < (1 - _WORTH) * least:
            owners = [next(rank for rank in range(size) if c in owned[rank]) for c in range(count)]
            best, least = _DEALT + ",".join(map(str, owners)), time
    return best


def _dealt(work: Sequence[int], size: int) -> list[list[int]]:
    """Deal equally many chunks to each rank, those with most work first, each to the rank that has least."""
    owned: list[list[int]] = [[] for _ in range(size)]
    sums = [0] * size
    for c in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        rank = min((r for r in range(size) if len(owned[r]) < len(work) // size), key=lambda r: (sums[r], r))
        owned[rank].append(c)
        sums[rank] += work[c]
    return [sorted(chunks) for chunks in owned]


def _swapped(costs: Costs, owned: list[list[int]]) -> list[list[int]]:
    """Return ``owned`` after swaps of two chunks, each of which lowers the cost of the rank that takes longest."""
    times = [costs.of(chunks) for chunks in owned]
    tries = _SWAPS
    while tries > 0:
        worst = max(range(len(owned)), key=lambda rank: (times[rank], -rank))
        found = None
        for rank, mine, other in _swaps(owned, worst):
            tries -= 1
            pair = sorted({*owned[worst], other} - {mine}), sorted({*owned[rank], mine} - {other})
            costs_of_pair = costs.of(pair[0]), costs.of(pair[1])
            if max(costs_of_pair) < times[worst]:
                found = rank
                break
            if tries <= 0:
                break
        if found is None:
            break
        (owned[worst], owned[found]), (times[worst], times[found]) = pair, costs_of_pair
    return owned


def _swaps(owned: list[list[int]], worst: int) -> Iterator[tuple[int, int, int]]:
    """Yield (another rank, a chunk of the worst one, a chunk of the other)."""
    for rank, chunks in enumerate(owned):
        if rank != worst:
            yield from ((rank, mine, other) for mine in owned[worst] for other in chunks)
