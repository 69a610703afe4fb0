"""``python -m bench [attention]`` and ``python -m bench norm``."""

from __future__ import annotations

import argparse

import torch

from bench.attention import cases, providers
from bench.attention.cases import BenchCase
from bench.attention.problem import AttentionTrial
from bench.load import LoadClock, Nvml
from bench.suite import Options, Suite
from bench.timing import GpuClock

# Under load ours and the strongest of any case, because a provider costs some seconds at each case.
LOAD_USUAL = ("fused", "liger_cudnn", "liger_fa3", "liger_fa4", "bare_cudnn", "bare_fa3", "bare_fa4")


def _adapt(chosen: list[BenchCase], options: Options, args: argparse.Namespace) -> list[BenchCase]:
    """Choose cases and providers by the mode where no option does."""
    modes = options.modes or ()
    if "load" in modes and len(modes) > 1:
        raise ValueError("--mode load has a clock of its own: it takes no other mode with it")
    if modes == ("load",) and not args.providers:
        args.providers = ",".join(LOAD_USUAL)
    if not args.cases and modes:
        kinds = {mode == "host" for mode in modes}  # the case of host time is for that mode
        chosen = [case for case in chosen if (case.kind == "host") in kinds]
    return chosen


def clock(device: torch.device, options: Options) -> GpuClock | LoadClock:
    """Return the clock of a mode. RuntimeError where this machine lacks what it needs."""
    return LoadClock(device, Nvml(device)) if options.modes == ("load",) else GpuClock(device)


ATTENTION = Suite(
    name="attention",
    description="Time rope_attention and every rival on equal inputs.",
    cases=cases.CASES,
    trial=AttentionTrial,
    table=lambda case: providers.table(case.kind),
    default_cases="table,host",
    passes=("fwd", "fwd_grad", "bwd", "both"),
    modes=("eager", "graph", "host", "load"),
    round_ms=20.0,
    adapt=_adapt,
    clock=clock,
)
NORM = Suite(
    name="norm",
    description="Time attention with norms of q and k, inside and outside of it.",
    cases=cases.NORMED,
    trial=AttentionTrial,
    table=lambda case: providers.table(case.kind),
)
