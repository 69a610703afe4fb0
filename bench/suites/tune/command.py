"""The command line of ``python -m bench tune``."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command import Progress, refuse
from bench.environment import environment
from bench.names import DTYPES, dtype_name
from bench.suites.tune.point import SHAPES, Point, Timed
from bench.suites.tune.proposal import finalists_table, proposal, refusals, strategies
from bench.suites.tune.search import compile_all, search
from bench.timing import GpuClock, ratio
from fused_rope_attn.attention import configs
from fused_rope_attn.runtime import device

_WORTH = 1.01  # a row is proposed when the current configuration takes at least this much longer


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 2 cannot run here."""
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        return refuse("tune", "no GPU here; configurations are tuned on the card they are for.")
    device_ = torch.device("cuda", torch.cuda.current_device())
    arch = configs.family(device.arch(device_))
    if arch is None:
        return refuse("tune", f"the tables know no {device.arch(device_)}")
    begin = time.monotonic()
    points = _points(args)
    facts = environment()
    progress = Progress(begin)

    print(f"{facts['gpu']} as {arch}, triton {facts['triton']}, commit {facts['commit']}: {len(points)} points")
    if args.jobs > 1:
        compile_all(points, arch, args.jobs, progress)
    clock = GpuClock(device_)
    best: dict[Point, Timed] = {}
    rows: dict[str, list[str]] = {"fwd": [], "bwd": []}
    left: list[str] = []
    for point in points:
        if args.time_budget and time.monotonic() - begin > args.time_budget:
            left.append(point.name)
            continue
        progress(point.name)
        finalists, refused = search(point, clock, arch, rounds=args.rounds, round_ms=args.round_ms)
        clock.release()
        progress.clear()
        print(f"\n{point.name}: {len(refused)} refused" + refusals(refused))
        if not finalists:
            continue
        current = next((timed for timed in finalists if timed.config == point.current(arch)), None)
        print(finalists_table(finalists, current), flush=True)
        best[point] = finalists[0]
        if args.out is not None:
            report.write_lines(args.out, [_json_row(point, timed, current, facts) for timed in finalists])
        if current is None or ratio(list(current.rounds), list(finalists[0].rounds)) >= _WORTH:
            rows[point.part].append(f"    {proposal(point, arch, finalists[0], current, facts)}")
    table = strategies(best)
    if table:
        print(f"\nStrategies, each at its best:\n\n{table}")
    print("\nProposed rows, to stand before the ones that serve these points now:\n")
    for part, name in (("fwd", "FORWARD"), ("bwd", "BACKWARD")):
        print(f"{name}:\n" + ("\n".join(rows[part]) or "    nothing better than the table by 1 %"))
    if left:
        print(f"\nNot run, the time budget of {args.time_budget:g} s was spent: {'; '.join(left)}")
    return 0


def _json_row(point: Point, timed: Timed, current: Timed | None, facts: dict[str, Any]) -> dict[str, Any]:
    about = {key: value for key, value in asdict(point).items() if key != "dtype"}
    return {
        "tune": True,
        **about,
        "dtype": dtype_name(point.dtype),
        "shape": point.case.name,
        "config": asdict(timed.config),
        "current": timed is current,
        "ms": timed.ms,
        "p20": timed.p20,
        "p80": timed.p80,
        "rounds": list(timed.rounds),
        **facts,
    }


def _points(args: argparse.Namespace) -> list[Point]:
    flags = {"yes": (True,), "no": (False,), "both": (True, False)}
    axes = itertools.product(
        args.passes.split(","),
        map(int, args.head_dims.split(",")),
        flags[args.causal],
        args.buckets.split(","),
        flags[args.gqa],
        args.strategies.split(","),
    )
    return [Point(*axis, DTYPES[args.dtype]) for axis in axes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench tune", description="Sweep launch configurations of the Triton kernels, propose table rows."
    )
    parser.add_argument("--passes", default="fwd,bwd")
    parser.add_argument("--head-dims", default="64,128", help="largest head dimension of a row, e.g. 64,128,256")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="yes")
    parser.add_argument("--buckets", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--gqa", choices=("yes", "no", "both"), default="no")
    parser.add_argument("--strategies", default="prepass,inline")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of the finalists")
    parser.add_argument("--round-ms", type=float, default=5.0, help="GPU time of one candidate's screening")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="compiling processes"
    )
    parser.add_argument("--time-budget", type=float, metavar="S", help="begin no further point after so many seconds")
    parser.add_argument("--out", type=Path, help="JSON lines of the finalists")
    return parser
