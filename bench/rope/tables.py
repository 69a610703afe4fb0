"""The generated block of the documents about the rotation, and its plots."""

from __future__ import annotations

from typing import Any

from bench import plots
from bench.plots import Series
from bench.report import PASSES, Group, Row, both, by_case, faster, legend, markdown, provenance, times_ours
from bench.rope.providers import COPY, OURS, PROVIDERS
from bench.timing import EVEN

# A tensor of half of these bytes is larger than the L2 of any card in the configuration table.
_PAST_L2 = 256 << 20


def results(rows: list[Row]) -> str:
    """Show summary, table and notes. ValueError without CUDA-graph times of ours and of the copy."""
    found = by_case(rows, "graph", OURS)
    every = [group for passes in found.values() for group in passes]
    if not every or not all(COPY in group for group in every):
        raise ValueError("rows must hold CUDA-graph times of apply_rope and of the copy")
    title, notes = "", ""
    if any(group[OURS].get("norms") for group in every):
        title = "`apply_rope_qk` with norms of q and k:\n\n"
        notes = " A norm's gradient moves three tensors where a copy moves two; shares of a copy count that."
    return (
        f"{title}{_block(found)}\n\n"
        "Forward / backward. ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs, L2 flushed. "
        f"{legend(row for group in every for row in group.values())}"
        f"{provenance(rows, 'transformers', 'liger-kernel')}{notes}"
    )


def _block(found: dict[tuple[str, str], list[Group]]) -> str:
    """Show the summary and the table of some cases."""
    every = [group for passes in found.values() for group in passes]
    rivals = [name for name in PROVIDERS if name not in (OURS, COPY) and any(name in group for group in every)]
    words = []
    if large := [100 * group[OURS]["of_copy"] for group in every if group[OURS]["bytes"] >= _PAST_L2]:
        words.append(f"Tensors larger than the L2 get {min(large):.0f} to {max(large):.0f} % of a copy's bandwidth.")
    for name in rivals:
        ratios = [faster(group[name], group[OURS]) for group in every if name in group]
        count = f"{sum(value >= EVEN for value in ratios)} of {len(ratios)}"
        words.append(f"{PROVIDERS[name].label}: not slower at {count}, {min(ratios):.2f} to {max(ratios):.2f}×.")
    lines = []
    for (case, shape), passes in found.items():
        mine = passes[0][OURS]
        # Show of the wide shape the first and the last length, of the models the style that they use.
        if mine["length"] in (256, 1024) if "wide" in mine["groups"] else mine["style"] == "half":
            lines.append([f"{case} ({shape})", both(passes, OURS, lambda row: f"{row['ms']:#.3g}")])
            lines[-1].append(both(passes, OURS, lambda row: f"{100 * row['of_copy']:.0f}"))
            lines[-1] += [times_ours(passes, name, OURS) for name in rivals]
    header = ["", "`apply_rope`, ms", "of a copy, %", *(PROVIDERS[name].label for name in rivals)]
    return f"{' '.join(words)}\n\n{markdown(header, lines)}"


_COLOURS = {
    "liger": "#f2a33a",
    "compiled": "#3f8fd6",
    "hf": "#96a0a9",
    COPY: "#8d6e63",
    OURS: "#e5383b",
}


def draw(rows: list[Row]) -> Any:
    """Draw GB/s over the length for the wide shape."""
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
    return plots.lines(panels, f"Rotation alone, 10 x 96 heads x 128: {rows[0]['gpu']}", "GB/s")
