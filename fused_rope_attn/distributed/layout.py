# mypy: allow-untyped-defs, allow-incomplete-defs
"""The cut of a sequence, in integers: the chunks of each rank, the keys that its queries need, and the method.

A sequence of N rows is cut into equal chunks, and every rank owns equally many. Its local rows are its chunks' rows,
in the order of the sequence. ``cp_shard`` has the shardings; ``documents.deal`` finds those that begin with ``DEALT``.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.runtime.checks import refuse_choice

SHARDINGS = ("zigzag", "contiguous")
DEALT = "dealt:"
# Keys before a window are left out in whole blocks of keys. No kernel has larger ones.
BLOCK = 256
# Rates of one H200 among several of its host, and the part of the all-gather that no work hides. They only weigh the
# methods against one another.
FLOPS, LINK, EXPOSED = 600e12, 300e9, 0.25

Window = tuple[int, int] | None


def check_sharding(name: str, sharding: Any, size: int, *, also: tuple[str, ...] = ()) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is a sharding of ``size`` ranks or in ``also``."""
    if sharding in (*SHARDINGS, *also):
        return
    if isinstance(sharding, str) and sharding.startswith(DEALT):
        ranks = sharding.removeprefix(DEALT).split(",")
        counts = [ranks.count(str(rank)) for rank in range(size)]
        if counts[0] and counts == [counts[0]] * size and sum(counts) == len(ranks):
            return
        raise ValueError(
            f"{name}='{DEALT}...' must name a rank below {size} for every chunk, each rank equally often, but is "
            f"{sharding!r}"
        )
    refuse_choice(name, sharding, (*SHARDINGS, *also, f"{DEALT}..."))


@functools.lru_cache(maxsize=1024)
def owners_of(size: int, sharding: str) -> tuple[tuple[int, int], ...]:
    """Return (its rank, its index among the rank's chunks) of every chunk."""
    ranks = list(range(size))
    if sharding == "zigzag":
        ranks += reversed(ranks)
    elif sharding != "contiguous":
        ranks = [int(rank) for rank in sharding.removeprefix(DEALT).split(",")]
    return tuple((rank, ranks[:chunk].count(rank)) for chunk, rank in enumerate(ranks))


@functools.lru_cache(maxsize=1024)
def chunks_of(rank: int, size: int, sharding: str) -> tuple[int, ...]:
    """Return the chunks of a rank, in the order of its local rows."""
    return tuple(chunk for chunk, (owner, _) in enumerate(owners_of(size, sharding)) if owner == rank)


def pairs_within(length: int, first: int, last: int, causal: bool, window: Window) -> int:
    """Return the number of pairs of a query in [first, last) of ``length`` tokens and a key among them that see each
    other in one head."""

    def sum_below(limit: int, most: int) -> int:  # of min(x, most) over x from 0 to limit - 1
        inside = min(limit, most)
        return inside * (inside - 1) // 2 + (limit - inside) * most

    left, right = (length if side < 0 else side for side in window or (-1, -1))
    pairs = last - first + sum_below(last, left) - sum_below(first, left)
    return pairs if causal else pairs + sum_below(length - first, right) - sum_below(length - last, right)


class Segment(NamedTuple):
    """One call of attention: some of a rank's queries over a range of the rank's keys.

    rows: [first, last) of the local rows. padding: number of queries of zeros that follow them. They keep the rows at
    their positions, because the last query of a call is at the last key, and a window on the right lets a chunk see
    keys after its end. Their results are dropped. keys: [first, last) in the rank's buffer of keys. position: of the
    first of these keys in the sequence, or None if the buffer is in another order than the sequence. cu_seqlens_q,
    cu_seqlens_k: of packed documents, rows and keys counted from the segment's first; empty without documents.
    """

    rows: tuple[int, int]
    padding: int
    keys: tuple[int, int]
    position: int | None
    cu_seqlens_q: tuple[int, ...] = ()
    cu_seqlens_k: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return self.rows[1] - self.rows[0] + self.padding

    @property
    def num_keys(self) -> int:
        return self.keys[1] - self.keys[0]

    def pairs(self, causal: bool, window: Window) -> int:
        """Return the number of pairs of a query and a key that see each other in one head."""
        queries = (b - a for a, b in itertools.pairwise(self.cu_seqlens_q or (0, self.queries)))
        keys = (b - a for a, b in itertools.pairwise(self.cu_seqlens_k or (0, self.num_keys)))
        return sum(pairs_within(k, k - q, k, causal, window) for q, k in zip(queries, keys))


class Run(NamedTuple):
    """Adjacent keys of a chunk in a rank's buffer: rows [first, first + rows) of the chunk, from row ``start`` of the
    buffer on."""

    chunk: int
    first: int
    rows: int
    start: int


