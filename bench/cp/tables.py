"""The generated table and the plot of context parallelism."""

from __future__ import annotations

import itertools
from typing import Any

from bench import plots
from bench.plots import Series
from bench.report import PASSES, Row, by_provider, markdown, provenance


def results(rows: list[Row]) -> str:
    """Show a line for each case, number of ranks and provider. ValueError where no row is a time of ours."""
    found = by_provider(rows)
    if not any(provider == "fused" for _, _, provider in found):
        raise ValueError("rows must hold times of context parallelism")
    lines = []
    for (case, shape, _), passes in found.items():
        label = next(iter(passes.values()))["label"]
        lines.append([case, shape.removeprefix("P="), label])
        for row in map(passes.get, PASSES):
            share = row and row.get("efficiency")
            lines[-1] += [f"{row['ms']:.3g}" if row else "", f"{100 * share:.1f} %" if share else ""]
        lines[-1].append(f"{max(row['peak_mib'] for row in passes.values()):.0f}")
    header = ["case", "GPUs", "", "forward, ms", "of one GPU / P", "backward, ms", "of one GPU / P", "MiB"]
    return (
        f"{markdown(header, lines)}\n\n"
        "Eager calls, of the rank that takes longest. One GPU / P: one GPU's time for the whole sequence divided by "
        "the number of GPUs, over this time, so that 100 % is ideal. MiB: beyond the inputs, of the pass and the "
        f"rank that take most. {provenance(rows)}"
    )


_COLOURS = ("#e5383b", "#3f8fd6", "#2fae58", "#f2a33a", "#8e7cc3", "#17a2a2")


def draw(rows: list[Row]) -> Any:
    """Draw efficiency over the length, a line for each number of ranks and provider."""
    rows = [row for row in rows if "efficiency" in row]
    who = list(dict.fromkeys((row["label"], row["shape"]) for row in rows))
    panels = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for part, words in PASSES.items():
            here = [row for row in rows if row["kind"] == kind and row["pass"] == part]
            series = []
            for colour, key in zip(itertools.cycle(_COLOURS), who):
                found = [(r["length"], 100 * r["efficiency"]) for r in here if (r["label"], r["shape"]) == key]
                series += [Series(", ".join(key), colour, found)] if found else []
            panels[f"{kind}, {words}"] = series
    title = f"One sequence over several GPUs: {rows[0]['gpu']}"
    return plots.lines(panels, title, "% of one GPU's time / P", level=100)
