"""How a sequence is cut: chunks, their owners, and what one rank's queries need. Integers only; no tensors.

A sequence of N rows is cut into equal chunks. ``"zigzag"`` cuts 2P of them and gives rank r the chunks r and 2P-1-r, so
that under a causal mask all ranks have equal work; ``"contiguous"`` cuts P, one for each rank.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SHARDINGS = ("zigzag", "contiguous")
# Keys before a window are left out in whole blocks of keys, of which no kernel takes more at a time.
BLOCK = 256


def chunks_of(rank: int, size: int, sharding: str) -> tuple[int, ...]:
    """The chunks of a rank, in the order of its local rows."""
    return (rank, 2 * size - 1 - rank) if sharding == "zigzag" else (rank,)


def owner_of(chunk: int, size: int) -> tuple[int, int]:
    """(rank, which of its chunks it is) of a chunk, in either sharding."""
    return (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)


def chunk_count(size: int, sharding: str) -> int:
    return 2 * size if sharding == "zigzag" else size


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


class Share(NamedTuple):
    """A rank's work: its pieces, and the rows of its buffer of keys, (chunk, how many of the chunk's rows) in order."""

    buffer: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(rows for _, rows in self.buffer)

    @property
    def chunks(self) -> frozenset[int]:
        return frozenset(chunk for chunk, _ in self.buffer)


class Range(NamedTuple):
    """``Piece`` before the buffer is known: keys [first, last) of the sequence."""

    rows: tuple[int, int]
    ghosts: int
    first: int
    last: int
    cu_seqlens_q: tuple[int, ...] = ()
    cu_seqlens_k: tuple[int, ...] = ()


def share_of_ranges(ranges: list[Range], chunk: int, total: int) -> Share:
    """The ``Share`` of these ranges: a buffer of every chunk of ``chunk`` rows that any of them meets, in order."""
    met = sorted({c for r in ranges for c in range(r.first // chunk, (r.last - 1) // chunk + 1)})
    buffer = tuple((c, min(chunk, total - c * chunk)) for c in met)
    # Only the last chunk of all may have fewer rows, so that the others' places are multiples of the chunk.
    place = {c: i * chunk for i, c in enumerate(met)}
    pieces = []
    for r in ranges:
        start = place[r.first // chunk] + r.first % chunk
        keys = (start, start + r.last - r.first)
        pieces.append(Piece(r.rows, r.ghosts, keys, r.first, r.cu_seqlens_q, r.cu_seqlens_k))
    return Share(buffer, tuple(pieces))


@functools.lru_cache(maxsize=1024)
def shares(
    size: int, sharding: str, local: int, total: int, causal: bool, window: tuple[int, int] | None
) -> tuple[Share, ...]:
    """The ``Share`` of every rank of P = ``size``, for one sequence of ``local`` rows a rank.

    total: rows from there on do not exist. window: as in ``rope_attention``, None where neither side is bounded.
    """
    return tuple(_share(rank, size, sharding, local, total, causal, window) for rank in range(size))


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
    return share_of_ranges(ranges, chunk, total)


def _whole(owned, chunk: int, count: int, total: int) -> Share:
    """All keys for all queries. A softmax does not mind the order of its keys, so that the rank's own come last, where
    its queries stand: each finds its own row of the tables, which are put into the same order."""
    existing = {c: min(chunk, total - c * chunk) for c in range(count) if total > c * chunk}
    own = [c for c in owned if c in existing]
    if not own:
        return Share((), ())
    buffer = tuple((c, existing[c]) for c in (*(c for c in existing if c not in own), *own))
    rows = sum(existing[c] for c in own)
    return Share(buffer, (Piece((0, rows), 0, (0, min(total, count * chunk)), None),))
