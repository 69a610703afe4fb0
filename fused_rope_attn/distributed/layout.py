# mypy: allow-untyped-defs, allow-incomplete-defs
"""What one rank's queries need of a sequence that is cut into chunks. Integers only; no tensors."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from fused_rope_attn.distributed.cuts import chunk_count, chunks_of, owners_of

# Keys before a window are left out in whole blocks of keys, of which no kernel takes more at a time.
BLOCK = 256


class Piece(NamedTuple):
    """One call of attention: some of a rank's queries over a range of the rank's keys.

    rows: [first, last) of the local rows. ghosts: queries behind them that only keep the others in their places: the
    last query of a call stands at the last key, and a window on the right lets a chunk see keys behind its end. Their
    results are dropped. keys: [first, last) in the rank's buffer of keys. position: of the first of these keys in the
    sequence, or None where the buffer has another order than the sequence. cu_seqlens_q, cu_seqlens_k: of packed
    documents, rows and keys counted from the piece's first; empty where there are none.
    """

    rows: tuple[int, int]
    ghosts: int
    keys: tuple[int, int]
    position: int | None
    cu_seqlens_q: tuple[int, ...] = ()
    cu_seqlens_k: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return self.rows[1] - self.rows[0] + self.ghosts

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
    """A rank's work: its pieces, and what its buffer of keys holds, in order."""

    buffer: tuple[Run, ...]
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return self.buffer[-1].end if self.buffer else 0

    @property
    def order(self) -> list[int]:
        """The numbers of the pieces, that with most work first."""
        return sorted(range(len(self.pieces)), key=lambda i: -self.pieces[i].queries * self.pieces[i].num_keys)


class Message(NamedTuple):
    """Adjacent rows of keys that one rank sends another, by their first rows in the buffers of both."""

    sent: int
    received: int
    rows: int


class Shares:
    """Every rank's ``Share`` of one sequence, by rank, and what follows from them for all calls of it.

    own: by chunk, what its owner's buffer has of it, which is all rows that exist. messages: by (sender, receiver).
    several: whether any pair of ranks has more than one. most_received: rows of keys that the rank with most of them
    gets from others. all_have_local_work: whether every rank that waits for others' keys has a piece that needs none of
    them.
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
            if received and not any(self.is_local(rank, piece) for piece in share.pieces):
                self.all_have_local_work = False
        self.several = any(len(messages) > 1 for messages in self.messages.values())

    def owned_by(self, rank: int) -> tuple[int, ...]:
        """A rank's chunks, in the order of its local rows."""
        return chunks_of(rank, len(self.shares), self.sharding)

    def is_local(self, rank: int, piece: Piece) -> bool:
        """Whether a piece of a rank needs no other rank's keys."""
        first, last = piece.keys
        met = [run for run in self.shares[rank].buffer if run.start < last and first < run.end]
        return all(run.chunk in self.owned_by(rank) for run in met)


def merged(share: Share) -> Share:
    """``share`` with pieces of packed documents joined to one where they have no document in common and their rows and
    keys are adjacent: one launch in place of several."""
    pieces: list[Piece] = []
    for piece in share.pieces:
        last = pieces[-1] if pieces else None
        if last is None or last.ghosts or (last.rows[1], last.keys[1]) != (piece.rows[0], piece.keys[0]):
            pieces.append(piece)
            continue
        pieces[-1] = Piece(
            (last.rows[0], piece.rows[1]),
            piece.ghosts,
            (last.keys[0], piece.keys[1]),
            None,
            (*last.cu_seqlens_q, *(last.queries + x for x in piece.cu_seqlens_q[1:])),
            (*last.cu_seqlens_k, *(last.num_keys + x for x in piece.cu_seqlens_k[1:])),
        )
    return Share(share.buffer, tuple(pieces))


class Range(NamedTuple):
    """``Piece`` before the buffer is known: keys [first, last) of the sequence."""

    rows: tuple[int, int]
    ghosts: int
    first: int
    last: int
    cu_seqlens_q: tuple[int, ...] = ()
    cu_seqlens_k: tuple[int, ...] = ()


def _buffer(rows: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """The runs of these (chunk, first row, rows), one behind the other."""
    starts = itertools.accumulate((count for _, _, count in rows), initial=0)
    return tuple(Run(*one, start) for one, start in zip(rows, starts))


def share_of_ranges(ranges: list[Range], chunk: int) -> Share:
    """The ``Share`` of these ranges: a buffer of the keys that any of them needs, in order.

    Of a chunk of ``chunk`` rows it has one run, from the first key that a range needs to the last.
    """
    limits: dict[int, tuple[int, int]] = {}
    for r in ranges:
        for c in range(r.first // chunk, (r.last - 1) // chunk + 1):
            first, last = max(r.first - c * chunk, 0), min(r.last - c * chunk, chunk)
            known = limits.get(c, (first, last))
            limits[c] = min(first, known[0]), max(last, known[1])
    buffer = _buffer([(c, first, last - first) for c, (first, last) in sorted(limits.items())])
    pieces = []
    for r in ranges:
        run = next(run for run in buffer if run.chunk == r.first // chunk)
        start = run.start + r.first % chunk - run.first
        keys = (start, start + r.last - r.first)
        pieces.append(Piece(r.rows, r.ghosts, keys, r.first, r.cu_seqlens_q, r.cu_seqlens_k))
    return Share(buffer, tuple(pieces))


@functools.lru_cache(maxsize=1024)
def shares(size: int, sharding: str, local: int, total: int, causal: bool, window: tuple[int, int] | None) -> Shares:
    """The ``Share`` of every rank of P = ``size``, for one sequence of ``local`` rows a rank.

    total: rows from there on do not exist. window: as in ``rope_attention``, None where neither side is bounded.
    """
    found = [_share(rank, size, sharding, local, total, causal, window) for rank in range(size)]
    return Shares(tuple(found), sharding)


def _share(rank, size, sharding, local, total, causal, window) -> Share:
    owned = chunks_of(rank, size, sharding)
    chunk = local // len(owned)
    if not causal and window is None:
        return _whole(owned, chunk, chunk_count(size, sharding), total)
    ranges = []
    for i, c in enumerate(owned):
        begin, end = c * chunk, min((c + 1) * chunk, total)
        if end <= begin:
            continue
        first = 0
        if window is not None and window[0] >= 0:
            first = max(0, begin - window[0]) // BLOCK * BLOCK
        ghosts = 0
        if not causal:
            ghosts = total - end if window[1] < 0 else min(window[1], total - end)
        ranges.append(Range((i * chunk, i * chunk + end - begin), ghosts, first, end + ghosts))
    return share_of_ranges(ranges, chunk)


def _whole(owned, chunk: int, count: int, total: int) -> Share:
    """All keys for all queries. A softmax does not mind the order of its keys, so that the rank's own come last, where
    its queries stand: each finds its own row of the tables, which are put into the same order."""
    existing = {c: min(chunk, total - c * chunk) for c in range(count) if total > c * chunk}
    own = [c for c in owned if c in existing]
    if not own:
        return Share((), ())
    buffer = _buffer([(c, 0, existing[c]) for c in (*(c for c in existing if c not in own), *own)])
    rows = sum(existing[c] for c in own)
    return Share(buffer, (Piece((0, rows), 0, (0, min(total, count * chunk)), None),))
