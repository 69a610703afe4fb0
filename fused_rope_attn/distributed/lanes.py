"""Two streams for the pieces of one call, so that the launch of one fills the multiprocessors that another leaves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fused_rope_attn.runtime import device

# About 20 us, in cycles of a GPU's clock.
PAUSE_CYCLES = 40_000


class Lanes:
    """Lane 0 is the current stream, lane 1 the one beside it; where there is no GPU both are nothing.

    Lane 1 begins when what was launched before is over, and the current stream goes on behind the ``with`` when lane 1
    is done. Memory that both lanes use must be allocated before, and held until then.
    """

    def __init__(self, where: torch.device):
        self.streams = device.two_streams(where)

    def __enter__(self) -> Lanes:
        self.wait_for_main()
        return self

    def __exit__(self, *error: object) -> None:
        if self.streams is not None:
            main, side = self.streams
            main.wait_stream(side)

    def lane(self, number: int) -> AbstractContextManager[object]:
        """What is launched inside goes to this lane."""
        return nullcontext() if self.streams is None else device.on_stream(self.streams[number])

    def wait_for_main(self) -> None:
        """Lane 1 goes on when what lane 0 was given so far is over."""
        if self.streams is not None:
            main, side = self.streams
            side.wait_stream(main)

    def wait_for_other(self, number: int) -> None:
        """This lane goes on when what the other one was given so far is over."""
        if self.streams is not None:
            self.streams[number].wait_stream(self.streams[1 - number])

    def lend_to_main(self, tensors: list[torch.Tensor]) -> None:
        """Let the current stream read, when the lanes have met, what either lane has allocated."""
        if self.streams is not None:
            for x in tensors:
                x.record_stream(self.streams[0])

    def pause(self) -> None:
        """Both lanes meet and go on a moment later, so that an exchange that was begun before finds free
        multiprocessors. Launched with them, it may find none on one rank until their launches end, and on the others
        occupies some until then, waiting for that rank."""
        if self.streams is not None and PAUSE_CYCLES:
            main, side = self.streams
            main.wait_stream(side)
            device.pause(PAUSE_CYCLES)
            side.wait_stream(main)
