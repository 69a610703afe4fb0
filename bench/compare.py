"""``python -m bench compare A B``: what moved between two files of rows of one suite, and what is noise.

Two files are two processes, often on two days or on two cards. The code of the rivals is the same in both. So the range
of their ratios, B over A, says by how much a ratio differs without a change of the code.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from bench.command import refuse
from bench.environment import shown
from bench.report import TIMED, Row, not_timed, provenance, read_file, table
from bench.timing import quantile

# Figure -> the field with its value in every round. Less is better.
FIGURES = {"ms": "rounds", "mj": "mj_rounds", "peak_mib": ""}
_LEAST = 0.02  # a smaller change never counts: memory, and files without rivals, show no noise at all


class Move(NamedTuple):
    """A figure in both files. low, high: the range of ratios that noise explains."""

    key: tuple[str, ...]  # case, shape, provider, pass, mode, figure
    ours: bool
    a: float
    b: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.b / self.a

    @property
    def verdict(self) -> str:
        return "worse" if self.ratio > self.high else "better" if self.ratio < self.low else ""


def identity(row: Row) -> tuple[str, str, str, str, str]:
    return row["case"], row["shape"], row["provider"], row["pass"], row["mode"]


def figures(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    """Return the timed rows, each once for every figure that it has."""
    timed = [row for row in rows if row["status"] in TIMED]
    return {(*identity(row), name): row for row in timed for name in FIGURES if row.get(name)}


def spread(row: Row, figure: str) -> float:
    """Return half the distance from the 20th to the 80th percentile of the rounds, as a share of the figure."""
    rounds = row.get(FIGURES[figure]) or [row[figure]]
    return (quantile(rounds, 0.8) - quantile(rounds, 0.2)) / (2 * row[figure])


def moves(a: list[Row], b: list[Row]) -> list[Move]:
    """Match two files, and return what got worse first. ValueError where nothing matches.

    Noise is the range of the ratios of rivals of the same pass, mode and figure, without a tenth of them at each end,
    widened by the spread of the rounds in both files.
    """
    before, after = figures(a), figures(b)
    ratios = {key: after[key][key[-1]] / row[key[-1]] for key, row in before.items() if key in after}
    if not ratios:
        raise ValueError("the two files have no measurement in common")
    rivals: dict[tuple[str, ...], list[float]] = {}
    for key in (key for key in ratios if before[key]["role"] != "ours"):
        rivals.setdefault(key[3:], []).append(ratios[key])
    found = []
    for key in ratios:
        a_row, b_row, figure = before[key], after[key], key[-1]
        own = 1 + max(_LEAST, spread(a_row, figure) + spread(b_row, figure))
        low, high = (quantile(rivals.get(key[3:], [1.0]), share) for share in (0.1, 0.9))
        found.append(Move(key, a_row["role"] == "ours", a_row[figure], b_row[figure], low / own, high * own))
    return sorted(found, key=lambda move: -move.ratio)


def stopped(a: list[Row], b: list[Row]) -> list[Row]:
    """Return the rows of B that say why something has no time which has one in A."""
    before = figures(a)
    timed = {key[:5] for key in before} | {(*key[:3], None, None) for key in before}  # None: stopped by the gate
    return [row for row in b if row["status"] not in TIMED and identity(row) in timed]


def main(argv: list[str]) -> int:
    """Compare. Exit status: 0 nothing of ours got worse, 1 something did or has no time now, 2 cannot compare."""
    parser = argparse.ArgumentParser("python -m bench compare", description=__doc__.split("\n\n")[1])
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE", help="JSON lines: A, the rows before, and B")
    parser.add_argument("--all", action="store_true", help="also print what did not move")
    args = parser.parse_args(argv)
    try:
        a, b = map(read_file, args.files)
        every = moves(a, b)
    except (OSError, ValueError) as error:
        return refuse("compare", str(error))
    lines = []
    for move in (move for move in every if args.all or move.verdict):
        at = list(move.key)
        at[2] += " (ours)" * move.ours
        noise = f"{move.low:.3f} to {move.high:.3f}"
        lines.append([*at, f"{move.a:.4g}", f"{move.b:.4g}", f"{move.ratio:.3f}", noise, move.verdict])
    header = ["case", "shape", "provider", "pass", "mode", "figure", "A", "B", "B / A", "noise", ""]
    without = stopped(a, b)
    print("\n".join(f"{shown(path)}: {provenance(rows)}" for path, rows in zip(args.files, (a, b))), end="\n\n")
    print(table(header, lines, left=6) if lines else "Nothing moved by more than noise.")
    print(*not_timed(row | {"label": f"{row['case']}: {row['label']}"} for row in without), sep="\n")
    worse = [move for move in every if move.ours and move.verdict == "worse"]
    return int(bool(worse) or any(row["role"] == "ours" for row in without))
