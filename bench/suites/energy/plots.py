"""The plot of energy: milliseconds and millijoules of every provider beside each other, over ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.attention.colours import COLOURS
from bench.attention.standing import ours
from bench.plots import STYLE, pyplot, ratio_bar, save
from bench.report import PASSES, Row, milliseconds, timed
from bench.suites.energy.report import against, millijoules

_WIDTH = 0.82  # of the bars of one case


def draw(rows: list[Row], directory: Path) -> list[Path]:
    """A figure for each pass; returns the files."""
    return save({f"energy_{part}": beside(timed(rows, part), part) for part in PASSES}, directory, "load")


def beside(rows: list[Row], part: str) -> Any:
    """Above the times, below the energies: a bar for each rival over ours at each case. None without a case that has
    both."""
    groups = {case: [row for row in rows if row["case"] == case] for case in dict.fromkeys(row["case"] for row in rows)}
    mine = {case: ours(group, "mj") for case, group in groups.items()}
    groups = {case: [row for row in group if not row["ours"]] for case, group in groups.items() if mine[case]}
    names = [name for name in COLOURS if any(row["provider"] == name for group in groups.values() for row in group)]
    if not names:
        return None
    plt, width = pyplot(), _WIDTH / len(names)
    labels = {row["provider"]: row["label"] for row in rows}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 1, figsize=(13.0, 7.3), sharex=True, layout="constrained")
        for panel, (axis, what) in enumerate(zip(axes, ("time", "energy"))):
            for index, name in enumerate(names):
                shift = (index - (len(names) - 1) / 2) * width
                for position, (case, group) in enumerate(groups.items()):
                    for row in group:
                        if row["provider"] == name:
                            ratio_bar(axis, position + shift, against(row, mine[case])[panel], width, COLOURS[name], 8)
            axis.axhline(1.0, color="#222222", linewidth=1.2)
            axis.set_ylabel(f"their {what} / ours")
            axis.margins(y=0.15)
            axis.grid(axis="x", visible=False)
        shown = {case: (milliseconds(mine[case]["ms"]), millijoules(mine[case]["mj"])) for case in groups}
        ticks = [f"{case}\n{ms} ms\n{mj} mJ" for case, (ms, mj) in shown.items()]
        axes[-1].set_xticks(range(len(ticks)), ticks, fontsize=10)
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
        figure.legend(handles, [labels[name] for name in names], loc="outside lower center", ncols=4)
        title = f"Time and energy of a call under load, {PASSES[part]}: {rows[0]['gpu']}, {rows[0]['dtype']}"
        figure.suptitle(f"{title} (hatched: ours takes more)", fontsize=15, fontweight="bold")
    return figure
