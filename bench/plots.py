"""The two kinds of plots that suites draw: lines over a length, and points of their time over ours. Needs matplotlib.

Text is nearly black on white, because no single colour of text contrasts well with both a light and a dark page: on a
dark page a figure is a white card. Figures are narrow, so that their text can be read at a width of 400 pixels. There
are two columns of panels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench.suite import length_name
from bench.timing import EVEN

_WIDTH = 6.5  # inches
_GREY = "#7d8590"
_TEXT = "#1f2328"
_LOSS = "#d7263d"
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.dpi": 200,
    "grid.color": _GREY,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT)
_TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)


class Series(NamedTuple):
    """Points of one label. dashed: nothing rotates, or nothing is computed. bold: ours, or what is to be noticed."""

    label: str
    colour: str
    points: Sequence[tuple[Any, float]]
    dashed: bool = False
    bold: bool = False


Panels = Mapping[str, Sequence[Series]]


@contextmanager
def _grid(panels: Panels, title: str, height: float) -> Iterator[tuple[Any, Any]]:
    """Yield (figure, axes), ``height`` inches for each line of panels; then add titles and one legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = math.ceil(len(panels) / 2)
    labels = len({one.label for series in panels.values() for one in series})
    size = _WIDTH, height * lines + 0.8 + 0.25 * labels / 2
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(lines, 2, sharey=True, squeeze=False)
        yield figure, axes
        for axis, name in zip(axes.flat, panels):
            axis.set_title(name)
        found = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
        columns = 2 if max(map(len, found)) < 40 else 1
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
        figure.suptitle(title, fontsize=13, fontweight="bold")


def lines(panels: Panels, title: str, ylabel: str, level: float | None = None) -> Any:
    """Draw a line for each series over lengths. level: where a horizontal line is drawn."""
    with _grid(panels, title, 2.2) as (figure, axes):
        for axis, series in zip(axes.flat, panels.values()):
            for one in series:
                drawn = {"linestyle": "--" if one.dashed else "-", "marker": "" if one.dashed else "o", "markersize": 4}
                drawn |= {"linewidth": 3.0, "zorder": 5} if one.bold else {"linewidth": 1.7, "zorder": 3}
                axis.plot(*zip(*sorted(one.points)), label=one.label, color=one.colour, **drawn)
            lengths = sorted({length for one in series for length, _ in one.points})
            ticks = [length for length in lengths if length & (length - 1) == 0]
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [length_name(length) for length in ticks])
            axis.minorticks_off()
            if level is not None:
                axis.axhline(level, color=_GREY, linewidth=1.2)
        axes[0, 0].set_ylim(bottom=0)  # of all panels, after all lines: it ends the choice of the upper limit
        for axis in axes[:, 0]:
            axis.set_ylabel(ylabel)
        for axis in axes[-1]:
            axis.set_xlabel("tokens")
    return figure


def ratios(panels: Panels, title: str, xlabel: str) -> Any:
    """Draw a point for each ratio of theirs over ours, a line for each case.

    The side of 1 on which ours is slower is shaded. The ratios of a bold series are also written at the right.
    """
    cases = list(dict.fromkeys(case for series in panels.values() for one in series for case, _ in one.points))
    values = [value for series in panels.values() for one in series for _, value in one.points]
    low, high = min(0.85, 0.9 * min(values)), max(1.2, 1.1 * max(values))
    with _grid(panels, title, 0.6 + 0.24 * len(cases)) as (figure, axes):
        for axis, series in zip(axes.flat, panels.values()):
            for index, one in enumerate(series):
                for case, value in one.points:
                    y = cases.index(case) + 0.18 * (index - (len(series) - 1) / 2)
                    filled = "none" if one.dashed else one.colour
                    axis.scatter(value, y, s=26, color=one.colour, facecolor=filled, zorder=4, label=one.label)
                    if one.bold:
                        where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 9}
                        colour = _LOSS if value < EVEN else one.colour
                        axis.text(1.01, cases.index(case), f"{value:.2f}", color=colour, **where)
            axis.set_xscale("log")
            axis.set_xlim(low, high)
            ticks = [tick for tick in _TICKS if low < tick < high]
            axis.set_xticks(ticks if len(ticks) < 6 else ticks[::2], minor=False)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.minorticks_off()
            axis.axvspan(low, 1, color=_LOSS, alpha=0.1, linewidth=0)
            axis.axvline(1, color=_GREY, linewidth=1.2)
            axis.set_yticks(range(len(cases)), cases, fontsize=10)
            axis.set_ylim(len(cases) - 0.4, -0.6)
        for axis in axes[-1]:
            axis.set_xlabel(xlabel)
    return figure
