"""``torchrun --nproc-per-node P -m bench cp``: every rank times the same calls, and rank 0 writes the rows."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.cp.providers import KINDS, PROVIDERS, CpCase, CpProvider
from bench.gate import Verdict
from bench.report import Row
from bench.suite import Entry, Options, Suite, Times, Trial, forward_or_backward
from bench.timing import DeviceClock, ratio
from fused_rope_attn import rope_tables

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
        self._inputs = case.inputs(clock.device)
        self._tables = rope_tables(case.length, case.head_dim, base=500000.0, device=clock.device)

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


def _adapt(chosen: list[CpCase], options: Options, args: argparse.Namespace) -> list[CpCase]:
    """Keep the cases of as many GPUs as torchrun has started ranks; without it all of them, for --dry-run."""
    ranks = os.environ.get("WORLD_SIZE")
    kept = [case for case in chosen if ranks in (None, str(case.ranks))]
    if not kept:
        raise ValueError(f"no case of {ranks} ranks; there are some of {sorted({case.ranks for case in CP.cases})}")
    return kept


def _clock(device: torch.device, options: Options) -> RanksClock:
    """Join the ranks and return their clock. RuntimeError where there are none."""
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError("needs a process for each GPU: torchrun --nproc-per-node P -m bench cp")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    atexit.register(dist.destroy_process_group)
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 prints for all
    return RanksClock(device, dist.group.WORLD)


CP = Suite(
    name="cp",
    description="Time causal attention of one sequence over several GPUs.",
    cases=[CpCase(k, n, p) for p in (4, 2, 1) for k in KINDS for n in (1 << 15, 1 << 17, 1 << 18)],
    trial=CpTrial,
    table=lambda case: {name: p for name, p in PROVIDERS.items() if case.kind in p.only},
    modes=("eager",),
    rounds=3,
    round_ms=400.0,
    adapt=_adapt,
    clock=_clock,
)
