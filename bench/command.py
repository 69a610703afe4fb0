"""The command line that every suite shares: options, the run, and the file of rows.

Exit status: 0 fine, 1 one of ours failed its gate or did not run, 2 cannot run here (no GPU, wrong arguments). A run
that is interrupted, or that loses the GPU, has written the rows of the cases before.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from bench import report
from bench.environment import RESULTS, environment
from bench.report import Row
from bench.runner import Run
from bench.suite import Options, Suite, words
from verification.table import format_table


def main(suite: Suite, argv: list[str]) -> int:
    """Choose, time, print, and write the rows to a new file, because times of two runs are not compared."""
    args = parser(suite).parse_args(argv)
    try:
        options = options_of(suite, args)
        cases = suite.adapt(suite.choose(args.cases), options, args)
        names = words(args.providers)
        suite.check_providers(cases, names)
    except ValueError as error:
        return refuse(suite.name, str(error))
    if args.out and args.out.exists():
        return refuse(suite.name, f"--out needs a new file, but {args.out} exists")
    if args.dry_run:
        print(listing(suite, cases, names))
        return 0
    if not torch.cuda.is_available():
        reason = "no GPU here; times of the interpreter mean nothing. --dry-run lists what would run."
        return refuse(suite.name, reason)
    begin, facts = time.monotonic(), environment()
    writes = os.environ.get("RANK", "0") == "0"  # torchrun starts a process for each GPU, and all have the same rows
    try:
        clock = suite.clock(torch.device("cuda", torch.cuda.current_device()), options)
    except RuntimeError as error:  # this machine lacks what the clock needs
        return refuse(suite.name, str(error))

    def progress(message: str) -> None:
        if writes:
            print(f"after {time.monotonic() - begin:.0f} s: {message}", file=sys.stderr)

    run = Run(suite, options, clock, facts, lambda case: suite.providers(case, names), progress)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    card = "-".join(str(facts["gpu"]).lower().replace("nvidia", "").split())
    out = args.out or RESULTS / f"{suite.name}-{card}-{stamp}.jsonl"
    versions = {name: facts[name] for name in ("driver", "torch", "triton", "cudnn", "commit")} | facts["packages"]
    print(f"{facts['gpu']}, {', '.join(f'{name} {found}' for name, found in versions.items())}")
    print(f"Rows go to {out}")
    rows: list[Row] = []
    for block in run.rows(cases):
        rows += block
        if writes:
            report.write_lines(out, block)
        if block:
            print("\n" + report.case_report(block), flush=True)
    if run.not_run:
        print(f"\nNot run: {'; '.join(run.not_run)}")
    print(f"\n{len(rows)} rows in {out} after {time.monotonic() - begin:.0f} s")
    return int(any(row["role"] == "ours" and row["status"] in ("failed", "error", "oom") for row in rows))


def refuse(command: str, reason: str) -> int:
    """Say why a command cannot run, and return its exit status."""
    print(f"bench {command}: {reason}", file=sys.stderr)
    return 2


def listing(suite: Suite, cases: list, names: list[str]) -> str:
    """Return what would run: cases, then providers and what they lack on this machine."""
    chosen = {provider.label: provider for case in cases for provider in suite.providers(case, names)}
    tables = (
        [{"case": case.name, "shape": case.shape, "groups": " ".join(case.groups)} for case in cases],
        [{"provider": p.name, "label": label, "status": p.missing() or "here"} for label, p in chosen.items()],
    )
    return "\n\n".join(format_table(list(lines[0]), lines) for lines in tables)


def parser(suite: Suite) -> argparse.ArgumentParser:
    """Return the options of a suite."""
    made = argparse.ArgumentParser(
        f"python -m bench {suite.name}",
        description=f"{suite.description} Nobody is timed before its results agree with float64.",
    )
    add = made.add_argument
    groups = dict.fromkeys(group for case in suite.cases for group in case.groups)
    text = f"groups, or parts of names and shapes; A+B: both. Groups: {', '.join(groups)}"
    add("--cases", default="", metavar="WORDS", help=f"{text} (default: {suite.default_cases or 'all'})")
    add("--providers", default="", metavar="NAMES", help="see --dry-run")
    if len(suite.passes) > 1:
        add("--passes", default="", metavar="NAMES", help=f"of {', '.join(suite.passes)}")
    if len(suite.modes) > 1:
        add("--mode", default="", metavar="NAMES", help=f"of {', '.join(suite.modes)}")
    add("--rounds", type=int, help="interleaved rounds")
    add("--round-ms", type=float, metavar="MS", help="how long each provider runs in each round")
    add("--out", type=Path, metavar="FILE", help="JSON lines, a new file (default: in bench/results)")
    add("--dry-run", action="store_true", help="list what would run, and what is missing; no GPU needed")
    return made


def options_of(suite: Suite, args: argparse.Namespace) -> Options:
    """Return the options of a run. ValueError for an unknown pass or mode."""

    def chosen(name: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
        asked = words(getattr(args, name, ""))
        if set(asked) - set(known):
            raise ValueError(f"--{name} takes {', '.join(known)}, not {getattr(args, name)!r}")
        return tuple(each for each in known if each in asked) or None

    modes = chosen("mode", suite.modes) or (suite.modes if len(suite.modes) == 1 else None)
    # "load" runs graphs back to back in their steady state.
    usual = {("load",): (4, 1000.0), ("host",): (25, suite.round_ms)}
    rounds, round_ms = usual.get(modes or (), (suite.rounds, suite.round_ms))
    return Options(chosen("passes", suite.passes), modes, args.rounds or rounds, args.round_ms or round_ms)
