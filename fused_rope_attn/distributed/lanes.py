"""Two streams for the pieces of one call, so that the launch of one fills the multiprocessors that another leaves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# By (device, stream): beside each stream its own, so that threads with streams of their own do not meet.
_sides: dict[tuple[int, int], Any] = {}


class Lanes:
    """Lane 0 is the current stream, lane 1 a stream beside it; on a CPU both are nothing.

    Lane 1 begins when what was launched before is over, and the current stream goes on behind the ``with`` when lane 1
    is done. Memory that both lanes use must be allocated before, and held until then.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.main = torch.cuda.current_stream(device)
            key = self.main.device_index, self.main.cuda_stream
            if key not in _sides:
                _sides[key] = torch.cuda.Stream(device)
            self.side = _sides[key]

    def __enter__(self) -> Lanes:
        if self.on_gpu:
            self.side.wait_stream(self.main)
        return self

    def __exit__(self, *error: object) -> None:
        if self.on_gpu:
            self.main.wait_stream(self.side)

    def lane(self, number: int) -> AbstractContextManager:
        """What is launched inside goes to this lane."""
        return torch.cuda.stream(self.side if number else self.main) if self.on_gpu else nullcontext()

    def wait_for_main(self) -> None:
        """Lane 1 goes on when what lane 0 was given so far is over."""
        if self.on_gpu:
            self.side.wait_stream(self.main)
