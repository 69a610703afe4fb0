"""``python -m bench results``: the committed rows, one CSV file for each suite and card.

    python -m bench results RUN.jsonl ... --to attention-h200

adds the timed rows of runs to ``bench/results/attention-h200.csv``. Rows of the same case, pass and mode leave it,
because times of two runs are not compared. A cell is text, or JSON where it is a number, a list or true; an empty one
is a field that its row lacks.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from bench.command import refuse
from bench.environment import RESULTS
from bench.report import Row, place, read_file, timed

# No table shows these fields: the run's own file has them.
_LEFT_OUT = {"bench", "groups", "detail", "calls", "environment", "cuda"}


def read(name: str) -> list[Row]:
    """Return the committed rows of a suite on a card, by the name of their file without ``.csv``."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [{key: _value(text) for key, text in row.items() if text} for row in csv.DictReader(file)]


def write(name: str, rows: list[Row]) -> Path:
    """Write the file of a suite on a card. ValueError where the rows are of no GPU or of two."""
    cards = sorted({row["gpu"] for row in rows})
    if len(cards) != 1:
        raise ValueError(f"{name} must hold rows of one GPU, but holds those of {', '.join(cards) or 'none'}")
    path = RESULTS / f"{name}.csv"
    fields = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in _LEFT_OUT]
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        out.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return path


def main(argv: list[str]) -> int:
    """Add rows of runs to a committed file. Exit status: 0 it is written, 2 it cannot be."""
    parser = argparse.ArgumentParser("python -m bench results", description="Add rows of runs to a committed file.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    parser.add_argument("--to", required=True, metavar="SUITE-CARD")
    args = parser.parse_args(argv)
    try:
        rows = read(args.to) if (RESULTS / f"{args.to}.csv").exists() else []
        for run in args.runs:
            new = timed(read_file(run))
            taken = {place(row) for row in new}
            rows = [row for row in rows if place(row) not in taken] + new
        print(f"wrote {write(args.to, rows)}")
    except (OSError, ValueError, KeyError) as error:
        return refuse("results", f"{type(error).__name__}: {error}")
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value if _value(value) == value else json.dumps(value)
    return json.dumps(_short(value), ensure_ascii=False)


def _short(value: Any) -> Any:
    """Return numbers with five significant digits, which is more than a clock gives."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return [_short(each) for each in value] if isinstance(value, list) else value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
