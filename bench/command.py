"""The command line that every suite shares: options, the run, the file of rows, and plots from such files.

Exit status: 0 fine, 1 one of ours failed its gate or did not run, 2 cannot run here (no GPU, wrong arguments), 3 the
GPU was lost on the way.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from bench import report
from bench.environment import RESULTS, card, environment, shown
from bench.names import words
from bench.runner import DeviceLost, Options, Run
from bench.suite import Row, Suite

PLOTS = RESULTS / "plots"


def main(suite: type[Suite], argv: list[str]) -> int:
    """One suite's command: measure, or with ``plot`` first, draw its rows."""
    if suite.draws and argv[:1] == ["plot"]:
        return plot(suite, argv[1:])
    return measure(suite, argv)


def measure(suite: type[Suite], argv: list[str]) -> int:
    """Choose, time, print, and append the rows to a file."""
    args = _parser(suite).parse_args(argv)
    try:
        chosen, cases = suite.configure(args)
        passes = _passes(suite, args)
    except ValueError as error:
        return refuse(suite.command, str(error))
    if args.dry_run:
        print(chosen.listing(cases))
        return 0
    if not torch.cuda.is_available():
        reason = "no GPU here; times of the interpreter mean nothing. --dry-run lists what would run."
        return refuse(suite.command, reason)

    try:
        clock = suite.clock(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return refuse(suite.command, str(error))
    begin, facts = time.monotonic(), environment()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    out = args.out or RESULTS / f"{_file_prefix(suite)}{card(facts['gpu'])}-{stamp}.jsonl"
    deadline = begin + args.time_budget if args.time_budget else float("inf")
    mode = getattr(args, "mode", suite.mode)
    modes = suite.modes if mode == "both" else (mode,)
    options = Options(passes, modes, args.rounds, _round_ms(suite, args), suite.mirrored, deadline)
    progress = Progress(begin)
    print(_heading(facts, out))
    run = Run(chosen, options, clock, facts, progress)
    rows: list[Row] = []
    status = 0
    try:
        for block in run.rows(cases):
            progress.clear()
            rows += block
            report.write_lines(out, block)
            if text := chosen.case_report(block):
                print("\n" + text, flush=True)
    except DeviceLost as lost:
        progress.clear()
        print(f"\nbench: {lost}\nbench: the rows before this case are kept; leave that provider out with --providers.")
        status = 3
    progress.clear()
    print("\n" + chosen.summary(rows))
    if run.not_run:
        print(f"\nNot run, for lack of time or memory: {'; '.join(run.not_run)}")
    print(f"\n{len(rows)} rows in {shown(out)} after {time.monotonic() - begin:.0f} s")
    if suite.draws and args.plot_dir != "none" and rows:
        _draw(suite, rows, Path(args.plot_dir))
    return status or int(report.red(rows))


def plot(suite: type[Suite], argv: list[str]) -> int:
    """Figures from result files."""
    prog = " ".join(filter(None, ("python -m bench", suite.command, "plot")))
    parser = argparse.ArgumentParser(prog, description="Figures from result files.")
    files = "JSON lines; the first file that has a case supplies it"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("--plot-dir", type=Path, default=PLOTS, help="default: bench/results/plots")
    parser.add_argument("--mode", choices=("graph", "eager"), help="default: graph where there are such rows")
    args = parser.parse_args(argv)
    try:
        rows = report.read_runs(args.files)
    except (OSError, ValueError) as error:
        return refuse(f"{suite.command} plot".strip(), str(error))
    return 0 if _draw(suite, rows, args.plot_dir, args.mode) else 2


def refuse(command: str, reason: str) -> int:
    """Say why a command cannot run, and return its exit status."""
    print(f"bench {command}: {reason}" if command else f"bench: {reason}", file=sys.stderr)
    return 2


class Progress:
    """One line on stderr that says what runs; plain lines where that is no terminal."""

    def __init__(self, begin: float):
        self._begin = begin
        self._terminal = sys.stderr.isatty()

    def __call__(self, message: str) -> None:
        text = f"{time.monotonic() - self._begin:6.1f} s  {message}"
        text, end = (f"\r\033[K{text}", "") if self._terminal else (text, "\n")
        print(text, end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _parser(suite: type[Suite]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m bench {suite.command}".strip(),
        description=suite.description,
        epilog=suite.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    suite.add_arguments(parser)
    if suite.all_passes:
        text = f"of {', '.join(suite.all_passes)} (default: %(default)s)"
        add("--passes", default=",".join(suite.passes), help=text)
    if len(suite.modes) > 1:
        add("--mode", choices=("eager", "graph", "both"), default=suite.mode, help="calls, CUDA graphs, or both")
    add("--rounds", type=int, default=suite.rounds)
    if suite.round_option:
        name, unit = suite.round_option
        text = "how long each provider runs in each round (default: %(default)s)"
        add(name, dest="round_length", metavar="T", type=float, default=suite.round_ms / unit, help=text)
    name = f"bench/results/{_file_prefix(suite)}GPU-DATE.jsonl"
    add("--out", type=Path, help=f"JSON lines, appended (default: {name})")
    add("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    if suite.draws:
        add("--plot-dir", default=str(PLOTS), help="or none (default: bench/results/plots)")
    add("--dry-run", action="store_true", help="list what would run, and what is missing; no GPU needed")
    return parser


def _file_prefix(suite: type[Suite]) -> str:
    """What files of rows begin with: ``rope-``, ``decode-tune-``, nothing for attention."""
    return f"{suite.command.replace(' --', '-')}-" if suite.command else ""


def _round_ms(suite: type[Suite], args: argparse.Namespace) -> float:
    return args.round_length * suite.round_option[1] if suite.round_option else suite.round_ms


def _passes(suite: type[Suite], args: argparse.Namespace) -> tuple[str, ...]:
    """The chosen passes in the suite's order. ValueError for an unknown one, or none."""
    if not suite.all_passes:
        return suite.passes
    asked = words(args.passes)
    if not asked or set(asked) - set(suite.all_passes):
        raise ValueError(f"--passes takes {', '.join(suite.all_passes)}, not {args.passes!r}")
    return tuple(part for part in suite.all_passes if part in asked)


def _draw(suite: type[Suite], rows: list[Row], directory: Path, mode: str | None = None) -> bool:
    try:
        files = suite.draw(rows, directory, mode)
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return False
    for file in files:
        print(f"wrote {shown(file)}")
    if not files:
        print("bench: no timed rows to draw", file=sys.stderr)
    return bool(files)


def _heading(facts: Row, out: Path) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, "
        f"cuDNN {facts['cudnn']}, {packages}\ncommit {facts['commit']}, {facts['date']}, rows go to {shown(out)}"
    )
