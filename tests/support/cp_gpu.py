"""Programs that tests of context parallelism on several GPUs run on every rank."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from fused_rope_attn import rope_attention
from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp
from verification import testing
from verification.ranks import group_of
from verification.testing import Case


def _shards(case: Case, ranks: tuple[int, ...], sharding: str = "zigzag") -> tuple[Any, list[torch.Tensor], Any]:
    group = group_of(ranks)
    inputs = testing.make_inputs(case, "cuda")
    cut = [cp_shard(x, 2, group=group, sharding=sharding) for x in (inputs.q, inputs.k, inputs.v, inputs.do)]
    return group, [x.requires_grad_() for x in cut[:3]] + cut[3:], inputs


def bits(case: Case, ranks: tuple[int, ...], sharding: str, batch_invariant: bool) -> dict[str, bool]:
    """Return whether this rank's rows of o and lse have the bits of one GPU's call of the whole sequence."""
    group, (q, k, v, _), inputs = _shards(case, ranks, sharding)
    options = {"return_lse": True, "batch_invariant": batch_invariant, **testing.norms_of(case, "cuda")}
    masks = testing.masks_of(case, "cuda")
    options |= {name: masks[name] for name in ("window", "softcap", "sinks")}
    o, lse = rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, group=group, sharding=sharding, **options)
    whole = rope_attention(inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, case.causal, **options)
    expected = [cp_shard(x, 2, group=group, sharding=sharding) for x in whole]
    return {"o": torch.equal(o, expected[0]), "lse": torch.equal(lse, expected[1])}


def repeats(case: Case, ranks: tuple[int, ...], count: int) -> list[bool]:
    """Return whether ``count`` deterministic runs of both passes have the same bits."""
    group, (q, k, v, do), inputs = _shards(case, ranks)
    first = None
    same = []
    for _ in range(count):
        o = rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, group=group, deterministic=True)
        found = (o, *torch.autograd.grad(o, (q, k, v), do))
        if first is None:
            first = found
        same.append(all(torch.equal(a, b) for a, b in zip(first, found)))
    return same


def delays(case: Case, ranks: tuple[int, ...], count: int, seconds: float) -> tuple[bool, int]:
    """Return whether calls with one rank late at random, on the host and on the GPU, all gave o and dv of the first;
    and the number of calls, ``count`` at most; no more begin after so many seconds."""
    group, (q, k, v, do), inputs = _shards(case, ranks)
    generator = random.Random(3)
    start = time.monotonic()
    first, wrong = None, torch.zeros((), device="cuda")
    for done in range(count):
        if done % 50 == 0:
            over = torch.tensor(float(time.monotonic() - start > seconds), device="cuda")
            dist.all_reduce(over, dist.ReduceOp.MAX, group=group)
            if over.item():
                return bool(wrong == 0), done
        late = generator.randrange(len(ranks))
        microseconds = generator.choice((0, 0, 0, 50, 500, 2000))
        if late == group.rank():
            time.sleep(microseconds * 1e-6)
            torch.cuda._sleep(1000 * microseconds)
        o = rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, group=group)
        _, dv = torch.autograd.grad(o, (q, v), do)
        if first is None:
            first = o, dv
        wrong += (o != first[0]).any() | (dv != first[1]).any()
    return bool(wrong == 0), count


def graph(case: Case, ranks: tuple[int, ...]) -> bool:
    """Return whether a forward pass captured in a CUDA graph gives the eager one's bits, with other inputs."""
    group, (q, k, v, _), inputs = _shards(case, ranks)
    static = [x.detach().clone() for x in (q, k, v)]

    def step() -> torch.Tensor:
        with torch.no_grad():
            return rope_attention_cp(*static, inputs.cos, inputs.sin, case.causal, group=group)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier(group)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        o = step()
    for x in static:
        x.mul_(0.5)
    captured.replay()
    expected = step()
    torch.cuda.synchronize()
    return torch.equal(o, expected)


def compiled(case: Case, ranks: tuple[int, ...]) -> dict[str, bool]:
    """Return whether graphs of whole calls, compiled for both passes, give the eager bits; packed, several plans."""
    group, (q, k, v, do), inputs = _shards(case, ranks)
    given = {"group": group, "deterministic": True}

    def attend(q, k, v):
        return rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, **given)

    def attend_packed(q, k, v, plan):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        o = rope_attention_varlen_cp(*packed, inputs.cos, inputs.sin, plan, deterministic=True)
        return o.transpose(0, 1).unsqueeze(0)

    def same(function, *more) -> bool:
        found = []
        for run in (torch.compile(function, fullgraph=True), function):
            o = run(q, k, v, *more)
            found.append((o.detach(), *torch.autograd.grad(o, (q, k, v), do)))
        return all(torch.equal(a, b) for a, b in zip(*found))

    results = {"dense": same(attend)}
    for middle in (case.len_k // 3, case.len_k // 2):
        plan = plan_varlen_cp([0, middle, case.len_k], group=group, device="cuda")
        results[f"packed at {middle}"] = same(attend_packed, plan)
    return results


def memory(case: Case, ranks: tuple[int, ...]) -> tuple[float, float]:
    """(most MiB beyond inputs and outputs in forward, in backward) of a call that is compiled."""
    group, (q, k, v, do), inputs = _shards(case, ranks)
    found = []
    for _ in range(2):
        found = []
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        o = rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, group=group)
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated() - base) / 2**20)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(o, (q, k, v), do)
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated() - base) / 2**20)
        del gradients, o
    return found[0], found[1]


def late_inputs(case: Case, ranks: tuple[int, ...]) -> bool:
    """Return whether late inputs of a side stream are waited for, and results are those of the default stream."""
    group, (q, k, v, do), inputs = _shards(case, ranks)
    options = {"group": group, "deterministic": True}
    o = rope_attention_cp(q, k, v, inputs.cos, inputs.sin, case.causal, **options)
    expected = (o, *torch.autograd.grad(o, (q, k, v), do))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, (q, k, v)):
            x.copy_(y)
        late = [x.requires_grad_() for x in late]
        o = rope_attention_cp(*late, inputs.cos, inputs.sin, case.causal, **options)
        found = (o, *torch.autograd.grad(o, late, do))
    side.synchronize()
    return all(torch.equal(a, b) for a, b in zip(found, expected))
