"""The command: mutate modules, run their tests, write a row for each mutant and a table of all.

    python -m tools.mutation                                      every module of the table, hours of processor time
    python -m tools.mutation kernels rotation/validation.py --jobs 2 --out rows.jsonl
    python -m tools.mutation kernels --sample 200 --seed 1        200 mutants of these modules, drawn at random
    python -m tools.mutation kernels --again rows.jsonl           those alone that survived there
    python -m tools.mutation --report rows.jsonl later.jsonl      no trial: the table of these rows, and who survived

Needs ``pip install '.[mutation]'``, and runs without a GPU, in Triton's interpreter. Exits with 1 where less than
``--least`` percent of the mutants were killed, or one that is listed as making no difference was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from tools.mutation.equivalent import reason_of
from tools.mutation.mutants import Mutant, mutants_of
from tools.mutation.subjects import Subject, chosen
from tools.mutation.trees import PACKAGE, ROOT, copy_checkout, write_module
from tools.mutation.trials import Trial, Verdict, preload, run_trials

LEAST_LIMIT = 20.0  # seconds of a trial's processor time: tests that take less may take this much
Options = tuple[str, ...]  # of pytest's command line
OUTCOMES = ("killed", "timed out", "equivalent", "survived")


class Run:
    """Trials of the mutants of some subjects, and the rows that come of them."""

    def __init__(self, trees: list[Path], out: TextIO | None, deadline: float):
        self.trees, self.out, self.deadline = trees, out, deadline
        self.rows: list[dict[str, Any]] = []

    def try_all(self, mutants: dict[Subject, list[Mutant]]) -> None:
        """Run the tests of each subject on its module as it is, which must pass, and on each mutant; those of the
        second stage on what survives the first."""
        limits = self._limits({stage for subject, of in mutants.items() if of for stage in subject.stages()})
        waiting = [(subject, mutant) for subject, of in mutants.items() for mutant in of]
        for i in range(2):
            tried = [pair for pair in waiting if len(pair[0].stages()) > i]
            print(f"stage {i + 1}: {len(tried)} mutants", flush=True)
            waiting = self._stage(tried, i, limits)

    def _limits(self, stages: set[Options]) -> dict[Options, float]:
        """Seconds of processor time that tests may take: several times as many as they take without a change."""
        limits: dict[Options, float] = {}

        def ended(tests: Options, tree: Path, verdict: Verdict) -> None:
            if verdict.outcome != "passed":
                log = (tree / "trial.log").read_text()
                raise RuntimeError(f"{' '.join(tests)} must pass without a change, but {verdict.test}:\n{log[-3000:]}")
            print(f"{verdict.seconds:6.1f} s without a change: {' '.join(tests)}", flush=True)
            limits[tests] = max(LEAST_LIMIT, 5 * verdict.seconds)

        run_trials(sorted(stages), self.trees, lambda tests, tree: Trial(tree, tests, Counter(), 600.0), ended)
        return limits

    def _stage(
        self, pairs: list[tuple[Subject, Mutant]], stage: int, limits: dict[Options, float]
    ) -> list[tuple[Subject, Mutant]]:
        """The mutants that survive a stage and have another before them; whatever is decided becomes rows."""
        killers: dict[tuple[str, str], Counter[str]] = {}
        survivors: list[tuple[Subject, Mutant]] = []
        sources = {subject: (self.trees[0] / PACKAGE / subject.module).read_text("utf-8") for subject, _ in pairs}

        def start(pair: tuple[Subject, Mutant], tree: Path) -> Trial:
            subject, mutant = pair
            write_module(tree, mutant.module, mutant.source)
            of_module, of_definition = (
                killers.get((mutant.module, name), Counter[str]()) for name in ("", mutant.definition)
            )
            failed = Counter({test: 1000 * count for test, count in of_definition.items()}) + of_module
            tests = subject.stages()[stage]
            return Trial(tree, tests, failed, limits[tests])

        def ended(pair: tuple[Subject, Mutant], tree: Path, verdict: Verdict) -> None:
            subject, mutant = pair
            write_module(tree, mutant.module, sources[subject])
            if verdict.outcome == "failed":
                for name in ("", mutant.definition):
                    killers.setdefault((mutant.module, name), Counter())[verdict.test] += 1
            if verdict.outcome == "passed" and stage + 1 < len(subject.stages()):
                survivors.append(pair)
            else:
                self._add(mutant, verdict)

        run_trials((pair for pair in pairs if time.monotonic() < self.deadline), self.trees, start, ended)
        return survivors

    def _add(self, mutant: Mutant, verdict: Verdict) -> None:
        reason = reason_of(mutant.module, mutant.before, mutant.after)
        outcome = {"failed": "killed", "passed": "equivalent" if reason else "survived"}.get(
            verdict.outcome, verdict.outcome
        )
        row = {
            "module": mutant.module,
            "definition": mutant.definition,
            "operator": mutant.operator,
            "line": mutant.line,
            "before": mutant.before,
            "after": mutant.after,
            "outcome": outcome,
            "seconds": verdict.seconds,
            "test": verdict.test,
        }
        if reason:
            row["reason"] = reason
        self.rows.append(row)
        if self.out is not None:
            print(json.dumps(row), file=self.out, flush=True)
        if outcome == "survived":
            print(
                f"  {mutant.module}:{mutant.line} {mutant.operator}\n    - {mutant.before}\n    + {mutant.after}",
                flush=True,
            )


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


def read_rows(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of several files, the last one of each mutant, with the reasons that equivalent.txt has today."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            change = row["module"], row["before"], row["after"]
            if row["outcome"] in ("survived", "equivalent"):
                row["outcome"] = "equivalent" if reason_of(*change) else "survived"
            found[(row["definition"], *change)] = row
    return list(found.values())


def tell(row: dict[str, Any]) -> None:
    """Print the change of a mutant."""
    lines = f"{row['module']}:{row['line']} {row['operator']}", f"- {row['before']}", f"+ {row['after']}"
    print(*lines, sep="\n    ", flush=True)


def survivors(file: Path) -> set[tuple[str, str, str]]:
    """(module, before, after) of the mutants that survived according to a file of rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["module"], row["before"], row["after"]) for row in rows if row["outcome"] == "survived"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="modules of the table, or how they begin (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no trial after so many")
    parser.add_argument("--out", type=Path, help="file of JSON lines, one for each mutant")
    parser.add_argument("--sample", type=int, help="as many mutants of all modules, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: 0)")
    parser.add_argument("--again", type=Path, help="those mutants alone that survived in this file of rows")
    parser.add_argument("--report", type=Path, nargs="+", help="files of rows: print their table, and try nothing")
    parser.add_argument("--least", type=float, default=95.0, help="percent to be killed (default: 95)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.report:
        rows = read_rows(options.report)
        for row in rows:
            if row["outcome"] == "survived":
                tell(row)
        lines, percent = table(rows)
        print(*lines, sep="\n")
        return int(percent < options.least)
    subjects = chosen(options.modules)
    mutants = {
        subject: mutants_of(subject.module, (ROOT / PACKAGE / subject.module).read_text(encoding="utf-8"))
        for subject in subjects
    }
    if options.again is not None:
        wanted = survivors(options.again)
        mutants = {
            subject: [x for x in of if (x.module, x.before, x.after) in wanted] for subject, of in mutants.items()
        }
    if options.sample is not None:
        drawn = [(subject, mutant) for subject, of in mutants.items() for mutant in of]
        drawn = random.Random(options.seed).sample(drawn, min(options.sample, len(drawn)))
        mutants = {subject: [mutant for owner, mutant in drawn if owner is subject] for subject in subjects}
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    preload(tuple(name for subject in subjects for name in subject.preload))
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trees = [copy_checkout(Path(folder) / str(i)) for i in range(options.jobs)]
        out = None if options.out is None else open(options.out, "w")
        run = Run(trees, out, deadline)
        run.try_all(mutants)
    gc.unfreeze()  # of ``preload``: libraries that count what they leave behind stay silent
    lines, percent = table(run.rows)
    print(*lines, sep="\n")
    total, planned = len(run.rows), sum(map(len, mutants.values()))
    if total < planned:
        print(f"{planned - total} mutants were not tried: the time was up")
    wrong = [row for row in run.rows if row.get("reason") and row["outcome"] != "equivalent"]
    for row in wrong:
        print(f"listed as making no difference, but {row['outcome']}: {row['module']}:{row['line']} {row['after']}")
    return 1 if wrong or percent < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