class RankWork:
    """A rank's segments, and the contents of its buffer of keys, in order.

    length: of the buffer. rows: how many local rows the segments have. order: the numbers of the segments, the one with
    most work first.
    """

    def __init__(self, buffer: tuple[Run, ...], segments: list[Segment]):
        self.buffer, self.segments = buffer, segments
        self.length = buffer[-1].start + buffer[-1].rows if buffer else 0
        self.rows = sum(segment.rows[1] - segment.rows[0] for segment in segments)
        self.order = sorted(range(len(segments)), key=lambda i: -segments[i].queries * segments[i].num_keys)


class Message(NamedTuple):
    """Adjacent rows of keys that one rank sends another, by their first rows in the buffers of both."""

    sent: int
    received: int
    rows: int


class GroupWork:
    """Every rank's work on one sequence, by rank, and what follows from it for all calls.

    own: by chunk, its run in its owner's buffer, which is all rows that exist. messages: by (sender, receiver).
    most_messages: of a pair of ranks. most_received: rows of keys that a rank gets from others. all_have_local_work:
    whether every rank that waits for keys has a segment that needs none of them. cu_seqlens: (cu_seqlens_q,
    cu_seqlens_k, the longest) of each of this rank's segments on the device; None without documents.
    """

    cu_seqlens: tuple[tuple[torch.Tensor, torch.Tensor, int], ...] | None = None

    def __init__(self, ranks: list[RankWork], sharding: str):
        self.ranks, self.sharding, size = ranks, sharding, len(ranks)
        self.owned = [chunks_of(rank, size, sharding) for rank in range(size)]
        owners = [owner for owner, _ in owners_of(size, sharding)]
        runs = [(rank, run) for rank, work in enumerate(ranks) for run in work.buffer]
        self.own = {run.chunk: run for rank, run in runs if owners[run.chunk] == rank}
        self.messages: dict[tuple[int, int], list[Message]] = {}
        received = [0] * size
        for rank, run in runs:
            if owners[run.chunk] == rank:
                continue
            received[rank] += run.rows
            known = self.messages.setdefault((owners[run.chunk], rank), [])
            message = Message(self.own[run.chunk].start + run.first, run.start, run.rows)
            last = known[-1] if known else None
            if last and (last.sent + last.rows, last.received + last.rows) == (message.sent, message.received):
                known[-1] = last._replace(rows=last.rows + message.rows)
            else:
                known.append(message)
        self.most_received = max(received)
        self.most_messages = max([0, *map(len, self.messages.values())])
        waiting = [rank for rank in range(size) if received[rank]]
        self.all_have_local_work = all(any(self.is_local(rank, s) for s in ranks[rank].segments) for rank in waiting)

    def is_local(self, rank: int, segment: Segment) -> bool:
        """Return whether a segment of a rank needs no other rank's keys."""
        first, last = segment.keys
        met = [run for run in self.ranks[rank].buffer if run.start < last and first < run.start + run.rows]
        return all(run.chunk in self.owned[rank] for run in met)


class ParallelCall:
    """One call of this rank.

    total: rows of the sequence that exist. tables_are_local: cos and sin have the rows of the local rows. chunk: rows
    of a chunk. own, owned: this rank's work and chunks. owners: of all chunks. sent, received: this rank's messages, by
    the other rank.
    """

    def __init__(self, group: Group, work: GroupWork, local: int, total: int, tables_are_local: bool):
        self.group, self.work, self.total, self.tables_are_local = group, work, total, tables_are_local
        rank, every, known = group.rank, range(group.size), work.messages
        self.own, self.owned, self.owners = work.ranks[rank], work.owned[rank], owners_of(group.size, work.sharding)
        self.chunk = local // len(self.owned)
        self.sent = [known.get((rank, other), []) for other in every]
        self.received = [known.get((other, rank), []) for other in every]


