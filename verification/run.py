"""Runs of ``python -m verification``: cases, or drawn calls, which are shrunk if they fail, and what is printed."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from verification import context_parallel, report, strategies
from verification.attention import AttentionCheck
from verification.calls import Machine, dtype_name, literal, parse
from verification.matrix import CHECKS, SIZES, drawn_cases, in_dtype
from verification.refusals import KINDS, IllegalCheck
from verification.table import format_table
from verification.workers import Outcome, Worker, run_check, run_checks

_LONGEST_DETAIL = 300
# The number of failures that are shrunk, the seconds for each, and the seconds after which an attempt is given up.
MOST_SHRUNK, SHRINK_SECONDS, ATTEMPT_SECONDS = 5, 180.0, 60.0


def command_of(check: Any, machine: Machine) -> str:
    """Return the command that runs a call alone, on any machine with the same commit."""
    return f"python -m verification --device {machine.device} --call {shlex.quote(literal(check))}"


def describe_failures(outcome: Outcome) -> list[str]:
    """One line for each thing that is wrong with a call."""
    lines = []
    for finding in outcome.failures:
        share = f" {finding.share:.3g} of the tolerance" if finding.is_tensor else ""
        words = f"{outcome.check.function} {finding.backend or outcome.check.backend} {finding.tensor}{share}"
        lines.append(f"{words}: {finding.detail[:_LONGEST_DETAIL]}")
    return lines


def make_checks(options: argparse.Namespace) -> list[Any]:
    """Return the cases that the options name, each in every dtype, those of attention with their variants."""
    if options.cp:
        return context_parallel.make_checks(options)
    sizes = ("small",) if options.small or options.device == "cpu" else ("small", "large", "huge")
    sizes = ("large", "huge") if options.large else sizes
    strategies = options.strategy or ("inline", "prepass")
    found = []
    for check in (*CHECKS, *drawn_cases()):
        if check.size not in sizes or options.filter.lower() not in check.name.lower():
            continue
        for dtype in (getattr(torch, name) for name in options.dtype):
            call = in_dtype(check, dtype)
            if type(check) is not AttentionCheck:
                # These have no strategies of attention.
                found += [call] if "triton" in options.backend and options.strategy is None else []
                continue
            # The reference materialises every score: beyond the small cases it is not a backend but the yardstick.
            variants = [("reference", "auto")] if "reference" in options.backend and check.size == "small" else []
            variants += [("triton", strategy) for strategy in strategies if "triton" in options.backend]
            if "hopper" in options.backend and "prepass" in strategies:
                variants += [("hopper", "auto")] if call.obstacle("sm_90", ("hopper", "auto")) is None else []
            if variants and (not check.only or dtype in check.only):
                found.append(replace(call, variants=tuple(variants)))
    return found


def drawn_batches(seed: int, count: int, machine: Machine) -> Iterator[list[tuple[int, Any]]]:
    """Draw the calls 0 .. count - 1, those of one prototype together."""
    step = strategies.calls_of_a_prototype(machine)
    for first in range(0, count, step):
        yield [(i, strategies.drawn_call(seed, i, machine)) for i in range(first, min(count, first + step))]


def shrink(seed: int, index: int, outcome: Outcome, machine: Machine, jobs: int) -> Outcome | None:
    """Return the outcome of the simplest call found that fails as call ``index`` does; None if it fails no more."""
    subjects = {finding.tensor for finding in outcome.failures}
    deadline, known = time.monotonic() + SHRINK_SECONDS, {outcome.check: outcome}
    worker = Worker(machine)

    def fails(check: Any) -> bool:
        if check not in known:
            if time.monotonic() > deadline:
                return False
            known[check] = worker.run(check, ATTEMPT_SECONDS) if jobs else run_check(check, machine)
        return any(finding.tensor in subjects for finding in known[check].failures)

    try:
        found = strategies.shrunk_call(seed, index, machine, fails)
    finally:
        worker.stop()
    return None if found is None else known[found]


def run(options: argparse.Namespace) -> int:
    """Exit status 0: all is well; 1: something is not; 2: nothing ran."""
    machine = Machine.of(options.device, options.dtype, options.backend, options.family)
    if options.call is not None:
        checks = [parse(options.call, KINDS)]
    elif options.only is not None:
        checks = [strategies.drawn_call(options.seed, options.only, machine)]
    else:
        checks = make_checks(options) if options.random is None else []
    if options.is_single:
        print(command_of(checks[0], machine), "\n")
    names = [f"{check.name} {dtype_name(check.dtype)}" for check in checks]
    if options.list:
        print("\n".join(names))
        return 0
    start, found = time.monotonic(), {}
    if checks:
        outcomes, total, unit = _outcomes_of_cases(checks, machine, options.jobs), len(checks), "case"
    elif options.random is not None:
        deadline = math.inf if options.minutes is None else start + 60.0 * options.minutes
        batches, total, unit = drawn_batches(options.seed, options.random, machine), options.random, "call"
        outcomes = run_checks(batches, machine, options.jobs, deadline)
    else:
        print(f"no case matches --filter {options.filter!r}", file=sys.stderr)
        return 2
    with tqdm(outcomes, total=total, unit=unit, file=sys.stderr, dynamic_ncols=True) as bar:
        for number, outcome in bar:
            found[number] = outcome
            name = names[number] if names else f"call {number}"
            bar.set_postfix_str(name[:50])
            if outcome.failures:  # at once, because a run that is stopped prints no table
                is_call = isinstance(outcome.check, KINDS)
                command = [f"    {command_of(outcome.check, machine)}"] if is_call else []
                bar.write("\n".join([*(f"{name} failed: {x}" for x in describe_failures(outcome)), *command]))
    found, seconds = dict(sorted(found.items())), time.monotonic() - start
    environment = report.environment(options.device)
    rows, facts = (_tell_cases if names else _tell_calls)(options, found, machine)
    print(f" in {seconds:.0f} s on {report.where(environment)}, hypothesis {environment['hypothesis']}")
    if options.json:
        report.write_json(Path(options.json), environment, seconds, rows, **facts)
    return 1 if any(outcome.failures for outcome in found.values()) else 0 if found else 2


def _outcomes_of_cases(checks: list[Any], machine: Machine, jobs: int) -> Iterator[tuple[int, Outcome]]:
    # Two large cases at a time, and huge ones alone, fit the memory of the card.
    for size, most in zip(SIZES, (jobs, min(jobs, 2), min(jobs, 1))):
        batches = [[(i, check)] for i, check in enumerate(checks) if check.size == size]
        if batches:
            yield from run_checks(batches, machine, min(most, len(batches)))


def _tell_cases(
    options: argparse.Namespace, found: Mapping[int, Outcome], machine: Machine
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Print a row of each tensor, and the beginning of the last line; return what a file holds of them."""
    rows = [row for outcome in found.values() for row in report.rows_of(outcome, every=options.is_single)]
    ok, failed, skipped = (sum(row["verdict"] == verdict for row in rows) for verdict in ("ok", "FAIL", "SKIP"))
    print(f"{report.table(rows)}\n\n{report.LEGEND}\n\n{report.summary(rows)}\n")
    counts = f"{ok} of {len(rows)} tensors within tolerance, {failed} not, {skipped} skipped"
    print(f"{counts}; {len(found)} cases", end="")
    return rows, {}


