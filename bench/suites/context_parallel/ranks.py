"""What runs on every rank of ``python -m bench cp``: rounds in which all ranks time the same calls."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.suites.context_parallel.cases import Work
from bench.suites.context_parallel.providers import PROVIDERS, barrier
from bench.timing import order, quantile

# Of one provider in one round.
_CALLS_MS, _MOST_CALLS = 400.0, 10


def serve(rank: int, size: int, port: int, works: list[Work], names: list[str], options: dict[str, Any]) -> None:
    """The whole run of one rank; rank 0 writes a row for every figure to ``options["rows"]``."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=rank, world_size=size, device_id=device)
    group = dist.new_group(list(range(size)))
    begin = time.monotonic()
    for work in works:
        for part in options["passes"]:
            # All ranks stop together.
            late = torch.tensor(float(time.monotonic() - begin > options["seconds"]), device=device)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if late.item():
                dist.destroy_process_group()
                return
            rows = measure(work, part, names, group, device, options["rounds"])
            if rank == 0:
                with Path(options["rows"]).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


def measure(
    work: Work, part: str, names: list[str], group: Any, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Rows of one case and pass, "fwd" or "bwd"."""
    size = dist.get_world_size(group)
    given, tables = work.inputs(device), work.tables(device)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        provider = PROVIDERS[name]
        if not provider.is_for(work):
            continue
        base = {**work.fields(), "shape": f"P={size}", "ranks": size, "provider": name, "label": provider.label}
        rows[name] = {**base, "pass": part, "mode": "eager", "status": "ok", "detail": ""}
        reason = provider.missing(work)
        if reason is None:
            try:
                provider.prepare(work, given, tables, group)
                rows[name]["mib"] = first_call(provider, part, device, 1 if work.takes_seconds else 2)
                calls[name] = call_of(provider, part)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if reason is not None:
            rows[name] |= {"status": "missing", "detail": reason}
    del given
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        counts[name] = 1
        if not work.takes_seconds:
            with PROVIDERS[name].active():
                once = timed(call, 1, group)[0]
            counts[name] = max(1, min(_MOST_CALLS, int(_CALLS_MS / max(once, 1e-3))))
    for index in range(rounds):
        for name in order(list(calls), index):
            with PROVIDERS[name].active():
                samples[name].append(timed(calls[name], counts[name], group, warm=not work.takes_seconds))
    for name in calls:
        flat = [x for one_round in samples[name] for x in one_round]
        medians = [quantile(one_round, 0.5) for one_round in samples[name]]
        rows[name] |= {"ms": quantile(flat, 0.5), "p20": quantile(flat, 0.2), "p80": quantile(flat, 0.8)}
        rows[name] |= {"rounds": medians, "calls": len(flat)}
        if "one" in calls and name != "one":
            one = [quantile(one_round, 0.5) for one_round in samples["one"]]
            rows[name]["efficiency"] = quantile([a / size / b for a, b in zip(one, medians)], 0.5)
    for name in calls:
        vars(PROVIDERS[name]).pop("inputs", None)
        vars(PROVIDERS[name]).pop("do", None)
    calls.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return list(rows.values())


def first_call(provider: Any, part: str, device: torch.device, count: int) -> float:
    """Compile, and the most MiB of the GPU's memory that the last of ``count`` calls of a pass takes beyond the inputs,
    on the rank with most."""
    most = 0.0
    with provider.active():
        for _ in range(count):
            torch.cuda.synchronize()
            if part == "bwd":
                o = provider.forward()
                torch.cuda.synchronize()
            base = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            if part == "bwd":
                torch.autograd.grad(o, provider.inputs, provider.do)
            else:
                provider.forward()
            torch.cuda.synchronize()
            most = (torch.cuda.max_memory_allocated(device) - base) / 2**20
    largest = torch.tensor(most, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def call_of(provider: Any, part: str) -> Callable[[], Any]:
    if part == "fwd":
        return provider.forward
    with provider.active():
        o = provider.forward()
    return lambda: torch.autograd.grad(o, provider.inputs, provider.do, retain_graph=True)


def timed(call: Callable[[], Any], count: int, group: Any, *, warm: bool = True) -> list[float]:
    """Milliseconds of each of ``count`` calls one after another, of the rank that took longest.

    warm: behind one more call.
    """
    if warm:
        call()
    barrier(group)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    # Some work, during which the hosts get ahead of their GPUs.
    torch.cuda._sleep(2_000_000)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in zip(events, events[1:])], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()