def _buffer(rows: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return the runs of these (chunk, first row, rows), one after another."""
    starts = itertools.accumulate((count for _, _, count in rows), initial=0)
    return tuple(Run(*one, start) for one, start in zip(rows, starts))


def with_buffer(segments: list[Segment], chunk: int) -> RankWork:
    """Return the work of these segments, whose keys are counted in the sequence: with a buffer of the keys that any of
    them needs, in order, one run a chunk (of ``chunk`` rows) from its first needed key to its last."""
    limits: dict[int, tuple[int, int]] = {}
    for start, end in (segment.keys for segment in segments):
        for c in range(start // chunk, (end - 1) // chunk + 1):
            first, last = max(start - c * chunk, 0), min(end - c * chunk, chunk)
            known = limits.get(c, (first, last))
            limits[c] = min(first, known[0]), max(last, known[1])
    buffer = _buffer([(c, first, last - first) for c, (first, last) in sorted(limits.items())])
    placed = []
    for segment in segments:
        first, last = segment.keys
        run = next(run for run in buffer if run.chunk == first // chunk)
        start = run.start + first % chunk - run.first
        placed.append(segment._replace(keys=(start, start + last - first)))
    return RankWork(buffer, placed)


@functools.lru_cache(maxsize=1024)
def work_of(size: int, sharding: str, local: int, total: int, causal: bool, window: Window) -> GroupWork:
    """Return every rank's work, P = ``size``, on one sequence of ``local`` rows a rank.

    total: rows from there on do not exist. window: as in ``rope_attention``, None if neither side is bounded.
    """
    found = []
    left, right = window or (-1, -1)
    for rank in range(size):
        owned = chunks_of(rank, size, sharding)
        chunk = local // len(owned)
        if not causal and window is None:
            # All keys; a rank's own are the last ones, because queries are aligned with the last keys and so read their
            # own rows of the tables, which have the same order. The order of keys does not change a softmax.
            order = sorted(range(len(owners_of(size, sharding))), key=owned.__contains__)
            runs = [(c, 0, min(chunk, total - c * chunk)) for c in order if c * chunk < total]
            rows = sum(count for c, _, count in runs if c in owned)
            every = RankWork(_buffer(runs), [Segment((0, rows), 0, (0, total), None)])
            found.append(every if rows else RankWork((), []))
            continue
        segments = []
        for i, c in enumerate(owned):
            begin, end = c * chunk, min((c + 1) * chunk, total)
            if end <= begin:
                continue
            first = max(0, begin - left) // BLOCK * BLOCK if left >= 0 else 0
            after = total - end if right < 0 else min(right, total - end)
            padding = 0 if causal else after
            segments.append(Segment((i * chunk, i * chunk + end - begin), padding, (first, end + padding), first))
        found.append(with_buffer(segments, chunk))
    return GroupWork(found, sharding)


@dataclass(frozen=True)
class CpPlan:
    """The method of a call of ``rope_attention_cp``, and its cost.

    method: "all_gather" or "all_to_all". reason: why. received_bytes: of the rank that receives most, forward. flops:
    of the rank that computes most, forward. gathered_bytes: the most K and V of other ranks that a rank holds at a
    time; backward also holds their gradients' parts, in float32.
    """

    method: str
    reason: str
    received_bytes: int
    flops: float
    gathered_bytes: int


def choose_method(problem: Problem, method: str, work: GroupWork) -> CpPlan:
    """Return the plan of a call with this work, by bytes and floating-point operations. Communicates nothing.

    problem: with the local lengths. Raises ValueError if ``method="all_to_all"`` is asked for and the key heads cannot
    be divided.
    """
    size = len(work.ranks)
    row_bytes = problem.batch * problem.head_dim * problem.dtype.itemsize
    gathered = 2 * problem.heads_kv * row_bytes * work.most_received
    pairs = [sum(segment.pairs(problem.causal, problem.window) for segment in rank.segments) for rank in work.ranks]
    flops = [4.0 * problem.batch * problem.heads_q * problem.head_dim * count for count in pairs]
    exchanged = (2 * problem.heads_q + 2 * problem.heads_kv) * row_bytes * problem.len_q * (size - 1) // size
    by_gather = CpPlan("all_gather", "asked for", gathered, max(flops), gathered)
    by_heads = CpPlan("all_to_all", "asked for", exchanged, sum(flops) / size, exchanged)
    divides = problem.heads_kv % size == 0
    if method == "all_to_all" and not divides:
        raise ValueError(
            f"method must be 'all_gather' or 'auto' where k's heads are no multiple of the group's {size} ranks, but "
            f"is 'all_to_all', and k has {problem.heads_kv} heads"
        )
    if method != "auto":
        return by_gather if method == "all_gather" else by_heads
    if size == 1:
        return replace(by_gather, reason="one rank exchanges nothing")
    if not divides:
        return replace(by_gather, reason=f"k's {problem.heads_kv} heads are no multiple of {size} ranks")
    compute, link = by_gather.flops / FLOPS, gathered / LINK
    gather_time = compute + link - (1 - EXPOSED) * min(link, compute)
    gathers = gather_time <= by_heads.flops / FLOPS + exchanged / LINK
    reason = (
        f"a rank {'receives' if gathers else 'would receive'} {gathered / 2**20:.3g} MiB next to "
        f"{by_gather.flops / 1e12:.3g} TFLOP, where heads would exchange {exchanged / 2**20:.3g} MiB before and after "
        f"{by_heads.flops / 1e12:.3g}"
    )
    return replace(by_gather if gathers else by_heads, reason=reason)
