"""Processes that share sequences: one pool of them serves many tests, since each takes seconds to begin."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 120  # seconds for one function on all ranks

# Every process makes all of them, in this order, as PyTorch wants it.
GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3), (1, 3))
_groups: dict[tuple[int, ...], Any] = {}


class Ranks:
    """``size`` processes with a default process group, which run functions of importable modules."""

    def __init__(self, size: int, backend: str = "gloo"):
        context = mp.get_context("spawn")
        # Its port is one that is free, also where several pools begin at once.
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = self.store.port
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, backend, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """``function(*arguments)`` on these ranks, all by default: what each returned, or the exception it raised."""
        chosen = range(len(self.pipes)) if ranks is None else ranks
        for rank in chosen:
            self.pipes[rank].send((function, arguments))
        results = []
        for rank in chosen:
            if not self.pipes[rank].poll(TIMEOUT):
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {TIMEOUT} s")
            results.append(self.pipes[rank].recv())
        return results

    def results(self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """``run`` where no rank may raise."""
        results = self.run(function, *arguments, ranks=ranks)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(10)


def _serve(rank: int, size: int, backend: str, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _make_groups(size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(traceback.format_exc())
            result = error
        pipe.send(result)


def _make_groups(size: int) -> None:
    for members in GROUPS:
        if max(members) < size:
            _groups[members] = dist.new_group(list(members))


def group_of(members: tuple[int, ...]) -> Any:
    """The process group of these global ranks."""
    return _groups[members]
