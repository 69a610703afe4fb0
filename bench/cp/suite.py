"""``python -m bench cp``: a process for each GPU, in which all ranks time the same calls of the same run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.cp import tables
from bench.cp.providers import KINDS, PROVIDERS, CpCase, CpProvider
from bench.gate import Verdict
from bench.report import Row
from bench.runner import Run
from bench.suite import Entry, Options, Suite, Times, Trial, forward_or_backward
from bench.timing import DeviceClock, ratio

_MOST_CALLS = 10  # of one provider in one round


class RanksClock(DeviceClock):
    """Device time of the rank that takes longest, the most memory of a rank, and decisions that all ranks share."""

    def __init__(self, device: torch.device, group: Any):
        super().__init__(device)
        self.group = group

    def _most(self, values: list[float]) -> list[float]:
        found = torch.tensor(values, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.tolist()

    def peak_mib(self, fn: Callable[[], Any]) -> float:
        return self._most([super().peak_mib(fn)])[0]

    def sample(self, fn: Callable[[], Any], calls: int) -> list[float]:
        """Return the ms of each of ``calls`` calls in succession, after one that is not measured."""
        fn()
        self.synchronize()
        dist.barrier(self.group)
        return self._most(self._times(fn, calls))

    def _times(self, fn: Callable[[], Any], calls: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda._sleep(2_000_000)  # some work, during which the hosts get ahead of their GPUs
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        self.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:])]

    def calls_for(self, fn: Callable[[], Any], round_ms: float) -> int:
        return max(1, min(_MOST_CALLS, int(round_ms / max(self.sample(fn, 1)[0], 1e-3))))


class CpTrial(Trial):
    """One case. It has no gate: the tests on several GPUs hold every rank to float64."""

    case: CpCase
    measures_memory = True
    default_modes = ("eager",)
    facts = ("kind", "length", "ranks", "heads_q", "heads_kv", "head_dim", "dtype")

    def __init__(self, case: CpCase, providers: Sequence[CpProvider], clock: RanksClock, options: Options) -> None:
        super().__init__(case, providers, clock, options)
        self._inputs, self._tables = case.inputs(clock.device), case.tables(clock.device)

    def unsupported(self, provider: CpProvider) -> str | None:
        return None if self.case.kind in provider.only else f"serves {', '.join(provider.only)} only"

    def enter(self, provider: CpProvider) -> Entry:
        run, shards, active = provider.prepare(self.case, self._inputs, self._tables, self.clock.group)
        leaves = [x.detach().requires_grad_() for x in shards[:3]]

        def make(part: str) -> Callable[[], Any]:
            # The forward builds the graph of autograd, as training does.
            return forward_or_backward(run, leaves, shards[3], "fwd_grad" if part == "fwd" else part)

        return Entry(provider, Verdict(), make, active=active)

    def gated(self) -> None:
        self._inputs = []

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Return one GPU's time divided by the number of GPUs, over this time: 1 is ideal."""
        rounds = {name: found.round_medians for name, found in measured.items()}
        one = rounds.pop("one", None)
        if one is None:
            return {}
        ranks = self.case.ranks
        return {name: {"efficiency": ratio(one, times) / ranks} for name, times in rounds.items()}


def serve(
    rank: int, size: int, address: str, options: Options, cases: list[CpCase], names: list[str], facts: Row, out: Any
) -> None:
    """Run all cases as one rank of GPUs."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size, device_id=device)
    try:
        send(rank, RanksClock(device, dist.new_group(list(range(size)))), options, cases, names, facts, out)
    finally:
        dist.destroy_process_group()


def send(
    rank: int, clock: RanksClock, options: Options, cases: list[CpCase], names: list[str], facts: Row, out: Any
) -> None:
    """Run all cases with a clock that all ranks share; rank 0 sends rows, progress and what was not run to ``out``."""
    run = Run(CP, options, clock, facts, lambda case: CP.providers(case, names))
    if rank == 0:
        run.progress = lambda share, text: out.put((share, text))
    for block in run.rows(cases):
        if rank == 0:
            out.put(block)
    if rank == 0:
        out.put(run.not_run)


@dataclass
class RanksRun:
    """A ``runner.Run`` in processes: for each number of GPUs one process a GPU, which calls ``serve``."""

    options: Options
    facts: Row
    names: list[str]
    progress: Callable[[float, str], None] = lambda share, text: None
    serve: Callable[..., None] = serve
    not_run: list[str] = field(default_factory=list)

    def rows(self, cases: list[CpCase]) -> Iterator[list[Row]]:
        """Yield the rows of one case after the other."""
        for size in dict.fromkeys(case.ranks for case in cases):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"tcp://localhost:{free.getsockname()[1]}"
            here = [case for case in cases if case.ranks == size]
            out = mp.get_context("spawn").SimpleQueue()
            given = (size, address, self.options, here, self.names, self.facts, out)
            ranks = mp.spawn(self.serve, args=given, nprocs=size, join=False)
            ended = False
            while not ended:
                try:
                    ended = ranks.join(timeout=0.2)
                except Exception as error:  # what was measured before is in the queue
                    self.not_run.append(f"rest of {size} GPUs ({type(error).__name__}: {error})")
                    ended = True
                while not out.empty():
                    message = out.get()
                    if isinstance(message, tuple):
                        self.progress(message[0], f"{size} GPUs: {message[1]}")
                    elif message and isinstance(message[0], str):
                        self.not_run += message
                    elif message:
                        yield message


def _run(suite: Suite, cases: list[CpCase], options: Options, facts: Row, names: list[str], progress: Any) -> RanksRun:
    """Return the run. RuntimeError where there are fewer GPUs than a case takes."""
    asked, count = max(case.ranks for case in cases), torch.cuda.device_count()
    if count < asked:
        raise RuntimeError(f"{asked} GPUs are asked for, and here are {count}")
    return RanksRun(options, facts, names, progress)


CP = Suite(
    name="cp",
    description="Time causal attention of one sequence over several GPUs.",
    cases=[CpCase(k, n, p) for p in (4, 2, 1) for k in KINDS for n in (1 << 15, 1 << 17, 1 << 18)],
    trial=CpTrial,
    table=lambda case: {name: p for name, p in PROVIDERS.items() if case.kind in p.only},
    modes=("eager",),
    rounds=3,
    round_ms=400.0,
    run=_run,
    draw=tables.draw,
)
