"""Rows of attention to text: one case with everybody in it, and a summary of all cases."""

from __future__ import annotations

from bench.attention.standing import ours, strongest
from bench.report import PASSES, TIMED, Row, comparison, milliseconds, speedup, table, timed
from bench.timing import EVEN, ratio

_PASSES = PASSES | {"both": "forward + backward"}
_MODES = {"eager": "eager calls", "graph": "CUDA graph", "host": "host time"}


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
        if row["status"] in TIMED:
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
                    if rotates:
                        value = ratio(other["rounds"], mine["rounds"])
                        wins, losses = wins + (value >= EVEN), losses + (value < EVEN)
                    line += comparison(other, mine)
                lines.append(line)
        if lines:
            header = ["case", "pass", "ours ms", "TFLOP/s", "strongest rival", "ms", "speedup"]
            header += ["fastest bare", "ms", "speedup"]
            count = f"against the strongest rival: {wins} not slower, {losses} slower"
            blocks.append(f"{_MODES[mode][0].upper()}{_MODES[mode][1:]}: {count}\n\n{table(header, lines, left=2)}")
    unmeasured = dict.fromkeys(
        f"{row['case']}: {row['label']}: {row['status']}: {row['detail']}"
        for row in rows
        if row["ours"] and row["status"] not in TIMED
    )
    if unmeasured:
        blocks.append("Ours, not measured:\n" + "\n".join(f"  {line}" for line in unmeasured))
    return "\n\n".join(blocks) if blocks else "nothing was timed"
