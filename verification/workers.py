"""Processes that run checks. One that dies or hangs costs the check that it ran, and no other."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from verification.calls import Finding, Machine
from verification.interpreter import guarded_memory

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
        from verification.interpreter import make_faster

        make_faster()


class Worker:
    """Run checks in a process, one at a time, and in a new process after it has died."""

    def __init__(self, machine: Machine):
        self.machine, self.process = machine, None
        self.log = tempfile.NamedTemporaryFile("r", prefix="verification-", errors="replace")

    def run(self, check: Any, longest: float = LONGEST_SECONDS) -> Outcome:
        self.begin(check)
        return self.outcome(longest, wait=longest)

    def begin(self, check: Any) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.machine, self.log.name))
            self.process.start()
            theirs.close()
        self.check, self.start = check, time.monotonic()
        with contextlib.suppress(ConnectionError):  # ``outcome`` tells that it has died
            self.connection.send(check)

    def outcome(self, longest: float = LONGEST_SECONDS, wait: float = 0.0) -> Outcome | None:
        """Return the outcome of the check that has begun, or None while it runs, for ``longest`` seconds at most."""
        try:
            if not self.connection.poll(wait):
                late = time.monotonic() - self.start >= longest
                return self._lost(f"hung for {longest:.0f} s") if late else None
            outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(timeout=30)
            return self._lost(f"died, exit status {self.process.exitcode}")
        if outcome.is_fatal:
            self._end()
        return outcome

    def close(self) -> None:
        """Let the process end after its check, so that it can end processes of its own."""
        if self.process is not None:
            self.connection.close()

    def stop(self, deadline: float = 0.0) -> None:
        """End the process, until ``deadline`` of ``time.monotonic()`` in good order."""
        self.close()
        self._end(max(0.0, deadline - time.monotonic()))
        self.log.close()

    def _end(self, patience: float = 0.0) -> None:
        if self.process is not None:
            self.process.join(patience)
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None

    def _lost(self, why: str) -> Outcome:
        self.log.seek(0)
        said = self.log.read().strip() or "it said nothing"
        self._end()
        return Outcome(
            self.check, (Finding.that("?", "process", False, f"the process {why}: {said.splitlines()[-1][:300]}"),)
        )


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
    workers, waiting = [Worker(machine) for _ in range(jobs)], iter(batches)
    rest: dict[Worker, list[tuple[int, Any]]] = {worker: [] for worker in workers}  # of its batch
    running: dict[Worker, int] = {}
    try:
        while time.monotonic() <= deadline:
            for worker in rest.keys() - running.keys():
                rest[worker] = rest[worker] or list(next(waiting, ()))
                if rest[worker]:
                    running[worker], check = rest[worker].pop(0)
                    worker.begin(check)
            if not running:
                return
            wait([worker.connection for worker in running], timeout=0.5)
            for worker in [*running]:
                outcome = worker.outcome()
                if outcome is not None:
                    yield running.pop(worker), outcome
    finally:
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.stop(time.monotonic() + 5.0 / jobs)
