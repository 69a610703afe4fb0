# mypy: allow-untyped-defs, allow-incomplete-defs
"""The keys that each rank's queries need of a sequence that is cut into chunks, in integers."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from fused_rope_attn.distributed.cuts import chunk_count, chunks_of, owners_of
from fused_rope_attn.distributed.groups import Group

# Keys before a window are left out in whole blocks of keys. No kernel has larger ones.
BLOCK = 256


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


class Run(NamedTuple):
    """Adjacent keys of a chunk in a rank's buffer: rows [first, first + rows) of the chunk, from row ``start`` of the
    buffer on."""

    chunk: int
    first: int
    rows: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.rows


class Share(NamedTuple):
    """A rank's work: its segments, and the contents of its buffer of keys, in order."""

    buffer: tuple[Run, ...]
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        return self.buffer[-1].end if self.buffer else 0

    @property
    def order(self) -> list[int]:
        """Return the numbers of the segments, the one with most work first."""
        return sorted(range(len(self.segments)), key=lambda i: -self.segments[i].queries * self.segments[i].num_keys)


class Message(NamedTuple):
    """Adjacent rows of keys that one rank sends another, by their first rows in the buffers of both."""

    sent: int
    received: int
    rows: int


class Shares:
    """Every rank's ``Share`` of one sequence, by rank, and what follows from them for all calls of it.

    own: by chunk, its run in its owner's buffer, which is all rows that exist. messages: by (sender, receiver).
    several: whether any pair of ranks has more than one. most_received: rows of keys that the rank with most of them
    gets from others. all_have_local_work: whether every rank that waits for keys has a segment that needs none of them.
    """

    def __init__(self, shares: tuple[Share, ...], sharding: str):
        self.shares, self.sharding = shares, sharding
        self.own: dict[int, Run] = {}
        for rank, share in enumerate(shares):
            self.own.update({run.chunk: run for run in share.buffer if run.chunk in self.owned_by(rank)})
        self.messages: dict[tuple[int, int], list[Message]] = {}
        self.most_received = 0
        self.all_have_local_work = True
        owners = owners_of(len(shares), sharding)
        for rank, share in enumerate(shares):
            received = 0
            for run in share.buffer:
                sender = owners[run.chunk][0]
                if sender == rank:
                    continue
                received += run.rows
                known = self.messages.setdefault((sender, rank), [])
                message = Message(self.own[run.chunk].start + run.first, run.start, run.rows)
                last = known[-1] if known else None
                if last and (last.sent + last.rows, last.received + last.rows) == (message.sent, message.received):
                    known[-1] = last._replace(rows=last.rows + message.rows)
                else:
                    known.append(message)
            self.most_received = max(self.most_received, received)
            if received and not any(self.is_local(rank, segment) for segment in share.segments):
                self.all_have_local_work = False
        self.several = any(len(messages) > 1 for messages in self.messages.values())

    def owned_by(self, rank: int) -> tuple[int, ...]:
        """A rank's chunks, in the order of its local rows."""
        return chunks_of(rank, len(self.shares), self.sharding)

    def is_local(self, rank: int, segment: Segment) -> bool:
        """Return whether a segment of a rank needs no other rank's keys."""
        first, last = segment.keys
        met = [run for run in self.shares[rank].buffer if run.start < last and first < run.end]
        return all(run.chunk in self.owned_by(rank) for run in met)


class Call(NamedTuple):
    """The properties of one call, equal on all ranks.

    method: "all_gather" or "all_to_all". shares: every rank's. chunk: rows of a chunk. tables_are_local: cos and sin
    have the rows of the local rows. cu_seqlens: (cu_seqlens_q, cu_seqlens_k, the longest) of each of this rank's
    segments on the device, None without documents.
    """

    group: Group
    method: str
    chunk: int
    shares: Shares
    tables_are_local: bool = False
    cu_seqlens: tuple[tuple[torch.Tensor, torch.Tensor, int], ...] | None = None

    @property
    def sharding(self) -> str:
        return self.shares.sharding

    @property
    def own(self) -> Share:
        return self.shares.shares[self.group.rank]

    @property
    def owned(self) -> tuple[int, ...]:
        return self.shares.owned_by(self.group.rank)

    @property
    def sent(self) -> list[list[Message]]:
        """Return the messages that this rank sends, by receiver."""
        return [self.shares.messages.get((self.group.rank, rank), []) for rank in range(self.group.size)]

    @property
    def received(self) -> list[list[Message]]:
        """Return the messages that this rank receives, by sender."""
        return [self.shares.messages.get((rank, self.group.rank), []) for rank in range(self.group.size)]


