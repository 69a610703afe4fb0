"""The generated table of the documents."""

from __future__ import annotations

from bench.report import PASSES, Row, timed
from bench.tables import markdown, provenance


def results(rows: list[Row]) -> str:
    """A line for each case, number of ranks and provider. ValueError where no row is a time of ours."""
    found = timed(rows)
    if not any(row["provider"] == "fused" for row in found):
        raise ValueError("rows must hold times of context parallelism")
    cells = {(row["case"], row["shape"], row["label"], row["pass"]): row for row in found}
    lines = []
    for case, shape, label in dict.fromkeys(key[:3] for key in cells):
        line = [case, shape.removeprefix("P="), label]
        for part in PASSES:
            row = cells.get((case, shape, label, part))
            share = None if row is None else row.get("efficiency")
            line.append("" if row is None else f"{row['ms']:.3g}")
            line.append("" if share is None else f"{100 * share:.1f} %")
        most = max(cells[case, shape, label, part]["mib"] for part in PASSES if (case, shape, label, part) in cells)
        lines.append([*line, f"{most:.0f}"])
    header = ["case", "GPUs", "", "forward, ms", "of one GPU / P", "backward, ms", "of one GPU / P", "MiB"]
    return (
        f"{markdown(header, lines)}\n\n"
        "Eager calls, of the rank that takes longest. One GPU / P: one GPU's time for the whole sequence divided by "
        "the number of GPUs, over this time, so that 100 % is ideal. MiB: beyond the inputs, of the pass and the "
        f"rank that take most. {provenance(rows)}"
    )
