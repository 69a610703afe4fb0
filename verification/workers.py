"""Processes that run checks. One that dies or hangs costs the check that it ran, and no other."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from verification.calls import Finding, Machine

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
    seconds: float = 0.0
    is_fatal: bool = False  # the process cannot go on, because the GPU's context is broken

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.found.ok]


def run_check(check: Any, machine: Machine) -> Outcome:
    """Run one check. Nothing is raised: a check that raises has failed."""
    start, findings, skipped, is_fatal = time.perf_counter(), [], "", False
    try:
        with warnings.catch_warnings():
            # NumPy warns of the rows and columns of a tile that are outside the tensor, in Triton's interpreter.
            warnings.simplefilter("ignore")
            for finding in check.run(machine):
                findings.append(finding)
        if machine.has_gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        skipped = "does not fit this GPU's memory"
    except Exception as error:
        findings.append(Finding.raised(check.backend or "reference", error))
    if machine.has_gpu:
        is_fatal = not _gpu_is_alive()
        if not is_fatal and torch.cuda.memory_reserved() > _KEPT_BYTES:
            gc.collect()
            torch.cuda.empty_cache()
    return Outcome(check, tuple(findings), skipped, time.perf_counter() - start, is_fatal)


def _gpu_is_alive() -> bool:
    """Return whether this process can still use its GPU: after an illegal access or a device assertion it cannot."""
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False


def prepare_process(machine: Machine) -> None:
    """Call this once in each process, before its first check."""
    torch.set_num_threads(1)
    if machine.has_gpu:
        torch.cuda.set_device(torch.device(machine.device).index or 0)
    elif machine.arch == "interpreter":
        from verification.interpreter import remember_builtins

        remember_builtins()


class Here:
    """Run checks in this process, for debuggers and compute-sanitizer."""

    def __init__(self, machine: Machine):
        self.machine = machine
        prepare_process(machine)

    def run(self, check: Any, longest: float = LONGEST_SECONDS) -> Outcome:
        return run_check(check, self.machine)

    def stop(self) -> None:
        pass


class Worker:
    """Run checks in a process, and in a new one after it has died.

    is_over: ends a check early when it returns True; ``run`` then returns None.
    """

    def __init__(self, machine: Machine, is_over: Callable[[], bool] = lambda: False):
        self.machine, self.is_over, self.process = machine, is_over, None
        descriptor, name = tempfile.mkstemp(prefix="verification-")
        os.close(descriptor)
        self.log = Path(name)

    def run(self, check: Any, longest: float = LONGEST_SECONDS) -> Outcome | None:
        if self.process is None:
            self._start()
        start = time.monotonic()
        try:
            self.connection.send(check)
            while not self.connection.poll(0.5):
                if self.is_over():
                    return None
                if time.monotonic() - start > longest:
                    return self._lost(check, f"hung for {longest:.0f} s")
            outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(timeout=30)
            return self._lost(check, f"died, exit status {self.process.exitcode}")
        if outcome.is_fatal:
            self._end()
        return outcome

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.join(timeout=5)  # so that it can end processes of its own
        self._end()
        self.log.unlink(missing_ok=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.machine, str(self.log)))
        self.process.start()
        theirs.close()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None

    def _lost(self, check: Any, why: str) -> Outcome:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        self._end()
        said = lines[-1][:300] if lines else "it said nothing"
        return Outcome(check, (Finding.that("?", "process", False, f"the process {why}: {said}"),))


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
    batches: Iterable[list[tuple[int, Any]]], machine: Machine, jobs: int, deadline: float | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Run batches of numbered checks, each batch in one process, and yield every number and outcome at once.

    jobs: processes; 0 runs one check after the other in this one. deadline: of ``time.monotonic()``, when all stops.
    """
    waiting, lock, stop = iter(batches), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[tuple[int, Outcome] | None] = queue.SimpleQueue()

    def is_over() -> bool:
        return stop.is_set() or (deadline is not None and time.monotonic() > deadline)

    def outcomes(worker: Worker | Here) -> Iterator[tuple[int, Outcome]]:
        try:
            while True:
                with lock:
                    batch = next(waiting, None)
                if batch is None:
                    return
                for number, check in batch:
                    outcome = None if is_over() else worker.run(check)
                    if outcome is None:
                        return
                    yield number, outcome
        finally:
            worker.stop()

    def serve() -> None:
        try:
            for one in outcomes(Worker(machine, is_over)):
                done.put(one)
        finally:
            done.put(None)

    if jobs == 0:
        yield from outcomes(Here(machine))
        return
    with ThreadPoolExecutor(jobs) as threads:
        served = [threads.submit(serve) for _ in range(jobs)]
        try:
            for _ in served:
                yield from iter(done.get, None)
            for future in served:
                future.result()
        finally:
            stop.set()
