"""Rows to text and to JSON lines, for every suite. Losses are printed like wins; whoever was not timed is named."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.timing import EVEN, ratio

Row = dict[str, Any]
# In words.
PASSES = {"fwd": "forward", "bwd": "backward"}
# The status of a row whose time counts.
TIMED = ("ok", "loose")


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a JSON-lines file and force them to the disk: a run that dies later has kept them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _finite(row: Row) -> Row:
    """JSON has no infinity: a failed gate's ratio becomes null, its detail says what happened."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def read_lines(paths: Iterable[Path]) -> list[Row]:
    """Rows of several files; where a measurement occurs twice, the later one stays."""
    latest: dict[tuple, Row] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                key = tuple(row[name] for name in ("case", "shape", "provider", "pass", "mode", "gpu"))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no result row: {error!r}") from None
            latest.pop(key, None)
            latest[key] = row
    return list(latest.values())


def read_runs(paths: Iterable[Path]) -> list[Row]:
    """Rows of several files, each case from one run: times of two runs are never compared.

    The first file that has a case supplies it; within a file the latest run of a case, pass and mode.
    """
    found: dict[tuple, list[Row]] = {}
    for path in paths:
        groups: dict[tuple, list[Row]] = {}
        for row in read_lines([path]):
            key = tuple(row[name] for name in ("case", "shape", "gpu", "pass", "mode"))
            groups.setdefault(key, []).append(row)
        rows_of: dict[tuple, list[Row]] = {}
        for key, group in groups.items():
            latest = max(row.get("date", "") for row in group)
            rows_of.setdefault(key[:3], []).extend(row for row in group if row.get("date", "") == latest)
        found = rows_of | found
    return [row for rows in found.values() for row in rows]


def timed(rows: Iterable[Row], part: str | None = None, mode: str | None = None) -> list[Row]:
    """Rows with a time that counts, of one pass and mode where given."""
    return [
        row
        for row in rows
        if row["status"] in TIMED and part in (None, row["pass"]) and mode in (None, row["mode"]) and "ms" in row
    ]


def table(header: list[str], lines: list[list[str]], left: int = 1) -> str:
    """Aligned columns, the first ``left`` of them to the left, a rule under the header."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def render(line: list[str]) -> str:
        cells = [text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([render(header), "  ".join("-" * w for w in widths), *map(render, lines)])


def milliseconds(value: float) -> str:
    """Four significant digits at most: 0.0133, 1.862, 69.14."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def speedup(value: float) -> str:
    """``1.08x``, and a loss as loud as a win."""
    return f"{value:.2f}x LOSS" if value < EVEN else f"{value:.2f}x"


def comparison(row: Row, mine: Row) -> list[str]:
    """Three cells: a rival's label, its time, and that time over ours."""
    mark = " ~" * (row["status"] == "loose")
    return [row["label"] + mark, milliseconds(row["ms"]), speedup(ratio(row["rounds"], mine["rounds"]))]


def not_timed(rows: Iterable[Row], with_case: bool = False) -> list[str]:
    """A line for each provider that has no time and each reason; ``with_case``: for each case and pass too."""
    lines = []
    for row in rows:
        if row["status"] not in TIMED:
            where = f"{row['case']}: " if with_case else ""
            part = f" {row['pass']}" if with_case and row["pass"] else ""
            lines.append(f"! {where}{row['label']}{part}: {row['status']}: {row['detail']}")
    return list(dict.fromkeys(lines))


def red(rows: Iterable[Row]) -> bool:
    """True when one of ours failed its gate or did not run where it should have."""
    return any(row["ours"] and row["status"] in ("failed", "error", "oom") for row in rows)
