"""Processes that run checks. One that dies or hangs costs the check that it ran, and no other."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from verification.calls import Machine, raised
from verification.interpreter import guarded_memory, make_faster
from verification.testing import Finding

# A check that takes longer hangs: compiling takes a minute at most, and so does one in Triton's interpreter.
LONGEST_SECONDS = 300.0
# Memory that PyTorch keeps for a process beyond this is given back after a check, because processes share the GPU.
_KEPT_BYTES = 2 << 30


@dataclass(frozen=True)
class Outcome:
    """The findings of a check, or in ``skipped`` the reason that there are none: a GPU without free memory."""

    check: Any
    findings: tuple[Finding, ...]
    skipped: str = ""
    is_fatal: bool = False  # the process cannot go on, because the GPU's context is broken

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]


def run_check(check: Any, machine: Machine) -> Outcome:
    """Run one check. Nothing is raised: a check that raises has failed."""
    findings, skipped, is_fatal = [], "", False
    try:
        with warnings.catch_warnings():
            # NumPy warns of the rows and columns of a tile that are outside the tensor, in Triton's interpreter.
            warnings.simplefilter("ignore")
            with contextlib.nullcontext() if machine.has_gpu else guarded_memory():
                for finding in check.run(machine):
                    findings.append(finding)
        if machine.has_gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        skipped = "does not fit this GPU's memory"
    except Exception as error:
        findings.append(raised(error))
    if machine.has_gpu:
        try:
            torch.cuda.synchronize()
            if torch.cuda.memory_reserved() > _KEPT_BYTES:
                gc.collect()
                torch.cuda.empty_cache()
        except Exception:
            is_fatal = True  # after an illegal access or a device assertion no process can use its GPU
    return Outcome(check, tuple(findings), skipped, is_fatal)


def prepare_process(machine: Machine) -> None:
    """Call this once in each process, before its first check."""
    torch.set_num_threads(1)
    if machine.has_gpu:
        torch.cuda.set_device(torch.device(machine.device).index or 0)
    elif machine.arch == "interpreter":
        make_faster()


class Worker:
    """Run checks in a process, one at a time, and in a new process after it has died."""

    def __init__(self, machine: Machine):
        self.machine, self.pool = machine, None
        self.log = tempfile.NamedTemporaryFile("r", prefix="verification-", errors="replace")

    def run(self, check: Any, longest: float = LONGEST_SECONDS) -> Outcome:
        if self.pool is None:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self.pool = ProcessPoolExecutor(1, context, _begin, (self.machine, self.log.name))
        try:
            future = self.pool.submit(run_check, check, self.machine)
            (self.process,) = self.pool._processes.values()
            outcome = future.result(longest)
            if outcome.is_fatal:
                self.stop()
            return outcome
        except futures.TimeoutError:
            why = f"hung for {longest:.0f} s"
        except BrokenExecutor:
            self.pool.shutdown()
            why = f"died, exit status {self.process.exitcode}"
        self.log.seek(0)
        said = self.log.read().strip() or "it said nothing"
        self.stop()
        detail = f"the process {why}: {said.splitlines()[-1][:300]}"
        return Outcome(check, (Finding("process", False, detail),))

    def stop(self, patience: float = 0.0) -> None:
        """End the process: in good order, so that it can end processes of its own, if it takes no longer than this."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)
            self.process.join(patience)
            self.process.kill()
            self.pool = None


def _begin(machine: Machine, log: str) -> None:
    """Prepare a worker's process, and send to ``log`` whatever is printed there."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    prepare_process(machine)


def run_checks(
    batches: Iterable[list[tuple[int, Any]]], machine: Machine, jobs: int, deadline: float = math.inf
) -> Iterator[tuple[int, Outcome]]:
    """Run batches of numbered checks, each batch in one process, and yield every number and outcome at once.

    jobs: processes; 0 runs one check after the other in this one, for debuggers and compute-sanitizer. deadline: of
    ``time.monotonic()``, when all stops.
    """
    if jobs == 0:
        prepare_process(machine)
        for number, check in itertools.chain.from_iterable(batches):
            if time.monotonic() > deadline:
                return
            yield number, run_check(check, machine)
        return
    waiting, lock, ended, outcomes = iter(batches), threading.Lock(), threading.Event(), queue.SimpleQueue()

    def next_batch() -> list[tuple[int, Any]]:
        with lock:
            return list(next(waiting, ()))

    def drive() -> None:
        """Hand batches to one process, until there are no more."""
        worker = Worker(machine)
        try:
            while batch := next_batch():
                for number, check in batch:
                    left = deadline - time.monotonic()
                    if left <= 0 or ended.is_set():
                        return
                    outcome = worker.run(check, min(LONGEST_SECONDS, left))
                    if time.monotonic() < deadline:  # else it did not hang
                        outcomes.put((number, outcome))
        finally:
            worker.stop(patience=5.0)
            outcomes.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        drivers = [pool.submit(drive) for _ in range(jobs)]
        try:
            for _ in drivers:
                yield from iter(outcomes.get, None)
            for driver in drivers:
                driver.result()  # raises its error
        finally:
            ended.set()
