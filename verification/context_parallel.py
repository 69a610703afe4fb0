"""Context parallelism against float64: what every rank runs, how its rows are joined and compared, and the checks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from fused_rope_attn import testing
from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp
from fused_rope_attn.testing import Case, Comparison, Inputs, Results
from verification.ranks import GROUPS, Ranks, group_of

# Gradients that have no rows.
OF_WEIGHTS = ("dsinks", "dq_norm", "dk_norm")


def attend(case: Case, ranks: tuple[int, ...], device: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's o, lse and gradients of a case of equally many queries and keys.

    options: those of ``rope_attention_cp``, and "local_tables", whether this rank passes its rows of the tables alone,
    and "extra_tokens", how many tokens lie behind the last packed document.
    """
    group = group_of(ranks)
    options = dict(options)
    inputs = testing.make_inputs(case, device)
    sharding = options.get("sharding", "zigzag")
    local_tables = options.pop("local_tables", False)
    q, k, v, do = (cp_shard(x, 2, group=group, sharding=sharding) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cos, sin = inputs.cos, inputs.sin
    if local_tables:
        cos, sin = (cp_shard(x, x.ndim - 2, group=group, sharding=sharding) for x in (cos, sin))
    masks = testing.masks_of(case, device)
    norms = testing.norms_of(case, device)
    weights = {"dsinks": masks["sinks"], "dq_norm": norms.get("q_norm"), "dk_norm": norms.get("k_norm")}
    weights = {name: x.requires_grad_() for name, x in weights.items() if x is not None}
    given = {
        "softmax_scale": case.softmax_scale, "rotary_dim": case.rotary_dim, "interleaved": case.interleaved,
        "window": masks["window"], "softcap": masks["softcap"], "sinks": masks["sinks"], "return_lse": True,
        **norms, **options,
    }  # fmt: skip
    if case.seqlens is None:
        o, lse = rope_attention_cp(q, k, v, cos, sin, case.causal, group=group, **given)
    else:
        given.pop("sharding", None)
        limits = [0]
        for length, _ in case.seqlens:
            limits.append(limits[-1] + length)
        plan = plan_varlen_cp(limits, group=group, sharding=sharding, total_tokens=case.len_q, device=device)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        o, lse = rope_attention_varlen_cp(*packed, cos, sin, plan, case.causal, **given)
        o, lse = o.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    gradients = torch.autograd.grad(o, [q, k, v, *weights.values()], do)
    names = ("o", "lse", "dq", "dk", "dv", *weights)
    return {name: x.detach().cpu() for name, x in zip(names, (o, lse, *gradients))}


def joined(parts: list[dict[str, torch.Tensor]], sharding: str = "zigzag") -> dict[str, torch.Tensor]:
    """All ranks' rows in the order of the sequence, and the sum of their parts of the sinks' gradient."""
    size = len(parts)
    found = {}
    for name in parts[0]:
        if name in OF_WEIGHTS:
            found[name] = torch.stack([part[name].double() for part in parts]).sum(0)
            continue
        shards = [part[name] for part in parts]
        if sharding == "zigzag":
            halves = [x.chunk(2, dim=2) for x in shards]
            order = [halves[r][0] for r in range(size)] + [halves[r][1] for r in reversed(range(size))]
        elif sharding.startswith("dealt:"):
            ranks = [int(rank) for rank in sharding.removeprefix("dealt:").split(",")]
            chunks = [list(x.chunk(len(ranks) // size, dim=2)) for x in shards]
            order = [chunks[rank].pop(0) for rank in ranks]
        else:
            order = shards
        found[name] = torch.cat(order, dim=2)
    return found


def expected(case: Case, total: int | None, device: str = "cpu") -> tuple[Results, Results, Inputs]:
    """(float64, eager, inputs) of the whole sequence; with ``total`` of its first rows, and zeros behind them."""
    inputs = testing.make_inputs(case, device)
    if total is None or total == case.len_q:
        return (*(testing.run_reference(inputs, case, dtype) for dtype in (torch.float64, None)), inputs)
    short = replace(case, len_q=total, len_k=total)
    q, k, v, cos, sin, do = inputs
    cut = Inputs(q[:, :, :total], k[:, :, :total], v[:, :, :total], cos, sin, do[:, :, :total])
    found = []
    for dtype in (torch.float64, None):
        results = testing.run_reference(cut, short, dtype)
        behind = case.len_q - total
        padded = [torch.nn.functional.pad(x, (0, 0, 0, behind)) for x in (results.o, *results[2:5])]
        lse = torch.nn.functional.pad(results.lse, (0, behind), value=float("-inf"))
        whole = Results(padded[0], lse, *padded[1:])
        whole.dsinks, whole.dq_norm, whole.dk_norm = results.dsinks, results.dq_norm, results.dk_norm
        found.append(whole)
    return found[0], found[1], inputs


def compared(
    case: Case, found: dict[str, torch.Tensor], total: int | None = None, device: str = "cpu"
) -> list[Comparison]:
    """Each tensor of all rows against float64, by the contract's tolerance; weights' gradients as a whole."""
    ref64, eager, inputs = expected(case, total, device)
    comparisons = []
    for name, out in found.items():
        reference = getattr(ref64, name).cpu()
        if name not in OF_WEIGHTS:
            comparisons.append(
                testing.compare(
                    name, out, reference, getattr(eager, name).cpu(), grad=name.startswith("d"), dtype=case.dtype,
                    zero=testing.noise_of_zero(name, case, inputs),
                )
            )  # fmt: skip
            continue
        error, scale = float((out - reference.double()).abs().max()), float(reference.abs().max())
        limit = (1e-4 if case.dtype == torch.float32 else 2e-2) * (scale + 1e-3)
        detail = "" if error <= limit else f"max error {error:.3g} > {limit:.3g}"
        comparisons.append(Comparison(name, error, 0.0, error / limit, 0.0, not detail, detail))
    return comparisons


def _cases(dtype: torch.dtype, scale: int) -> list[tuple[Case, dict[str, Any]]]:
    """Every feature, of sequences of 48 * scale tokens. The sharding "dealt" is ``dealt(size)`` of a group."""
    length = 48 * scale
    width = 64 if scale > 1 else 16
    plain = Case(1, 4, 2, length, length, width, dtype=dtype)
    lengths = tuple(n * scale for n in (1, 17, 0, 6, 12, 3, 9))
    packed = replace(plain, seqlens=tuple((n, n) for n in lengths))
    contiguous = {"sharding": "contiguous"}
    return [
        (plain, {}),
        (plain, contiguous),
        (plain, {"local_tables": True}),
        (plain, {"total_len": length - 7}),
        (plain, {"deterministic": True}),
        (replace(plain, batch=2, rotary_dim=width // 2, interleaved=True, layout="odd", extra_rows=5), {}),
        (replace(plain, tables="random", table_batch=True), {"local_tables": True}),
        (replace(plain, window=(length // 5, 0), sinks=True), {}),
        (replace(plain, softcap=5.0, sinks=True), contiguous),
        (replace(plain, norms=1.0), {}),
        (replace(plain, causal=False), {}),
        (replace(plain, causal=False), {"total_len": length // 2 + 3, **contiguous}),
        (replace(plain, causal=False, window=(length // 5, length // 9)), {}),
        (packed, {}),
        (replace(packed, window=(9, 0), sinks=True), contiguous),
        (replace(packed, causal=False), {}),
        (packed, {"sharding": "dealt"}),
        (replace(packed, norms=0.0), {}),
    ]


def dealt(size: int) -> str:
    """A sharding of four chunks for each of P = ``size`` ranks, some of them adjacent."""
    return "dealt:" + ",".join(str((rank + turn) % size) for turn in range(4) for rank in range(size))


@dataclass(frozen=True)
class Call:
    """One call of some of the ranks. given: the options that ``attend`` takes."""

    case: Case
    members: tuple[int, ...]
    given: dict[str, Any]

    @property
    def name(self) -> str:
        words = (f"{key}={value}" for key, value in self.given.items())
        return f"{self.case.name} {' '.join(words)} ranks {self.members}"


def _calls(options: argparse.Namespace, size: int, on_gpu: bool) -> Iterator[Call]:
    """Every case by each group of ranks that can share it, by each method that the group has for it."""
    for name in options.dtype or (["bfloat16"] if on_gpu else ["float16", "float32"]):
        for case, given in _cases(getattr(torch, name), 16 if on_gpu else 1):
            for members in GROUPS:
                if len(members) < 2 or max(members) >= size or case.len_q % (2 * len(members)):
                    continue
                for method in ["all_gather"] + ["all_to_all"] * (case.heads_kv % len(members) == 0):
                    call = Call(case, members, {**given, "method": method})
                    if given.get("sharding") == "dealt":
                        call.given["sharding"] = dealt(len(members))
                    if options.filter.lower() in call.name.lower():
                        yield call


def run(options: argparse.Namespace, pool: Ranks | None = None) -> int:
    """``python -m verification --cp``, in a pool of processes that is there already, or in a new one: exit status 0
    where all ranks are within tolerance, 1 where not, 2 where there are no two GPUs or no case has such a name."""
    on_gpu = options.device.startswith("cuda")
    size = min(4, torch.cuda.device_count()) if on_gpu else 4
    if size < 2:
        print("--cp: needs two GPUs, or --device cpu", file=sys.stderr)
        return 2
    calls = list(_calls(options, size, on_gpu))
    if not calls:
        print(f"--cp: no case matches --filter {options.filter!r}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(call.name for call in calls))
        return 0
    start = time.perf_counter()
    if pool is not None:
        failed = _serve(pool, _queue_of(calls), options.device)
    else:
        # Each pool compiles the kernels of its calls, which takes most of the time on a GPU.
        count, waiting = max(1, min(len(calls), (options.jobs or size) // size)), _queue_of(calls)
        with ThreadPoolExecutor(count) as threads:
            served = [threads.submit(_serve_by_new_pool, size, waiting, options.device) for _ in range(count)]
            failed = sum(one.result() for one in served)
    seconds = time.perf_counter() - start
    print(f"\n{len(calls) - failed} of {len(calls)} calls within tolerance on every rank, in {seconds:.0f} s")
    return 1 if failed else 0


def _queue_of(calls: list[Call]) -> SimpleQueue[Call]:
    waiting: SimpleQueue[Call] = SimpleQueue()
    for call in calls:
        waiting.put(call)
    return waiting


def _serve_by_new_pool(size: int, waiting: SimpleQueue[Call], device: str) -> int:
    """``_serve`` by processes of its own."""
    pool = Ranks(size, "nccl" if device.startswith("cuda") else "gloo")
    try:
        return _serve(pool, waiting, device)
    finally:
        pool.close()


def _serve(pool: Ranks, waiting: SimpleQueue[Call], device: str) -> int:
    """Make calls until none is waiting, and print a line for each: how many failed."""
    failed = 0
    while True:
        try:
            call = waiting.get_nowait()
        except Empty:
            return failed
        start = time.perf_counter()
        worst, wrong = _check(pool, call, device)
        failed += bool(wrong)
        words = [call.name, f"{time.perf_counter() - start:.1f} s", worst, wrong]
        print("  ".join(words).rstrip() + "\n", end="", flush=True)


def _check(pool: Ranks, call: Call, device: str) -> tuple[str, str]:
    """The largest ratio of one call to what is allowed, and what is wrong, "" where nothing is."""
    parts = pool.run(attend, call.case, call.members, device.split(":")[0], call.given, ranks=call.members)
    errors = [part for part in parts if isinstance(part, BaseException)]
    if errors:
        return "-", f"{type(errors[0]).__name__}: {errors[0]}"
    shards = joined(parts, call.given.get("sharding", "zigzag"))
    found = compared(call.case, shards, call.given.get("total_len"), device)
    worst = max(comparison.row_ratio for comparison in found)
    wrong = "; ".join(f"{comparison.tensor}: {comparison.detail}" for comparison in found if not comparison.ok)
    return f"{worst:.2f} of 2.5", wrong
