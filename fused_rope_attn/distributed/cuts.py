"""How a sequence is cut into chunks, and which rank has which. Integers only; no tensors.

A sequence of N rows is cut into equal chunks, of which every rank has equally many. Its local rows are its chunks',
in the order of the sequence. ``"zigzag"`` cuts 2P chunks and gives rank r the chunks r and 2P - 1 - r, so that under a
causal mask all ranks have equal work; ``"contiguous"`` cuts P, one for each rank; ``"dealt:0,1,1,0"`` names the rank of
every chunk, which packed documents need for equal work, and ``deal`` finds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from fused_rope_attn.runtime.checks import refuse_choice

SHARDINGS = ("zigzag", "contiguous")
_DEALT = "dealt:"
# Chunks of a rank, of the cuts that are weighed.
_CHUNKS = (2, 4, 8, 16)
# What each call of a rank but the first one adds to the time.
_CALL = 0.01
# Rows of a chunk that is worth dealing: a tile of queries.
_FEWEST_ROWS = 128

Window = tuple[int, int] | None


def check_sharding(name: str, sharding: Any, size: int, *, also: tuple[str, ...] = ()) -> None:
    """Raise TypeError or ValueError, naming the argument, where P = ``size`` ranks cannot have this sharding.

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
    """The rank of every chunk."""
    if sharding == "zigzag":
        return (*range(size), *reversed(range(size)))
    if sharding == "contiguous":
        return tuple(range(size))
    return tuple(int(rank) for rank in sharding.removeprefix(_DEALT).split(","))


@functools.lru_cache(maxsize=1024)
def chunks_of(rank: int, size: int, sharding: str) -> tuple[int, ...]:
    """The chunks of a rank, in the order of its local rows."""
    return tuple(chunk for chunk, owner in enumerate(_owners(size, sharding)) if owner == rank)


@functools.lru_cache(maxsize=1024)
def owners_of(size: int, sharding: str) -> tuple[tuple[int, int], ...]:
    """Of every chunk (its rank, which of its rank's chunks it is)."""
    places = [0] * size
    found = []
    for owner in _owners(size, sharding):
        found.append((owner, places[owner]))
        places[owner] += 1
    return tuple(found)


def chunk_count(size: int, sharding: str) -> int:
    return len(_owners(size, sharding))


def _sum_below(limit: int, most: int) -> int:
    """The sum of ``min(x, most)`` over x from 0 to limit - 1."""
    inside = min(limit, most)
    return inside * (inside - 1) // 2 + (limit - inside) * most


def pairs_of(limits: Sequence[int], begin: int, end: int, causal: bool, window: Window) -> int:
    """How many pairs of a query in [begin, end) and a key of its document see each other in one head.

    limits: where documents begin and end.
    """
    left, right = window or (-1, -1)
    total = 0
    # The documents that begin before the end and end behind the beginning.
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


def work_of(limits: Sequence[int], total: int, size: int, sharding: str, causal: bool, window: Window) -> list[int]:
    """Pairs of a query and a key in one head, of each rank, of a stream of ``total`` tokens."""
    work = [0] * size
    owners = _owners(size, sharding)
    chunk = total // len(owners)
    for c, rank in enumerate(owners):
        work[rank] += pairs_of(limits, c * chunk, (c + 1) * chunk, causal, window)
    return work


def share_of_ideal(work: Sequence[int]) -> float:
    """The mean of the ranks' work over the most that one has: 1 where all have the same."""
    return sum(work) / len(work) / max(work) if any(work) else 1.0


def calls_of(limits: Sequence[int], total: int, size: int, sharding: str) -> int:
    """Calls of attention of the rank that has most of them.

    A chunk needs none of its own that is next to the rank's chunk before, or has no document in common with it.
    """
    chunk = total // chunk_count(size, sharding)
    most = 1
    for rank in range(size):
        count, end = 1, 0
        for c in chunks_of(rank, size, sharding):
            begin = c * chunk
            if begin >= limits[-1]:
                break
            first = limits[max(0, bisect.bisect_right(limits, begin) - 1)]
            count += begin > end > first
            end = begin + chunk
        most = max(most, count)
    return most


def deal(limits: Sequence[int], total: int, size: int, causal: bool = True, window: Window = None) -> str:
    """The sharding that gives these documents' work to P = ``size`` ranks in nearly equal parts, the same on all ranks.

    Of zigzag shards and of finer and finer chunks it is the best, where every call more costs ``_CALL`` of the time.
    The chunks with most work go first, each to the rank that has least.
    """

    def time_of(sharding: str) -> float:
        work = work_of(limits, total, size, sharding, causal, window)
        return max(work) * (1 + _CALL * (calls_of(limits, total, size, sharding) - 1))

    best, least = "zigzag", time_of("zigzag")
    for each in _CHUNKS if size > 1 else ():
        count = each * size
        if total % count or total // count < _FEWEST_ROWS:
            break
        chunk = total // count
        work = [pairs_of(limits, c * chunk, (c + 1) * chunk, causal, window) for c in range(count)]
        owners, sums, places = [0] * count, [0] * size, [each] * size
        for c in sorted(range(count), key=lambda c: (-work[c], c)):
            rank = min((rank for rank in range(size) if places[rank]), key=lambda rank: (sums[rank], rank))
            owners[c], sums[rank], places[rank] = rank, sums[rank] + work[c], places[rank] - 1
        sharding = _DEALT + ",".join(map(str, owners))
        time = time_of(sharding)
        if time < least:
            best, least = sharding, time
    return best
