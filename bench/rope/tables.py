"""The generated block of the documents about the rotation, and its plots."""

from __future__ import annotations

from typing import Any

from bench import plots
from bench.plots import Series
from bench.report import PASSES, Group, Row, faster, groups, markdown, provenance
from bench.rope.providers import COPY, OURS, PROVIDERS
from bench.timing import EVEN

# A tensor of half of these bytes is larger than the L2 of any card in the configuration table.
_PAST_L2 = 256 << 20


def results(rows: list[Row]) -> str:
    """Show summary, table and notes. ValueError without CUDA-graph times of ours and of the copy, on one card."""
    every = {key: group for key, group in groups(rows, "graph").items() if OURS in group}
    found, normed = (
        {key: group for key, group in every.items() if bool(group[OURS].get("norms")) is norms}
        for norms in (False, True)
    )
    gpus = {row["gpu"] for group in every.values() for row in group.values()}
    if len(gpus) != 1 or any(COPY not in group for group in every.values()):
        raise ValueError("rows must hold CUDA-graph times of apply_rope and of the copy, on one card")
    loose = any(row["status"] == "loose" for group in every.values() for row in group.values())
    notes = (
        "Forward / backward. ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs, L2 flushed. "
        + ("~: outside the tolerance that ours is held to. " if loose else "")
        + provenance(rows, "transformers", "liger-kernel", "flash-attn")
    )
    blocks = [_block(found)] if found else []
    if normed:
        blocks.append(f"`apply_rope_qk` with norms of q and k:\n\n{_block(normed)}")
        notes += " A norm's gradient moves three tensors where a copy moves two; shares of a copy count that."
    return "\n\n".join([*blocks, notes])


def _block(found: dict[tuple[str, str, str, str], Group]) -> str:
    """Show the summary and the table of some groups."""
    large = [group[OURS]["of_copy"] for group in found.values() if group[OURS]["bytes"] >= _PAST_L2]
    rivals = [name for name in PROVIDERS if name not in (OURS, COPY) and any(name in group for group in found.values())]
    words = []
    if large:
        words.append(
            f"Of the bandwidth of a copy, tensors past the L2 get {100 * min(large):.0f} to {100 * max(large):.0f} %."
        )
    for name in rivals:
        ratios = [faster(group[name], group[OURS]) for group in found.values() if name in group]
        even = sum(value >= EVEN for value in ratios)
        words.append(
            f"{PROVIDERS[name].label}: not slower at {even} of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}×."
        )
    header = ["", "`apply_rope`, ms", "of a copy, %", *(PROVIDERS[name].label for name in rivals)]
    lines = []
    for case, shape in dict.fromkeys(key[:2] for key in found):
        passes = [found[key] for part in PASSES if (key := (case, shape, part, "graph")) in found]
        mine = passes[0][OURS]
        # Show of the wide shape the first and the last length, of the models the style that they use.
        if mine["length"] not in (256, 1024) if "wide" in mine["groups"] else mine["style"] != "half":
            continue
        times = " / ".join(f"{group[OURS]['ms']:#.3g}" for group in passes)
        lines.append(
            [f"{case} ({shape})", times, " / ".join(f"{100 * group[OURS]['of_copy']:.0f}" for group in passes)]
        )
        for name in rivals:
            beside = [group for group in passes if name in group]
            values = " / ".join(f"{faster(group[name], group[OURS]):.2f}" for group in beside)
            loose = any(group[name]["status"] == "loose" for group in beside)
            lines[-1].append(values + "×" * bool(values) + " ~" * loose)
    return f"{' '.join(words)}\n\n{markdown(header, lines)}"


_COLOURS = {
    "liger": "#f2a33a",
    "flash_attn": "#2fae58",
    "compiled": "#3f8fd6",
    "hf": "#96a0a9",
    COPY: "#8d6e63",
    OURS: "#e5383b",
}


def draw(rows: list[Row], mode: str) -> dict[str, Any]:
    """Return ``rope_wide``: GB/s over the length."""
    rows = [row for row in rows if "wide" in row["groups"]]
    panels = {}
    for dtype, style in dict.fromkeys((row["dtype"], row["style"]) for row in rows):
        for part, words in PASSES.items():
            here = [r for r in rows if (r["dtype"], r["style"], r["pass"]) == (dtype, style, part)]
            series = []
            for name, colour in _COLOURS.items():
                if points := [(row["length"], row["gb_s"]) for row in here if row["provider"] == name]:
                    series.append(Series(PROVIDERS[name].label, colour, points, name == COPY, name == OURS))
            panels[f"{dtype}, {style}, {words}"] = series
    title = f"Rotation alone, 10 x 96 heads x 128: {rows[0]['gpu']}" if rows else ""
    return {"rope_wide": plots.lines(panels, title, "GB/s")}
