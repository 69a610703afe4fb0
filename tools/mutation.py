"""Make one small change of a module at a time, and list those that no test notices.

    python -m tools.mutation kernels/masks.py rotation/problem.py
    python -m tools.mutation attention/planning.py --tests tests/attention/test_planning.py --session plan.sqlite
    python -m tools.mutation --sample 200 --seed 1           200 changes of the whole package, the same for equal seeds

cosmic-ray makes the changes (``<`` for ``<=``, 2 for 1, ``and`` for ``or``) in a copy of the checkout, and keeps their
results in a session file, which ``cr-report`` and ``cr-html`` read. Its own ``exec`` starts Python for each change and
imports torch and Triton again; here each test run is a fork of a process that has imported them. The tests of a change
are those that mirror its module, and ten random calls of each family of tests/test_calls.py that can see the module.

Exits with 1 if a change survives that equivalent_mutants.txt does not list, or if a listed one is killed. Needs
``pip install '.[test]'`` and no GPU: device code runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fused_rope_attn"
EQUIVALENTS = Path(__file__).with_name("equivalent_mutants.txt")
# The tests that failed last run first. pyproject.toml sets an option of pytest_timeout; other plugins load slowly.
PYTEST = ("-x", "-q", "--ff", "--tb=no", "--assert=plain", "-p", "no:logging", "-p", "pytest_timeout")
PYTEST += ("-p", "_hypothesis_pytestplugin")
PRELOADED = ["torch._dynamo.trace_rules", "triton.experimental.gluon.nvidia.hopper"]
PRELOADED += ["pytest", "pytest_timeout", "hypothesis", "transformers"]
MEMORY = 8 << 30  # bytes of data that a test run may allocate
LEAST_LIMIT = 20.0  # seconds before a run is stopped; slow tests get ten times what they take without a change
# A sample of the whole package leaves out what pyproject.toml leaves out of coverage.
OUTSIDE = ("attention/hopper/*", "integrations/litgpt.py", "integrations/torchtitan.py")
# Folder -> families of tests/test_calls.py that can see its modules.
CALLS = "tests/test_calls.py"
SEEN_BY = {"rotation": ("rope", "rope of several"), "generation": ("decode", "write"), "experimental": ("corope",)}
_ALL = ("attention", "packed", "mla", "pairs", *sum(SEEN_BY.values(), ()))
SEEN_BY |= dict.fromkeys(("attention", "kernels", "runtime"), _ALL)
# No code compares numbers by identity, and dtypes, classes and functions are equal where they are identical.
SPARED_OPERATORS = r"ComparisonOperator_((?!Is)\w+_Is|Is_Eq$|IsNot_NotEq$)"


def mirrors_of(module: str) -> list[str]:
    """Return the tests that mirror a module: ``tests/folder/test_module*.py``, or else all of the nearest folder."""
    folder = ROOT / "tests" / Path(module).parent
    while not folder.exists():
        folder = folder.parent
    found = sorted(folder.glob(f"test_{Path(module).stem}*.py"))
    return [str(path.relative_to(ROOT)) for path in found or [folder]]


def calls_for(module: str) -> list[str]:
    """Return the random calls that can see a module, ten of each family."""
    return [f"{CALLS}::test_calls[{family}-0]" for family in SEEN_BY.get(Path(module).parts[0], ())]


def every_module() -> list[str]:
    found = sorted(path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py"))
    return [str(path) for path in found if not any(path.match(pattern) for pattern in OUTSIDE)]


def equivalents() -> set[tuple[str, str, str]]:
    """Return the listed changes as (module, lines before, lines after).

    The list has blocks of a reason ("# "), a module, and the lines before ("- ") and after ("+ ") each change.
    """
    found, module, before = set(), "", ""
    for line in EQUIVALENTS.read_text(encoding="utf-8").splitlines():
        kind, rest = line[:2], line[2:].strip()
        if kind == "- ":
            before = rest
        elif kind == "+ ":
            found.add((module, before, rest))
        elif line and kind != "# ":
            module = line
    return found


@functools.cache
def _spared(source: str) -> list[tuple[str, ast.expr]]:
    """Return (operators as a pattern, expression) of changes that no test of behaviour can see."""
    found: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.append(("", node.returns))
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(("", node.annotation))
        elif isinstance(node, ast.keyword) and node.arg == "stacklevel":
            found.append(("", node.value))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found.append(("", node.value))
        elif isinstance(node, ast.Compare) and any(isinstance(getattr(x, "value", 0), str) for x in node.comparators):
            found.append(("Eq_[LG]t", node))  # strings are names here, which have no order
    return [(pattern, x) for pattern, x in found if x is not None]


def is_spared(source: str, operator: str, start: tuple[int, int], end: tuple[int, int]) -> bool:
    """Return whether cosmic-ray's ``operator`` at a place of a module's ``source`` asks for no test."""
    if operator.endswith("RemoveDecorator"):
        # The interpreter calls a device function without its decorator as it is; only the compiler refuses it.
        return source.splitlines()[start[0] - 1].strip() in ("@triton.jit", "@record")
    return re.search(SPARED_OPERATORS, operator) is not None or any(
        re.search(pattern, operator) and (x.lineno, x.col_offset) <= start and end <= (x.end_lineno, x.end_col_offset)
        for pattern, x in _spared(source)
    )


def _is_spared(item) -> bool:
    (x,) = item.mutations
    return is_spared(x.module_path.read_text("utf-8"), x.operator_name, x.start_pos, x.end_pos)


def keep_sample(db, count: int, seed: int) -> None:
    """Keep ``count`` changes of a session that ask for a test, chosen at random."""
    found = [item for item in sorted(db.work_items, key=lambda item: str(item.mutations)) if not _is_spared(item)]
    db.clear()
    db.add_work_items(random.Random(seed).sample(found, min(count, len(found))))


def _run_pytest(tests: list[str], log: Path) -> None:
    """Run in a process of its own, and end it with pytest's exit code."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    sys.exit(int(pytest.main([*PYTEST, *tests])))