def merged(share: Share) -> Share:
    """Join segments of packed documents that have no document in common and adjacent rows and keys, because one launch
    is cheaper than several."""
    segments: list[Segment] = []
    for segment in share.segments:
        last = segments[-1] if segments else None
        if last is None or last.padding or (last.rows[1], last.keys[1]) != (segment.rows[0], segment.keys[0]):
            segments.append(segment)
            continue
        segments[-1] = Segment(
            (last.rows[0], segment.rows[1]),
            segment.padding,
            (last.keys[0], segment.keys[1]),
            None,
            (*last.cu_seqlens_q, *(last.queries + x for x in segment.cu_seqlens_q[1:])),
            (*last.cu_seqlens_k, *(last.num_keys + x for x in segment.cu_seqlens_k[1:])),
        )
    return Share(share.buffer, tuple(segments))


def _buffer(rows: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return the runs of these (chunk, first row, rows), one after another."""
    starts = itertools.accumulate((count for _, _, count in rows), initial=0)
    return tuple(Run(*one, start) for one, start in zip(rows, starts))


def share_of(segments: list[Segment], chunk: int) -> Share:
    """Return the ``Share`` of these segments, whose keys are counted in the sequence: a buffer of the keys that any of
    them needs, in order, with one run a chunk (of ``chunk`` rows) from its first needed key to its last."""
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
    return Share(buffer, tuple(placed))


@functools.lru_cache(maxsize=1024)
def shares(size: int, sharding: str, local: int, total: int, causal: bool, window: tuple[int, int] | None) -> Shares:
    """Return the ``Share`` of every rank of P = ``size``, for one sequence of ``local`` rows a rank.

    total: rows from there on do not exist. window: as in ``rope_attention``, None if neither side is bounded.
    """
    found = [_share(rank, size, sharding, local, total, causal, window) for rank in range(size)]
    return Shares(tuple(found), sharding)


def _share(rank, size, sharding, local, total, causal, window) -> Share:
    owned = chunks_of(rank, size, sharding)
    chunk = local // len(owned)
    if not causal and window is None:
        return _whole(owned, chunk, chunk_count(size, sharding), total)
    segments = []
    for i, c in enumerate(owned):
        begin, end = c * chunk, min((c + 1) * chunk, total)
        if end <= begin:
            continue
        first = 0
        if window is not None and window[0] >= 0:
            first = max(0, begin - window[0]) // BLOCK * BLOCK
        padding = 0
        if not causal:
            padding = total - end if window[1] < 0 else min(window[1], total - end)
        segments.append(Segment((i * chunk, i * chunk + end - begin), padding, (first, end + padding), first))
    return share_of(segments, chunk)


def _whole(owned, chunk: int, count: int, total: int) -> Share:
    """Return the share of a rank that sees all keys. Its own keys are the last ones, because queries are aligned with
    the last keys and so read their own rows of the tables, which have the same order. The order of keys does not change
    a softmax."""
    existing = {c: min(chunk, total - c * chunk) for c in range(count) if total > c * chunk}
    own = [c for c in owned if c in existing]
    if not own:
        return Share((), ())
    buffer = _buffer([(c, 0, existing[c]) for c in (*(c for c in existing if c not in own), *own)])
    rows = sum(existing[c] for c in own)
    return Share(buffer, (Segment((0, rows), 0, (0, min(total, count * chunk)), None),))
