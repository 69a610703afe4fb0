"""``python -m verification --random N``: draw calls, run them, shrink those that fail, and report."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verification import report
from verification.calls import Machine, literal, parse
from verification.refusals import KINDS, IllegalCheck
from verification.table import format_table
from verification.workers import Outcome, Worker, prepare_process, run_check, run_checks

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
        share = f" {finding.share:.3g} of the tolerance" if finding.share else ""
        words = f"{outcome.check.function} {finding.backend} {finding.found.tensor}{share}"
        lines.append(f"{words}: {finding.found.detail[:_LONGEST_DETAIL]}")
    return lines


def batches(seed: int, count: int, machine: Machine) -> Iterator[list[tuple[int, Any]]]:
    """Draw the calls 0 .. count - 1, those of one prototype together."""
    from verification import strategies

    step = strategies.calls_of_a_prototype(machine)
    for first in range(0, count, step):
        yield [(i, strategies.drawn_call(seed, i, machine)) for i in range(first, min(count, first + step))]


def shrink(seed: int, index: int, outcome: Outcome, machine: Machine, jobs: int) -> Outcome | None:
    """Return the outcome of the simplest call found that fails as call ``index`` does; None if it fails no more."""
    from verification import strategies

    subjects = {finding.found.tensor for finding in outcome.failures}
    deadline, known = time.monotonic() + SHRINK_SECONDS, {outcome.check: outcome}
    worker = Worker(machine)

    def fails(check: Any) -> bool:
        if check not in known:
            if time.monotonic() > deadline:
                return False
            known[check] = worker.run(check, ATTEMPT_SECONDS) if jobs else run_check(check, machine)
        return any(finding.found.tensor in subjects for finding in known[check].failures)

    try:
        found = strategies.shrunk_call(seed, index, machine, fails)
    finally:
        worker.stop()
    return None if found is None else known[found]


def run_call(options: argparse.Namespace) -> int:
    """``--call``, or ``--random --only``: run one call in this process, and print everything that was found."""
    machine = Machine.of(options.device, options.dtype, options.backend, options.family)
    if options.call is not None:
        check = parse(options.call, KINDS)  # without hypothesis
    else:
        from verification import strategies

        check = strategies.drawn_call(options.seed, options.only, machine)
    prepare_process(machine)
    outcome = run_check(check, machine)
    print(command_of(check, machine), "\n")
    columns = ("backend", "found", "share", "verdict")
    rows = [(one.backend, one.found.tensor, one.share, "ok" if one.found.ok else "FAIL") for one in outcome.findings]
    print(format_table(columns, [dict(zip(columns, row)) for row in rows]))
    print("\n".join(["", *describe_failures(outcome), *([f"skipped: {outcome.skipped}"] if outcome.skipped else [])]))
    return 1 if outcome.failures else 0


def run(options: argparse.Namespace) -> int:
    """Exit status 0: all is well; 1: something is not; 2: nothing ran."""
    machine = Machine.of(options.device, options.dtype, options.backend, options.family)
    start = time.monotonic()
    deadline = math.inf if options.minutes is None else start + 60.0 * options.minutes
    drawn = run_checks(batches(options.seed, options.random, machine), machine, options.jobs, deadline)
    counts, rows, failed = Counter(), [], {}
    for index, outcome in tqdm(drawn, total=options.random, unit="call", file=sys.stderr, dynamic_ncols=True):
        function, is_illegal = outcome.check.function, isinstance(outcome.check, IllegalCheck)
        counts.update([(function, "refusals" if is_illegal else "calls")])
        if outcome.skipped:
            counts["skipped"] += 1
        if outcome.failures:
            failed[index] = outcome
            counts[function, "failures"] += 1
            command = f"    {command_of(outcome.check, machine)}"
            tqdm.write("\n".join([*(f"call {index} failed: {line}" for line in describe_failures(outcome)), command]))
        if not is_illegal:
            rows += report.rows_of(outcome, f"{function} {index}")
    seconds = time.monotonic() - start
    shrunk = {}
    for index, outcome in sorted(failed.items())[:MOST_SHRUNK]:
        small = shrink(options.seed, index, outcome, machine, options.jobs) or outcome
        shrunk[index] = command_of(small.check, machine)
        print(f"call {index} shrunk: {describe_failures(small)[0]}\n    {shrunk[index]}", flush=True)
    columns = ("function", "calls", "refusals", "failures")
    names = sorted({key[0] for key in counts if key != "skipped"})
    lines = [{"function": name} | {column: counts[name, column] for column in columns[1:]} for name in names]
    print(f"{format_table(columns, lines)}\n\n{report.summary(rows)}\n")
    refusals = sum(line["refusals"] for line in lines)
    total = sum(line["calls"] for line in lines) + refusals
    environment = report.environment(options.device)
    stopped = "" if total == options.random else f" of {options.random}, stopped by --minutes {options.minutes:g}"
    print(
        f"{total}{stopped} calls ({refusals} of them refusals) with seed {options.seed}, {len(failed)} failed, "
        f"{counts['skipped']} skipped, in {seconds:.0f} s on {report.where(environment)}, "
        f"hypothesis {environment['hypothesis']}"
    )
    if options.json:
        failures = [
            {"index": i, "function": x.check.function, "call": literal(x.check), "shrunk": shrunk.get(i)}
            for i, x in failed.items()
        ]
        facts = {"seed": options.seed, "calls": total, "refusals": refusals, "functions": lines, "failures": failures}
        bad = [row for row in rows if row.verdict != "ok"]
        report.write_json(Path(options.json), environment, seconds, bad, **facts)
    return 1 if failed else 0 if total else 2
