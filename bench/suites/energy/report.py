"""Rows of energy to text: every provider of a case beside ours, losses printed like wins."""

from __future__ import annotations

from bench.attention.standing import ours, strongest
from bench.report import PASSES, Row, milliseconds, not_timed, speedup, table, timed
from bench.tables import markdown, provenance
from bench.timing import EVEN, ratio

_HEADER = ["", "pass", "ms", "mJ", "mJ of the rounds", "W", "MHz", "their ms / ours", "their mJ / ours"]


def millijoules(value: float) -> str:
    """Four significant digits: 3.217, 113.4, 2443."""
    return f"{value:#.4g}".rstrip(".")


def case_report(rows: list[Row]) -> str:
    """A line for each provider and pass of one case, then who was not measured and why."""
    first = rows[0]
    lines = []
    for part in PASSES:
        group = timed(rows, part)
        mine = ours(group, "mj")
        for row in sorted(group, key=lambda row: row["mj"]):
            spread = f"{millijoules(min(row['mj_rounds']))}-{millijoules(max(row['mj_rounds']))}"
            line = [row["label"] + " ~" * (row["status"] == "loose"), part, milliseconds(row["ms"])]
            line += [millijoules(row["mj"]), spread, f"{row['watts']:.0f}", f"{row['mhz']:.0f}"]
            if mine is None or row is mine:
                line += ["", ""]
            else:
                line += [speedup(value) for value in against(row, mine)]
            lines.append(line)
    limit = first.get("limit_watts")
    head = f"{first['case']}   {first['shape']}" + (f"   (power limit {limit:.0f} W)" if limit else "")
    blocks = [head, *([table(_HEADER, lines)] if lines else []), "\n".join(not_timed(rows))]
    return "\n".join(filter(None, blocks))


def against(row: Row, mine: Row) -> tuple[float, float]:
    """Of a rival's row (its time over ours, its energy over ours), medians over rounds."""
    return ratio(row["rounds"], mine["rounds"]), ratio(row["mj_rounds"], mine["mj_rounds"])


def summary(rows: list[Row]) -> str:
    """A line for each case and pass: ours, the rival with the least energy that rotates, and that of those which do
    not."""
    lines, less, more = [], 0, 0
    for case in dict.fromkeys(row["case"] for row in rows):
        for part in PASSES:
            group = [row for row in timed(rows, part) if row["case"] == case]
            mine = ours(group, "mj")
            if mine is None:
                continue
            line = [case, part, milliseconds(mine["ms"]), millijoules(mine["mj"]), f"{mine['watts']:.0f}"]
            for rotates in (True, False):
                other = strongest(group, rotates=rotates, figure="mj")
                if other is None:
                    line += ["-", "", ""]
                    continue
                value = against(other, mine)[1]
                if rotates:
                    less, more = less + (value >= EVEN), more + (value < EVEN)
                line += [other["label"] + " ~" * (other["status"] == "loose"), millijoules(other["mj"]), speedup(value)]
            lines.append(line)
    if not lines:
        return "nothing was measured"
    header = ["case", "pass", "ours ms", "mJ", "W", "least energy with rotation", "mJ", "theirs / ours"]
    header += ["least energy without", "mJ", "theirs / ours"]
    count = f"Energy against the best rival that rotates: {less} not more, {more} more"
    return f"{count}\n\n{table(header, lines, left=2)}"


def results(rows: list[Row]) -> str:
    """The generated table of the documents: ours in ms and mJ, every rival's time and energy over it. ValueError
    without a measurement of ours."""
    measured = timed(rows)
    rivals = {row["provider"]: row["label"] for row in measured if not row["ours"]}
    lines = []
    for case in dict.fromkeys(row["case"] for row in measured):
        for part, words in PASSES.items():
            group = [row for row in timed(measured, part) if row["case"] == case]
            mine = ours(group, "mj")
            if mine is None:
                continue
            found = {row["provider"]: row for row in group}
            cells = [f"{milliseconds(mine['ms'])} ms, {millijoules(mine['mj'])} mJ, {mine['watts']:.0f} W"]
            for name in rivals:
                row = found.get(name)
                pair = "" if row is None else " / ".join(f"{value:.2f}" for value in against(row, mine)) + "×"
                cells.append(pair + " ~" * (row is not None and row["status"] == "loose"))
            lines.append([f"{case}, {words}", *cells])
    if not lines:
        raise ValueError("no energy of rope_attention")
    loose = " ~: outside the tolerance that ours is held to." * any(row["status"] == "loose" for row in measured)
    note = f"Rivals: time / energy over ours, below 1 ours takes more.{loose}"
    packages = ("cuDNN", "liger-kernel", "fa3-fwd", "flash-attn-4")
    return f"{markdown(['', '`rope_attention`', *rivals.values()], lines)}\n\n{note} {provenance(rows, *packages)}"
