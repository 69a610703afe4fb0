"""``python -m bench``: measure, plot, tune, write README's figures; beside it ``bench rope``, ``bench masks``,
``bench decode``, ``bench models`` and ``bench corope``.

Exit status: 0 fine, 1 one of ours is red, 2 cannot run here (no GPU, wrong arguments), 3 the GPU was lost on the way.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench import cases, providers, readme, report
from bench.environment import ROOT, card, environment
from bench.runner import DeviceLost, Options, Run

RESULTS = ROOT / "bench" / "results"
_COMMANDS = """
further commands:
  python -m bench plot FILE... [--plot-dir DIR]    figures from result files
  python -m bench readme FILE... [--check]         README.md's tables from result files
  python -m bench models [--help]                  whole models of transformers, patched and not
  python -m bench rope [--help]                    the rotation alone: measure, plot, write README's figures of it
  python -m bench masks [--help]                   windows, packed sequences and what other masks cost
  python -m bench decode [--help]                  a step of generation with a cache; --tune sweeps its configurations
  python -m bench corope [--help]                  Co-RoPE beside its definition: measure, write README's figures of it
  python -m bench tune [--help]                    sweep tile configurations of the Triton kernels, propose table rows
"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plot"]:
        return plot(argv[1:])
    if argv[:1] == ["tune"]:
        from bench import tune

        return tune.main(argv[1:])
    if argv[:1] == ["readme"]:
        return readme.main(argv[1:])
    if argv[:1] == ["models"]:
        from bench import models

        return models.main(argv[1:])
    if argv[:1] == ["rope"]:
        from bench import rope

        return rope.main(argv[1:])
    if argv[:1] == ["masks"]:
        from bench import masks

        return masks.main(argv[1:])
    if argv[:1] == ["decode"]:
        from bench import decode

        return decode.main(argv[1:])
    if argv[:1] == ["corope"]:
        from bench import corope

        return corope.main(argv[1:])
    return run(argv[1:] if argv[:1] == ["run"] else argv)


