"""Rows: their format, their files, and their text for the terminal and for the documents.

A row is one JSON line with these fields:

- ``bench``, ``case``, ``shape``, ``groups``, and what the suite says of the case;
- ``provider``, ``label``, ``role`` ("ours", "rival", "bare" or "ceiling", see ``suite.Provider``);
- ``pass`` and ``mode``, None where a provider was stopped before them;
- ``status``: "ok", "loose" (timed, but outside the tolerance of ours), "failed", "missing", "unsupported", "error",
  "oom", "no-graph"; ``detail``: the reason;
- ``ms`` (median of all calls), ``p20``, ``p80``, ``rounds`` (the median of each round), ``calls``;
- figures: ``tflops``, ``gb_s``, ``mj``, ``tokens_s``, ``peak_mib`` and others;
- machine and versions, see ``environment``.

Losses are printed like wins, and providers without a time are named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.timing import EVEN, ratio
from verification.table import format_table

Row = dict[str, Any]
Group = dict[str, Row]  # by provider
PASSES = {"fwd": "forward", "bwd": "backward"}
MODES = {"graph": "CUDA graphs", "eager": "eager calls", "host": "host time of eager calls", "load": "under load"}
# The status of a row with a time that counts.
TIMED = ("ok", "loose")
# Columns in the text of a case, by field. A column without a value is left out.
_FIGURES = {"ms": "ms", "p20": "p20", "p80": "p80", "tflops": "TFLOP/s", "gb_s": "GB/s", "of_copy": "of copy"}
_FIGURES |= {"tokens_s": "tokens/s", "efficiency": "of ideal", "mj": "mJ", "peak_mib": "MiB"}


# Files


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a JSON-lines file, which is closed each time, so that a run that dies later has kept them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_file(path: Path) -> list[Row]:
    """Return the rows of a run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Selection


def place(row: Row) -> tuple[str, str, str, str]:
    """Return (case, shape, pass, mode): rows of one place are compared."""
    return row["case"], row["shape"], row["pass"], row["mode"]


def timed(rows: Iterable[Row], part: str | None = None, mode: str | None = None) -> list[Row]:
    """Return the rows with a time that counts, of one pass and mode where given."""
    return [
        row
        for row in rows
        if row["status"] in TIMED and part in (None, row["pass"]) and mode in (None, row["mode"]) and "ms" in row
    ]


def groups(rows: Iterable[Row], mode: str | None = None) -> dict[tuple[str, str, str, str], Group]:
    """Return (case, shape, pass, mode) -> provider -> its timed row."""
    found: dict[tuple[str, str, str, str], Group] = {}
    for row in timed(rows, mode=mode):
        found.setdefault(place(row), {})[row["provider"]] = row
    return found


def strongest(rows: Iterable[Row], role: str = "rival") -> Row | None:
    """Return the fastest row of a role, of caches in pages or float8 none."""
    rivals = [row for row in rows if row["role"] == role and not row.get("stored")]
    return min(rivals, key=lambda row: row["ms"], default=None)


def ours(rows: Iterable[Row]) -> Row | None:
    """Return what a user gets: ``fused`` where it was measured, else the first row of ours."""
    mine = [row for row in rows if row["role"] == "ours"]
    return next((row for row in mine if row["provider"] == "fused"), mine[0] if mine else None)


def faster(row: Row, mine: Row, rounds: str = "rounds") -> float:
    """Return their time over ours, the median over rounds; with ``mj_rounds`` their energy."""
    return ratio(row[rounds], mine[rounds])


# Text for the terminal


def case_report(rows: list[Row]) -> str:
    """Return everything about one case: a table for each mode, then who was not timed and why."""
    blocks = [f"{rows[0]['case']}   {rows[0]['shape']}"]
    for mode, words in MODES.items():
        lines: list[dict[str, Any]] = []
        for (_, _, part, _), group in groups(rows, mode).items():
            mine = ours(group.values())
            for row in group.values():
                found = {header: row[name] for name, header in _FIGURES.items() if row.get(name) is not None}
                figures = {header: x if x < 100 else round(x) for header, x in found.items()}
                lines.append({words: row["label"] + mark(row), "pass": part} | figures)
                if mine is not None and row is not mine:
                    value = faster(row, mine)
                    loss = " LOSS" * (value < EVEN and row["role"] in ("rival", "bare"))
                    lines[-1]["/ ours"] = f"{value:.2f}x{loss}"
        if lines:
            blocks.append(format_table(list(dict.fromkeys(name for line in lines for name in line)), lines))
    notes = []
    for row in rows:
        where = " ".join(filter(None, (row["pass"], row["mode"])))
        if row["status"] == "loose":
            notes.append(f"~ {row['label']}: outside the contract's tolerance: {row['detail']}")
        elif row["status"] not in TIMED:
            status = "FAILED the gate" if row["status"] == "failed" else row["status"]
            notes.append(f"! {row['label']}{f' ({where})' if where else ''}: {status}: {row['detail']}")
    return "\n\n".join(filter(None, [*blocks, "\n".join(dict.fromkeys(notes))]))


# Markdown for the documents


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """Return a table with its first column to the left. ValueError where there is nothing to show."""
    if not lines:
        raise ValueError(f"the rows hold no times for the table with the columns {', '.join(header)}")
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def three_digits(value: float) -> str:
    """Return three significant digits: 0.0133, 0.440, 16.4, 114."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def mark(*rows: Row) -> str:
    """Return " ~" where one of the rows is outside the tolerance that ours is held to."""
    return " ~" * any(row["status"] == "loose" for row in rows)


def card_name(gpu: str) -> str:
    """Return the short name of a card: H100 of "NVIDIA H100 80GB HBM3"."""
    return gpu.replace("NVIDIA ", "").split()[0]
