"""``python -m bench compare A B``: what moved between two files of rows, and by how much more than noise.

Two files are two processes, often on two days. The rounds of one file say how a median varies within a process. They do
not say how it varies from one process to the next, with other addresses, another temperature and another card. The rows
of rivals say that, because their code is the same in both files. Both kinds of noise count: a ratio has moved where it
is further from 1 than both together explain.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.command import refuse
from bench.environment import shown
from bench.names import words
from bench.report import TIMED, Row, provenance, read_runs, table
from bench.timing import quantile

# Figure -> its unit, and the field with its value in every round; without rounds it has no noise. Less is better.
FIGURES: dict[str, tuple[str, str]] = {"ms": ("ms", "rounds"), "mj": ("mJ", "mj_rounds"), "peak_mib": ("MiB", "")}
# A ratio further from 1 than so many times its noise has moved. Medians of few rounds have long tails.
CERTAIN = 3.0
# Fewer rivals than this say nothing about the noise between two processes.
_ENOUGH = 4
# For the normal distribution: the standard error of a median over that of a mean, and the standard deviation over the
# median distance from the centre.
_OF_MEDIAN, _OF_MAD = 1.2533, 1.4826


class Key(NamedTuple):
    """The identity of a measurement; a field that a suite does not have is ""."""

    case: str
    shape: str
    dtype: str
    provider: str
    part: str
    mode: str
    figure: str


File = dict[Key, Row]  # a row once for each of its figures; one without a time at the figure "ms"


class Move(NamedTuple):
    """One figure in both files. ratio: B over A, above 1 it got worse. noise: a standard deviation of its logarithm."""

    key: Key
    ours: bool
    a: float
    b: float
    ratio: float
    noise: float

    @property
    def times_noise(self) -> float:
        """Return the distance from 1 in standard deviations; infinite where there is no noise."""
        distance = abs(math.log(self.ratio))
        return distance / self.noise if self.noise else math.inf if distance else 0.0

    def verdict(self, threshold: float) -> str:
        """Return "worse" or "better" where it moved by more than ``threshold`` (0.02 is 2 %) and noise, else ""."""
        if abs(math.log(self.ratio)) <= math.log1p(threshold) or self.times_noise <= CERTAIN:
            return ""
        return "worse" if self.ratio > 1 else "better"


def read(path: Path) -> File:
    """Read the latest run of every case in a file. OSError or ValueError where it is no file of rows of one GPU."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        of_checkouts = bool(lines) and {"part", "environment"} <= set(json.loads(lines[0]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no result rows: {error}") from None
    if of_checkouts:
        rows = [row for line in lines for row in _of_checkouts(json.loads(line))]
    else:
        rows = [row for row in read_runs([path]) if "status" in row]
    cards = sorted({str(row["gpu"]) for row in rows})
    if len(cards) != 1:
        raise ValueError(
            f"{path} must hold rows of one GPU, but holds those of {', '.join(cards) or 'no GPU: no rows'}"
        )
    found = {}
    for row in rows:
        of = [str(row.get(name) or "") for name in ("case", "shape", "dtype", "provider", "pass", "mode")]
        found |= {Key(*of, name): row for name in FIGURES if name == "ms" or _has(row, name)}
    return found


def _has(row: Row | None, figure: str) -> bool:
    return row is not None and row["status"] in TIMED and bool(row.get(figure))


def _of_checkouts(row: Row) -> Iterator[Row]:
    """Yield two rows of ours from one of ``tools.compare_checkouts``. Microseconds become milliseconds."""
    part, _, host = row["part"].partition(", ")
    unit = {"ms": 1.0, "us": 1e-3}[row["unit"]]
    for provider in ("before", "after"):
        found = {"case": row["case"], "provider": provider, "role": "ours", "pass": part, "mode": host or "graph"}
        rounds = [unit * value for value in row.get(provider, ())]
        timed = {"status": "ok", "rounds": rounds, "ms": quantile(rounds, 0.5)} if rounds else {}
        yield row["environment"] | found | (timed or {"status": "failed", "detail": row["error"]})


