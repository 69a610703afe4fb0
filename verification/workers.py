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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from verification.calls import Finding, Machine
from verification.interpreter import guarded_memory, make_faster

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
        return [finding for finding in self.findings if not finding.found.ok]


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
        findings.append(Finding.raised(check.backend or "reference", error))
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
        self.machine, self.process = machine, None
        self.log = tempfile.NamedTemporaryFile("r", prefix="verification-", errors="replace")

    def run(self, check: Any, longest: float = LONGEST_SECONDS) -> Outcome:
        if self.process is None:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.machine, self.log.name))
            self.process.start()
            theirs.close()
        try:
            self.connection.send(check)
            if self.connection.poll(longest):
                outcome = self.connection.recv()
                if outcome.is_fatal:
                    self.stop()
                return outcome
            why = f"hung for {longest:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(timeout=30)
            why = f"died, exit status {self.process.exitcode}"
        self.log.seek(0)
        said = self.log.read().strip() or "it said nothing"
        self.stop()
        detail = f"the process {why}: {said.splitlines()[-1][:300]}"
        return Outcome(check, (Finding.that("?", "process", False, detail),))

    def stop(self, patience: float = 0.0) -> None:
        """End the process: in good order, so that it can end processes of its own, if it takes no longer than this."""
        if self.process is not None:
            self.connection.close()
            self.process.join(patience)
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(connection: Connection, machine: Machine, log: str) -> None:
    """Run checks until the pipe closes. Whatever is printed goes to ``log``."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    prepare_process(machine)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            outcome = run_check(connection.recv(), machine)
            connection.send(outcome)
            if outcome.is_fatal:
                # Nothing more can run here, and leaving in good order would wait for the GPU.
                connection.close()
                os._exit(1)


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
