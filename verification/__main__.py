"""``python -m verification``: every backend and strategy, rotation alone, generation step and Co-RoPE against float64.

On a GPU: bfloat16, float16 and float32, the small cases and the large ones; the sm_90 backend if the GPU has one.
Without a GPU the real kernels run in Triton's interpreter on the small cases, in float16 and float32. Exit status 0:
all within tolerance; 1: some are not; 2: usage.

``--random N`` draws N calls over the whole contract instead, illegal ones among them, and runs each on the backends
that serve it. A call that fails is shrunk, and printed as the command that repeats it: ``--call``.

``--cp`` runs context parallelism instead, in processes of its own, every rank against float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BACKENDS = ("reference", "triton", "hopper")
STRATEGIES = ("inline", "prepass")
# The names in ``strategies.FAMILIES``, which needs hypothesis.
FAMILIES = ("attention", "packed", "mla", "decode", "rope", "rope of several", "corope", "write", "pairs")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verification", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    add("--backend", action="append", choices=BACKENDS, help="may be repeated; default: all that run here")
    add("--strategy", action="append", choices=STRATEGIES, help="may be repeated; default: all (hopper: prepass)")
    add("--dtype", action="append", choices=DTYPES, help="may be repeated; default: all that the device computes")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="only the small cases (all that there are without a GPU)")
    sizes.add_argument("--large", action="store_true", help="only the large cases")
    add("--filter", default="", metavar="TEXT", help="only cases whose name contains this")
    add("--jobs", type=int, metavar="N", help="processes; 0: all in this one (debuggers, compute-sanitizer)")
    add("--json", metavar="FILE", help="default: out/verification.json (out/random.json with --random); '' for none")
    add("--list", action="store_true", help="name the cases and run nothing")
    add("--cp", action="store_true", help="context parallelism instead: 2 to 4 processes, on a GPU each or by gloo")
    add = parser.add_argument_group("random calls").add_argument
    add("--random", type=int, metavar="N", help="draw and run the calls 0 to N - 1 instead of the cases")
    add("--family", action="append", default=[], choices=FAMILIES, help="may be repeated; default: all")
    add("--seed", type=int, default=0, metavar="S", help="of the drawing; default: %(default)s")
    add("--only", type=int, metavar="I", help="run the call I of a seed alone, in this process")
    add("--minutes", type=float, metavar="M", help="stop after M minutes, and say how many calls ran")
    add("--call", metavar="TEXT", help="run one call, as a failure prints it, in this process")
    options = parser.parse_args(argv)

    if options.random is not None and options.random < 1:
        parser.error(f"--random: must be 1 or more, but is {options.random}")
    for name in ("family", "only", "minutes"):
        if options.random is None and getattr(options, name) not in (None, []):
            parser.error(f"--{name}: needs --random")
    for name in ("strategy", "small", "large", "filter", "list"):
        if (options.random is not None or options.call is not None) and getattr(options, name):
            parser.error(f"--{name}: is for the cases, not for --random or --call")
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
    if options.dtype is None:
        options.dtype = list(DTYPES) if on_gpu else ["float16", "float32"]
    if "bfloat16" in options.dtype and not on_gpu and options.backend != ["reference"]:
        parser.error("--dtype bfloat16: Triton's interpreter computes it wrongly; on a CPU use --backend reference")
    if options.jobs is None:
        of_cpu = 1 if options.random is not None else 4
        options.jobs = min(16 if on_gpu else of_cpu, os.cpu_count() or 1)
    if options.cp and options.jobs:
        options.jobs = max(1, options.jobs // 4)  # each of them starts a process a rank
    if options.cp and on_gpu and torch.cuda.device_count() < 2:
        parser.error("--cp: needs two GPUs, or --device cpu")
    if options.json is None:
        options.json = "out/verification.json" if options.random is None else "out/random.json"
    return options


def make_checks(options: argparse.Namespace) -> list:
    """Return the cases that the options name, each in every dtype, those of attention with their variants."""
    if options.cp:
        from verification import context_parallel

        return context_parallel.make_checks(options)
    from verification.matrix import ATTENTION, CHECKS, in_dtype

    sizes = ("small",) if options.small or options.device == "cpu" else ("small", "large", "huge")
    sizes = ("large", "huge") if options.large else sizes
    strategies = options.strategy or STRATEGIES
    found = []
    for check in CHECKS:
        if check.size not in sizes or options.filter.lower() not in check.name.lower():
            continue
        for name in options.dtype:
            call = in_dtype(check, DTYPES[name])
            if check not in ATTENTION:
                # These have no strategies of attention.
                found += [call] if "triton" in options.backend and options.strategy is None else []
                continue
            # The reference materialises every score: beyond the small cases it is not a backend but the yardstick.
            variants = [("reference", "auto")] if "reference" in options.backend and check.size == "small" else []
            variants += [("triton", strategy) for strategy in strategies if "triton" in options.backend]
            if "hopper" in options.backend and "prepass" in strategies:
                variants += [("hopper", "auto")] if call.obstacle("sm_90", ("hopper", "auto")) is None else []
            if variants and (not check.only or DTYPES[name] in check.only):
                found.append(replace(call, variants=tuple(variants)))
    return found


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.device == "cpu":
        # Triton reads it when it is imported, in this process and in those that it starts.
        os.environ["TRITON_INTERPRET"] = "1"
    if options.random is not None or options.call is not None:
        from verification import search

        return search.run_call(options) if options.random is None or options.only is not None else search.run(options)
    return run_cases(options)


def run_cases(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from verification import report
    from verification.calls import Machine, dtype_name
    from verification.matrix import SIZES
    from verification.workers import run_checks

    checks = make_checks(options)
    names = [f"{check.name} {dtype_name(check.dtype)}" for check in checks]
    if options.list:
        print("\n".join(names))
        return 0
    if not checks:
        print(f"no case matches --filter {options.filter!r}", file=sys.stderr)
        return 2

    def outcomes():
        # Two large cases at a time, and huge ones alone, fit the memory of the card.
        for size, most in zip(SIZES, (options.jobs, min(options.jobs, 2), min(options.jobs, 1))):
            batches = [[(i, check)] for i, check in enumerate(checks) if check.size == size]
            if batches:
                yield from run_checks(batches, Machine.of(options.device), min(most, len(batches)))

    start, found = time.perf_counter(), {}
    with tqdm(outcomes(), total=len(checks), unit="case", file=sys.stderr, dynamic_ncols=True) as bar:
        for number, outcome in bar:
            found[number] = rows = report.rows_of(outcome)
            # At once, because a run that is stopped prints no table.
            if failed := sum(row.verdict == "FAIL" for row in rows):
                bar.write(f"{names[number]}: {failed} of {len(rows)} tensors not within tolerance", file=sys.stderr)
            bar.set_postfix_str(names[number][:50])
    seconds = time.perf_counter() - start

    rows = [row for number in range(len(checks)) for row in found[number]]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("ok", "FAIL", "SKIP")}
    environment = report.environment(options.device)
    print(f"{report.table(rows)}\n\n{report.LEGEND}\n\n{report.summary(rows)}\n")
    print(
        f"{counts['ok']} of {len(rows)} tensors within tolerance, {counts['FAIL']} not, {counts['SKIP']} skipped; "
        f"{len(checks)} cases in {seconds:.0f} s on {report.where(environment)}"
    )
    if options.json:
        report.write_json(Path(options.json), environment, seconds, rows)
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
