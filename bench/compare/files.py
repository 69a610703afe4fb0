"""Rows of any suite as measurements that two files can have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.report import TIMED, Row, read_runs
from bench.timing import quantile

# Figure -> the field with its value in every round; a figure without rounds is compared as it is. Less is better.
FIGURES: dict[str, str | None] = {"ms": "rounds", "mj": "mj_rounds", "peak_mib": None}
# Whose rows are ours where an older file does not say so.
_OURS = "fused"
# The two checkouts of a row of ``tools.compare_checkouts``: both are ours, and the first may be the same in two files.
_CHECKOUTS = ("before", "after")


class Key(NamedTuple):
    """What identifies a measurement; a field that a suite does not have is ""."""

    case: str
    shape: str
    dtype: str
    provider: str
    part: str
    mode: str
    figure: str


@dataclass(frozen=True)
class Measured:
    """One figure of one row. ``rounds`` is empty where the row has none; ``spread`` is (p20, p80) of all samples."""

    value: float
    rounds: tuple[float, ...] = ()
    spread: tuple[float, float] | None = None
    ours: bool = False


@dataclass(frozen=True)
class File:
    """``measured``: what has a figure; ``failed``: status and detail of what has none; ``ours``: the providers whose
    code may differ between two files."""

    path: Path
    measured: dict[Key, Measured]
    failed: dict[Key, str]
    ours: frozenset[str]
    facts: dict[str, str]


def read(path: Path) -> File:
    """The latest run of every case in a file. OSError or ValueError where it is no file of rows of one GPU."""
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    cards = sorted({str(row["gpu"]) for row in rows})
    if len(cards) > 1:
        raise ValueError(f"{path} must hold rows of one GPU, but holds those of {', '.join(cards)}")
    measured = {key: found for row in rows for key, found in _measured(row)}
    failed = {
        _key(row, "ms"): f"{row['status']}: {row['detail']}" if row.get("detail") else row["status"]
        for row in rows
        if row["status"] not in TIMED
    }
    ours = frozenset(row["provider"] for row in rows if row["ours"]) - {_CHECKOUTS[0]}
    return File(path, measured, failed, ours, _facts(rows))


def _rows(path: Path) -> list[Row]:
    """Rows as suites write them; those of ``tools.compare_checkouts`` are brought into that form."""
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "{}")
    try:
        of_checkouts = "part" in json.loads(first) and "environment" in json.loads(first)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no result rows: {error}") from None
    if not of_checkouts:
        rows = [row for row in read_runs([path]) if "status" in row]
        return [{"ours": row["provider"] == _OURS} | row for row in rows]
    latest = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        for row in _checkout_rows(json.loads(line)) if line.strip() else ():
            latest[row["case"], row["pass"], row["mode"], row["provider"]] = row
    return list(latest.values())


def _checkout_rows(row: Row) -> Iterator[Row]:
    """Two rows, of the checkout before and of this one. Microseconds become milliseconds."""
    part, _, host = row["part"].partition(", ")
    unit = {"ms": 1.0, "us": 1e-3}[row["unit"]]
    for provider in _CHECKOUTS:
        found = {"case": row["case"], "shape": "", "provider": provider, "pass": part, "mode": host or "graph"}
        found |= {"ours": True, **row["environment"]}
        if "error" in row:
            yield found | {"status": "failed", "detail": row["error"]}
        else:
            rounds = [unit * value for value in row[provider]]
            yield found | {"status": "ok", "rounds": rounds, "ms": quantile(rounds, 0.5)}


def _key(row: Row, figure: str) -> Key:
    fields = (row.get(name) or "" for name in ("case", "shape", "dtype", "provider", "pass", "mode"))
    return Key(*map(str, fields), figure)


def _measured(row: Row) -> Iterator[tuple[Key, Measured]]:
    if row["status"] not in TIMED:
        return
    for figure, rounds in FIGURES.items():
        if row.get(figure):
            spread = (row["p20"], row["p80"]) if figure == "ms" and "p20" in row else None
            values = tuple(row.get(rounds) or ()) if rounds else ()
            yield _key(row, figure), Measured(row[figure], values, spread, row["ours"])


def _facts(rows: Iterable[Row]) -> dict[str, str]:
    """What the rows say of the machine, every value that occurs."""
    found: dict[str, set[str]] = {}
    for row in rows:
        facts = {name: row.get(name) for name in ("gpu", "driver", "torch", "triton", "cudnn", "commit")}
        for name, value in {**facts, "date": str(row.get("date", ""))[:10], **(row.get("packages") or {})}.items():
            if value:
                found.setdefault(name, set()).add(str(value))
    return {name: " and ".join(sorted(values)) for name, values in found.items()}
