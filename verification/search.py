"""``python -m verification --random N``: draw calls, run them, shrink those that fail, and report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verification import report
from verification.calls import Machine, literal, parse
from verification.refusals import KINDS, IllegalCheck
from verification.table import format_table
from verification.workers import Here, Outcome, Worker, run_check, run_checks

_LONGEST_DETAIL = 300
# The number of failures that are shrunk, the seconds for each, and the seconds after which an attempt is given up.
MOST_SHRUNK, SHRINK_SECONDS, ATTEMPT_SECONDS = 5, 180.0, 60.0


@dataclass
class Tally:
    """Counts over all outcomes so far. Only failures are kept whole."""

    calls: Counter = field(default_factory=Counter)  # of (function, backend), refusals left out
    drawn: Counter = field(default_factory=Counter)  # of a function, refusals left out
    refusals: Counter = field(default_factory=Counter)  # of a function
    skipped: Counter = field(default_factory=Counter)
    worst: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)  # (function, tensor): share, index
    failed: list[tuple[int, Outcome]] = field(default_factory=list)
    slowest: list[tuple[float, int, str]] = field(default_factory=list)

    def add(self, index: int, outcome: Outcome) -> None:
        function = outcome.check.function
        self.skipped[function] += bool(outcome.skipped)
        if isinstance(outcome.check, IllegalCheck):
            self.refusals[function] += 1
        else:
            self.drawn[function] += 1
            self.calls.update((function, backend) for backend in {finding.backend for finding in outcome.findings})
        for finding in outcome.findings:
            if finding.share > 0.0:
                key = (function, finding.found.tensor)
                self.worst[key] = max(self.worst.get(key, (0.0, 0)), (finding.share, index))
        if outcome.failures:
            self.failed.append((index, outcome))
        self.slowest = sorted([*self.slowest, (outcome.seconds, index, literal(outcome.check))], reverse=True)[:5]

    @property
    def total(self) -> int:
        return self.drawn.total() + self.refusals.total()

    def tables(self) -> str:
        """Calls of each function on each backend, then each function's and tensor's worst error."""
        backends = sorted({backend for _, backend in self.calls})
        failures = Counter(outcome.check.function for _, outcome in self.failed)
        columns = {"calls": self.drawn, "refusals": self.refusals, "skipped": self.skipped, "failures": failures}
        rows = [
            {"function": name, **{column: counter[name] for column, counter in columns.items()}}
            | {backend: self.calls[name, backend] for backend in backends}
            for name in sorted({*self.drawn, *self.refusals})
        ]
        counts = format_table(("function", "calls", *backends, "refusals", "skipped", "failures"), rows)
        worst = [
            {"function": function, "tensor": tensor, "worst share": share, "call": index}
            for (function, tensor), (share, index) in sorted(self.worst.items())
        ]
        legend = "worst share: the largest error, as a share of what the tolerance allows; above 1 fails."
        return f"{counts}\n\n{format_table(('function', 'tensor', 'worst share', 'call'), worst)}\n\n{legend}"


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
        family, prototype = strategies.drawn_prototype(seed, first, machine)
        strategy = family.calls_of(prototype, machine)
        yield [(i, strategies.draw(strategy, seed, "call", i)) for i in range(first, min(count, first + step))]


def shrink(seed: int, index: int, outcome: Outcome, machine: Machine, jobs: int) -> Outcome | None:
    """Return the outcome of the simplest call found that fails as call ``index`` does; None if it fails no more."""
    from verification import strategies

    subjects = {finding.found.tensor for finding in outcome.failures}
    deadline, known = time.monotonic() + SHRINK_SECONDS, {outcome.check: outcome}
    worker = Worker(machine) if jobs else Here(machine)

    def fails(check: Any) -> bool:
        if check not in known:
            if time.monotonic() > deadline:
                return False
            known[check] = worker.run(check, ATTEMPT_SECONDS)
        return any(finding.found.tensor in subjects for finding in known[check].failures)

    try:
        found = strategies.shrunk_call(seed, index, machine, fails)
    finally:
        worker.stop()
    return None if found is None else known[found]


def run_call(options: argparse.Namespace) -> int:
    """``--call``, or ``--random --only``: run one call in this process, and print everything that was found."""
    machine = Machine.of(options.device, options.dtype, options.backend)
    if options.call is not None:
        check = parse(options.call, KINDS)  # without hypothesis
    else:
        from verification import strategies

        check = strategies.drawn_call(options.seed, options.only, machine)
    Here(machine)
    outcome = run_check(check, machine)
    print(command_of(check, machine), "\n")
    columns = ("backend", "found", "share", "verdict")
    rows = [(one.backend, one.found.tensor, one.share, "ok" if one.found.ok else "FAIL") for one in outcome.findings]
    print(format_table(columns, [dict(zip(columns, row)) for row in rows]))
    print("\n".join(["", *describe_failures(outcome), *([f"skipped: {outcome.skipped}"] if outcome.skipped else [])]))
    return 1 if outcome.failures else 0


def run(options: argparse.Namespace) -> int:
    """Exit status 0: all is well; 1: something is not; 2: nothing ran."""
    machine = Machine.of(options.device, options.dtype, options.backend)
    tally, start = Tally(), time.monotonic()
    with tqdm(total=options.random, unit="call", file=sys.stderr, dynamic_ncols=True) as bar:

        def on_done(index: int, outcome: Outcome) -> None:
            tally.add(index, outcome)
            for line in describe_failures(outcome):
                bar.write(f"call {index} failed: {line}", file=sys.stdout)
            if outcome.failures:
                bar.write(f"    {command_of(outcome.check, machine)}", file=sys.stdout)
            if outcome.skipped:
                bar.write(f"call {index} skipped: {outcome.skipped}", file=sys.stderr)
            bar.set_postfix_str(f"{len(tally.failed)} failed")
            bar.update()

        deadline = None if options.minutes is None else start + 60.0 * options.minutes
        run_checks(batches(options.seed, options.random, machine), machine, options.jobs, on_done, deadline)
    seconds = time.monotonic() - start
    shrunk = {}
    for index, outcome in sorted(tally.failed, key=lambda failed: failed[0])[:MOST_SHRUNK]:
        small = shrink(options.seed, index, outcome, machine, options.jobs)
        shrunk[index] = outcome if small is None else small
        print(f"call {index} shrunk: {(describe_failures(shrunk[index]))[0]}")
        print(f"    {command_of(shrunk[index].check, machine)}", flush=True)
    environment = report.environment(options.device)
    print(f"{tally.tables()}\n")
    where = environment.get("gpu", "Triton's interpreter" if environment["interpreter"] else "CPU")
    stopped = "" if tally.total == options.random else f" of {options.random}, stopped by --minutes {options.minutes:g}"
    print(
        f"{tally.total}{stopped} calls ({tally.refusals.total()} of them refusals) with seed {options.seed}, "
        f"{len(tally.failed)} failed, {tally.skipped.total()} skipped, in {seconds:.0f} s on {where}, "
        f"torch {environment['torch']}, triton {environment['triton']}, hypothesis {environment['hypothesis']}"
    )
    if options.json:
        facts = {"environment": environment, "seed": options.seed, "seconds": round(seconds, 1)}
        write_json(Path(options.json), tally, facts, {i: command_of(o.check, machine) for i, o in shrunk.items()})
        print(f"summary written to {options.json}")
    return 1 if tally.failed else 0 if tally.total else 2


def write_json(path: Path, tally: Tally, facts: dict[str, Any], shrunk: dict[int, str]) -> None:
    """Write ``facts``, then what the tables say, and every failure with its call."""
    content = facts | {
        "calls": tally.total,
        "refusals": tally.refusals.total(),
        "failures": [
            {
                "index": index,
                "function": outcome.check.function,
                "call": literal(outcome.check),
                "shrunk": shrunk.get(index),
                "findings": [asdict(finding) for finding in outcome.failures],
            }
            for index, outcome in tally.failed
        ],
        "functions": {name: tally.drawn[name] for name in sorted(tally.drawn)},
        "backends": [{"function": f, "backend": b, "calls": n} for (f, b), n in sorted(tally.calls.items())],
        "worst": [
            {"function": f, "tensor": t, "share": s, "index": i} for (f, t), (s, i) in sorted(tally.worst.items())
        ],
        "slowest": [{"seconds": round(seconds, 1), "index": i, "call": text} for seconds, i, text in tally.slowest],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
