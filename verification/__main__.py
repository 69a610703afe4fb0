"""``python -m verification``: every backend and strategy, rotation alone, generation step and Co-RoPE against float64.

On a GPU: bfloat16, float16 and float32, the small cases and the large ones; the sm_90 backend where the GPU is one, in
what it serves. Without one the real kernels run in
Triton's interpreter on the small cases, in float16 and float32. Exit status 0: all within tolerance; 1: some are not;
2: usage.

``--random N`` draws N calls over the whole contract instead, illegal ones among them, and runs each on the backends
that serve it. A failure prints the command that runs its call alone.

``--cp`` runs context parallelism instead, in processes of its own, every rank against float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

BACKENDS = ("reference", "triton", "hopper")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verification", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    add("--backend", action="append", choices=BACKENDS, help="may be repeated; default: all that run here")
    add(
        "--strategy",
        action="append",
        choices=("inline", "prepass"),
        help="may be repeated; default: all (hopper: prepass)",
    )
    add("--dtype", action="append", choices=DTYPES, help="may be repeated; default: all that the device computes")
    add("--small", action="store_true", help="only the small cases (all that there are without a GPU)")
    add("--large", action="store_true", help="only the large cases")
    add("--filter", default="", metavar="TEXT", help="only cases whose name contains this")
    add("--jobs", type=int, metavar="N", help="processes; 0: all in this one (debuggers, compute-sanitizer)")
    add("--json", metavar="FILE", help="default: out/verification.json (out/random.json with --random); '' for none")
    add("--list", action="store_true", help="name the cases and run nothing")
    add("--cp", action="store_true", help="context parallelism instead: 2 to 4 processes, on a GPU each or by gloo")
    drawn = parser.add_argument_group("random calls")
    drawn.add_argument("--random", type=int, metavar="N", help="draw and run the calls 0 to N - 1 instead of the cases")
    drawn.add_argument("--seed", type=int, default=0, metavar="S", help="of the drawing; default: %(default)s")
    drawn.add_argument("--only", type=int, metavar="I", help="run the call I alone, in this process")
    drawn.add_argument("--minutes", type=float, metavar="M", help="stop after M minutes, and say how many calls ran")
    options = parser.parse_args(argv)
    check_random(parser, options)

    on_gpu = options.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: this machine has no GPU that torch can use")
    on_hopper = on_gpu and not torch.version.hip and torch.cuda.get_device_capability(options.device) == (9, 0)
    if "hopper" in (options.backend or ()):
        if not on_hopper:
            parser.error("--backend hopper: needs an sm_90 GPU (H100, H200)")
        if options.strategy == ["inline"]:
            parser.error("--backend hopper: rotates K once; it has no --strategy inline")
    if options.backend is None:
        options.backend = [name for name in BACKENDS if name != "hopper" or on_hopper]
    if options.large and not on_gpu:
        parser.error("--large: the large cases need a GPU")
    if options.small and options.large:
        parser.error("--small and --large exclude each other")
    if options.dtype is None:
        options.dtype = list(DTYPES) if on_gpu else ["float16", "float32"]
    if "bfloat16" in options.dtype and not on_gpu and options.backend != ["reference"]:
        parser.error("--dtype bfloat16: Triton's interpreter computes it wrongly; on a CPU use --backend reference")
    if options.jobs is None:
        of_cpu = 1 if options.random is not None else 4
        options.jobs = min(16 if on_gpu else of_cpu, os.cpu_count() or 1)
    if options.json is None:
        options.json = "out/verification.json" if options.random is None else "out/random.json"
    return options


def check_random(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What goes with ``--random`` and what does not; notes in ``options.given`` what the user chose."""
    options.given = {
        name for name in ("device", "backend", "dtype") if getattr(options, name) != parser.get_default(name)
    }
    if options.random is None:
        for name in ("only", "minutes"):
            if getattr(options, name) is not None:
                parser.error(f"--{name}: needs --random")
        return
    if options.random < 1:
        parser.error(f"--random: must be 1 or more, but is {options.random}")
    for name in ("strategy", "small", "large", "filter", "list"):
        if getattr(options, name):
            parser.error(f"--{name}: is for the cases, not for --random")


