"""Processes that take settings from a queue. One that dies or hangs costs the call that it was at, and no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from verification.random.common import Finding, Machine
from verification.random.drawing import draw_call
from verification.random.running import Outcome, run_call

# A call that takes longer hangs: compiling takes a minute at most, and so does one in Triton's interpreter.
LONGEST_SECONDS = 300.0


class Worker:
    """A process, the indices that it still has to run, and the last one that it began."""

    def __init__(self, seed: int, machine: Machine, log: Path):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.log = log
        self.process = context.Process(target=_serve, args=(theirs, seed, machine, str(log)), daemon=True)
        self.process.start()
        theirs.close()
        self.pending: deque[int] = deque()
        self.since = time.monotonic()
        self.left = False  # it reported that it cannot go on

    def give(self, indices: Iterable[int]) -> None:
        self.pending.extend(indices)
        self.since = time.monotonic()
        self.connection.send(list(self.pending))

    @property
    def hangs(self) -> bool:
        return bool(self.pending) and time.monotonic() - self.since > LONGEST_SECONDS

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, seed: int, machine: Machine, log: str) -> None:
    """What a worker does: run lists of indices until the pipe closes. Whatever is printed goes to ``log``."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    prepare_process(machine)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            for index in connection.recv():
                outcome = run_call(seed, index, machine)
                connection.send(outcome)
                if outcome.fatal:
                    # Nothing more can run here, and leaving in good order would wait for the GPU.
                    connection.close()
                    os._exit(1)


def prepare_process(machine: Machine) -> None:
    """Once in each process, before its first call."""
    torch.set_num_threads(1)
    if machine.has_gpu:
        torch.cuda.set_device(torch.device(machine.device).index or 0)
    elif machine.arch == "interpreter":
        from verification.interpreter import remember_builtins

        remember_builtins()


def run_calls(
    seed: int,
    batches: Iterable[list[int]],
    machine: Machine,
    jobs: int,
    on_done: Callable[[Outcome], None],
    deadline: float | None = None,
) -> None:
    """Run batches of indices, each in one process, and hand every outcome to ``on_done`` as it comes.

    ``jobs`` 0: one after another in this process. ``deadline``: of ``time.monotonic()``, when all stops.
    """
    if jobs == 0:
        prepare_process(machine)
        for index in (index for batch in batches for index in batch):
            if deadline is not None and time.monotonic() > deadline:
                return
            on_done(run_call(seed, index, machine))
        return
    queue, workers = deque(batches), []
    with tempfile.TemporaryDirectory() as folder:

        def start() -> Worker:
            descriptor, name = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            return Worker(seed, machine, Path(name))

        try:
            workers = [start() for _ in range(min(jobs, len(queue)))]
            for worker in workers:
                worker.give(queue.popleft())
            while workers and (deadline is None or time.monotonic() < deadline):
                ready = wait([worker.connection for worker in workers], timeout=1.0)
                for place, worker in enumerate(list(workers)):
                    try:
                        if worker.connection in ready:
                            outcome = worker.connection.recv()
                            worker.pending.popleft()
                            worker.since = time.monotonic()
                            worker.left = outcome.fatal
                            on_done(outcome)
                    except (EOFError, ConnectionError):
                        worker.process.join(timeout=30)
                        # Not where it left because its last outcome was fatal: the next call has not begun then.
                        if worker.pending and not worker.left:
                            on_done(_lost(seed, worker, machine))
                            worker.pending.popleft()
                        workers[place] = _successor(worker, start)
                        continue
                    if worker.hangs:
                        on_done(_lost(seed, worker, machine))
                        worker.pending.popleft()
                        workers[place] = _successor(worker, start)
                    elif not worker.pending and queue:
                        worker.give(queue.popleft())
                workers = [worker for worker in workers if worker.pending or queue or _leave(worker)]
        finally:
            for worker in workers:
                worker.stop()


def _leave(worker: Worker) -> bool:
    """Ends a worker that has nothing more to do; False, so that it is left out."""
    worker.stop()
    return False


def _successor(worker: Worker, start: Callable[[], Worker]) -> Worker:
    """A new worker for what is left of a dead one's calls."""
    worker.stop()
    new = start()
    if worker.pending:
        new.give(worker.pending)
    return new


def _lost(seed: int, worker: Worker, machine: Machine) -> Outcome:
    """The outcome of the call at which a worker died or hung."""
    index = worker.pending[0]
    call = draw_call(seed, index, machine)
    why = f"hung for {LONGEST_SECONDS:.0f} s" if worker.hangs else f"died, exit status {worker.process.exitcode}"
    lines = [line for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1][:300] if lines else "it said nothing"
    finding = Finding("?", "process", 0.0, False, f"the process {why}: {said}")
    return Outcome(index, call.function, call.text, False, (finding,))
