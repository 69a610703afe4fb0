"""``torchrun --nproc-per-node P -m bench cp``: one sequence over P GPUs, and who is measured: one GPU, ours, PyTorch.

Every rank times the same calls, and rank 0 writes the rows.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.gate import Verdict
from bench.report import Row
from bench.suite import Entry, Options, Provider, Suite, Times, Trial, by_name, forward_or_backward, length_name, normal
from bench.timing import DeviceClock, ratio
from fused_rope_attn import apply_rope, rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp

_MOST_CALLS = 10  # of one provider in one round
KINDS = ("plain", "window", "packed")


@dataclass(frozen=True)
class CpCase:
    """One causal sequence of ``length`` tokens on ``ranks`` GPUs."""

    kind: str
    length: int
    ranks: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.kind}-{length_name(self.length)}"

    @property
    def shape(self) -> str:
        return f"P={self.ranks}"

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def window(self) -> tuple[int, int] | None:
        return (4096, 0) if self.kind == "window" else None

    @property
    def documents(self) -> list[int]:
        """Return where documents of 512 to 32768 tokens begin and end; logarithms of lengths are drawn uniformly."""
        generator, limits = random.Random(self.length), [0]
        while limits[-1] < self.length:
            limits.append(min(self.length, limits[-1] + int(2 ** generator.uniform(9, 15))))
        return limits


class Prepared(NamedTuple):
    """A provider's call of one case: ``run(q, k, v) -> o``, its q, k, v and gradient of o, and when it is active."""

    run: Callable[..., Tensor]
    shards: list[Tensor]
    active: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True, kw_only=True)
class CpProvider(Provider):
    """``prepare(case, inputs, tables, group)`` shards q, k, v and do. only: the kinds that it serves."""

    prepare: Callable[[CpCase, list[Tensor], tuple[Tensor, Tensor], Any], Prepared]
    only: tuple[str, ...] = KINDS


def _packed(function: Callable[..., Tensor], *given: Any, **options: Any) -> Callable[..., Tensor]:
    """Return a function of packed (T, H, D) as one of (1, H, T, D)."""

    def run(*qkv: Tensor) -> Tensor:
        return function(*(x[0].transpose(0, 1) for x in qkv), *given, **options).transpose(0, 1)[None]

    return run


def _one(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
    """Run the whole sequence on one GPU. Every GPU does, so that all are as warm."""
    if case.kind != "packed":
        return Prepared(lambda q, k, v: rope_attention(q, k, v, *tables, True, window=case.window), inputs)
    limits = case.documents
    longest = max(b - a for a, b in zip(limits, limits[1:]))
    cu = torch.tensor(limits, dtype=torch.int32, device=inputs[0].device)
    return Prepared(_packed(rope_attention_varlen, *tables, cu, cu, longest, longest, True), inputs)


def _ours(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
    """Run ours with zigzag shards, by the method that ``plan_cp`` chooses."""
    shards = [cp_shard(x, 2, group=group) for x in inputs]
    if case.kind != "packed":
        return Prepared(lambda q, k, v: rope_attention_cp(q, k, v, *tables, group=group, window=case.window), shards)
    plan = plan_varlen_cp(case.documents, group=group, device=inputs[0].device, sharding="zigzag")
    return Prepared(_packed(rope_attention_varlen_cp, *tables, plan), shards)


def _torch(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
    """Run PyTorch's own with SDPA's flash attention on rotated q and k: its rotation costs nothing here.

    K and V have as many heads as Q, because its ring takes no grouped ones.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = inputs
    k, v = (x.repeat_interleave(case.heads_q // case.heads_kv, dim=1) for x in (apply_rope(k, *tables), v))
    # Its load balancing cuts as our zigzag does.
    shards = [cp_shard(x, 2, group=group).contiguous() for x in (apply_rope(q, *tables), k, v, do)]
    mesh = DeviceMesh.from_group(group, do.device.type, mesh_dim_names=("cp",))

    @contextmanager
    def active() -> Iterator[None]:
        buffer = torch.zeros(case.length, device=do.device)  # it reads the length of the sequence from a buffer
        ring = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), ring:
            yield

    return Prepared(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), shards, active)


PROVIDERS: dict[str, CpProvider] = by_name(
    (
        CpProvider("one", "one GPU", "ceiling", prepare=_one),
        CpProvider("fused", "ours", "ours", prepare=_ours),
        CpProvider("torch", "torch context_parallel", prepare=_torch, only=("plain",)),
    )
)


# Clock and trial


class RanksClock(DeviceClock):
    """Device time of the rank that takes longest, and decisions that all ranks share."""

    def __init__(self, device: torch.device, group: Any):
        super().__init__(device)
        self.group = group

    def sample(self, fn: Callable[[], Any], calls: int) -> list[float]:
        """Return the ms of each of ``calls`` calls in succession, after one that is not measured."""
        fn()
        self.synchronize()
        dist.barrier(self.group)
        times = torch.tensor(self._times(fn, calls), device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return times.tolist()

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
        """Return the same number on all ranks."""
        return max(1, min(_MOST_CALLS, int(round_ms / max(self.sample(fn, 1)[0], 1e-3))))


class CpTrial(Trial):
    """One case. It has no gate: the tests on several GPUs hold every rank to float64."""

    case: CpCase
    default_modes = ("eager",)
    facts = ("kind", "length", "ranks", "heads_q", "heads_kv", "head_dim", "dtype")

    def open(self) -> None:
        case, device = self.case, self.clock.device
        heads = case.heads_q, case.heads_kv, case.heads_kv, case.heads_q
        tensors = normal([(1, case.length, count, case.head_dim) for count in heads], case.dtype, device)
        self._inputs = [x.transpose(1, 2) for x in tensors]  # q, k, v and do of the whole sequence, on every GPU
        self._tables = rope_tables(case.length, case.head_dim, base=500000.0, device=device)

    def enter(self, provider: CpProvider) -> Entry:
        run, shards, active = provider.prepare(self.case, self._inputs, self._tables, self.clock.group)
        leaves = [x.detach().requires_grad_() for x in shards[:3]]

        def make(part: str) -> Callable[[], Any]:
            # The forward builds the graph of autograd, as training does.
            return forward_or_backward(run, leaves, shards[3], "fwd_grad" if part == "fwd" else part)

        return Entry(provider, Verdict(), make, active=active)

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        """Return one GPU's time divided by the number of GPUs, over this time: 1 is ideal."""
        one, others = measured.get("one"), measured.keys() - {"one"}
        rounds = {name: measured[name].round_medians for name in others if one is not None}
        return {name: {"efficiency": ratio(one.round_medians, x) / self.case.ranks} for name, x in rounds.items()}


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
