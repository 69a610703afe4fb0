"""Rows of a step of generation to text: a line for each case and mode, losses printed like wins."""

from __future__ import annotations

from bench.report import Row, comparison, milliseconds, not_timed, table, timed
from bench.suites.generation.providers import COPY, OURS, RAW, READ
from bench.tables import markdown, provenance
from bench.timing import EVEN, ratio


def summary(rows: list[Row]) -> str:
    """A line for each case and mode, then whoever was not timed, with the reason.

    The strongest rival also rotates and writes; what only attends is beside it. "read": the share of a copy's bandwidth
    that a plain read of as many bytes reaches.
    """
    header, lines, losses = _lines(rows)
    blocks = [table(header, lines, left=3)] if lines else ["nothing was timed"]
    stored = _stored_lines(rows)
    blocks += [table(*stored, left=3)] if stored[1] else []
    blocks.append(f"{len(lines)} lines, slower than the strongest rival in {losses}")
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows))])])


def results(rows: list[Row]) -> str:
    """The generated table of the documents, of CUDA graphs. ValueError without a time of ours."""
    header, lines, _ = _lines([row for row in rows if row["mode"] == "graph"])
    if not lines:
        raise ValueError("no CUDA-graph times of bench decode with our own among them")
    note = (
        "Times are of CUDA graphs, L2 flushed by reading. of copy: the share of the bandwidth of a copy of as many "
        "bytes; raw: that with keys that are rotated in the loop; read: that of a plain read. The strongest rival also "
        "rotates and writes the new token; speedup: its time over ours, below 1 a loss."
    )
    header, *lines = [line[:2] + line[3:] for line in (header, *lines)]  # all are of the same mode
    return f"{markdown(header, lines)}\n\n{note} {provenance(rows, 'cuDNN', 'flash-attn-4')}"


def stored(rows: list[Row]) -> str:
    """The generated table of caches in pages and in float8, of CUDA graphs. ValueError without any."""
    header, lines = _stored_lines([row for row in rows if row["mode"] == "graph"])
    if not lines:
        raise ValueError("no CUDA-graph times of bench decode in pages or float8, with contiguous ones among them")
    header, *lines = [line[:2] + line[3:] for line in (header, *lines)]
    note = (
        "Times over that of our step onto the contiguous bfloat16 cache. Pools lie in memory as (pages, rows, heads, "
        "columns), in random order; pageN: pages of N rows. gather_sdpa: pages of 16 gathered into a contiguous cache, "
        "rotation, write and SDPA. mixed64-64K: 64 sequences of 64K / i tokens, the last of 1."
    )
    return f"{markdown(header, lines)}\n\n{note} {provenance(rows, 'cuDNN')}"


def _stored_lines(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): our step on caches in pages and in float8, as time over that on contiguous ones."""
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in timed(rows):
        groups.setdefault((row["case"], row["shape"], row["mode"]), {})[row["provider"]] = row
    names = dict.fromkeys(row["provider"] for row in rows if row.get("stored"))
    lines = []
    for key, group in groups.items():
        if OURS in group and any(name in group for name in names):
            mine = group[OURS]
            shown = [f"{ratio(group[n]['rounds'], mine['rounds']):.3f}" if n in group else "-" for n in names]
            lines.append([*key, milliseconds(mine["ms"]), *shown])
    return ["case", "shape", "mode", "contiguous ms", *(name.removeprefix(f"{OURS}_") for name in names)], lines


def _lines(rows: list[Row]) -> tuple[list[str], list[list[str]], int]:
    """(header, a line for each case and mode that has a time of ours, in how many the strongest rival is faster)."""
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in timed(rows):
        groups.setdefault((row["case"], row["shape"], row["mode"]), {})[row["provider"]] = row
    lines, losses = [], 0
    for key, group in groups.items():
        mine, raw = group.get(OURS), group.get(RAW)
        if mine is None:
            continue
        shown = (mine, raw, group.get(READ))
        share = [f"{100 * row['of_copy']:.0f}%" if row and row.get("of_copy") else "-" for row in shown]
        line = [*key, milliseconds(mine["ms"]), f"{mine['gb_s']:.0f}", *share]
        for bare in (False, True):
            others = [row for name, row in group.items() if name not in (COPY, READ) and not row.get("stored")]
            rivals = [row for row in others if not row["ours"] and row["bare"] == bare]
            rival = min(rivals, key=lambda row: row["ms"], default=None)
            if rival is None:
                line += [""] * 3
                continue
            losses += not bare and ratio(rival["rounds"], mine["rounds"]) < EVEN
            line += comparison(rival, mine)
        lines.append(line)
    header = ["case", "shape", "mode", "ours ms", "GB/s", "of copy", "raw", "read", "strongest rival", "ms", "speedup"]
    header += ["attention alone", "ms", "speedup"]
    if not any(line[-1] for line in lines):
        header, lines = header[:-3], [line[:-3] for line in lines]
    return header, lines, losses
