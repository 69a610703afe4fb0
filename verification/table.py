"""Aligned text tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def format_table(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """One header line, one rule, one line a row; numbers are right-aligned, floats get three significant digits."""
    rows = [[row.get(column, "") for column in columns] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], (int, float)) for row in rows if row[i] != "")
        for i in range(len(columns))
    ]
    cells = [list(columns), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric)
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
