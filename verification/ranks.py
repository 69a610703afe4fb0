"""Processes that share sequences: one pool of them serves many tests, since each takes seconds to begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fused_rope_attn.runtime.device import is_interpreted

TIMEOUT = 120  # seconds for one function on all ranks

# Every process makes all of them, in this order, as PyTorch wants it.
GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3), (1, 3))
_groups: dict[tuple[int, ...], Any] = {}


class Ranks:
    """``size`` processes with a default process group, which run functions of importable modules. On a CPU they are
    forks of one process that has imported the modules ``preload``; CUDA does not survive a fork."""

    def __init__(self, size: int, backend: str = "gloo", preload: tuple[str, ...] = ("verification.context_parallel",)):
        # Its port is one that is free, also where several pools begin at once.
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        context.set_forkserver_preload(list(preload))
        self.processes = [context.Pool(1, _begin, (rank, size, backend, self.store.port)) for rank in range(size)]

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """``function(*arguments)`` on these ranks, all by default: what each returned, or the exception it raised."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        pending = {rank: self.processes[rank].apply_async(function, arguments) for rank in chosen}
        results = []
        for rank, call in pending.items():
            try:
                results.append(call.get(TIMEOUT))
            except mp.TimeoutError:
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {TIMEOUT} s") from None
            except Exception as error:  # its cause is the traceback of the rank
                results.append(error)
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


def _begin(rank: int, size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif is_interpreted():
        from verification.interpreter import make_faster

        make_faster()
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _groups.update({members: dist.new_group(list(members)) for members in GROUPS if max(members) < size})


def group_of(members: tuple[int, ...]) -> Any:
    """The process group of these global ranks."""
    return _groups[members]