def make_tasks(options: argparse.Namespace) -> list:
    from verification.corope import CHECKS as COROPE_CHECKS
    from verification.decode import CHECKS as DECODE_CHECKS
    from verification.matrix import CHECKS
    from verification.rotation import CHECKS as ROPE_CHECKS
    from verification.runner import CheckTask, Task, hopper_serves

    scales = ("small",) if options.small or options.device == "cpu" else ("small", "large", "huge")
    scales = ("large", "huge") if options.large else scales
    backends = options.backend
    strategies = options.strategy or ("inline", "prepass")
    kernels = tuple(("triton", strategy) for strategy in strategies)
    tasks = []
    for check in CHECKS:
        if check.scale not in scales or options.filter.lower() not in check.name.lower():
            continue
        # The reference materialises every score: beyond the small cases it is no backend but the yardstick.
        variants = (("reference", "auto"),) if "reference" in backends and check.scale == "small" else ()
        variants += kernels if "triton" in backends else ()
        for name in options.dtype:
            if check.only and DTYPES[name] not in check.only:
                continue
            mine = variants
            if "hopper" in backends and "prepass" in strategies and hopper_serves(check, DTYPES[name]):
                mine += (("hopper", "auto"),)
            if mine:
                tasks.append(Task(check, DTYPES[name], mine, options.device))
    if "triton" in backends and options.strategy is None:  # none of these has strategies of attention
        tasks += [
            CheckTask(check, DTYPES[name], options.device)
            for check in ROPE_CHECKS + DECODE_CHECKS + COROPE_CHECKS
            if check.scale in scales and options.filter.lower() in check.name.lower()
            for name in options.dtype
        ]
    return tasks


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.cp:
        from verification.context_parallel import run as run_context_parallel

        return run_context_parallel(options)
    if options.device == "cpu":
        # Read when triton is imported, by this process and by those it starts.
        os.environ["TRITON_INTERPRET"] = "1"
    if options.random is not None:
        from verification.random.command import run

        return run(options)
    from tqdm import tqdm

    from verification import report
    from verification.runner import Row, run_tasks

    tasks = make_tasks(options)
    if options.list:
        print("\n".join(task.name for task in tasks))
        return 0
    if not tasks:
        print(f"no case matches --filter {options.filter!r}", file=sys.stderr)
        return 2

    start = time.perf_counter()
    found: dict = {}
    with tqdm(total=len(tasks), unit="case", file=sys.stderr, dynamic_ncols=True) as bar:

        def on_done(task, rows: list[Row]) -> None:
            found[task] = rows
            # At once, because a run that is stopped prints no table.
            if failed := sum(row.verdict == "FAIL" for row in rows):
                bar.write(f"{task.name}: {failed} of {len(rows)} tensors not within tolerance", file=sys.stderr)
            bar.set_postfix_str(task.name[:50])
            bar.update()

        run_tasks(tasks, options.jobs, on_done)
    seconds = time.perf_counter() - start

    rows = [row for task in tasks for row in found[task]]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("ok", "FAIL", "SKIP")}
    environment = report.environment(options.device)
    print(report.table(rows))
    print(f"\n{report.LEGEND}\n\n{report.summary(rows)}\n")
    where = environment.get("gpu", "Triton's interpreter" if environment["interpreter"] else "CPU")
    print(
        f"{counts['ok']} of {len(rows)} tensors within tolerance, {counts['FAIL']} not, {counts['SKIP']} skipped; "
        f"{len(tasks)} cases in {seconds:.0f} s on {where}, torch {environment['torch']}, "
        f"triton {environment['triton']}"
    )
    if options.json:
        report.write_json(Path(options.json), environment, seconds, rows)
        print(f"rows written to {options.json}")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
