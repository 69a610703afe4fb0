"""The figure of ``python -m bench cp``."""

from __future__ import annotations

from pathlib import Path

from bench.names import length_name
from bench.plots import STYLE, pyplot, save
from bench.report import PASSES, Row
from bench.suites.context_parallel.cases import KINDS


def draw(rows: list[Row], directory: Path) -> list[Path]:
    """Efficiency over the length: a panel for each kind and pass, a line for each number of ranks and provider."""
    plt = pyplot()
    kinds = [kind for kind in KINDS if any(row["kind"] == kind and "efficiency" in row for row in rows)]
    if not kinds:
        return []
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(kinds), figsize=(5 * len(kinds), 7), squeeze=False, sharey=True)
        for i, part in enumerate(("fwd", "bwd")):
            for axis, kind in zip(axes[i], kinds):
                chosen = [r for r in rows if r["kind"] == kind and r["pass"] == part and "efficiency" in r]
                for label, shape in dict.fromkeys((r["label"], r["shape"]) for r in chosen):
                    line = sorted(
                        (r["length"], r["efficiency"]) for r in chosen if (r["label"], r["shape"]) == (label, shape)
                    )
                    axis.plot([x for x, _ in line], [100 * y for _, y in line], marker="o", label=f"{label}, {shape}")
                lengths = sorted({r["length"] for r in chosen})
                axis.set_xscale("log", base=2)
                axis.set_xticks(lengths, [length_name(length) for length in lengths])
                axis.axhline(100, color="#343a40", linewidth=1.2)
                axis.set_title(f"{kind}, {PASSES[part]}")
                axis.set_xlabel("tokens")
                axis.legend()
            axes[i][0].set_ylabel("% of one GPU's time / P")
        gpu = next(r["gpu"] for r in rows if "gpu" in r)
        figure.suptitle(f"One sequence over several GPUs: {gpu}", fontsize=16, fontweight="bold")
        figure.tight_layout()
        return save({"context_parallel": figure}, directory, "eager")
