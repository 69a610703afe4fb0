"""Packed documents over several ranks: the plan that every layer of a batch shares, and the cut of equal work."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from fused_rope_attn.distributed import layout
from fused_rope_attn.distributed.groups import Group, group_of
from fused_rope_attn.distributed.layout import GroupWork, RankWork, Segment, Window, chunks_of, owners_of
from fused_rope_attn.runtime.checks import check_int, named, shown

_numbers = itertools.count(1)
# By number, which the operators take. Backward may run when only this dictionary still holds the plan.
_plans: OrderedDict[int, DocumentPlan] = OrderedDict()
_MAX_PLANS = 1024
# The sharding of calls with a plan. Compiled graphs do not depend on it, because each batch may have another.
OF_THE_PLAN = "of the plan"
# The sharding that ``plan_varlen_cp`` finds.
BALANCED = "balanced"
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


class DocumentPlan:
    """The documents of one packed batch, for ``rope_attention_varlen_cp``; made by ``plan_varlen_cp``.

    cu_seqlens: (documents + 1,) int32 of the whole stream, on the device. total: tokens of the whole stream. local:
    tokens of one rank. max_seqlen: length of the longest document. sharding: how the stream is cut, for ``cp_shard``
    and the others.
    """

    def __init__(self, cu_seqlens: torch.Tensor, limits: list[int], total: int, group: Group, sharding: str):
        self.cu_seqlens, self.limits, self.total, self.local = cu_seqlens, limits, total, total // group.size
        self.group, self.sharding = group, sharding
        # Ranks compare this in every call. Its size does not depend on the number of documents.
        digest = hashlib.sha256(f"{limits} {total} {sharding}".encode()).hexdigest()[:16]
        self.summary = f"{len(limits) - 1} of {limits[-1]} tokens, {digest}"
        self.max_seqlen = max((b - a for a, b in itertools.pairwise(limits)), default=0)
        self.number = next(_numbers)
        self._work: dict[tuple, GroupWork] = {}
        _plans[self.number] = self
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)

    def work(self, causal: bool, window: Window) -> GroupWork:
        """Return every rank's work under these masks."""
        key = causal, None if causal or window is None or window[1] < 0 else window[1]
        if key not in self._work:
            found = [self._work_of(rank, *key) for rank in range(self.group.size)]
            self._work[key] = work = GroupWork(found, self.sharding)
            # One copy to the device for all of this rank's segments.
            segments = found[self.group.rank].segments
            lists = [x for segment in segments for x in (segment.cu_seqlens_q, segment.cu_seqlens_k)]
            flat = torch.tensor([n for x in lists for n in x], dtype=torch.int32)
            parts = [part.clone() for part in flat.to(self.cu_seqlens.device).split([len(x) for x in lists])]
            longest = [max(b - a for a, b in itertools.pairwise(x)) for x in lists[1::2]]
            work.cu_seqlens = tuple(zip(parts[::2], parts[1::2], longest))
        return self._work[key]

    def _work_of(self, rank: int, causal: bool, right: int | None) -> RankWork:
        owned = chunks_of(rank, self.group.size, self.sharding)
        chunk = self.local // len(owned)
        segments = []
        # Adjacent chunks are one range.
        firsts = [i for i, c in enumerate(owned) if i == 0 or owned[i - 1] != c - 1]
        for i, following in itertools.pairwise((*firsts, len(owned))):
            begin, end = owned[i] * chunk, min((owned[following - 1] + 1) * chunk, self.limits[-1])
            if end <= begin:
                continue
            # The documents that begin before the chunk ends and end after it begins.
            first = bisect.bisect_right(self.limits, begin) - 1
            last = bisect.bisect_left(self.limits, end)
            limits = [x for x, y in itertools.pairwise(self.limits[first : last + 1]) if y > x]
            padding = 0 if causal else self.limits[last] - end
            padding = padding if right is None else min(right, padding)
            stop = end + padding
            # A document that began before the chunk has all of its keys from there on, so that positions stay.
            cu_q = tuple(max(x, begin) - begin for x in limits) + (stop - begin,)
            cu_k = tuple(x - limits[0] for x in limits) + (stop - limits[0],)
            rows = i * chunk, i * chunk + end - begin
            segments.append(Segment(rows, padding, (limits[0], stop), limits[0], cu_q, cu_k))
        return _merged(layout.with_buffer(segments, chunk))


def _merged(work: RankWork) -> RankWork:
    """Join segments that have no document in common and adjacent rows and keys, because one launch is cheaper."""
    segments: list[Segment] = []
    for segment in work.segments:
        last = segments[-1] if segments else None
        if last is None or last.padding or (last.rows[1], last.keys[1]) != (segment.rows[0], segment.keys[0]):
            segments.append(segment)
            continue
        rows, keys = (last.rows[0], segment.rows[1]), (last.keys[0], segment.keys[1])
        cu_q = (*last.cu_seqlens_q, *(last.queries + x for x in segment.cu_seqlens_q[1:]))
        cu_k = (*last.cu_seqlens_k, *(last.num_keys + x for x in segment.cu_seqlens_k[1:]))
        segments[-1] = Segment(rows, segment.padding, keys, None, cu_q, cu_k)
    return RankWork(work.buffer, segments)