def _rounds(row: Row, figure: str) -> list[float]:
    return row.get(FIGURES[figure][1]) or []


def within_noise(rounds: list[float]) -> float:
    """Return the standard error of the logarithm of a median, from the rounds of one process; 0 without several."""
    logs = [math.log(value) for value in rounds]
    return _OF_MEDIAN * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def moves(a: File, b: File, yardstick: str | None = None) -> list[Move]:
    """Match two files; return the worst move first.

    yardstick: divide times and energies by those of this provider, round by round, so that a drift that both share
    cancels; leave out cases without it in both files. ValueError where it is one of ours or not in both files, or where
    nothing matches.
    """
    both = [key for key, row in a.items() if _has(row, key.figure) and _has(b.get(key), key.figure)]
    if not both:
        raise ValueError("the two files have no measurement in common")
    mine = {key.provider for key in (*a, *b) if (a.get(key) or b[key])["role"] == "ours"}
    shared = sorted({key.provider for key in both} - mine)
    if yardstick is not None and yardstick not in shared:
        what = "is ours" if yardstick in mine else "is not timed in both files"
        raise ValueError(
            f"--yardstick must be a provider of both files that is not ours, but {yardstick} {what}; there are: "
            f"{', '.join(shared) or 'none'}"
        )
    found: dict[Key, tuple[float, float]] = {}  # (ratio, noise of the rounds)
    rivals: dict[tuple[str, ...], list[float]] = {}  # distances from 1 of all ratios of a pass, mode and figure
    for key in both:
        values, noises = [], []
        by = key._replace(provider=yardstick) if yardstick and FIGURES[key.figure][1] else None
        if by is not None and (by == key or not _has(a.get(by), key.figure) or not _has(b.get(by), key.figure)):
            continue
        for file in (a, b):
            value, rounds = file[key][key.figure], _rounds(file[key], key.figure)
            if by is not None:
                rounds = [x / y for x, y in zip(rounds, _rounds(file[by], key.figure))]
                value = quantile(rounds, 0.5) if rounds else value / file[by][key.figure]
            values.append(value)
            noises.append(within_noise(rounds))
        found[key] = values[1] / values[0], math.hypot(*noises)
        if a[key]["role"] != "ours" and FIGURES[key.figure][1]:
            rivals.setdefault(key[4:], []).append(abs(math.log(found[key][0])))
    between = {of: _OF_MAD * quantile(far, 0.5) for of, far in rivals.items() if len(far) >= _ENOUGH}
    made = [
        Move(
            key,
            key.provider in mine,
            a[key][key.figure],
            b[key][key.figure],
            ratio,
            math.hypot(noise, between.get(key[4:], 0)),
        )
        for key, (ratio, noise) in found.items()
    ]
    return sorted(made, key=lambda move: -move.ratio)


def lost(file: File, other: File) -> dict[Key, str]:
    """Return what only ``file`` has timed, with the reason that ``other`` gives, "" where it says nothing."""
    found = {}
    for key, row in file.items():
        if key.figure == "ms" and _has(row, "ms") and not _has(other.get(key), "ms"):
            # A failure may be of all passes or all modes.
            places = (key._replace(part=part, mode=mode) for part in (key.part, "") for mode in (key.mode, ""))
            why = next((other[place] for place in places if place in other), None)
            found[key] = "" if why is None else ": ".join(filter(None, (why["status"], why.get("detail"))))
    return found


# The command


