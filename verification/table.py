"""Aligned text tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def format_table(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """One header line, one rule, one line a row; numbers are right-aligned, floats get three significant digits."""
    rows, aligned = list(rows), []
    for column in columns:
        values = [row.get(column, "") for row in rows]
        cells = [column, *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)]
        width = max(map(len, cells))
        cells.insert(1, "-" * width)
        is_numeric = bool(rows) and all(isinstance(value, (int, float)) for value in values if value != "")
        aligned.append([cell.rjust(width) if is_numeric else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned))