def _tell_calls(
    options: argparse.Namespace, found: Mapping[int, Outcome], machine: Machine
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Shrink some failures, and print the counts of each function; return what a file holds of the calls."""
    failed, shrunk = {i: outcome for i, outcome in found.items() if outcome.failures}, {}
    for index, outcome in list(failed.items())[:MOST_SHRUNK]:
        small = shrink(options.seed, index, outcome, machine, options.jobs) or outcome
        shrunk[index] = command_of(small.check, machine)
        print(f"call {index} shrunk: {describe_failures(small)[0]}\n    {shrunk[index]}", flush=True)
    columns, counts, rows = ("function", "calls", "refusals", "failures"), Counter(), []
    for index, outcome in found.items():
        function, is_illegal = outcome.check.function, isinstance(outcome.check, IllegalCheck)
        counts[function, "refusals" if is_illegal else "calls"] += 1
        counts[function, "failures"] += index in failed
        rows += [] if is_illegal else report.rows_of(outcome, f"{function} {index}")
    names = sorted({function for function, _ in counts})
    lines = [{"function": name} | {column: counts[name, column] for column in columns[1:]} for name in names]
    print(f"{format_table(columns, lines)}\n\n{report.summary(rows)}\n")
    refusals, skipped = sum(line["refusals"] for line in lines), sum(bool(x.skipped) for x in found.values())
    stopped = "" if len(found) == options.random else f" of {options.random}, stopped by --minutes {options.minutes:g}"
    counted = f"{len(found)}{stopped} calls ({refusals} of them refusals) with seed {options.seed}"
    print(f"{counted}, {len(failed)} failed, {skipped} skipped,", end="")
    failures = [
        {"index": i, "function": x.check.function, "call": literal(x.check), "shrunk": shrunk.get(i)}
        for i, x in failed.items()
    ]
    facts = {"seed": options.seed, "calls": len(found), "refusals": refusals, "functions": lines, "failures": failures}
    return [row for row in rows if row["verdict"] != "ok"], facts
