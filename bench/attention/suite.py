"""``python -m bench [attention]`` and ``python -m bench norm``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch

from bench.attention import cases, plots, providers
from bench.attention.cases import BenchCase
from bench.attention.problem import AttentionTrial
from bench.attention.providers import AttentionProvider
from bench.load import LoadClock, Nvml
from bench.names import DTYPES, words
from bench.suite import Options, Suite
from bench.timing import GpuClock

# Under load ours and the strongest of any case, because a provider costs some seconds at each case.
LOAD_USUAL = ("fused", "liger_cudnn", "liger_fa3", "liger_fa4", "bare_cudnn", "bare_fa3", "bare_fa4")


def table(case: BenchCase) -> Mapping[str, AttentionProvider]:
    """Return the providers of a case."""
    return providers.table(case.kind, case.case.len_k, case.case.batch)


def dtype_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that all suites of attention have."""
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")


def _attention_arguments(parser: argparse.ArgumentParser) -> None:
    dtype_arguments(parser)
    parser.add_argument("--shape", metavar="B,HQ,HKV,N,D", help="of the case of host time")


def _adapt(chosen: list[BenchCase], options: Options, args: argparse.Namespace) -> list[BenchCase]:
    """Apply the options of attention; without --cases and --providers choose them by the mode."""
    modes = options.modes or ()
    if "load" in modes and len(modes) > 1:
        raise ValueError("--mode load has a clock of its own: it takes no other mode with it")
    if not args.cases and modes and modes != ("host",):
        chosen = [case for case in chosen if case.kind != "host" or "host" in modes]
    if not args.cases and modes == ("host",):
        chosen = [case for case in chosen if case.kind == "host"]
    if modes == ("load",) and not args.providers:
        args.providers = ",".join(LOAD_USUAL)
    if shape := getattr(args, "shape", None):
        given = cases.host_case(words(shape))
        chosen = [given if case.kind == "host" else case for case in chosen]
    return [case.with_dtype(DTYPES[args.dtype]) for case in chosen]


def clock(device: torch.device, options: Options) -> GpuClock | LoadClock:
    """Return the clock of a mode. RuntimeError where this machine lacks what it needs."""
    return LoadClock(device, Nvml(device)) if options.modes == ("load",) else GpuClock(device)


ATTENTION = Suite(
    name="attention",
    description="Time rope_attention and every rival on equal inputs.",
    cases=cases.CASES,
    trial=AttentionTrial,
    table=table,
    default_cases="table,host",
    passes=("fwd", "fwd_grad", "bwd", "both"),
    modes=("eager", "graph", "host", "load"),
    round_ms=20.0,
    arguments=_attention_arguments,
    adapt=_adapt,
    clock=clock,
    draw=plots.draw,
)
NORM = Suite(
    name="norm",
    description="Time attention with norms of q and k, inside and outside of it.",
    cases=cases.NORMED,
    trial=AttentionTrial,
    table=table,
    always=("fused", "fused_without"),
    arguments=dtype_arguments,
    adapt=_adapt,
)