def run(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    import torch

    try:
        group = args.group or ("all" if args.cases else "table")
        chosen = cases.select(_words(group), _words(args.cases), cases.DTYPES[args.dtype])
        rivals = providers.select(_words(args.providers))
        passes = tuple(part for part in ("fwd", "bwd", "both") if part in _words(args.passes))
        if not passes or set(_words(args.passes)) - set(passes):
            raise ValueError(f"--passes takes fwd, bwd and both, not {args.passes!r}")
        if args.baseline not in providers.PROVIDERS:
            raise ValueError(f"--baseline {args.baseline!r} is no provider; there are {', '.join(providers.PROVIDERS)}")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        print(_dry_run(chosen, rivals))
        return 0
    if not torch.cuda.is_available():
        print(
            "bench: no GPU here; times of the interpreter mean nothing. --dry-run lists what would run.",
            file=sys.stderr,
        )
        return 2

    from bench.timing import GpuClock

    facts = environment()
    out = args.out or RESULTS / f"{card(facts['gpu'])}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.jsonl"
    begin = time.monotonic()
    options = Options(
        passes=passes,
        mode=args.mode,
        rounds=args.rounds,
        round_ms=args.round_ms,
        baseline=args.baseline,
        strict=args.strict,
        host=not args.no_host,
        deadline=begin + args.time_budget if args.time_budget else float("inf"),
    )
    progress = Progress(begin)
    print(_heading(facts, out))
    print(_missing(rivals))
    device = torch.device("cuda", torch.cuda.current_device())
    measurement = Run(rivals, options, GpuClock(device), facts, progress)
    rows: list[report.Row] = []
    status = 0
    try:
        for block in measurement.rows(chosen):
            progress.clear()
            rows += block
            report.write_lines(out, block)
            print("\n" + report.case_report(block), flush=True)
    except DeviceLost as lost:
        progress.clear()
        print(f"\nbench: {lost}\nbench: the rows before this case are kept; leave that provider out with --providers.")
        status = 3
    progress.clear()
    print("\n" + report.summary(rows))
    if measurement.not_run:
        print(f"\nNot run, the time budget of {args.time_budget:g} s was spent: {', '.join(measurement.not_run)}")
    print(f"\n{len(rows)} rows in {_shown(out)} after {time.monotonic() - begin:.0f} s")
    if args.plot_dir != "none" and rows:
        _draw(rows, Path(args.plot_dir))
    return status or int(report.red(rows))


def plot(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench plot", description="Figures from result files.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON lines; the first file that has a case supplies it"
    )
    parser.add_argument("--plot-dir", type=Path, default=RESULTS / "plots", help="default: bench/results/plots")
    parser.add_argument("--mode", choices=("graph", "eager"), help="default: graph where there are such rows")
    args = parser.parse_args(argv)
    try:
        rows = readme.read_runs(args.files)
    except (OSError, ValueError) as error:
        print(f"bench plot: {error}", file=sys.stderr)
        return 2
    return 0 if _draw(rows, args.plot_dir, args.mode) else 2


def _draw(rows: list[report.Row], directory: Path, mode: str | None = None) -> bool:
    from bench import plots

    try:
        files = plots.draw_all(rows, directory, mode)
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return False
    for file in files:
        print(f"wrote {_shown(file)}")
    if not files:
        print("bench: no timed rows to draw", file=sys.stderr)
    return bool(files)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench",
        description="Time rope_attention and every rival on equal inputs; nobody is timed before float64 agrees.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--group", help=f"comma-separated: {', '.join(cases.GROUPS)} (default: table; all where --cases is given)"
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
    parser.add_argument("--providers", default="", help="names, or ours, rivals, bare (default: everybody)")
    parser.add_argument("--dtype", choices=tuple(cases.DTYPES), default="bf16")
    parser.add_argument("--passes", default="fwd,bwd", help="of fwd, bwd, both (default: fwd,bwd)")
    parser.add_argument(
        "--mode", choices=("eager", "graph", "both"), default="both", help="calls, CUDA graphs, or both"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=20.0, help="GPU time for each provider in each round")
    parser.add_argument("--baseline", default="hf_sdpa", help="provider whose per-round ratios every row also carries")
    parser.add_argument("--out", type=Path, help="JSON lines, appended (default: bench/results/GPU-DATE.jsonl)")
    parser.add_argument("--plot-dir", default=str(RESULTS / "plots"), help="or none (default: bench/results/plots)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="stop cleanly after so many seconds")
    parser.add_argument("--no-host", action="store_true", help="leave out the host time of tiny calls")
    parser.add_argument("--strict", action="store_true", help="hold rivals to the contract's tolerance too")
    parser.add_argument(
        "--dry-run", action="store_true", help="list cases, providers and what is missing; no GPU needed"
    )
    return parser


class Progress:
    """One line on stderr that says what runs; plain lines where that is no terminal."""

    def __init__(self, begin: float):
        self._begin = begin
        self._terminal = sys.stderr.isatty()

    def __call__(self, message: str) -> None:
        text = f"{time.monotonic() - self._begin:6.1f} s  {message}"
        print(
            f"\r\033[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _dry_run(chosen: list[cases.BenchCase], rivals: list[providers.Provider]) -> str:
    lines = [[case.name, case.shape, " ".join(case.groups), f"{case.flops('fwd') / 1e12:.3f}"] for case in chosen]
    people = [[p.name, p.label, ", ".join(p.pip) or "-", p.missing() or "here"] for p in rivals]
    return "\n\n".join(
        [
            report.table(["case", "shape", "groups", "TFLOP fwd"], lines, left=3),
            report.table(["provider", "label", "pip", "status"], people, left=4),
        ]
    )


def _missing(rivals: list[providers.Provider]) -> str:
    reasons = {provider.name: provider.missing() for provider in rivals}
    lines = [f"missing: {name}: {reason}" for name, reason in reasons.items() if reason]
    return "\n".join(lines) if lines else "every provider is here"


def _heading(facts: dict, out: Path) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, "
        f"cuDNN {facts['cudnn']}, {packages}\ncommit {facts['commit']}, {facts['date']}, rows go to {_shown(out)}"
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _shown(path: Path) -> str:
    """Relative to the repository where it lies inside."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
