"""Trials: the tests of a mutant, each in a fork of this process, which has imported what they import but the package.

Importing torch, Triton, transformers and pytest takes many times as long as most tests do. A fork has them, and imports
the package anew.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fused_rope_attn"
# Tests import or read these.
COPIED = (PACKAGE, "baselines", "bench", "tests", "tools", "verification", "pyproject.toml")
MEMORY = 8 << 30  # bytes that a trial may allocate beyond what this process holds
# Plain asserts compile once and not for pytest; the text of a failure is not read.
OPTIONS = ("-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:logging")
GLUON = "triton.experimental.gluon.nvidia.hopper"
PLUGIN = "pytest_timeout"  # pyproject.toml sets an option of it; other plugins take half a second to load


def copy_checkout(folder: Path, root: Path = ROOT) -> Path:
    """Copy what tests need of the checkout to a folder; the checkout itself is never written to."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif (root / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def write_module(tree: Path, module: str, source: str) -> None:
    """Make ``source`` what is imported as a module of the copy, and what ``inspect`` reads of it.

    Its compiled form goes: Python knows an old one by size and second of its source, and many mutants share both.
    """
    path = tree / PACKAGE / module
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(source, encoding="utf-8")


@dataclass
class Verdict:
    """The end of a trial. outcome: "passed", "failed" or "timed out"; test: the first that failed."""

    outcome: str
    seconds: float
    test: str = ""


class _Watcher:
    """pytest plugin: runs the tests that have failed most often first, and tells of the first that fails."""

    def __init__(self, failed_before: Counter[str], tell: Callable[[bool, str], NoReturn]):
        self.failed_before, self.tell = failed_before, tell

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: -self.failed_before[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell(False, report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.tell(False, report.nodeid)


def preload(modules: Iterable[str]) -> None:
    """Import what trials need and no mutant can change."""
    for name in ("torch", "triton", "triton.language", "pytest", PLUGIN, "numpy", "hypothesis", GLUON, *modules):
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    if loaded:
        raise RuntimeError(f"the package must be imported by trials alone, but {', '.join(loaded[:3])} is already")
    gc.collect()
    gc.freeze()  # collections in a trial need not look at all that, nor copy its pages


def _run(tree: Path, tests: tuple[str, ...], failed_before: Counter[str], limit: float, out: int) -> NoReturn:
    """Run the trial in a process of its own: write ``Verdict``'s outcome and test to the file descriptor."""
    os.setsid()
    with open(tree / "trial.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(tree)
    here = {"", ".", str(ROOT)}
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in here)]
    for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    def tell(passed: bool, test: str) -> NoReturn:
        sys.stdout.flush()
        os.write(out, json.dumps([passed, test]).encode())
        os._exit(0)

    options = [*OPTIONS, "-p", PLUGIN, "--rootdir", str(tree), "-c", str(tree / "pyproject.toml")]
    code = pytest.main([*options, *tests], plugins=[_Watcher(failed_before, tell)])
    file = str(getattr(sys.modules.get(PACKAGE), "__file__", None))
    if not file.startswith(str(tree)):
        tell(False, f"{PACKAGE} was imported from {file} instead of the copy")
    tell(code == pytest.ExitCode.OK, "" if code == pytest.ExitCode.OK else f"pytest's exit code {int(code)}")


class Trial:
    """A trial under way.

    tests: as pytest's command line has them. limit: seconds of processor time; ten times as many may pass by the clock.
    """

    def __init__(self, tree: Path, tests: tuple[str, ...], failed_before: Counter[str], limit: float):
        self.started, self.clock = time.monotonic(), 10 * limit
        read, write = os.pipe()
        self.pid, self.out = os.fork(), read
        if self.pid == 0:
            try:
                os.close(read)
                _run(tree, tests, failed_before, limit, write)
            finally:
                os._exit(1)
        os.close(write)

    def overdue(self) -> bool:
        return time.monotonic() - self.started > self.clock

    def end(self) -> Verdict:
        """Wait for the process, which has closed its pipe or is overdue, and read what it found."""
        written = b""
        if self.overdue():
            os.killpg(self.pid, signal.SIGKILL)
        else:
            written = os.read(self.out, 1 << 16)
        os.close(self.out)
        _, status = os.waitpid(self.pid, 0)
        seconds = round(time.monotonic() - self.started, 2)
        if written:
            passed, test = json.loads(written)
            return Verdict("passed" if passed else "failed", seconds, test)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if killed in (signal.SIGXCPU, signal.SIGKILL):
            return Verdict("timed out", seconds)
        return Verdict("failed", seconds, f"the process ended by signal {killed}")


def run_trials(
    jobs: Iterable[Any],
    trees: list[Path],
    start: Callable[[Any, Path], Trial],
    ended: Callable[[Any, Path, Verdict], None],
) -> None:
    """Run all jobs, one at a time in each tree: ``start`` begins one there, ``ended`` is told how it ended."""
    waiting, free, running = iter(jobs), trees[::-1], selectors.DefaultSelector()
    while True:
        while free and (job := next(waiting, None)) is not None:
            tree = free.pop()
            trial = start(job, tree)
            running.register(trial.out, selectors.EVENT_READ, (job, tree, trial))
        if not running.get_map():
            return
        ready = {key.fd for key, _ in running.select(1.0)}
        for key in list(running.get_map().values()):
            job, tree, trial = key.data
            if key.fd in ready or trial.overdue():
                running.unregister(trial.out)
                ended(job, tree, trial.end())
                free.append(tree)
