"""The command line of ``python -m bench cp``: begins a process for each GPU, prints the table, draws the plot."""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

from bench import report
from bench.command import PLOTS, refuse
from bench.environment import environment
from bench.names import words
from bench.report import Row
from bench.suites.context_parallel import plots, ranks
from bench.suites.context_parallel.cases import KINDS, Work
from bench.suites.context_parallel.providers import DEFAULT, PROVIDERS

LENGTHS = ("32K", "128K", "256K", "1M")
# A causal sequence of 1M tokens takes one GPU a minute for both passes.
_LONGEST_PLAIN = 1 << 18


def main(argv: list[str]) -> int:
    """Exit status: 0 fine, 1 one of ours did not run, 2 cannot run here."""
    if argv[:1] == ["plot"]:
        return _plot(argv[1:])
    args = _parser().parse_args(argv)
    works = [
        Work(kind, _length(length))
        for kind in words(args.kinds)
        for length in words(args.lengths)
        if kind != "plain" or _length(length) <= _LONGEST_PLAIN or args.slow
    ]
    if args.cases:
        works = [work for work in works if work.name in words(args.cases)]
    sizes = [int(size) for size in words(args.ranks)]
    if args.dry_run:
        print("\n".join(f"{work.name} on {size} GPUs" for size in sizes for work in works))
        return 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < max(sizes):
        return refuse("cp", f"{max(sizes)} GPUs are asked for, and here are {count}")
    names = words(args.providers)
    rows: list[Row] = []
    facts = environment()
    start = time.monotonic()
    for size in sizes:
        begin = time.monotonic()
        for row in _run(size, works, names, args, args.seconds - (begin - start)):
            rows.append({**row, **facts})
        print(f"{size} GPUs: {time.monotonic() - begin:.0f} s", flush=True)
    if args.out is not None:
        report.write_lines(args.out, rows)
    print(table(rows))
    if args.plot is not None:
        print("\n".join(str(path) for path in plots.draw(rows, args.plot)))
    return 1 if any(row["status"] != "ok" and row["provider"].startswith("fused") for row in rows) else 0


def _run(size: int, works: list[Work], names: list[str], args: argparse.Namespace, seconds: float) -> list[Row]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.touch()
        options = {
            "rows": str(path), "rounds": args.rounds, "passes": words(args.passes), "seconds": seconds,
        }  # fmt: skip
        try:
            mp.spawn(ranks.serve, args=(size, port, works, names, options), nprocs=size)
        except Exception as error:  # what was measured before it is kept
            print(f"! {size} GPUs: {type(error).__name__}: {error}")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _length(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text.rstrip("kKmM")) * factor


def table(rows: list[Row]) -> str:
    """A line for each case, pass and provider."""
    lines = []
    for row in rows:
        figures = ["-", "-", "-"]
        if "ms" in row:
            efficiency = row.get("efficiency")
            shown = "-" if efficiency is None else f"{100 * efficiency:.1f} %"
            figures = [report.milliseconds(row["ms"]), shown, f"{row['mib']:.0f}"]
        lines.append([row["case"], row["shape"], report.PASSES[row["pass"]], row["label"], *figures])
    header = ["case", "ranks", "pass", "who", "ms", "of one GPU / P", "MiB"]
    return "\n".join([report.table(header, lines, left=4), *report.not_timed(rows, with_case=True)])


def _plot(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench cp plot", description="The figure of files of rows.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines of python -m bench cp")
    parser.add_argument("--plot-dir", type=Path, default=PLOTS, help="default: bench/results/plots")
    args = parser.parse_args(argv)
    try:
        files = plots.draw(report.read_runs(args.files), args.plot_dir)
    except (OSError, ValueError) as error:
        return refuse("cp plot", str(error))
    if not files:
        return refuse("cp plot", "no row has a share of one GPU's time")
    print("\n".join(f"wrote {file}" for file in files))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench cp",
        description="Causal attention of one sequence over several GPUs, forward and backward.",
        epilog="further: python -m bench cp plot FILE...",
    )
    add = parser.add_argument
    add("--ranks", default="4,2,1", help="numbers of GPUs, in this order; default %(default)s")
    add(
        "--lengths",
        default=",".join(LENGTHS),
        help="in this order; default %(default)s; plain ones of 1M only with --slow",
    )
    add("--kinds", default=",".join(KINDS), help="default %(default)s")
    add("--cases", default="", help="of these lengths and kinds only those of these names, as plain-32K; default all")
    add("--providers", default=",".join(DEFAULT), help=f"of {', '.join(PROVIDERS)}; default %(default)s")
    add("--passes", default="fwd,bwd")
    add("--rounds", type=int, default=3, help="interleaved rounds; default %(default)s")
    add("--seconds", type=float, default=900.0, help="begin nothing after so long; default %(default)s")
    add("--slow", action="store_true", help="plain sequences of 1M tokens, too")
    add("--out", type=Path, help="append the rows to this file")
    add("--plot", type=Path, metavar="FOLDER", help="draw the efficiency over the length there")
    add("--dry-run", action="store_true", help="name the cases and run nothing")
    return parser