def main(argv: list[str]) -> int:
    """Compare. Exit status: 0 nothing of ours got worse, 1 something did or fails now, 2 cannot compare."""
    args = _parser().parse_args(argv)
    try:
        if not 0 <= args.threshold < 1:
            raise ValueError(f"--threshold must be at least 0 and below 1, as 0.02 for 2 %, not {args.threshold:g}")
        a, b = read(args.a), read(args.b)
        every = moves(a, b, args.yardstick)
    except (OSError, ValueError) as error:
        return refuse("compare", str(error))

    def wanted(key: Key) -> bool:
        # Rows that are left out have told the noise with the rest.
        only = words(args.only)
        return not only or any(all(part in key for part in word.split("+")) for word in only)

    chosen = [move for move in every if wanted(move.key)]
    if not chosen:
        names = dict.fromkeys(part for move in every for part in move.key if part)
        return refuse("compare", f"--only {args.only} leaves nothing; it takes {', '.join(names)}")
    moved = [move for move in chosen if move.verdict(args.threshold)]
    blocks = []
    for name, path, rows in (("A", args.a, list(a.values())), ("B", args.b, list(b.values()))):
        packages = dict.fromkeys(name for row in rows for name in row.get("packages") or ())
        blocks.append(f"{name}: {shown(path)}: {provenance(rows, 'cuDNN', *packages)}")
    if args.yardstick:
        blocks.append(f"B / A is of figures over those of {args.yardstick}")
    blocks += [_table(chosen if args.all else moved, args.threshold), _counts(chosen, args.threshold)]
    gone, won = ({key: why for key, why in keys.items() if wanted(key)} for keys in (lost(a, b), lost(b, a)))
    blocks += [_listed("Measured in A, not in B", gone), _listed("Measured in B, not in A", won)]
    print("\n\n".join(filter(None, blocks)))
    failed = any(why and a[key]["role"] == "ours" for key, why in gone.items())
    return int(failed or any(move.ours and move.ratio > 1 for move in moved))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench compare",
        description="Say what moved between two files of rows of the same suite, and by how much more than noise. Rows "
        "are matched by case, shape, dtype, provider, pass and mode. The noise is that of the rounds within each file, "
        f"and where there are {_ENOUGH} rivals what they moved by, because their code is the same in both.",
        epilog="Exit status: 0 nothing of ours got worse, 1 something did or fails now, 2 cannot compare.",
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="JSON lines: the rows before")
    add("b", type=Path, metavar="B", help="JSON lines: the rows after")
    text = "divide by this provider of both files, round by round: for two machines, or two clocks of one"
    add("--yardstick", metavar="NAME", help=text)
    text = "the least share that counts as moved, however small the noise (default: %(default)s, which is 2 %%)"
    add("--threshold", type=float, default=0.02, metavar="SHARE", help=text)
    text = "only these cases, providers, passes, modes or figures; A+B: both. The others still tell the noise"
    add("--only", default="", metavar="WORDS", help=text)
    add("--all", action="store_true", help="also print what did not move")
    return parser


def _table(found: list[Move], threshold: float) -> str:
    """Show a line for each move."""
    lines = []
    for move in found:
        key, unit = move.key, FIGURES[move.key.figure][0]
        line = [key.case, key.provider + (" (ours)" if move.ours else ""), key.part, key.mode]
        line += [f"{move.a:.4g} {unit}", f"{move.b:.4g} {unit}", f"{move.ratio:.3f}", f"{100 * move.noise:.1f}%"]
        times = "-" if math.isinf(move.times_noise) else f"{move.times_noise:.1f}"
        lines.append([*line, times, move.verdict(threshold)])
    header = ["case", "provider", "pass", "mode", "A", "B", "B / A", "noise", "times noise", ""]
    return table(header, lines, left=4) if lines else ""


def _counts(found: list[Move], threshold: float) -> str:
    counts = (Counter(move.verdict(threshold) for move in found if move.ours == mine) for mine in (True, False))
    ours, others = (f"{n['worse']} worse, {n['better']} better, {n['']} unmoved" for n in counts)
    return (
        f"Ours: {ours}. Others: {others}. Moved is what differs by more than {threshold:.1%} and by more than "
        f"{CERTAIN:g} times its noise."
    )


def _listed(title: str, keys: dict[Key, str]) -> str:
    """Show a line for each provider, pass, mode and reason, with the cases."""
    cases: dict[str, list[str]] = {}
    for key, why in keys.items():
        cases.setdefault(f"{key.provider} {key.part} {key.mode}{f' ({why})' if why else ''}", []).append(key.case)
    lines = [f"  {what}: {', '.join(found)}" for what, found in cases.items()]
    return "\n".join([f"{title}:", *lines]) if lines else ""
