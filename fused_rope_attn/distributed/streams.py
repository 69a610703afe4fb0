"""Two streams for the segments of one call, so that one launch fills the multiprocessors that another leaves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fused_rope_attn.runtime import device

# About 20 us, in cycles of a GPU's clock.
PAUSE_CYCLES = 40_000


class TwoStreams:
    """The current stream, number 0, and a side stream, number 1. Without a GPU both do nothing.

    The side stream waits for the current one at the beginning of the ``with`` block, and the current one for the side
    stream at its end. Memory that both use must be allocated before the block and held until its end.
    """

    def __init__(self, where: torch.device):
        self.streams = device.two_streams(where)

    def __enter__(self) -> TwoStreams:
        self.wait_for_other(1)
        return self

    def __exit__(self, *error: object) -> None:
        self.wait_for_other(0)

    def stream(self, number: int) -> AbstractContextManager[object]:
        """Return a context in which launches go to this stream."""
        return nullcontext() if self.streams is None else device.on_stream(self.streams[number])

    def wait_for_other(self, number: int) -> None:
        """Let this stream wait for all work so far of the other one."""
        if self.streams is not None:
            self.streams[number].wait_stream(self.streams[1 - number])

    def lend_to_main(self, tensors: list[torch.Tensor]) -> None:
        """Let the current stream read ``tensors`` of either stream, after the streams have joined."""
        if self.streams is not None:
            for x in tensors:
                x.record_stream(self.streams[0])

    def pause(self) -> None:
        """Join both streams and stop them for a moment, so that an exchange that began before finds free
        multiprocessors. Otherwise it may find none on one rank until the launches end, while it occupies some on the
        other ranks, which wait for that rank."""
        if self.streams is not None and PAUSE_CYCLES:
            self.wait_for_other(0)
            device.pause(PAUSE_CYCLES)
            self.wait_for_other(1)
