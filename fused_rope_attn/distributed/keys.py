"""Keys and values on their way to the ranks whose queries see them, and their gradients on the way back.

Both lie in buffers whose rows come first, (rows, 2, B, H, D), so that adjacent rows of a chunk are adjacent in memory:
they leave from where they are written and arrive where they are read, by the kernels or by the sums.
"""

from __future__ import annotations

import torch

from fused_rope_attn.attention.problem import Gradients
from fused_rope_attn.distributed.call import Call
from fused_rope_attn.distributed.groups import Exchange
from fused_rope_attn.distributed.layout import Run


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(rows, B, H, D) as (B, H, rows, D)."""
    return x.permute(1, 2, 0, 3)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, H, rows, D) as (rows, B, H, D)."""
    return x.permute(2, 0, 1, 3)


def _parts(buffer: torch.Tensor, runs: list[Run | None]) -> list[torch.Tensor]:
    """The buffer's rows of each run, which are contiguous; none for None."""
    return [buffer[:0] if run is None else buffer[run.start : run.end] for run in runs]


class Keys:
    """The keys and values of some heads, k and v (B, H, N / P, D), on their way to this rank."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor):
        batch, heads, _, columns = k.shape
        self.buffer = k.new_empty(call.own.length, 2, batch, heads, columns)
        for place, chunk in enumerate(call.owned):
            run = call.shares.own.get(chunk)
            if run is not None:
                first = place * call.chunk
                for i, x in enumerate((k, v)):
                    self.buffer[run.start : run.end, i].copy_(_rows_first(x[:, :, first : first + run.rows]))
        self.exchanges = []
        for place in call.shares.exchanged:
            own = call.shares.own.get(call.owned[place])
            mine = _parts(self.buffer, [own])[0]
            inputs = [mine[:0] if run is None else mine[run.first :][: run.rows] for run in call.sent_to(place)]
            outputs = _parts(self.buffer, call.received_from(place))
            self.exchanges.append(Exchange(call.group, outputs, inputs))

    def wait(self) -> None:
        """Let the current stream go on when all keys are there."""
        for exchange in self.exchanges:
            exchange.wait()

    @property
    def k(self) -> torch.Tensor:
        """(B, H, rows of the buffer, D)."""
        return _heads_first(self.buffer[:, 0])

    @property
    def v(self) -> torch.Tensor:
        return _heads_first(self.buffer[:, 1])


class KeyGradients:
    """This rank's parts of dk and dv of some heads, and their way to the ranks whose keys they are of.

    The kernels write them in float32 (float64 for float64). A piece that has keys in common with one before it, in the
    order of the share, writes to a place of its own, from which ``add`` adds it.
    """

    def __init__(self, call: Call, like: torch.Tensor):
        """like: k of these heads, (B, H, N / P, D)."""
        batch, heads, _, columns = like.shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.call = call
        self.buffer = torch.empty(call.own.length, 2, batch, heads, columns, dtype=dtype, device=like.device)
        self.received = [
            [
                self.buffer.new_empty(0 if run is None else run.rows, *self.buffer.shape[1:])
                for run in call.sent_to(place)
            ]
            for place in range(len(call.owned))
        ]
        self.exchanges: list[Exchange] = []
        # By piece: the keys that it has in common with those before it.
        self.common: dict[int, list[tuple[int, int]]] = {}
        written: list[tuple[int, int]] = []
        for index in call.own.order:
            keys = call.own.pieces[index].keys
            ranges = [(max(first, keys[0]), min(last, keys[1])) for first, last in written]
            self.common[index] = [(first, last) for first, last in ranges if first < last]
            written.append(keys)
        for first, last in _gaps(written, (0, call.own.length)):
            self.buffer[first:last].zero_()

    def room(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the kernels write dk and dv (B, H, keys, D) of a piece of this number; None for a place of its own."""
        if self.common[index]:
            return None, None
        part = self.buffer[slice(*self.call.own.pieces[index].keys)]
        return _heads_first(part[:, 0]), _heads_first(part[:, 1])

    def add(self, index: int, found: Gradients) -> None:
        """Add what a piece has written to a place of its own, if it has. The pieces before it are done."""
        begin, end = self.call.own.pieces[index].keys
        if not self.common[index]:
            return
        for i, gradient in enumerate((found.dk, found.dv)):
            rows = _rows_first(gradient)
            for first, last in self.common[index]:
                self.buffer[first:last, i].add_(rows[first - begin : last - begin])
            for first, last in _gaps(self.common[index], (begin, end)):
                self.buffer[first:last, i].copy_(rows[first - begin : last - begin])

    def send(self) -> None:
        """Begin the exchange: all pieces are done."""
        for place in self.call.shares.exchanged:
            inputs = _parts(self.buffer, self.call.received_from(place))
            self.exchanges.append(Exchange(self.call.group, self.received[place], inputs))

    def wait(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums over all ranks to dk and dv (B, H, N / P, D), rounded once: of this rank's part and then the
        others', in the order of the ranks."""
        for exchange in self.exchanges:
            exchange.wait()
        for place, received in enumerate(self.received):
            own = self.call.shares.own.get(self.call.owned[place])
            total = _parts(self.buffer, [own])[0]
            count, first = len(total), place * self.call.chunk
            terms = [(run, part) for run, part in zip(self.call.sent_to(place), received) if run is not None]
            # The last addition rounds, where it is one of all rows.
            last = terms.pop()[1] if terms and terms[-1][0].rows == count else None
            for run, part in terms:
                total[run.first : run.first + run.rows].add_(part)
            for i, x in enumerate((dk, dv)):
                target = x[:, :, first : first + count]
                if last is None:
                    target.copy_(_heads_first(total[:, i]))
                else:
                    torch.add(_heads_first(total[:, i]), _heads_first(last[:, i]), out=target)
                x[:, :, first + count : first + self.call.chunk].zero_()


def _gaps(ranges: list[tuple[int, int]], within: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of a range that others inside it do not cover."""
    gaps, end = [], within[0]
    for first, last in sorted(ranges):
        if first > end:
            gaps.append((end, first))
        end = max(end, last)
    if end < within[1]:
        gaps.append((end, within[1]))
    return gaps
