"""The generated table and the plot of context parallelism."""

from __future__ import annotations

from pathlib import Path

from bench.names import length_name
from bench.plots import STYLE, pyplot, save
from bench.report import PASSES, Row, markdown, provenance, timed


def results(rows: list[Row]) -> str:
    """Show a line for each case, number of ranks and provider. ValueError where no row is a time of ours."""
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
        most = max(
            cells[case, shape, label, part]["peak_mib"] for part in PASSES if (case, shape, label, part) in cells
        )
        lines.append([*line, f"{most:.0f}"])
    header = ["case", "GPUs", "", "forward, ms", "of one GPU / P", "backward, ms", "of one GPU / P", "MiB"]
    return (
        f"{markdown(header, lines)}\n\n"
        "Eager calls, of the rank that takes longest. One GPU / P: one GPU's time for the whole sequence divided by "
        "the number of GPUs, over this time, so that 100 % is ideal. MiB: beyond the inputs, of the pass and the "
        f"rank that take most. {provenance(rows)}"
    )


def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """Draw efficiency over the length: a panel for each kind and pass, a line for each number of ranks and provider."""
    rows = [row for row in rows if "efficiency" in row]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if not kinds:
        return []
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(kinds), figsize=(5 * len(kinds), 7), squeeze=False, sharey=True)
        for i, part in enumerate(PASSES):
            for axis, kind in zip(axes[i], kinds):
                chosen = [r for r in rows if r["kind"] == kind and r["pass"] == part]
                for label, shape in dict.fromkeys((r["label"], r["shape"]) for r in chosen):
                    of = [r for r in chosen if (r["label"], r["shape"]) == (label, shape)]
                    line = sorted((r["length"], 100 * r["efficiency"]) for r in of)
                    axis.plot(*zip(*line), marker="o", label=f"{label}, {shape}")
                lengths = sorted({r["length"] for r in chosen})
                axis.set_xscale("log", base=2)
                axis.set_xticks(lengths, [length_name(length) for length in lengths])
                axis.axhline(100, color="#343a40", linewidth=1.2)
                axis.set_title(f"{kind}, {PASSES[part]}")
                axis.set_xlabel("tokens")
                axis.legend()
            axes[i][0].set_ylabel("% of one GPU's time / P")
        figure.suptitle(f"One sequence over several GPUs: {rows[0]['gpu']}", fontsize=16, fontweight="bold")
        figure.tight_layout()
        return save({"context_parallel": figure}, directory, "eager")