class Runner:
    """Runs tests in forks of a process that has imported what no change touches."""

    def __init__(self, log: Path):
        self.log = log
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        first = self.context.Process(target=int)  # waits for these imports, so that no test run does
        first.start()
        first.join()

    def passes(self, tests: list[str], limit: float) -> bool | None:
        """Return whether all tests pass; None if they do not end within ``limit`` seconds."""
        process = self.context.Process(target=_run_pytest, args=(tests, self.log))
        process.start()
        process.join(limit)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None
        return process.exitcode == 0


def run_session(db, runner: Runner, tests_by_module: dict[Path, list[str]]) -> None:
    """Test the changes of a session that have no result yet."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult
    from tqdm import tqdm

    limits: dict[Path, float] = {}
    for number, item in enumerate(tqdm(list(db.pending_work_items), disable=None)):
        (change,) = item.mutations
        module, tests = change.module_path, tests_by_module[change.module_path]
        if _is_spared(item):
            db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
            continue
        if module not in limits:
            start = time.monotonic()
            if not runner.passes(tests, 1800.0):
                raise RuntimeError(f"{' '.join(tests)} must pass without a change:\n{runner.log.read_text()[-3000:]}")
            limits[module] = max(LEAST_LIMIT, 10 * (time.monotonic() - start))
        with use_mutation(module, get_operator(change.operator_name)(), change.occurrence) as (source, changed):
            os.utime(module, (number, number))  # Python knows a .pyc by the second and the size of its source
            passes = runner.passes(tests, limits[module])
        outcome = TestOutcome.SURVIVED if passes else TestOutcome.KILLED
        ended = WorkerOutcome.NORMAL if passes is not None else WorkerOutcome.ABNORMAL
        diff = "\n".join(difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0))
        db.set_result(item.job_id, WorkResult(ended, runner.log.read_text()[-3000:], outcome, diff))


def report(db) -> int:
    """Print the changes that ask for something, and how many there are of each outcome; return how many ask."""
    listed, asks = equivalents(), 0
    counts: Counter[tuple[str, str]] = Counter()
    for item, result in db.completed_work_items:
        if result.test_outcome is None:
            continue
        (change,) = item.mutations
        module = str(change.module_path.relative_to(PACKAGE))
        lines = result.diff.splitlines()[3:]
        before, after = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        is_listed = (module, before, after) in listed
        killed = "killed" if result.worker_outcome == "normal" else "timed out"
        outcome = killed if result.is_killed else "equivalent" if is_listed else "survived"
        counts[module, outcome] += 1
        if is_listed == result.is_killed:
            note = ", but listed as equivalent" if is_listed else ""
            print(f"{outcome}{note}: {module}:{change.start_pos[0]} {change.operator_name}\n- {before}\n+ {after}\n")
            asks += 1
    for (module, outcome), count in sorted(counts.items()):
        print(f"{module}: {count} {outcome}")
    total = Counter(outcome for (_, outcome), count in sorted(counts.items()) for _ in range(count))
    print(f"all: {', '.join(f'{count} {outcome}' for outcome, count in sorted(total.items()))}")
    return asks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help=f"files of {PACKAGE}, such as kernels/masks.py")
    parser.add_argument("--tests", nargs="+", help="as pytest takes them (default: see above)")
    parser.add_argument("--sample", type=int, help="only so many changes, of all modules if none is named")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--session", type=Path, help="file of results to keep; one of the same source is continued")
    options = parser.parse_args(arguments)
    names = options.modules or (every_module() if options.sample else parser.error("name a module, or give --sample"))
    modules = {Path(PACKAGE, name): options.tests or mirrors_of(name) + calls_for(name) for name in names}
    for module in modules:
        if not (ROOT / module).is_file():
            parser.error(f"a module must be a file of {PACKAGE}, such as kernels/masks.py, but is {str(module)!r}")
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import use_db

    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        session = (options.session or Path(folder, "session.sqlite")).absolute()
        ignored = shutil.ignore_patterns(".*", "__pycache__", "results")
        tree = shutil.copytree(ROOT, Path(folder, "tree"), ignore=ignored)
        os.chdir(tree)
        sys.path[0] = str(tree)  # of the forks
        runner = Runner(Path(folder, "log"))
        with use_db(session) as db:
            if not db.num_work_items:
                init(modules, db, {})
                if options.sample:
                    keep_sample(db, options.sample, options.seed)
            try:
                run_session(db, runner, modules)
            finally:
                asks = report(db)
    return 1 if asks else 0


if __name__ == "__main__":
    sys.exit(main())
