"""``python -m verification --random N``: draw, run, report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from fused_rope_attn.runtime import device
from verification import report as environment_of
from verification.random.common import Machine
from verification.random.drawing import setting_of
from verification.random.report import Tally, failure_lines, tables, write_json
from verification.random.running import Outcome
from verification.random.workers import run_calls


def machine_of(options: argparse.Namespace) -> Machine:
    import torch

    where = torch.device(options.device)
    return Machine(options.device, device.arch(where), tuple(options.dtype), tuple(options.backend))


def batches_of(count: int) -> list[list[int]]:
    """The calls 0 .. count - 1, those of one setting together."""
    found: dict[int, list[int]] = {}
    for index in range(count):
        found.setdefault(setting_of(index), []).append(index)
    return list(found.values())


def command_line(options: argparse.Namespace) -> str:
    """What reproduces this run, up to ``--only``: everything that the drawing depends on."""
    words = ["python -m verification", f"--random {options.random}", f"--seed {options.seed}"]
    for name in ("device", "backend", "dtype"):
        if name in options.given:
            value = getattr(options, name)
            words += [f"--{name} {word}" for word in (value if isinstance(value, list) else [value])]
    return " ".join(words)


def run(options: argparse.Namespace) -> int:
    """Exit status 0: all is well; 1: something is not; 2: nothing ran."""
    machine, command = machine_of(options), command_line(options)
    tally, start = Tally(), time.monotonic()
    if options.only is not None:
        batches, jobs = [[options.only]], 0
    else:
        batches, jobs = batches_of(options.random), options.jobs
    total = sum(map(len, batches))
    with tqdm(total=total, unit="call", file=sys.stderr, dynamic_ncols=True) as bar:

        def on_done(outcome: Outcome) -> None:
            tally.add(outcome)
            for line in failure_lines(outcome, command):
                bar.write(line, file=sys.stdout)
            if outcome.skipped:
                bar.write(f"call {outcome.index} skipped: {outcome.skipped}", file=sys.stderr)
            bar.set_postfix_str(f"{len(tally.failed)} failed")
            bar.update()

        deadline = None if options.minutes is None else start + 60.0 * options.minutes
        run_calls(options.seed, batches, machine, jobs, on_done, deadline)
    seconds = time.monotonic() - start
    environment = environment_of.environment(options.device)
    if options.only is not None:
        print(f"call {options.only}: {'; '.join(text for _, _, text in tally.slowest)}")
    print(f"{tables(tally)}\n")
    where = environment.get("gpu", "Triton's interpreter" if environment["interpreter"] else "CPU")
    stopped = "" if tally.total == total else f" of {total}, stopped by --minutes {options.minutes:g}"
    print(
        f"{tally.total}{stopped} calls ({tally.refusals.total()} of them refusals) with seed {options.seed}, "
        f"{len(tally.failed)} failed, {tally.skipped.total()} skipped, in {seconds:.0f} s on {where}, "
        f"torch {environment['torch']}, triton {environment['triton']}"
    )
    if options.json and options.only is None:
        facts = {"environment": environment, "command": command, "seed": options.seed, "seconds": round(seconds, 1)}
        write_json(Path(options.json), tally, facts)
        print(f"summary written to {options.json}")
    return 1 if tally.failed else 0 if tally.total else 2
