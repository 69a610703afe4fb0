"""The command: mutate modules, run their tests, write a row for each mutant and a table of all.

    python -m tools.mutation kernels/masks.py rotation/validation.py --jobs 2 --out rows.jsonl
    python -m tools.mutation attention/planning.py --tests tests/attention/test_plan.py tests/attention/test_backends.py

The tests of ``folder/module.py`` are ``tests/folder/test_module*.py``, or else all of ``tests/folder``. Name the quick
and the telling ones with ``--tests``. Needs ``pip install '.[mutation]'``, and runs without a GPU, in Triton's
interpreter. Exits with 1 where less than ``--least`` percent of the mutants were killed, or where one was killed that
is listed as making no difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from tools.mutation.mutants import Mutant, equivalents, mutants_of
from tools.mutation.trials import PACKAGE, ROOT, Trial, Verdict, copy_checkout, preload, run_trials, write_module

LEAST_LIMIT = 20.0  # seconds of a trial's processor time: tests that take less may take this much
OUTCOMES = ("killed", "timed out", "equivalent", "survived")


def mirrors_of(module: str) -> tuple[str, ...]:
    """Return the tests that mirror a module."""
    folder = ROOT / "tests" / Path(module).parent
    found = sorted(folder.glob(f"test_{Path(module).stem}*.py"))
    return tuple(str(path.relative_to(ROOT)) for path in found or [folder])


def try_mutants(
    mutants: list[Mutant], tests: tuple[str, ...], trees: list[Path], deadline: float, out: TextIO | None = None
) -> list[dict[str, Any]]:
    """Run tests on a module as it is, which they must pass, and on each of its mutants; return a row for each."""
    rows: list[dict[str, Any]] = []
    limit = [LEAST_LIMIT]

    def passed(_: str, tree: Path, verdict: Verdict) -> None:
        if verdict.outcome != "passed":
            log = (tree / "trial.log").read_text()[-3000:]
            raise RuntimeError(f"{' '.join(tests)} must pass without a change, but {verdict.test}:\n{log}")
        print(f"{verdict.seconds:6.1f} s without a change: {' '.join(tests)}", flush=True)
        limit[0] = max(LEAST_LIMIT, 5 * verdict.seconds)

    run_trials([""], trees[:1], lambda _, tree: Trial(tree, tests, Counter(), 600.0), passed)
    killers: dict[str, Counter[str]] = {}  # tests that have killed mutants of a definition, or of any ("")
    source = (trees[0] / PACKAGE / mutants[0].module).read_text("utf-8")

    def start(mutant: Mutant, tree: Path) -> Trial:
        write_module(tree, mutant.module, mutant.source)
        nearby = killers.get(mutant.definition, Counter[str]())
        failed = Counter({test: 1000 * count for test, count in nearby.items()}) + killers.get("", Counter[str]())
        return Trial(tree, tests, failed, limit[0])

    def ended(mutant: Mutant, tree: Path, verdict: Verdict) -> None:
        write_module(tree, mutant.module, source)
        if verdict.outcome == "failed":
            for name in ("", mutant.definition):
                killers.setdefault(name, Counter())[verdict.test] += 1
        reason = equivalents().get((mutant.module, mutant.before, mutant.after), "")
        outcomes = {"failed": "killed", "passed": "equivalent" if reason else "survived"}
        row = {name: value for name, value in vars(mutant).items() if name != "source"}
        row |= {"outcome": outcomes.get(verdict.outcome, verdict.outcome), "seconds": verdict.seconds}
        row |= {"test": verdict.test, "reason": reason}
        rows.append(row)
        if out is not None:
            print(json.dumps(row), file=out, flush=True)
        if row["outcome"] == "survived" or (reason and row["outcome"] != "equivalent"):
            lines = f"{row['outcome']}: {mutant.module}:{mutant.line} {mutant.operator}", mutant.before, mutant.after
            print(*lines, sep="\n    ", flush=True)

    run_trials((mutant for mutant in mutants if time.monotonic() < deadline), trees, start, ended)
    return rows


def table(rows: Iterable[dict[str, Any]]) -> tuple[list[str], float]:
    """(lines of a table with a row for each module, the percentage killed of those that make a difference)."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (row["module"], "all"):
            counts.setdefault(name, Counter())[row["outcome"]] += 1
    counts = {name: counts[name] for name in sorted(counts, key=lambda name: (name == "all", name))}
    lines = [f"| module | {' | '.join(OUTCOMES)} | killed, % |", "| --- |" + " ---: |" * (len(OUTCOMES) + 1)]
    percent = 100.0
    for name, count in counts.items():
        killed = count["killed"] + count["timed out"]
        percent = 100 * killed / max(1, killed + count["survived"])
        lines.append(f"| {name} | {' | '.join(str(count[outcome]) for outcome in OUTCOMES)} | {percent:.1f} |")
    return lines, percent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="+", help=f"files of {PACKAGE}, such as kernels/masks.py")
    parser.add_argument("--tests", nargs="+", help="as pytest takes them (default: those that mirror the module)")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no trial after so many")
    parser.add_argument("--out", type=Path, help="file of JSON lines, one for each mutant")
    parser.add_argument("--least", type=float, default=95.0, help="percent to be killed (default: 95)")
    options = parser.parse_args(arguments)
    mutants = {}
    for module in options.modules:
        if not (ROOT / PACKAGE / module).is_file():
            parser.error(f"a module must be a file of {PACKAGE}, such as kernels/masks.py, but is {module!r}")
        mutants[module] = mutants_of(module, (ROOT / PACKAGE / module).read_text(encoding="utf-8"))
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    preload(["transformers"] if any(name.startswith("integrations") for name in mutants) else [])
    deadline, rows = time.monotonic() + 60 * options.minutes, []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trees = [copy_checkout(Path(folder) / str(i)) for i in range(options.jobs)]
        out = None if options.out is None else open(options.out, "w")
        for module, of in mutants.items():
            if of:
                rows += try_mutants(of, tuple(options.tests or mirrors_of(module)), trees, deadline, out)
    gc.unfreeze()  # of ``preload``: libraries that count leaked objects stay silent
    lines, percent = table(rows)
    print(*lines, sep="\n")
    if len(rows) < sum(map(len, mutants.values())):
        print(f"{sum(map(len, mutants.values())) - len(rows)} mutants were not tried: the time was up")
    is_wrong = any(row["reason"] and row["outcome"] != "equivalent" for row in rows)
    return 1 if is_wrong or percent < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