def plan_numbered(number: int) -> DocumentPlan:
    """Return the plan of this number."""
    if number not in _plans:
        raise RuntimeError(f"plan must be one of the last {_MAX_PLANS} that plan_varlen_cp made in this process")
    return _plans[number]


def plan_varlen_cp(
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    group: Any,
    sharding: str = "zigzag",
    total_tokens: int | None = None,
    device: torch.device | str | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
) -> DocumentPlan:
    """Plan a packed batch for ``rope_attention_varlen_cp``: once a batch, for all layers and both passes.

    The stream is cut as ``sharding`` says, whatever the documents: several ranks may have parts of one document.

    Args:
        cu_seqlens: ``(documents + 1,)`` int32 or int64, or a list: document ``i`` is tokens ``[cu[i], cu[i + 1])`` of
            the whole stream, the same on every rank. A tensor of a GPU is read, which waits for the GPU.
        group: a ProcessGroup or a DeviceMesh of one dimension, of P ranks.
        sharding: as in ``cp_shard``; or ``"balanced"``, which finds the one by which all ranks have equal work, of
            these documents: the result has its name in ``plan.sharding``, with which everything of this batch is cut.
        total_tokens: T, tokens of the stream, a multiple of 2P (``"contiguous"``: of P). Tokens after the last
            document belong to none and give 0. Default: where the last document ends, which then is such a multiple.
        device: where the attention runs. Default: cu_seqlens' device.
        causal, window: the masks for which ``"balanced"`` equalises work; a layer may have others.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    members = group_of(group)
    layout.check_sharding("sharding", sharding, members.size, also=(BALANCED,))
    if not isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = torch.tensor(list(cu_seqlens), dtype=torch.int32)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, but is {named(cu_seqlens.dtype)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), but has {shown(cu_seqlens.shape)}")
    limits = cu_seqlens.tolist()
    if limits[0] != 0 or any(b < a for a, b in itertools.pairwise(limits)):
        raise ValueError("cu_seqlens must begin with 0 and never fall")
    total = limits[-1] if total_tokens is None else check_int("total_tokens", total_tokens, "an int or None")
    if sharding == BALANCED:
        sharding = deal(limits, total, members.size, causal, window)
    count = len(owners_of(members.size, sharding))
    if total % count or total < limits[-1]:
        raise ValueError(
            f"total_tokens must be a multiple of {count} for {members.size} ranks and sharding={sharding!r}, and at "
            f"least the {limits[-1]} tokens of cu_seqlens, but is {total}: pad the stream, and leave the padding out "
            "of cu_seqlens"
        )
    where = cu_seqlens.device if device is None else torch.device(device)
    return DocumentPlan(cu_seqlens.to(where, torch.int32).contiguous(), limits, total, members, sharding)


def pairs_of(limits: Sequence[int], begin: int, end: int, causal: bool, window: Window) -> int:
    """Return the number of pairs of a query in [begin, end) and a key that see each other in one head.

    limits: the first token of each document, and the end of the last.
    """
    # The documents that begin before ``end`` and end after ``begin``.
    met = limits[max(0, bisect.bisect_right(limits, begin) - 1) : bisect.bisect_left(limits, end) + 1]
    rows = [(b - a, max(begin - a, 0), min(b, end) - a) for a, b in itertools.pairwise(met)]
    return sum(layout.pairs_within(*row, causal, window) for row in rows if row[1] < row[2])


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

    def keys_and_calls(self, chunks: Sequence[int]) -> tuple[int, int]:
        """Return (keys that a rank with these chunks, in order, gets from others under a causal mask, its calls)."""
        keys, calls, end = 0, 1, 0
        for c in chunks:
            begin, first = c * self.chunk, self.firsts[c]
            if begin >= self.end:
                break
            keys += max(0, begin - max(first, end))
            calls += begin > end > first
            end = begin + self.chunk
        return keys, calls

    def of(self, chunks: Sequence[int]) -> int:
        """Return the cost of a rank with these chunks, in order."""
        keys, calls = self.keys_and_calls(chunks)
        return sum(self.work[c] for c in chunks) + _KEY * keys + _CALL * (calls - 1)


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
            best, least = layout.DEALT + ",".join(map(str, owners)), time
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
        ranks = [rank for rank in range(len(owned)) if rank != worst]
        swaps = ((rank, mine, other) for rank in ranks for mine in owned[worst] for other in owned[rank])
        for rank, mine, other in itertools.islice(swaps, tries):
            tries -= 1
            pair = sorted({*owned[worst], other} - {mine}), sorted({*owned[rank], mine} - {other})
            costs_of_pair = costs.of(pair[0]), costs.of(pair[1])
            if max(costs_of_pair) < times[worst]:
                (owned[worst], owned[rank]), (times[worst], times[rank]) = pair, costs_of_pair
                break
        else:
            break
    return owned
