"""The exchange of keys and values with the ranks that see them, and of their gradients with the ranks that own them.

Both buffers are (rows, 2, B, H, D), because adjacent rows of a chunk are then adjacent in memory: no copy is needed
before they are sent, nor between their arrival and the kernels or sums that read them.
"""

from __future__ import annotations

import torch

from fused_rope_attn.attention.problem import Gradients
from fused_rope_attn.distributed.groups import Exchange
from fused_rope_attn.distributed.layout import Call


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(rows, B, H, D) as (B, H, rows, D)."""
    return x.permute(1, 2, 0, 3)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, H, rows, D) as (rows, B, H, D)."""
    return x.permute(2, 0, 1, 3)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows of the same dtype, in words of 8 bytes if both allow it, because PyTorch's copy of tensors that are not
    contiguous moves one element at a time."""
    if _has_words(target) and _has_words(source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _has_words(x: torch.Tensor) -> bool:
    words = 8 // x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 8:
        return False
    return not any(n % words for n in (*x.stride()[:-1], x.shape[-1], x.storage_offset()))


class GatheredKeys:
    """The keys and values of some heads that this rank's queries see, gathered from k and v (B, H, N / P, D)."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor):
        batch, heads, _, columns = k.shape
        self.buffer = k.new_empty(call.own.length, 2, batch, heads, columns)
        for place, chunk in enumerate(call.owned):
            run = call.shares.own.get(chunk)
            if run is not None:
                first = place * call.chunk
                for i, x in enumerate((k, v)):
                    _copy(self.buffer[run.start : run.end, i], _rows_first(x[:, :, first : first + run.rows]))
        self.exchange: Exchange | None = None
        if call.shares.messages:
            inputs = [[self.buffer[m.sent :][: m.rows] for m in part] for part in call.sent]
            outputs = [[self.buffer[m.received :][: m.rows] for m in part] for part in call.received]
            self.exchange = Exchange(call.group, outputs, inputs, self.buffer, several=call.shares.several)

    def wait(self) -> None:
        """Let the current stream wait until all keys have arrived."""
        if self.exchange is not None:
            self.exchange.wait()

    @property
    def k(self) -> torch.Tensor:
        """(B, H, rows of the buffer, D)."""
        return _heads_first(self.buffer[:, 0])

    @property
    def v(self) -> torch.Tensor:
        return _heads_first(self.buffer[:, 1])


class ScatteredGradients:
    """This rank's parts of dk and dv of some heads, which are sent to the owners of the keys and summed there.

    The kernels write them in float32 (float64 for float64). A segment that has keys in common with one before it, in
    the order of the share, writes to a buffer of its own, and ``add`` adds that.
    """

    def __init__(self, call: Call, like: torch.Tensor):
        """like: k of these heads, (B, H, N / P, D)."""
        batch, heads, _, columns = like.shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.call = call
        self.buffer = torch.empty(call.own.length, 2, batch, heads, columns, dtype=dtype, device=like.device)
        self.received = [[self.buffer.new_empty(m.rows, *self.buffer.shape[1:]) for m in part] for part in call.sent]
        self.exchange: Exchange | None = None
        # By segment: the keys that it shares with those before it.
        self.common: dict[int, list[tuple[int, int]]] = {}
        written: list[tuple[int, int]] = []
        for index in call.own.order:
            keys = call.own.segments[index].keys
            new = _gaps(written, keys)
            self.common[index] = _gaps(new, keys)
            written.append(keys)
        for first, last in _gaps(written, (0, call.own.length)):
            self.buffer[first:last].zero_()

    def outputs(self, index: int, heads: slice) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the buffers of dk and dv (B, H, keys, D) of segment number ``index`` and of some of these heads; None:
        the segment has buffers of its own."""
        if self.adds(index):
            return None, None
        part = self.buffer[slice(*self.call.own.segments[index].keys), :, :, heads]
        return _heads_first(part[:, 0]), _heads_first(part[:, 1])

    def adds(self, index: int) -> bool:
        """Return whether a segment writes to buffers of its own."""
        return bool(self.common[index])

    def add(self, index: int, heads: slice, found: Gradients) -> None:
        """Add the gradients in a segment's own buffers, after the segments before it."""
        keys = self.call.own.segments[index].keys
        new = _gaps(self.common[index], keys)
        for i, gradient in enumerate((found.dk, found.dv)):
            target, rows = self.buffer[:, i, :, heads], _rows_first(gradient)
            for first, last in self.common[index]:
                target[first:last].add_(rows[first - keys[0] : last - keys[0]])
            for first, last in new:
                _copy(target[first:last], rows[first - keys[0] : last - keys[0]])

    def send(self) -> None:
        """Begin the exchange, after all segments."""
        call = self.call
        if call.shares.messages:
            inputs = [[self.buffer[m.received :][: m.rows] for m in part] for part in call.received]
            self.exchange = Exchange(call.group, self.received, inputs, self.buffer, several=call.shares.several)

    def wait(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums over all ranks to dk and dv (B, H, N / P, D), rounded once: first this rank's part, then the
        others in the order of the ranks."""
        if self.exchange is not None:
            self.exchange.wait()
        arrived = [x for pair in zip(self.call.sent, self.received) for x in zip(*pair)]
        for place, chunk in enumerate(self.call.owned):
            own, first = self.call.shares.own.get(chunk), place * self.call.chunk
            targets = [x[:, :, first : first + self.call.chunk] for x in (dk, dv)]
            if own is None:
                targets[0].zero_(), targets[1].zero_()
                continue
            terms = [
                (max(m.sent, own.start), min(m.sent + m.rows, own.end), part[max(0, own.start - m.sent) :])
                for m, part in arrived
                if m.sent < own.end and own.start < m.sent + m.rows
            ]
            # The last addition rounds, if it is of all rows.
            last = terms.pop()[2][: own.rows] if terms and terms[-1][:2] == (own.start, own.end) else None
            for begin, end, part in terms:
                self.buffer[begin:end].add_(part[: end - begin])
            total = self.buffer[own.start : own.end]
            for i, target in enumerate(targets):
                target[:, :, own.rows :].zero_()
                target = target[:, :, : own.rows]
                if last is None:
                    target.copy_(_heads_first(total[:, i]))
                else:
                    torch.add(_heads_first(total[:, i]), _heads_first(last[:, i]), out=target)


def _gaps(ranges: list[tuple[int, int]], within: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the parts of a range that ``ranges`` do not cover."""
    gaps, end = [], within[0]
    for first, last in sorted(ranges):
        if min(first, within[1]) > end:
            gaps.append((end, min(first, within[1])))
        end = max(end, last)
    if end < within[1]:
        gaps.append((end, within[1]))
    return gaps
