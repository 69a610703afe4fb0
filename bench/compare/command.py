"""The command line of ``python -m bench compare``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from bench.command import refuse
from bench.compare.files import FIGURES, File, Key, read
from bench.compare.moves import CERTAIN, Comparison, Move, compare
from bench.environment import shown
from bench.names import words
from bench.report import table

_UNITS = {"ms": "ms", "mj": "mJ", "peak_mib": "MiB"}


def main(argv: list[str]) -> int:
    """Exit status: 0 nothing of ours got worse, 1 something did or is not measured any more, 2 cannot compare."""
    args = _parser().parse_args(argv)
    try:
        if not 0 <= args.threshold < 1:
            raise ValueError(f"--threshold must be at least 0 and below 1, as 0.02 for 2 %, not {args.threshold:g}")
        figures = words(args.figures)
        if not figures or set(figures) - set(FIGURES):
            raise ValueError(f"--figures takes {', '.join(FIGURES)}, not {args.figures!r}")
        a, b = read(args.a), read(args.b)
        found = _chosen(compare(a, b, figures, args.yardstick), args)
    except (OSError, ValueError) as error:
        return refuse("compare", str(error))
    print("\n\n".join(filter(None, _blocks(a, b, found, args))))
    worse = [move for move in found.moves if move.ours and move.verdict(args.threshold) == "worse"]
    return int(bool(worse) or any(key.provider in a.ours for key in found.lost))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench compare",
        description="Say what moved between two files of rows of the same suite, and by how much more than noise. Rows "
        "are matched by case, shape, dtype, provider, pass and mode. The noise is that of the rounds within each file, "
        "and what the rivals, whose code is the same in both, moved by from one file to the other.",
        epilog="Exit status: 0 nothing of ours got worse, 1 something did or is not measured any more, 2 the files "
        "cannot be compared.",
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="JSON lines: the rows before")
    add("b", type=Path, metavar="B", help="JSON lines: the rows after")
    text = "divide by this provider of both files, round by round: for two machines, or two clocks of one"
    add("--yardstick", metavar="NAME", help=text)
    text = "the least share that counts as moved, however small the noise (default: %(default)s, which is 2 %%)"
    add("--threshold", type=float, default=0.02, metavar="SHARE", help=text)
    add("--figures", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)} (default: all that both have)")
    add("--cases", default="", metavar="TEXT", help="only cases whose name contains one of these")
    add("--providers", default="", metavar="NAMES", help="only these; the others still tell the noise")
    add("--passes", default="", metavar="NAMES", help="only these passes")
    add("--modes", default="", metavar="NAMES", help="only these modes")
    add("--all", action="store_true", help="also print what did not move")
    return parser


def _chosen(found: Comparison, args: argparse.Namespace) -> Comparison:
    """What --cases, --providers, --passes and --modes leave. What they leave out has told the noise with the rest.

    ValueError where they leave nothing.
    """
    cases = [word.lower() for word in words(args.cases)]
    chosen = {"provider": words(args.providers), "part": words(args.passes), "mode": words(args.modes)}

    def wanted(key: Key) -> bool:
        if cases and not any(word in key.case.lower() for word in cases):
            return False
        return all(not names or getattr(key, field) in names for field, names in chosen.items())

    moves = [move for move in found.moves if wanted(move.key)]
    if not moves:
        keys = [move.key for move in found.moves]
        known = {field: ", ".join(dict.fromkeys(getattr(key, field) for key in keys)) for field in chosen}
        raise ValueError(
            "--cases, --providers, --passes and --modes leave nothing that both files have; there are the providers "
            f"{known['provider']}, the passes {known['part']} and the modes {known['mode']}"
        )
    return Comparison(
        moves,
        *([key for key in keys if wanted(key)] for keys in (found.only_a, found.only_b)),
        *({key: why for key, why in failures.items() if wanted(key)} for failures in (found.lost, found.won)),
        [key for key in found.without_yardstick if wanted(key)],
        [(part, mode) for part, mode in found.blind if any(move.key[4:6] == (part, mode) for move in moves)],
    )


def _blocks(a: File, b: File, found: Comparison, args: argparse.Namespace) -> Iterable[str]:
    yield _heading(a, b, args.yardstick)
    moved = [move for move in found.moves if move.verdict(args.threshold)]
    yield _table(found.moves if args.all else moved, args.threshold)
    yield _counts(found.moves, args)
    yield _blindness(found.blind)
    yield _by_provider(found.moves)
    yield _listed(f"Measured in A ({shown(a.path)}) alone", found.only_a)
    yield _listed(f"Measured in B ({shown(b.path)}) alone", found.only_b)
    yield _failures("Measured in A, not in B", found.lost)
    yield _failures("Measured in B, not in A", found.won)
    yield _listed(f"Left out, without {args.yardstick} in both", found.without_yardstick)


def _heading(a: File, b: File, yardstick: str | None) -> str:
    """Which files, and what differs between their machines and versions."""
    lines = [f"A: {shown(a.path)}", f"B: {shown(b.path)}"]
    for name in dict.fromkeys((*a.facts, *b.facts)):
        one, other = a.facts.get(name, "none"), b.facts.get(name, "none")
        lines.append(f"{name}: {one}" if one == other else f"{name}: {one} in A, {other} in B")
    if yardstick:
        lines.append(f"B / A is of figures over those of {yardstick}")
    return "\n".join(lines)


def _table(moves: list[Move], threshold: float) -> str:
    """A line for each, the worst first."""
    lines = []
    for move in moves:
        key, unit = move.key, _UNITS[move.key.figure]
        times = "-" if math.isinf(move.times_noise) else f"{move.times_noise:.1f}"
        line = [key.case, key.provider + (" (ours)" if move.ours else ""), key.part, key.mode]
        line += [f"{move.a:.4g} {unit}", f"{move.b:.4g} {unit}", f"{move.ratio:.3f}"]
        lines.append([*line, f"{100 * move.noise:.1f}%", times, move.verdict(threshold)])
    header = ["case", "provider", "pass", "mode", "A", "B", "B / A", "noise", "times noise", ""]
    return table(header, lines, left=4) if lines else ""


def _counts(moves: list[Move], args: argparse.Namespace) -> str:
    def count(ours: bool) -> str:
        verdicts = [move.verdict(args.threshold) for move in moves if move.ours == ours]
        worse, better = verdicts.count("worse"), verdicts.count("better")
        return f"{worse} worse, {better} better, {len(verdicts) - worse - better} unmoved"

    return (
        f"Ours: {count(True)}. Others: {count(False)}. Moved is what differs by more than {args.threshold:.1%} and by "
        f"more than {CERTAIN:g} times its noise."
    )


def _blindness(blind: list[tuple[str, str]]) -> str:
    if not blind:
        return ""
    where = ", ".join(" ".join(filter(None, what)) for what in blind)
    return f"Too few rivals say what is noise from one run to the next; it is that of the rounds alone at {where}."


def _by_provider(moves: list[Move]) -> str:
    """The mean ratio of every provider, by figure, pass and mode; memory that is the same everywhere is left out."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for move in moves:
        key = move.key
        groups.setdefault((key.provider, key.part, key.mode, _UNITS[key.figure]), []).append(move.ratio)
    lines = [
        [*group, str(len(found)), *(f"{value:.3f}" for value in (_mean(found), min(found), max(found)))]
        for group, found in groups.items()
        if group[-1] != _UNITS["peak_mib"] or min(found) != max(found)
    ]
    header = ["provider", "pass", "mode", "of", "rows", "mean B / A", "least", "most"]
    return table(header, sorted(lines), left=4) if lines else ""


def _mean(ratios: list[float]) -> float:
    """The geometric mean: that of the ratios and of their inverses agree."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _listed(title: str, keys: list[Key]) -> str:
    """A line for each pass and mode with all providers that have the same cases, and those cases."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for key in keys:
        cases.setdefault((key.part, key.mode, key.provider), []).append(key.case)
    providers: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (part, mode, provider), found in cases.items():
        providers.setdefault((part, mode, tuple(dict.fromkeys(found))), []).append(provider)
    lines = [
        f"  {part} {mode} of {', '.join(names)}: {', '.join(found)}" for (part, mode, found), names in providers.items()
    ]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _failures(title: str, failed: dict[Key, str]) -> str:
    lines = [f"  {key.case} {key.provider} {key.part} {key.mode}: {why}" for key, why in failed.items()]
    return "\n".join([f"{title}:", *lines]) if lines else ""
