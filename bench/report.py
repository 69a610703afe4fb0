"""Rows to text and to JSON lines. Losses are printed like wins; whoever was not timed is named with the reason."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.timing import ratio

Row = dict[str, Any]
_PASSES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
_MODES = {"eager": "eager calls", "graph": "CUDA graph", "host": "host time"}
_TIMED = ("ok", "loose")


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


def timed(rows: Iterable[Row], part: str | None = None, mode: str | None = None) -> list[Row]:
    """Rows with a time that counts, of one pass and mode where given."""
    return [
        row
        for row in rows
        if row["status"] in _TIMED and part in (None, row["pass"]) and mode in (None, row["mode"]) and "ms" in row
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
    return f"{value:.2f}x LOSS" if value < 0.995 else f"{value:.2f}x"


def strongest(rows: list[Row], *, rotates: bool) -> Row | None:
    """The fastest rival among rows of one case, pass and mode."""
    rivals = [row for row in rows if not row["ours"] and row["rotates"] == rotates]
    return min(rivals, key=lambda row: row["ms"], default=None)


def ours(rows: list[Row]) -> Row | None:
    """What a user gets: ``fused`` where it was measured, else the fastest of ours."""
    mine = [row for row in rows if row["ours"]]
    chosen = [row for row in mine if row["provider"] == "fused"]
    return chosen[0] if chosen else min(mine, key=lambda row: row["ms"], default=None)


def case_report(rows: list[Row]) -> str:
    """Everything about one case: a block for each mode, then who was not timed and why."""
    first = rows[0]
    lines = [f"{first['case']}   {first['shape']}"]
    modes = [mode for mode in _MODES if timed(rows, mode=mode)]
    for mode in modes:
        lines += ["", _mode_block(rows, mode)]
    lines += _notes(rows)
    return "\n".join(lines)


def _mode_block(rows: list[Row], mode: str) -> str:
    parts = [part for part in _PASSES if timed(rows, part, mode)]
    with_memory = any(row.get("peak_mib") is not None for row in timed(rows, mode=mode))
    providers = list(dict.fromkeys(row["provider"] for row in timed(rows, mode=mode)))
    header = [_MODES[mode]]
    for part in parts:
        header += [f"{part} ms", "p20-p80", *(["TFLOP/s"] if mode != "host" else []), ""]
        header += ["MiB"] if with_memory else []
    lines = []
    for provider in providers:
        found = [row for row in timed(rows, mode=mode) if row["provider"] == provider]
        loose = any(row["status"] == "loose" for row in found)
        line = [found[0]["label"] + (" ~" if loose else "")]
        for part in parts:
            group = timed(rows, part, mode)
            row = next((row for row in found if row["pass"] == part), None)
            if row is None:
                line += [""] * (3 + (mode != "host") + with_memory)
                continue
            mark = (
                "*" if row is strongest(group, rotates=True) else "°" if row is strongest(group, rotates=False) else ""
            )
            line += [milliseconds(row["ms"]), f"{milliseconds(row['p20'])}-{milliseconds(row['p80'])}"]
            line += [f"{row['tflops']:.0f}"] if mode != "host" else []
            line += [mark]
            memory = row.get("peak_mib")
            line += ["" if memory is None else f"{memory:.0f}"] if with_memory else []
        lines.append(line)
    comparisons = [f"  {text}" for part in parts for text in [_comparison(timed(rows, part, mode), part)] if text]
    return "\n".join([table(header, lines), *comparisons])


def _comparison(rows: list[Row], part: str) -> str:
    mine = ours(rows)
    if mine is None:
        return ""
    against = [
        (role, strongest(rows, rotates=rotates))
        for role, rotates in (("strongest rival *", True), ("fastest bare °", False))
    ]
    words = [
        f"{speedup(ratio(other['rounds'], mine['rounds']))} against the {role} ({other['label']})"
        for role, other in against
        if other is not None
    ]
    return f"{mine['label']}, {_PASSES[part]}: {', '.join(words)}" if words else ""


def _notes(rows: list[Row]) -> list[str]:
    """Everybody who has no time, or one with a reservation, once for each reason."""
    lines = []
    loose = {row["label"]: row for row in rows if row["status"] == "loose"}
    for label, row in loose.items():
        lines.append(
            f"~ {label}: outside the contract's tolerance: worst row {row['gate_row_ratio'] / 2.5:.2f} times what is"
            f" allowed, rms error {row['gate_rms_ratio']:.2f} times eager's"
        )
    seen = set()
    for row in rows:
        if row["status"] in _TIMED:
            continue
        where = " ".join(filter(None, (row["pass"], row["mode"])))
        key = (row["label"], row["status"], row["detail"], where)
        if key not in seen:
            seen.add(key)
            status = "FAILED the gate" if row["status"] == "failed" else row["status"]
            lines.append(f"! {row['label']}{f' ({where})' if where else ''}: {status}: {row['detail']}")
    return ["", *lines] if lines else []


def summary(rows: list[Row]) -> str:
    """One line for each case, pass and mode: ours, the strongest rival that rotates, the fastest that does not."""
    blocks = []
    for mode in ("graph", "eager"):
        lines, wins, losses = [], 0, 0
        for case in dict.fromkeys((row["case"], row["shape"]) for row in rows):
            for part in _PASSES:
                group = [r for r in timed(rows, part, mode) if (r["case"], r["shape"]) == case]
                mine = ours(group)
                if mine is None:
                    continue
                line = [case[0], part, milliseconds(mine["ms"]), f"{mine['tflops']:.0f}"]
                for rotates in (True, False):
                    other = strongest(group, rotates=rotates)
                    if other is None:
                        line += ["-", "", ""]
                        continue
                    value = ratio(other["rounds"], mine["rounds"])
                    if rotates:
                        wins, losses = wins + (value >= 0.995), losses + (value < 0.995)
                    line += [other["label"], milliseconds(other["ms"]), speedup(value)]
                lines.append(line)
        if lines:
            header = [
                "case",
                "pass",
                "ours ms",
                "TFLOP/s",
                "strongest rival",
                "ms",
                "speedup",
                "fastest bare",
                "ms",
                "speedup",
            ]
            count = f"against the strongest rival: {wins} not slower, {losses} slower"
            blocks.append(f"{_MODES[mode][0].upper()}{_MODES[mode][1:]}: {count}\n\n{table(header, lines, left=2)}")
    unmeasured = dict.fromkeys(
        f"{row['case']}: {row['label']}: {row['status']}: {row['detail']}"
        for row in rows
        if row["ours"] and row["status"] not in _TIMED
    )
    if unmeasured:
        blocks.append("Ours, not measured:\n" + "\n".join(f"  {line}" for line in unmeasured))
    return "\n\n".join(blocks) if blocks else "nothing was timed"


def red(rows: Iterable[Row]) -> bool:
    """True when one of ours failed its gate or did not run where it should have."""
    return any(row["ours"] and row["status"] in ("failed", "error", "oom") for row in rows)
