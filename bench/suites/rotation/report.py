"""Rows of the rotation to text: a line for each problem, losses printed like wins."""

from __future__ import annotations

from bench.report import Row, comparison, milliseconds, not_timed, table, timed
from bench.suites.rotation.providers import COPY, OURS
from bench.timing import EVEN, ratio


def groups(rows: list[Row], mode: str | None = None) -> dict[tuple[str, str, str, str], dict[str, Row]]:
    """(case, shape, pass, mode) -> provider -> its timed row."""
    found: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in timed(rows, mode=mode):
        found.setdefault((row["case"], row["shape"], row["pass"], row["mode"]), {})[row["provider"]] = row
    return found


def speedup(group: dict[str, Row], name: str) -> float | None:
    """Their time over ours, median over rounds."""
    return ratio(group[name]["rounds"], group[OURS]["rounds"]) if name in group and OURS in group else None


def strongest(group: dict[str, Row]) -> Row | None:
    """The fastest that rotates and is not ours."""
    rivals = [row for name, row in group.items() if name not in (OURS, COPY)]
    return min(rivals, key=lambda row: row["ms"], default=None)


def summary(rows: list[Row]) -> str:
    """A line for each problem, pass and mode, then whoever was not timed, with the reason."""
    lines, losses = [], 0
    for (case, shape, part, mode), group in groups(rows).items():
        mine, rival = group.get(OURS), strongest(group)
        if mine is None:
            continue
        line = [case, shape, part, mode, milliseconds(mine["ms"]), f"{mine['gb_s']:.0f}", _percent(mine)]
        if rival is not None:
            losses += speedup(group, rival["provider"]) < EVEN
            line += comparison(rival, mine)
        lines.append(line + [""] * (10 - len(line)))
    header = ["case", "shape", "pass", "mode", "ours ms", "GB/s", "of copy", "strongest rival", "ms", "speedup"]
    blocks = [table(header, lines, left=4)] if lines else ["nothing was timed"]
    blocks.append(f"{len(lines)} lines, slower than the strongest rival in {losses}")
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows))])])


def _percent(row: Row) -> str:
    return f"{100 * row['of_copy']:.0f}%" if row.get("of_copy") else "-"
