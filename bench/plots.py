"""Common parts of all plots: style, size, files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.timing import EVEN

_DPI = 150
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6e8",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.color": "white",
}


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing into memory. RuntimeError where it is absent."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figures: Mapping[str, Any], directory: Path, mode: str) -> list[Path]:
    """Write every figure that is not None as ``NAME_MODE.png``, close it, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        if figure is not None:
            path = directory / f"{name}_{mode}.png"
            figure.savefig(path, dpi=_DPI, facecolor="white")
            pyplot().close(figure)
            files.append(path)
    return files


def handles(colours: Iterable[str]) -> list[Any]:
    """Return patches of these colours for a legend."""
    return [pyplot().Rectangle((0, 0), 1, 1, color=colour) for colour in colours]


def ratio_bar(axis: Any, x: float, value: float, width: float, colour: str, fontsize: float) -> None:
    """Draw a bar from 1 to ``value`` (theirs over ours) with its number; below 1 it is hatched and its number red."""
    lost = value < EVEN
    hatch = "//" if lost else None
    axis.bar(x, value - 1, width * 0.94, bottom=1, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
    axis.annotate(
        f"{value:.2f}",
        (x, value),
        xytext=(0, -3 if lost else 3),
        textcoords="offset points",
        ha="center",
        va="top" if lost else "bottom",
        fontsize=fontsize,
        color="#b00020" if lost else "#222222",
    )
